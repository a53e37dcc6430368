"""A small model as Megatron-LM would cut it: linears over a tensor-parallel group, experts over an expert-parallel one.

Parameters carry Megatron-LM's attributes: tensor_model_parallel and partition_dim (whether and along which dimension
the parameter is cut), allreduce=False (an expert's), sequence_parallel (its gradient is a sum over the tokens of one
tensor-parallel rank only). Without groups it is the whole model on one process. A weight's values depend on its name
only, cut or not.
"""

import math
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS = 16, 24, 2


class Groups(NamedTuple):
    """This rank's groups. tp: cuts linears; dp: has copies of a part; ep: spreads experts; expert_dp: their copies."""

    tp: Any = None
    dp: Any = None
    ep: Any = None
    expert_dp: Any = None


def two_by_two() -> Groups:
    """Returns groups of four ranks. tp: {0, 1}, {2, 3}; dp and ep: {0, 2}, {1, 3}. So an expert has no copy."""
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    ep = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return Groups(tp, dp, ep, [dist.new_group([r]) for r in range(4)][rank])


def size_of(group: Any) -> int:
    """Returns the group's size; None counts as a group of one rank."""
    return 1 if group is None else group.size()


def rank_in(group: Any) -> int:
    """Returns this rank's number in the group."""
    return 0 if group is None else group.rank()


def _own(x: Tensor, group: Any) -> Tensor:
    """Returns this rank's part of the tokens."""
    return x.chunk(size_of(group))[rank_in(group)].contiguous()


def _sum(x: Tensor, group: Any) -> Tensor:
    """Returns the all-reduced sum; `x` stays as it is."""
    x = x.clone()
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def _gathered(x: Tensor, group: Any) -> Tensor:
    """Returns the tokens of all ranks of the group, in the order of the ranks."""
    whole = x.new_zeros(size_of(group), *x.shape)
    whole[rank_in(group)] = x
    return _sum(whole, group).flatten(0, 1)


# How tokens [n, WIDTH] travel over a group: (what forward does, what backward does with the gradient).
WAYS: dict[str, Any] = {
    "copy": (lambda x, group: x.clone(), _sum),
    "sum": (_sum, lambda x, group: x.clone()),
    "cut": (_own, _gathered),
    "gather": (_gathered, _own),
    "gather from all": (_gathered, lambda x, group: _own(_sum(x, group), group)),
    "sum and cut": (lambda x, group: _own(_sum(x, group), group), _gathered),
}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str, group: Any) -> Tensor:  # type: ignore[override]
        ctx.way, ctx.group = way, group
        return WAYS[way][0](x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return WAYS[ctx.way][1](grad.contiguous(), ctx.group), None, None


def exchange(x: Tensor, way: str, group: Any) -> Tensor:
    """Applies one of WAYS, with its backward, to tokens."""
    return _Exchange.apply(x, way, group)  # type: ignore[no-untyped-call]


class Cut(nn.Module):
    """A linear whose weight is cut along `dim` over the group; dim None: every rank has a copy."""

    def __init__(self, name: str, fan_in: int, fan_out: int, dim: int | None, group: Any, expert: bool = False) -> None:
        super().__init__()
        self.dim, self.group = dim, group
        seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = torch.randn(fan_out, fan_in, generator=seeded) / math.sqrt(fan_in)
        self.weight = self._part(weight, dim, expert)
        self.bias = None if expert else self._part(torch.linspace(-0.1, 0.1, fan_out), 0 if dim == 0 else None, expert)

    def _part(self, whole: Tensor, dim: int | None, expert: bool) -> nn.Parameter:
        """Returns this rank's part as a parameter with Megatron-LM's attributes."""
        part = whole if dim is None else whole.chunk(size_of(self.group), dim)[rank_in(self.group)]
        param: Any = nn.Parameter(part.clone())
        param.tensor_model_parallel, param.allreduce = dim is not None, not expert
        if dim is not None:
            param.partition_dim = dim
        return param

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 0:
            x = exchange(x, "copy", self.group)
        y = x @ self.weight.T
        if self.dim == 1:
            y = exchange(y, "sum", self.group)
        return y if self.bias is None else y + self.bias


class Feedforward(nn.Module):
    """Megatron-LM's MLP: `up` is cut by output features, `down` by input features."""

    def __init__(self, name: str, tp: Any, expert: bool = False) -> None:
        super().__init__()
        self.up = Cut(f"{name}.up", WIDTH, HIDDEN, 0, tp, expert)
        self.down = Cut(f"{name}.down", HIDDEN, WIDTH, 1, tp, expert)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Sends each token to one expert. A rank gets the tokens of all ep ranks and computes its experts' part."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.ep, each = groups.ep, EXPERTS // size_of(groups.ep)
        self.first = rank_in(groups.ep) * each
        self.router = Cut("router", WIDTH, EXPERTS, None, groups.tp)
        self.experts = nn.ModuleList(Feedforward(f"expert{self.first + i}", groups.tp, True) for i in range(each))

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        everybody = exchange(x, "gather from all", self.ep)
        numbers = _gathered(chosen[:, None].float(), self.ep)
        parts = [e(everybody * (numbers == self.first + i)) for i, e in enumerate(self.experts)]
        return gate[:, None] * exchange(torch.stack(parts).sum(0), "sum and cut", self.ep)


class Model(nn.Module):
    """Maps tokens [n, WIDTH] to [n]. n must be even: the second norm sees only this tp rank's half of the tokens."""

    def __init__(self, groups: Groups = Groups()) -> None:  # noqa: B008 (immutable)
        super().__init__()
        self.tp = groups.tp
        self.embed = Cut("embed", WIDTH, WIDTH, None, groups.tp)
        self.norm, self.dense = nn.LayerNorm(WIDTH), Feedforward("dense", groups.tp)
        self.tokens_norm, self.moe = nn.LayerNorm(WIDTH), Experts(groups)
        self.head = Cut("head", WIDTH, 1, None, groups.tp)
        for p in self.tokens_norm.parameters():
            p.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.dense(self.norm(x))
        own = self.tokens_norm(exchange(x, "cut", self.tp))
        x = x + self.moe(exchange(own, "gather", self.tp))
        return self.head(x)[:, 0]
