"""python -m torch_ext: info, plan, doctor and checkpoint."""
