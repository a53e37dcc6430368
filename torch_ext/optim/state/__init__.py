"""Optimizer state: how it lies at rest, is decoded, saved and loaded."""
