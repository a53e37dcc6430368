"""The commands of `python -m torch_ext`: info, plan, doctor, checkpoint and config."""
