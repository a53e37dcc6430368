"""Small checkpoints in folders, saved and loaded without a process group, and a fake `os` (`Machine`) with which a test
acts between any two file operations: kills a process, runs another one, breaks locks."""

import contextlib
import errno
import io
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ext
from torch_ext.checkpoint import dcp as checkpoint_dcp
from torch_ext.checkpoint import files, folder_lock, folder_metadata, new_file
from torch_ext.checkpoint import folder as checkpoint_folder


def state(seed: int) -> dict[str, Any]:
    """Returns a state of tensors and plain values, all of which depend on the seed."""
    chosen = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(7, 30, generator=chosen).to(torch.bfloat16),
            "bias": torch.randn(30, generator=chosen),
        },
        "optimizer": {"exp_avg": torch.randn(3, 50, generator=chosen), "lr": 0.5**seed, "betas": (0.9, seed / 100)},
        "step": seed,
        "name": f"run {seed}",
    }


def blank(like: Any) -> Any:
    """Returns the same keys with zeros for tensors and None for other values."""
    if isinstance(like, dict):
        return {key: blank(value) for key, value in like.items()}
    return torch.zeros_like(like) if isinstance(like, torch.Tensor) else None


def bits(value: Any) -> Any:
    """Returns the value with each tensor replaced by its bytes."""
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    return value.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value


def save(checkpoint: dict[str, Any], folder: pathlib.Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(checkpoint, storage_writer=torch_ext.CheckpointWriter(folder), no_dist=True)


def load_into(target: dict[str, Any], folder: pathlib.Path, **options: Any) -> Any:
    """Loads the folder's checkpoint into `target` and returns `target`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(target, storage_reader=torch_ext.CheckpointReader(folder, **options), no_dist=True)
    return target


def loaded(folder: pathlib.Path) -> Any:
    """Returns the bits of the `state(...)` that was saved in the folder."""
    return bits(load_into(blank(state(0)), folder))


class Killed(BaseException):
    """Stands for kill -9: a `Machine.before` raises it, and the simulated process does nothing afterwards."""


@contextlib.contextmanager
def while_metadata_is_read(does: Callable[[], object]) -> Iterator[None]:
    """Within the context, calls `does` when a reader has read .metadata and not yet opened the files it names."""
    parse = folder_metadata.parse

    def parsed(raw: bytes, **options: Any) -> Any:
        found = parse(raw, **options)
        does()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_metadata, "parse", parsed)
        yield


class Machine:
    """Replaces `os` in torch_ext's checkpoint modules; calls `before(operation, path)` ahead of each file operation.

    It simulates several processes, each a thread or one after the other in the same thread: `process` is the current
    one's id. locks: "work"; "none", where lockf fails as on a file system without locks; "lie", where all get the lock.
    """

    def __init__(self, locks: str = "work", stale: float = checkpoint_folder.STALE) -> None:
        """stale: seconds after which unfinished files, where there are no locks, count as left by a job that ended."""
        self.stale = stale
        self.before: Callable[[str, str], None] = lambda operation, path: None
        self.locks = locks
        self._owners: dict[tuple[int, int], int] = {}  # process that has the lock, by (device, inode)
        self._open: dict[int, int] = {}  # process that opened it, by descriptor
        self._processes = threading.local()

    @property
    def process(self) -> int:
        return getattr(self._processes, "id", 1)

    @process.setter
    def process(self, id: int) -> None:
        self._processes.id = id

    def bury(self, process: int) -> None:
        """Does what the kernel does when a process was killed: closes its files, which releases its locks."""
        for descriptor in [d for d, owner in self._open.items() if owner == process]:
            self._closed(descriptor)

    def _closed(self, descriptor: int) -> None:
        owner = self._open.pop(descriptor, None)
        file = os.fstat(descriptor)
        if self._owners.get((file.st_dev, file.st_ino)) == owner:
            del self._owners[file.st_dev, file.st_ino]

    def lockf(self, descriptor: int, how: int) -> None:
        if self.locks == "none":
            raise OSError(errno.ENOLCK, "No locks available")
        file = os.fstat(descriptor)
        owner = self._owners.setdefault((file.st_dev, file.st_ino), self.process)
        if owner != self.process and self.locks == "work":
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def stream(self, path: Any, mode: str, buffering: int = -1, opener: Any = None) -> Any:
        self.before("open", str(path))
        if mode == "rb":
            return open(path, mode, buffering)
        raw = _Raw(path, mode, opener=opener)
        raw.machine = self
        self._open[raw.fileno()] = self.process
        return io.BufferedWriter(raw, buffering)

    # -- the functions of os, fcntl and builtins that torch_ext calls

    def __getattr__(self, name: str) -> Any:
        """Returns the function of os with this name; for names in GATED one that calls `before` first."""
        real = getattr(os, name)
        if name not in GATED:
            return real

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.before(name, str(args[0]))
            done = real(*args, **kwargs)
            if name == "open":
                self._open[done] = self.process
            return done

        return gated

    def getpid(self) -> int:
        return self.process

    def close(self, descriptor: int) -> None:
        self._closed(descriptor)
        os.close(descriptor)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces os, open and lockf in torch_ext's checkpoint modules."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (checkpoint_dcp, files, checkpoint_folder, folder_lock, new_file):
                patch.setattr(module, "os", self)
            for module in (checkpoint_folder, new_file):
                patch.setattr(module, "open", self.stream, raising=False)
            patch.setattr(folder_lock.fcntl, "lockf", self.lockf)
            patch.setattr(folder_lock, "_locks", {})
            patch.setattr(checkpoint_folder, "STALE", self.stale)
            yield


GATED = {"open", "unlink", "rename", "replace", "listdir", "fsync", "makedirs", "ftruncate", "pwrite", "stat"}


class _Raw(io.FileIO):
    """A file whose write, if `before` raises in it, has written the first half of the data."""

    machine: Machine

    def write(self, data: Any) -> int:
        view = memoryview(data)
        try:
            self.machine.before("write", str(self.name))
        except BaseException:
            super().write(view[: len(view) // 2])
            raise
        return super().write(view) or 0

    def close(self) -> None:
        if not self.closed:
            self.machine._closed(self.fileno())
        super().close()


def names(folder: pathlib.Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def whole(folder: pathlib.Path) -> bool:
    """Whether the folder has no checkpoint, or every file that its metadata names is there in full length."""
    if not (folder / ".metadata").exists():
        return True
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    sizes: dict[str, int] = {}
    for info in stored.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return all((folder / name).exists() and (folder / name).stat().st_size > size for name, size in sizes.items())
