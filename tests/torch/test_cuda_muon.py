"""Muon on a GPU, as Python drives it: the two passes by the library for GPUs, products by torch on the device, and what
is not there yet is named before anything is written.

On a stand-in (see gpu_stand_in.py) whose arithmetic is the CPU's; tests/cuda/muon_test.cc shows that the passes' is
that.
"""

import pathlib
from typing import Any

import gpu_stand_in
import pytest

HELPERS = pathlib.Path(gpu_stand_in.__file__).parent
WORDS = ["fp32", "bf16", "bf16_remainder", "8bit"]
RUN = f"""
import json, sys
sys.path[:0] = {[str(HELPERS), str(gpu_stand_in.ROOT)]!r}
import torch
from gpu_stand_in import StandIn
stand_in = StandIn(*sys.argv[1:])
import torch_ext
torch.set_num_threads(1)

SHAPES = [(48, 16), (16, 32), (3, 8, 12), (24, 24), (7,)]

def made(device, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(device)) for s in SHAPES]
    named = [(f"p{{i}}", p) for i, p in enumerate(params)]
    return torch_ext.Muon(named, **({{"lr": 0.05, "split": {{"p3": 2}}}} | options))

def trained(optimizer, steps=3, clip=False):
    params = optimizer.param_groups[0]["params"]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)
        if clip:
            torch_ext.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
    return [p.detach().cpu() for p in params]

def everything(optimizer):
    state = optimizer.state_dict()["state"]
    return [t.cpu() for s in state.values() for _, t in sorted(s.items()) if torch.is_tensor(t)]

found = {{}}
for word in {WORDS!r}:
    for ns_dtype in (torch.float32, torch.bfloat16):
        for clip in (False, True):
            options = {{"states": word, "ns_dtype": ns_dtype, "ns": "auto"}}
            here, there = made("cpu", **options), made("cuda:1", **options)
            weights = trained(here, clip=clip), trained(there, clip=clip)
            states = everything(here), everything(there)
            key = f"{{word}} {{ns_dtype}} {{clip}}"
            found[key] = all(map(torch.equal, *weights)) and all(map(torch.equal, *states))
entries = {{call.entry for call in stand_in.calls()}}
found["entries"] = sorted(entries)
optimizer = made("cuda:1", ns_dtype=None)
trained(optimizer, 1)
found["dtype"] = optimizer.param_groups[0]["ns_dtype"]
optimizer = made("cuda:1", ns_dtype=torch.float32, ema_decay=0.9)
before = [p.detach().cpu().clone() for p in optimizer.param_groups[0]["params"]]
try:
    trained(optimizer, 1)
except RuntimeError as refusal:
    found["refused"] = str(refusal)
found["kept"] = all(map(torch.equal, before, [p.detach().cpu() for p in optimizer.param_groups[0]["params"]]))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return gpu_stand_in.seen_beside(tmp_path_factory.mktemp("stand_in"), RUN)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("ns_dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("word", WORDS)
def test_weights_and_states_are_the_cpus(word: str, ns_dtype: str, clip: bool, found: dict[str, Any]) -> None:
    assert found[f"{word} {ns_dtype} {clip}"]


def test_both_passes_are_the_librarys_for_gpus(found: dict[str, Any]) -> None:
    assert {"muon_momentum", "muon_update", "grad_stats", "grad_norm"} <= set(found["entries"])


def test_products_are_in_bf16_where_nobody_chose(found: dict[str, Any]) -> None:
    assert found["dtype"] == "bfloat16"


def test_what_has_no_kernel_yet_is_named_and_nothing_is_written(found: dict[str, Any]) -> None:
    assert "p0" in found["refused"] and "cuda:1" in found["refused"] and "ema_decay" in found["refused"]
    assert found["kept"]
