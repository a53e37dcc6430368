"""Checkpoint files: torch_ext.save replaces a file as a whole or not at all, and torch_ext.load says what is wrong with
a file."""

import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import io
import os
import pathlib
import pickle
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from training import everything, params_of, policy_of, train

import torch_ext


def optimizer_of(name: str) -> torch_ext.AdamW:
    return torch_ext.AdamW(params_of(name), lr=1e-2, policy=policy_of(name))


@pytest.mark.parametrize("name", ["bf16", "8bit"])
def test_a_saved_state_loads_bit_for_bit_with_weights_only(name: str, tmp_path: pathlib.Path) -> None:
    optimizer = optimizer_of(name)
    train(optimizer, range(3))
    path = tmp_path / "checkpoint.pt"
    torch_ext.save({"optimizer": optimizer.state_dict(), "step": 3}, path)
    for mmap in (False, True):
        other = optimizer_of(name)
        with torch.no_grad():
            for p, q in zip(other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
                p.copy_(q)
        other.load_state_dict(torch_ext.load(path, mmap=mmap)["optimizer"])
        assert everything(other) == everything(optimizer)
    loaded = torch.load(path, weights_only=True)["optimizer"]["state"][0]["exp_avg"]
    assert type(loaded) is torch.Tensor, "files hold plain tensors, which need nothing of ours"
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


class Unpicklable:
    def __reduce__(self) -> str:
        raise OSError("no space left")


def test_a_save_that_fails_leaves_the_former_file_and_nothing_else(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch_ext.save({"a": torch.ones(3)}, path)
    before = path.read_bytes()
    with pytest.raises(OSError, match="no space left"):
        torch_ext.save({"a": torch.zeros(1000), "b": Unpicklable()}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        torch_ext.save({}, tmp_path / "no folder" / "checkpoint.pt")


KILLED = """
import os, signal, sys, torch, torch_ext
class Last:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
torch_ext.save({"a": torch.zeros(1 << 20), "b": Last()}, sys.argv[1])
"""


def test_what_a_killed_save_left_goes_with_the_next_one(tmp_path: pathlib.Path) -> None:
    """A killed save leaves an unfinished file next to the checkpoint, which stays intact. The next save to that name
    removes the unfinished file."""
    path, other = tmp_path / "check[point].pt", tmp_path / "other.pt"
    torch_ext.save(1, path)
    torch_ext.save(2, other)
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED, path], env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert killed.returncode == -signal.SIGKILL
        assert torch_ext.load(path) == 1
        assert len(list(tmp_path.iterdir())) == 3, "the file, another one, and one that was left"
    torch_ext.save(3, path)
    assert (torch_ext.load(path), torch_ext.load(other)) == (3, 2)
    assert sorted(tmp_path.iterdir()) == [path, other]


class Kills:
    """Kills the process that pickles it."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return int, ()


def _record_before_its_begin(data: bytes) -> bytes:
    """Changes the archive's end to say that its directory begins later; all records would then begin 4096 bytes too
    early."""
    at = data.rindex(b"PK\6\6") + 48  # where the directory's offset is stored
    return data[:at] + struct.pack("<Q", struct.unpack_from("<Q", data, at)[0] + 4096) + data[at + 8 :]


def _flipped(data: bytes) -> bytes:
    at = data.index(torch.arange(1000.0).numpy().tobytes()) + 2000
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half of it": lambda data: data[: len(data) // 2],
    "all but a byte": lambda data: data[:-1],
    "a flipped bit": _flipped,
    "a record before its begin": _record_before_its_begin,
    "text": lambda data: b"a checkpoint",
    "another pickle": lambda data: pickle.dumps({"a": print}),
    "an archive of something else": lambda data: _zip(),
}


def _zip() -> bytes:
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme", "x" * 100)
    return file.getvalue()


@pytest.mark.parametrize("how", BROKEN)
def test_files_that_are_no_whole_checkpoint_are_refused_by_name(how: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch_ext.save({"a": torch.arange(1000.0), "b": torch.ones(2)}, path)
    path.write_bytes(BROKEN[how](path.read_bytes()))
    with pytest.raises(ValueError, match=rf"checkpoint\.pt \({path.stat().st_size} bytes\) is no checkpoint that can"):
        torch_ext.load(path)
    with pytest.raises(FileNotFoundError):
        torch_ext.load(tmp_path / "none.pt")


class _Own:
    """An object of a class that torch.load does not allow."""


@pytest.mark.parametrize("states", ["logical", "at_rest"])
def test_a_whole_file_with_objects_in_it_is_not_called_damaged(states: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch_ext.save({"weight": torch.ones(100), "own": _Own()}, path, states=states)
    with pytest.raises(ValueError, match="not made of tensors and plain values alone") as raised:
        torch_ext.load(path)
    message = str(raised.value)
    assert str(path) in message and "_Own" in message and "add_safe_globals" in message
    assert "damaged" not in message and "\x1b" not in message
    with torch.serialization.safe_globals([_Own]):
        assert isinstance(torch_ext.load(path)["own"], _Own)


def _nowhere(storage: Any, location: str) -> Any:
    raise KeyError(location)


@pytest.mark.parametrize("states", ["logical", "at_rest"])
@pytest.mark.parametrize("to", ["cuda:99", {"cpu": "cuda:99"}, _nowhere], ids=["a device", "a mapping", "a function"])
def test_a_whole_file_that_cannot_be_on_a_device_is_not_called_damaged(
    to: Any, states: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    torch_ext.save({"weight": torch.ones(100)}, path, states=states)
    with pytest.raises(RuntimeError, match="cannot be loaded with map_location") as raised:
        torch_ext.load(path, map_location=to)
    message = str(raised.value)
    assert str(path) in message and repr(to) in message and "damaged" not in message
    path.write_bytes(_without_a_record(path.read_bytes()))
    with pytest.raises(ValueError, match="is no checkpoint that can be loaded"):
        torch_ext.load(path, map_location=to, check=False)


def _without_a_record(data: bytes) -> bytes:
    return data.replace(b"/data/0", b"/data/x")


@pytest.mark.parametrize("to", ["cpu", torch.device("cpu"), {"cpu": "cpu"}, "meta"], ids=str)
@pytest.mark.parametrize("states", ["logical", "at_rest"])
def test_map_location_is_torchs(states: str, to: Any, tmp_path: pathlib.Path) -> None:
    path, saved = tmp_path / "checkpoint.pt", torch.arange(100.0)
    torch_ext.save({"weight": saved, "small": saved[:3].clone()}, path, states=states)
    if states == "at_rest" and to == "meta":
        with pytest.raises(ValueError, match=r"states at rest \(compressed\), .*: map_location='meta'"):
            torch_ext.load(path, map_location=to)
        return
    loaded = torch_ext.load(path, map_location=to)
    for name, value in (("weight", saved), ("small", saved[:3])):
        assert loaded[name].shape == value.shape and loaded[name].dtype == value.dtype
        assert loaded[name].is_meta if to == "meta" else torch.equal(loaded[name], value)


def test_a_file_keeps_its_mode_and_attributes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "checkpoint.pt"
    for mode in (0o600, 0o640, 0o666, 0o755):
        path.write_text("former")
        path.chmod(mode)
        with contextlib.suppress(OSError):  # not every file system has user attributes
            os.setxattr(path, "user.run", b"7")
        kept = {name: os.getxattr(path, name) for name in os.listxattr(path)}
        torch_ext.save(mode, path)
        assert torch_ext.load(path) == mode
        assert path.stat().st_mode & 0o7777 == mode
        assert {name: os.getxattr(path, name) for name in os.listxattr(path)} == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_its_owner(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_text("former")
    try:
        os.chown(path, 12345, 54321)
    except OSError as error:
        assert error.errno == errno.EINVAL, error
        pytest.skip("a user namespace without other users (Bazel's sandbox)")
    torch_ext.save(1, path)
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


def test_what_is_written_of_a_private_file_is_private_before_it_is_complete(tmp_path: pathlib.Path) -> None:
    """The unfinished file has the mode of the file that it will replace from the start."""
    path, modes = tmp_path / "checkpoint.pt", []
    path.write_text("former")
    path.chmod(0o600)

    class Looks:
        def __reduce__(self) -> Any:
            modes.extend(file.stat().st_mode & 0o777 for file in tmp_path.iterdir())
            return int, ()

    torch_ext.save(Looks(), path)
    assert modes == [0o600, 0o600]


LINKS: dict[str, Callable[[pathlib.Path], str]] = {
    "to a file beside it": lambda folder: "target.pt",
    "to a file elsewhere": lambda folder: str(folder / "elsewhere" / "target.pt"),
    "to a link": lambda folder: "another link",
}


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing yet"])
@pytest.mark.parametrize("to", LINKS)
def test_a_symbolic_link_stays_one(to: str, there: bool, tmp_path: pathlib.Path) -> None:
    link = tmp_path / "latest.pt"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "another link").symlink_to("elsewhere/target.pt")
    link.symlink_to(LINKS[to](tmp_path))
    target = link.resolve()
    if there:
        torch_ext.save("former", target)
    before = sorted(tmp_path.rglob("*"))
    torch_ext.save("new", link)
    assert os.readlink(link) == LINKS[to](tmp_path)
    assert not target.is_symlink()
    assert torch_ext.load(target) == torch_ext.load(link) == "new"
    assert set(tmp_path.rglob("*")) == {*before, target}


def test_a_path_that_cannot_be_written_to_is_refused_before_anything_is_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    refused: dict[str, type[OSError]] = {
        "loop": OSError,
        "folder": IsADirectoryError,
        "file/checkpoint.pt": NotADirectoryError,
        "none/checkpoint.pt": FileNotFoundError,
        "x" * 256: OSError,
    }
    before = sorted(tmp_path.rglob("*"))
    for name, kind in refused.items():
        with pytest.raises(kind, match=name.split("/")[0]):
            torch_ext.save(Unpicklable(), tmp_path / name)  # raises "no space left" if it is pickled
    assert sorted(tmp_path.rglob("*")) == before


def in_a_fork(body: Callable[[], Any]) -> int:
    """Runs `body` in a forked process; returns its exit status, or minus the signal that ended it. An exception gives
    1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the warning that the process has threads
        child = os.fork()
    if child == 0:
        try:
            os._exit(body() or 0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def drop_capabilities() -> None:
    """Drops root's capabilities, so that file modes apply to root too (capset(2): no bits)."""
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None, use_errno=True).capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def test_a_file_that_may_not_be_written_to_is_not_replaced() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "checkpoint.pt"
        path.write_text("former")
        path.chmod(0o444)

        def save() -> int:
            drop_capabilities()
            try:
                torch_ext.save(1, path)
            except PermissionError as error:
                return 7 if error.filename == str(path) else 8
            return 0

        assert in_a_fork(save) == 7
        assert path.read_text() == "former"
        assert os.listdir(folder) == [path.name]


def test_what_is_no_file_is_written_to_as_torch_does(tmp_path: pathlib.Path) -> None:
    """A path that is no regular file, such as a pipe, is written to and not replaced."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        torch_ext.save(torch.arange(3), pipe)
        assert torch.load(io.BytesIO(read.result(timeout=20))).tolist() == [0, 1, 2]
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


@pytest.mark.parametrize(
    "name", ["x" * 255, "ä" * 127, "x" * 230, "a.b", "a"], ids=["255", "127 of two", "230", "a.b", "a"]
)
def test_names_as_long_as_they_may_be(name: str, tmp_path: pathlib.Path) -> None:
    """Also: what a killed save left behind is only removed by a save to the same name."""
    path = tmp_path / name
    others = [tmp_path / other for other in ("a", "a.b", "y" * 255) if other != name]
    for other in others:
        assert in_a_fork(lambda other=other: torch_ext.save(Kills(), other)) == -signal.SIGKILL
    left = set(tmp_path.iterdir())
    assert len(left) == len(others)
    torch_ext.save(1, path)
    assert set(tmp_path.iterdir()) == {path, *left}
    for other in others:
        torch_ext.save(2, other)
    assert set(tmp_path.iterdir()) == {path, *others}


def test_a_fifo_under_the_name_of_an_unfinished_file_hangs_nobody(tmp_path: pathlib.Path) -> None:
    """Opening a fifo blocks. It is not a file of ours, so it is neither opened nor removed."""
    path, pipe = tmp_path / "checkpoint.pt", tmp_path / ".checkpoint.pt.0123456789abcdef.unfinished"
    os.mkfifo(pipe)

    def save() -> None:
        signal.alarm(20)
        torch_ext.save(1, path)

    assert in_a_fork(save) == 0
    assert torch_ext.load(path) == 1
    assert set(tmp_path.iterdir()) == {path, pipe}, "nobody's but its own are removed"


@pytest.mark.parametrize("age", [10.0, 10000.0])
def test_without_locks_what_is_old_is_removed(
    age: float, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On file systems without locks, an unfinished file is removed only if it is old."""

    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    path, left = tmp_path / "checkpoint.pt", tmp_path / ".checkpoint.pt.0123456789abcdef.unfinished"
    left.write_text("half of it")
    os.utime(left, (time.time() - age,) * 2)
    monkeypatch.setattr(fcntl, "flock", none)
    torch_ext.save(1, path)
    assert torch_ext.load(path) == 1
    assert left.exists() == (age < 100)
