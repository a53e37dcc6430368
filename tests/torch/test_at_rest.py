"""Checkpoints in the compressed form states="at_rest", in one file: every bit comes back, the file is small, and damage
is named."""

import pathlib
import random
from typing import Any

import pytest
import torch
from training import POLICIES, everything, params_of, policy_of, train

import torch_ext

SHAPES = [(260, 128), (130, 37), (700,), (3, 5, 7), (1,), (), (0,), (129,), (512, 16)]


def optimizer_of(name: str, seed: int = 0) -> torch_ext.AdamW:
    return torch_ext.AdamW(params_of(name, SHAPES, seed), lr=1e-2, policy=policy_of(name))


def model_of(optimizer: torch_ext.AdamW) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": p.detach() for i, p in enumerate(optimizer.param_groups[0]["params"])}


def checkpoint_of(optimizer: torch_ext.AdamW) -> dict[str, Any]:
    return {"model": model_of(optimizer), "optimizer": optimizer.state_dict(), "step": 3}


def resumed(name: str, saved: Any) -> torch_ext.AdamW:
    """Returns a new optimizer that has loaded the checkpoint and its weights."""
    optimizer = optimizer_of(name, seed=1)
    with torch.no_grad():
        for p, weight in zip(optimizer.param_groups[0]["params"], saved["model"].values(), strict=True):
            p.copy_(weight)
    optimizer.load_state_dict(saved["optimizer"])
    return optimizer


def same(a: Any, b: Any) -> bool:
    """Whether two objects are equal to the bit, with equal dtypes, shapes and strides; encoded tensors are decoded
    first."""
    if isinstance(a, torch.Tensor):
        a, b = (t.decoded() if hasattr(t, "decoded") else t for t in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and _bits(a) == _bits(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _bits(t: torch.Tensor) -> bytes:
    return bytes(t.detach().as_subclass(torch.Tensor).contiguous().view(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_a_resume_has_the_bits_of_none(name: str, compress: bool, tmp_path: pathlib.Path) -> None:
    """Training that is resumed from a file has the bits of training without interruption."""
    optimizer = optimizer_of(name)
    train(optimizer, range(3))
    path = tmp_path / "checkpoint.pt"
    saved = checkpoint_of(optimizer)
    torch_ext.save(saved, path, states="at_rest", compress=compress)
    for mmap in (False, True):
        loaded = torch_ext.load(path, mmap=mmap)
        assert same(loaded, saved)
        other = resumed(name, loaded)
        assert everything(other) == everything(optimizer)
    train(optimizer, range(3, 6))
    train(other, range(3, 6))
    assert everything(other) == everything(optimizer)


def test_masters_that_somebody_wrote_beside_come_back(tmp_path: pathlib.Path) -> None:
    """fp32 masters that are not determined by their weights and 16 bits: they do not round to their weights. Some are
    NaN or ties; in the last case no master rounds to its weight."""
    weight = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    master = weight.float()
    master.view(torch.int32)[:2048] += torch.randint(-(2**15) + 1, 2**15, (2048,), dtype=torch.int32)
    tied = master.clone()
    tied.view(torch.int32)[64:80] = (weight.view(torch.int16)[64:80].int() << 16) - 0x8000
    few = tied.clone()
    few[100:110] = torch.tensor([1.0, -1.0, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3.4e38, 2.0])
    few.view(torch.int32)[110] = 0x7FC12345
    for values in (master, tied, few, master * 2):
        torch_ext.save({"model": {"w": weight}, "m": values}, tmp_path / "file", states="at_rest")
        loaded = torch_ext.load(tmp_path / "file")
        assert same(loaded, {"model": {"w": weight}, "m": values})


def test_what_is_no_state_comes_back_as_well(tmp_path: pathlib.Path) -> None:
    """Tensors of other dtypes, tied tensors, and plain values in the same file."""
    tied = torch.randn(64, 64, dtype=torch.bfloat16)
    obj = {
        "images": torch.randn(2, 3, 8, 9).to(memory_format=torch.channels_last),
        "every second": torch.arange(400)[::2],
        "complex": torch.randn(100, dtype=torch.complex64),
        "flags": torch.rand(1000) < 0.5,
        "wide": torch.randn(300, dtype=torch.float64),
        "int8": torch.randint(-128, 127, (300,), dtype=torch.int8),
        "no elements": torch.empty(0, 5),
        "in it": [(tied, 1.5, "text"), {"again": tied, 7: None}],
        "module": torch.nn.Linear(50, 20).state_dict(),
    }
    torch_ext.save(obj, tmp_path / "file", states="at_rest")
    loaded = torch_ext.load(tmp_path / "file")
    images = obj.pop("images"), loaded.pop("images")
    assert torch.equal(*images) and images[1].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(obj.pop("every second"), loaded.pop("every second"))  # type: ignore[arg-type]
    assert same(loaded, obj)
    assert loaded["in it"][0][0] is loaded["in it"][1]["again"], "tied tensors stay tied"
    assert loaded["module"]._metadata == obj["module"]._metadata  # type: ignore[attr-defined]


def test_words_that_are_none_are_refused(tmp_path: pathlib.Path) -> None:
    """Values of `states` that do not exist, and a key that the file format reserves."""
    with pytest.raises(ValueError, match="states is 'rest'; 'logical' and 'at_rest' are legal"):
        torch_ext.save({}, tmp_path / "file", states="rest")
    with pytest.raises(ValueError, match="a key 'torch_ext.tensor'"):
        torch_ext.save({"a": {"torch_ext.tensor": 1}}, tmp_path / "file", states="at_rest")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("states", ["logical", "at_rest"])
@pytest.mark.parametrize("compress", [True, False])
def test_damage_is_never_silent(states: str, compress: bool, tmp_path: pathlib.Path) -> None:
    optimizer = optimizer_of("8bit")
    train(optimizer, range(2))
    path = tmp_path / "checkpoint.pt"
    saved = checkpoint_of(optimizer)
    torch_ext.save(saved, path, states=states, compress=compress)
    whole, seeded, named = path.read_bytes(), random.Random(f"{states} {compress}"), 0
    for attempt in range(60):
        if attempt % 3:
            damaged = bytearray(whole)
            damaged[seeded.randrange(len(whole))] ^= 1 << seeded.randrange(8)
        else:
            damaged = bytearray(whole[: seeded.randrange(len(whole))])
        path.write_bytes(damaged)
        try:
            loaded = torch_ext.load(path)
        except ValueError as error:
            assert str(path) in str(error)
            named += "model." in str(error) or "optimizer." in str(error)
        else:
            assert same(loaded, saved), "padding of the archive, which nothing reads"
    assert named > 20


def test_momentum_in_another_8_bit_format_is_read(tmp_path: pathlib.Path) -> None:
    """A file says which 8-bit format its codes have. Here the codes are e4m3 (exp_avg's format) and Muon's momentum is
    e3m4, so it must convert."""
    weights = [torch.nn.Parameter(torch.randn(64, 48).bfloat16()) for _ in range(2)]
    adamw = torch_ext.AdamW(weights[:1], states="8bit")
    muon = torch_ext.Muon(weights[1:], states="8bit", ns_dtype=torch.float32)
    for weight, optimizer in zip(weights, (adamw, muon), strict=True):
        weight.grad = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
        optimizer.step()
    saved, wanted = muon.state_dict(), adamw.state_dict()["state"][0]["exp_avg"]
    saved["state"][0]["momentum_buffer"] = wanted
    torch_ext.save(saved, tmp_path / "checkpoint.pt", states="at_rest")
    assert (tmp_path / "checkpoint.pt").stat().st_size < 6 * wanted.numel(), "the master in 4 bytes, and codes"
    muon.load_state_dict(torch_ext.load(tmp_path / "checkpoint.pt"))
    found = muon.state_dict()["state"][0]["momentum_buffer"]
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
    assert not torch.equal(found, wanted), "rounded to e3m4"
