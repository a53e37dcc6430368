"""torch_ext.Muon's states: saving and loading them, also from and into torch.optim.Muon, and their masters."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from muon_params import BF16, F32, STATES, bits, filled, matrices
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import torch_ext

# -- saving and loading -----------------------------------------------------------------------------------------------


def trained(dtype: torch.dtype, states: Any, steps: int, params: Any = None) -> tuple[list[nn.Parameter], Any]:
    """Returns parameters and their optimizer after `steps` steps."""
    params = params or matrices([(40, 30), (30,), (3, 10, 12)], dtype)
    optimizer = torch_ext.Muon(params, lr=0.05, states=states, ns_dtype=F32)
    for step in range(steps):
        filled(params, step)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("how", ["state_dict", "torch.save", "deepcopy"])
def test_a_resumed_run_has_the_bits(states: Any, how: str, tmp_path: Any) -> None:
    params, optimizer = trained(BF16, states, 3)
    if how == "deepcopy":
        resumed, again = copy.deepcopy((params, optimizer))
    else:
        resumed = [nn.Parameter(p.detach().clone()) for p in params]
        again = torch_ext.Muon(resumed, lr=0.05, states=states, ns_dtype=F32)
        saved = optimizer.state_dict()
        if how == "torch.save":
            torch.save(saved, tmp_path / "saved.pt")
            saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        again.load_state_dict(saved)
    for step in range(3, 6):
        for p, o in ((params, optimizer), (resumed, again)):
            filled(p, step)
            o.step()
    assert bits(params) == bits(resumed)
    masters, theirs = optimizer.master_state_dict(), again.master_state_dict()
    assert bits(masters.values()) == bits(theirs.values())


def test_checkpoints_from_and_into_torchs() -> None:
    shapes = [(24, 16), (16, 40)]
    theirs_p = matrices(shapes)
    theirs = torch.optim.Muon(theirs_p, lr=0.02, momentum=0.8)
    for step in range(3):
        filled(theirs_p, step)
        theirs.step()
    ours_p = [nn.Parameter(p.detach().clone()) for p in theirs_p]
    ours = torch_ext.Muon(ours_p, ns_dtype=F32)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["momentum"] == 0.8
    for p, q in zip(ours_p, theirs_p, strict=True):
        assert torch.equal(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])
    back_p = [nn.Parameter(p.detach().clone()) for p in ours_p]
    back = torch.optim.Muon(back_p)
    back.load_state_dict(ours.state_dict())
    for (a, p), (b, q) in (((theirs, theirs_p), (back, back_p)),):
        filled(p, 7)
        filled(q, 7)
        a.step()
        b.step()
        assert bits(p) == bits(q)


def test_torchs_muon_keeps_no_stale_master() -> None:
    """torch.optim.Muon does not update masters, so it must not get any from our state dict."""
    params, ours = trained(BF16, "bf16", 2, matrices([(8, 8)], BF16))
    theirs = torch.optim.Muon(params)
    theirs.load_state_dict(ours.state_dict())
    assert set(theirs.state[params[0]]) == {"momentum_buffer"}


def test_a_changed_algorithm_is_named() -> None:
    params = matrices([(8, 8), (8, 6)])
    muon, adamw = torch_ext.Muon(params), torch_ext.AdamW(params)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*exp_avg"):
        muon.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError, match="parameter 0 of group 0"):
        adamw.load_state_dict(muon.state_dict() | {"param_groups": adamw.state_dict()["param_groups"]})
    assert not any("exp_avg" in muon.state[p] for p in params)


def test_state_is_made_inert() -> None:
    """The step with lr 0 and zero gradients by which frameworks make an optimizer create its state changes no weight
    and counts no step."""
    params = matrices([(8, 8), (8,)])
    before = bits(params)
    optimizer = torch_ext.Muon(params, lr=0.0)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert bits(params) == before
    assert float(optimizer.state[params[0]]["step"]) == 0


def test_the_dtype_of_products_is_saved() -> None:
    params = matrices([(8, 8)])
    optimizer = torch_ext.Muon(params)
    assert optimizer.param_groups[0]["ns_dtype"] is None
    filled(params, 0)
    optimizer.step()
    chosen = optimizer.state_dict()["param_groups"][0]["ns_dtype"]
    assert chosen in ("float32", "bfloat16")
    other = torch_ext.Muon(matrices([(8, 8)]), ns_dtype=BF16 if chosen == "float32" else F32)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["ns_dtype"] == chosen


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_files_folders_and_offload_keep_the_bits(states: Any, tmp_path: Any) -> None:
    def made() -> tuple[nn.Module, torch_ext.Muon]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).bfloat16()
        return model, torch_ext.Muon(model, lr=0.05, states=states, ns_dtype=F32)

    def trains(model: nn.Module, optimizer: torch_ext.Muon, steps: range) -> list[bytes]:
        for step in steps:
            filled(list(model.parameters()), step)
            optimizer.step()
        return bits(model.parameters())

    model, optimizer = made()
    trains(model, optimizer, range(3))
    weights = copy.deepcopy(model.state_dict())
    torch_ext.save({"optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer)
    want = trains(model, optimizer, range(3, 5))

    from_file, of_file = made()
    from_file.load_state_dict(weights)
    of_file.load_state_dict(torch_ext.load(tmp_path / "file.pt")["optimizer"])
    assert trains(from_file, of_file, range(3, 5)) == want
    from_folder, of_folder = made()
    from_folder.load_state_dict(weights)
    found = {"optim": get_optimizer_state_dict(from_folder, of_folder)}
    dcp.load(found, checkpoint_id=tmp_path / "folder", no_dist=True)
    set_optimizer_state_dict(from_folder, of_folder, found["optim"])
    assert trains(from_folder, of_folder, range(3, 5)) == want


# -- masters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["bf16", "bf16_remainder", "8bit"])
@pytest.mark.parametrize("how", ["copy_", "data", "numpy"])
def test_a_weight_that_was_written_counts(states: Any, how: str) -> None:
    params, optimizer = trained(BF16, states, 2, matrices([(64, 64)], BF16))
    new = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    with torch.no_grad():
        if how == "copy_":
            params[0].copy_(new)
        elif how == "data":
            params[0].data = new.clone()
        else:
            params[0].data.view(torch.int16).numpy()[:] = new.view(torch.int16).numpy()
    filled(params, 9)
    optimizer.step()
    assert optimizer.external_writes() > 0
    assert float((params[0].float() - new.float()).abs().max()) < 0.5  # the update is about 0.05
    assert float((optimizer.master_state_dict()[0] - params[0].float()).abs().max()) < 0.05


def test_error_on_external_write_changes_nothing() -> None:
    params = matrices([(64, 64), (5,)], BF16)
    optimizer = torch_ext.Muon(params, on_external_write="error", ns_dtype=F32)
    filled(params, 0)
    optimizer.step()
    with torch.no_grad():
        params[0].mul_(2)
    before = bits(params), bits([optimizer.state[params[0]]["momentum_buffer"]])
    with pytest.raises(RuntimeError, match="parameter 0 of group 0"):
        optimizer.step()
    assert (bits(params), bits([optimizer.state[params[0]]["momentum_buffer"]])) == before
