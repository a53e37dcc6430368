"""What torch.optim.Adam and AdamW keep of a state of ours: all but masters, of which their steps know nothing.

They load every key that an entry has, cast to the parameter's dtype, and save it again: a copy of the weights that is
never brought up to date.
"""

import functools
from typing import Any

import torch
from torch import Tensor

_ROUTED = "_torch_ext_routed"


def pass_over_masters() -> None:
    """From here on torch.optim.Adam and AdamW load a state without its masters. Again and again is as good as once."""
    theirs = torch.optim.Adam.__setstate__
    if hasattr(theirs, _ROUTED):
        return

    @functools.wraps(theirs)
    def __setstate__(self: torch.optim.Adam, state: dict[str, Any]) -> None:
        if type(self) in (torch.optim.Adam, torch.optim.AdamW):  # classes made of these may have masters of their own
            for param, entry in state.get("state", {}).items():
                if isinstance(param, Tensor) and isinstance(entry, dict):
                    entry.pop("master_param", None)
        theirs(self, state)

    setattr(__setstate__, _ROUTED, True)
    torch.optim.Adam.__setstate__ = __setstate__  # type: ignore[method-assign]
