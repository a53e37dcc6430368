"""IncrementalWeights of several ranks, which send no messages: a version exists if every rank has written its part."""

import errno
import os
import pathlib
import re
import shutil
from typing import Any
from unittest import mock

import pytest
import ranks
import strategies
import torch
from gradients import BF16, Given, noise
from torch import Tensor

import torch_ext

SHAPES: list[Any] = [(3, 5), (7000,), (129,), (16, 130), (50, 70)]
VERSIONS = 5


def _bits(t: Tensor) -> bytes:
    return t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _whole(model: Any) -> dict[str, bytes]:
    """Returns the bytes of all weights. Collective under FSDP2."""
    found = {}
    for name, p in model.named_parameters():
        value: Any = p.detach()
        found[name] = _bits(value.full_tensor() if hasattr(value, "full_tensor") else value)
    return found


def _saves(rank: int, world: int, strategy: str, folder: pathlib.Path, jobs: int) -> list[dict[str, bytes]]:
    """Saves five versions in each job. Returns the weights of each version of the last job."""
    found = []
    for _ in range(jobs):
        torch.manual_seed(7)
        model: Any = Given(SHAPES, BF16)
        policy = torch_ext.load_policy(BF16)
        torch_ext.parallelize(model, policy, strategy=strategy)
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-3, policy=policy)
        publisher = torch_ext.WeightPublisher(model, optimizer)
        weights = torch_ext.IncrementalWeights(folder / strategy, publisher, full_every=3)
        found = []
        for step in range(VERSIONS):
            model(noise(step, rank, SHAPES, BF16)).backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.save()
            found.append(_whole(model))
    return found


def loaded(folder: pathlib.Path, wanted: dict[str, bytes], version: int | None = None) -> int:
    """Loads a version, or the last one; its weights must be `wanted`. Returns its number."""
    tensors = {name: torch.zeros_like(p) for name, p in Given(SHAPES, BF16).named_parameters()}
    found = torch_ext.load_weights(folder, tensors, version=version)
    assert {name: _bits(t) for name, t in tensors.items()} == wanted
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_under_every_strategy(world: int, tmp_path: pathlib.Path) -> None:
    chosen = [*strategies.STRATEGIES, "optim_grads_params"]
    found = strategies.run(world, _saves, tmp_path, 2, chosen=chosen)
    for strategy, answers in found.items():
        for version in range(3, VERSIONS + 1):
            assert loaded(tmp_path / strategy, answers[0][version - 1], version) == version
        assert loaded(tmp_path / strategy, answers[0][-1]) == VERSIONS
        names = os.listdir(tmp_path / strategy)
        assert len(names) == 3 * world + 1, f"one run, a full version and two deltas: {names}"


def test_what_a_rank_did_not_write_is_no_version_and_what_is_gone_is_named(tmp_path: pathlib.Path) -> None:
    truth = strategies.run(2, _saves, tmp_path, 1, chosen=["optim"])["optim"][0]
    good, bad = tmp_path / "optim", tmp_path / "bad"
    for name in os.listdir(good):
        shutil.copytree(good, bad)
        (bad / name).unlink()
        if f".{VERSIONS:08d}." in name:
            assert loaded(bad, truth[-2]) == VERSIONS - 1
        else:
            with pytest.raises(ValueError, match="missing") as caught:
                loaded(bad, truth[-1])
            assert re.sub(r"\.(run\d+|full|delta)$", "", name) in str(caught.value)
            assert name.endswith((".full", ".delta")) == ("of2.*" in str(caught.value))
        shutil.rmtree(bad)
    shutil.copytree(good, bad)  # as if rank 1 had been killed, and rank 0 had written one more version
    for name in os.listdir(bad):
        if "1of2.delta" in name:
            (bad / name).unlink()
    assert loaded(bad, truth[2]) == 3


def _rank_fails(rank: int, world: int, folder: pathlib.Path) -> list[dict[str, bytes]]:
    """Rank 1 cannot write one version, and goes on with the next."""
    model: Any = Given(SHAPES, BF16)
    policy = torch_ext.load_policy(BF16)
    torch_ext.parallelize(model, policy, strategy="optim_grads")
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-3, policy=policy)
    weights = torch_ext.IncrementalWeights(folder, torch_ext.WeightPublisher(model, optimizer))
    found = []
    for step in range(5):
        model(noise(step, rank, SHAPES, BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step == 1:
            full = mock.patch("os.rename", side_effect=OSError(errno.ENOSPC, "No space left on device"))
            with full, pytest.raises(OSError, match=r"1of2.delta needs \d+ bytes, and \d+ bytes are free"):
                weights.save()
        else:
            weights.save()
        found.append(_whole(model))
        torch.distributed.barrier()
        if rank == 0:
            expected = {0: 1, 1: 1, 2: 1, 3: 4, 4: 5}[step]
            assert loaded(folder, found[expected - 1]) == expected
        torch.distributed.barrier()
    return found


def test_a_rank_that_could_not_write_is_part_of_the_versions_after_it(tmp_path: pathlib.Path) -> None:
    found = ranks.run(2, _rank_fails, tmp_path)
    assert loaded(tmp_path, found[0][-1]) == 5
