"""`offload_fraction`: external writes to weights whose masters are on the host (D1-D3, D5-D7)."""

from collections.abc import Callable
from typing import Any

import host_parts
import pytest
import torch
from host_fraction import FRACTIONS, SHAPES, copy_in, everything, held, optimizer_of, params, train
from torch import Tensor, nn
from training import WITH_MASTER, OperatorCalls, bits, params_of, policy_of, set_grads

import torch_ext

SAMPLED = 4096  # weights of up to this many elements are compared as a whole, even where others are sampled


def constant(optimizer: torch_ext.AdamW) -> list[Tensor]:
    return [torch.full_like(p, 0.37 + i) for i, p in enumerate(params(optimizer))]


def load_module(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    nn.ParameterList(params(optimizer)).load_state_dict({str(i): weight for i, weight in enumerate(weights)})


def set_data(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    for p, weight in zip(params(optimizer), weights, strict=True):
        p.data = weight.clone()


def data_copy(optimizer: torch_ext.AdamW, weights: list[Tensor]) -> None:
    for p, weight in zip(params(optimizer), weights, strict=True):
        p.data.copy_(weight)


WRITES = [copy_in, load_module, set_data, data_copy]


def zero_step(optimizer: torch_ext.AdamW) -> None:
    for p in params(optimizer):
        p.grad = torch.zeros_like(p)
    optimizer.step()


BEFORE: dict[str, Callable[[torch_ext.AdamW], Any]] = {
    "made": lambda optimizer: None,
    "asked for its state": lambda optimizer: optimizer.state_dict(),
    "took steps": lambda optimizer: train(optimizer, range(3)),
}


def mixed(name: str) -> list[nn.Parameter]:
    """Returns parameters of the policy's dtype, with fp32 parameters in between."""
    ours, native = params_of(name, SHAPES), params_of("fp32", SHAPES, seed=9)
    return [p for pair in zip(ours, native, strict=True) for p in pair]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_D1_D2_D3_weights_loaded_behind_the_optimizer_take_effect(
    fraction: float, before: str, write: Callable[..., None]
) -> None:
    for name in WITH_MASTER:
        for kind in ("prompt", "late"):
            with host_parts.copying(kind):
                # A step without gradients moves no weight.
                options: dict[str, Any] = {"betas": (0.0, 0.999), "weight_decay": 0.0}
                optimizer = torch_ext.AdamW(
                    mixed(name), lr=1e-2, policy=policy_of(name), offload_fraction=fraction, **options
                )
                BEFORE[before](optimizer)
                weights = constant(optimizer)
                write(optimizer, weights)
                for _ in range(3):  # a stale master might overwrite the weight only in the second step
                    zero_step(optimizer)
                    assert [bits(p) for p in params(optimizer)] == [bits(w) for w in weights]
                state = optimizer.state_dict()["state"]
                for i, weight in enumerate(weights):
                    if "master_param" in state[i]:
                        # If the master already rounds to the written weight, the write cannot be noticed.
                        master = state[i]["master_param"].to(weight.dtype if before == "took steps" else torch.float32)
                        assert bits(master) == bits(weight.to(master.dtype))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_remainder", "no master"])
def test_D7_training_goes_on_from_what_was_written(name: str, fraction: float) -> None:
    """The bits are those of an optimizer without a host part."""
    found = []
    for of in (0.0, fraction):
        with host_parts.copying("late"):
            optimizer = optimizer_of(name, of)
            train(optimizer, range(3))
            copy_in(optimizer, constant(optimizer))
            train(optimizer, range(3, 5))
            data_copy(optimizer, [w * 0.5 for w in constant(optimizer)])
            train(optimizer, range(5, 7))
            found.append(everything(optimizer))
    assert found[0] == found[1]


@torch.no_grad()
def one_element(optimizer: torch_ext.AdamW) -> None:
    """Writes one element that is not a sample; the version counter changes."""
    for p in params(optimizer):
        if p.numel() > 8192:
            p.view(-1)[1000] += 3


@torch.no_grad()
def one_element_elsewhere(optimizer: torch_ext.AdamW) -> None:
    """Writes one element that is not a sample, in new memory."""
    for p in params(optimizer):
        if p.numel() > 8192:
            weight = p.detach().clone()
            weight.view(-1)[1000] += 3
            p.data = weight


@pytest.mark.parametrize("kind", ["prompt", "late"])
@pytest.mark.parametrize("write", [one_element, one_element_elsewhere])
def test_D7_counters_and_addresses_tell_of_what_no_sample_sees(write: Callable[..., None], kind: str) -> None:
    found = []
    for fraction in FRACTIONS:
        with host_parts.copying(kind):
            optimizer = optimizer_of("bf16", fraction)
            train(optimizer, range(3))
            write(optimizer)
            train(optimizer, range(3, 5))
            found.append(everything(optimizer))
    assert found[1] == found[0] and found[2] == found[0]
    undisturbed = optimizer_of("bf16", 0.0)
    train(undisturbed, range(5))
    assert found[0] != everything(undisturbed)


@pytest.mark.parametrize("on_external_write", ["resync", "error"])
@pytest.mark.parametrize("kind", ["prompt", "late"])
def test_D7_where_nobody_wrote_no_fp32_master_is_compared_as_a_whole(kind: str, on_external_write: str) -> None:
    """One comparison per step is allowed: where copies take time, the samples of weights whose masters are on the host.
    Long weights are sampled, not compared whole."""
    for name in WITH_MASTER:
        for fraction in FRACTIONS:
            with host_parts.copying(kind):
                optimizer = optimizer_of(name, fraction, on_external_write=on_external_write)
                train(optimizer, range(2))
                optimizer.state_dict()
                whole = {p.numel() for p in params(optimizer) if p.numel() > SAMPLED}
                for step in range(2, 5):
                    with OperatorCalls() as made:
                        train(optimizer, [step])
                    compared = [args[0] for operator, args in made.calls if operator == "master_resync_"]
                    assert len(compared) <= (kind == "late" and fraction > 0), (name, fraction)
                    assert not whole & {t.numel() for weights in compared for t in weights}, (name, fraction)


@pytest.mark.parametrize("fraction", FRACTIONS[1:])
def test_D7_error_names_what_was_written_and_changes_nothing(fraction: float) -> None:
    with host_parts.copying("late"):
        optimizer = optimizer_of("bf16", fraction, on_external_write="error")
        train(optimizer, range(3))
        copy_in(optimizer, [p.detach().clone() for p in params(optimizer)])  # version counters change, values do not
        train(optimizer, range(3, 4))
        chosen = next(i for i, p in enumerate(params(optimizer)) if p in held(optimizer))
        params(optimizer)[chosen].data.fill_(3)
        before = everything(optimizer)
        set_grads(params(optimizer), 4)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"parameter {chosen} of group 0 \(.*resync_masters"):
                optimizer.step()
        assert everything(optimizer) == before
        assert optimizer.resync_masters() > 0
        optimizer.step()


@pytest.mark.parametrize("fraction", FRACTIONS[1:])
def test_ignore_lets_the_master_overwrite_the_weight(fraction: float) -> None:
    ignoring, plain = optimizer_of("bf16", fraction, on_external_write="ignore"), optimizer_of("bf16", 0.0)
    for optimizer in (ignoring, plain):
        train(optimizer, range(3))
    data_copy(ignoring, constant(ignoring))
    for optimizer in (ignoring, plain):
        train(optimizer, range(3, 4))
    assert everything(ignoring) == everything(plain)


@pytest.mark.parametrize("name", WITH_MASTER)
def test_D5_D6_resync_masters_sees_those_on_the_host(name: str) -> None:
    found = []
    for fraction in FRACTIONS:
        optimizer = optimizer_of(name, fraction)
        train(optimizer, range(3))
        data_copy(optimizer, constant(optimizer))
        changed = optimizer.resync_masters(force=True)
        assert optimizer.resync_masters() == 0
        found.append((changed, everything(optimizer)))
    assert found[0][0] > 0 and found[1] == found[0] and found[2] == found[0]


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_remainder"])
def test_masters_on_the_host_can_be_opened_and_read(name: str) -> None:
    found = []
    for fraction in FRACTIONS:
        optimizer = optimizer_of(name, fraction)
        train(optimizer, range(3))
        with optimizer.master_weights() as masters:
            for p in params(optimizer):
                p.mul_(1.001)
            seen = [bits(master) for master in masters.values()]
        train(optimizer, range(3, 5))
        read = [bits(torch.as_tensor(value)) for value in optimizer.master_state_dict().values()]
        found.append((seen, read, everything(optimizer)))
    assert found[1] == found[0] and found[2] == found[0]
