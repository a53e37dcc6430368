"""What lies in gradients after any sequence of backwards, in plain torch, bit for bit (statements E3 to E6)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dtypes:
    param: torch.dtype
    main: torch.dtype
    wire: torch.dtype


class GradOracle:
    """One model on all ranks."""

    def __init__(self, strategy: str, dtypes: Dtypes, size: int, scale: float, trained: Sequence[bool]) -> None:
        """scale: of sums. trained: whether each parameter is."""
        self.strategy, self.dtypes, self.size, self.scale, self.trained = strategy, dtypes, size, scale, trained
        n = len(trained)
        self.kept: list[torch.Tensor | None] = [None] * n
        """What reductions left, the same on all ranks: in fp32, rounded to main_grads_dtype."""
        self.local: list[list[torch.Tensor | None]] = [[None] * n for _ in range(size)]
        """By rank: what has not been reduced yet."""
        self.zeroed = [False] * n
        """Parameters whose gradient is zeros, or is not there: zero_grad(set_to_none=False) leaves both legal."""

    @property
    def sharded(self) -> bool:
        """Whether every backward reduces."""
        return self.strategy in ("optim_grads", "optim_grads_params")

    def _main(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtypes.main).float()

    def backward(self, grads: Sequence[Sequence[torch.Tensor | None]], sync: bool) -> None:
        """grads: by rank, of each parameter; None: not reached there."""
        for rank, of_rank in enumerate(grads):
            for i, grad in enumerate(of_rank):
                if grad is not None and self.trained[i]:
                    self.add(rank, i, grad)
        if sync or self.sharded:
            for i in range(len(self.trained)):
                self._reduce(i)

    def add(self, rank: int, i: int, grad: torch.Tensor) -> None:
        before, wide = self.local[rank][i], self._main(grad.float())
        self.local[rank][i] = wide if before is None else self._main(before + wide)

    def assign(self, i: int, values: Sequence[torch.Tensor]) -> None:
        """`.grad` of a parameter becomes each rank's own value."""
        self.drop([i])
        for rank, value in enumerate(values):
            self.add(rank, i, value)

    def _reduce(self, i: int) -> None:
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
        for i in range(len(self.trained)) if which is None else which:
            there = self.kept[i] is not None or any(of_rank[i] is not None for of_rank in self.local)
            self.zeroed[i] = to_zeros and (there or self.zeroed[i])
            self.kept[i] = None
            for of_rank in self.local:
                of_rank[i] = None

    def differs(self, found: Sequence[torch.Tensor]) -> str:
        """found: of each trained parameter, whole; -1 in all elements where there is none. "" where all are right."""
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
