"""The benchmark's row about Muon: its passes over memory, and its step against torch.optim.Muon's."""

import ctypes
import math
import statistics
from collections.abc import Callable

import torch

import torch_ext
from bench import optimizer_configs, timing, workload
from bench.figures import Bar
from bench.row import Bench
from bench.workload import Shapes
from torch_ext.native import dtypes as native_dtypes
from torch_ext.native import library, ops
from torch_ext.optim.muon import newton_schulz
from torch_ext.optim.muon.product_rate import faster_dtype
from torch_ext.tensors import dense

_LARGEST = 8192  # a matrix with a larger dimension is an embedding
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def matrices(model: Shapes) -> Shapes:
    """Returns the shapes that Muon steps: matrices, without the embeddings."""
    return [shape for shape in model if len(shape) == 2 and max(shape) <= _LARGEST]


class Passes:
    """Muon's two operators that pass over memory, on one flat matrix: bf16 weights, fp32 master weights, bf16 momentum
    and updates."""

    # read: gradient, momentum, update, master; written: momentum, work, master, weight
    bytes_read, bytes_written = 2 + 2 + 2 + 4, 2 + 2 + 4 + 2

    def __init__(self, params: int, seed: int) -> None:
        (self.p,) = workload.make([(params,)], torch.bfloat16, seed)
        self.weight, self.master = self.p.detach(), self.p.detach().float()
        self.momentum, self.work = torch.zeros_like(self.weight), torch.empty_like(self.weight)
        self.checksum = torch.zeros(-(-params // 4096), dtype=torch.int64)
        none = torch.empty(0, dtype=torch.int64)
        ops.call_unversioned("master_checksum_", [self.weight], [self.master], [self.checksum], none, 2)
        self.step, self.parts = torch.zeros(1), torch.zeros(1, 2, dtype=torch.int64)
        self.rates = torch.tensor([[1e-3, 1e-4]], dtype=torch.float64)

    def momentum_pass(self) -> None:
        none, grad = torch.empty(0, dtype=torch.int64), self.p.grad
        ops.call_unversioned(
            "muon_momentum_",
            *([grad], [self.momentum], [], [self.work], [self.step], none),
            *(dense.EMPTY, dense.EMPTY, 0.95, True, 0, 1),
        )

    def update_pass(self) -> None:
        none = torch.empty(0, dtype=torch.int64)
        ops.call_unversioned(
            "muon_update_",
            *([self.weight], [self.work], [self.master], [self.checksum], [self.step], none, self.parts, self.rates),
            *(none, [], [], [], [], [], [], 0, 1, 1),
        )

    def both(self) -> None:
        self.momentum_pass()
        self.update_pass()


def muon(bench: Bench) -> None:
    _passes(bench)
    _steps(bench)


def _passes(bench: Bench) -> None:
    """Compares both passes with the wall of the bytes that they move."""
    passes = Passes(bench.params, bench.seed)
    contenders: dict[str, Callable[[], object]] = {
        "both": passes.both,
        "momentum": passes.momentum_pass,
        "update": passes.update_pass,
        "wall": optimizer_configs.wall(Passes.bytes_read + Passes.bytes_written, bench.params),
    }
    times = bench.run("muon, passes", contenders, bench.rounds)
    ms = {f"{name} ms": 1e3 * statistics.median(times[name]) for name in contenders}
    value = timing.ratio(times, "wall", "both")
    bench.add("muon", "both passes, bf16 momentum: share of the wall", value, Bar(0.85, 0.93), ms)


def _step(shapes: Shapes, seed: int, **options: object) -> Callable[[], object]:
    params = workload.make(shapes, torch.bfloat16, seed)
    return torch_ext.Muon(params, lr=1e-3, **options).step  # type: ignore[arg-type]


def _panel(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Returns the panel width in which this machine computes symmetric products of a matrix of this size."""
    threads = torch.get_num_threads()
    of_one = 1 if newton_schulz.lanes(rows, columns, dtype, threads) else threads
    int32, int64 = ctypes.c_int32, ctypes.c_int64
    width: Callable[..., int] = library.function("tx_muon_panel", int64, int32, int64, int32, restype=int64)
    tiles: Callable[..., int] = library.function("tx_isa_has_tiles", restype=int32)
    return width(min(rows, columns), native_dtypes.code_of(dtype), of_one, tiles())


def _limit(shapes: Shapes, kind: str, dtype: torch.dtype) -> Callable[[], object]:
    """Returns the lower bound of a step: as many operations as the orthogonalisations of all matrices take, as square
    products of torch.mm, and the wall of the bytes of both passes."""
    wall = optimizer_configs.wall(Passes.bytes_read + Passes.bytes_written, workload.numel(shapes))
    operations: dict[int, float] = {}  # by the smaller dimension
    for rows, columns in shapes:
        n = min(rows, columns)
        panel = _panel(rows, columns, dtype)
        operations[n] = operations.get(n, 0.0) + newton_schulz.operations(rows, columns, 5, kind, dtype, panel)
    calls = [
        (round(total / (2 * n**3)), torch.ones(n, n, dtype=dtype), torch.empty(n, n, dtype=dtype))
        for n, total in operations.items()
    ]

    def run() -> None:
        for times, a, out in calls:
            for _ in range(times):
                torch.mm(a, a, out=out)
        wall()

    return run


def _error(shape: tuple[int, ...], make: Callable[..., torch.optim.Optimizer], **options: object) -> float:
    """Returns by how many percent the update of a random matrix differs from the same iteration in float64. shape: not
    taller than wide."""
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    optimizer = make([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **options)
    (a, b, c), x = optimizer.param_groups[0]["ns_coefficients"], weight.grad.double()
    optimizer.step()
    x /= x.norm()
    for _ in range(5):
        g = x @ x.T
        x = a * x + (b * g + c * g @ g) @ x
    return 100 * float((weight.detach() + x).norm() / x.norm())


def _steps(bench: Bench) -> None:
    """Compares Muon's step with torch.optim.Muon's, and with its lower bound."""
    shapes, rounds = matrices(bench.model), max(1, min(bench.rounds, 5))
    faster = torch.float32 if faster_dtype(torch.device("cpu")) == "float32" else torch.bfloat16
    theirs = torch.optim.Muon(workload.make(shapes, torch.bfloat16, bench.seed), lr=1e-3).step
    contenders: dict[str, Callable[[], object]] = {
        "torch": theirs,
        "bf16 products": _step(shapes, bench.seed, ns_dtype=torch.bfloat16),
        "by choice": _step(shapes, bench.seed, ns="auto", ns_dtype=faster),
        "limit": _limit(shapes, "auto", faster),
    }
    times = bench.run("muon, steps", contenders, rounds)
    n = workload.numel(shapes)
    ms = {f"{name} ms": 1e3 * statistics.median(times[name]) for name in contenders}
    said = f"{len(shapes)} matrices of {n} elements"
    largest = tuple(sorted(max(shapes, key=math.prod)))
    errors = {
        "torch's error %": _error(largest, torch.optim.Muon),
        "error % of bf16 products": _error(largest, torch_ext.Muon, ns_dtype=torch.bfloat16),
        "by choice": _error(largest, torch_ext.Muon, ns="auto", ns_dtype=faster),
    }
    bench.add("muon", f"torch.optim.Muon / ours, bf16 products, {said}", timing.ratio(times, "torch", "bf16 products"),
              Bar(1.2, 1.5), ms)  # fmt: skip
    bench.add("muon", f"torch.optim.Muon / ours, auto in {_NAMES[faster]}", timing.ratio(times, "torch", "by choice"),
              Bar(2.5, 3.0), errors)  # fmt: skip
    bench.add("muon", f"step / (its operations at torch.mm's rate + wall), auto in {_NAMES[faster]}",
              timing.ratio(times, "by choice", "limit"), Bar(1.15, 1.05, True))  # fmt: skip
