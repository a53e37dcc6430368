"""Muon: what steps whole matrices, beside AdamW's fused step."""
