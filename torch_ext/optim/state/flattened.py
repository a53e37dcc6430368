"""Flattened state dicts (StateDictOptions(flatten_optimizer_state_dict=True)) of states that are stored encoded.

Note: keys of flattened state dicts. When torch loads one, it takes the keys that it finds in opt.state[p] and in the
groups. But stored states have other keys than the logical states in the dict (a remainder instead of a master), and
groups have lists that are not saved. So torch's function is patched: instead of an optimizer of ours it gets an object
that has the dict's keys (`_LogicalKeys`).
"""

import functools
import sys
from typing import Any

from torch_ext.optim.state.state_dtypes import first_moment
from torch_ext.optim.state.stateful import StatefulOptimizer, params_of
from torch_ext.params import keep_32bit

_MODULE = "torch.distributed.checkpoint.state_dict"
_FUNCTION = "_unflatten_optim_state_dict"
_PATCHED = "_torch_ext_patched"


class _LogicalKeys:
    """The attributes of an optimizer that torch's function reads, with the keys of logical states."""

    def __init__(self, optimizer: StatefulOptimizer) -> None:
        self.param_groups = keep_32bit.without_own_keys(optimizer.param_groups)
        self.state = {
            p.param: ("step", *p.kinds.logical()) if first_moment(p.stored) is not None else tuple(p.stored)
            for p in params_of(optimizer)
        }


def patch() -> None:
    """Patches torch's function, if its module has been imported. May be called again."""
    module = sys.modules.get(_MODULE)
    theirs = getattr(module, _FUNCTION, None)
    if theirs is None or hasattr(theirs, _PATCHED):
        return

    @functools.wraps(theirs)
    def _unflatten_optim_state_dict(optim: Any, *arguments: Any, **options: Any) -> Any:
        return theirs(_LogicalKeys(optim) if hasattr(optim, "stored_state") else optim, *arguments, **options)

    setattr(_unflatten_optim_state_dict, _PATCHED, True)
    setattr(module, _FUNCTION, _unflatten_optim_state_dict)
