"""Muon's step on a GPU against torch.optim.Muon's."""

import statistics

import torch

import torch_ext
from bench import timing, workload
from bench.figures import Bar
from bench.gpu_work import waited
from bench.muon_rows import matrices
from bench.row import Bench
from bench.workload import Shapes

_WIDTH, _HIDDEN, _KEYS = 4096, 14336, 1024
_ATTENTION: Shapes = [(_WIDTH, _WIDTH), (_KEYS, _WIDTH), (_KEYS, _WIDTH), (_WIDTH, _WIDTH)]
_LAYER: Shapes = [*_ATTENTION, (_HIDDEN, _WIDTH), (_HIDDEN, _WIDTH), (_WIDTH, _HIDDEN)]

MODELS = ("gpt2", "llama")
"""Parts of the row: GPT-2's matrices, which are small; two layers of a Llama with 8 billion parameters."""


def compare(bench: Bench, name: str, device: str) -> None:
    """Adds the time of torch.optim.Muon's step divided by ours, which has fp32 masters and bf16 momentum, with the same
    iteration and with the one that needs fewer operations."""
    what = f"{name}: time of torch.optim.Muon / of ours"
    if not hasattr(torch.optim, "Muon"):
        bench.skip("muon", what, f"torch {torch.__version__} has no Muon")
        return
    shapes = matrices(bench.model) if name == "gpt2" else [*_layer(bench), *_layer(bench)]
    params = [workload.make(shapes, torch.bfloat16, bench.seed, device) for _ in range(3)]
    contenders = {
        "torch": waited(torch.optim.Muon(params[0], lr=1e-3).step),
        "standard": waited(torch_ext.Muon(params[1], lr=1e-3, ns="standard").step),
        "auto": waited(torch_ext.Muon(params[2], lr=1e-3, ns="auto").step),
    }
    times = bench.run(f"muon {name}", contenders, bench.rounds)
    beside = {f"{who} ms": 1e3 * statistics.median(times[who]) for who in contenders}
    said = f"{len(shapes)} matrices of {workload.numel(shapes)} elements"
    bench.add("muon", f"{what}, {said}", timing.ratio(times, "torch", "standard"), Bar(1.0, 1.5), beside)
    bench.add("muon", f'{what} with ns="auto"', timing.ratio(times, "torch", "auto"), Bar(1.0, 1.5))


def _layer(bench: Bench) -> Shapes:
    """Returns the shapes of a layer; small ones for a benchmark whose model is small."""
    return _LAYER if workload.numel(bench.model) > 10**8 else [(64, 64), (172, 64), (64, 172)]
