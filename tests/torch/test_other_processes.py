"""Optimizers that are given to another process, as torch's: they go on there with the bits of this one."""

import multiprocessing
from typing import Any

import pytest
import torch
from torch import nn

import torch_ext

KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16_remainder": {"states": "bf16_remainder"},
    "8bit": {"states": "8bit"},
    "on the host": {"offload_fraction": 0.5},
    "an average": {"ema_decay": 0.9},
    "step_in_backward": {"step_in_backward": True},
}


def _made(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 20)).bfloat16()
    if kind == "Muon":
        return model, torch_ext.Muon(model, ns_dtype=torch.float32)
    return model, torch_ext.AdamW(model.named_parameters(), lr=1e-2, **KINDS[kind])


def _train(model: nn.Module, optimizer: Any, steps: range) -> Any:
    for step in steps:
        inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"]
    found = [*model.parameters(), *(t for entry in states.values() for t in entry.values())]
    return [t.detach().double().tolist() for t in found]


def _goes_on(given: dict[str, tuple[nn.Module, Any]], answers: Any) -> None:
    torch.set_num_threads(1)
    answers.send({kind: _train(*one, range(2, 4)) for kind, one in given.items()})


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_optimizer_that_a_process_is_started_with(method: str) -> None:
    kinds = [*KINDS, "Muon"]
    given = {kind: _made(kind) for kind in kinds}
    for one in given.values():
        _train(*one, range(2))
    context: Any = multiprocessing.get_context(method)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_goes_on, args=(given, theirs))
    process.start()
    theirs.close()
    found = mine.recv()
    process.join()
    assert process.exitcode == 0
    assert found == {kind: _train(*_made(kind), range(4)) for kind in kinds}
