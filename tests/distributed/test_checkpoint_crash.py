"""Runs that are killed while they save, again and again: the last whole checkpoint loads, and nothing was lost of it."""

import pathlib
import random
from typing import Any

import pytest
import ranks
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gradients import BF16, FP32, Given, bits, noise
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torch_ext

SHAPES: list[Any] = [(300, 300), (700,), (64, 500)]
WORLD, KILLS = 2, 8


def made() -> tuple[Any, Any]:
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


def save_file(model: Any, optimizer: Any, path: pathlib.Path) -> None:
    whole = optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch_ext.save({"model": model.state_dict(), "optimizer": whole}, path / "checkpoint.pt")
    dist.barrier()


def load_file(model: Any, optimizer: Any, path: pathlib.Path) -> None:
    checkpoint = torch_ext.load(path / "checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def save_folder(model: Any, optimizer: Any, path: pathlib.Path) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, storage_writer=torch_ext.CheckpointWriter(path))


def load_folder(model: Any, optimizer: Any, path: pathlib.Path) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, storage_reader=torch_ext.CheckpointReader(path))
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)


# way -> save, load, the file that says that there is a checkpoint, what a save that was cut short leaves behind
WAYS: dict[str, Any] = {
    "a file": (save_file, load_file, "checkpoint.pt", ".checkpoint.pt.*.unfinished"),
    "a folder of DCP": (save_folder, load_folder, ".metadata", "__*.distcp"),
}


def _train(rank: int, world: int, folder: str, way: str, until: int | None) -> tuple[int, list[bytes]]:
    """Goes on from the checkpoint, saving after each step; until: without saving, to that step at least."""
    save, load, present, _ = WAYS[way]
    path = pathlib.Path(folder)
    model, optimizer = made()
    if (path / present).exists():
        load(model, optimizer, path)
    number = int(optimizer.state[next(model.parameters())]["step"])
    while until is None or number < until:
        step(model, optimizer, number)
        number += 1
        if until is None:
            save(model, optimizer, path)
    whole = optimizer.consolidate_state_dict(to=None)["state"]
    return number, bits([*model.parameters(), *(v.clone() for entry in whole.values() for v in entry.values())])


@pytest.mark.parametrize("way", WAYS)
def test_crash_safety_a_run_that_is_killed_while_saving_goes_on_from_the_last_checkpoint(
    way: str, tmp_path: pathlib.Path
) -> None:
    """SIGKILL of all ranks, at random moments of a loop that does little else than save."""
    _, _, present, leftover = WAYS[way]
    moments, cut_short = random.Random(11), 0
    for _ in range(KILLS):
        with pytest.raises(AssertionError, match="time limit"):
            ranks.outcomes(WORLD, _train, str(tmp_path), way, None, limit=moments.uniform(1.2, 2.2))
        names = {file.name for file in tmp_path.glob(leftover)}
        if way == "a folder of DCP" and (tmp_path / present).exists():
            names -= {
                info.relative_path for info in dcp.FileSystemReader(tmp_path).read_metadata().storage_data.values()
            }
        cut_short += bool(names)
    assert cut_short, "no kill came while a save was under way: the test says nothing"
    answers = ranks.run(WORLD, _train, str(tmp_path), way, 0)
    reached, found = answers[0]
    assert reached >= 3 and all(answer == answers[0] for answer in answers)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert ranks.run(WORLD, _train, str(nothing), way, reached)[0] == (reached, found), "as a run that nobody disturbed"
