"""The step of the parameters whose state lies on the host: gradients come down, weights go up, batch by batch.

Several threads step batches beside each other (`_host_workers`). While one is stepped the gradients of later ones are on
their way down and the weights of earlier ones on their way up. What travels, per element and step:

  the gradient down, the weight up        always
  the weight down                         where there is no master, or a 16-bit remainder: then the weight on the device
                                          is (the upper half of) the only master, and a copy here could go stale
  a sample of the weight down             beside an fp32 master, which is compared with it: all of a small parameter, 32
                                          of every 2048 elements of a large one
  all of the weight down, before the step where the sample, or the parameter's version, address or identity says that
                                          somebody else wrote to it
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_ext import _host_batches, _library, _tensors
from torch_ext._groups import Hyper
from torch_ext._host_batches import Batch, Piece
from torch_ext._host_call import Call, Counters, Settings
from torch_ext._host_sample import sample_of
from torch_ext._host_stages import Stages
from torch_ext._host_workers import Workers
from torch_ext._masters import Seen
from torch_ext._plan import Member, refuse_grad
from torch_ext._staging import Buffers

if TYPE_CHECKING:
    from torch_ext._plan import Gather


class HostPlan:
    def __init__(
        self,
        members: Sequence[Member],
        gathers: "Sequence[Gather]",
        order: "Sequence[Gather]",
        seen: Mapping[Tensor, Seen],
        buffers: Buffers,
    ) -> None:
        """gathers: of each member, the bucket that is gathered after its step. order: in which these will be
        stepped."""
        self.members = list(members)
        self._buffers, self._lanes = buffers, buffers.lanes
        self.params = [m.param for m in members]
        self._places = [m.place for m in members]
        self._places += [t for m in members for t in m.at_rest() if t is not None]  # calls know addresses
        self._addresses = list(map(Tensor.data_ptr, self._places))
        self.batches = _host_batches.cut(members, gathers, order, self._lanes.batch_of)
        self._of: dict[Gather, list[int]] = {}
        for k, batch in enumerate(self.batches):
            self._of.setdefault(batch.gather, []).append(k)
        split = [piece for batch in self.batches for piece in batch.pieces if not piece.whole]
        self._sizes: dict[int, list[int]] = {}  # members in pieces: of each
        for piece in split:
            self._sizes.setdefault(piece.member, []).append(piece.numel)
        # Each call counts steps for itself.
        self._steps = {i: torch.zeros(len(sizes), dtype=torch.float32) for i, sizes in self._sizes.items()}
        self._calls = [self._call(batch) for batch in self.batches]
        self._weights = [list(map(self._weight, batch.pieces)) for batch in self.batches]
        self._workers = Workers(self, self._lanes)
        self._dtypes: list[torch.dtype] = []

        self._mastered = [i for i, m in enumerate(members) if m.kinds.master == "master_param"]
        self._versions = [self._known_version(i, seen) for i in self._mastered]
        self._master_versions = self._master_versions_now()
        self._sample = sample_of([self.members[i] for i in self._mastered], buffers)
        slots = self._lanes.workers * self._lanes.slots
        self._counters, self._errors = Counters(slots), [_library.Error() for _ in range(slots)]
        self._settings: Settings | None = None
        self._grads: list[Tensor] = []  # during a step
        self._parts: dict[int, tuple[Tensor, ...]] = {}  # of gradients of members in pieces

    def _comes_down(self, batch: Batch) -> bool:
        return self.members[batch.pieces[0].member].kinds.master != "master_param"

    def _call(self, batch: Batch) -> Call:
        rows, scales, meta = [], [], []
        for piece in batch.pieces:
            member = self.members[piece.member]
            step = member.state["step"] if piece.part is None else self._steps[piece.member][piece.part]
            row, split = _host_batches.state_of(member, piece, step)
            rows.append(row)
            scales += [split] if split else []
            meta.append([member.id, member.local.start + piece.begin, member.group])
        return Call(rows, meta, scales, self._comes_down(batch))

    def _weight(self, piece: Piece) -> Tensor:
        """On the device."""
        weight = self.members[piece.member].weight.detach()
        return weight if piece.whole else _tensors.flat(weight).view(-1)[piece.begin : piece.begin + piece.numel]

    @property
    def resynced(self) -> int:
        """Elements beside remainders that somebody else had written to, in the last step."""
        return self._counters.resynced

    @property
    def skipped(self) -> bool:
        """Whether the operator left the last step out."""
        return self._workers.skipped

    @property
    def gathers(self) -> "Iterable[Gather]":
        """Of which buckets it steps a part."""
        return self._of

    def fits(self) -> bool:
        """Whether weights and states are where they were when the plan was made."""
        return list(map(Tensor.data_ptr, self._places)) == self._addresses

    # -- writes by somebody else

    def _known_version(self, i: int, seen: Mapping[Tensor, Seen]) -> int:
        member, last = self.members[i], seen.get(self.members[i].param)
        return last.version if last is not None and last.fits(member, self._addresses[i]) else -1

    def suspects(self) -> list[Member]:
        """Those of which somebody else may have written to the weight or the fp32 master since they were last seen."""
        strays = self._sample.strays()
        masters = map(operator.ne, self._master_versions_now(), self._master_versions)
        known = zip(self._mastered, self._versions, strays, masters, strict=True)
        return [self.members[i] for i, version, *hints in known if any(hints) or self.members[i].version != version]

    def look(self) -> None:
        """From here on the weights are known to be what their masters round to."""
        self._versions = [self.members[i].version for i in self._mastered]
        self._master_versions = self._master_versions_now()

    def _master_versions_now(self) -> list[int]:
        return [self.members[i].master._version for i in self._mastered]

    def seen(self) -> dict[Tensor, Seen]:
        """What is known of them, for the next plan."""
        return {
            self.params[i]: Seen(version, self._addresses[i], self.members[i].master, master_version)
            for i, version, master_version in zip(self._mastered, self._versions, self._master_versions, strict=True)
            if version >= 0
        }

    # -- the step

    def begin(
        self,
        grads: Sequence[Tensor],
        hyper: Hyper,
        scalars: tuple[Tensor, Tensor, Tensor],
        *,
        sample: bool,
        external: int,
    ) -> None:
        """What a step needs before its batches leave for the host: a sample of the weights, if one is wanted. grads:
        of the members, whose memory must stay until `end`.
        scalars: grad_scale, clip_coef, found_inf. external: tx_external_write, of weights that come down. Raises
        RuntimeError, naming it, for a gradient that no step takes."""
        for member, grad in zip(self.members, grads, strict=True):
            refuse_grad(member, grad)
        if [g.dtype for g in grads] != self._dtypes:
            self._dtypes = [g.dtype for g in grads]
            self._stages = Stages(self.batches, [m.weight for m in self.members], self._dtypes, self._buffers)
        self._lanes.down.begin()
        self._lanes.up.begin()
        self._set(Settings(hyper.groups, self._lrs_brought(hyper.lrs), hyper.shared, self._brought(scalars), external))
        if sample:
            self._sample.bring()
        for i, sizes in self._sizes.items():
            self._steps[i].copy_(self.members[i].state["step"])
            self._parts[i] = _tensors.in_order_of(self.members[i].weight, grads[i]).view(-1).split(sizes)
        self._counters.zero()
        self._workers.begin()
        self._grads = list(grads)

    def _set(self, settings: Settings) -> None:
        """Tells every call what it does not know."""
        if self._settings is not None:
            settings = settings.after(self._settings)
        if self._settings is None or settings.key() != self._settings.key():
            for call in self._calls:
                call.set(settings)
        self._settings = settings

    def _brought(self, scalars: Sequence[Tensor]) -> list[Tensor]:
        """Scalars of the step, on the host."""
        here = self._buffers.take("scalars", 0, 4 * len(scalars)).view(torch.float32)
        brought = [here[i : i + 1] if scalar.numel() else _tensors.NONE for i, scalar in enumerate(scalars)]
        there = [(to, scalar.view(-1)) for to, scalar in zip(brought, scalars, strict=True) if scalar.numel()]
        self._lanes.down.copy([to for to, _ in there], [scalar for _, scalar in there])
        return brought

    def _lrs_brought(self, lrs: Sequence[Tensor]) -> list[Tensor]:
        """Likewise; each has 4 or 8 bytes."""
        here = self._buffers.take("lrs", 0, 8 * len(lrs)).view(-1, 8) if lrs else ()
        brought = [row.view(lr.dtype)[:1] for row, lr in zip(here, lrs, strict=True)]
        self._lanes.down.copy(brought, [lr.view(-1) for lr in lrs])
        return brought

    def step(self, gather: "Gather") -> None:
        """Steps what is gathered with this bucket. What the device does next, a gather say, sees the weights. Raises
        RuntimeError where the operator takes no argument of a batch; others may have been stepped then."""
        self._workers.run(self._of.get(gather, ()))
        self._lanes.up.end()

    def bring(self, k: int, slot: int, free: Any) -> Any:
        """The gradients of a batch, and its weights if it needs them, leave for the host. See _host_workers.Stepper."""
        stage, down = self._stages.at(k, slot), self._lanes.down
        down.copy(stage.grads_in, [self._grad(piece) for piece in self.batches[k].pieces])
        if self._calls[k].comes_down:
            if free is not None:
                down.follow(free)
            down.copy(stage.weights_in, self._weights[k])
        return down.mark()

    def _grad(self, piece: Piece) -> Tensor:
        return self._grads[piece.member] if piece.part is None else self._parts[piece.member][piece.part]

    def send(self, k: int, slot: int) -> Any:
        """The weights of a batch leave for the device."""
        self._lanes.up.copy(self._weights[k], self._stages.at(k, slot).weights_in)
        return self._lanes.up.mark()

    def operate(self, k: int, slot: int) -> bool:
        """Steps a batch; returns whether the operator left it out."""
        error = self._errors[slot]
        if self._calls[k].run(self._stages.at(k, slot), self._counters.at[slot], error):
            names = ", ".join(dict.fromkeys(self.members[piece.member].name for piece in self.batches[k].pieces))
            raise RuntimeError(f"{error.text} (in the step on the host of {names})")
        return self._counters.skipped(slot)

    def end(self) -> None:
        """The gradients are free to go."""
        if not self._grads:
            return
        self._lanes.down.wait(self._lanes.down.mark())
        self._lanes.up.end()
        for i, steps in self._steps.items():
            self.members[i].state["step"].copy_(steps[0])
        self._grads, self._parts = [], {}
