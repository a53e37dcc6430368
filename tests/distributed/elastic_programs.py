"""Random jobs that are saved, end, and go on as another world under another strategy (test_elastic_programs.py).

A program is a model, the groups and options of an optimizer, and steps, drawn from a seed; its gradients are the same
on every rank, so that one process that never stopped has the bits of every world that goes on.
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
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        terms = [(p * grads[name]).sum().float() for name, p in self.named_parameters() if p.requires_grad]
        return torch.stack([torch.zeros(()), *terms]).sum()


class Blocks(nn.Module):
    """Parameters whose gradients are given, in units for FSDP2."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, grads: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([block(of_block) for block, of_block in zip(self.blocks, grads, strict=True)]).sum()


class Segment(NamedTuple):
    strategy: str | None
    steps: range
    way: str
    """How the next segment gets what this one has."""
    fraction: float
    """Of the states that are on the host."""
    along: str | None
    """The strategy to which the model and its states are taken before the last step."""
    frozen: frozenset[str]
    flips: frozenset[str]
    """What is frozen, or trained again, then."""


class Program(NamedTuple):
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
        draw = random.Random(f"{seed} {worlds}")
        blocks = [[draw.choice(SHAPES) for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(1, 3))]
        names = [f"blocks.{b}.p{i}" for b, shapes in enumerate(blocks) for i in range(len(shapes))]
        dtype = draw.choice([BF16, BF16, BF16, FP32, FP16])
        # Main gradients of an fp16 model are fp32, in which those of tied weights are added, and alone they are fp16.
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
        """The model as it is trained, the one in it, and its optimizer."""
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
            if strategy == FSDP2 and self.seed % 2 and self.dtype != FP16:  # in which FSDP2 would sum
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
        """along: whether the model is data parallel, and taken along."""
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

    def grads(self, step: int, endless: bool) -> list[dict[str, Tensor]]:
        """bf16 values: their mean over any number of ranks has the same bits."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        grads = [
            {
                f"p{i}": torch.randn(shape, generator=generator).bfloat16().to(self.dtype)
                for i, shape in enumerate(shapes)
            }
            for shapes in self.blocks
        ]
        if endless:
            grads[0]["p0"].view(-1)[0] = torch.inf
        return grads


def _options(draw: random.Random, names: list[str], dtype: torch.dtype, kind: type) -> dict[str, Any]:
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
    at, frozen = 0, frozenset(name for name in names[1:] if draw.random() < 0.12)
    ended: set[str] = set()
    for world in worlds:
        steps = range(at, at := at + draw.randint(1, 3))
        strategy = draw.choice([None, *strategies] if world == 1 else strategies)
        ways = [way for way in WAYS if way != "full" or strategy not in OURS]  # refused by name where they are cut
        along, flips = None, frozenset[str]()
        if strategy in OURS:
            along = draw.choice([None, None, *OURS])
        if along is not None and draw.random() < 0.5:
            flips = frozenset(name for name in names[1:] if draw.random() < 0.3 and name not in ended)
            ended |= flips - frozen  # torch's get_state_dict leaves their states out
        yield Segment(strategy, steps, draw.choice(ways), draw.choice([0.0, 0.0, 0.5, 1.0]), along, frozen, flips)
        frozen ^= flips


def _groups(draw: random.Random, names: list[str], kind: type) -> list[dict[str, Any]]:
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


# -- ways -------------------------------------------------------------------------------------------------------------


def _states(model: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(**options) if options else None)
    return {"model": weights, "optimizer": states}


def _to_folder(writer: Any, **options: Any) -> Callable[..., None]:
    def save(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
        dcp.save(_states(model, optimizer, **options), storage_writer=writer(folder), no_dist=not dist.is_initialized())

    return save


def _from_folder(reader: Any, **options: Any) -> Callable[..., None]:
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
    dcp.load(_states(model, optimizer), storage_reader=torch_ext.CheckpointReader(folder))


def _whole(states: str) -> Callable[..., None]:
    def save(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
        whole = optimizer.consolidate_state_dict(to=0)
        weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in plain.state_dict().items()}
        if dist.get_rank() == 0:
            torch_ext.save({"model": weights, "optimizer": whole}, f"{folder}/whole.pt", states=states)

    return save


def _from_whole(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
    saved = torch_ext.load(f"{folder}/whole.pt")
    set_model_state_dict(plain, saved["model"], options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(saved["optimizer"])


def _full(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
    state = _states(model, optimizer, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/full.pt")


def _from_full(model: Any, plain: Any, optimizer: Any, folder: str) -> None:
    saved = torch.load(f"{folder}/full.pt", weights_only=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )


def _at_rest(folder: str) -> Any:
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
    """The bits of weights and of the logical states of what is trained, and the groups, on every rank. Collective."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    frozen = tuple(f"p{i}: " for i, p in enumerate(params) if not p.requires_grad)
    found = {key: value for key, value in everything(plain, optimizer).items() if not key.startswith(frozen)}
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"group {i}: {key}"] = repr(list(value) if isinstance(value, tuple) else value)
    return found


def alone(rank: int, world: int, seeds: list[int], worlds: tuple[int, ...]) -> list[list[dict[str, Any]]]:
    """`found_of` at the end of each segment, of one process that never stopped."""
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
    """Segment `at` of each program: what `found_of` is at its end, or what it raised."""
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
