"""The states and masters that are stored on the host while their parameters are on a device (`offload_fraction`).

Such a parameter has its only master here. opt.state has its step only; if that is removed (by opt.state.clear(), say),
the state here is dropped, too. Weights are on the device.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.native import library
from torch_ext.optim.cpu_offload.copies import Buffers, copies_of
from torch_ext.optim.cpu_offload.host_step import HostPlan
from torch_ext.optim.state import access
from torch_ext.optim.state.averaging import Averaging
from torch_ext.optim.state.param_state import AllGatherTarget, ParamState


class HostStates:
    """The states of an optimizer that are stored on the host."""

    def __init__(self, fraction: float) -> None:
        """fraction: the share of the bytes of states and masters. ValueError unless it is in [0, 1]."""
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(f"offload_fraction is {fraction!r}; a number in [0, 1] is legal")
        self.fraction = float(fraction)
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._buffers: Buffers | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_buffers": None}

    def choose(self, n: int, size_of: Callable[[int], int]) -> list[bool]:
        """Returns for each of n parameters whether it is stepped on the host. size_of: the bytes of state and master of
        this rank's part of a parameter, whether they exist yet or not; 0 for a frozen parameter."""
        if self.fraction == 0:
            return [False] * n
        return choose(list(map(size_of, range(n))), self.fraction)

    # -- states

    def peek(self, p: Tensor, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the stored state of p, wherever it is. entry: p's entry in opt.state."""
        held = self._states.get(p)
        return entry if held is None or "step" not in entry else {**held, **entry}

    def entry(self, state: dict[Tensor, dict[str, Any]], p: Tensor, here: bool) -> dict[str, Any]:
        """Returns the stored state of p, after moving it to the host (`here`) or to the parameter's device."""
        entry = access.entry(state, p)
        if not here:
            held = self._states.pop(p, {})
            entry.update({key: value.to(p.device) for key, value in held.items()} if "step" in entry else {})
            return entry
        held = self._states.setdefault(p, {})
        if "step" not in entry:  # there is no state, or code outside the optimizer has dropped it
            held.clear()
            entry["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for key in [key for key in entry if key != "step"]:
            held[key] = entry.pop(key).cpu()
        entry["step"] = held["step"] = entry["step"].cpu()
        return held

    def tensors(self) -> Iterator[Tensor]:
        """Yields all state tensors on the host."""
        return (t for held in self._states.values() for t in held.values() if isinstance(t, Tensor))

    def put(self, p: Tensor, stored: dict[str, Any]) -> dict[str, Any]:
        """Stores a state that was loaded; returns the entry of p for opt.state."""
        self._states[p] = stored
        return {"step": stored["step"]}

    def follow(self, p: Tensor, entry: Mapping[str, Any], step: Tensor) -> None:
        """Drops the state of p if its entry in opt.state was dropped, else makes `step` its step. entry: p's entry in
        opt.state, which the caller gives the same step."""
        if "step" not in entry:
            self._states.pop(p, None)
        elif p in self._states:
            self._states[p]["step"] = step

    def follow_moved(self, params: Sequence[Tensor], state: dict[Tensor, dict[str, Any]]) -> None:
        """Moves states along with entries that were moved in opt.state, as in state[new] = state.pop(old): gives the
        state of a parameter that the optimizer no longer has to the one whose entry has the same step tensor."""
        left = self._states.keys() - set(params)
        owners = {id(self._states[p]["step"]): p for p in left if "step" in self._states[p]}
        for p in params if owners else ():
            step = access.peek(state, p).get("step")
            if p not in self._states and id(step) in owners:
                self._states[p] = self._states.pop(owners.pop(id(step)))

    def clear(self) -> None:
        """Drops all states, before others are loaded."""
        self._states.clear()

    def keep_only(self, params: set[Tensor]) -> None:
        """Drops the states of all other parameters."""
        for p in [p for p in self._states if p not in params]:
            del self._states[p]

    # -- the step

    def plan(
        self, members: Sequence[ParamState], gathers: Sequence[AllGatherTarget], averaging: Averaging
    ) -> HostPlan | None:
        """Returns the plan of the step of the members whose state is on the host; None where there are none."""
        chosen = [(m, gather) for m, gather in zip(members, gathers, strict=True) if m.host]
        if not chosen:
            return None
        device = chosen[0][0].weight.device
        if self._buffers is None or self._buffers.device != device:
            self._buffers = Buffers(copies_of(device), device)
        return HostPlan([m for m, _ in chosen], [gather for _, gather in chosen], self._buffers, averaging)


def choose(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Returns for each size whether it is chosen, so that the chosen ones are about `fraction` of the sum
    (tx_offload_choose).

    sizes: bytes. ValueError unless fraction is in [0, 1].
    """
    n = len(sizes)
    chosen = (ctypes.c_int32 * n)()
    function = library.function(
        "tx_offload_choose", ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p
    )
    function((ctypes.c_int64 * n)(*sizes), n, fraction, (ctypes.c_int64 * n)(), chosen)
    return list(map(bool, chosen))
