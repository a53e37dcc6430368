"""The average of its masters that an optimizer keeps: handed out, and swapped into the model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_ext.native.completion import complete
from torch_ext.native.untraced import untraced
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.optimizer_states import OptimizerStates
from torch_ext.optim.state import codec, save
from torch_ext.optim.state.averaging import Averaging
from torch_ext.optim.state.gathers import Gathers
from torch_ext.optim.state.param_state import ParamState
from torch_ext.optim.state.state_dtypes import EMA
from torch_ext.params.param_groups import of_the_innermost


class AveragingOptimizer(OptimizerBase):
    """With ema_decay: what torch.optim.swa_utils.AveragedModel keeps beside the model."""

    @of_the_innermost
    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The model's weights are the averages, rounded to nearest, while the block runs (under no_grad): to evaluate
        or save it.

            with opt.ema_weights():
                evaluate(model)

        Afterwards they are what they were, bit for bit, also where the block raises; what was written to them inside is
        lost. Takes memory for one more copy of this rank's weights. Where parameters are cut over the ranks every rank
        enters, and entering and leaving are collective. A step inside is a RuntimeError, and so is a call without
        ema_decay.
        """
        self._refuse_without_average("ema_weights()")
        self.refuse_between("ema_weights()")
        self._open = "ema_weights(), where parameters hold their averages"
        try:
            with torch.no_grad(), _swapped(self._states):
                yield
        finally:
            self._open = ""

    @untraced
    @of_the_innermost
    def ema_state_dict(self) -> dict[str | int, Any]:
        """The average of each parameter in fp32, with the keys of `master_state_dict()`: parameter names, or positions
        where the optimizer does not know names. Tensors as those of `state_dict()`, to be read, not written. Before the
        first step (of those that ema_every counts) it is the weights. RuntimeError without ema_decay."""
        self._refuse_without_average("ema_state_dict()")
        return save.averages(self, self._logical_state_dict("ema_state_dict()"))

    def _refuse_without_average(self, doing: str) -> None:
        self._refuse_open(doing)
        if self.averaging.dtype is None:
            raise RuntimeError(f"{doing}: there is no average; make the optimizer with ema_decay=0.9999, say")


@contextlib.contextmanager
def _swapped(states: OptimizerStates) -> Iterator[None]:
    everyone = states.everyone()
    members = states.members(everyone, [p.requires_grad or states.is_made(p) for p in everyone])
    weights = [m.weight.detach().clone() for m in members]
    there, back = (Gathers(members, "ema_weights()") for _ in range(2))
    try:
        _write(members, [_average_of(m, states.optimizer.averaging) for m in members], there)
        yield
    finally:  # the next step compares them with their masters, and finds what it would have found
        complete(lambda: _write(members, weights, back))


def _average_of(m: ParamState, averaging: Averaging) -> Tensor:
    """The weight itself before the first step that makes one."""
    return codec.decode(m.weight, m.state, m.kinds, EMA) if averaging.begun(m.state) else m.weight.detach()


def _write(members: list[ParamState], values: list[Tensor], gathers: Gathers) -> None:
    """To the weights that this rank steps, and from there to the ranks that have copies of them."""
    for m, value in zip(members, values, strict=True):
        m.weight.detach().copy_(value)
    gathers.run()
    torch.autograd.graph.increment_version([m.param for m in members])
