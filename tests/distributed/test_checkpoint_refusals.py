"""Folders of torch.distributed.checkpoint that are truncated, mixed or foreign must be rejected by the file's name, and
the rejected load must change nothing."""

import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch.distributed.checkpoint as dcp
from checkpointed import EIGHT_BIT, made, steps, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torch_ext

SAVES: dict[str, tuple[str, Any, range]] = {
    "former": ("optim", EIGHT_BIT, range(2)),
    "later": ("optim", EIGHT_BIT, range(3)),
    "another policy": ("optim", {}, range(2)),
    "another strategy": ("optim_grads_params", EIGHT_BIT, range(2)),
}


def _save(rank: int, world: int, folder: str) -> None:
    for name, (strategy, config, which) in SAVES.items():
        model, optimizer = made(strategy, config)
        steps(model, optimizer, which)
        state, optimizer_state = get_state_dict(model, optimizer)
        checkpoint = {"model": state, "optimizer": optimizer_state}
        dcp.save(checkpoint, storage_writer=torch_ext.CheckpointWriter(pathlib.Path(folder) / name))
        dcp.save(checkpoint, checkpoint_id=f"{folder}/torch's {name}")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saves")
    ranks.run(2, _save, str(folder), limit=60.0)
    return folder


def data(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Returns the rank's data file."""
    (found,) = folder.glob(f"__{rank}_*.distcp")
    return found


def truncated(by: int) -> Callable[[pathlib.Path, pathlib.Path], None]:
    """Returns a function that cuts the last `by` bytes from rank 1's file."""

    def cut(folder: pathlib.Path, saves: pathlib.Path) -> None:
        file = data(folder, 1)
        file.write_bytes(file.read_bytes()[:-by])

    return cut


def missing(folder: pathlib.Path, saves: pathlib.Path) -> None:
    data(folder, 1).unlink()


def file_of(name: str, rank: int) -> Callable[[pathlib.Path, pathlib.Path], None]:
    """Returns a function that replaces rank 1's file by a file of this save and rank."""

    def put(folder: pathlib.Path, saves: pathlib.Path) -> None:
        shutil.copy(data(saves / name, rank), data(folder, 1))

    return put


def metadata_of(name: str) -> Callable[[pathlib.Path, pathlib.Path], None]:
    """Returns a function that replaces .metadata by that of this save."""

    def put(folder: pathlib.Path, saves: pathlib.Path) -> None:
        shutil.copy(saves / name / ".metadata", folder / ".metadata")

    return put


def text(folder: pathlib.Path, saves: pathlib.Path) -> None:
    (folder / ".metadata").write_text("a checkpoint")


# By name: the damage to a copy of "former", and a pattern of the error's text.
BROKEN: dict[str, tuple[Callable[[pathlib.Path, pathlib.Path], None], str]] = {
    "a file that ends too early": (
        truncated(1000),
        r"__1_\S+\.distcp is truncated: it has \d+ of \d+ bytes, and '\S+' is incomplete",
    ),
    "a file without its last byte": (truncated(1), r"__1_\S+\.distcp is truncated"),
    "a file that is missing": (missing, r"__1_\S+\.distcp is missing: '\S+' and \d+ more"),
    "another step's file": (file_of("later", 1), r"__1_\S+\.distcp is of another save or rank than \.metadata"),
    "another policy's file": (file_of("another policy", 1), r"__1_\S+\.distcp is (of another save or rank|truncated)"),
    "another strategy's file": (
        file_of("another strategy", 1),
        r"__1_\S+\.distcp is (of another save or rank|truncated)",
    ),
    "another rank's file": (file_of("former", 0), r"__1_\S+\.distcp is (truncated|of another save or rank)"),
    "another save's metadata": (metadata_of("later"), r"\.distcp is missing"),
    "metadata that is none": (text, r"metadata"),
}


def _refused(rank: int, world: int, folder: str) -> list[str]:
    """Tries to load each folder; returns the errors."""
    model, optimizer = made("optim", EIGHT_BIT, seed=8)
    steps(model, optimizer, range(5, 6))
    before = whole(optimizer)
    said = []
    for path in sorted(pathlib.Path(folder).iterdir()):
        state, optimizer_state = get_state_dict(model, optimizer)
        try:
            dcp.load({"model": state, "optimizer": optimizer_state}, storage_reader=torch_ext.CheckpointReader(path))
        except BaseException as refusal:  # DCP's exceptions are not derived from Exception
            said.append(f"{path.name}: {refusal}")
        assert whole(optimizer) == before, path.name
    return said


def test_folders_that_are_truncated_or_mixed_are_refused_by_name(saves: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for how, (damage, _) in BROKEN.items():
        shutil.copytree(saves / "former", tmp_path / how)
        damage(tmp_path / how, saves)
    for said in ranks.run(2, _refused, str(tmp_path), limit=60.0):
        for (how, (_, words)), found in zip(sorted(BROKEN.items()), said, strict=True):
            assert found.startswith(how)
            assert re.search(words, found, flags=re.DOTALL), found


def _readers(rank: int, world: int, folder: str) -> None:
    """Loads our writer's folder with torch's reader, and torch's with ours. Then saves to one folder repeatedly."""
    for saved, reader in (("former", dcp.FileSystemReader), ("torch's former", torch_ext.CheckpointReader)):
        model, optimizer = made("optim", EIGHT_BIT)
        steps(model, optimizer, SAVES["former"][2])
        expected = whole(optimizer)
        steps(model, optimizer, range(5, 6))
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, storage_reader=reader(f"{folder}/{saved}"))
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        assert whole(optimizer) == expected
    path = pathlib.Path(folder) / "over and over"
    for which in (range(2), range(2, 3), range(3, 4)):
        steps(model, optimizer, which)
        expected = whole(optimizer)
        state, optimizer_state = get_state_dict(model, optimizer)
        saving = dcp.async_save(
            {"model": state, "optimizer": optimizer_state}, storage_writer=torch_ext.CheckpointWriter(path)
        )
        saving.result()
    assert len(list(path.glob("*.distcp"))) == world
    steps(model, optimizer, range(5, 6))
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, storage_reader=torch_ext.CheckpointReader(path))
    assert whole(optimizer) == expected


def test_torchs_reader_and_ours_read_each_others_folders(saves: pathlib.Path) -> None:
    ranks.run(2, _readers, str(saves))
