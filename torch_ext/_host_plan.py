"""The step of the parameters whose state lies on the host: gradients come down, weights go up, batch by batch.

While a batch is stepped the gradients of later ones are on their way down and the weights of earlier ones on their way
up. What travels, per element and step:

  the gradient down, the weight up        always
  the weight down                         where there is no master, or a 16-bit remainder: then the weight on the device
                                          is (the upper half of) the only master, and a copy here could go stale
  a sample of the weight down             beside an fp32 master, which is compared with it: all of a small parameter, 16
                                          of every 1024 elements of a large one
  all of the weight down, before the step where the sample, or the parameter's version, address or identity says that
                                          somebody else wrote to it
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_ext import _host_batches, _masters, _tensors
from torch_ext._groups import Hyper
from torch_ext._host_batches import Batch, Layout, Piece, SplitScales
from torch_ext._host_sample import sample_of
from torch_ext._masters import Seen
from torch_ext._plan import Member, memories, refuse_grad
from torch_ext._staging import Buffers

if TYPE_CHECKING:
    from torch_ext._plan import Gather


class _Stage(NamedTuple):
    """A batch as it lies in the buffers of its slot."""

    grads: list[Tensor]  # flat, for the operator
    grads_in: list[Tensor]  # the same memory, shaped like what is copied there
    weights: list[Tensor]
    weights_in: list[Tensor]


class _Call(NamedTuple):
    """What one call of the operator has beside gradients and weights."""

    states: list[Tensor]
    slices: Tensor
    meta: Tensor
    scales: list[SplitScales]
    weights: list[Tensor]  # on the device
    comes_down: bool  # whether weights do, too


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
        self._addresses = list(map(Tensor.data_ptr, self._places))
        self._flat = [
            _tensors.flat(m.weight.detach()).view(-1) if _tensors.is_dense(m.weight) else None for m in members
        ]

        self.batches = _host_batches.cut(members, gathers, order, self._lanes.numel)
        self._of: dict[Gather, list[int]] = {}
        for k, batch in enumerate(self.batches):
            self._of.setdefault(batch.gather, []).append(k)
        split = [piece for batch in self.batches for piece in batch.pieces if not piece.whole]
        self._steps = torch.zeros(len(split), dtype=torch.float32)  # of pieces: each call counts for itself
        own_steps = dict(zip(((p.member, p.begin) for p in split), self._steps.unbind(), strict=True))
        self._split: dict[int, list[Tensor]] = {}
        for piece in split:
            self._split.setdefault(piece.member, []).append(own_steps[piece.member, piece.begin])
        self._calls = [self._call(batch, own_steps) for batch in self.batches]
        self._dtypes: list[torch.dtype] = []
        self._stages: list[_Stage] = []

        self._mastered = [i for i, m in enumerate(members) if m.kinds.master == "master_param"]
        self._versions = [self._known_version(i, seen) for i in self._mastered]
        self._sample = sample_of([self.members[i] for i in self._mastered], buffers)
        self._counts = torch.zeros(2, dtype=torch.int64)  # see Adam._counts
        self._external = 0
        self.skipped = False
        """Whether the operator left the step out; it does so in its first call."""
        self._grads: list[Tensor] = []  # during a step
        self._marks: list[Any] = []
        self._free: dict[int, Any] = {}

    def _call(self, batch: Batch, own_steps: Mapping[tuple[int, int], Tensor]) -> _Call:
        rows, scales, meta, weights = [], [], [], []
        for piece in batch.pieces:
            member = self.members[piece.member]
            step = own_steps.get((piece.member, piece.begin), member.state["step"])
            row, split = _host_batches.state_of(member, piece, step)
            rows.append(row)
            scales += [split] if split else []
            meta.append([member.id, member.local.start + piece.begin, member.group])
            flat = self._flat[piece.member]
            weights.append(member.weight.detach() if piece.whole or flat is None else _cut(flat, piece))
        states, slices = memories(rows)
        comes_down = self.members[batch.pieces[0].member].kinds.master != "master_param"
        return _Call(states, slices, torch.tensor(meta, dtype=torch.int64), scales, weights, comes_down)

    @property
    def resynced(self) -> int:
        """Elements beside remainders that somebody else had written to, in the last step."""
        return int(self._counts[1])

    @property
    def gathers(self) -> "Iterable[Gather]":
        """Of which buckets it steps a part."""
        return self._of

    def fits(self) -> bool:
        """Whether the weights are where they were when the plan was made."""
        return list(map(Tensor.data_ptr, self._places)) == self._addresses

    # -- writes by somebody else

    def _known_version(self, i: int, seen: Mapping[Tensor, Seen]) -> int:
        member, last = self.members[i], seen.get(self.members[i].param)
        if last is None or last.address != self._addresses[i] or last.master is not member.master:
            return -1
        return last.version

    def suspects(self) -> list[Member]:
        """Those beside fp32 masters that somebody else may have written to since they were seen last."""
        strays = self._sample.strays()
        known = zip(self._mastered, self._versions, strays, strict=True)
        return [self.members[i] for i, version, stray in known if stray or self.members[i].version != version]

    def look(self) -> None:
        """From here on the weights are known to be what their masters round to."""
        self._versions = [self.members[i].version for i in self._mastered]

    def seen(self) -> dict[Tensor, Seen]:
        """What is known of them, for the next plan."""
        return {
            self.params[i]: Seen(version, self._addresses[i], self.members[i].master)
            for i, version in zip(self._mastered, self._versions, strict=True)
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
        """First gradients leave for the host, behind a sample of the weights if one is wanted. grads: of the members.
        scalars: grad_scale, clip_coef, found_inf. external: tx_external_write, of weights that come down. Raises
        RuntimeError, naming it, for a gradient that no step takes."""
        for member, grad in zip(self.members, grads, strict=True):
            refuse_grad(member, grad)
        if [g.dtype for g in grads] != self._dtypes:
            self._dtypes = [g.dtype for g in grads]
            self._stages = self._laid_out()
        self._lanes.down.begin()
        self._lanes.up.begin()
        self._scalars = self._bring(scalars)
        self._hyper = hyper._replace(lrs=[lr.cpu() for lr in hyper.lrs])
        if sample:
            self._sample.bring()
        for i, steps in self._split.items():
            for step in steps:
                step.copy_(self.members[i].state["step"])
        self.skipped = False
        self._counts.zero_()
        self._external = external
        self._next, self._marks, self._free = 0, [], {}
        self._grads = list(grads)
        for i in self._split:
            self._grads[i] = _tensors.in_order_of(self.members[i].weight, grads[i]).view(-1)
        for _ in range(self._lanes.slots):
            self._bring_next()

    def _bring(self, scalars: Sequence[Tensor]) -> list[Tensor]:
        """Scalars of the step, on the host."""
        here = self._buffers.take("scalars", 0, 4 * len(scalars)).view(torch.float32)
        brought = [here[i : i + 1] if scalar.numel() else _tensors.NONE for i, scalar in enumerate(scalars)]
        there = [(to, scalar.view(-1)) for to, scalar in zip(brought, scalars, strict=True) if scalar.numel()]
        self._lanes.down.copy([to for to, _ in there], [scalar for _, scalar in there])
        return brought

    def _laid_out(self) -> list[_Stage]:
        """Every batch in the buffers of its slot."""
        ranges, sizes = [], [[0, 0] for _ in range(self._lanes.slots)]
        for k, batch in enumerate(self.batches):
            grads, weights = Layout(), Layout()
            dtypes = [(self._dtypes[p.member], self.members[p.member].weight.dtype) for p in batch.pieces]
            ranges.append(
                [
                    (grads.place(p.numel, g), weights.place(p.numel, w))
                    for p, (g, w) in zip(batch.pieces, dtypes, strict=True)
                ]
            )
            size = sizes[k % self._lanes.slots]
            size[:] = max(size[0], grads.nbytes), max(size[1], weights.nbytes)
        memories_of = [
            (self._buffers.take("grads", slot, of_grads), self._buffers.take("weights", slot, of_weights))
            for slot, (of_grads, of_weights) in enumerate(sizes)
        ]
        return [self._stage(k, ranges[k], *memories_of[k % self._lanes.slots]) for k in range(len(self.batches))]

    def _stage(self, k: int, ranges: list[tuple[slice, slice]], grads: Tensor, weights: Tensor) -> _Stage:
        stage = _Stage([], [], [], [])
        for piece, (of_grad, of_weight) in zip(self.batches[k].pieces, ranges, strict=True):
            like = self.members[piece.member].weight
            grad, weight = grads[of_grad].view(self._dtypes[piece.member]), weights[of_weight].view(like.dtype)
            stage.grads.append(grad)
            stage.grads_in.append(_tensors.view_like(like, grad, 0) if piece.whole else grad)
            stage.weights.append(weight)
            stage.weights_in.append(_tensors.view_like(like, weight, 0) if piece.whole else weight)
        return stage

    def _bring_next(self) -> None:
        """The gradients of the next batch, and its weights if it needs them, leave for the host."""
        k = self._next
        if k == len(self.batches):
            return
        self._next += 1
        call, stage, down = self._calls[k], self._stages[k], self._lanes.down
        grads = [(self._grads[piece.member], piece) for piece in self.batches[k].pieces]
        down.copy(stage.grads_in, [grad if piece.whole else _cut(grad, piece) for grad, piece in grads])
        if call.comes_down:
            if (free := self._free.get(k % self._lanes.slots)) is not None:
                down.follow(free)
            down.copy(stage.weights_in, call.weights)
        self._marks.append(down.mark())

    def step(self, gather: "Gather") -> None:
        """Steps what is gathered with this bucket. What the device does next, a gather say, sees the weights."""
        for k in self._of.get(gather, ()):
            if not self.skipped:
                self._step_batch(k)
        self._lanes.up.end()

    def _step_batch(self, k: int) -> None:
        slot, up = k % self._lanes.slots, self._lanes.up
        self._lanes.down.wait(self._marks[k])
        if slot in self._free:
            up.wait(self._free[slot])
        self._operate(k)
        if int(self._counts[0]):
            self.skipped = True  # nothing was written
            return
        up.copy(self._calls[k].weights, self._stages[k].weights_in)
        self._free[slot] = up.mark()
        self._bring_next()

    def _operate(self, k: int) -> None:
        call, stage, hyper = self._calls[k], self._stages[k], self._hyper
        for scales in call.scales:
            scales.load()
        torch.ops.torch_ext.adamw_flat_.default(
            stage.weights,
            stage.grads,
            call.states,
            call.slices,
            hyper.lrs,
            hyper.groups,
            call.meta,
            *self._scalars,
            self._counts,
            *hyper.shared,
            self._external if call.comes_down else _masters.IGNORE,
        )
        for scales in call.scales:
            scales.store()

    def end(self) -> None:
        """The gradients are free to go."""
        if not self._grads:
            return
        self._lanes.down.wait(self._marks[-1])
        for i, steps in self._split.items():
            self.members[i].state["step"].copy_(steps[0])
        self._grads = []


def _cut(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.begin : piece.begin + piece.numel]
