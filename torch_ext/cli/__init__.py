"""python -m torch_ext: info, plan and doctor."""
