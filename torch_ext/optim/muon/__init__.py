"""Muon: the step of matrices; everything else of a model goes through AdamW's fused step."""
