"""Files and folders of checkpoints."""
