"""What Python does around a step on a GPU: which device it puts tensors on, and that a step never waits for the device.

The GPU is a stand-in that computes with the CPU's functions (gpu_stand_in.py): bits, devices and waits are as on a GPU,
durations are not.
"""

import pathlib
from typing import Any

import gpu_stand_in
import pytest

HELPERS = pathlib.Path(gpu_stand_in.__file__).parent
BEGIN = f"""
import contextlib, json, sys, warnings
sys.path[:0] = {[str(HELPERS), str(gpu_stand_in.ROOT)]!r}
import torch
from gpu_stand_in import StandIn
stand_in = StandIn(*sys.argv[1:])
import torch_ext

def params(dtype, device):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype).to(device)) for n in (5, 300, 4097, 1)]

def steps(opt, device, n=4, clip=True, before=lambda opt, i: None, grad=None, begin=0):
    # What each clip and step waited for.
    waited = []
    for i in range(begin, begin + n):
        generator = torch.Generator().manual_seed(i)
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(device)
        if grad is not None:
            grad(opt, i)
        before(opt, i)
        stand_in.waits.clear()
        if clip:
            torch_ext.clip_grad_norm_(opt, 1.0)
        opt.step()
        waited.append(list(stand_in.waits))
        opt.zero_grad()
    return waited

def weights(opt):
    return [p.detach().cpu() for group in opt.param_groups for p in group["params"]]

def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what one process with the stand-in found."""
    return gpu_stand_in.seen_beside(tmp_path_factory.mktemp("stand_in"), BEGIN + RUN)


# name -> the optimizer's options (d: the device), and what runs before each step (opt, i)
WAYS = {
    "float_lr": ("lr=1e-2", "None"),
    "scheduled_float_lr": ("lr=1e-2", "opt.param_groups[0].update(lr=1e-2 / (i + 1))"),
    "tensor_lr_capturable": ("lr=torch.tensor(1e-2, device=d), capturable=True", "None"),
    "tensor_lr_on_the_cpu": ("lr=torch.tensor(1e-2)", "opt.param_groups[0]['lr'].fill_(1e-2 / (i + 1))"),
    "tensor_lr_written_in_place": (
        "lr=torch.tensor(1e-2, device=d), capturable=True",
        "opt.param_groups[0]['lr'].fill_(1e-2 / (i + 1))",
    ),
    "tensor_lr_and_changing_decay": (
        "lr=torch.tensor(1e-2, device=d), capturable=True",
        "opt.param_groups[0].update(weight_decay=0.1 * i)",
    ),
    "tensor_betas": ("lr=1e-2, betas=(torch.tensor(0.8, device=d), torch.tensor(0.99, device=d))", "None"),
    "skip_nonfinite": ("lr=1e-2, skip_nonfinite=True", "None"),
    "scaled_loss": ("lr=1e-2", "setattr(opt, 'grad_scale', torch.full((), 4.0, device=opt._states.counts.device))"),
    "scale_that_is_a_number": ("lr=1e-2", "setattr(opt, 'grad_scale', 4.0)"),
    "ignoring_writes": ("lr=1e-2, on_external_write='ignore'", "None"),
}
DTYPES = ["float32", "bfloat16", "float16"]
RUN = (
    "found = {}\n"
    + "".join(
        f"""
def make(d, dtype):
    return torch_ext.AdamW(params(dtype, d), {options})
for dtype in {DTYPES!r}:
    here, there = make("cpu", getattr(torch, dtype)), make("cuda:1", getattr(torch, dtype))
    before = lambda opt, i: {before}
    steps(here, "cpu", before=before)
    waited = steps(there, "cuda:1", before=before)
    devices = {{str(t.device) for state in there.state.values() for t in state.values()}}
    found[{name!r} + "-" + dtype] = same(here, there), waited[1:], sorted(devices)
"""
        for name, (options, before) in WAYS.items()
    )
    + """
def spoil(opt, i):
    if i == 2:
        opt.param_groups[0]["params"][1].grad[7] = float("inf")
opt = torch_ext.AdamW(params(torch.float32, "cuda"), lr=1e-2)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    waited = steps(opt, "cuda", grad=spoil)
found["skipped"] = waited[1:], opt.skipped_steps(), [float(s["step"]) for s in opt.state.values()]

here = torch_ext.AdamW(params(torch.bfloat16, "cpu"), lr=1e-2)
model = torch.nn.ParameterList(params(torch.bfloat16, "cpu"))
there = torch_ext.AdamW(model.parameters(), lr=1e-2)
model.to("cuda:1")
steps(here, "cpu")
steps(there, "cuda:1")
found["moved"] = same(here, there), sorted({str(t.device) for s in there.state.values() for t in s.values()})

saved = there.state_dict()
again = torch_ext.AdamW(params(torch.bfloat16, "cuda:1"), lr=1e-2)
with torch.no_grad():
    for p, q in zip(model.parameters(), again.param_groups[0]["params"], strict=True):
        q.copy_(p)
again.load_state_dict(saved)
steps(again, "cuda:1", begin=4)
steps(here, "cpu", begin=4)
found["loaded"] = same(here, again), sorted({str(t.device) for s in again.state.values() for t in s.values()})

groups = [{"params": params(torch.float32, "cuda")}, {"params": params(torch.float32, "cuda"), "lr": 1e-3}]
two = torch_ext.AdamW(groups, lr=torch.tensor(1e-2, device="cuda"), capturable=True)
def other(opt, i):
    for p, q in zip(opt.param_groups[0]["params"], opt.param_groups[1]["params"], strict=True):
        q.grad = p.grad.clone()
    opt.param_groups[1]["lr"] = 1e-3 * (i + 1)
found["groups"] = steps(two, "cuda", before=other)[1:]

# Steps that are captured into a graph, as torch says of them: what was refused, and whether the weights are as before.
# A tensor that is read inside, which torch would refuse too, is among the waits.
def captured(options, before, stepped=True):
    opt = torch_ext.AdamW(
        [{"params": params(torch.float32, "cuda")}, {"params": params(torch.bfloat16, "cuda")}],
        **{"lr": torch.tensor(1e-2, device="cuda"), "capturable": True} | options,
    )
    def both(opt, i):
        for p, q in zip(opt.param_groups[0]["params"], opt.param_groups[1]["params"], strict=True):
            q.grad = p.grad.to(q.dtype)
        if i == 1:
            before(opt)
    if stepped:
        steps(opt, "cuda", n=1, clip=False, before=both)
    before_it = [w.clone() for w in weights(opt)]
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        waits = steps(opt, "cuda", n=1, begin=1, clip=False, before=both)[0]
        said = ""
    except RuntimeError as refusal:
        waits, said = list(stand_in.waits), str(refusal)
    finally:
        torch.cuda.is_current_stream_capturing = lambda: False
    return said, waits, all(map(torch.equal, before_it, weights(opt)))
def put(key, value, group=1):
    return lambda opt: opt.param_groups[group].update({key: value})
found["captured"] = {
    "tensor_lrs": captured({}, put("lr", torch.tensor(1e-3, device="cuda"))),
    "resync": captured({"on_external_write": "resync"}, lambda opt: None),
    "number_beside_tensor": captured({}, put("lr", 0.25)),
    "numbers": captured({"lr": 0.5}, lambda opt: None),
    "tensor_of_the_host": captured({}, put("lr", torch.tensor(0.25))),
    "beta": captured({}, put("betas", (0.9, torch.tensor(0.5, device="cuda")))),
    "decay": captured({}, put("weight_decay", torch.tensor(0.5, device="cuda"))),
    "first": captured({}, lambda opt: None, stepped=False),
    "error": captured({"on_external_write": "error"}, lambda opt: None),
    "scale": captured({}, lambda opt: setattr(opt, "grad_scale", 4.0)),
}

from torch_ext.grads.stats import ALL_FINITE
from torch_ext.grads.stats import Watch
buckets = [[torch.ones(5, device="cuda"), torch.ones(300, device="cuda")], [torch.ones(7, device="cuda")], []]
seen = []
for bad in (None, (0, 1), (1, 0)):
    watch, given = Watch(), [[g.clone() for g in bucket] for bucket in buckets]
    if bad is not None:
        given[bad[0]][bad[1]][3] = float("nan")
    stand_in.waits.clear()
    for b, grads in enumerate(given):
        watch.check(grads, [10 * b + i for i in range(len(grads))])
    looked = list(stand_in.waits)
    seen.append((looked, watch.first(), len(stand_in.waits), watch.first() == ALL_FINITE))
found["watched"] = seen

# The part on the host, with copies as they are given to a stream, which is done with each at once.
import types
from torch_ext.optim.cpu_offload import host_states
from torch_ext.optim.cpu_offload import copies
class Copies(copies.CudaCopies):
    def __init__(self, device, looked=lambda: None):
        def stream(address):
            event = types.SimpleNamespace(synchronize=looked)
            return types.SimpleNamespace(device_index=1, cuda_stream=address, record_event=lambda: event)
        self._device, self._ops, self._down, self._up = device, [], stream(0x7000), stream(0x7001)
    numel = 1 << 14
    def buffer(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)
    def begin(self): ...
    def mark(self): ...
    def wait(self, mark): ...
    def end(self): ...
    def to_host(self, targets, sources):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
host_states.copies_of = Copies
for lr in ("float32", "float64"):
    made = []
    for d, more in (("cpu", {}), ("cuda:1", {"offload_fraction": 1.0})):
        rate = torch.tensor(1e-2, device=d, dtype=getattr(torch, lr))
        groups = [{"params": params(torch.bfloat16, d)}, {"params": params(torch.bfloat16, d), "lr": 1e-3}]
        opt = torch_ext.AdamW(groups, lr=rate, capturable=True, **more)
        def before(opt, i):
            other(opt, i)
            opt.param_groups[0]["lr"].fill_(1e-2 / (i + 1))
        made.append((opt, steps(opt, d, before=before, clip=False)))
    (here, _), (there, waited) = made
    found["offloaded_" + lr] = same(here, there), waited[1:]
found["lanes"] = [stand_in.lanes()]
del made, here, there, opt
import gc
gc.collect()
found["lanes"].append(stand_in.lanes())
# A thread that only looks at events, and memory that is let go of while somebody captures.
from torch_ext.comm import streams
entered = []
@contextlib.contextmanager
def device(d):
    entered.append([str(d), stand_in.capture_mode()])
    yield
torch.cuda.device = device
modes = [stand_in.capture_mode()]
with streams.CudaStreams(torch.device("cuda:1")).polling():
    modes.append(stand_in.capture_mode())
modes.append(stand_in.capture_mode())
copies._finish(Copies(None, lambda: modes.append(stand_in.capture_mode())))
found["relaxed"] = entered, modes, stand_in.capture_mode()

found["captured"]["offloaded"] = captured({"offload_fraction": 0.5}, lambda opt: None)
print(json.dumps(found))
"""
)


@pytest.mark.parametrize("way", [f"{name}-{dtype}" for name in WAYS for dtype in DTYPES])
def test_a_step_on_a_gpu_waits_for_nothing_and_has_the_cpus_bits(way: str, found: dict[str, Any]) -> None:
    same, waited, devices = found[way]
    assert same
    assert waited == [[], [], []], "every step but the first, in which state is made"
    assert devices == ["cuda:1"]


def test_A_skipped_step_is_counted_on_the_device_and_told_when_somebody_asks(found: dict[str, Any]) -> None:
    waited, skipped, steps = found["skipped"]
    assert waited == [[], [], []]
    assert (skipped, steps) == (1, [3.0] * 4)


def test_a_model_may_move_after_its_optimizer_was_made(found: dict[str, Any]) -> None:
    assert found["moved"] == [True, ["cuda:1"]]


def test_a_loaded_state_goes_to_the_parameters_device(found: dict[str, Any]) -> None:
    assert found["loaded"] == [True, ["cuda:1"]]


def test_a_float_lr_beside_a_tensor_lr_becomes_a_tensor_without_waiting(found: dict[str, Any]) -> None:
    assert found["groups"] == [[], [], []]


def test_who_looks_at_events_ends_nobodys_capture(found: dict[str, Any]) -> None:
    """Threads that query events, and freeing memory, must not end another thread's graph capture: the capture mode is
    relaxed for that time."""
    entered, modes, after = found["relaxed"]
    assert entered == [["cuda:1", 0]], "its device is current first"
    relaxed = 2
    assert modes == [0, relaxed, 0, relaxed, relaxed] and after == 0


# name of what is captured -> words of the error; empty where capture is legal
CAPTURED = {
    "tensor_lrs": "",
    "resync": "",
    "number_beside_tensor": "every replay would keep what group 1 has as lr: 0.25, a number; a tensor on cuda:0",
    "numbers": "every replay would keep what group 0 has as lr: 0.5, a number; a tensor on cuda:0",
    "tensor_of_the_host": "group 1 has as lr: 0.25, a tensor on the host; a tensor on cuda:0",
    "beta": "every replay would keep what group 1 has as betas[1], a tensor on cuda:0; a number",
    "decay": "every replay would keep what group 1 has as weight_decay, a tensor on cuda:0",
    "first": "there is no state yet, so every replay would create it again: run a step before",
    "error": "on_external_write='error' waits for the device; 'resync' and 'ignore' are legal",
    "scale": "every replay would keep grad_scale = 4.0; a tensor on cuda:0 is legal",
    "offloaded": "part of it runs on the host; offload_fraction=0 is legal",
}


@pytest.mark.parametrize("what", CAPTURED)
def test_what_a_captured_step_would_freeze_or_wait_for_is_refused(what: str, found: dict[str, Any]) -> None:
    said, waits, same = found["captured"][what]
    assert CAPTURED[what] in said and bool(CAPTURED[what]) == bool(said), said
    assert waits == []
    assert same == bool(said), "a refused step writes nothing"


def test_the_check_for_nan_is_read_from_the_device_once_in_a_cycle(found: dict[str, Any]) -> None:
    nothing = -1
    assert found["watched"] == [[[], nothing, 1, True], [[], 1, 1, True], [[], 10, 1, True]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_tensor_lr_comes_down_with_what_the_host_steps(dtype: str, found: dict[str, Any]) -> None:
    """A tensor lr on the device is copied along with the gradients of the host's part, without waiting."""
    same, waited = found[f"offloaded_{dtype}"]
    assert same
    assert waited == [[], [], []]


def test_the_step_on_the_host_copies_by_the_library_for_gpus(found: dict[str, Any]) -> None:
    before, after = found["lanes"]
    assert before["lanes"] == [1] and after["lanes"] == [0], "an optimizer's, which go with it"
    down, up = before["copies"]
    assert down == up > 0, "a gradient and a weight of each piece: beside fp32 masters weights do not come down"
    assert 0 < before["marks"][0] == before["marks"][1] < up, "small parameters share a batch"
