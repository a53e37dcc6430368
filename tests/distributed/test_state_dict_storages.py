"""state_dict() of a parallelized model or its optimizer, as other code uses it: each tensor must be the weight itself,
in a storage without other tensors."""

import io
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, Given, policy

import torch_ext

SHARDED = ["optim", "optim_grads"]


class Tied(torch.nn.Module):
    """Has tied weights, a channels_last convolution, a scalar, an empty parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 12), torch.nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.narrow = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scalar, self.none = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(0))
        self.register_buffer("mean", torch.zeros(3))


def _storages(rank: int, world: int) -> None:
    """Each tensor of the model's state_dict() must be the weight itself, in a storage of its own size."""
    for strategy in SHARDED:
        inner = torch_ext.parallelize(Tied().to(BF16), policy(BF16, bucket_size=1), strategy=strategy)
        for model, prefix in ((inner, ""), (torch.nn.Sequential(inner), "0.")):
            found = model.state_dict()
            assert list(found) == [prefix + name for name in Tied().state_dict()]
            assert found[prefix + "first.weight"] is found[prefix + "second.weight"], "tied weights are one"
            addresses = [value.untyped_storage().data_ptr() for value in found.values() if value.numel()]
            assert len(set(addresses)) == len(addresses) - 1
            for name, param in model.named_parameters(remove_duplicate=False):
                value = found[name]
                assert value.untyped_storage().nbytes() == value.nbytes, "nothing else is saved with it"
                assert value.shape == param.shape and value.stride() == param.stride() and value.dtype == BF16
                assert not value.requires_grad
                value.fill_(3.0)  # as an averaging loop, or torch.distributed.checkpoint, would
                assert (param == 3.0).all()
            assert model.state_dict(keep_vars=True)[prefix + "first.weight"] is inner.first.weight
            file = io.BytesIO()
            torch.save(model.state_dict()[prefix + "first.bias"], file)
            assert file.tell() < 3000
            model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
            assert (inner.first.weight == 1.0).all()


def test_tensors_of_a_models_state_dict_have_storages_of_their_own() -> None:
    ranks.run(2, _storages)


def _held(rank: int, world: int) -> None:
    """Memory that other code still holds must not be freed by offload."""
    for strategy in SHARDED:
        model = torch_ext.parallelize(Given([(40, 10), (5,)], BF16), policy(BF16, bucket_size=1), strategy=strategy)
        held: Any = model.state_dict()["p0"]
        view, held = held[3], None  # the tensor is gone, its storage is not
        with pytest.raises(RuntimeError, match=r"offload while a state_dict\(\) .* is still referenced"):
            torch_ext.offload(model)
        assert (view == 0).all()
        del view
        torch_ext.offload(model)
        torch_ext.onload(model)


def test_B4_weights_are_not_offloaded_under_a_state_dict() -> None:
    ranks.run(2, _held)


def _handed_out(rank: int, world: int) -> None:
    """ZeroRedundancyOptimizer's order of calls, which Lightning uses: all ranks consolidate, one calls state_dict."""
    for strategy in SHARDED:
        model = torch_ext.parallelize(Given([(40, 10), (5,)], BF16), policy(BF16, bucket_size=1), strategy=strategy)
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=0.1)
        _step(model, optimizer)
        assert _is_sharded(optimizer)
        whole = optimizer.consolidate_state_dict()
        if rank == 0:
            assert optimizer.state_dict() is whole and whole["state"][0]["exp_avg"].shape == (40, 10)
        assert _is_sharded(optimizer), "once"
        optimizer.consolidate_state_dict()
        _step(model, optimizer)
        assert _is_sharded(optimizer), "not after a step"
        optimizer.load_state_dict(optimizer.consolidate_state_dict(to=None))
        assert _is_sharded(optimizer), "not after a load"
        optimizer.consolidate_state_dict(to=None)
        with optimizer.master_weights() as masters:
            next(iter(masters.values())).zero_()
        assert _is_sharded(optimizer), "not after masters were written"


def _is_sharded(optimizer: Any) -> bool:
    """Whether state_dict() has sharded moments."""
    moments = optimizer.state_dict()["state"][0]
    return not all(type(moments[key]) is torch.Tensor for key in ("exp_avg", "exp_avg_sq"))


def _step(model: Any, optimizer: Any) -> None:
    model([torch.ones(40, 10), torch.ones(5)]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_consolidated_state_is_what_the_next_state_dict_hands_out() -> None:
    ranks.run(2, _handed_out)


def test_consolidate_without_a_process_group() -> None:
    model = torch.nn.Linear(3, 2).to(BF16)
    optimizer = torch_ext.AdamW(model.named_parameters())
    whole, plain = optimizer.consolidate_state_dict(), optimizer.state_dict()
    assert whole["param_groups"] == plain["param_groups"]
    assert all(torch.equal(whole["state"][i][key], plain["state"][i][key]) for i in (0, 1) for key in plain["state"][i])
    assert optimizer.consolidate_state_dict(to=1) is None
