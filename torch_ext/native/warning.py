"""Warnings that name the line of the user's that led to them."""

import sys
import warnings

_OURS = ("torch", "torch_ext")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Of the innermost call that comes from neither torch nor torch_ext: a step is called through torch's hooks and
    torch.compile's guard, so that no fixed number of frames leads there."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"torch_ext: {message}", category, stacklevel=level)
