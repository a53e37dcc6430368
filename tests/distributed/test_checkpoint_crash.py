"""Runs that are killed again and again while they save: the last whole checkpoint must load, with nothing lost."""

import itertools
import os
import pathlib
import random
import signal
import subprocess
import time
from typing import Any

import pytest
import ranks
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gradients import BF16, FP32, Given, bits, noise
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torch_ext

SHAPES: list[Any] = [(900, 1000), (700,), (64, 500)]
WORLD, KILLS = 2, 8


def made() -> tuple[Any, Any]:
    """Returns a model under "optim" and its AdamW, with compressed state."""
    chosen = torch_ext.load_policy(
        BF16,
        override_optimizer_config={"main_grads_dtype": FP32, "store_param_remainders": True, "exp_avg_dtype": "fp8"},
        override_ddp_config={"grad_comm_dtype": FP32, "bucket_size": 900},
    )
    model = torch_ext.parallelize(Given(SHAPES, BF16), chosen, strategy="optim")
    return model, torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=chosen)


def step(model: Any, optimizer: Any, number: int) -> None:
    model(noise(number, 0, SHAPES, BF16)).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_of(model: Any, optimizer: Any) -> Any:
    """Returns the whole state, which is on rank 0."""
    dist.barrier()
    return {"model": model.state_dict(), "optimizer": optimizer.consolidate_state_dict(to=0)}


def save_file(checkpoint: Any, path: pathlib.Path) -> None:
    if dist.get_rank() == 0:
        torch_ext.save(checkpoint, path / "checkpoint.pt")


def load_file(model: Any, optimizer: Any, path: pathlib.Path) -> None:
    checkpoint = torch_ext.load(path / "checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def parts_of(model: Any, optimizer: Any) -> Any:
    """Returns the state in this rank's parts, for torch.distributed.checkpoint."""
    state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": state, "optimizer": optimizer_state}


def save_folder(checkpoint: Any, path: pathlib.Path) -> None:
    dcp.save(checkpoint, storage_writer=torch_ext.CheckpointWriter(path))


def load_folder(model: Any, optimizer: Any, path: pathlib.Path) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, storage_reader=torch_ext.CheckpointReader(path))
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)


# By way: (what is saved, save, load, the file whose presence means that there is a checkpoint, the pattern of files
# that an interrupted save leaves behind).
WAYS: dict[str, Any] = {
    "a file": (whole_of, save_file, load_file, "checkpoint.pt", ".checkpoint.pt.*.unfinished"),
    "a folder of DCP": (parts_of, save_folder, load_folder, ".metadata", "__*.distcp"),
}


def _resumed(folder: str, way: str) -> tuple[Any, Any, int]:
    """Returns a model, its optimizer and its number of steps, from the folder's checkpoint if there is one."""
    _, _, load, present, _ = WAYS[way]
    path = pathlib.Path(folder)
    model, optimizer = made()
    if (path / present).exists():
        load(model, optimizer, path)
    return model, optimizer, int(optimizer.state[next(model.parameters())]["step"])


def _killed(rank: int, world: int, folder: str, way: str, moment: float) -> None:
    """Resumes from the checkpoint and saves after each step, until it is killed in the third save.

    moment: the kill's delay, as a fraction of the second save's duration."""
    model, optimizer, number = _resumed(folder, way)
    seconds = 0.0
    for save in itertools.count():
        step(model, optimizer, number + save)
        checkpoint = WAYS[way][0](model, optimizer)
        if save == 2:
            subprocess.Popen(["sh", "-c", f"sleep {moment * seconds}; kill -KILL {os.getpid()}"])
        before = time.monotonic()
        WAYS[way][1](checkpoint, pathlib.Path(folder))
        seconds = time.monotonic() - before


def _undisturbed(rank: int, world: int, folder: str, way: str, until: int) -> tuple[int, list[bytes]]:
    """Resumes and trains to step `until` without saving. Returns the step and the bits of weights and state."""
    model, optimizer, number = _resumed(folder, way)
    for each in range(number, until):
        step(model, optimizer, each)
    whole = optimizer.consolidate_state_dict(to=None)["state"]
    reached = int(optimizer.state[next(model.parameters())]["step"])
    return reached, bits([*model.parameters(), *(v.clone() for entry in whole.values() for v in entry.values())])


@pytest.mark.parametrize("way", WAYS)
def test_crash_safety_a_run_that_is_killed_while_saving_goes_on_from_the_last_checkpoint(
    way: str, tmp_path: pathlib.Path
) -> None:
    """SIGKILL of each rank, at random moments of a save. Afterwards the bits must be those of a run without kills."""
    *_, present, leftover = WAYS[way]
    moments, cut_short = random.Random(11), 0
    for _ in range(KILLS):
        ends = ranks.outcomes(WORLD, _killed, str(tmp_path), way, moments.random())
        # The rank that is killed later may instead have failed because its peer was gone.
        assert any(end == ranks.Died(-signal.SIGKILL) for end in ends), ends
        names = {file.name for file in tmp_path.glob(leftover)}
        if way == "a folder of DCP" and (tmp_path / present).exists():
            metadata = dcp.FileSystemReader(tmp_path).read_metadata()
            names -= {info.relative_path for info in metadata.storage_data.values()}
        cut_short += bool(names)
    assert cut_short, "no kill came while a save was under way: the test says nothing"
    answers = ranks.run(WORLD, _undisturbed, str(tmp_path), way, 0)
    reached, found = answers[0]
    assert reached >= 2 * KILLS and all(answer == answers[0] for answer in answers)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert ranks.run(WORLD, _undisturbed, str(nothing), way, reached)[0] == (reached, found), "as if nobody had come"
