"""Random training loops with different gradients on each rank, under every strategy (test_loop_programs.py).

A program has what loops do between and within steps, and FSDP2 units of many kinds. Gradients are small whole numbers.
Their sums and means over two or four ranks are exact in every dtype, so one process that gets the means is the
reference, to the bit.
"""

import contextlib
import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gradients import BF16, FP16, FP32, bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import torch_ext

FSDP2 = "optim_grads_params"
SHAPES: list[tuple[int, ...]] = [(24, 10), (130,), (700,), (1,), (16, 130), (3, 8, 12), (17, 33), (5, 256), (2, 3)]


class Stop(Exception):
    """Raised by what stands for the user's code."""


class Block(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], inner: list["Block"], dtype: torch.dtype, seed: int) -> None:
        """Parameters p0, p1, ... and inner blocks. `given`: the block's gradients, and how each inner block is called
        (see `Loop._given`)."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        if given["stops"]:
            raise Stop
        for name, p in self.named_parameters(recurse=False):
            if p.requires_grad:
                x = x + (p * given["grads"][name]).sum().float()
        for name, block in self.inner.named_children():
            x = _used(block, x, given["inner"][int(name)])
        return x


def _used(block: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
    """Calls a block as often as `given` says, with or without activation checkpointing."""
    for _ in range(given["times"]):
        x = checkpoint(block, x, given, use_reentrant=False) if given["again"] else block(x, given)
    return x


class Step(NamedTuple):
    """One training step: micro-batches, how they accumulate, and what is done before and after the backwards."""

    micro: int  # number of micro-batches
    how: str  # how they accumulate: "every" one reduces, "no_sync", or "not yet" (set_requires_gradient_sync)
    before: list[str]
    after: list[str]
    seed: int


class Program(NamedTuple):
    """A model, its strategy, units and options, and five steps."""

    seed: int
    tree: list[Any]
    """A block's shapes, and the list of its inner blocks, each a tree again."""
    dtype: torch.dtype
    strategy: str
    units: dict[str, Any]
    settings: dict[str, Any]
    options: dict[str, Any]
    unused: bool
    steps: list[Step]

    @classmethod
    def of(cls, seed: int, world: int, strategy: str) -> "Program":
        """Draws the program that belongs to the seed, the world size and the strategy."""
        draw = random.Random(f"{seed} {world} {strategy}")
        tree = _tree(draw, 2)
        dtype = draw.choice([BF16, BF16, FP32, FP16])
        options: dict[str, Any] = {"lr": 10.0 ** draw.randint(-4, -1), "states": draw.choice(["bf16", "fp32"])}
        if dtype == BF16 and draw.random() < 0.5:
            options["states"] = "bf16_remainder"
        settings = {"bucket_size": draw.choice([1, 500, 10**6]), "grad_comm_dtype": draw.choice([FP32, FP32, BF16])}
        units = {
            "made": draw.random() < 0.6,
            "mesh": world == 4 and draw.random() < 0.4,
            "reshard": draw.choice([True, True, False, 2]),
            "some": draw.random() < 0.4,
        }
        unused = draw.random() < 0.3
        steps = [_step(draw, strategy, unused) for _ in range(5)]
        return cls(seed, tree, dtype, strategy, units, settings, options, unused, steps)

    def made(self, alone: bool) -> tuple[Any, Any, Any]:
        """Returns the model to call, the module in it, and the optimizer. alone: without parallelism."""
        plain = _blocks(self.tree, self.dtype, self.seed)
        policy = torch_ext.load_policy(self.dtype, override_ddp_config=self.settings)
        model: Any = plain
        if not alone and self.strategy == "ddp":
            model = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=self.unused)
            torch_ext.register_comm_hook(model, policy)
        elif not alone:
            if self.strategy == FSDP2 and self.units["made"] and self.dtype != FP16:
                self._shard(plain)
            torch_ext.parallelize(plain, policy, strategy=self.strategy, find_unused_parameters=self.unused)
        return model, plain, torch_ext.AdamW(plain.named_parameters(), policy=policy, **self.options)

    def _shard(self, plain: nn.Module) -> None:
        """Applies fully_shard to some or all blocks."""
        draw = random.Random(self.seed)
        mesh, reshard, precision = None, self.units["reshard"], MixedPrecisionPolicy()
        if reshard == 2 and (self.units["mesh"] or dist.get_world_size() == 2):
            reshard = True  # resharding to 2 ranks is the same where 2 ranks share the shards
        if self.units["mesh"]:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            precision = MixedPrecisionPolicy(reduce_dtype=FP32)  # FSDP2 itself sums over the replicas, in this dtype
        inner = [m for m in plain.modules() if isinstance(m, Block) and m is not plain]
        for block in reversed(inner):
            if not self.units["some"] or draw.random() < 0.5:
                fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
        fully_shard(plain, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)


def _tree(draw: random.Random, depth: int) -> list[Any]:
    """Draws a tree of shapes (`Program.tree`) of this depth."""
    inner = [_tree(draw, depth - 1) for _ in range(draw.randint(1, 3) if depth == 2 else draw.choice([0, 0, 2]))]
    return [[draw.choice(SHAPES) for _ in range(draw.randint(1, 3))], inner if depth else []]


def _blocks(tree: list[Any], dtype: torch.dtype, seed: int) -> Block:
    """Builds the tree's blocks; the weights are drawn from `seed`."""
    return Block(tree[0], [_blocks(one, dtype, 10 * seed + i + 1) for i, one in enumerate(tree[1])], dtype, seed)


BEFORE = ["nothing"] * 4 + ["evaluate", "forward", "stop in forward", "stop in backward", "write", "state", "offload"]
AFTER = ["nothing"] * 4 + ["clip", "clip", "zeros", "model zero_grad"]


def _step(draw: random.Random, strategy: str, unused: bool) -> Step:
    """Draws a step that is legal under the strategy."""
    ways = ["every", "no_sync"]
    if strategy == FSDP2 and not unused:  # FSDP2 fails at a unit that was never used
        ways.append("not yet")
    before = draw.sample(BEFORE, 2)
    return Step(draw.choice([1, 1, 2, 3]), draw.choice(ways), before, draw.sample(AFTER, 2), draw.randrange(1 << 30))


class Loop:
    """Runs a program on one rank; rank None: on the single process that is the reference."""

    def __init__(self, program: Program, world: int, rank: int | None) -> None:
        self.program, self.world, self.rank = program, world, rank
        self.model, self.plain, self.optimizer = program.made(rank is None)

    def run(self) -> list[dict[str, Any]]:
        """Returns the bits of the weights after each step."""
        return [self.step(step) for step in self.program.steps]

    def step(self, step: Step) -> dict[str, Any]:
        for what in step.before:
            getattr(self, what.replace(" ", "_"))(step)
        for i in range(step.micro):
            with self._accumulating(step, i):
                self.model(torch.zeros(()), self.given(step.seed + i)).backward()
        if "clip" in step.after:
            torch_ext.clip_grad_norm_(self.optimizer, 0.5)
        self.optimizer.step()
        if "model zero_grad" in step.after:
            self.model.zero_grad()
        else:  # zeros are gradients, so an unused parameter would be stepped
            self.optimizer.zero_grad(set_to_none="zeros" not in step.after or self.program.unused)
        return self.weights()

    def weights(self) -> dict[str, Any]:
        found = {}
        for name, p in self.plain.named_parameters():
            found[name] = bits([p.full_tensor() if hasattr(p, "full_tensor") else p])
        return found

    def _accumulating(self, step: Step, i: int) -> Any:
        last = i == step.micro - 1
        if self.rank is None or step.how == "every" or self.program.strategy == "ddp" and last:
            return contextlib.nullcontext()
        if step.how == "not yet":
            self.plain.set_requires_gradient_sync(last)
            return contextlib.nullcontext()
        return self.model.sync() if last else self.model.no_sync()

    def given(self, seed: int, stops: str = "") -> dict[str, Any]:
        """Returns what the model is given in one forward. stops: "forward": the last block raises."""
        return self._given(self.program.tree, random.Random(seed), stops)

    def _given(self, tree: list[Any], draw: random.Random, stops: str = "") -> dict[str, Any]:
        """Returns what a block is given. Only the numbers in "grads" differ between ranks.

        "inner": the same for its inner blocks; "again": recompute in backward; "times": calls; "stops": raises."""
        grads = {f"p{i}": self._grad(shape, draw.randrange(1 << 30)) for i, shape in enumerate(tree[0])}
        again, twice, unused = draw.random() < 0.25, draw.random() < 0.1, draw.random() < 0.3
        if self.program.strategy == "ddp" and self.program.unused:
            again = twice = False  # DistributedDataParallel rejects both
        inner = [self._given(one, draw) for one in tree[1]]
        times = 0 if unused and self.program.unused else 2 if twice else 1
        for one in inner[-1:]:
            one["stops"] = stops == "forward"
        return {"grads": grads, "inner": inner, "again": again, "times": times, "stops": False}

    def _grad(self, shape: tuple[int, ...], seed: int) -> Tensor:
        """Returns this rank's gradient; for the reference, the mean over the ranks."""
        each = [
            torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed + rank)).float()
            for rank in range(self.world)
        ]
        grad = torch.stack(each).mean(0) if self.rank is None else each[self.rank]
        return grad.to(self.program.dtype)

    # -- what may happen before a step, by name in BEFORE -----------------------------------------------------------

    def nothing(self, step: Step) -> None:
        pass

    def evaluate(self, step: Step) -> None:
        with torch.no_grad():
            self.model(torch.zeros(()), self.given(step.seed + 7))

    def forward(self, step: Step) -> None:
        """Runs a forward whose graph is dropped without a backward."""
        if self.program.strategy == "ddp" and self.program.unused:
            return  # DistributedDataParallel's next no_sync would fail
        self.model(torch.zeros(()), self.given(step.seed + 8)).detach()

    def stop_in_forward(self, step: Step) -> None:
        if not self.program.tree[1] or self.program.strategy == "ddp":
            return
        with contextlib.suppress(Stop):
            self.model(torch.zeros(()), self.given(step.seed + 9, "forward"))

    def stop_in_backward(self, step: Step) -> None:
        """Raises in backward on every rank before the first gradient; the graph is dropped."""
        if self.program.strategy == "ddp":
            return

        def stop(grad: Tensor) -> None:
            raise Stop

        loss = self.model(torch.zeros(()), self.given(step.seed + 10))
        stopped = loss * 1
        stopped.register_hook(stop)
        with contextlib.suppress(Stop):
            stopped.backward()

    def write(self, step: Step) -> None:
        """Scales one weight in place."""
        for_shards = self.rank is not None and self.program.strategy == FSDP2
        if for_shards:  # so that the modules have the shards
            torch_ext.sync_parameters(self.plain)
        params = list(self.plain.parameters())
        with torch.no_grad():
            params[step.seed % len(params)].mul_(1.25)
        if for_shards:
            torch_ext.sync_parameters(self.plain)

    def state(self, step: Step) -> None:
        self.optimizer.state_dict()
        self.model.state_dict()

    def offload(self, step: Step) -> None:
        if self.program.strategy != "ddp" and self.rank is not None:
            torch_ext.offload(self.plain, self.optimizer)
            torch_ext.onload(self.plain, self.optimizer)


def on_ranks(rank: int, world: int, strategy: str, seeds: list[int]) -> list[Any]:
    """Runs each program; returns a message for each one whose weights differ from the single process's at a step."""
    torch.set_num_threads(1)
    found = []
    for seed in seeds:
        program = Program.of(seed, world, strategy)
        expected = Loop(program, world, None).run()
        try:
            ours = Loop(program, world, rank).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {program}") from error
        for at, (a, b) in enumerate(zip(expected, ours, strict=True)):
            differing = [name for name in a if a[name] != b[name]]
            if differing:
                found.append(f"seed {seed}, rank {rank}, step {at}: {differing} of {program}")
                break
        dist.barrier()
    return found
