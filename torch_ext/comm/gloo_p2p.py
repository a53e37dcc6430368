"""Point-to-point messages over gloo: plain or compressed buffers between this rank and every other one of a group."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from torch_ext.comm import compression, group_calls
from torch_ext.comm.communicator import Communicator
from torch_ext.comm.lost_ranks import ABANDONED, failed, refuse_failed
from torch_ext.comm.wire import WireBuffer


class P2PWork(Protocol):
    """torch.distributed.Work of one message, or what stands for it here."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


Works = list[tuple[int, P2PWork]]
"""Messages with their peers, ranks of the group."""


def _wait_once(work: P2PWork) -> None:
    """Waits, also where an interrupted wait had completed: gloo would wait for another message then."""
    if not work.is_completed():
        work.wait()


def wait_all(works: Works, group: dist.ProcessGroup, label: str) -> None:
    """Waits for every message. RuntimeError names the ranks whose messages are missing."""
    missing: list[int] = []
    first: RuntimeError | None = None
    for peer, work in works:
        try:
            _wait_once(work)
        except RuntimeError as error:
            missing.append(peer)
            first = first or error
            # After a timeout gloo answers for the other ranks at once, which tells those that sent from those that did
            # not. A lost connection concerns one rank only, and messages of others may still arrive.
            if "imed out" not in str(first):
                break
    if first is not None:
        raise failed(group, label, first, missing) from first


class MemoryPool:
    """Memory to receive into, used again: as many blocks as are in use at a time. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, parts: list[WireBuffer], rank: int) -> tuple[torch.Tensor, list[WireBuffer]]:
        """A block, and in it a buffer for each rank's chunk; this rank's own chunk is parts[rank], not copied."""
        own, others = parts[rank], len(parts) - 1
        codes, scales = own.data.nbytes * others, own.scales.nbytes * others
        memory = self.lend(codes + scales, own.data.device)
        data = memory[:codes].view(own.data.dtype)
        whole = WireBuffer(data, memory[codes : codes + scales] if scales else own.scales)
        chunks = whole.parts(others) if others > 1 else [whole] * others
        chunks.insert(rank, own)
        return memory, chunks

    def lend(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A block of nbytes or more."""
        with self._lock:
            self._free.sort(key=torch.Tensor.numel)
            for i, memory in enumerate(self._free):
                if memory.numel() >= nbytes:
                    return self._free.pop(i)
            if self._free:  # all too small: the largest is replaced
                self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give_back(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._free.append(memory)


class CompressedMessage:
    """A compressed buffer in memory of a pool, which it keeps until the last of its `users` is done."""

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
        if self._completed:  # and its memory may be another message's
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
    """Posts messages to and from all other ranks of the group, compressed where `compresses` is set."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        # Each rank begins with its successor, so that not all of them send to rank 0 first.
        self._peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self._compressed_memory = MemoryPool()
        self._lock = threading.Lock()

    def receive(self, wires: list[WireBuffer], tag: int, label: str) -> Works:
        """Posts wires[peer] <- peer for every peer."""

        def post(peer: int) -> Iterator[P2PWork]:
            receive = partial(self._receive, peer, tag)
            if self._compressed(wires[peer]):
                yield PendingRecv(CompressedMessage(wires[peer].data, self._compressed_memory), receive)
            else:
                yield from map(receive, wires[peer].messages())

        return self._post(post, label)

    def send(self, wires: list[WireBuffer], tag: int, label: str) -> Works:
        """Posts wires[peer] -> peer for every peer."""
        made: dict[int, tuple[CompressedMessage, int]] = {}  # by address: what all peers get is compressed once

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
        refuse_failed(self.group, label)
        works: Works = []
        for peer in self._peers:
            try:
                works.extend((peer, work) for work in post(peer))
            except RuntimeError as error:
                ABANDONED.append(works)
                raise failed(self.group, label, error, [peer]) from error
        return works


class PendingTransfer:
    """Posted receives and sends, for which whoever asks first waits."""

    def __init__(self, peers: PeerMessages, tag: int, label: str) -> None:
        self.peers, self.tag, self.label = peers, tag, label
        self.shards: list[WireBuffer] = []
        """By rank: this rank's own is sent, the others' are received."""
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
        """Waits, and then keeps nothing of the messages, however long the handle is kept. After an error it raises it
        again; after an interrupt it goes on waiting for what is still under way."""
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
        # Nobody waited (the model was dropped after an exception, say). gloo blocks a connection of which a message is
        # withdrawn, and completes by itself what it has.
        if self.recvs or self.sends:
            abandoned.append((self.recvs, self.sends, self.shards))
