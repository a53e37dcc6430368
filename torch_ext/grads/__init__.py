"""Gradients: norms, checks for non-finite elements, and errors about gradients."""
