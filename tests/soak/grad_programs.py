"""Random training programs on 1 to 3 ranks: micro-batches, writes to `.grad`, unused, frozen and thawed parameters,
exceptions, activation checkpoints. Gradients must be plain torch's, bit for bit, after every reduction."""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from soak.counted_model import UserError
from soak.grad_oracle import Dtypes, GradOracle
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ext

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
BLOCKS: list[list[tuple[int, ...]]] = [[(5, 3), (130,)], [(40, 7)], [(257,), (2, 2, 3)], [(64, 3)]]
SHAPES = [shape for block in BLOCKS for shape in block]
_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [
    Dtypes(_FP32, _FP32, _FP32),
    Dtypes(_FP32, _FP32, _BF16),
    Dtypes(_BF16, _BF16, _BF16),
    Dtypes(_BF16, _FP32, _BF16),
    Dtypes(_BF16, _FP32, _FP32),
    Dtypes(_FP16, _FP32, _FP32),
]


@dataclass(frozen=True)
class Case:
    """What one program trains; drawn from its number."""

    number: int
    strategy: str
    size: int
    dtypes: Dtypes
    integers: bool
    """Gradients are small integers, whose sums are exact: then earlier reductions may be added in any order."""
    unused: bool
    """find_unused_parameters of `parallelize`."""
    bucket_size: int
    recompute: str
    """Activation checkpoints: "", "reentrant" or "saved"."""

    @classmethod
    def of(cls, number: int, size: int | None = None) -> "Case":
        draw = random.Random(f"program {number}")
        return cls(
            number,
            draw.choice(STRATEGIES),
            draw.choice([1, 2, 2, 3]) if size is None else size,
            draw.choice(DTYPES),
            draw.random() < 0.5,
            draw.random() < 0.6,
            draw.choice([1, 300, 40_000_000]),
            draw.choice(["", "", "reentrant", "saved"]),
        )


class Block(nn.Module):
    """Adds terms whose gradients are exactly `grads`; None leaves a parameter out. raises: in backward."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype)))
        self.raises = False

    def forward(self, x: torch.Tensor, *grads: torch.Tensor | None) -> torch.Tensor:
        pairs = zip(self.parameters(), grads, strict=True)
        terms = [(p * g).sum().float() for p, g in pairs if g is not None]
        out = torch.stack([x, *terms]).sum()
        if self.raises and out.requires_grad:
            out.register_hook(_raise)
        return out


def _raise(_: torch.Tensor) -> None:
    raise UserError("of the user")


class Model(nn.Module):
    """One Block for each entry of BLOCKS, each recomputed in backward as `case.recompute` says."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shapes, case.dtypes.param) for shapes in BLOCKS)
        self.recompute = case.recompute

    def forward(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """grads: what the gradients must become; None: the parameter is not used."""
        x, at = torch.zeros((), requires_grad=True), 0
        for block, shapes in zip(self.blocks, BLOCKS, strict=True):
            mine = grads[at : at + len(shapes)]
            at += len(shapes)
            if self.recompute:
                x = checkpoint(block, x, *mine, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x, *mine)
        return x


class Program:
    """One case on one rank. Model and oracle do each operation. All ranks draw the same operations."""

    def __init__(self, case: Case, rank: int, group: Any) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.draw = random.Random(f"operations {case.number}")
        self.model = Model(case)
        self.log: list[str] = []
        self._parallelize()

    def _parallelize(self) -> None:
        """Makes the model parallel, with some parameters frozen.

        None is frozen in fp16 under FSDP2: FSDP2 decides only once in which dtype a unit is reduced. For a unit that is
        all frozen at that time it takes the parameters' dtype, and fp16's gradients would be rejected after thawing.
        """
        case, dtypes = self.case, self.case.dtypes
        all_of_them = dtypes.param == _FP16 and case.strategy == "optim_grads_params"
        self.trained = [all_of_them or self.draw.random() < 0.8 for _ in SHAPES]
        self.trained[self.draw.randrange(len(SHAPES))] = True
        for p, trained in zip(self.model.parameters(), self.trained, strict=True):
            p.requires_grad_(trained)
        names = {_FP32: "fp32", _BF16: "bf16", _FP16: "fp16"}
        policy = torch_ext.load_policy(
            self.model,
            override_optimizer_config={
                "main_grads_dtype": names[dtypes.main],
                "use_precision_aware_optimizer": True,
            },
            override_ddp_config={"grad_comm_dtype": names[dtypes.wire], "bucket_size": case.bucket_size},
        )
        factor = 1.0 if case.integers else None
        torch_ext.parallelize(
            self.model,
            policy,
            strategy=case.strategy,
            process_group=self.group,
            find_unused_parameters=case.unused,
            gradient_divide_factor=factor,
        )
        self.policy = policy
        self.optimizer = torch_ext.AdamW(self.model.parameters(), lr=0.1, policy=policy)
        self.oracle = GradOracle(case.strategy, dtypes, case.size, factor or 1.0 / case.size, self.trained)
        self.log.append(f"parallelize {[int(t) for t in self.trained]}")

    def run(self, operations: int) -> str:
        """Does `operations` operations. Returns what is wrong, and after which operations; "" if nothing is."""
        for _ in range(operations):
            weights = [10, 4, 3, 2, 2, 1]
            chosen: Callable[[], None] = self.draw.choices(
                [self._cycle, self._drop, self._grads, self._exception, self._autograd, self._parallelize], weights
            )[0]
            try:
                chosen()
            except Exception as error:
                raise AssertionError(f"{error} in {'; '.join(self.log)}") from error
            if wrong := self._check():
                return f"{wrong} after {'; '.join(self.log)}"
        return ""

    # -- operations

    def _values(self, i: int, rank: int, draw: random.Random) -> torch.Tensor:
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30) + 7 * rank)
        if self.case.integers:
            found = torch.randint(-4, 5, SHAPES[i], generator=generator).float()
        else:
            found = torch.randn(SHAPES[i], generator=generator)
        return found.to(self.case.dtypes.param)

    def _given(self, everything: bool = False) -> list[list[torch.Tensor | None]]:
        """Returns the gradients of a backward, by rank. On every rank they reach at least one trained parameter;
        everything: all of them."""
        draw = random.Random(self.draw.random())
        found = []
        for rank in range(self.case.size):
            reached = [everything or not self.case.unused or draw.random() < 0.7 for _ in SHAPES]
            reached[draw.choice([i for i, trained in enumerate(self.trained) if trained])] = True
            found.append([self._values(i, rank, draw) if there else None for i, there in enumerate(reached)])
        return found

    def _backward(self, sync: bool) -> None:
        given = self._given()
        unused = [[i for i, g in enumerate(of_rank) if g is None] for of_rank in given]
        self.log.append(f"backward{'' if sync else ' in no_sync'}, unused {unused}")
        model: Any = self.model
        with contextlib.nullcontext() if sync else model.no_sync():
            model(given[self.rank]).backward()
        self.oracle.backward(given, sync)

    def _cycle(self) -> None:
        if not self.case.integers and self.case.strategy == "no_shard":
            self._drop()  # it is not promised in which order an earlier mean is added
        for _ in range(self.draw.randrange(3)):
            self._backward(sync=False)
        self._backward(sync=True)

    def _drop(self) -> None:
        how = self.draw.choice(["model", "optimizer", "model to zeros", "optimizer to zeros"])
        self.log.append(f"{how}.zero_grad")
        who: Any = self.model if how.startswith("model") else self.optimizer
        who.zero_grad(set_to_none=not how.endswith("zeros"))
        self.oracle.drop(to_zeros=how.endswith("zeros"))

    def _grads(self) -> None:
        """Drops or replaces `.grad` of a parameter, under the strategies whose `.grad` belongs to the user."""
        if self.case.strategy not in ("no_shard", "optim"):
            return
        i = self.draw.choice([i for i, trained in enumerate(self.trained) if trained])
        param = list(self.model.parameters())[i]
        if self.case.unused and self.draw.random() < 0.5:
            self.log.append(f"grad {i} = None")
            param.grad = None
            self.oracle.drop([i])
        elif self.case.integers and self.case.dtypes.main == self.case.dtypes.param:
            self.log.append(f"grad {i} = another")
            draw = random.Random(self.draw.random())
            values = [self._values(i, rank, draw) for rank in range(self.case.size)]
            param.grad = values[self.rank].clone()
            self.oracle.assign(i, values)
        self._cycle()

    def _exception(self) -> None:
        """Raises in a backward on all ranks, at the same place, so that all have sent the same buckets. They drop the
        gradients and go on."""
        given = self._given(everything=True)
        block: Any = self.draw.choice(list(self.model.blocks))
        self.log.append("backward that raises")
        block.raises = True
        with contextlib.suppress(UserError):
            self.model(given[self.rank]).backward()
            self.log.append("(it did not)")
        block.raises = False
        self._drop()
        self.oracle.zeroed = [trained for trained in self.trained] if self.log[-1].endswith("zeros.zero_grad") else []
        self.oracle.zeroed = self.oracle.zeroed or [False] * len(SHAPES)

    def _autograd(self) -> None:
        """Calls torch.autograd.grad, which must not touch the model's gradients."""
        if self.case.strategy == "optim_grads_params" or self.case.recompute == "reentrant":
            return
        self.log.append("torch.autograd.grad")
        given = self._given()[self.rank]
        params = [p for p, g in zip(self.model.parameters(), given, strict=True) if g is not None and p.requires_grad]
        grads = torch.autograd.grad(self.model(given), params)
        wanted = [g for g, t in zip(given, self.trained, strict=True) if g is not None and t]
        assert all(torch.equal(g.to(w.dtype), w) for g, w in zip(grads, wanted, strict=True)), "torch.autograd.grad"

    # -- the check

    def _check(self) -> str:
        if any(value is not None for of_rank in self.oracle.local for value in of_rank):
            return ""  # gradients are still being accumulated
        return self.oracle.differs(self._read())

    def _read(self) -> list[torch.Tensor]:
        """Returns the whole gradients of the trained parameters, as an optimizer reads them in a step with lr=0.

        With betas of 0 exp_avg becomes the gradient; it stays -1 where there is none."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        moments = {"main_params_dtype": None, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
        config: Any = {**moments, "use_precision_aware_optimizer": True}
        policy = torch_ext.load_policy(self.case.dtypes.param, override_optimizer_config=config)
        reader = torch_ext.AdamW(params, lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, policy=policy)
        reader.state_dict()
        for state in reader.state.values():
            state["exp_avg"].fill_(-1.0)
        reader.step()
        whole = reader.consolidate_state_dict(to=None)
        assert whole is not None
        entries = whole["state"]
        return [entries[i]["exp_avg"] for i in range(len(params))]


def run(rank: int, size: int, group: Any, _line: Any, case: Case) -> str:
    """Runs the case on this rank. Returns what is wrong; "" if nothing is."""
    return Program(case, rank, group).run(12)
