"""Matrices of one shape are multiplied in stacks on a GPU: their weights are near the CPU's, a product of many is one
call, one of a stack may fail alone, and the memory is that of the plan.

The GPU is a stand-in that computes with the CPU's functions (gpu_stand_in.py); tests/gpu/test_gpu_muon.py says the
same of a real one.
"""

from typing import Any

import gpu_stand_in
import muon_on_stand_in
import pytest

WORDS = ["fp32", "bf16", "bf16_remainder", "8bit"]
RUN = f"""
{muon_on_stand_in.PREAMBLE}
import pathlib, re, subprocess, tempfile

found = {{}}
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
found["stacks"] = [distances(seed) for seed in range(8)]
found["multiplied"] = max(multiplied)

# as many calls for ten as for two
calls = []
for copies in (2, 10):
    multiplied.clear()
    trained(made("cuda:1", [(24, 16)] * copies, split=None, ns_dtype=torch.bfloat16), steps=1)
    calls.append([len(multiplied), *set(multiplied)])
found["calls"] = calls

# the memory of the products, and its plan

originals, made_for_products = (torch.empty, torch.addmm, torch.baddbmm), []

def unmultiplied(*arguments, out, **options):  # 5 million elements take seconds
    out.zero_()

def noted(*arguments, **options):
    made = originals[0](*arguments, **options)
    if sys._getframe(1).f_globals["__name__"].endswith(("stacked_products", "newton_schulz")):
        made_for_products.append(made.numel() * made.element_size())
    return made

def memory(seed):
    # Returns the bytes kept for products, and what the command says, as its number and unit.
    r = random.Random(seed)
    shapes = [(r.randrange(9, 40), r.randrange(9, 40)) for _ in range(r.randrange(1, 4))]
    shapes = [s for s in shapes for _ in range(r.choice([1, 2, 7]))] + [(3, 16, 8 * r.randrange(1, 5))]
    if seed == 0:  # more than a stack, or a window, holds
        shapes += [(2500, 2000)] * 8
    dtype = r.choice(["float32", "bfloat16"])
    optimizer = made("cuda:1", shapes, split=None, ns_dtype=getattr(torch, dtype), ns_steps=1)
    made_for_products.clear()
    torch.empty, torch.addmm, torch.baddbmm = noted, unmultiplied, unmultiplied
    trained(optimizer, steps=1)
    torch.empty, torch.addmm, torch.baddbmm = originals
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "planned_model.py").write_text(
            f"import torch\\ndef build():\\n"
            f"    return torch.nn.ParameterList(torch.empty(s, dtype=torch.bfloat16) for s in {{shapes}})\\n"
        )
        command = "-m torch_ext plan --model planned_model:build --muon --slots --strategy no_shard --ns-dtype"
        said = subprocess.run(
            [sys.executable, *command.split(), dtype], capture_output=True, text=True, check=True,
            env=os.environ | {{"PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)])}},
        ).stdout
    head, row = (re.split(r"  +", line.strip()) for line in re.findall(r"^.*products.*$|^no_shard.*$", said, re.M)[:2])
    return sum(made_for_products), row[head.index("products")], head[0]

found["memory"] = [memory(seed) for seed in range(2)]

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

# a step within a capture
torch.cuda.is_current_stream_capturing = lambda: True
found["captured"] = []
for lr in (0.05, torch.tensor(0.05).to("cuda:1")):
    try:
        trained(made("cuda:1", [(24, 16)], split=None, lr=lr), steps=1)
    except RuntimeError as error:
        found["captured"].append(str(error))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what the process with the stand-in found."""
    return gpu_stand_in.seen_beside(tmp_path_factory.mktemp("stand_in"), RUN)


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


def test_memory_is_as_planned(found: dict[str, Any]) -> None:
    """By `python -m torch_ext plan --muon --slots`."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    assert found["memory"]
    for kept, number, unit in found["memory"]:
        assert f"{kept / units[unit]:.2f}" == number


def test_a_step_is_not_captured(found: dict[str, Any]) -> None:
    """Whether lr is a number or on the device."""
    assert len(found["captured"]) == 2
    assert all("the step of Muon's matrices waits for the device" in said for said in found["captured"])
