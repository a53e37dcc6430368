"""The average of an optimizer's masters (ema_decay): as a state_dict, and swapped into the model."""

import contextlib
from collections.abc import Iterator
from threading import get_ident
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
    """An optimizer that keeps an average (ema_decay), as torch.optim.swa_utils.AveragedModel does of a model."""

    @of_the_innermost
    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Replaces the model's weights by their averages, rounded to nearest, while the block runs (under no_grad): to
        evaluate or save the model.

            with opt.ema_weights():
                evaluate(model)

        Afterwards the weights are restored, bit for bit, also where the block raises; writes to them inside are lost.
        Takes memory for one more copy of this rank's weights. Where parameters are sharded over the ranks every rank
        must enter, and entering and leaving are collective. step() inside raises RuntimeError, and so does a call
        without ema_decay.
        """
        self._refuse_without_average("ema_weights()")
        self.refuse_between("ema_weights()")
        self._open, self._opened_by = "ema_weights(), where parameters hold their averages", get_ident()
        try:
            self.writing_calls.refuse("ema_weights()")  # after `_open` is set, which a step that begins now finds
            with torch.no_grad(), _averages_as_params(self._states):
                yield
        finally:
            self._open = ""

    @untraced
    @of_the_innermost
    def ema_state_dict(self) -> dict[str | int, Any]:
        """Returns the average of each parameter in fp32. Keys are parameter names, or positions where the optimizer
        does not know names. Values are tensors like those of `state_dict()`; they must not be written to. They are the
        weights before the first step that updates the average (see ema_every). RuntimeError without ema_decay."""
        self._refuse_without_average("ema_state_dict()")
        return save.averages(self, self._logical_state_dict("ema_state_dict()"))

    def _refuse_without_average(self, doing: str) -> None:
        self._refuse_open(doing)
        if self.averaging.dtype is None:
            raise RuntimeError(f"{doing}: there is no average; make the optimizer with ema_decay=0.9999, say")


@contextlib.contextmanager
def _averages_as_params(states: OptimizerStates) -> Iterator[None]:
    """Writes averages to the weights, and the weights back at the end. Collective where parameters are sharded."""
    all_params = states.all_params()
    members = states.members(all_params, [p.requires_grad or states.has_state(p) for p in all_params])
    weights = [m.weight.detach().clone() for m in members]
    there, back = (Gathers(members, "ema_weights()") for _ in range(2))
    try:
        _write(members, [_average_of(m, states.optimizer.averaging) for m in members], there)
        yield
    finally:  # these writes make the next step compare weights with masters: it finds what it would have found anyway
        complete(lambda: _write(members, weights, back))


def _average_of(m: ParamState, averaging: Averaging) -> Tensor:
    """Returns the average, or the weight itself before the first step that makes an average."""
    return codec.decode(m.weight, m.state, m.kinds, EMA) if averaging.has_begun(m.state) else m.weight.detach()


def _write(members: list[ParamState], values: list[Tensor], gathers: Gathers) -> None:
    """Copies the values to the weights that this rank steps, and all-gathers these to the ranks that have copies."""
    for m, value in zip(members, values, strict=True):
        m.weight.detach().copy_(value)
    gathers.run()
    torch.autograd.graph.increment_version([m.param for m in members])
