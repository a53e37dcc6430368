"""What the other packages need to know of tensors: which can be trained, how they lie in memory, where it is."""
