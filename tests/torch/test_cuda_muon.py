"""Muon on a GPU, as Python drives it: its two passes run in the CUDA library and its matrix products in torch on the
device. Weights, states, deltas, averages and health have the CPU's bits.

The GPU is a stand-in that computes with the CPU's functions (gpu_stand_in.py); tests/cuda/muon_test.cc and
muon_extras_test.cc show that the CUDA passes compute the same.
"""

from typing import Any

import gpu_stand_in
import muon_on_stand_in
import pytest

WORDS = ["fp32", "bf16", "bf16_remainder", "8bit"]
RUN = f"""
{muon_on_stand_in.PREAMBLE}
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

without_pinned_memory()
os.urandom = lambda n: bytes(range(n))  # the name of a chain

class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for i, shape in enumerate(SHAPES):
            weight = torch.randn(shape, generator=generator).bfloat16().to(device)
            self.register_parameter(f"p{{i}}", torch.nn.Parameter(weight))

def left_behind(word, device):
    model = Model(device)
    options = {{"states": word, "ns_dtype": torch.float32, "split": {{"p3": 2}}, "ema_decay": 0.9}}
    optimizer = torch_ext.Muon(model.named_parameters(), lr=0.05, **options)
    publisher = torch_ext.WeightPublisher(model, optimizer)
    trained(optimizer, 2)
    optimizer.measure_health()
    trained(optimizer, 1)
    average = {{str(k): t.cpu() for k, t in optimizer.ema_state_dict().items()}}
    return bytes(publisher.publish()), average, optimizer.health().as_dict()

for word in {WORDS!r}:
    here, there = left_behind(word, "cpu"), left_behind(word, "cuda:1")
    found[f"{{word}} delta"] = here[0] == there[0]
    equal = [torch.equal(average, there[1][name]) for name, average in here[1].items()]
    found[f"{{word}} average"] = len(equal) == len(SHAPES) and all(equal)
    found[f"{{word}} health"] = here[2] == there[2] and len(there[2]) > len(SHAPES)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what the process with the stand-in found."""
    return gpu_stand_in.seen_beside(tmp_path_factory.mktemp("stand_in"), RUN)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("ns_dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("word", WORDS)
def test_weights_and_states_are_the_cpus(word: str, ns_dtype: str, clip: bool, found: dict[str, Any]) -> None:
    assert found[f"{word} {ns_dtype} {clip}"]


def test_both_passes_are_the_librarys_for_gpus(found: dict[str, Any]) -> None:
    assert {"muon_momentum", "muon_update", "grad_stats", "grad_norm"} <= set(found["entries"])


def test_products_are_in_bf16_where_nobody_chose(found: dict[str, Any]) -> None:
    """ns_dtype=None means bf16 on a GPU."""
    assert found["dtype"] == "bfloat16"


@pytest.mark.parametrize("left", ["delta", "average", "health"])
@pytest.mark.parametrize("word", WORDS)
def test_what_a_step_leaves_behind_is_the_cpus(word: str, left: str, found: dict[str, Any]) -> None:
    assert found[f"{word} {left}"]
