"""Helpers for tensors: which can be trained, their memory order, and the memory under them."""
