"""AsyncSaver: a file holds the state as it was at the call, although training continues meanwhile; an error names the
file."""

import collections
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupt_programs import Interrupt
from training import POLICIES, SHAPES, everything, params_of, policy_of, train

import torch_ext


def optimizer_of(name: str, seed: int = 0, shapes: Any = SHAPES) -> torch_ext.AdamW:
    return torch_ext.AdamW(params_of(name, shapes, seed), lr=1e-2, policy=policy_of(name))


def checkpoint_of(optimizer: torch_ext.AdamW, step: int) -> dict[str, Any]:
    """Returns a checkpoint of the weights, the optimizer and the step."""
    weights = {str(i): p.detach() for i, p in enumerate(optimizer.param_groups[0]["params"])}
    return {"model": weights, "optimizer": optimizer.state_dict(), "step": step}


def resumed(name: str, saved: Any, shapes: Any = SHAPES) -> torch_ext.AdamW:
    """Returns a new optimizer that has loaded the checkpoint and its weights."""
    optimizer = optimizer_of(name, 1, shapes)
    with torch.no_grad():
        for p, weight in zip(optimizer.param_groups[0]["params"], saved["model"].values(), strict=True):
            p.copy_(weight)
    optimizer.load_state_dict(saved["optimizer"])
    return optimizer


class Late:
    """A value that blocks the thread that pickles it until `stepped` is set. It keeps a save from ending before the
    test goes on."""

    def __init__(self) -> None:
        self.stepped = threading.Event()

    def __deepcopy__(self, memo: Any) -> "Late":
        return self

    def __reduce__(self) -> Any:
        assert self.stepped.wait(30)
        return collections.OrderedDict, ()


LARGE = [(700, 400), (3,)]
"""The first has more elements than one piece that torch.distributed.checkpoint is given."""


@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("states", ["logical", "at_rest"])
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_saved_is_the_state_at_the_call(name: str, states: str, shapes: Any, tmp_path: pathlib.Path) -> None:
    optimizer = optimizer_of(name, shapes=shapes)
    train(optimizer, range(2))
    with torch_ext.AsyncSaver(states=states) as saver:
        for step in range(2, 5):
            before = everything(optimizer)
            late = Late()
            saver.save({"late": late} | checkpoint_of(optimizer, step), tmp_path / f"{step}")
            train(optimizer, range(step, step + 1))
            late.stepped.set()
            saver.wait()
            loaded = torch_ext.load(tmp_path / f"{step}")
            assert loaded["step"] == step
            assert everything(resumed(name, loaded, shapes)) == before


@pytest.mark.parametrize("states", ["logical", "at_rest"])
def test_tensors_of_all_kinds_are_what_they_were_at_the_call(states: str, tmp_path: pathlib.Path) -> None:
    values = torch.arange(30_000.0)
    kinds = {
        "strided": values.clone().view(100, 300)[:, ::3],
        "transposed": values.clone().view(100, 300).t(),
        "expanded": values[:1].clone().expand(70),
        "sparse": torch.eye(80).to_sparse(),
        "empty": torch.empty(0, 5),
        "number": torch.tensor(7),
    }
    tied = {"one": kinds["transposed"], "two": [kinds["transposed"], ({"three": kinds["transposed"]},)]}
    before = {key: t.to_dense().clone() for key, t in kinds.items()}
    with torch_ext.AsyncSaver(states=states) as saver:
        for _ in range(2):
            late = Late()
            saver.save({"late": late, "kinds": kinds, "tied": tied}, tmp_path / "file")
            for key in ("strided", "transposed", "number"):
                kinds[key].zero_()
            late.stepped.set()
            saver.wait()
            loaded = torch_ext.load(tmp_path / "file")
            three = loaded["tied"]["two"][1][0]["three"]
            assert loaded["tied"]["one"].data_ptr() == three.data_ptr() == loaded["kinds"]["transposed"].data_ptr()
            for key, t in before.items():
                assert torch.equal(loaded["kinds"][key].to_dense(), t), key
                if key in ("strided", "transposed", "number"):
                    kinds[key].copy_(t)


def test_memory_is_taken_once_and_is_what_the_state_takes(tmp_path: pathlib.Path) -> None:
    """The saver's buffers are allocated once, are no larger than the stored state, and are freed by close()."""
    optimizer = torch_ext.AdamW(params_of("8bit", [(512, 512), (300, 128)]), lr=1e-2, policy=policy_of("8bit"))
    train(optimizer, range(1))
    saver = torch_ext.AsyncSaver(states="at_rest")
    taken = []
    for step in range(3):
        saver.save(checkpoint_of(optimizer, step), tmp_path / "file")
        saver.wait()
        taken.append(saver.nbytes)
    numel = 512 * 512 + 300 * 128
    assert taken[0] == taken[1] == taken[2] < 6.1 * numel, "weights 2, remainders 2, codes 2, scales"
    saver.close()
    assert saver.nbytes == 0
    with pytest.raises(RuntimeError, match="after close"):
        saver.save({}, tmp_path / "file")
    saver.close()


def test_a_relative_path_is_from_where_the_call_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory changes before the saver's thread runs."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    start = threading.Thread.start

    def start_elsewhere(thread: threading.Thread) -> None:
        os.chdir("elsewhere")
        start(thread)

    with torch_ext.AsyncSaver() as saver, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_elsewhere)
        saver.save({"a": 1}, "checkpoint.pt")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["checkpoint.pt"]


def test_errors_come_out_by_name_at_the_next_call(tmp_path: pathlib.Path) -> None:
    saver = torch_ext.AsyncSaver()
    saver.save({"a": torch.ones(3)}, tmp_path / "good")
    saver.save({"a": torch.ones(3)}, tmp_path / "no folder" / "bad")
    with pytest.raises(RuntimeError, match=r"saving .*no folder/bad failed: FileNotFoundError") as caught:
        saver.save({"a": torch.zeros(3)}, tmp_path / "good")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert torch.equal(torch_ext.load(tmp_path / "good")["a"], torch.ones(3)), "the refused save was not begun"
    saver.save({"a": torch.zeros(3)}, tmp_path / "good")
    saver.save({"a": torch.ones(3)}, tmp_path / "no folder" / "bad")
    with pytest.raises(RuntimeError, match="no folder/bad failed"):
        saver.close()
    assert torch.equal(torch_ext.load(tmp_path / "good")["a"], torch.zeros(3))
    with pytest.raises(ValueError, match="'at_rest' are legal"):
        torch_ext.AsyncSaver(states="8bit")


class _Handler(Interrupt):
    """A signal handler that runs while a save is under way and itself calls `saving`."""

    def __init__(self, at: int, saving: Callable[[], None]) -> None:
        super().__init__(at)
        self.handler = saving  # type: ignore[method-assign]


def test_a_signal_handler_and_other_threads_may_save_meanwhile(tmp_path: pathlib.Path) -> None:
    states = [{"a": torch.full((50, 50), float(i)), "b": torch.full((9,), float(i))} for i in range(2)]
    saver = torch_ext.AsyncSaver()
    with Interrupt() as points:
        saver.save(states[0], tmp_path / "0")
    for at in range(1, points.count + 1, 7):
        with _Handler(at, lambda: saver.save(states[1], tmp_path / "1")):
            saver.save(states[0], tmp_path / "0")
        saver.wait()
        for i, state in enumerate(states):
            loaded = torch_ext.load(tmp_path / f"{i}")
            assert all(torch.equal(loaded[key], state[key]) for key in state), at
    large = [{"a": torch.full((300, 300), float(i))} for i in range(4)]
    threads = [threading.Thread(target=saver.save, args=(large[i], tmp_path / f"{i}")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    saver.close()
    for i in range(4):
        assert torch.equal(torch_ext.load(tmp_path / f"{i}")["a"], large[i]["a"]), i
    assert saver.nbytes == 0
