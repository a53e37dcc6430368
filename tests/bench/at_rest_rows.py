"""Checkpoints at rest: python -m bench.at_rest_rows sizes | codec | pause | dcp | increments.

sizes   bytes on disk per parameter, weights included, of the trained GPT of examples/gpt
codec   GB/s of bf16 weights that one thread encodes and decodes, by instruction set
pause   seconds of AsyncSaver.save, against a copy of the state; of a step while it writes, against other steps
increments  bytes on disk per parameter of an IncrementalWeights version, by steps between versions, against all weights
dcp     seconds of saving and loading states at rest through torch.distributed.checkpoint, against logical states

Contenders take turns; the least time of each is shown.
"""

import argparse
import ctypes
import functools
import gc
import importlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_ext
from bench import workload
from torch_ext.cli.info import isas
from torch_ext.native import library, planes
from torch_ext.native.adamw_args import argument

_EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
STATES = ("bf16", "bf16_remainder", "8bit")


def _least(rounds: int, *each: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Calls the functions in turn and returns the least seconds of each."""
    found = [float("inf")] * len(each)
    for _ in range(rounds):
        for i, call in enumerate(each):
            gc.collect()
            before = clock()
            call()
            found[i] = min(found[i], clock() - before)
    return found


def optimizer_of(model: nn.Module, states: Any, **options: Any) -> torch_ext.AdamW:
    return torch_ext.AdamW(model.named_parameters(), policy=torch_ext.load_policy(model), states=states, **options)


# -- sizes


def trained(states: str, steps: int) -> tuple[nn.Module, torch_ext.AdamW]:
    """Returns the model of examples/gpt and its optimizer after so many steps."""
    sys.path.insert(0, str(_EXAMPLE))
    example = importlib.import_module("model")
    torch.manual_seed(0)
    config = example.Config(layers=4, heads=4, width=256, context=128)
    model = example.GPT(config).to(torch.bfloat16)
    optimizer = optimizer_of(model, states, lr=1e-3, weight_decay=0.1)
    _trained_further(model, optimizer, 0, steps)
    return model, optimizer


def _trained_further(model: nn.Module, optimizer: torch_ext.AdamW, begin: int, steps: int) -> None:
    example_text = importlib.import_module("text")
    corpus = example_text.corpus("code").training
    for step in range(begin, begin + steps):
        read = example_text.batch(corpus, 128, 4, seed=0, step=step, rank=0, world=1)
        model(read).backward()
        optimizer.step()
        optimizer.zero_grad()


def increments(states: str, steps: int) -> Iterator[str]:
    """Yields a line for each learning rate, of pretraining, fine-tuning and reinforcement learning, and each number of
    steps between versions."""
    model, optimizer = trained(states, steps)
    numel = sum(p.numel() for p in model.parameters())
    for lr in (1e-3, 1e-5, 1e-6):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for apart in (1, 10):
            with tempfile.TemporaryDirectory() as folder:
                whole = Path(folder) / "whole"
                saver = torch_ext.IncrementalWeights(
                    Path(folder) / "weights", torch_ext.WeightPublisher(model, optimizer)
                )
                for version in range(4):
                    _trained_further(model, optimizer, steps + version * apart, apart)
                    saver.save()
                torch_ext.save({"model": model.state_dict()}, whole, states="at_rest")
                found = {form: [] for form in ("full", "delta")}  # type: dict[str, list[int]]
                for file in (Path(folder) / "weights").iterdir():
                    found.get(file.suffix[1:], []).append(file.stat().st_size)
                full, delta = (sum(each) / len(each) / numel for each in found.values())
                at_rest = whole.stat().st_size / numel
            yield (
                f"{states}, lr {lr:g}, {apart} steps apart: {delta:.4f} bytes per parameter, all weights {full:.3f}, "
                f"torch_ext.save of them {at_rest:.3f}"
            )


def sizes(steps: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        for states in STATES:
            model, optimizer = trained(states, steps)
            numel = sum(p.numel() for p in model.parameters())
            weights = {"model": model.state_dict()}
            for what, obj in (("weights alone", weights), ("all", weights | {"optimizer": optimizer.state_dict()})):
                torch_ext.save(obj, file, states="at_rest")
                each = file.stat().st_size / numel
                yield f"{states}, {what}: {each:.3f} bytes per parameter ({numel} trained {steps} steps)"


# -- codec


def codec() -> Iterator[str]:
    values = (torch.randn(1 << 23, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    out, back = torch.empty(planes.bound(values.dtype, values.numel()), dtype=torch.uint8), torch.empty_like(values)
    length = ctypes.c_int64()
    encode = library.function("tx_planes_encode", type(argument(out)), type(argument(out)), ctypes.c_void_p)
    select = library.function("tx_isa_select", ctypes.c_char_p)
    try:
        for isa in isas():
            select(isa.encode())
            encode(argument(values), argument(out), ctypes.byref(length))
            message = out[: length.value]
            coding = functools.partial(encode, argument(values), argument(out), ctypes.byref(length))
            decoding = functools.partial(planes.decode, message, 0, back)
            seconds = _least(9, coding, decoding, clock=time.thread_time)
            assert torch.equal(back, values)
            rates = [f"{values.nbytes / s / 1e9:.2f}" for s in seconds]
            yield f"{isa}: encode {rates[0]}, decode {rates[1]} GB/s; {length.value / values.numel():.3f} bytes each"
    finally:
        select(None)


# -- pause, dcp


def _gpt2(states: str) -> tuple[nn.Module, torch_ext.AdamW]:
    """Returns a module with GPT-2's shapes and its optimizer, after two steps."""
    model = nn.Module()
    for i, p in enumerate(workload.make(workload.gpt2(), torch.bfloat16, 0)):
        model.register_parameter(f"p{i}", p)
    optimizer = optimizer_of(model, states, lr=1e-3)
    for _ in range(2):
        optimizer.step()
    return model, optimizer


def pause(states: str, rounds: int) -> Iterator[str]:
    model, optimizer = _gpt2(states)
    kept = {t.untyped_storage().data_ptr(): t for p in model.parameters() for t in (p, *optimizer.state[p].values())}
    state = [t.detach() for t in kept.values()]
    copies = [torch.empty_like(t) for t in state]

    def copy() -> None:
        for to, t in zip(copies, state, strict=True):
            to.copy_(t)

    def steps(count: int) -> list[float]:
        return sorted(_least(1, optimizer.step)[0] for _ in range(count))

    def save() -> None:
        saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    ratios, slower = [], []
    with tempfile.TemporaryDirectory() as folder, torch_ext.AsyncSaver(states="at_rest") as saver:
        file = Path(folder) / "file"
        save()
        for _ in range(rounds):
            saver.wait()
            copying, alone = _least(3, copy)[0], steps(9)
            pausing = _least(1, save)[0]
            beside = steps(9)
            ratios.append(pausing / copying)
            slower.append(beside[4] / alone[4])
            said = f"copy {copying:.3f} s, pause {pausing:.3f} s; a step {alone[4]:.4f} s"
            yield f"{said}, beside the writer {beside[4]:.4f} s"
    yield f"{states}: pause / copy {min(ratios):.2f}; steps beside the writer / others {min(slower):.2f}"


def dcp(states: str, rounds: int) -> Iterator[str]:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = _gpt2(states)
    warnings.simplefilter("ignore")  # there is one process
    with tempfile.TemporaryDirectory() as folder:
        forms = {form: Path(folder) / form for form in ("logical", "at_rest")}

        def state() -> Any:
            weights, of_optimizer = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": of_optimizer}

        def saves(form: str) -> Callable[[], object]:
            return lambda: checkpoint.save(
                state(), storage_writer=torch_ext.CheckpointWriter(forms[form], states=form), no_dist=True
            )

        def loads(form: str) -> Callable[[], object]:
            return lambda: checkpoint.load(
                state(), storage_reader=torch_ext.CheckpointReader(forms[form]), no_dist=True
            )

        for what, calls in (("save", saves), ("load", loads)):
            logical, at_rest = _least(rounds, calls("logical"), calls("at_rest"))
            yield f"{states}, {what}: {logical:.2f} s logical, {at_rest:.2f} s at rest; {at_rest / logical:.2f}"
        for form, path in forms.items():
            yield f"{form}: {sum(file.stat().st_size for file in path.iterdir()) / 1e6:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sizes", "codec", "pause", "dcp", "increments"])
    parser.add_argument("--states", choices=STATES, default="8bit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = {
        "sizes": lambda: sizes(options.steps),
        "codec": codec,
        "increments": lambda: increments(options.states, options.steps),
        "pause": lambda: pause(options.states, options.rounds),
        "dcp": lambda: dcp(options.states, options.rounds),
    }
    for row in rows[options.what]():
        print(row, flush=True)


if __name__ == "__main__":
    main()
