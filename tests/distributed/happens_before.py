"""A pretended GPU that finds races between streams: two accesses to the same memory that no event orders.

Every operator runs at once, on the CPU, and is recorded as work of the current stream. Streams have vector clocks. Of
two accesses to one byte, at least one of them a write, the stream of the later must have waited for the earlier.
Memory belongs to the stream that was current when it was allocated, as in torch's caching allocator. Before that
stream may allocate it again, it must have waited for every access to it.

The collectives of a group run on a stream of the group's own, as NCCL's do: they wait for the stream that is current
when they are started, and `Work.wait` makes the current stream wait for them.

torch's FSDP2 is not modelled. Its own code runs over streams and events of the pretended device, in place of those of
torch.cpu, which do nothing. So the order of its waits and of its frees is that of the installed torch.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_ext.comm.streams import Streams

Clock = dict[str, int]


class _Access(NamedTuple):
    """One read or write of bytes [begin, end) of a storage, at `time` of the stream's own clock."""

    stream: str
    time: int
    begin: int
    end: int
    writes: bool
    what: str


class _Memory:
    """A storage's accesses, and the stream that may allocate its memory again."""

    def __init__(self, tensor: torch.Tensor, owner: str) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.owner = owner
        self.accesses: list[_Access] = []

    def is_free(self) -> bool:
        """Whether the storage is gone or was resized to 0 bytes, as FSDP2 does with unsharded weights."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return storage is None or storage.nbytes() == 0


class FakeStreams(Streams):
    """torch_ext's interface to streams, over the pretended device. `races` lists what was not ordered."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.used: set[str] = set()
        self._current = ["compute"]
        self._count = 0
        self._groups: list[Any] = []
        self._clocks: dict[str, Clock] = {"compute": {"compute": 0}}
        self._memories: dict[int, _Memory] = {}
        self._freed: dict[str, list[_Access]] = {}  # by stream: accesses to freed memory that it may allocate again

    # -- torch_ext's interface

    def current(self) -> str:
        return self._current[-1]

    def new(self) -> str:
        self._count += 1
        return f"side {self._count}"

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:  # type: ignore[override]
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def of_group(self, group: Any) -> str:
        """Returns the stream on which the group's collectives run."""
        if group not in self._groups:
            self._groups.append(group)
        return f"group {self._groups.index(group)}"

    def event(self) -> list[Clock]:
        return []

    def record(self, event: list[Clock], stream: str) -> None:
        self._free()
        event[:] = [dict(self._clock(stream))]

    def wait(self, stream: str, event: list[Clock]) -> None:
        self._free()
        for passed in event:
            self._follow(stream, passed)

    def query(self, event: list[Clock]) -> bool:
        return True

    def pointer(self, stream: str) -> int:
        return 0

    def device(self) -> Any:
        return contextlib.nullcontext()

    def multiprocessors(self) -> int:
        return 132

    def polling(self) -> Any:
        return contextlib.nullcontext()

    def knows(self, stream: str, other: str) -> bool:
        """Whether `stream` has waited for all work that was given to `other`."""
        return self._clock(stream).get(other, 0) >= self._clock(other)[other]

    # -- the model

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {stream: 0})

    def _follow(self, stream: str, passed: Clock) -> None:
        clock = self._clock(stream)
        for other, time in passed.items():
            clock[other] = max(clock.get(other, 0), time)

    def foreign(self, tensor: torch.Tensor) -> torch.Tensor:
        """Registers memory that torch's allocator did not allocate and so never hands out again. Returns the tensor."""
        self._memories[tensor.untyped_storage()._cdata] = _Memory(tensor, "nobody")
        return tensor

    def touch(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str) -> None:
        """Records an operator, named `what`, as work of the current stream."""
        self._free()
        stream = self.current()
        self.used.add(stream)
        clock = self._clock(stream)
        clock[stream] += 1
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    self._access(tensor, stream, clock, written, what)

    def _access(self, tensor: torch.Tensor, stream: str, clock: Clock, written: bool, what: str) -> None:
        """Records one access, and a race with each earlier one that overlaps, conflicts and was not waited for."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = _Memory(tensor, stream)
            self._hand_out(stream)
        memory = self._memories[storage._cdata]
        begin = tensor.storage_offset() * tensor.element_size()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        new = _Access(stream, clock[stream], begin, begin + span * tensor.element_size(), written, what)
        kept = []
        for old in memory.accesses:
            overlaps = old.begin < new.end and new.begin < old.end
            known = clock.get(old.stream, 0) >= old.time
            if overlaps and (old.writes or written) and not known:
                self.races.append(f"{new.what} on {stream} does not follow {old.what} on {old.stream}")
            covered = new.begin <= old.begin and old.end <= new.end
            if not (known and covered and (written or not old.writes)):
                kept.append(old)
        memory.accesses = [*kept, new]

    def _free(self) -> None:
        """Moves the accesses of freed memory to `_freed` of the owning stream."""
        for key, memory in list(self._memories.items()):
            if memory.is_free():
                del self._memories[key]
                self._freed.setdefault(memory.owner, []).extend(memory.accesses)

    def _hand_out(self, owner: str) -> None:
        """Records a race for each access to freed memory that the owner has not waited for before it allocates."""
        clock = self._clock(owner)
        for access in self._freed.pop(owner, []):
            if clock.get(access.stream, 0) < access.time:
                self.races.append(f"memory of {owner} is handed out again before {access.what} on {access.stream}")

    def end(self) -> None:
        """Checks the memory of side streams, which the next exchange would reuse."""
        gc.collect()
        self._free()
        for owner in list(self._freed):
            if owner.startswith("side"):
                self._hand_out(owner)


class Recording(TorchDispatchMode):
    """Within this mode, records every operator as work of the current stream."""

    def __init__(self, streams: FakeStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if func.namespace == "c10d":
            return outputs
        written: list[torch.Tensor] = []
        read: list[torch.Tensor] = []
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.name in named:
                found = [t for t in tree_leaves(named[argument.name]) if isinstance(t, torch.Tensor)]
                (written if argument.alias_info is not None and argument.alias_info.is_write else read).extend(found)
        makes_views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if makes_views and not written:
            return outputs
        if func._schema.name.startswith(("aten::new_", "aten::empty_like")):
            read = []  # reads only the shape
        made = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        self._streams.touch(read, [*written, *made], str(func._schema.name))
        return outputs


class _Work:
    """The handle of a collective, which has already run, on the group's stream."""

    def __init__(self, streams: FakeStreams, event: list[Clock]) -> None:
        self._streams, self._event = streams, event

    def wait(self) -> None:
        self._streams.wait(self._streams.current(), self._event)


def _on_stream_of_group(streams: FakeStreams, kind: str, run: Any) -> Any:
    """Wraps a collective of torch.distributed so that it counts as work of its group's stream."""

    def collective(into: torch.Tensor, sent: torch.Tensor, *sizes: Any, group: Any, async_op: bool) -> _Work:
        before, after = streams.event(), streams.event()
        streams.record(before, streams.current())
        with streams.on(streams.of_group(group)):
            streams.wait(streams.current(), before)
            streams.touch([sent], [into], kind)
            run(into, sent.clone(), *sizes, group=group)
            streams.record(after, streams.current())
        return _Work(streams, after)

    return collective


def _all_reduced(streams: FakeStreams, run: Any) -> Any:
    """Wraps dist.all_reduce, which works in place and makes the current stream wait."""

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        def into(whole: torch.Tensor, _sent: torch.Tensor, *, group: Any) -> None:
            run(whole, op=op, group=group)

        _on_stream_of_group(streams, "all_reduce", into)(tensor, tensor, group=group, async_op=True).wait()

    return all_reduce


class _Fsdp2Event:
    """The part of torch.cuda.Event that FSDP2 uses."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams, self.clocks = streams, streams.event()

    def record(self, stream: "_Fsdp2Stream | None" = None) -> None:
        self._streams.record(self.clocks, self._streams.current() if stream is None else stream.name)


class _Fsdp2Stream:
    """The part of torch.cuda.Stream that FSDP2 uses."""

    def __init__(self, streams: FakeStreams, name: str) -> None:
        self._streams, self.name = streams, name

    def wait_event(self, event: _Fsdp2Event) -> None:
        self._streams.wait(self.name, event.clocks)

    def record_event(self) -> _Fsdp2Event:
        event = _Fsdp2Event(self._streams)
        event.record(self)
        return event

    def wait_stream(self, other: "_Fsdp2Stream") -> None:
        self.wait_event(other.record_event())


@contextlib.contextmanager
def _for_fsdp2(streams: FakeStreams) -> Iterator[None]:
    """Replaces the streams and events of torch.cpu, which FSDP2 uses as it would use those of torch.cuda."""
    made: dict[str, _Fsdp2Stream] = {}

    def named(name: str) -> _Fsdp2Stream:
        return made.setdefault(name, _Fsdp2Stream(streams, name))

    def new(priority: int = 0) -> _Fsdp2Stream:
        return named(f"fsdp2 {len(made)}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "Stream", new)
        patch.setattr(torch.cpu, "Event", lambda: _Fsdp2Event(streams))
        patch.setattr(torch.cpu, "current_stream", lambda device=None: named(streams.current()))
        patch.setattr(torch.cpu, "stream", lambda stream: streams.on(stream.name))
        yield


@contextlib.contextmanager
def pretended(streams: FakeStreams) -> Iterator[None]:
    """Within the context, new exchanges of this process run over the pretended device; gloo moves the bytes."""
    from torch_ext.comm import communicator, factory

    with pytest.MonkeyPatch.context() as patch, _for_fsdp2(streams):
        for module in (communicator, factory):
            patch.setattr(module, "streams_of", lambda device: streams)
        patch.setattr(factory, "backend", lambda group, device: "nccl")
        for kind in ("all_to_all_single", "all_gather_into_tensor"):
            patch.setattr(dist, kind, _on_stream_of_group(streams, kind, getattr(dist, kind)))
        patch.setattr(dist, "all_reduce", _all_reduced(streams, dist.all_reduce))
        with Recording(streams):
            yield
        streams.end()
