"""Makes torch.optim.Adam, AdamW and Muon drop masters and averages when they load a state of ours.

They would load every key, cast it to the parameter's dtype, and save it again. But their steps do not update masters:
what they save would be an outdated copy of the weights.
"""

import functools
from typing import Any

import torch
from torch import Tensor

_PATCHED = "_torch_ext_patched"


def drop_masters() -> None:
    """Patches __setstate__ of torch.optim.Adam and Muon. May be called again."""
    # Only these very classes: a subclass may have masters of its own.
    _patch(torch.optim.Adam, (torch.optim.Adam, torch.optim.AdamW), ("master_param", "ema_param"))
    _patch(torch.optim.Muon, (torch.optim.Muon,), ("master_param", "ema_param", "step"))


def _patch(owner: type[torch.optim.Optimizer], kinds: tuple[type, ...], dropped: tuple[str, ...]) -> None:
    """Makes owner.__setstate__ remove the `dropped` keys, for optimizers whose type is in `kinds`."""
    theirs = owner.__setstate__
    if hasattr(theirs, _PATCHED):
        return

    @functools.wraps(theirs)
    def __setstate__(self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if type(self) in kinds:
            for param, entry in state.get("state", {}).items():
                if isinstance(param, Tensor) and isinstance(entry, dict):
                    for key in dropped:
                        entry.pop(key, None)
        theirs(self, state)

    setattr(__setstate__, _PATCHED, True)
    owner.__setstate__ = __setstate__  # type: ignore[method-assign]
