"""python -m torch_ext: info and plan."""
