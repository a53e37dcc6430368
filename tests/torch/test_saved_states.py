"""States that earlier versions have saved (tests/torch/saved) load to the bit, and the next step gives the weights that
it gave then."""

import json
import pathlib
import shutil
from typing import Any

import pytest
import saved_states
import torch
import torch.distributed.checkpoint as dcp

import torch_ext

FOLDERS = sorted(path for path in saved_states.SAVED.glob("*/*") if path.is_dir())


def from_file(name: str, folder: pathlib.Path, model: torch.nn.Module, optimizer: Any) -> None:
    path = folder / name
    checkpoint = torch_ext.load(path) if name == "torch_ext.pt" else torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def from_folder(name: str, folder: pathlib.Path, model: torch.nn.Module, optimizer: Any) -> None:
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(checkpoint, storage_reader=torch_ext.CheckpointReader(folder / name), no_dist=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


WAYS = {"torch_ext.pt": from_file, "torch.pt": from_file, "folder": from_folder}


def test_every_configuration_was_saved() -> None:
    assert {path.name for path in FOLDERS} == set(saved_states.CONFIGURATIONS)
    assert sum(path.stat().st_size for path in saved_states.SAVED.rglob("*") if path.is_file()) < 300_000


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_saved_comes_back_and_trains_on(folder: pathlib.Path, way: str, tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder, tmp_path / folder.name)  # a reader locks the folder, and Bazel's copy is read-only
    folder = tmp_path / folder.name
    expected = json.loads((folder / "expected.json").read_text())
    model, optimizer = saved_states.begin(folder.name)
    WAYS[way](way, folder, model, optimizer)
    found = saved_states.recorded(model, optimizer)
    assert found["weights"] == expected["weights"]
    assert set(found["state"]) == set(expected["state"])
    for name, entry in expected["state"].items():
        now = found["state"][name]
        assert {key: now.get(key) for key in entry} == entry, name  # later versions may have more keys
    saved_states.step(model, optimizer, 3)
    assert saved_states.recorded(model, optimizer)["weights"] == expected["next"]
