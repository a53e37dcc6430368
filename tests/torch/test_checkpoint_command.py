"""python -m torch_ext checkpoint: what is in a file or a folder, and whether it is whole."""

import json
import pathlib
import runpy
import warnings
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
    assert "model.p0" in text and "checksums: all are right" in text
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


class _Own:
    """An object of somebody's class."""


def test_what_else_is_in_a_file_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch_ext.save({"weight": torch.ones(3), "own": _Own()}, tmp_path / "own.pt")
    with pytest.raises(SystemExit):
        main(["checkpoint", str(tmp_path / "own.pt")])
    said = capsys.readouterr().err
    assert "own.pt" in said and "_Own, which is neither a tensor nor a plain value" in said
