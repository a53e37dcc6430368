"""Sends weights from a trainer to inference engines as deltas: what changed since the previous version."""
