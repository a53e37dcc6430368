"""What a step on a GPU produces besides states - deltas, averages and health - has the CPU's bits, and no step waits
for the device because of it.

The GPU is a stand-in that computes with the CPU's functions (gpu_stand_in.py); tests/cuda shows that the kernels
compute the same.
"""

import pathlib
from typing import Any

import gpu_stand_in
import pytest

HELPERS = pathlib.Path(gpu_stand_in.__file__).parent
POLICIES = ["fp32", "bf16", "bf16_remainder", "8bit", "no master", "fp16"]
EMA_DTYPES = ["torch.bfloat16", "'24bit'", "torch.float32"]
RUN = f"""
import json, os, sys
sys.path[:0] = {[str(HELPERS), str(HELPERS.parent), str(gpu_stand_in.ROOT)]!r}
import torch
from gpu_stand_in import StandIn, without_pinned_memory
stand_in = StandIn(*sys.argv[1:])
import torch_ext
from training import bits, policy_of
from weight_sync import Engine, Layers

os.urandom = lambda n: bytes(range(n))  # the name of a chain
pinned = without_pinned_memory()

def made(policy, device, **options):
    model = Layers(policy).to(device)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return model, torch_ext.AdamW(named, **({{"lr": 1e-4, "policy": policy_of(policy)}} | options))

def steps(model, opt, begin, n=1):
    # What they waited for.
    waited = []
    for i in range(begin, begin + n):
        generator = torch.Generator().manual_seed(i)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype).to(p.device)
        stand_in.waits.clear()
        opt.step()
        waited += stand_in.waits
    opt.zero_grad()
    return waited

def host(named):
    return {{str(name): t.detach().cpu().clone() for name, t in named.items()}}

def same(a, b):
    a, b = host(a), host(b)
    return a.keys() == b.keys() and all(bits(a[k]) == bits(b[k]) for k in a)

found = {{}}
PUBLISHED = (1, 4, 0, 3)
for policy in {POLICIES!r}:
    for exact in (False, True):
        sides = [made(policy, device) for device in ("cpu", "cuda:1")]
        pinned.clear()
        publishers = [torch_ext.WeightPublisher(model, opt, exact) for model, opt in sides]
        engine, equal, waits, waited, done = Engine(sides[0][0]), [], [], [], 0
        for n in PUBLISHED:
            waited.append([steps(*side, done, n) for side in sides][1])
            done += n
            stand_in.waits.clear()
            deltas = [publisher.publish() for publisher in publishers]
            waits.append(len(stand_in.waits))
            engine.subscriber.apply(deltas[1], "full")
            equal.append(deltas[0] == deltas[1] and same(engine.tensors, dict(sides[1][0].named_parameters())))
        engine = Engine(sides[0][0])
        equal.append(publishers[0].full() == publishers[1].full())
        found[f"delta-{{policy}}-{{exact}}"] = equal, waits, waited[1:], list(pinned)

# An engine whose tensors are there: in place, blocks that changed alone, nothing where the delta is refused.
model, opt = made("bf16", "cpu", lr=1e-6)
publisher = torch_ext.WeightPublisher(model, opt)
tensors = {{n: p.detach().clone().to("cuda") for n, p in model.named_parameters()}}
tensors["p0"] = tensors["p0"].cpu().t().contiguous().to("cuda").t()
wide = torch.zeros(130, 2, dtype=torch.bfloat16).to("cuda")
wide[:, 0] = tensors["p1"]
tensors["p1"] = wide[:, 0]
subscriber = torch_ext.WeightSubscriber(tensors)
addresses = {{n: t.data_ptr() for n, t in tensors.items()}}
equal, refused = [], []
for version in range(3):
    steps(model, opt, version, 1)
    if version == 1:
        with torch.no_grad():
            model.p7[-1] += 1
    delta = publisher.publish()
    before = host(tensors)
    try:
        subscriber.apply(delta[:-1])
    except ValueError as refusal:
        refused.append(same(before, tensors))
    stand_in_is_capturing = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        subscriber.apply(delta)
    except RuntimeError as refusal:
        refused.append(str(refusal))
    torch.cuda.is_current_stream_capturing = stand_in_is_capturing
    subscriber.apply(delta, "full" if version else "touched")
    equal.append(same(tensors, dict(model.named_parameters())))
equal.append(addresses == {{n: t.data_ptr() for n, t in tensors.items()}})
steps(model, opt, 3, 1)
tensors["frozen"][0] += 1
try:
    subscriber.apply(publisher.publish(), "full")
except RuntimeError as refusal:
    refused.append(str(refusal))
try:
    torch_ext.WeightSubscriber({{"a": tensors["p2"], "b": tensors["p2"]}})
except ValueError as refusal:
    refused.append(str(refusal))
found["engine"] = equal, refused

sides = [made("bf16", device) for device in ("cpu", "cuda:1")]
publishers = [torch_ext.WeightPublisher(model, opt) for model, opt in sides]
for model, opt in sides:
    steps(model, opt, 0, 2)
    with torch.no_grad():
        model.p0[3:5] += 1
patches = [publisher.publish_patches() for publisher in publishers]
found["patches"] = all(
    a.name == b.name and same({{"at": a.indices, "is": a.values}}, {{"at": b.indices, "is": b.values}})
    for a, b in zip(*patches, strict=True)
), sorted({{str(patch.values.device) for patch in patches[1]}}), sum(len(patch.indices) for patch in patches[1])

for policy in {[p for p in POLICIES if p != "no master"]!r}:
    for dtype in ({", ".join(EMA_DTYPES)}):
        sides = [made(policy, d, ema_decay=0.9, ema_dtype=dtype, ema_every=2, lr=1e-2) for d in ("cpu", "cuda:1")]
        waited = [steps(model, opt, 0, 1) + steps(model, opt, 1, 4) for model, opt in sides][1]
        averages = [opt.ema_state_dict() for _, opt in sides]
        swapped = []
        for model, opt in sides:
            with opt.ema_weights():
                swapped.append(host(dict(model.named_parameters())))
        weights = [dict(model.named_parameters()) for model, _ in sides]
        states = [t.device.type for s in sides[1][1].state.values() for k, t in s.items() if k.startswith("ema")]
        found[f"ema-{{policy}}-{{dtype}}"] = same(*averages), same(*swapped), same(*weights), sorted(set(states))

for policy in {POLICIES!r}:
    sides, healths, waited = [made(policy, d, lr=1e-2) for d in ("cpu", "cuda:1")], [], []
    for model, opt in sides:
        steps(model, opt, 0, 1)
        opt.measure_health()
        waited = steps(model, opt, 1, 1)
        steps(model, opt, 2, 1)
        stand_in.waits.clear()
        healths.append(opt.health())
    a, b = healths
    found[f"health-{{policy}}"] = a.as_dict() == b.as_dict(), [a.step, b.step], waited, len(stand_in.waits)

# While a CUDA graph is captured, as torch says of it; and after steps that nobody counts.
model, opt = made("bf16", "cuda", lr=torch.tensor(1e-6, device="cuda"), capturable=True)
publisher = torch_ext.WeightPublisher(model, opt)
engine = Engine(made("bf16", "cpu")[0])
steps(model, opt, 0, 1)
engine.subscriber.apply(publisher.publish())
refused = []
torch.cuda.is_current_stream_capturing = lambda: True
def another():
    torch_ext.WeightPublisher(model, opt)
for call in (publisher.publish, publisher.full, publisher.publish_patches, another):
    try:
        call()
    except RuntimeError as refusal:
        refused.append(str(refusal))
steps(model, opt, 1, 1)
one_step = publisher._kept.is_one_step
opt.measure_health()
try:
    steps(model, opt, 2, 1)
except RuntimeError as refusal:
    refused.append(str(refusal))
torch.cuda.is_current_stream_capturing = lambda: False
opt._states.measurement = None
opt._stepper.drop_plan()
steps(model, opt, 2, 3)
engine.subscriber.apply(publisher.publish(), "full")
found["captured"] = refused, one_step, same(engine.tensors, dict(model.named_parameters()))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what one process with the stand-in found."""
    return gpu_stand_in.seen_beside(tmp_path_factory.mktemp("stand_in"), RUN)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_delta_from_a_gpu_is_the_cpus(policy: str, exact: bool, found: dict[str, Any]) -> None:
    equal, waits, waited, memory = found[f"delta-{policy}-{exact}"]
    assert equal == [True] * 5
    assert waited == [[], [], []], "no step but the first waits"
    assert len(memory) == 1, "one pinned memory for all versions"
    assert waits == [2] * 4, "one for all that comes, one for all that goes back"


def test_an_engine_on_a_gpu_follows_in_place(found: dict[str, Any]) -> None:
    equal, refused = found["engine"]
    assert equal == [True] * 4
    capture = "apply() while a CUDA graph is captured: it waits for the device"
    assert refused[:6] == [True, capture] * 3
    assert refused[6].startswith('"frozen[33]') and "share" in refused[7] and len(refused) == 8


def test_patches_from_a_gpu_are_the_cpus(found: dict[str, Any]) -> None:
    same, devices, changed = found["patches"]
    assert same and devices == ["cuda:1"] and changed > 0


@pytest.mark.parametrize("dtype", EMA_DTYPES)
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "no master"])
def test_an_average_on_a_gpu_is_the_cpus(policy: str, dtype: str, found: dict[str, Any]) -> None:
    averages, swapped, weights, devices = found[f"ema-{policy}-{dtype.strip(chr(39))}"]
    assert averages and swapped and weights and devices == ["cuda"]


@pytest.mark.parametrize("policy", POLICIES)
def test_health_on_a_gpu_is_the_cpus_and_waits_when_it_is_read(policy: str, found: dict[str, Any]) -> None:
    same, steps, waited, reads = found[f"health-{policy}"]
    assert same and steps == [2, 2]
    assert waited == []
    assert reads <= 2, "the sums of all parameters, and the number of the step"


def test_what_cannot_be_captured_is_refused_and_replays_are_not_counted(found: dict[str, Any]) -> None:
    refused, one_step, same = found["captured"]
    for said, doing in zip(refused, ["publish()", "full()", "publish_patches()", "WeightPublisher()"], strict=False):
        assert said.startswith(f"{doing} while a CUDA graph is captured")
    assert len(refused) == 5 and "measure_health() measures one step" in refused[4]
    assert not one_step and same
