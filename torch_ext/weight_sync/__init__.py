"""Weights from a training to the engines that generate with them, as what changed since the last time."""
