"""`offload_fraction`: stepping part of the optimizer on the host changes no bit (D8)."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import host_parts
import pytest
import torch
from host_fraction import FRACTIONS, SHAPES, copy_in, everything, held, optimizer_of, params, train
from torch import Tensor, nn
from training import POLICIES, bits, params_of, policy_of, set_grads

import torch_ext

# -- the choice -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), float("inf"), "half", None, True])
def test_fraction_outside_of_0_to_1_is_refused(fraction: Any) -> None:
    with pytest.raises(ValueError, match=r"offload_fraction is .*\[0, 1\] is legal"):
        optimizer_of("bf16", fraction)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_share_is_of_the_bytes_of_states_and_masters(fraction: float) -> None:
    shapes = [(1000,)] * 40 + [(20000,)]
    optimizer = optimizer_of("bf16", fraction, shapes)
    train(optimizer, range(2))
    there = sum(t.nbytes for state in held(optimizer).values() for key, t in state.items() if key != "step")
    of_moments = 8 * sum(p.numel() for p in params(optimizer))
    checksums = sum(state["checksum"].nbytes for state in held(optimizer).values() if "checksum" in state)
    assert abs(there - checksums - fraction * of_moments) <= 8000 / 2
    for p in params(optimizer):
        assert set(optimizer.state[p]) == {"step"} if p in held(optimizer) else "exp_avg" in optimizer.state[p]


# -- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prompt", "late"])
@pytest.mark.parametrize("name", POLICIES)
def test_bits_equal_those_of_an_optimizer_without_a_host_part(name: str, kind: str) -> None:
    reference = optimizer_of(name, 0.0)
    train(reference, range(6))
    for fraction in FRACTIONS[1:]:
        with host_parts.copying(kind):
            optimizer = optimizer_of(name, fraction)
            train(optimizer, range(6))
        assert len(held(optimizer)) >= 2
        assert everything(optimizer) == everything(reference)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda t: t.view(4, 6, 30, 20).contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.view(120, 120).t(),
    "not dense": lambda t: t.view(120, 120)[:, :77],
    "reversed dimensions, odd": lambda t: t[:9009].view(9, 11, 91).permute(2, 0, 1),
}


@pytest.mark.parametrize("gradient", ["like the weight", "contiguous"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_remainder", "8bit"])
def test_bits_of_weights_in_other_memory_orders(name: str, layout: str, gradient: str) -> None:
    def trained(fraction: float) -> torch_ext.AdamW:
        values = torch.randn(14400, generator=torch.Generator().manual_seed(3)).to(POLICIES[name][0])
        weights = [nn.Parameter(LAYOUTS[layout](values)), nn.Parameter(values[:300].clone())]
        optimizer = torch_ext.AdamW(weights, lr=1e-2, policy=policy_of(name), offload_fraction=fraction)
        for step in range(3):
            set_grads(weights, step)
            for p in weights:
                if gradient == "like the weight":
                    p.grad = torch.empty_like(p).copy_(p.grad)
            optimizer.step()
        return optimizer

    reference = everything(trained(0.0))
    for kind in ("prompt", "late"):
        with host_parts.copying(kind):
            assert everything(trained(1.0)) == reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_gradients_in_other_dtypes_that_change(dtype: torch.dtype) -> None:
    found = []
    for fraction in FRACTIONS:
        with host_parts.copying("late"):
            optimizer = optimizer_of("fp32" if dtype != torch.float16 else "fp16", fraction)
            train(optimizer, range(2))
            for step in range(2, 5):
                set_grads(params(optimizer), step)
                for p in params(optimizer)[:: 1 + step % 2]:
                    p.grad = None
                    p.grad_dtype = None
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
                optimizer.step()
            found.append(everything(optimizer))
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_remainder", "8bit"])
def test_D8_a_parameter_without_a_gradient_is_left_alone(name: str) -> None:
    def trained(fraction: float) -> torch_ext.AdamW:
        optimizer = optimizer_of(name, fraction)
        for step in range(7):
            set_grads(params(optimizer), step)
            for p in params(optimizer)[step % 3 :: 3]:
                p.grad = None
            before = {p: bits(p) for p in params(optimizer) if p.grad is None}
            optimizer.step()
            assert all(bits(p) == was for p, was in before.items())
        return optimizer

    reference = everything(trained(0.0))
    for fraction in FRACTIONS[1:]:
        with host_parts.copying("late"):
            assert everything(trained(fraction)) == reference


def test_lr_as_a_tensor_and_groups_of_their_own() -> None:
    found = []
    for fraction in FRACTIONS:
        ours = params_of("bf16", SHAPES)
        groups = [{"params": ours[:4], "lr": torch.tensor(1e-2)}, {"params": ours[4:], "weight_decay": 0.3}]
        optimizer = torch_ext.AdamW(groups, lr=3e-3, policy=policy_of("bf16"), offload_fraction=fraction)
        for step in range(4):
            optimizer.param_groups[0]["lr"].mul_(0.9)
            optimizer.param_groups[1]["lr"] *= 0.8
            set_grads(ours, step)
            optimizer.step()
        found.append(everything(optimizer))
    assert found[1] == found[0] and found[2] == found[0]


# -- values that change between steps: each call on the host must use the current ones ---------------------------------


def lr_changes(optimizer: torch_ext.AdamW, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)


def lr_is_a_tensor_now_and_then(optimizer: torch_ext.AdamW, step: int) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2 / (1 + step)) if step % 2 else 1e-3


def betas_change(optimizer: torch_ext.AdamW, step: int) -> None:
    optimizer.param_groups[0]["betas"] = (0.9 - 0.1 * step, 0.99)


def seed_changes(optimizer: torch_ext.AdamW, step: int) -> None:
    optimizer.param_groups[0]["seed"] = step


def clipped_now_and_then(optimizer: torch_ext.AdamW, step: int) -> None:
    if step % 2:
        torch_ext.clip_grad_norm_(optimizer, 0.5)


def scaled_now_and_then(optimizer: torch_ext.AdamW, step: int) -> None:
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    if step % 2:
        optimizer.grad_scale, optimizer.found_inf = torch.full((), 8.0), torch.zeros(())


def writes_are_ignored_now_and_then(optimizer: torch_ext.AdamW, step: int) -> None:
    optimizer.on_external_write = "ignore" if step % 2 else "resync"
    for p in params(optimizer):
        if p.numel():
            p.data.view(-1)[0] += 1.0  # no version counter changes


@pytest.mark.parametrize(
    "change",
    [
        lr_changes,
        lr_is_a_tensor_now_and_then,
        betas_change,
        seed_changes,
        clipped_now_and_then,
        scaled_now_and_then,
        writes_are_ignored_now_and_then,
    ],
)
@pytest.mark.parametrize("name", ["bf16_remainder", "8bit"])
def test_what_changes_between_steps(name: str, change: Callable[[torch_ext.AdamW, int], None]) -> None:
    found = []
    for fraction in FRACTIONS:
        with host_parts.copying("prompt"):
            optimizer = optimizer_of(name, fraction)
            for step in range(6):
                set_grads(params(optimizer), step)
                change(optimizer, step)
                optimizer.step()
            found.append(everything(optimizer))
    assert found[1] == found[0] and found[2] == found[0]


# -- clipping, loss scales, skipped steps, errors ----------------------------------------------------------------------


def clipped(optimizer: torch_ext.AdamW, step: int) -> None:
    set_grads(params(optimizer), step)
    torch_ext.clip_grad_norm_(optimizer, 0.5)
    optimizer.step()


def scaled(optimizer: torch_ext.AdamW, step: int) -> None:
    set_grads(params(optimizer), step)
    optimizer.grad_scale = torch.full((), 8.0)
    optimizer.found_inf = torch.full((), float(step % 3 == 1))
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def nonfinite(optimizer: torch_ext.AdamW, step: int) -> None:
    set_grads(params(optimizer), step)
    if step % 2:
        params(optimizer)[step % 3].grad.view(-1)[0] = torch.inf
        with pytest.warns(RuntimeWarning, match=f"the gradient of parameter {step % 3} of group 0 is not finite"):
            optimizer.step()
    else:
        optimizer.step()


@pytest.mark.parametrize("how", [clipped, scaled, nonfinite])
@pytest.mark.parametrize("name", ["bf16", "8bit"])
def test_clipping_scales_and_skipped_steps(name: str, how: Callable[[torch_ext.AdamW, int], None]) -> None:
    found = []
    for fraction in FRACTIONS:
        with host_parts.copying("late"):
            # So that with fraction 1 the device has nothing to step.
            shapes = [shape for shape in SHAPES if shape != (0,)]
            optimizer = optimizer_of(name, fraction, shapes, skip_nonfinite=how is nonfinite)
            for step in range(6):
                how(optimizer, step)
            found.append((everything(optimizer), optimizer.skipped_steps()))
    assert found[1] == found[0] and found[2] == found[0]
    assert found[0][1] == {clipped: 0, scaled: 2, nonfinite: 3}[how]


def sparse(p: Tensor) -> Tensor:
    return torch.zeros_like(p).to_sparse()


def integral(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=torch.float64)


@pytest.mark.parametrize(("bad", "says"), [(sparse, "is sparse"), (integral, "float64")])
def test_gradient_that_no_step_takes_is_named_and_changes_nothing(bad: Any, says: str) -> None:
    with host_parts.copying("late"):
        optimizer = optimizer_of("fp32", 0.5)
        train(optimizer, range(2))
        before = everything(optimizer)
        chosen = next(i for i, p in enumerate(params(optimizer)) if p in held(optimizer))
        set_grads(params(optimizer), 2)
        p = params(optimizer)[chosen]
        p.grad = None
        p.grad_dtype = None
        p.grad = bad(p)
        with pytest.raises(RuntimeError, match=f"gradient of parameter {chosen} of group 0 .*{says}"):
            optimizer.step()
        assert everything(optimizer) == before
        set_grads(params(optimizer), 2)
        optimizer.step()
        reference = optimizer_of("fp32", 0.0)
        train(reference, range(3))
        assert everything(optimizer) == everything(reference)


@pytest.mark.parametrize("kind", ["prompt", "late"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_what_the_library_refuses_is_named_and_changes_nothing(fraction: float, kind: str) -> None:
    """The device's part, which is stepped first, must not change either."""
    shapes = [shape for shape in SHAPES if shape != (0,)]
    with host_parts.copying(kind):
        optimizer = optimizer_of("bf16", fraction, shapes)
        train(optimizer, range(2))
        here = [i for i, p in enumerate(params(optimizer)) if p in held(optimizer)]
        assert (len(here) == len(shapes)) == (fraction == 1.0)
        step = held(optimizer)[params(optimizer)[here[-1]]]["step"]
        step.fill_(0.5)
        before = everything(optimizer)
        set_grads(params(optimizer), 2)
        named = rf"steps\[{len(here) - 1}\] is 0.5; .* parameter {here[-1]} of group 0\) \(in the step on the host"
        with pytest.raises(RuntimeError, match=named):
            optimizer.step()
        assert everything(optimizer) == before
        step.fill_(2)
        optimizer.step()
        reference = optimizer_of("bf16", 0.0, shapes)
        train(reference, range(3))
        assert everything(optimizer) == everything(reference)


def test_lr_that_no_step_takes_changes_nothing() -> None:
    """The host can read an lr in a tensor only after it was copied."""
    with host_parts.copying("late"):
        optimizer = optimizer_of("bf16", 0.5, lr=torch.tensor(1e-2))
        train(optimizer, range(2))
        before = everything(optimizer)
        optimizer.param_groups[0]["lr"].fill_(float("nan"))
        set_grads(params(optimizer), 2)
        with pytest.raises(RuntimeError, match=r"groups\[0\]: lr is nan"):
            optimizer.step()
        assert everything(optimizer) == before


@pytest.mark.parametrize("name", ["bf16", "8bit"])
def test_states_that_moved_are_stepped_where_they_are(name: str) -> None:
    """`.data =` gave the host's states new memory; a step must use the new memory."""
    reference = optimizer_of(name, 0.0)
    train(reference, range(4))
    with host_parts.copying("prompt"):
        optimizer = optimizer_of(name, 1.0)
        train(optimizer, range(2))
        for state in held(optimizer).values():
            for t in state.values():
                t.data = t.detach().clone()
        train(optimizer, range(2, 4))
    assert everything(optimizer) == everything(reference)


def test_buffers_are_made_once() -> None:
    with host_parts.copying("prompt") as made:
        optimizer = optimizer_of("8bit", 1.0)
        train(optimizer, range(2))
        first = len(made)
        assert 0 < first <= 8, "and none for each parameter"
        most = 4 * host_parts.NUMEL * torch.get_num_threads() + 5000
        assert sum(made) < most, "a batch for each thread, however large the model"
        for step in range(2, 12):
            set_grads(params(optimizer), step)
            params(optimizer)[step % 5].grad = None  # so that the plan is rebuilt
            optimizer.step()
        assert len(made) == first


# -- checkpoints, copies, groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_D4_a_checkpoint_moves_between_fractions_bit_for_bit(name: str) -> None:
    straight = optimizer_of(name, 0.0)
    train(straight, range(8))
    for first in FRACTIONS:
        for second in FRACTIONS:
            optimizer = optimizer_of(name, first)
            train(optimizer, range(4))
            file = io.BytesIO()
            torch.save({"optimizer": optimizer.state_dict(), "weights": params(optimizer)}, file)
            resumed = optimizer_of(name, second)
            train(resumed, range(50, 52))
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            resumed.load_state_dict(saved["optimizer"])
            copy_in(resumed, saved["weights"])
            train(resumed, range(4, 8))
            assert everything(resumed) == everything(straight)


def test_a_checkpoint_without_states_leaves_none() -> None:
    found = []
    for fraction in FRACTIONS:
        optimizer = optimizer_of("bf16", fraction)
        empty = {**copy.deepcopy(optimizer.state_dict()), "state": {}}
        train(optimizer, range(3))
        optimizer.load_state_dict(empty)
        assert not held(optimizer)
        train(optimizer, range(3, 5))
        found.append(everything(optimizer))
    assert found[1] == found[0] and found[2] == found[0]


def test_checkpoints_of_torch_are_loaded() -> None:
    theirs = torch.optim.AdamW(params_of("fp32", SHAPES), lr=1e-2)
    for step in range(3):
        set_grads(theirs.param_groups[0]["params"], step)
        theirs.step()
    found = []
    for fraction in FRACTIONS:
        optimizer = optimizer_of("fp32", fraction)
        copy_in(optimizer, theirs.param_groups[0]["params"])
        optimizer.load_state_dict(theirs.state_dict())
        train(optimizer, range(3, 5))
        found.append(everything(optimizer))
    assert found[1] == found[0] and found[2] == found[0]


def pickled(optimizer: torch_ext.AdamW) -> torch_ext.AdamW:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", ["bf16", "8bit"])
def test_copies_of_an_optimizer_have_a_host_part_of_their_own(name: str, how: Any) -> None:
    optimizer, reference = optimizer_of(name, 0.5), optimizer_of(name, 0.0)
    for one in (optimizer, reference):
        train(one, range(3))
    other = how(optimizer)
    assert len(held(other)) == len(held(optimizer))
    train(optimizer, range(3, 5))
    before = everything(optimizer)
    train(other, range(3, 5))
    train(reference, range(3, 5))
    assert everything(other) == everything(reference) == before == everything(optimizer)


def test_groups_added_later_change_the_choice_and_no_bit() -> None:
    found = []
    for fraction in FRACTIONS:
        optimizer = optimizer_of("bf16", fraction, [(1000,), (900,)])
        train(optimizer, range(3))
        before = set(held(optimizer))
        optimizer.add_param_group({"params": params_of("bf16", [(1900,)], seed=4)})
        train(optimizer, range(3, 6))
        if fraction == 0.5:
            first, second, third = params(optimizer)
            assert before == {second} and set(held(optimizer)) == {third}, "what no longer belongs there moved away"
            assert "exp_avg" in optimizer.state[second]
        found.append(everything(optimizer))
    assert found[1] == found[0] and found[2] == found[0]


def test_state_of_a_parameter_that_left_is_dropped() -> None:
    optimizer = optimizer_of("bf16", 1.0)
    train(optimizer, range(2))
    gone = optimizer.param_groups[0]["params"].pop(0)
    assert gone in held(optimizer)
    train(optimizer, range(2, 3))
    assert gone not in held(optimizer) and gone not in optimizer.state


def test_E11_asking_for_state_moves_nothing() -> None:
    """state_dict() before the first step creates the state and changes no weight."""
    optimizer, reference = optimizer_of("bf16", 0.5), optimizer_of("bf16", 0.0)
    weights = [bits(p) for p in params(optimizer)]
    state = optimizer.state_dict()
    assert [bits(p) for p in params(optimizer)] == weights
    assert all(float(entry["step"]) == 0 for entry in state["state"].values())
    for one in (optimizer, reference):
        train(one, range(2))
    assert everything(optimizer) == everything(reference)
