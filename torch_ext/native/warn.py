"""Warnings at the line of whoever called this package, where they can do something about it."""

import os
import sys
import warnings

import torch

_NOT_THE_CALLER = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """`message` begins with what it is about; that it comes from torch_ext is added. Not in sight of the caller: frames
    of this package, and those of torch between the caller and it, as around every optimizer's step."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"torch_ext: {message}", category, stacklevel=level)
