"""The gradients that any sequence of backwards must leave, in plain torch, bit for bit (statements E3 to E6)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of parameters, main gradients and wire."""

    param: torch.dtype
    main: torch.dtype
    wire: torch.dtype


class GradOracle:
    """The gradients of one model on all ranks: what was reduced, and what each rank has accumulated since."""

    def __init__(self, strategy: str, dtypes: Dtypes, size: int, scale: float, trained: Sequence[bool]) -> None:
        """scale: of the reduced sums. trained: for each parameter, whether it is."""
        self.strategy, self.dtypes, self.size, self.scale, self.trained = strategy, dtypes, size, scale, trained
        n = len(trained)
        self.kept: list[torch.Tensor | None] = [None] * n
        """The reduced gradients, the same on all ranks: fp32 tensors, rounded to main_grads_dtype."""
        self.local: list[list[torch.Tensor | None]] = [[None] * n for _ in range(size)]
        """By rank: what the rank has accumulated and not reduced yet."""
        self.zeroed = [False] * n
        """Whether a parameter's gradient may be zeros or missing: zero_grad(set_to_none=False) allows both."""

    @property
    def sharded(self) -> bool:
        """Whether every backward reduces."""
        return self.strategy in ("optim_grads", "optim_grads_params")

    def _main(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtypes.main).float()

    def backward(self, grads: Sequence[Sequence[torch.Tensor | None]], sync: bool) -> None:
        """Does what a backward does. grads: by rank, one for each parameter; None: not reached on this rank."""
        for rank, of_rank in enumerate(grads):
            for i, grad in enumerate(of_rank):
                if grad is not None and self.trained[i]:
                    self.add(rank, i, grad)
        if sync or self.sharded:
            for i in range(len(self.trained)):
                self._reduce(i)

    def add(self, rank: int, i: int, grad: torch.Tensor) -> None:
        """Accumulates a gradient on one rank, in main_grads_dtype."""
        before, wide = self.local[rank][i], self._main(grad.float())
        self.local[rank][i] = wide if before is None else self._main(before + wide)

    def assign(self, i: int, values: Sequence[torch.Tensor]) -> None:
        """Sets `.grad` of a parameter to a value on each rank."""
        self.drop([i])
        for rank, value in enumerate(values):
            self.add(rank, i, value)

    def _reduce(self, i: int) -> None:
        """Sums the ranks' gradients in fp32, in their order, from what the wire's dtype leaves of them."""
        if all(of_rank[i] is None for of_rank in self.local):
            return
        total = torch.zeros(())
        for rank, of_rank in enumerate(self.local):
            value = of_rank[i]
            sent = torch.zeros(()) if value is None else value.to(self.dtypes.wire).float()
            total = sent if rank == 0 else total + sent
            of_rank[i] = None
        total = total * torch.tensor(self.scale, dtype=torch.float32)
        if self.strategy == "no_shard":
            total = total.to(self.dtypes.wire).float()
        kept = self.kept[i]
        self.kept[i] = self._main(total if kept is None or self.zeroed[i] else kept + total)
        self.zeroed[i] = False

    def drop(self, which: Sequence[int] | None = None, to_zeros: bool = False) -> None:
        """Does what zero_grad does to the parameters at `which`, or to all."""
        for i in range(len(self.trained)) if which is None else which:
            there = self.kept[i] is not None or any(of_rank[i] is not None for of_rank in self.local)
            self.zeroed[i] = to_zeros and (there or self.zeroed[i])
            self.kept[i] = None
            for of_rank in self.local:
                of_rank[i] = None

    def differs(self, found: Sequence[torch.Tensor]) -> str:
        """Returns how the found gradients are wrong, "" if they are right.

        found: whole gradients of the trained parameters; -1 in all elements where there is none."""
        positions = [i for i, there in enumerate(self.trained) if there]
        for i, grad in zip(positions, found, strict=True):
            wanted, none = self.kept[i], bool((grad == -1).all())
            if self.zeroed[i] and (none or not grad.any()):
                continue
            if wanted is None:
                if not none:
                    return f"parameter {i} has a gradient, {grad.flatten()[:3].tolist()}, and should have none"
            elif none or not torch.equal(grad.view(torch.int32), wanted.expand_as(grad).contiguous().view(torch.int32)):
                at = int((grad != wanted).flatten().nonzero()[:1].sum())
                here, there = grad.flatten()[at].item(), wanted.expand_as(grad).flatten()[at].item()
                return f"parameter {i} has {here!r} at {at}, and should have {there!r}"
        return ""
