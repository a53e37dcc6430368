"""Weights, gradients and states leave the device and come back."""
