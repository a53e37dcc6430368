"""Muon on a GPU, as Python drives it: its two passes run in the CUDA library and its matrix products in torch on the
device. Weights, states, deltas, averages and health have the CPU's bits.

The GPU is a stand-in that computes with the CPU's functions (gpu_stand_in.py); tests/cuda/muon_test.cc and
muon_extras_test.cc show that the CUDA passes compute the same.
"""

import pathlib
from typing import Any

import gpu_stand_in
import pytest

HELPERS = pathlib.Path(gpu_stand_in.__file__).parent
WORDS = ["fp32", "bf16", "bf16_remainder", "8bit"]
RUN = f"""
import json, os, random, sys
sys.path[:0] = {[str(HELPERS), str(gpu_stand_in.ROOT)]!r}
import torch
from gpu_stand_in import StandIn, without_pinned_memory
stand_in = StandIn(*sys.argv[1:])
import torch_ext
torch.set_num_threads(1)

vector_norm = torch.linalg.vector_norm

def exact_norm(*arguments, dtype=None, **options):  # as the CPU's, so that bits can be compared
    return vector_norm(*arguments, dtype=torch.float64 if dtype is torch.float32 else dtype, **options)

torch.linalg.vector_norm = exact_norm

SHAPES = [(48, 16), (16, 32), (3, 8, 12), (24, 24), (7,)]

def made(device, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(device)) for s in shapes]
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

# -- stacks of matrices of one shape

multiply, multiplied = torch.baddbmm, []

def counted(*arguments, **options):
    multiplied.append(options["out"].shape[0])
    return multiply(*arguments, **options)

def distances(seed):
    r = random.Random(seed)
    shapes = [(r.randrange(1, 40), r.randrange(1, 40)) for _ in range(r.randrange(1, 4))]
    shapes = [s for s in shapes for _ in range(r.choice([1, 2, 7]))] + [(3, *shapes[0])] * r.randrange(2) + [(7,)]
    r.shuffle(shapes)
    options = {{"states": r.choice({WORDS!r}), "ns": r.choice(["standard", "gram", "auto"]), "split": None,
                "ns_dtype": r.choice([torch.float32, torch.bfloat16])}}
    start = [p.detach().float() for p in made("cpu", shapes, **options).param_groups[0]["params"]]
    ways = [made(device, shapes, **options) for device in ("cpu", "cuda:1")]
    for one in ways:
        trained(one)
    here, there = ([t.cpu().float() for t in one.master_state_dict().values()] for one in ways)
    return max(float((x - y).norm() / (x - begin).norm()) for x, y, begin in zip(here, there, start))

torch.baddbmm = counted
found["stacks"] = [distances(seed) for seed in range(20)]
found["multiplied"] = max(multiplied)

# as many calls for ten as for two
calls = []
for copies in (2, 10):
    multiplied.clear()
    trained(made("cuda:1", [(24, 16)] * copies, split=None, ns_dtype=torch.bfloat16), steps=1)
    calls.append([len(multiplied), *set(multiplied)])
found["calls"] = calls

# the products of one matrix of a stack are not finite

def broken(added, left, right, beta, alpha, out):
    multiply(added, left, right, beta=beta, alpha=alpha, out=out)
    out[2].fill_(float("nan"))

torch.baddbmm = broken
optimizer = made("cuda:1", [(24, 16)] * 5, split=None, ns_dtype=torch.bfloat16)
before = [p.detach().cpu().clone() for p in optimizer.param_groups[0]["params"]]
try:
    trained(optimizer, steps=1)
except RuntimeError as error:
    found["error"] = str(error)
torch.baddbmm = multiply
after = [p.detach().cpu() for p in optimizer.param_groups[0]["params"]]
found["moved"] = [not torch.equal(x, y) for x, y in zip(before, after)]

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


def test_random_models_are_near_the_cpus(found: dict[str, Any]) -> None:
    """Their matrices of one shape are multiplied in stacks."""
    assert found["multiplied"] > 7  # of the parameters of a shape, and a stack of experts
    assert max(found["stacks"]) < 0.02, found["stacks"]


def test_a_product_of_many_matrices_is_one_call(found: dict[str, Any]) -> None:
    (of_two, two), (of_ten, ten) = found["calls"]
    assert of_two == of_ten and (two, ten) == (2, 10)


def test_one_of_a_stack_is_not_finite(found: dict[str, Any]) -> None:
    """The error names the parameter; all others are stepped."""
    assert "p2" in found["error"].partition(":")[0], found["error"]
    assert "not finite" in found["error"]
    assert found["moved"] == [True, True, False, True, True]
