"""Optimizer state: how it is stored, decoded, saved and loaded."""
