"""Weights, gradients and optimizer states are moved out of the device's memory, and back."""
