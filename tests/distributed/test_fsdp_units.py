"""Which modules become FSDP2's units if the user leaves the choice to parallelize."""

from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP16, FP32, policy
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import torch_ext
from torch_ext.parallel.fsdp import fsdp_units


def _linear(numel: int, dtype: torch.dtype = FP32) -> nn.Module:
    return nn.Linear(numel, 1, bias=False, dtype=dtype)


class Net(nn.Module):
    """A module with named children."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Gated(nn.Module):
    """A module with a parameter of its own and a child."""

    def __init__(self, own: torch.dtype, inner: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1, dtype=own))
        self.inner = _linear(8, inner)


def _tied() -> Net:
    """Returns blocks of which one shares a weight with the head."""
    blocks = [nn.Sequential(_linear(4), _linear(4)) for _ in range(3)]
    head: Any = _linear(4)
    head.weight = blocks[1][0].weight
    return Net(layers=nn.ModuleList(blocks), head=head)


def _shared(head: bool) -> Net:
    """Returns blocks with a module that two blocks share, or that a block shares with the model."""
    one = _linear(4)
    blocks = [Net(own=_linear(4), shared=one), Net(own=_linear(4)), Net(own=_linear(4))]
    if head:
        return Net(layers=nn.ModuleList(blocks), head=one)
    blocks[1].shared = one
    return Net(layers=nn.ModuleList(blocks), head=_linear(4))


def _twice_in_a_block() -> Net:
    block = Net(own=_linear(4))
    block.again = block.own
    return Net(layers=nn.ModuleList([block, _linear(4)]))


def _norm_twice() -> Net:
    norm = _linear(2)
    return Net(a=Net(mlp=_linear(8, BF16), norm=norm), b=Net(mlp=_linear(8, BF16), norm=norm))


def _block_twice() -> Net:
    block = _linear(4)
    return Net(layers=nn.ModuleList([block, _linear(4), block]))


def _frozen() -> Net:
    net = Net(layers=nn.ModuleList([_linear(4), _linear(4, BF16)]))
    net.layers[1].requires_grad_(False)  # type: ignore[index, union-attr]
    return net


@pytest.mark.parametrize(
    ("model", "bucket_size", "expected"),
    [
        pytest.param(
            Net(layers=nn.ModuleList(_linear(4) for _ in range(3))),
            1,
            [("layers.0",), ("layers.1",), ("layers.2",), ("",)],
            id="each block",
        ),
        pytest.param(
            Net(layers=nn.ModuleList(_linear(4) for _ in range(5))),
            8,
            [("layers.0", "layers.1"), ("layers.2", "layers.3", "layers.4"), ("",)],
            id="small ones share, the rest joins the last",
        ),
        pytest.param(
            Net(layers=nn.ModuleList([_linear(9), _linear(4), _linear(4), _linear(9)])),
            8,
            [("layers.0",), ("layers.1", "layers.2"), ("layers.3",), ("",)],
            id="a large one stays alone",
        ),
        pytest.param(
            Net(layers=nn.ModuleList(_linear(4) for _ in range(3))),
            None,
            [("layers.0", "layers.1", "layers.2"), ("",)],
            id="a small model",
        ),
        pytest.param(
            Net(layers=nn.ModuleList(nn.Linear(1024, 1024, device="meta") for _ in range(3))),
            None,
            [("layers.0",), ("layers.1",), ("layers.2",), ("",)],
            id="blocks of a million",
        ),
        pytest.param(
            nn.Sequential(
                _linear(4), nn.ReLU(), nn.ModuleList([_linear(4), _linear(4)]), nn.ModuleDict({"a": _linear(4)})
            ),
            1,
            [("2.0",), ("2.1",), ("3.a",), ("0",), ("",)],
            id="containers that cannot run are not units",
        ),
        pytest.param(Net(a=Net(b=nn.Sequential(_linear(4))), c=_linear(4)), 1, [("a.b.0",), ("",)], id="nested"),
        pytest.param(_linear(4), 1, [("",)], id="no container"),
        pytest.param(_tied(), 1, [("layers.0",), ("layers.2",), ("",)], id="tied weights belong to the root"),
        pytest.param(_shared(head=False), 1, [("layers.2",), ("",)], id="modules of two blocks belong to the root"),
        pytest.param(_shared(head=True), 1, [("layers.1",), ("layers.2",), ("",)], id="as do those of block and root"),
        pytest.param(_twice_in_a_block(), 1, [("layers.0",), ("layers.1",), ("",)], id="a module twice in a block"),
        pytest.param(_norm_twice(), 1, [("a.norm",), ("",)], id="a module of another dtype twice"),
        pytest.param(
            Net(layers=nn.ModuleList([_norm_twice()])),
            1,
            [("layers.0.a.norm",), ("layers.0",), ("",)],
            id="so in a block",
        ),
        pytest.param(_block_twice(), 1, [("layers.0",), ("layers.1",), ("",)], id="a block that runs twice"),
        pytest.param(
            Net(layers=nn.ModuleList(Net(norm=_linear(2), mlp=_linear(8, BF16)) for _ in range(2)), norm=_linear(2)),
            1,
            [("layers.0.norm",), ("layers.0",), ("layers.1.norm",), ("layers.1",), ("",)],
            id="other dtypes",
        ),
        pytest.param(
            Net(layers=nn.ModuleList(Net(norm=_linear(2), mlp=_linear(8, BF16)) for _ in range(2))),
            20,
            [("layers.0.norm", "layers.1.norm"), ("layers.0", "layers.1"), ("",)],
            id="other dtypes of blocks that share",
        ),
        pytest.param(
            Net(layers=nn.ModuleList([Gated(FP32, BF16)])),
            1,
            [("layers.0.inner",), ("layers.0",), ("",)],
            id="a module's own parameters decide",
        ),
        pytest.param(
            Net(
                top=_linear(2, FP16),
                a=nn.ModuleList([Net(x=_linear(4), y=Net(z=_linear(2, BF16)))]),
                b=_linear(9, BF16),
            ),
            1,
            [("a.0.y",), ("a.0",), ("top",), ("",)],
            id="three dtypes",
        ),
        pytest.param(_frozen(), 1, [("layers.0",), ("layers.1",), ("",)], id="frozen parameters of another dtype"),
    ],
)
def test_units(model: nn.Module, bucket_size: int | None, expected: list[tuple[str, ...]]) -> None:
    names = {module: name for name, module in model.named_modules()}
    units = fsdp_units.units_of(model, bucket_size)
    assert [tuple(names[module] for module in unit.modules) for unit in units] == expected


def test_a_module_with_several_dtypes_is_refused() -> None:
    mixed = nn.Linear(4, 4)
    mixed.bias = nn.Parameter(torch.zeros(4, dtype=BF16))
    with pytest.raises(ValueError, match="Linear has trainable parameters in torch.bfloat16 and torch.float32"):
        fsdp_units.units_of(Net(layers=nn.ModuleList([mixed])), 1)


class Normed(nn.Module):
    """An fp32 norm in a bf16 block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, dtype=BF16), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).float()).to(BF16)  # type: ignore[no-any-return]


def _rows(rank: int, world: int) -> dict[str, torch.dtype]:
    """Returns the dtype of each gradient after a backward."""
    model = nn.Sequential(Normed(), Normed())
    torch_ext.parallelize(model, policy(BF16, bucket_size=1), strategy="optim_grads_params")
    model(torch.eye(4, dtype=BF16)).float().square().sum().backward()
    return {name: param.grad.dtype for name, param in model.named_parameters() if param.grad is not None}


def test_units_of_another_dtype_have_the_row_of_their_own() -> None:
    for answer in ranks.run(2, _rows):
        assert len(answer) == 8
        assert all(dtype == (FP32 if "norm" in name else BF16) for name, dtype in answer.items())


def _sharded(rank: int, world: int) -> list[str]:
    """Returns the names of the modules that parallelize has made units."""
    model = Net(layers=nn.ModuleList(_linear(4) for _ in range(5)), head=_linear(4))
    torch_ext.parallelize(model, policy(bucket_size=8), strategy="optim_grads_params")
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_parallelize_makes_these_units() -> None:
    assert ranks.run(2, _sharded) == [["", *(f"layers.{i}" for i in range(5))]] * 2


def _reduced(rank: int, world: int) -> list[Any]:
    """Returns the (param_dtype, reduce_dtype) that parallelize passes to fully_shard, for several dtypes."""
    given: list[Any] = []
    fully_shard = fsdp_units.fully_shard

    def seen(modules: Any, *, mp_policy: MixedPrecisionPolicy, **options: Any) -> Any:
        given.append((mp_policy.param_dtype, mp_policy.reduce_dtype))
        return fully_shard(modules, mp_policy=mp_policy, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_units, "fully_shard", seen)
        for model, computed in ((FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)):
            torch_ext.parallelize(_linear(4, model), policy(computed), strategy="optim_grads_params")
    return given


def test_gradients_are_handed_over_as_backward_makes_them() -> None:
    """reduce_dtype is always passed, because None means something else since torch 2.15. fp16 is reduced in fp32."""
    expected = [(FP32, FP32), (BF16, BF16), (FP16, FP32), (None, None), (None, FP32)]
    assert ranks.run(2, _reduced) == [expected] * 2
