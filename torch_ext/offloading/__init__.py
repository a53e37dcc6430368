"""Moves weights, gradients and optimizer states out of the device's memory, and back."""
