"""Gradients as numbers: norms, non-finite elements, and the errors about missing ones."""
