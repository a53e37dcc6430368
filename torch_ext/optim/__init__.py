"""AdamW and Adam: one fused step over parameters in the dtypes of a policy."""
