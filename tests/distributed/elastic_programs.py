"""Random training jobs that save, end, and resume with another world size under another strategy
(test_elastic_programs.py).

A program is drawn from a seed: a model, an optimizer's groups and options, and steps. Gradients are the same on every
rank. So a single process that never stopped is the reference, and every resumed world must have its bits.
"""

import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gradients import BF16, FP16, FP32
from muon_programs import everything
from strategies import STRATEGIES as OURS
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import torch_ext

FSDP2 = "optim_grads_params"
SHAPES: list[tuple[int, ...]] = [(24, 10), (130,), (700,), (1,), (16, 130), (3, 8, 12), (6, 4, 3, 3), (17, 33), (128,)]


class Block(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, generator: torch.Generator) -> None:
        """Parameters p0, p1, ...; the gradient of each trained one is exactly the tensor of its name in `grads`."""
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        terms = [(p * grads[name]).sum().float() for name, p in self.named_parameters() if p.requires_grad]
        return torch.stack([torch.zeros(()), *terms]).sum()


class Blocks(nn.Module):
    """A model of `Block`s, which can be FSDP2 units. `model(grads).backward()` sets the gradients of each block."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, grads: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([block(of_block) for block, of_block in zip(self.blocks, grads, strict=True)]).sum()


class Segment(NamedTuple):
    """The part of a program that one world trains, between two saves."""

    strategy: str | None
    steps: range
    way: str
    """How the state is saved here and loaded by the next segment: a key of WAYS."""
    fraction: float
    """offload_fraction: the fraction of the optimizer state that is on the host."""
    along: str | None
    """The strategy that the model and the optimizer state are moved to before the last step; None: they stay."""
    frozen: frozenset[str]
    flips: frozenset[str]
    """Parameters that are frozen or thawed before the last step."""


class Program(NamedTuple):
    """A whole job: one segment for each world size in `worlds`, one act ("step", "clip", ...) for each step."""

    seed: int
    worlds: tuple[int, ...]
    blocks: list[list[tuple[int, ...]]]
    tied: bool
    dtype: torch.dtype
    kind: type
    settings: dict[str, Any]
    options: dict[str, Any]
    groups: list[dict[str, Any]]
    segments: list[Segment]
    acts: list[str]

    @classmethod
    def of(cls, seed: int, worlds: tuple[int, ...]) -> "Program":
        """Draws the program that belongs to `seed` and the world sizes."""
        draw = random.Random(f"{seed} {worlds}")
        blocks = [[draw.choice(SHAPES) for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(1, 3))]
        names = [f"blocks.{b}.p{i}" for b, shapes in enumerate(blocks) for i in range(len(shapes))]
        dtype = draw.choice([BF16, BF16, BF16, FP32, FP16])
        # Not with fp16: parallel models add the gradients of tied weights in fp32, the single process in fp16.
        tied = len(blocks) > 1 and dtype != FP16 and draw.random() < 0.15
        if tied:
            blocks[-1][0] = blocks[0][0]
            names.remove(f"blocks.{len(blocks) - 1}.p0")
        kind = draw.choice([torch_ext.AdamW, torch_ext.AdamW, torch_ext.Muon])
        options = _options(draw, names, dtype, kind)
        settings = {"bucket_size": draw.choice([300, 2000, 10**6])}
        settings["grad_comm_dtype"] = draw.choice([FP32, FP32 if dtype == FP16 else dtype])
        strategies = [s for s in (*OURS, FSDP2, "ddp") if s != "ddp" or kind is torch_ext.AdamW]
        strategies = [s for s in strategies if s != FSDP2 or not tied and options["states"] != "8bit"]
        segments = list(_segments(draw, names, worlds, strategies))
        illegal = set() if options.get("skip_nonfinite") else {"skip"}
        if any("in place" in segment.way for segment in segments):
            illegal.add("lr")  # a number is not loaded in place
        acts = [
            draw.choice(["step", "step", "step", "clip", "lr", "write", "skip"]) for _ in range(segments[-1].steps.stop)
        ]
        acts = ["step" if act in illegal else act for act in acts]
        groups = _groups(draw, names, kind)
        return cls(seed, worlds, blocks, tied, dtype, kind, settings, options, groups, segments, acts)

    def made(self, segment: Segment, strategy: str | None) -> tuple[Any, Any, Any]:
        """Returns the model to call (a DistributedDataParallel or the module itself), the module, and the optimizer."""
        generator = torch.Generator().manual_seed(self.seed)
        plain = Blocks([Block(shapes, self.dtype, generator) for shapes in self.blocks])
        if self.tied:
            plain.blocks[-1].p0 = plain.blocks[0].p0
        for name, p in plain.named_parameters():
            p.requires_grad_(name not in segment.frozen)
        policy = torch_ext.load_policy(self.dtype, override_ddp_config=self.settings)
        model: Any = plain
        if strategy == "ddp":
            model = nn.parallel.DistributedDataParallel(plain)
            torch_ext.register_comm_hook(model, policy)
        elif strategy is not None:
            if strategy == FSDP2 and self.seed % 2 and self.dtype != FP16:  # FSDP2 would reduce in fp16
                for block in plain.blocks:
                    torch.distributed.fsdp.fully_shard(block)
                torch.distributed.fsdp.fully_shard(plain)
            torch_ext.parallelize(plain, policy, strategy=strategy)
        params = dict(plain.named_parameters())
        groups = [g | {"params": [(n, params[n]) for n in g["params"] if n in params]} for g in self.groups]
        options = self.options | (
            {"offload_fraction": segment.fraction} if strategy is not None and self.kind is torch_ext.AdamW else {}
        )
        return model, plain, self.kind([g for g in groups if g["params"]], policy=policy, **options)

    def train(self, segment: Segment, model: Any, plain: Any, optimizer: Any, along: bool) -> None:
        """Takes the segment's steps. along: whether to change to `segment.along` before the last one."""
        for step in segment.steps:
            if step == segment.steps[-1]:
                for name, p in plain.named_parameters():
                    p.requires_grad_(p.requires_grad != (name in segment.flips))
                if along and segment.along is not None:
                    policy = torch_ext.load_policy(self.dtype, override_ddp_config=self.settings)
                    torch_ext.parallelize(plain, policy, strategy=segment.along, optimizer=optimizer)
            act = self.acts[step]
            model(self.grads(step, act == "skip")).backward()
            if act == "clip":
                torch_ext.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if act == "lr":
                for group in optimizer.param_groups:
                    group["lr"] *= 0.75
            if act == "write":
                with torch.no_grad():
                    list(plain.parameters())[step % len(list(plain.parameters()))].mul_(1.25)

    def grads(self, step: int, infinite: bool) -> list[dict[str, Tensor]]:
        """Returns gradients that are bf16 values, so that their mean over any number of ranks has the same bits.

        infinite: puts an infinity into one gradient, for steps that must be skipped.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        grads = [
            {
                f"p{i}": torch.randn(shape, generator=generator).bfloat16().to(self.dtype)
                for i, shape in enumerate(shapes)
            }
            for shapes in self.blocks
        ]
        if infinite:
            grads[0]["p0"].view(-1)[0] = torch.inf
        return grads


def _options(draw: random.Random, names: list[str], dtype: torch.dtype, kind: type) -> dict[str, Any]:
    """Draws the optimizer's options: states, EMA, keep_32bit, skip_nonfinite."""
    options: dict[str, Any] = {"states": draw.choice(["fp32", "bf16"])}
    if dtype == BF16:
        options["states"] = draw.choice(["bf16", "fp32", "bf16_remainder", "bf16_remainder", "8bit"])
    if kind is torch_ext.Muon:
        options["ns_dtype"] = FP32
    else:
        options["skip_nonfinite"] = draw.random() < 0.5
    if draw.random() < 0.3:
        options["keep_32bit"] = draw.sample(names, draw.randint(1, len(names)))
    if draw.random() < 0.5:
        options |= {"ema_decay": draw.choice([0.5, 0.9]), "ema_every": draw.choice([1, 2])}
        options["ema_dtype"] = draw.choice([BF16, "24bit", FP32])
    return options


def _segments(
    draw: random.Random, names: list[str], worlds: tuple[int, ...], strategies: list[str]
) -> Iterator[Segment]:
    """Draws one segment for each world size, with consecutive steps."""
    at, frozen = 0, frozenset(name for name in names[1:] if draw.random() < 0.12)
    ended: set[str] = set()
    for world in worlds:
        steps = range(at, at := at + draw.randint(1, 3))
        strategy = draw.choice([None, *strategies] if world == 1 else strategies)
        ways = [way for way in WAYS if way != "full" or strategy not in OURS]  # "full" is rejected for sharded state
        along, flips = None, frozenset[str]()
        if strategy in OURS:
            along = draw.choice([None, None, *OURS])
        if along is not None and draw.random() < 0.5:
            flips = frozenset(name for name in names[1:] if draw.random() < 0.3 and name not in ended)
            ended |= flips - frozen  # torch's get_state_dict leaves out the states of frozen parameters
        yield Segment(strategy, steps, draw.choice(ways), draw.choice([0.0, 0.0, 0.5, 1.0]), along, frozen, flips)
        frozen ^= flips


def _groups(draw: random.Random, names: list[str], kind: type) -> list[dict[str, Any]]:
    """Draws parameter groups that together contain every name once."""
    rest = names[:]
    draw.shuffle(rest)
    groups: list[dict[str, Any]] = []
    while rest:
        n = draw.randint(1, len(rest))
        group: dict[str, Any] = {"params": rest[:n], "lr": 10.0 ** draw.randint(-3, -1)}
        if draw.random() < 0.5:
            group["weight_decay"] = draw.choice([0.0, 0.2])
        if kind is torch_ext.AdamW and draw.random() < 0.5:
            group |= {"betas": draw.choice([(0.8, 0.9), (0.95, 0.999)]), "eps": draw.choice([1e-6, 1e-12])}
        if kind is torch_ext.Muon and draw.random() < 0.3:
            group["algorithm"] = "adamw"
        groups.append(group)
        rest = rest[n:]
    return groups


# -- ways to save and load -------------------------------------------------------------------------------------------


def _states(model: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    """Returns what torch's get_state_dict gives for model and optimizer, under torch_ext's keys."""
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(**options) if options else None)
    return {"model": weights, "optimizer": states}


def _to_folder(writer: Any, **options: Any) -> Callable[..., None]:
    """Returns a function that saves through torch.distributed.checkpoint with `writer(folder)`."""

    def save(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
        dcp.save(_states(model, optimizer, **options), storage_writer=writer(folder), no_dist=not dist.is_initialized())

    return save


def _from_folder(reader: Any, **options: Any) -> Callable[..., None]:
    """Returns a function that loads through torch.distributed.checkpoint with `reader(folder)`."""

    def load(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
        state = _states(model, optimizer, **options)
        dcp.load(state, storage_reader=reader(folder), no_dist=not dist.is_initialized())
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(**options) if options else None,
        )

    return load


def _in_place(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
    """Loads into the tensors of the state itself, without set_state_dict."""
    dcp.load(_states(model, optimizer), storage_reader=torch_ext.CheckpointReader(folder))


def _whole(states: str) -> Callable[..., None]:
    """Returns a function that saves the consolidated state from rank 0 with torch_ext.save."""

    def save(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
        whole = optimizer.consolidate_state_dict(to=0)
        weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in plain.state_dict().items()}
        if dist.get_rank() == 0:
            torch_ext.save({"model": weights, "optimizer": whole}, f"{folder}/whole.pt", states=states)

    return save


def _from_whole(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
    """Loads what `_whole` saved, on every rank."""
    saved = torch_ext.load(f"{folder}/whole.pt")
    set_model_state_dict(plain, saved["model"], options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(saved["optimizer"])


def _full(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
    """Saves torch's full state dict from rank 0 with torch.save."""
    state = _states(model, optimizer, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/full.pt")


def _from_full(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
    """Loads what `_full` saved, on every rank."""
    saved = torch.load(f"{folder}/full.pt", weights_only=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )


def _at_rest(folder: str) -> Any:
    """Returns a writer that stores the optimizer state in its compressed form."""
    return torch_ext.CheckpointWriter(folder, states="at_rest")


WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "torch's folder": (_to_folder(dcp.FileSystemWriter), _from_folder(dcp.FileSystemReader)),
    "ours from torch's": (_to_folder(dcp.FileSystemWriter), _from_folder(torch_ext.CheckpointReader)),
    "folder": (_to_folder(torch_ext.CheckpointWriter), _from_folder(torch_ext.CheckpointReader)),
    "torch's from ours": (_to_folder(torch_ext.CheckpointWriter), _from_folder(dcp.FileSystemReader)),
    "at rest": (_to_folder(_at_rest), _from_folder(torch_ext.CheckpointReader)),
    "in place": (_to_folder(torch_ext.CheckpointWriter), _in_place),
    "at rest, in place": (_to_folder(_at_rest), _in_place),
    "flattened": (
        _to_folder(torch_ext.CheckpointWriter, flatten_optimizer_state_dict=True),
        _from_folder(torch_ext.CheckpointReader, flatten_optimizer_state_dict=True),
    ),
    "whole": (_whole("logical"), _from_whole),
    "whole, at rest": (_whole("at_rest"), _from_whole),
    "full": (_full, _from_full),
}


def found_of(plain: Any, optimizer: Any) -> dict[str, Any]:
    """Returns the groups, and the bits of all weights and of trained parameters' logical states. Collective."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    frozen = tuple(f"p{i}: " for i, p in enumerate(params) if not p.requires_grad)
    found = {key: value for key, value in everything(plain, optimizer).items() if not key.startswith(frozen)}
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"group {i}: {key}"] = repr(list(value) if isinstance(value, tuple) else value)
    return found


def alone(rank: int, world: int, seeds: list[int], worlds: tuple[int, ...]) -> list[list[dict[str, Any]]]:
    """Returns, for each seed, `found_of` at the end of each segment, in one process that never stops."""
    torch.set_num_threads(1)
    found = []
    for seed in seeds:
        program = Program.of(seed, worlds)
        model, plain, optimizer = program.made(program.segments[0], None)
        ends = []
        for segment in program.segments:
            program.train(segment, model, plain, optimizer, False)
            ends.append(found_of(plain, optimizer))
        found.append(ends)
    return found


def segments(rank: int, world: int, seeds: list[int], worlds: tuple[int, ...], at: int, folder: str) -> list[Any]:
    """Trains segment `at` of each program and returns `found_of` at its end. Loads what segment `at` - 1 saved in
    `folder`, and saves for the next one."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for seed in seeds:
        program = Program.of(seed, worlds)
        segment = program.segments[at]
        model, plain, optimizer = program.made(segment, segment.strategy)
        if at:
            WAYS[program.segments[at - 1].way][1](model, plain, optimizer, f"{folder}/{seed}-{at - 1}")
        program.train(segment, model, plain, optimizer, True)
        found.append(found_of(plain, optimizer))
        if at + 1 < len(worlds):
            place = pathlib.Path(f"{folder}/{seed}-{at}")
            place.mkdir(exist_ok=True)
            WAYS[segment.way][0](model, plain, optimizer, str(place))
            dist.barrier()
    return found
