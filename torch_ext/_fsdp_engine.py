"""When the gradients of a model sharded by FSDP2 are reduced, and where their sums are kept.

FSDP2 decides what is gathered and reduced when; this engine is what it calls to do so. For each unit, backward
calls, in this order and on one thread: `reduce_scatter`, which starts the exchange and comes back at once with an
output that holds nothing yet; `reduced` (the all-reduce hook); `gradient_came` for each parameter in the unit (the
post-accumulate hook), which takes the gradient that FSDP2 made of that output away again. At the end of backward the
ranks tell each other what they reduced, then the sums are waited for and added to the gradient shards, which are kept
here in main_grads_dtype. Where that is the parameter's own dtype, they are `.grad` between backwards.

With a replicated mesh dimension (HSDP), FSDP2 adds up the replicas itself, right after the reduce-scatter: then the
output holds the sum, in fp32, before `reduce_scatter` returns.
"""

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from torch_ext import _local, _ops, _registry
from torch_ext._exchange import IN_FLIGHT, MAX_BUCKETS, Exchange, Handle, exchange_over, tag
from torch_ext._fsdp_reduction import Reduction, Slice, UnitPlan
from torch_ext._local import Local, tensor_of
from torch_ext._nonfinite import ALL_FINITE, first_nonfinite
from torch_ext._wire import BLOCK, CODES, Piece, Seeds, Wire, add_up, pack

# What a rank says of a parameter at the end of a backward.
_ABSENT, _CAME, _FROZEN = range(3)
# A unit's word in the report: calls above, elements below.
_CALL = 1 << 48


class _BackwardEnd:
    """Called at the end of a backward. It dies with its graph task, so a dead one is a backward that raised."""

    def __init__(self, engine: "FsdpEngine") -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.backward_ended()


class FsdpEngine(_registry.Owner):
    """See the module's first lines."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        units: Sequence[UnitPlan],
        unit_of: Sequence[int],
        control: Exchange,
        number: int,
        *,
        divide_factor: float | None,
        check_for_nan: bool,
        find_unused_parameters: bool,
    ) -> None:
        """named: the trainable parameters, sharded; unit_of: the unit that each is in, for dtypes and messages.

        control: between all ranks that hold parts of the model. number: of `agree`. divide_factor: sums are divided by
        it; None: by the number of ranks that a unit is sharded and replicated over.
        """
        self.names, self.params = [n for n, _ in named], [p for _, p in named]
        self.units, self.control = list(units), control
        self.wire_bytes = 0
        self._unit_of = list(unit_of)
        self._divide_factor, self._check_for_nan = divide_factor, check_for_nan
        self._find_unused = find_unused_parameters
        self._number, self._cycle = number, 0
        self._exchanges: dict[tuple[dist.ProcessGroup, str], Exchange] = {}
        self._bytes_before = 0
        self._end: weakref.ref[_BackwardEnd] | None = None
        self._failure: str | None = None
        self._reductions: list[Reduction] = []  # of this backward
        self._current: Reduction | None = None
        self._came = bytearray(len(self.params))
        self._words = [0] * len(self.units)
        self._shards: dict[int, torch.Tensor] = {}  # by parameter, of its local tensor's shape, in main_grads_dtype
        self._grads: dict[int, Any] = {}  # by parameter, the DTensor over its shard, where `.grad` can be it
        self._added: set[int] = set()  # to these one's shards, sums of this backward
        self._broken: set[int] = set()  # the same, of a backward that raised then
        self._poisoned: set[int] = set()  # what the check for NaN named, until zero_grad
        self._position = {id(p): i for i, p in enumerate(self.params)}
        self._gathering: set[int] = set()  # units whose weights FSDP2 has not asked for yet
        self._order: list[int] | None = None  # of units in the first forward, where they are to be prefetched
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._roots: list[int] = []  # units that are inside no other
        self._cleanings: list[_Cleaning] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_on_grad, weakref.ref(self), i))
            for i, p in enumerate(self.params)
        ]
        _registry.register(self, self.params)

    def close(self) -> None:
        """Leaves the parameters as they were before, without gradients; the units' collectives are the caller's."""
        for hook in self._hooks:
            hook.remove()
        _registry.unregister(self)
        self.zero_grad(self.params)
        for param in self.params:
            param.grad = None

    @contextmanager
    def synchronizing(self, enabled: bool) -> Iterator[None]:
        """Of no effect: where gradients are sharded, there is nowhere to keep those that were not reduced (E8)."""
        yield

    # -- for optimizers: see _registry.Owner -----------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        """Whether a gradient is anywhere else than in `.grad`."""
        return not all(map(self._visible, range(len(self.params))))

    def before_step(self) -> None:
        self._recover()
        if self._failure is not None:
            raise RuntimeError(f"step() after an exchange that failed: {self._failure}")
        if self._broken:
            raise RuntimeError(
                "step() after a backward that raised when some of its sums were added already: call zero_grad() and "
                "repeat the micro-batches"
            )
        if poisoned := [self.names[i] for i in sorted(self._poisoned) if self.grad(self.params[i]) is not None]:
            raise RuntimeError(
                f"step() with gradients that have NaN or Inf ({', '.join(map(repr, poisoned))} and perhaps others), as "
                "backward said (check_for_nan_in_grad): call zero_grad() first"
            )
        # Whole weights that an evaluation has left behind would be old ones in the next forward.
        self.sync_parameters()

    def sync_parameters(self) -> bool:
        for unit in self.units:
            if (module := self._module(unit.number)) is not None:
                module.reshard()
        return True

    def local(self, param: torch.Tensor) -> Local:
        return _local.of_dtensor(param)

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        i = self._position[id(param)]
        if self._visible(i):
            return None if param.grad is None else tensor_of(param.grad)
        return self._shards.get(i)

    def gather(self, bucket: int) -> Handle:
        raise NotImplementedError("FSDP2 gathers weights itself")

    def zero_grad(self, params: Iterable[torch.Tensor]) -> None:
        recovered = self._recover()
        for param in params:
            i = self._position.get(id(param))
            if i is not None:
                self._forget(i)
                if recovered:
                    param.grad = None

    def _forget(self, i: int) -> None:
        self._shards.pop(i, None)
        self._grads.pop(i, None)
        self._broken.discard(i)
        self._poisoned.discard(i)

    def _visible(self, i: int) -> bool:
        """Whether the gradient shard can be `.grad`, which has the parameter's dtype."""
        return self.params[i].dtype == self._unit(i).main_grads_dtype

    def _unit(self, i: int) -> UnitPlan:
        return self.units[self._unit_of[i]]

    # -- weights ------------------------------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module, units: Sequence[Sequence[FSDPModule]], prefetch: bool) -> None:
        """units: the modules of each. prefetch: from the second forward on, each one's weights travel while the one
        before runs."""
        modules = [[cast(torch.nn.Module, m) for m in unit] for unit in units]
        self._modules = [weakref.ref(unit[0]) for unit in modules]
        self._order = [] if prefetch else None
        inside = {m for unit in modules for module in unit for m in module.modules() if m is not module}
        self._roots = [i for i, unit in enumerate(modules) if unit[0] not in inside]
        for module in (m for unit in modules for m in unit):
            self._cleanings.append(_Cleaning())
            self._hooks.append(module.register_forward_pre_hook(self._cleanings[-1]))
        self._hooks.append(model.register_forward_pre_hook(partial(_before_forward, weakref.ref(self)), prepend=True))
        self._hooks.append(model.register_forward_hook(partial(_after_forward, weakref.ref(self))))

    def _module(self, unit: int) -> Any:
        """An FSDPModule; None where it is gone."""
        return self._modules[unit]() if self._modules else None

    def all_gather(self, unit: UnitPlan, output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Handle:
        """Starts to bring every rank's part of a unit's weights; `output` has this rank's already."""
        if self._order is not None and unit.number not in self._order:
            self._order.append(unit.number)
        self._gathering.add(unit.number)
        exchange = self._exchange(group, "gather")
        own = output.chunk(exchange.world_size)[exchange.rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        name = f"weights of unit {unit.name!r}"
        return exchange.gather(Wire.of(output), tag=self._tag(0, "gather", unit, output.nbytes), what=name)

    def gathered(self, unit: UnitPlan) -> None:
        """FSDP2 takes the unit's weights."""
        self._gathering.discard(unit.number)

    def forward_begins(self) -> None:
        """Of the model."""
        self._recover()

    def forward_ended(self) -> None:
        """Weights that were gathered for a unit which did not run after all would be old ones in the next forward."""
        for i in sorted(self._gathering):
            if (module := self._module(i)) is not None:
                module.unshard()
                module.reshard()

    def _prefetch_in_order(self) -> None:
        order, self._order = self._order, None
        if order is None:
            return
        root = 0  # runs first, whether or not it has weights of its own
        for before, after in pairwise([root, *(i for i in order if i != root)]):
            first, second = self._module(before), self._module(after)
            if first is not None and second is not None:
                first.set_modules_to_forward_prefetch([second])

    def _exchange(self, group: dist.ProcessGroup, purpose: str) -> Exchange:
        """One for each purpose: a gather, which computation waits for, shall not wait for reductions before it."""
        key = (group, purpose)
        if key not in self._exchanges:
            self._exchanges[key] = exchange_over(group, self.control.device)
        return self._exchanges[key]

    def _tag(self, cycle: int, purpose: str, unit: UnitPlan, size: int) -> int:
        """Depends on the size, too: a message of another size than is expected would end a gloo process."""
        return tag(self._number, cycle, zlib.crc32(f"{purpose} {unit.number} {size}".encode()) % MAX_BUCKETS)

    # -- during backward ----------------------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        unit: UnitPlan,
        output: torch.Tensor,
        given: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
    ) -> None:
        """given: [ranks, output's numel], flat: this rank's gradients of the unit, cut into every rank's shards."""
        self._refuse(unit, output, op)
        self._enter_backward()
        self._current = None
        self._make_room()
        self._words[unit.number] += _CALL + given.numel()
        exchange = self._exchange(group, "reduce")
        rows = given.view(exchange.world_size, -1)
        wire = self._wire(unit, rows, exchange)
        numel = wire.data.numel() // exchange.world_size
        replicated = unit.replicas > 1
        sums = output
        if not replicated:
            # The first sum of a cycle becomes the shard; later ones are added to it, unrounded.
            dtype = torch.float32 if self._has_shards(unit) else unit.main_grads_dtype
            if dtype != output.dtype or numel != output.numel():
                sums = torch.empty(numel, dtype=dtype, device=output.device)
        elif numel != output.numel():
            sums = torch.empty(numel, dtype=output.dtype, device=output.device)
        handle = exchange.reduce(
            wire,
            partial(_add_up, sums, self._scale(unit, exchange.world_size)),
            tag=self._tag(self._cycle, "reduce", unit, given.nbytes),
            what=f"gradients of cycle {self._cycle}, unit {unit.name!r}",
        )
        if replicated:
            self._guarded(handle.result)
            if sums is not output:
                output.copy_(sums[: output.numel()])
                sums = output
        reduction = Reduction(unit, output, sums, None if replicated else handle)
        if self._check_for_nan and first_nonfinite([given]) != ALL_FINITE:
            reduction.suspect = rows
        self._reductions.append(reduction)

    def reduced(self, unit: UnitPlan, output: torch.Tensor) -> None:
        """FSDP2 is done with a unit, all-reduce included, and goes on to make gradients of the output."""
        last = self._reductions[-1] if self._reductions else None
        if last is not None and last.output is output:
            self._current = last
            return
        # One rank has the whole unit: FSDP2 has no use for a reduce-scatter then.
        self._enter_backward()
        self._words[unit.number] += _CALL + output.numel()
        dtype = torch.float32 if self._has_shards(unit) else unit.main_grads_dtype
        sums = torch.empty(output.numel(), dtype=dtype, device=output.device)
        add_up([Wire.of(output)], sums, 1.0 if self._divide_factor is None else unit.replicas / self._divide_factor)
        self._current = Reduction(unit, output, sums, None)
        if self._check_for_nan and first_nonfinite([output]) != ALL_FINITE:
            self._current.suspect = output.view(1, -1)
        self._reductions.append(self._current)

    def gradient_came(self, i: int) -> None:
        """FSDP2 made a gradient of a slice of the output, for the parameter's shard."""
        param = self.params[i]
        grad: Any = param.grad
        param.grad = None
        if self._current is None:
            raise RuntimeError(
                f"a gradient came for {self.names[i]!r}, but not through this library: set_all_reduce_hook or "
                "set_custom_reduce_scatter was called on its unit after parallelize"
            )
        self._current.add(i, int(tensor_of(grad).storage_offset()), grad)
        self._unit_of[i] = self._current.unit.number  # of several modules that share one unit, FSDP2 calls one's
        self._came[i] = _CAME

    def _refuse(self, unit: UnitPlan, output: torch.Tensor, op: dist.ReduceOp) -> None:
        if op != dist.ReduceOp.AVG:
            raise RuntimeError(
                f"unit {unit.name!r}: FSDP2 would scale the sum of its gradients itself, in {output.dtype} "
                "(set_gradient_divide_factor, set_force_sum_reduction_for_comms, or a reduction in float16): give "
                "gradient_divide_factor to parallelize, and MixedPrecisionPolicy(reduce_dtype=torch.float32) to "
                "fully_shard"
            )
        if unit.replicas > 1 and output.dtype != torch.float32:
            raise RuntimeError(
                f"unit {unit.name!r}: FSDP2 would add up the {unit.replicas} replicas in {output.dtype}: give "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32) to fully_shard; the wire between shards is still the "
                "policy's"
            )

    def _make_room(self) -> None:
        """As many units are under way as the exchange serves at a time; the gradients of more would pile up."""
        under_way = [reduction for reduction in self._reductions if reduction.handle is not None]
        for reduction in under_way[: max(0, len(under_way) - IN_FLIGHT + 1)]:
            self._settle(reduction)

    def _scale(self, unit: UnitPlan, shards: int) -> float:
        # FSDP2 takes the mean over the replicas.
        return 1.0 / shards if self._divide_factor is None else unit.replicas / self._divide_factor

    def _has_shards(self, unit: UnitPlan) -> bool:
        return any(self._unit_of[i] == unit.number for i in self._shards)

    def _wire(self, unit: UnitPlan, rows: torch.Tensor, exchange: Exchange) -> Wire:
        """The gradients as they travel: themselves, unless the wire's dtype is a narrower one."""
        world_size, numel = rows.shape
        dtype = unit.grad_comm_dtype
        if dtype.itemsize >= rows.dtype.itemsize:
            return Wire.of(rows.view(-1))
        if dtype != CODES:
            wire = Wire.of(torch.empty(rows.numel(), dtype=dtype, device=rows.device))
            pack([rows.view(-1)], [Piece(0, 0, rows.numel(), 0)], [0], wire, Seeds(0, 0))
            return wire
        padded = -(-numel // BLOCK) * BLOCK
        codes, scales = world_size * padded, world_size * padded // BLOCK
        wire = Wire(rows.new_empty(codes, dtype=CODES), rows.new_empty(scales, dtype=torch.uint8))
        pieces = [Piece(0, r * padded, numel, r * padded) for r in range(world_size)]
        pack(list(rows.unbind()), pieces, [unit.number], wire, Seeds.of_parts(exchange.rank, self._cycle))
        return wire

    def _enter_backward(self) -> None:
        self._recover()
        if self._end is not None:
            return
        if self._failure is not None:
            raise RuntimeError(f"gradients cannot be reduced any more: {self._failure}")
        self._prefetch_in_order()
        self._bytes_before = self._bytes_sent()
        self._added = set()
        for i, param in enumerate(self.params):
            if param.grad is not None or i in self._grads:
                self._take(i, param)
        end = _BackwardEnd(self)
        # After FSDP2's own, which reduces the units whose inputs need no gradient.
        Variable._execution_engine.queue_callback(end)
        self._end = weakref.ref(end)

    def _take(self, i: int, param: torch.nn.Parameter) -> None:
        """FSDP2 would add to what is in `.grad`, before there is anything to add."""
        grad, param.grad = param.grad, None
        if grad is None:
            self._forget(i)
        elif grad is not self._grads.get(i):  # somebody else's
            local = tensor_of(grad)
            if self._visible(i):
                self._shards[i], self._grads[i] = local, grad
            elif i in self._shards:
                self._accumulate([(i, local)])
            else:
                self._shards[i] = local.to(self._unit(i).main_grads_dtype)

    def _recover(self) -> bool:
        """Where the last backward raised, which is the answer. What it sent is waited for, as the other ranks sent it too, and is worth
        nothing; gradient shards are what they were before it."""
        if self._end is None or self._end() is not None:
            return False
        reductions = self._close()
        self._cycle += 1
        self._show()
        for reduction in reductions:
            reduction.wait(self._guarded)
        self._broken |= self._added
        for cleaning in self._cleanings:
            cleaning.wanted = True
        for unit in self._roots:
            root = self._module(unit)
            if not hasattr(root, "reset_iter_state"):
                self._failure = (
                    "a backward raised, after which FSDP2 of this torch cannot go on (torch >= 2.13 can): make the "
                    "model anew"
                )
                raise RuntimeError(self._failure)
            root.reset_iter_state()
        return True

    # -- at its end ---------------------------------------------------------------------------------------------------

    def backward_ended(self) -> None:
        """Waits for the sums, installs them, agrees with the other ranks on what came."""
        nonfinite = next((n for r in self._reductions if (n := r.first_nonfinite()) != ALL_FINITE), ALL_FINITE)
        for i, param in enumerate(self.params):
            if not self._came[i] and not param.requires_grad:
                self._came[i] = _FROZEN
        header = torch.tensor([self._cycle, nonfinite, *self._words], dtype=torch.int64)
        report = torch.cat([header.view(torch.uint8), torch.frombuffer(self._came, dtype=torch.uint8)])
        what = f"end of gradient cycle {self._cycle}"
        number = tag(self._number, self._cycle, MAX_BUCKETS)
        reductions = self._close()
        self._cycle += 1
        gather = self._guarded(lambda: self.control.all_gather(report.to(self.control.device), tag=number, what=what))
        reports = [row.cpu() for row in self._guarded(gather)]
        words = [row[: header.nbytes].view(torch.int64).tolist() for row in reports]
        self._check_places(words)
        for reduction in reductions:
            if not reduction.settled:
                self._settle(reduction)
        self._show()
        self.wire_bytes = self._bytes_sent() - self._bytes_before
        self._check_finite([row[1] for row in words])
        # What FSDP2 keeps to itself (set_requires_all_reduce) comes in a later backward.
        if not self._find_unused and all(r.slices for r in reductions):
            self._check_all_came([row[header.nbytes :] for row in reports])

    def _close(self) -> list[Reduction]:
        self._end, self._current = None, None
        self._came = bytearray(len(self.params))
        self._words = [0] * len(self.units)
        reductions, self._reductions = self._reductions, []
        return reductions

    def _settle(self, reduction: Reduction) -> None:
        """The sums become gradient shards, or are added to them."""
        reduction.wait(self._guarded)
        self._check_covered(reduction)
        reduction.settled = True
        later: list[tuple[int, torch.Tensor]] = []
        for one in reduction.slices:
            value = reduction.sum_of(one, tensor_of(self.params[one.param]).shape)
            if one.param in self._shards:
                later.append((one.param, value))
            else:
                self._first(one, value)
        self._accumulate(later)
        self._added.update(one.param for one in reduction.slices)

    def _first(self, one: Slice, value: torch.Tensor) -> None:
        main = self._unit(one.param).main_grads_dtype
        if not self._visible(one.param):
            self._shards[one.param] = value.to(main)
            return
        local = tensor_of(one.grad)
        if local.data_ptr() != value.data_ptr():
            local.copy_(value)
        self._shards[one.param], self._grads[one.param] = local, one.grad

    def _accumulate(self, values: Sequence[tuple[int, torch.Tensor]]) -> None:
        values = [(i, value) for i, value in values if value.numel() > 0]
        if values:
            _ops.call("bucket_accumulate_", [self._shards[i] for i, _ in values], [value for _, value in values])

    def _show(self) -> None:
        for i, grad in self._grads.items():
            self.params[i].grad = grad

    def _check_covered(self, reduction: Reduction) -> None:
        """A parameter that FSDP2 reduces and nobody here knows would be stepped with numbers that are none."""
        if not reduction.slices or self._is_covered(reduction):
            return
        raise RuntimeError(
            f"FSDP2 reduced a parameter of unit {reduction.unit.name!r} that parallelize did not see: it was frozen "
            "then, or it is another tensor now (load_state_dict(assign=True), Module.to): call parallelize again after "
            "such a change"
        )

    def _is_covered(self, reduction: Reduction) -> bool:
        end = 0
        for one in sorted(reduction.slices, key=lambda s: s.begin):
            if one.begin != end:
                return False
            end += self._padded_numel(self.params[one.param])
        return end == reduction.output.numel()

    def _padded_numel(self, param: Any) -> int:
        """Of a shard, the largest: all ranks' are padded to it."""
        shape = list(tensor_of(param).shape)
        for dim, placement in enumerate(param.placements):
            if placement.is_shard():
                rows, size = param.shape[placement.dim], param.device_mesh.size(dim)
                shape[placement.dim] = -(-rows // size)
                break
        return torch.Size(shape).numel()

    def _bytes_sent(self) -> int:
        """For reductions."""
        return self.control.bytes_sent + sum(
            e.bytes_sent for (_, what), e in self._exchanges.items() if what == "reduce"
        )

    def _guarded(self, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except RuntimeError as error:
            # The ranks are not at the same place any more, and no later message could tell.
            self._failure = str(error)
            raise

    def _check_places(self, words: Sequence[Sequence[int]]) -> None:
        """That all ranks reduced the same, before the sums are waited for: what a rank did not send never comes."""
        own = words[self.control.rank]
        for rank, theirs in enumerate(words):
            if theirs[0] != own[0]:
                self._failure = f"rank {rank} is in gradient cycle {theirs[0]} and rank {self.control.rank} in {own[0]}"
                raise RuntimeError(self._failure)
        for unit in self.units:
            counts = [row[2 + unit.number] for row in words]
            if len(set(counts)) > 1:
                said = ", ".join(
                    f"rank {rank} {count % _CALL} elements in {count // _CALL} reductions"
                    for rank, count in enumerate(counts)
                )
                self._failure = (
                    f"the ranks reduced different gradients of unit {unit.name!r} ({said}): a parameter was used on "
                    "some ranks only. With torch >= 2.13, parallelize(..., find_unused_parameters=True) lets such "
                    "parameters count as zero; this process group cannot be used any more"
                )
                raise RuntimeError(self._failure)

    def _check_finite(self, nonfinite: Sequence[int]) -> None:
        found = [f"{self.names[i]!r} on rank {rank}" for rank, i in enumerate(nonfinite) if i != ALL_FINITE]
        if found:
            self._poisoned.update(i for i in nonfinite if i != ALL_FINITE)
            raise RuntimeError(
                f"gradients with NaN or Inf before communication (check_for_nan_in_grad): {', '.join(found)}. "
                "Nothing was stepped; call zero_grad() before going on."
            )

    def _check_all_came(self, came: Sequence[torch.Tensor]) -> None:
        absent = sorted({i for states in came for i in states.eq(_ABSENT).nonzero().flatten().tolist()})
        if absent:
            shown = 8
            names = ", ".join(repr(self.names[i]) for i in absent[:shown])
            more = f" and {len(absent) - shown} more" if len(absent) > shown else ""
            raise RuntimeError(
                f"no gradient came for {names}{more}. The loss does not depend on the parameter, or it was replaced "
                "after parallelize. If parameters may be unused, call parallelize(..., find_unused_parameters=True). "
                "Call zero_grad() before going on."
            )


def _add_up(sums: torch.Tensor, scale: float, chunks: Sequence[Wire]) -> None:
    add_up(chunks, sums, scale)


# Hooks hold the engine weakly: the parameters must not keep it alive.


def _on_grad(engine: "weakref.ref[FsdpEngine]", i: int, _param: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.gradient_came(i)


def _before_forward(engine: "weakref.ref[FsdpEngine]", _module: Any, _inputs: Any) -> None:
    alive = engine()
    if alive is not None:
        alive.forward_begins()


def _after_forward(engine: "weakref.ref[FsdpEngine]", _module: Any, _inputs: Any, _outputs: Any) -> None:
    alive = engine()
    if alive is not None:
        alive.forward_ended()


class _Cleaning:
    """A hook of a unit's module, behind FSDP2's, which puts whole parameters into it. After a backward that raised,
    those have gradients that FSDP2 did not reduce any more, and would add to the next ones."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, module: torch.nn.Module, _inputs: Any) -> None:
        if self.wanted:
            self.wanted = False
            for param in module.parameters():
                if not _local.is_dtensor(param):
                    param.grad = None
