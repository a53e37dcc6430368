"""NCCL without torch.distributed: finds the library, and wraps one rank's communicator (torch_ext_nccl.h)."""

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
"""Environment variable: the path of a libnccl.so.2 to use if the process has not loaded one already."""


@structs.mirror("tx_nccl_about")
class About(library.Struct):
    """tx_nccl_about: the NCCL library that was found."""


@structs.mirror("tx_nccl_comm_args")
class CommArgs(library.Struct):
    """tx_nccl_comm_args: the arguments of a new communicator."""


@structs.mirror("tx_nccl_message")
class Message(library.Struct):
    """tx_nccl_message: what to send and where to receive; addresses in device memory."""


@structs.mirror("tx_nccl_memory")
class Memory(library.Struct):
    """tx_nccl_memory: device memory that belongs to a communicator."""


class Found(NamedTuple):
    """The NCCL library in use."""

    handle: int
    """Address of the library's tx_nccl."""
    version: int
    path: str
    windows: bool

    def version_text(self) -> str:
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"


@functools.cache
def find() -> Found:
    """Returns the NCCL library, which stays loaded.

    Searched in this order: torch's, if this process has loaded it; the path in TORCH_EXT_NCCL; the Python package's;
    the system's. Raises RuntimeError, which says what to do, if there is none or it is too old."""
    handle, about = ctypes.c_void_p(), About(size=ctypes.sizeof(About))
    path = os.environ.get(PATH_VARIABLE) or _path_in_package()
    _function("tx_nccl_open", ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))(path and path.encode(), handle)
    _function("tx_nccl_about_this", ctypes.c_void_p, ctypes.POINTER(About))(handle, about)
    assert handle.value is not None
    return Found(handle.value, about.version, about.path.decode(), bool(about.windows))


def _path_in_package() -> str | None:
    """Returns the libnccl.so.2 of the Python package nvidia-nccl-cu13 or -cu12, if one is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = os.path.join(folder, "nccl", "lib", "libnccl.so.2")
        if os.path.isfile(path):
            return path
    return None


def describe() -> list[tuple[str, str]]:
    """Returns what was found, or why nothing was, as lines of a name and a value for printing."""
    try:
        found = find()
    except RuntimeError as refusal:
        return [("NCCL", f"none: {refusal}")]
    windows = "symmetric windows" if found.windows else "no symmetric windows (2.27 has them)"
    return [("NCCL", f"{found.version_text()} ({found.path}), {windows}")]


class Comm:
    """One rank's communicator. Only one thread at a time may use it, except for `check` and `abort`."""

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        world_size: int,
        timeout: float,
        gather_id: bytes | None = None,
        multiprocessors: int = 0,
    ) -> None:
        """Creates the communicator and waits for every rank.

        timeout: how many seconds to wait, here and whenever NCCL is slow to accept an operation. gather_id: if given,
        all-gathers get a second communicator with this id. multiprocessors: how many the device has; with a gather_id
        the kernels of each communicator use a limited part of them (tx_nccl_comm_args)."""
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
        """Returns the address of new device memory, valid until `close`. It is a symmetric window if this NCCL has
        them. A collective call: every rank makes it."""
        memory = Memory(size=ctypes.sizeof(Memory), bytes=nbytes)
        _function("tx_nccl_memory_new", ctypes.c_void_p, ctypes.POINTER(Memory))(self._handle, memory)
        self._memories.append(memory)
        return int(memory.data)

    def check(self) -> None:
        """Raises RuntimeError if NCCL reports an error, or `abort` was called."""
        _function("tx_nccl_comm_check", ctypes.c_void_p)(self._handle)

    def abort(self, why: str) -> None:
        abort = library.function("tx_nccl_comm_abort", ctypes.c_void_p, ctypes.c_char_p, restype=None)
        abort(self._handle, why.encode())

    def digest(self) -> tuple[int, int]:
        """Returns how many operations were issued, and a hash of them all (signed, so that it fits an int64 word)."""
        count, digest = ctypes.c_int64(), ctypes.c_int64()
        _function("tx_nccl_digest", ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64))(
            self._handle, count, digest
        )
        return count.value, digest.value

    def records(self) -> bytes:
        """Returns the records of the last RECORDS operations, for `compare`."""
        found = ctypes.create_string_buffer(RECORDS * RECORD_BYTES)
        _function("tx_nccl_records", ctypes.c_void_p, ctypes.c_char_p)(self._handle, found)
        return found.raw

    def close(self) -> None:
        """Frees the communicator and its memory. Not a collective call. No operation may be running."""
        self.abort("it was closed")
        free = library.function("tx_nccl_memory_free", ctypes.c_void_p, ctypes.POINTER(Memory), restype=None)
        for memory in self._memories:
            free(self._handle, memory)
        self._memories.clear()
        library.function("tx_nccl_comm_free", ctypes.c_void_p, restype=None)(self._handle)
        self._handle = ctypes.c_void_p()


def unique_id() -> bytes:
    """Returns a new communicator's id. One rank calls this and sends the id to all others."""
    made = ctypes.create_string_buffer(ID_BYTES)
    _function("tx_nccl_unique_id", ctypes.c_void_p, ctypes.c_char_p)(find().handle, made)
    return made.raw


def compare(records: Sequence[bytes]) -> None:
    """Raises RuntimeError that names the first operation in which the ranks' records differ."""
    _function("tx_nccl_compare", ctypes.c_int64, ctypes.c_char_p)(len(records), b"".join(records))


@functools.cache
def _function(name: str, *argtypes: Any) -> Callable[..., None]:
    return library.function(name, *argtypes)


def _issue(name: str) -> Callable[..., None]:
    return _function(name, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.POINTER(Message), ctypes.c_void_p)
