"""Master weights and their weights: the weight is always the rounded master (docs/guarantees.md), and external writes
(docs/specification.md, D3, D6, D7)."""

import copy

import pytest
import torch
from torch import Tensor, nn
from training import POLICIES, WITH_MASTER, OperatorCalls, bits, everything, params_of, policy_of, set_grads, train

import torch_ext


def optimizer_of(name: str, **options: object) -> torch_ext.AdamW:
    params = params_of(name)
    return torch_ext.AdamW(params, lr=1e-2, weight_decay=0.0, policy=policy_of(name), **options)


def masters(optimizer: torch_ext.AdamW) -> list[Tensor]:
    return [entry["master_param"].clone() for entry in optimizer.state_dict()["state"].values()]


def params(optimizer: torch_ext.AdamW) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


@pytest.mark.parametrize("name", WITH_MASTER)
def test_weight_is_the_rounded_master_in_every_step(name: str) -> None:
    optimizer = optimizer_of(name)
    for step in range(5):
        train(optimizer, [step])
        for p, master in zip(params(optimizer), masters(optimizer), strict=True):
            assert bits(master.to(p.dtype)) == bits(p)


@pytest.mark.parametrize("name", WITH_MASTER)
def test_master_begins_as_the_weight(name: str) -> None:
    optimizer = optimizer_of(name)
    assert [bits(m) for m in masters(optimizer)] == [bits(p.float()) for p in params(optimizer)]


def test_G4_remainder_configuration_follows_the_fp32_master() -> None:
    """Weights are equal to the bit. Masters are too, except the one bit pattern per even weight that is stored one ulp
    lower."""
    a, b = optimizer_of("bf16"), optimizer_of("bf16_remainder")
    for optimizer in (a, b):
        train(optimizer, range(20))
    assert [bits(p) for p in params(a)] == [bits(p) for p in params(b)]
    differing = 0
    for master, other in zip(masters(a), masters(b), strict=True):
        distance = (master.view(torch.int32) - other.view(torch.int32)).abs()
        assert (distance <= 1).all()
        differing += int((distance > 0).sum())
    assert differing <= 5


# -- external writes --------------------------------------------------------------------------------------------------


def new_weights(optimizer: torch_ext.AdamW) -> list[Tensor]:
    return [p.detach().clone() for p in params_of_like(optimizer)]


def params_of_like(optimizer: torch_ext.AdamW) -> list[Tensor]:
    generator = torch.Generator().manual_seed(77)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params(optimizer)]


@torch.no_grad()
def copy_in(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    for p, weight in zip(params(optimizer), weights, strict=True):
        p.copy_(weight)


def load_module(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    module = nn.ParameterList(params(optimizer))
    module.load_state_dict({str(i): weight for i, weight in enumerate(weights)})


def set_data(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    for p, weight in zip(params(optimizer), weights, strict=True):
        p.data = weight.clone()


def from_vector(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(weights), params(optimizer))


def data_copy(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    for p, weight in zip(params(optimizer), weights, strict=True):
        p.data.copy_(weight)


NOTICED = {"copy_": copy_in, "load_state_dict": load_module, "p.data =": set_data, "vector_to_parameters": from_vector}


@pytest.mark.parametrize("name", WITH_MASTER)
@pytest.mark.parametrize("write", NOTICED)
def test_D3_D7_weights_written_between_steps_take_effect(write: str, name: str) -> None:
    """Load weights, then step with zero gradients and no decay: the weights equal what was loaded."""
    optimizer = optimizer_of(name)
    train(optimizer, range(3))
    for p in params(optimizer):  # else the moments would move the weights
        optimizer.state[p]["exp_avg"].zero_()
    weights = new_weights(optimizer)
    NOTICED[write](optimizer, weights)
    for p in params(optimizer):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert [bits(p) for p in params(optimizer)] == [bits(w) for w in weights]


def zero_step(optimizer: torch_ext.AdamW, lr: float) -> None:
    """Takes a step with zero gradients."""
    optimizer.param_groups[0]["lr"] = lr
    for p in params(optimizer):
        p.grad = torch.zeros_like(p)
    optimizer.step()


# Actions that create the state, with masters from the weights of that time.
BEFORE = {
    "nothing": lambda o: None,
    "a state_dict": lambda o: o.state_dict(),
    "a load": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "DCP's step": lambda o: zero_step(o, 0.0),
}


@pytest.mark.parametrize("name", WITH_MASTER)
@pytest.mark.parametrize("before", BEFORE)
def test_D3_model_loaded_after_the_optimizer_was_built(before: str, name: str) -> None:
    optimizer = optimizer_of(name)
    BEFORE[before](optimizer)
    weights = new_weights(optimizer)
    data_copy(optimizer, weights)  # a write that changes no version counter
    zero_step(optimizer, 1e-2)
    assert [bits(p) for p in params(optimizer)] == [bits(w) for w in weights]
    if before == "nothing":
        assert [bits(m) for m in masters(optimizer)] == [bits(w.float()) for w in weights]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_D7_resync_masters_takes_over_what_does_not_round_to_its_weight(name: str) -> None:
    optimizer = optimizer_of(name)
    train(optimizer, range(3))
    weights = new_weights(optimizer)
    data_copy(optimizer, weights)
    before = masters(optimizer)
    assert optimizer.resync_masters() > 0
    for old, master, weight in zip(before, masters(optimizer), weights, strict=True):
        fits = old.to(weight.dtype) == weight
        assert bits(master) == bits(torch.where(fits, old, weight.float()))
    assert optimizer.resync_masters() == 0


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_resync_masters_goes_over_samples_only_where_it_changed_something(name: str) -> None:
    """Checksums are recomputed for weights whose masters were changed, and for no others."""
    optimizer = optimizer_of(name)
    train(optimizer, range(3))
    written, left = params(optimizer)[:2]
    marked = optimizer.state[left]["checksum"].add_(1).clone()
    written.data.fill_(77)
    assert optimizer.resync_masters() == written.numel()
    assert torch.equal(optimizer.state[left]["checksum"], marked)
    entry, stale = optimizer.state[written], torch.zeros(1, dtype=torch.int64)
    flat = written.detach().view(-1)
    torch.ops.torch_ext.master_checksum_([flat], [entry["master_param"].view(-1)], [entry["checksum"]], stale, 0)
    assert int(stale) == 0


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", WITH_MASTER)
def test_resync_masters_leaves_the_steps_arguments_and_makes_nobody_suspect(name: str, force: bool) -> None:
    """resync_masters may be called in each step: the step's prepared arguments stay valid, and the next step compares
    no master element by element."""
    optimizer, reference = optimizer_of(name), optimizer_of(name)
    plan = None
    for one in (reference, optimizer):
        train(one, range(3))
        if one is optimizer:
            plan = one._stepper.plan
        else:
            one._stepper.plan = None  # the next step prepares its arguments again
        params(one)[0].data.fill_(3)
        assert one.resync_masters(force=force) > 0
    assert plan is not None and optimizer._stepper.plan is plan
    optimizer.state_dict()  # hands out masters, so steps look for writes to them from now on
    with OperatorCalls() as step:
        train(optimizer, range(3, 4))
    assert {operator for operator, _ in step.calls} == {"adamw_flat_"}, "somebody is suspect"
    train(reference, range(3, 4))
    assert everything(optimizer) == everything(reference)


@pytest.mark.parametrize("name", ["bf16", "bf16_remainder"])
def test_resync_masters_sees_parameters_that_the_last_step_left_out(name: str) -> None:
    optimizer = optimizer_of(name)
    train(optimizer, range(2))
    left_out = params(optimizer)[0]
    set_grads(params(optimizer), 2)
    left_out.grad = None
    optimizer.step()
    left_out.data.fill_(3)
    assert optimizer.resync_masters() > 0
    assert bits(masters(optimizer)[0].to(left_out.dtype)) == bits(left_out)


@pytest.mark.parametrize("name", WITH_MASTER)
def test_D6_force_makes_every_master_exactly_its_weight(name: str) -> None:
    optimizer = optimizer_of(name)
    train(optimizer, range(3))
    weights = [bits(p) for p in params(optimizer)]
    assert [bits(m) for m in masters(optimizer)] != [bits(p.float()) for p in params(optimizer)]
    optimizer.resync_masters(force=True)
    assert [bits(m) for m in masters(optimizer)] == [bits(p.float()) for p in params(optimizer)]
    assert [bits(p) for p in params(optimizer)] == weights


@pytest.mark.parametrize("name", WITH_MASTER)
def test_masters_stay_bit_for_bit_where_weights_are_written_with_what_they_are(name: str) -> None:
    """A weight is overwritten by an equal value: on resume, or when an average is swapped in and out around a save."""
    swapped, plain = optimizer_of(name), optimizer_of(name)
    for optimizer in (swapped, plain):
        train(optimizer, range(3))
    original = [p.detach().clone() for p in params(swapped)]
    copy_in(swapped, new_weights(swapped))
    if POLICIES[name][1].get("store_param_remainders") is None:
        saved = copy.deepcopy(swapped.state_dict())
        assert [bits(e["master_param"]) for e in saved["state"].values()] == [bits(m) for m in masters(plain)]
    copy_in(swapped, original)
    for optimizer in (swapped, plain):
        train(optimizer, range(3, 5))
    assert everything(swapped) == everything(plain)


def test_error_says_which_parameter_and_leaves_everything() -> None:
    optimizer = optimizer_of("bf16", on_external_write="error")
    train(optimizer, range(3))
    copy_in(optimizer, [p.detach().clone() for p in params(optimizer)])  # version counters change, values do not
    train(optimizer, range(3, 4))
    with torch.no_grad():
        params(optimizer)[2].view(-1)[3] += 1
    before = everything(optimizer)
    set_grads(params(optimizer), 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 2 of group 0 \(1 elements\).*resync_masters"):
            optimizer.step()
    assert everything(optimizer) == before
    assert optimizer.resync_masters() == 1
    optimizer.step()


def test_messages_name_a_few_of_many_parameters() -> None:
    weights = [torch.nn.Parameter(torch.ones(3).bfloat16()) for _ in range(200)]
    optimizer = torch_ext.AdamW(weights, on_external_write="error")
    train(optimizer, range(1))
    with (
        pytest.raises(ValueError, match="parameter 3 of group 0 .* and 196 more. Their weights and masters are"),
        optimizer.master_weights(),
    ):
        for p in weights:
            p.data = p.data.double()
    for p in weights:
        p.data.mul_(2)
    set_grads(weights, 1)
    with pytest.raises(
        RuntimeError, match="parameter 3 of group 0 .* and 196 more no longer what the master rounds to"
    ):
        optimizer.step()


def test_ignore_lets_the_master_overwrite_the_weight() -> None:
    ignoring, plain = optimizer_of("bf16", on_external_write="ignore"), optimizer_of("bf16")
    for optimizer in (ignoring, plain):
        train(optimizer, range(3))
    copy_in(ignoring, new_weights(ignoring))
    for optimizer in (ignoring, plain):
        train(optimizer, range(3, 4))
    assert everything(ignoring) == everything(plain)


def test_own_steps_are_nobody_elses_writes() -> None:
    """After the optimizer's own steps no weight counts as written, so no step compares masters element by element."""
    optimizer = optimizer_of("bf16", on_external_write="error")
    train(optimizer, range(3))
    set_grads(params(optimizer), 3)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert not any("resync" in event.key for event in profile.key_averages())
