"""The step of the parameters whose state is on the host: gradients are copied down to the host, weights up, in batches.

The library does that (tx_adamw_offloaded): several threads take batches from one queue. While one batch is stepped, the
gradients of later batches are copied down and the weights of earlier ones up. What is copied, per element and step:

  the gradient down, the weight up        always
  the weight down                         without a master, or with a 16-bit remainder: the weight on the device is then
                                          (the upper half of) the only master, and a copy on the host could be outdated
  a sample of the weight down             with an fp32 master, to compare the two: all of a small parameter, 32 of every
                                          2048 elements of a large one
  all of the weight down, before the step if the sample, or `state/write_check.py`, shows that it was modified outside
                                          the optimizer
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ext.optim.cpu_offload.copies import Buffers
from torch_ext.optim.cpu_offload.staged_call import Call, Counters, Settings
from torch_ext.optim.cpu_offload.weight_sample import sample_of
from torch_ext.optim.state.averaging import Averaging
from torch_ext.optim.state.param_state import AllGatherTarget, ParamState, named, refuse_grad
from torch_ext.optim.state.write_check import FixedMemory
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.tensors import dense


class HostPlan:
    """The arguments and buffers of the step on the host, kept from step to step."""

    def __init__(
        self,
        members: Sequence[ParamState],
        gathers: Sequence[AllGatherTarget],
        buffers: Buffers,
        averaging: Averaging,
    ) -> None:
        """gathers: for each member, the bucket that is all-gathered after its step."""
        self.members = list(members)
        self._buffers, self._copies = buffers, buffers.copies
        stored = [m.stored() for m in members]
        self.memory = FixedMemory(
            [*(m.memory_owner for m in members), *(t for row in stored for t in row if t is not None)]
        )
        # A weight that isn't dense is stepped as a contiguous copy on its device.
        weights = [m.weight.detach() for m in members]
        self._layouts = list(map(dense.dense_or_empty, weights))
        self._copied = [i for i, (w, layout) in enumerate(zip(weights, self._layouts, strict=True)) if layout is not w]
        self._of: dict[AllGatherTarget, list[int]] = {}
        for i, gather in enumerate(gathers):
            self._of.setdefault(gather, []).append(i)
        self._counters, self._averaging = Counters(), averaging
        self._calls = {gather: self._call(chosen) for gather, chosen in self._of.items()}
        self._sample = sample_of([m for m in members if m.kinds.master == "master_param"], buffers)
        self._grads: list[Tensor] = []  # set during a step only, as _scalars_ready is
        self._scalars_ready: Any = None

    def _call(self, chosen: Sequence[int]) -> Call:
        members = [self.members[i] for i in chosen]
        meta = [[m.id, m.local.offset, m.group] for m in members]
        weights = [dense.flat(self._layouts[i]) for i in chosen]
        return Call(weights, [m.stored() for m in members], meta, self._counters, self._averaging)

    @property
    def resynced(self) -> int:
        """The number of elements with a remainder that the last step has found modified outside the optimizer."""
        return self._counters.resynced

    @property
    def skipped(self) -> bool:
        """Whether the library has skipped the last step."""
        return self._counters.skipped

    @property
    def gathers(self) -> Iterable[AllGatherTarget]:
        """The buckets of which some parameters are stepped on the host."""
        return self._of

    def stale(self) -> list[ParamState]:
        """Returns the members with an fp32 master whose weight was modified outside the optimizer, by the sample that
        `begin` has requested."""
        return self._sample.stale()

    def begin(
        self,
        grads: Sequence[Tensor],
        hyper: HyperparameterTable,
        scalars: tuple[Tensor, Tensor, Tensor],
        *,
        sample: bool,
        external: int,
    ) -> None:
        """Prepares a step: copies its scalars to the host, and a sample of the weights if `sample`. grads: of the
        members. scalars: grad_scale, clip_coef, found_inf. external: tx_external_write, for weights that are copied
        down. Raises RuntimeError, naming the parameter, for illegal arguments: nothing has been written then, on the
        host or on the device, which steps its own parameters afterwards."""
        for member, grad in zip(self.members, grads, strict=True):
            refuse_grad(member, grad)
        self._grads = list(map(dense.in_order_of, self._layouts, grads))
        for i in self._copied:
            self._layouts[i].copy_(self.members[i].weight)
        self._copies.begin()
        lrs, on_host = self._lrs_on_host(hyper.lrs), self._on_host(scalars)
        self._scalars_ready = self._copies.mark()
        if sample:
            self._sample.take()
        self._counters.zero()
        if lrs:
            self._copies.wait(self._scalars_ready)
        settings = Settings(hyper.groups, lrs, hyper.shared, on_host, external)
        for gather, chosen in self._of.items():
            with self._naming(chosen):
                self._calls[gather].prepare([self._grads[i] for i in chosen], settings)

    def _on_host(self, scalars: Sequence[Tensor]) -> list[Tensor]:
        """Starts to copy the step's scalars to the host; returns the copies."""
        here = self._buffers.take("scalars", 4 * len(scalars)).view(torch.float32)
        on_host = [here[i : i + 1] if scalar.numel() else dense.EMPTY for i, scalar in enumerate(scalars)]
        there = [(to, scalar.view(-1)) for to, scalar in zip(on_host, scalars, strict=True) if scalar.numel()]
        self._copies.to_host([to for to, _ in there], [scalar for _, scalar in there])
        return on_host

    def _lrs_on_host(self, lrs: Sequence[Tensor]) -> list[Tensor]:
        """Starts to copy lr tensors (4 or 8 bytes each) to the host; returns the copies."""
        here = self._buffers.take("lrs", 8 * len(lrs)).view(-1, 8) if lrs else ()
        on_host = [row.view(lr.dtype)[:1] for row, lr in zip(here, lrs, strict=True)]
        self._copies.to_host(on_host, [lr.view(-1) for lr in lrs])
        return on_host

    def step(self, gather: AllGatherTarget) -> None:
        """Steps the members whose all-gather is `gather`. Device work that is launched afterwards (the all-gather, say)
        waits for their weights. Raises RuntimeError where a copy fails; some members may have been stepped then."""
        chosen = self._of.get(gather)
        if chosen is None:
            return
        self._copies.wait(self._scalars_ready)
        with self._naming(chosen):
            self._calls[gather].run(self._buffers)
        self._copies.end()
        for i in self._copied:
            if i in chosen:
                self.members[i].weight.copy_(self._layouts[i])

    @contextlib.contextmanager
    def _naming(self, chosen: Sequence[int]) -> Iterator[None]:
        """Adds the parameter's name to an error of the library in a call with these members."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError) as refusal:
            names = [self.members[i].name for i in chosen]
            raise RuntimeError(f"{named(str(refusal), names)} (in the step on the host)") from None

    def end(self) -> None:
        """Ends the step: waits for the copies, and releases the gradients."""
        if not self._grads:
            return
        self._copies.wait(self._copies.mark())
        self._copies.end()
        self._grads = []
