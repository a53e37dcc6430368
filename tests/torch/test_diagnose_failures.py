"""Faults that have cost users their training, reproduced: torch_ext.diagnose names each fault, its parameters and its
extent."""

import copy
from typing import Any

import pytest
import their_optimizers as theirs
import torch
from their_optimizers import BF16, FP32, model_of, train
from torch import nn

import torch_ext


def kinds(report: torch_ext.Report) -> set[str]:
    """Returns the kinds of the errors and warnings."""
    return {f.kind for f in report.findings if f.severity != "note"}


def only(report: torch_ext.Report, kind: str) -> torch_ext.Finding:
    """Returns the report's finding of that kind, and asserts that it is the only one."""
    (found,) = report.of(kind)
    return found


NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias")


# -- five publicly reported failures, named after their issues; tests/distributed has those of FSDP2 too ------------


def test_areal_1292_adamw_takes_its_dtypes_from_bf16_parameters() -> None:
    """A bf16 model, torch.optim.AdamW at its defaults and lr = 1e-4: no masters, and moments in bf16 as well."""
    model = model_of(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    train(model, optimizer, 5)
    report = torch_ext.diagnose(model, optimizer)
    lost, stalled = only(report, "lost_updates"), only(report, "stalled_exp_avg_sq")
    assert kinds(report) == {"lost_updates", "stalled_exp_avg_sq"}
    assert lost.figure is not None and lost.figure > 0.5 and "2.weight" in lost.names
    assert stalled.figure == 1.0 and set(stalled.names) == set(NAMES)


def test_automodel_2248_moments_in_bf16_lose_small_changes() -> None:
    """A load next to bf16 parameters turns moments into bf16. The weights here have masters, so the moments are the
    only finding."""
    model = model_of(BF16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer.step()
    for entry in optimizer.state.values():  # as they are after a load next to bf16 parameters
        entry.update({key: entry[key].to(BF16) for key in ("exp_avg", "exp_avg_sq")})
    for p, master in zip(model.parameters(), masters, strict=True):
        p.data.copy_(master)
    report = torch_ext.diagnose(model, optimizer)
    assert kinds(report) == {"stalled_exp_avg_sq"}
    assert set(only(report, "stalled_exp_avg_sq").names) == set(NAMES)
    asked = {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "main_params_dtype": "fp32"}
    assert kinds(torch_ext.diagnose(model, optimizer, policy=asked)) == {"stalled_exp_avg_sq", "upcast_missing"}


def test_accelerate_3979_an_upcast_that_binds_a_local_name() -> None:
    """The loop that is meant to upcast only rebinds its variable; every parameter stays as it was. (With accelerate's
    policy: tests/distributed.)"""
    model = model_of(BF16)
    for param in model.parameters():
        param = param.to(FP32)  # noqa: PLW2901
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    report = torch_ext.diagnose(model, optimizer, policy={"main_params_dtype": "fp32"})
    upcast = only(report, "upcast_missing")
    assert set(upcast.names) == set(NAMES) and upcast.figure == sum(p.numel() for p in model.parameters())
    assert kinds(report) == {"upcast_missing", "lost_updates"}


def test_skyrl_2149_a_load_of_weights_alone_leaves_masters_behind() -> None:
    model = model_of(BF16)
    optimizer = theirs.Float16Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(model, optimizer)
    assert torch_ext.diagnose(model, optimizer).findings == ()
    restored = {name: torch.full_like(value, 5.0) for name, value in model.state_dict().items()}
    model.load_state_dict(restored)
    report = torch_ext.diagnose(model, optimizer)
    stale = only(report, "stale_masters")
    assert kinds(report) == {"stale_masters"}
    assert set(stale.names) == set(NAMES) and stale.figure == sum(p.numel() for p in model.parameters())
    assert "reload_model_params" in stale.fix
    train(model, optimizer, 1)  # the damage that the finding warns of: old masters overwrite the weights
    assert all(float((p.detach() - 5).abs().min()) > 1 for p in model.parameters())


def test_skyrl_2149_in_an_engine_that_keeps_masters_in_its_state() -> None:
    model = model_of(BF16)
    optimizer = theirs.FusedAdam(model.parameters(), master_weights=True)
    train(model, optimizer)
    assert torch_ext.diagnose(model, optimizer).findings == ()
    with torch.no_grad():
        model[3].weight += 1  # an adapter that was restored
    stale = only(torch_ext.diagnose(model, optimizer), "stale_masters")
    assert stale.names == ("3.weight",) and stale.figure == model[3].weight.numel()


@pytest.mark.parametrize("refreshed", ["nothing", "masters", "everything"])
def test_megatron_5071_copies_of_masters_on_the_host(refreshed: str) -> None:
    """There are two levels: masters of the shards, and copies of these masters that are stepped on the host. The bug
    was to reload the first level only."""
    model = model_of(BF16)
    params = list(model.parameters())
    optimizer = theirs.DistributedOptimizer(params, [(0, p.numel()) for p in params], lr=1e-3)
    masters = optimizer.shard_fp32_from_float16_groups[0]
    hybrid = theirs.HybridDeviceOptimizer(masters, offloaded=3, lr=1e-3)
    optimizer.optimizer = hybrid  # type: ignore[assignment]
    assert torch_ext.diagnose(model, optimizer).findings == ()
    model.load_state_dict(model_of(BF16, seed=7).state_dict())
    if refreshed != "nothing":
        for weight, master in zip(optimizer.shard_float16_groups[0], masters, strict=True):
            master.copy_(weight)
    if refreshed == "everything":
        for master, host in hybrid.gpu_params_map_cpu_copy.items():
            host.copy_(master)
    report = torch_ext.diagnose(model, optimizer)
    where = {f.message.split("(")[1].split(")")[0] for f in report.of("stale_masters")}
    host, first = "gpu_params_map_cpu_copy", "shard_fp32_from_float16_groups"  # the host's are copies of the first
    assert where == {"nothing": {first}, "masters": {host}, "everything": set()}[refreshed]
    assert kinds(report) == (set() if refreshed == "everything" else {"stale_masters"})


def test_megatron_5071_with_bf16_shards_and_fp32_copies() -> None:
    model = model_of(BF16)
    hybrid = theirs.HybridDeviceOptimizer(model.parameters(), offloaded=2, lr=1e-3)
    train(model, hybrid)
    assert torch_ext.diagnose(model, hybrid).findings == ()
    model.load_state_dict(model_of(BF16, seed=7).state_dict())
    report = torch_ext.diagnose(model, hybrid)
    assert kinds(report) == {"stale_masters"}
    # the norm's weights are 1 in both models, but training has moved the fp32 copies
    assert {name for f in report.of("stale_masters") for name in f.names} == set(NAMES)


# -- other faults ---------------------------------------------------------------------------------------------------


def test_norms_of_which_nothing_moves_though_all_else_does() -> None:
    """An update of a weight of 1 must exceed 2^-9 to have an effect; for weights of 0.1 a tenth of that is enough."""
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.LayerNorm(24)).to(BF16)
    with torch.no_grad():
        model[0].weight.mul_(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    train(model, optimizer)
    before = model[1].weight.detach().clone()
    lost = only(torch_ext.diagnose(model, optimizer), "lost_updates")
    assert lost.severity == "error" and lost.names == ("1.weight",) and lost.figure == 1.0
    train(model, optimizer)
    assert torch.equal(before, model[1].weight)


def test_lost_updates_of_our_muon_are_those_of_adamw_where_it_steps_as_adamw() -> None:
    shares = []
    for kind in (torch_ext.Muon, torch_ext.AdamW):
        vectors = [nn.Parameter(torch.linspace(0.001, 1, 4000).bfloat16())]
        model = nn.ParameterList(vectors)
        policy: Any = {"main_params_dtype": None}
        optimizer: Any = kind(vectors, lr=1e-3, weight_decay=0.1, policy=policy, weight_rounding="nearest")
        for step in range(3):
            vectors[0].grad = torch.randn(4000, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
        shares.append(only(torch_ext.diagnose(model, optimizer), "lost_updates").figure)
    assert shares[0] == shares[1] > 0.2


def test_the_share_of_lost_updates_is_what_the_next_step_leaves() -> None:
    """Compared with torch's own next step. Its gradient leaves the moments unchanged: g = m and g^2 = v."""
    model = nn.Linear(64, 64, bias=False).to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0, fused=True)
    weight = model.weight
    magnitude = torch.rand(weight.shape) + 0.5
    weight.grad = (magnitude * torch.sign(torch.randn(weight.shape))).to(BF16)
    optimizer.step()
    figure = only(torch_ext.diagnose(model, optimizer), "lost_updates").figure
    before = weight.detach().clone()
    optimizer.step()
    left = float((weight == before).double().mean())
    assert figure == pytest.approx(left, abs=0.02) and 0.1 < left < 0.9


def test_an_optimizer_that_ignores_that_masters_were_asked_for() -> None:
    model = model_of(BF16)
    optimizer = theirs.FusedAdam(model.parameters(), lr=1e-4, master_weights=True, ignores=[BF16])
    train(model, optimizer)
    report = torch_ext.diagnose(model, optimizer)
    assert kinds(report) == {"upcast_missing", "lost_updates"}


def test_masters_that_a_load_rounded() -> None:
    """torch's load_state_dict casts the masters to the weights' dtype, bf16, which loses them."""
    model = model_of(BF16)
    optimizer = theirs.FusedAdam(model.parameters(), lr=1e-4, master_weights=True)
    train(model, optimizer)
    # The method of torch.optim.Optimizer casts every state to the parameter's dtype.
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[model[0].weight]["master_param"].dtype == BF16
    said = {f.message.split(":")[0] for f in torch_ext.diagnose(model, optimizer).of("upcast_missing")}
    assert any("masters were asked for" in one for one in said)
    assert any("exp_avg in torch.bfloat16" in one for one in said)


def test_precision_that_megatron_s_configuration_asks_for() -> None:
    class Config:
        use_precision_aware_optimizer = True
        main_params_dtype, main_grads_dtype = FP32, FP32
        exp_avg_dtype, exp_avg_sq_dtype = BF16, BF16

    model = model_of(BF16)
    inner = theirs.FusedAdam(model.parameters(), master_weights=True, betas=(0.9, 0.95))
    train(model, inner)
    wrapper = theirs.ChainedOptimizer([inner])
    wrapper.config = Config()  # type: ignore[attr-defined]
    assert torch_ext.diagnose(model, wrapper).findings == ()
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
    upcast = only(torch_ext.diagnose(model, wrapper), "upcast_missing")
    assert "Gradients are kept in torch.bfloat16" in upcast.message and set(upcast.names) == set(NAMES)


def test_gradients_that_ddp_was_to_reduce_in_fp32() -> None:
    class Config:
        grad_reduce_in_fp32 = True

    model = model_of(FP32)
    model.ddp_config = Config()  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
    assert torch_ext.diagnose(model, optimizer).findings == ()
    model[0].weight.main_grad = torch.zeros_like(model[0].weight, dtype=BF16)  # type: ignore[assignment]
    assert only(torch_ext.diagnose(model, optimizer), "upcast_missing").names == ("0.weight",)


@pytest.mark.parametrize("stalls", [True, False])
def test_exp_avg_sq_that_cannot_fall(stalls: bool) -> None:
    """1 - beta2 = 0.001 is less than half an ulp of bf16 (at least 2^-9), so exp_avg_sq cannot decrease; 0.05 is more
    than one ulp."""
    model = model_of(FP32)
    betas = (0.9, 0.999 if stalls else 0.95)
    optimizer = theirs.FusedAdam(model.parameters(), betas=betas, exp_avg_sq_dtype=BF16)
    assert kinds(torch_ext.diagnose(model, optimizer)) == ({"stalled_exp_avg_sq"} if stalls else set())
    train(model, optimizer)
    report = torch_ext.diagnose(model, optimizer)
    assert kinds(report) == ({"stalled_exp_avg_sq"} if stalls else set())
    before = optimizer.state[model[0].weight]["exp_avg_sq"].clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(before, optimizer.state[model[0].weight]["exp_avg_sq"]) == stalls


def test_exp_avg_sq_in_8_bits_of_float_stalls_for_smaller_beta2() -> None:
    """e4m3 has 4 significant bits: half an ulp is 3.3 % to 6.25 % of a number. So a change of 5 % is lost for some
    numbers."""
    model = model_of(FP32)
    optimizer = theirs.FusedAdam(model.parameters(), betas=(0.9, 0.95), exp_avg_sq_dtype=torch.float8_e4m3fn)
    for p in model.parameters():
        v = (torch.rand(p.shape) * 8 + 1).to(torch.float8_e4m3fn)
        optimizer.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": v}
    stalled = only(torch_ext.diagnose(model, optimizer), "stalled_exp_avg_sq")
    assert stalled.figure is not None and 0.1 < stalled.figure < 1 and set(stalled.names) == set(NAMES)


def test_an_optimizer_of_a_model_that_was_built_again() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    again = copy.deepcopy(model)
    report = torch_ext.diagnose(again, optimizer)
    stale = only(report, "stale_references")
    assert kinds(report) == {"stale_references"} and set(stale.names) == set(NAMES)


def test_a_layer_that_was_replaced_after_the_optimizer_was_made() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    model[3] = nn.Linear(24, 6)
    report = torch_ext.diagnose(model, optimizer)
    assert kinds(report) == {"stale_references"}
    assert set(only(report, "stale_references").names) == {"3.weight", "3.bias"}


def test_a_head_of_another_size_after_the_optimizer_was_made() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    model[3] = nn.Linear(24, 7)
    report = torch_ext.diagnose(model, optimizer)
    assert kinds(report) == {"in_no_group"} and set(only(report, "in_no_group").names) == {"3.weight", "3.bias"}
    assert len(report.of("not_of_the_model")) == 1


def test_parameters_in_no_group() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "3.bias"])
    found = only(torch_ext.diagnose(model, optimizer), "in_no_group")
    assert found.names == ("3.bias",)
    optimizer.add_param_group({"params": [model.get_parameter("3.bias")]})  # the code that the finding proposes
    assert "model.get_parameter('3.bias')" in found.fix
    assert torch_ext.diagnose(model, optimizer).findings == ()


def test_parameters_in_two_groups_and_in_two_optimizers() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].weight]})
    assert only(torch_ext.diagnose(model, optimizer), "in_two_groups").names == ("0.weight",)
    pair = [torch.optim.AdamW(model.parameters()), torch.optim.SGD([model[0].bias], lr=0.1)]
    assert only(torch_ext.diagnose(model, pair), "in_two_groups").names == ("0.bias",)


def test_a_load_that_leaves_states_out() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    saved = optimizer.state_dict()
    del saved["state"][3]
    del saved["state"][1]["exp_avg_sq"]
    saved["state"][0] = {"step": saved["state"][0]["step"]}
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(saved)
    report = torch_ext.diagnose(model, other)
    assert only(report, "no_state").names == ("2.bias",) and only(report, "no_state").severity == "warning"
    assert {f.names for f in report.of("missing_moments")} == {("0.weight",), ("0.bias",)}


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_load_that_leaves_one_moment_of_all_parameters_out(key: str) -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    for entry in optimizer.state.values():
        del entry[key]
    missing = only(torch_ext.diagnose(model, optimizer), "missing_moments")
    assert set(missing.names) == set(NAMES) and f"no {key}:" in missing.message


def test_a_load_in_another_order() -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    other = torch.optim.AdamW(reversed(list(model.parameters())))
    other.load_state_dict(optimizer.state_dict())
    report = torch_ext.diagnose(model, other)
    assert kinds(report) == {"misshapen_moments"}
    # 2.weight and 2.bias have other parameters' moments too, but of the right shape
    found = {name for f in report.of("misshapen_moments") for name in f.names}
    assert found == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_moments_of_steps_that_are_not_counted() -> None:
    """Moments that are not zero at step 0 contradict the step count."""
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    optimizer.state[model[0].weight]["step"].zero_()
    found = only(torch_ext.diagnose(model, optimizer), "inconsistent_moments")
    assert found.names == ("0.weight",) and "step 0" in found.message


@pytest.mark.parametrize("how", ["zero", "fp16"])
def test_a_second_moment_that_is_gone(how: str) -> None:
    """If exp_avg_sq is 0 and exp_avg is not, the next update is m / eps. Either a load filled it with zeros, or it
    underflowed: fp16 ends at 6e-8."""
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-4)
    optimizer.step()
    state = optimizer.state[model[3].weight]
    state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"]) if how == "zero" else state["exp_avg_sq"].half()
    found = only(torch_ext.diagnose(model, optimizer), "inconsistent_moments")
    assert found.names == ("3.weight",) and "exp_avg_sq" in found.message


@pytest.mark.parametrize("key, value", [("exp_avg", float("nan")), ("exp_avg_sq", float("inf")), ("exp_avg_sq", -1.0)])
def test_state_that_is_not_finite(key: str, value: float) -> None:
    model = model_of(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    optimizer.state[model[0].bias][key][5] = value
    found = torch_ext.diagnose(model, optimizer).of("nonfinite_state")
    assert [f.names for f in found] == [("0.bias",)]


def _flat() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    return model, theirs.FlatPartitions(list(model.parameters()), lr=1e-3)


def _shards() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    params = list(model.parameters())
    ranges = [(p.numel() // 3, p.numel()) for p in params]  # the first third belongs to another rank
    return model, theirs.DistributedOptimizer(params, ranges, lr=1e-3)


def _apex() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    return model, theirs.MastersInGroups(model.parameters(), lr=1e-3)


def _chain() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    params = list(model.parameters())
    parts = [theirs.Float16Optimizer(torch.optim.AdamW(part, lr=1e-3)) for part in (params[:2], params[2:])]
    return model, theirs.ChainedOptimizer(parts)


def _on_params() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    for p in model.parameters():
        p.main_param = p.detach().clone().float()  # type: ignore[attr-defined]
    return model, torch.optim.AdamW([p.main_param for p in model.parameters()], lr=1e-3)  # type: ignore[misc]


def _by_hand() -> tuple[nn.Module, Any]:
    model = model_of(BF16)
    return model, torch.optim.AdamW([nn.Parameter(p.detach().float()) for p in model.parameters()], lr=1e-3)


def _amp() -> tuple[nn.Module, Any]:
    class Stash:
        fp16_groups: Any
        fp32_from_fp16_groups: Any

    model = model_of(BF16)
    stash = Stash()
    stash.fp16_groups = [list(model.parameters())]
    stash.fp32_from_fp16_groups = [[p.detach().clone().float() for p in model.parameters()]]
    optimizer = torch.optim.AdamW(stash.fp32_from_fp16_groups[0], lr=1e-3)
    optimizer._amp_stash = stash  # type: ignore[attr-defined]
    return model, optimizer


@pytest.mark.parametrize("made", [_flat, _shards, _apex, _chain, _on_params, _by_hand, _amp])
def test_masters_wherever_they_are_kept(made: Any) -> None:
    """No finding before an element of a weight is written, and exactly that element afterwards."""
    model, optimizer = made()
    assert torch_ext.diagnose(model, optimizer).findings == ()
    with torch.no_grad():
        model[3].weight[5, 23] += 1
    report = torch_ext.diagnose(model, optimizer)
    stale = only(report, "stale_masters")
    assert kinds(report) == {"stale_masters"} and stale.figure == 1
    assert "3.weight" in stale.names


def test_masters_of_another_size() -> None:
    model, optimizer = _apex()
    optimizer.param_groups_master[0]["params"][0] = torch.zeros(7)
    assert only(torch_ext.diagnose(model, optimizer), "misshapen_moments").names == ("0.weight",)


@pytest.mark.parametrize("on_external_write, severity", [("ignore", "error"), ("resync", "note"), ("error", "note")])
def test_our_masters_say_what_the_next_step_does(on_external_write: str, severity: str) -> None:
    """Weights were loaded after the steps. Only under "ignore" does the next step overwrite them with old masters."""
    model = model_of(BF16)
    optimizer = torch_ext.AdamW(model.named_parameters(), on_external_write=on_external_write)
    train(model, optimizer)
    model.load_state_dict(model_of(BF16, seed=9).state_dict())
    found = only(torch_ext.diagnose(model, optimizer), "stale_masters")
    assert found.severity == severity and "0.weight" in found.names and "resync_masters" in found.fix


def test_codes_of_8_bits_are_read() -> None:
    """The share of lost updates that is computed from decoded moments equals the share from the moments themselves, up
    to the codes' rounding."""
    model = nn.Linear(40, 40, bias=False).to(BF16)
    m, v = torch.randn(40, 40) * 0.1, torch.rand(40, 40) * 0.01 + 0.01
    coded = theirs.EightBitAdam(model.parameters(), lr=1e-3)
    coded.set_state(model.weight, m, v, 100)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    plain.state[model.weight] = {"step": torch.tensor(100.0), "exp_avg": m, "exp_avg_sq": v}
    shares = [only(torch_ext.diagnose(model, o), "lost_updates").figure for o in (coded, plain)]
    assert shares[0] == pytest.approx(shares[1], abs=0.05) and 0.1 < shares[1] < 0.9  # type: ignore[operator]


class _ScaledMoments(theirs.FusedAdam):
    """Transformer Engine's with fp16 moments: they are stored multiplied by a scale, and divided by it on request."""

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[param][name].float() / 512


def _in_32_bits(model: Any, m: torch.Tensor, v: torch.Tensor) -> Any:
    """bitsandbytes' state of a parameter that is too small for 8 bits."""
    optimizer = theirs.EightBitAdam(model.parameters(), lr=1e-3)
    optimizer.state[model.weight] = {"step": 100, "state1": m, "state2": v}
    return optimizer


def _in_one_block(model: Any, m: torch.Tensor, v: torch.Tensor) -> Any:
    """bitsandbytes' state without blocks: one greatest magnitude for the whole parameter."""
    optimizer = theirs.EightBitAdam(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"step": 100}
    for n, values, low in (("1", m, -1.0), ("2", v, 0.0)):
        table = torch.linspace(low, 1, 256)
        state[f"max{n}"], state[f"qmap{n}"] = values.abs().max().view(1), table
        state[f"state{n}"] = ((values / values.abs().max())[..., None] - table).abs().argmin(-1).to(torch.uint8)
    optimizer.state[model.weight] = state
    return optimizer


def _scaled(model: Any, m: torch.Tensor, v: torch.Tensor) -> Any:
    """Transformer Engine's state, in scaled fp16 moments."""
    optimizer = _ScaledMoments(model.parameters(), lr=1e-3)
    optimizer.param_groups[0]["step"] = 100
    optimizer.state[model.weight] = {"exp_avg": (m * 512).half(), "exp_avg_sq": (v * 512).half()}
    return optimizer


@pytest.mark.parametrize("form", [_in_32_bits, _in_one_block, _scaled])
def test_moments_are_read_in_the_form_that_others_store_them_in(form: Any) -> None:
    model = nn.Linear(40, 40, bias=False).to(BF16)
    m, v = torch.randn(40, 40) * 0.1, torch.rand(40, 40) * 0.01 + 0.01
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    plain.state[model.weight] = {"step": torch.tensor(100.0), "exp_avg": m, "exp_avg_sq": v}
    shares = [only(torch_ext.diagnose(model, o), "lost_updates").figure for o in (form(model, m, v), plain)]
    assert shares[0] == pytest.approx(shares[1], abs=0.05) and 0.1 < shares[1] < 0.9  # type: ignore[operator]


@pytest.mark.parametrize("key", ["kahan_comp", "compensation"])
def test_a_compensation_beside_the_weight_keeps_updates(key: str) -> None:
    """A bf16 compensation term in the state (Kahan summation) keeps what rounding would lose."""
    model = nn.Linear(40, 40, bias=False).to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    found = kinds(torch_ext.diagnose(model, optimizer))
    assert "lost_updates" in found
    optimizer.state[model.weight][key] = torch.zeros_like(model.weight)
    assert kinds(torch_ext.diagnose(model, optimizer)) == found - {"lost_updates"}


@pytest.mark.parametrize("rounding, named", [("nearest", {"lost_updates"}), ("dithered", set()), ("stochastic", set())])
def test_our_weights_without_masters(rounding: str, named: set[str]) -> None:
    """Dithered and stochastic rounding keep updates that rounding to nearest loses."""
    model = model_of(BF16)
    policy = torch_ext.load_policy(BF16, override_optimizer_config={"main_params_dtype": None})
    optimizer = torch_ext.AdamW(model.parameters(), lr=1e-5, policy=policy, weight_rounding=rounding)
    assert kinds(torch_ext.diagnose(model, optimizer)) == named
    train(model, optimizer)
    assert kinds(torch_ext.diagnose(model, optimizer)) == named


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp16"])
def test_our_moments_are_read_in_the_form_that_they_are_stored_in(dtype: str) -> None:
    """The share of lost updates is the same for all stored dtypes, up to the codes' rounding."""
    shares = []
    for stored in ("fp32", dtype):
        model = model_of(BF16)
        config = {"main_params_dtype": None, "exp_avg_dtype": stored, "exp_avg_sq_dtype": stored}
        policy = torch_ext.load_policy(BF16, override_optimizer_config=config)
        optimizer = torch_ext.AdamW(model.parameters(), lr=1e-4, policy=policy, weight_rounding="nearest")
        train(model, optimizer)
        shares.append(only(torch_ext.diagnose(model, optimizer), "lost_updates").figure)
    assert shares[1] == pytest.approx(shares[0], abs=0.03) and 0.1 < shares[0] < 0.98  # type: ignore[operator]


def test_our_bf16_moments_stall_where_they_are_rounded_to_nearest() -> None:
    model = model_of(BF16)
    optimizer = torch_ext.AdamW(model.parameters(), moment_rounding="nearest")
    assert kinds(torch_ext.diagnose(model, optimizer)) == {"stalled_exp_avg_sq"}
    train(model, optimizer)
    assert kinds(torch_ext.diagnose(model, optimizer)) == {"stalled_exp_avg_sq"}
    dithered = torch_ext.AdamW(model.parameters())
    assert kinds(torch_ext.diagnose(model, dithered)) == set()
