"""Warnings that point at the line of the user's program that caused them."""

import sys
import warnings

_OURS = ("torch", "torch_ext")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost frame that is neither torch's nor torch_ext's. A fixed stacklevel would not do: a step is
    called through torch's hooks and torch.compile's guard, so the number of frames varies."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"torch_ext: {message}", category, stacklevel=level)
