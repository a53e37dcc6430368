"""torch.optim.Adam and AdamW load a state of ours without its masters, which their steps do not update.

They would load every key, cast to the parameter's dtype, and save it again: an outdated copy of the weights.
"""

import functools
from typing import Any

import torch
from torch import Tensor

_PATCHED = "_torch_ext_patched"


def drop_masters() -> None:
    """Patches torch.optim.Adam.__setstate__. May be called again."""
    theirs = torch.optim.Adam.__setstate__
    if hasattr(theirs, _PATCHED):
        return

    @functools.wraps(theirs)
    def __setstate__(self: torch.optim.Adam, state: dict[str, Any]) -> None:
        if type(self) in (torch.optim.Adam, torch.optim.AdamW):  # subclasses may have masters of their own
            for param, entry in state.get("state", {}).items():
                if isinstance(param, Tensor) and isinstance(entry, dict):
                    entry.pop("master_param", None)
        theirs(self, state)

    setattr(__setstate__, _PATCHED, True)
    torch.optim.Adam.__setstate__ = __setstate__  # type: ignore[method-assign]
