"""Files: torch_ext.save replaces them whole, torch_ext.load and load_state_dict say what is wrong with them."""

import io
import os
import pathlib
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from training import everything, params_of, policy_of, train

import torch_ext


def optimizer_of(name: str) -> torch_ext.AdamW:
    return torch_ext.AdamW(params_of(name), lr=1e-2, policy=policy_of(name))


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_saved_state_loads_bit_for_bit_with_weights_only(name: str, tmp_path: pathlib.Path) -> None:
    optimizer = optimizer_of(name)
    train(optimizer, range(3))
    path = tmp_path / "checkpoint.pt"
    torch_ext.save({"optimizer": optimizer.state_dict(), "step": 3}, path)
    for mmap in (False, True):
        other = optimizer_of(name)
        with torch.no_grad():
            for p, q in zip(params_of(name), optimizer.param_groups[0]["params"], strict=True):
                p.copy_(q)
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


def _flipped(data: bytes) -> bytes:
    at = data.index(torch.arange(1000.0).numpy().tobytes()) + 2000
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half of it": lambda data: data[: len(data) // 2],
    "all but a byte": lambda data: data[:-1],
    "a flipped bit": _flipped,
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
