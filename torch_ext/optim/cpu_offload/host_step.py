"""The step of the parameters whose state lies on the host: gradients come down, weights go up, batch by batch.

The library does that (tx_adamw_offloaded): several threads take batches from one queue, and while one is stepped the
gradients of later ones are on their way down and the weights of earlier ones on their way up. What travels, per element
and step:

  the gradient down, the weight up        always
  the weight down                         where there is no master, or a 16-bit remainder: then the weight on the device
                                          is (the upper half of) the only master, and a copy here could go stale
  a sample of the weight down             beside an fp32 master, which is compared with it: all of a small parameter, 32
                                          of every 2048 elements of a large one
  all of the weight down, before the step where the sample, or the parameter's version, address or identity says that
                                          somebody else wrote to it
"""

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_ext.optim.cpu_offload.copies import Buffers
from torch_ext.optim.cpu_offload.staged_call import Call, Counters, Settings
from torch_ext.optim.cpu_offload.write_check import sample_of
from torch_ext.optim.state.masters import SyncedVersion
from torch_ext.optim.state.param_state import ParamState, named, refuse_grad
from torch_ext.params.param_groups import HyperparameterTable
from torch_ext.tensors import dense

if TYPE_CHECKING:
    from torch_ext.optim.state.param_state import AllGatherTarget


class HostPlan:
    def __init__(
        self,
        members: Sequence[ParamState],
        gathers: "Sequence[AllGatherTarget]",
        seen: Mapping[Tensor, SyncedVersion],
        buffers: Buffers,
    ) -> None:
        """gathers: of each member, the bucket that is gathered after its step."""
        self.members = list(members)
        self._buffers, self._copies = buffers, buffers.copies
        self.params = [m.param for m in members]
        self._places = [m.place for m in members]
        self._places += [t for m in members for t in m.at_rest() if t is not None]  # calls know addresses
        self._addresses = list(map(Tensor.data_ptr, self._places))
        # A weight that isn't dense is stepped as a contiguous copy beside it.
        weights = [m.weight.detach() for m in members]
        self._orders = [
            w if dense.is_dense(w) else torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights
        ]
        self._copied = [i for i, (w, order) in enumerate(zip(weights, self._orders, strict=True)) if order is not w]
        self._of: dict[AllGatherTarget, list[int]] = {}
        for i, gather in enumerate(gathers):
            self._of.setdefault(gather, []).append(i)
        self._counters = Counters()
        self._calls = {gather: self._call(chosen) for gather, chosen in self._of.items()}

        self._mastered = [i for i, m in enumerate(members) if m.kinds.master == "master_param"]
        self._versions = [self._known_version(i, seen) for i in self._mastered]
        self._master_versions = self._master_versions_now()
        self._sample = sample_of([self.members[i] for i in self._mastered], buffers)
        self._grads: list[Tensor] = []  # during a step, as what follows
        self._scalars_came: Any = None

    def _call(self, chosen: Sequence[int]) -> Call:
        members = [self.members[i] for i in chosen]
        meta = [[m.id, m.local.start, m.group] for m in members]
        weights = [dense.flat(self._orders[i]) for i in chosen]
        return Call(weights, [m.at_rest() for m in members], meta, self._counters)

    @property
    def resynced(self) -> int:
        """Elements beside remainders that somebody else had written to, in the last step."""
        return self._counters.resynced

    @property
    def skipped(self) -> bool:
        """Whether the operator left the last step out."""
        return self._counters.skipped

    @property
    def gathers(self) -> "Iterable[AllGatherTarget]":
        """Of which buckets it steps a part."""
        return self._of

    def fits(self) -> bool:
        """Whether weights and states are where they were when the plan was made."""
        return list(map(Tensor.data_ptr, self._places)) == self._addresses

    # -- writes by somebody else

    def _known_version(self, i: int, seen: Mapping[Tensor, SyncedVersion]) -> int:
        member, last = self.members[i], seen.get(self.members[i].param)
        return last.version if last is not None and last.fits(member, self._addresses[i]) else -1

    def suspects(self) -> list[ParamState]:
        """Those of which somebody else may have written to the weight or the fp32 master since they were last seen."""
        stale = self._sample.stale()
        masters = map(operator.ne, self._master_versions_now(), self._master_versions)
        known = zip(self._mastered, self._versions, stale, masters, strict=True)
        return [self.members[i] for i, version, *hints in known if any(hints) or self.members[i].version != version]

    def look(self) -> None:
        """From here on the weights are known to be what their masters round to."""
        self._versions = [self.members[i].version for i in self._mastered]
        self._master_versions = self._master_versions_now()

    def _master_versions_now(self) -> list[int]:
        return [self.members[i].master._version for i in self._mastered]

    def seen(self) -> dict[Tensor, SyncedVersion]:
        """What is known of them, for the next plan."""
        return {
            self.params[i]: SyncedVersion(version, self._addresses[i], self.members[i].master, master_version)
            for i, version, master_version in zip(self._mastered, self._versions, self._master_versions, strict=True)
            if version >= 0
        }

    # -- the step

    def begin(
        self,
        grads: Sequence[Tensor],
        hyper: HyperparameterTable,
        scalars: tuple[Tensor, Tensor, Tensor],
        *,
        sample: bool,
        external: int,
    ) -> None:
        """What a step needs before its gradients leave for the host: a sample of the weights, if one is wanted. grads:
        of the members. scalars: grad_scale, clip_coef, found_inf. external: tx_external_write, of weights that come
        down. Raises RuntimeError, naming the parameter, for what no step takes: nothing has been written then, here or
        on the device, whose own part is stepped afterwards."""
        for member, grad in zip(self.members, grads, strict=True):
            refuse_grad(member, grad)
        self._grads = list(map(dense.in_order_of, self._orders, grads))
        for i in self._copied:
            self._orders[i].copy_(self.members[i].weight)
        self._copies.begin()
        lrs, brought = self._lrs_brought(hyper.lrs), self._brought(scalars)
        self._scalars_came = self._copies.mark()
        if sample:
            self._sample.bring()
        self._counters.zero()
        if lrs:
            self._copies.wait(self._scalars_came)
        settings = Settings(hyper.groups, lrs, hyper.shared, brought, external)
        for gather, chosen in self._of.items():
            with self._naming(chosen):
                self._calls[gather].prepare([self._grads[i] for i in chosen], settings)

    def _brought(self, scalars: Sequence[Tensor]) -> list[Tensor]:
        """Scalars of the step, on the host."""
        here = self._buffers.take("scalars", 4 * len(scalars)).view(torch.float32)
        brought = [here[i : i + 1] if scalar.numel() else dense.NONE for i, scalar in enumerate(scalars)]
        there = [(to, scalar.view(-1)) for to, scalar in zip(brought, scalars, strict=True) if scalar.numel()]
        self._copies.to_host([to for to, _ in there], [scalar for _, scalar in there])
        return brought

    def _lrs_brought(self, lrs: Sequence[Tensor]) -> list[Tensor]:
        """Likewise; each has 4 or 8 bytes."""
        here = self._buffers.take("lrs", 8 * len(lrs)).view(-1, 8) if lrs else ()
        brought = [row.view(lr.dtype)[:1] for row, lr in zip(here, lrs, strict=True)]
        self._copies.to_host(brought, [lr.view(-1) for lr in lrs])
        return brought

    def step(self, gather: "AllGatherTarget") -> None:
        """Steps what is gathered with this bucket. What the device does next, a gather say, sees the weights. Raises
        RuntimeError where a copy fails; others may have been stepped then."""
        chosen = self._of.get(gather)
        if chosen is None:
            return
        self._copies.wait(self._scalars_came)
        with self._naming(chosen):
            self._calls[gather].run(self._buffers)
        self._copies.end()
        for i in self._copied:
            if i in chosen:
                self.members[i].weight.copy_(self._orders[i])

    @contextlib.contextmanager
    def _naming(self, chosen: Sequence[int]) -> Iterator[None]:
        """What the library says of a call with these members, with the name of the one that it speaks of."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError) as refusal:
            names = [self.members[i].name for i in chosen]
            raise RuntimeError(f"{named(str(refusal), names)} (in the step on the host)") from None

    def end(self) -> None:
        """The gradients are free to go."""
        if not self._grads:
            return
        self._copies.wait(self._copies.mark())
        self._copies.end()
        self._grads = []
