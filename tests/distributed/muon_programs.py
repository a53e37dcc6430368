"""Random models and settings for Muon, trained with gradients that are the same on every rank.

So the bits must be those of one process, whatever the strategy."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gradients import BF16, FP32, Given, bits

import torch_ext
from torch_ext.optim.muon import newton_schulz

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Program(NamedTuple):
    """A random model, its policy and options of Muon."""

    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    config: dict[str, Any]  # of the policy's override_ddp_config
    options: dict[str, Any]  # of the optimizer
    max_norm: float | None  # clips to this norm; None: no clipping
    seed: int
    threads: int = 1  # with two, bf16 matrices are multiplied concurrently

    @classmethod
    def of(cls, seed: int) -> "Program":
        """Draws the program that belongs to the seed."""
        r = random.Random(seed)
        shapes: list[tuple[int, ...]] = [(r.randint(1, 40), r.randint(1, 40)) for _ in range(r.randint(1, 4))]
        shapes += r.sample([(3, 8, 12), (6, 4, 3, 3), (7,), (130,), (1, 5), (24, 10)], 3)
        r.shuffle(shapes)
        if seed % 4 == 3:
            shapes.append((655, 641))  # large enough that symmetric products are computed in panels
        dtype = r.choice([FP32, BF16, BF16])
        options: dict[str, Any] = {
            "lr": 0.05,
            "states": r.choice([None, "bf16", "bf16_remainder", "8bit"]) if dtype is BF16 else None,
            "ns": r.choice(["standard", "gram", "auto"]),
            "ns_dtype": r.choice([FP32, FP32, BF16]),
            "momentum": r.choice([0.8, 0.95]),
            "nesterov": r.random() < 0.7,
            "adjust_lr_fn": r.choice([None, "match_rms_adamw"]),
        }
        if (655, 641) in shapes:
            options["ns_steps"] = 2  # bf16 products are slow on a processor without them
        if seed % 2:
            options |= {"ema_decay": 0.9, "ema_dtype": random.Random(seed).choice([BF16, "24bit", FP32])}
        if (24, 10) in shapes:
            options["split"] = {f"p{shapes.index((24, 10))}": r.choice([2, (5, 19)])}
        config = {"bucket_size": r.choice([300, 2000, 10**6])}
        if r.random() < 0.3:
            config["grad_comm_dtype"] = FP32
        return cls(shapes, dtype, config, options, r.choice([None, 0.5]), seed, r.choice([1, 2]))

    def fits(self, strategy: str) -> bool:
        """Whether the strategy promises the same bits. FSDP2 does not in 8 bits: it cuts inside blocks of one scale."""
        return strategy != "optim_grads_params" or self.options["states"] != "8bit"

    def made(self, strategy: str | None) -> tuple[Any, torch_ext.Muon]:
        """Returns the model and its Muon. strategy: None: one process, without parallelism."""
        model: Any = Given(self.shapes, self.dtype)
        weights = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=weights))
        policy = torch_ext.load_policy(model, override_ddp_config=self.config)
        if strategy is not None:
            torch_ext.parallelize(model, policy, strategy=strategy)
        return model, torch_ext.Muon(model.named_parameters(), policy=policy, **self.options)

    def trained(self, model: Any, optimizer: torch_ext.Muon, steps: range) -> dict[str, Any]:
        """Takes these steps and returns `everything`."""
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * self.seed + step)
            # bf16 values: the mean over any number of ranks has the same bits.
            gradients = [torch.randn(shape, generator=generator).bfloat16().to(self.dtype) for shape in self.shapes]
            model(gradients).backward()
            if self.max_norm is not None:
                torch_ext.clip_grad_norm_(optimizer, self.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)


@contextlib.contextmanager
def before_products(look: Callable[[newton_schulz.Task], None]) -> Iterator[None]:
    """Within the context, calls `look` with every matrix before its products are computed; its errors propagate."""
    theirs = newton_schulz.orthogonalise

    def orthogonalise(tasks: Any, workspaces: Any) -> Any:
        for task in tasks:
            look(task)
        return theirs(tasks, workspaces)

    newton_schulz.orthogonalise = orthogonalise
    try:
        yield
    finally:
        newton_schulz.orthogonalise = theirs


@contextlib.contextmanager
def counted() -> Iterator[list[float]]:
    """Yields a list of the numbers of operations, one for each matrix whose products are computed in the context."""
    made: list[float] = []

    def count(task: newton_schulz.Task) -> None:
        rows, columns = task.x.shape
        made.append(newton_schulz.operations(rows, columns, task.iteration.steps, task.iteration.kind, task.x.dtype))

    with before_products(count):
        yield made


def everything(model: Any, optimizer: torch_ext.Muon) -> dict[str, Any]:
    """Returns the bits of weights and logical states, on every rank. Collective."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        found[f"{name}: weight"] = bits([whole])
    consolidated = optimizer.consolidate_state_dict(to=None)
    assert consolidated is not None
    optimizer.state_dict()  # takes the consolidated state, which state_dict() returns once; that is tested elsewhere
    for index, entry in consolidated["state"].items():
        found |= {f"p{index}: {key}": bits([value.clone()]) for key, value in entry.items()}
    return found
