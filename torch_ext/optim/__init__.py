"""AdamW, Adam and Muon, for parameters in the dtypes of a policy."""
