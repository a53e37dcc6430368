"""NCCL without torch.distributed: the library that was found, and one rank's communicator (torch_ext_advanced.h, 4)."""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch_ext.native import library, structs

ID_BYTES, RECORDS = 128, 64  # TX_NCCL_ID_BYTES, TX_NCCL_RECORDS
RECORD_BYTES = 128

PATH_VARIABLE = "TORCH_EXT_NCCL"
"""The environment's word for a libnccl.so.2, where the process has not loaded one already."""


@structs.mirror("tx_nccl_about")
class About(library.Struct):
    """What library was found."""


@structs.mirror("tx_nccl_comm_args")
class CommArgs(library.Struct):
    """Of a new communicator."""


@structs.mirror("tx_nccl_message")
class Message(library.Struct):
    """Bytes to send and where to receive; addresses in device memory."""


@structs.mirror("tx_nccl_memory")
class Memory(library.Struct):
    """Device memory of a communicator."""


class Found(NamedTuple):
    handle: int
    """tx_nccl *."""
    version: int
    path: str
    windows: bool

    def version_text(self) -> str:
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"


@functools.cache
def find() -> Found:
    """torch's, if this process has loaded it; else TORCH_EXT_NCCL's; else the Python package's; else the system's. It
    stays loaded. RuntimeError where there is none, or one that is too old, which says what to do."""
    handle, about = ctypes.c_void_p(), About(size=ctypes.sizeof(About))
    path = os.environ.get(PATH_VARIABLE) or _of_package()
    _function("tx_nccl_open", ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))(path and path.encode(), handle)
    _function("tx_nccl_about_this", ctypes.c_void_p, ctypes.POINTER(About))(handle, about)
    assert handle.value is not None
    return Found(handle.value, about.version, about.path.decode(), bool(about.windows))


def _of_package() -> str | None:
    """nvidia-nccl-cu13's or -cu12's, beside torch."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = os.path.join(folder, "nccl", "lib", "libnccl.so.2")
        if os.path.isfile(path):
            return path
    return None


def describe() -> list[tuple[str, str]]:
    """What was found, or why nothing, in lines of a name and a value, for people."""
    try:
        found = find()
    except RuntimeError as refusal:
        return [("NCCL", f"none: {refusal}")]
    windows = "symmetric windows" if found.windows else "no symmetric windows (2.27 has them)"
    return [("NCCL", f"{found.version_text()} ({found.path}), {windows}")]


class Comm:
    """One rank's communicator. Used by one thread at a time, but for `check` and `abort`."""

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        world_size: int,
        timeout: float,
        gather_id: bytes | None = None,
        multiprocessors: int = 0,
    ) -> None:
        """Waits for every rank; timeout: for how many seconds, here and whenever NCCL is slow to take an operation.
        gather_id, multiprocessors: of all-gathers with a communicator of their own (tx_nccl_comm_args)."""
        arguments = CommArgs(
            size=ctypes.sizeof(CommArgs),
            library=find().handle,
            id=None,
            rank=rank,
            n_ranks=world_size,
            timeout_seconds=timeout,
            copy_engines=1,
            multiprocessors=multiprocessors,
            gather_id=None,
        )
        kept = ctypes.create_string_buffer(unique_id, ID_BYTES)
        arguments.id = ctypes.cast(kept, ctypes.c_char_p)
        if gather_id is not None:
            kept_gather = ctypes.create_string_buffer(gather_id, ID_BYTES)
            arguments.gather_id = ctypes.cast(kept_gather, ctypes.c_char_p)
        self._handle = ctypes.c_void_p()
        _function("tx_nccl_comm_new", ctypes.POINTER(CommArgs), ctypes.POINTER(ctypes.c_void_p))(
            arguments, self._handle
        )
        self._memories: list[Memory] = []

    def all_to_all(self, what: str, messages: Sequence[Message], stream: int) -> None:
        _issue("tx_nccl_all_to_all")(
            self._handle, what.encode(), len(messages), (Message * len(messages))(*messages), stream
        )

    def all_gather(self, what: str, messages: Sequence[Message], stream: int) -> None:
        _issue("tx_nccl_all_gather")(
            self._handle, what.encode(), len(messages), (Message * len(messages))(*messages), stream
        )

    def allocate(self, nbytes: int) -> int:
        """The address of device memory, a symmetric window where NCCL has them; every rank calls it. Until `close`."""
        memory = Memory(size=ctypes.sizeof(Memory), bytes=nbytes)
        _function("tx_nccl_memory_new", ctypes.c_void_p, ctypes.POINTER(Memory))(self._handle, memory)
        self._memories.append(memory)
        return int(memory.data)

    def check(self) -> None:
        """RuntimeError where NCCL reports an error, or somebody aborted."""
        _function("tx_nccl_comm_check", ctypes.c_void_p)(self._handle)

    def abort(self, why: str) -> None:
        abort = library.function("tx_nccl_comm_abort", ctypes.c_void_p, ctypes.c_char_p, restype=None)
        abort(self._handle, why.encode())

    def digest(self) -> tuple[int, int]:
        """How many operations there were, and a hash of them all (signed, as words travel)."""
        count, digest = ctypes.c_int64(), ctypes.c_int64()
        _function("tx_nccl_digest", ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64))(
            self._handle, count, digest
        )
        return count.value, digest.value

    def records(self) -> bytes:
        """Of the last operations."""
        found = ctypes.create_string_buffer(RECORDS * RECORD_BYTES)
        _function("tx_nccl_records", ctypes.c_void_p, ctypes.c_char_p)(self._handle, found)
        return found.raw

    def close(self) -> None:
        """Without the other ranks; nothing is under way."""
        self.abort("it was closed")
        free = library.function("tx_nccl_memory_free", ctypes.c_void_p, ctypes.POINTER(Memory), restype=None)
        for memory in self._memories:
            free(self._handle, memory)
        self._memories.clear()
        library.function("tx_nccl_comm_free", ctypes.c_void_p, restype=None)(self._handle)
        self._handle = ctypes.c_void_p()


def unique_id() -> bytes:
    """Which one rank makes for all."""
    made = ctypes.create_string_buffer(ID_BYTES)
    _function("tx_nccl_unique_id", ctypes.c_void_p, ctypes.c_char_p)(find().handle, made)
    return made.raw


def compare(records: Sequence[bytes]) -> None:
    """RuntimeError that names the first operation in which the ranks' records differ."""
    _function("tx_nccl_compare", ctypes.c_int64, ctypes.c_char_p)(len(records), b"".join(records))


@functools.cache
def _function(name: str, *argtypes: Any) -> Callable[..., None]:
    return library.function(name, *argtypes)


def _issue(name: str) -> Callable[..., None]:
    return _function(name, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.POINTER(Message), ctypes.c_void_p)
