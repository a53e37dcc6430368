"""The command `python -m torch_ext checkpoint`: it lists what a checkpoint file or folder contains and whether it is
undamaged."""

import json
import pathlib
import runpy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from training import params_of, policy_of, train

import torch_ext

main = runpy.run_module("torch_ext")["main"]


@pytest.fixture
def checkpoint() -> Any:
    params = {f"p{i}": p for i, p in enumerate(params_of("8bit", [(64, 128), (700,)]))}
    optimizer = torch_ext.AdamW(list(params.items()), lr=1e-2, policy=policy_of("8bit"))
    train(optimizer, range(2))
    return {"model": {name: p.detach() for name, p in params.items()}, "optimizer": optimizer.state_dict()}


def saved(checkpoint: Any, form: str, path: pathlib.Path) -> str:
    """Saves the checkpoint as a folder or, in that form of states, as a file; returns its path."""
    if form == "folder":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = torch_ext.CheckpointWriter(path, states="at_rest")
            dcp.save(checkpoint, storage_writer=writer, no_dist=True)
    else:
        torch_ext.save(checkpoint, path, states=form)
    return str(path)


@pytest.mark.parametrize(
    ("form", "forms"),
    [
        ("logical", {"logical"}),
        ("at_rest", {"plain", "scaled", "beside", "logical"}),
        ("folder", {"plain", "scaled", "beside", "object"}),
    ],
)
def test_what_is_in_it(
    checkpoint: Any, form: str, forms: set[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(checkpoint, form, tmp_path / "it")
    assert main(["checkpoint", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["key"]: row for row in found["tensors"]}
    assert {row["form"] for row in rows.values()} == forms
    assert found["damage"] == [] and found["checksums"] is True
    weight, moment = rows["model.p0"], rows["optimizer.state.0.exp_avg"]
    assert (weight["dtype"], weight["shape"], weight["plain_bytes"]) == ("bfloat16", [64, 128], 2 * 64 * 128)
    assert moment["dtype"] == "float32" and moment["stored"] == ("float32" if form == "logical" else "uint8")
    assert main(["checkpoint", path]) == 0
    text = capsys.readouterr().out
    assert "model.p0" in text and "checksums: all match" in text
    assert main(["checkpoint", path, "--no-check"]) == 0
    assert "not compared" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["logical", "at_rest", "folder"])
def test_damage_is_named(
    checkpoint: Any, form: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pathlib.Path(saved(checkpoint, form, tmp_path / "it"))
    file = next(path.glob("*.distcp")) if form == "folder" else path
    whole = file.read_bytes()
    file.write_bytes(whole[:9000] + bytes([whole[9000] ^ 4]) + whole[9001:])
    assert main(["checkpoint", str(path)]) == 1
    said = capsys.readouterr().out
    assert "damaged: " in said and "checksums: all" not in said


def test_what_is_no_checkpoint_is_said(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    for name in ("text", "absent"):
        with pytest.raises(SystemExit) as caught:
            main(["checkpoint", str(tmp_path / name)])
        assert caught.value.code == 2 and name in capsys.readouterr().err
    torch.save({"weight": torch.ones(5)}, tmp_path / "torch's")
    assert main(["checkpoint", str(tmp_path / "torch's")]) == 0


def _publishes(folder: pathlib.Path) -> list[pathlib.Path]:
    """Saves versions 1 to 5, of which 3 is a full one, and returns the files that are left: those of 3, 4 and 5."""
    params = {"weight": params_of("bf16", [(64, 128)])[0]}
    optimizer = torch_ext.AdamW(params.items(), lr=1e-2, policy=policy_of("bf16"))
    model = torch.nn.ParameterDict(params)
    weights = torch_ext.IncrementalWeights(folder, torch_ext.WeightPublisher(model, optimizer), full_every=3)
    for step in range(5):
        train(optimizer, range(step, step + 1))
        weights.save()
    return sorted(path for path in folder.iterdir() if path.suffix in (".full", ".delta"))


DAMAGE: dict[str, Callable[[list[pathlib.Path]], tuple[int, str]]] = {
    "none": lambda files: (0, "checksums: all match"),
    "a byte of a version": lambda files: (1, f"damaged: {_flipped(files[1])}"),
    "a version": lambda files: (1, f"damaged: {_gone(files[1]).with_suffix('.*')} is missing"),
    "what the others build on": lambda files: (1, f"damaged: {_gone(files[0]).with_suffix('')}."),
}


def _flipped(path: pathlib.Path) -> pathlib.Path:
    """Flips a bit in the middle of the file and returns its path."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def _gone(path: pathlib.Path) -> pathlib.Path:
    """Deletes the file and returns its path."""
    path.unlink()
    return path


@pytest.mark.parametrize("what", DAMAGE)
def test_incremental_weights_are_listed_and_read(
    what: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = _publishes(tmp_path)
    code, said = DAMAGE[what](files)
    assert main(["checkpoint", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert said in printed and all(path.name in printed for path in files if path.exists()), printed
    assert main(["checkpoint", str(tmp_path), "--json"]) == code
    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert [(row["key"], row["form"]) for row in rows] == [(p.name, p.suffix[1:]) for p in files if p.exists()]


class _Own:
    """An object of a class that the library does not know."""


def test_what_else_is_in_a_file_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch_ext.save({"weight": torch.ones(3), "own": _Own()}, tmp_path / "own.pt")
    with pytest.raises(SystemExit):
        main(["checkpoint", str(tmp_path / "own.pt")])
    said = capsys.readouterr().err
    assert "own.pt" in said and "_Own, which is neither a tensor nor a plain value" in said
