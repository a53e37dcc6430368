"""Point-to-point messages over gloo: plain or compressed buffers between this rank and every other rank of a group."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from torch_ext.comm import compression, group_calls
from torch_ext.comm.communicator import Communicator
from torch_ext.comm.lost_ranks import ABANDONED, refuse_failed, translated_error
from torch_ext.comm.wire import WireBuffer


class P2PWork(Protocol):
    """The torch.distributed.Work of one message, or a class here with the same methods."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


Works = list[tuple[int, P2PWork]]
"""Pairs of a peer (a rank in the group) and the work of a message from or to it."""


def _wait_once(work: P2PWork) -> None:
    """Waits for a message, unless it is complete. After a wait that was interrupted but had completed, a second wait
    would make gloo wait for another message."""
    if not work.is_completed():
        work.wait()


def wait_all(works: Works, group: dist.ProcessGroup, label: str) -> None:
    """Waits for every message. Raises RuntimeError that names the ranks whose messages are missing."""
    missing: list[int] = []
    first: RuntimeError | None = None
    for peer, work in works:
        try:
            _wait_once(work)
        except RuntimeError as error:
            missing.append(peer)
            first = first or error
            # After a timeout, gloo answers at once for all other messages, so waiting for them shows which ranks have
            # not sent. A lost connection concerns one rank only; messages of other ranks may still arrive.
            if "imed out" not in str(first):
                break
    if first is not None:
        raise translated_error(group, label, first, missing) from first


class MemoryPool:
    """A pool of receive buffers: it keeps at most as many blocks as were in use at the same time. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, parts: list[WireBuffer], rank: int) -> tuple[torch.Tensor, list[WireBuffer]]:
        """Returns a block, and for each rank a buffer in it to receive the rank's chunk. This rank's own chunk is
        parts[rank] itself."""
        own, others = parts[rank], len(parts) - 1
        codes, scales = own.data.nbytes * others, own.scales.nbytes * others
        memory = self.lend(codes + scales, own.data.device)
        data = memory[:codes].view(own.data.dtype)
        whole = WireBuffer(data, memory[codes : codes + scales] if scales else own.scales)
        chunks = whole.parts(others) if others > 1 else [whole] * others
        chunks.insert(rank, own)
        return memory, chunks

    def lend(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Returns a block of at least nbytes."""
        with self._lock:
            self._free.sort(key=torch.Tensor.numel)
            for i, memory in enumerate(self._free):
                if memory.numel() >= nbytes:
                    return self._free.pop(i)
            if self._free:  # all are too small: the new block replaces the largest
                self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give_back(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._free.append(memory)


class CompressedMessage:
    """A compressed buffer in a pool's memory, which it returns when the last of its `users` is done."""

    def __init__(self, values: torch.Tensor, pool: MemoryPool) -> None:
        self.values = values
        self._pool = pool
        nbytes = compression.size(values.numel(), values.dtype)
        self._memory: torch.Tensor | None = pool.lend(nbytes, values.device)
        self.bytes = self._memory[:nbytes]
        self.users = 0

    def done(self) -> None:
        """Called once by each user; not thread-safe."""
        self.users -= 1
        if self.users <= 0 and self._memory is not None:
            self._pool.give_back(self._memory)
            self._memory = None


class PendingSend:
    """A compressed message that is being sent to one rank. Not thread-safe."""

    def __init__(self, message: CompressedMessage, work: P2PWork) -> None:
        self._message: CompressedMessage | None = message
        self._work = work
        message.users += 1

    def wait(self) -> None:
        _wait_once(self._work)
        message, self._message = self._message, None
        if message is not None:
            message.done()

    def is_completed(self) -> bool:
        return self._message is None


class PendingRecv:
    """A compressed message that is being received, and expanded into its values by `wait`. Not thread-safe."""

    def __init__(self, message: CompressedMessage, receive: Callable[[torch.Tensor], P2PWork]) -> None:
        self._message, self._receive = message, receive
        self._works = [receive(message.bytes)]
        self._completed = False

    def wait(self) -> None:
        if self._completed:  # the memory may already belong to another message
            return
        _wait_once(self._works[0])
        if len(self._works) == 1 and (rest := compression.expand(self._message.bytes, self._message.values)):
            self._works.append(self._receive(compression.end_of(self._message.values, rest)))
        _wait_once(self._works[-1])
        self._completed = True
        self._message.done()

    def is_completed(self) -> bool:
        return self._completed


class PeerMessages(Communicator):
    """Posts messages to and from all other ranks of the group; compressed if `compresses` is set."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        # Each rank starts with its successor, so that not all ranks send to rank 0 first.
        self._peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self._compressed_memory = MemoryPool()
        self._lock = threading.Lock()

    def receive(self, wires: list[WireBuffer], tag: int, label: str) -> Works:
        """Posts receives: wires[peer] from each peer."""

        def post(peer: int) -> Iterator[P2PWork]:
            receive = partial(self._receive, peer, tag)
            if self._compressed(wires[peer]):
                yield PendingRecv(CompressedMessage(wires[peer].data, self._compressed_memory), receive)
            else:
                yield from map(receive, wires[peer].messages())

        return self._post(post, label)

    def send(self, wires: list[WireBuffer], tag: int, label: str) -> Works:
        """Posts sends: wires[peer] to each peer."""
        made: dict[int, tuple[CompressedMessage, int]] = {}  # by address, so that a shared wire is compressed only once

        def post(peer: int) -> Iterator[P2PWork]:
            wire = wires[peer]
            if not self._compressed(wire):
                for plain in wire.messages():
                    yield group_calls.send(plain, self.group, peer, tag)
                return
            address = wire.data.data_ptr()
            if address not in made:
                message = CompressedMessage(wire.data, self._compressed_memory)
                made[address] = message, compression.compress(wire.data, message.bytes)
            message, rest = made[address]
            yield PendingSend(message, group_calls.send(message.bytes, self.group, peer, tag))
            with self._lock:
                self.bytes_sent += rest
            if rest:
                yield group_calls.send(compression.end_of(wire.data, rest), self.group, peer, tag)

        return self._post(post, label)

    def _receive(self, peer: int, tag: int, message: torch.Tensor) -> P2PWork:
        return group_calls.receive(message, self.group, peer, tag)

    def _compressed(self, wire: WireBuffer) -> bool:
        return self._message_bytes(wire) < wire.nbytes

    def _post(self, post: Callable[[int], Iterator[P2PWork]], label: str) -> Works:
        """Posts the messages of every peer. If posting fails, keeps the posted ones alive and raises an error that
        names the peer."""
        refuse_failed(self.group, label)
        works: Works = []
        for peer in self._peers:
            try:
                works.extend((peer, work) for work in post(peer))
            except RuntimeError as error:
                ABANDONED.append(works)
                raise translated_error(self.group, label, error, [peer]) from error
        return works


class PendingTransfer:
    """Posted receives and sends; the first caller of `wait` waits for them."""

    def __init__(self, peers: PeerMessages, tag: int, label: str) -> None:
        self.peers, self.tag, self.label = peers, tag, label
        self.shards: list[WireBuffer] = []
        """One buffer per rank: this rank's own is sent, all others are received."""
        self.recvs: Works = []
        self.sends: Works = []
        self._failure: str | None = None

    def post_recvs(self) -> None:
        self.recvs = self.peers.receive(self.shards, self.tag, self.label)

    def post_sends(self) -> None:
        if self.shards:
            own = self.shards[self.peers.rank]
            self.sends += self.peers.send([own] * self.peers.world_size, self.tag, self.label)

    def wait_for(self, works: Works) -> None:
        wait_all(works, self.peers.group, self.label)

    def wait(self) -> None:
        """Waits for all messages and drops the references to their memory. After an error, every later call raises it
        again. After an interrupt, a later call continues to wait for the remaining messages."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        try:
            self.wait_for(self.recvs)
            self.wait_for(self.sends)
        except RuntimeError as error:
            self._failure = str(error)
            ABANDONED.append((self.recvs, self.sends, self.shards))
            self.recvs, self.sends, self.shards = [], [], []
            raise
        self.recvs, self.sends, self.shards = [], [], []

    def __del__(self, abandoned: list[object] = ABANDONED) -> None:
        # `wait` was never called (the model was dropped after an exception, say). Freeing a posted message would block
        # its gloo connection; if it is kept, gloo completes it.
        if self.recvs or self.sends:
            abandoned.append((self.recvs, self.sends, self.shards))
