"""The norm of all gradients and clipping by it (docs/specification.md, G2)."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import POLICIES, everything, params_of, policy_of, set_grads, train

import torch_ext


def optimizer_of(name: str = "fp32", **options: object) -> torch_ext.AdamW:
    return torch_ext.AdamW(params_of(name), lr=1e-2, policy=policy_of(name), **options)


def params(optimizer: torch_ext.AdamW) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


@pytest.mark.parametrize("name", POLICIES)
def test_G2_norm_is_the_true_one(name: str) -> None:
    optimizer = optimizer_of(name)
    set_grads(params(optimizer), 0)
    before = [p.grad.clone() for p in params(optimizer)]
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in params(optimizer)))
    norm = torch_ext.clip_grad_norm_(optimizer, 0.5)
    assert norm.dtype == torch.float32
    assert norm.dim() == 0
    assert norm.item() == pytest.approx(exact, rel=1e-7)
    assert all(torch.equal(p.grad, g) for p, g in zip(params(optimizer), before, strict=True)), "only read"
    own = [nn.Parameter(p.detach().clone()) for p in params(optimizer)]
    for p, g in zip(own, before, strict=True):
        p.grad = g
    assert torch_ext.clip_grad_norm_(own, math.inf).item() == norm.item()


@pytest.mark.parametrize("share", [0.1, 1.0, 10.0], ids=["clipped", "at the edge", "not clipped"])
def test_G2_step_applies_the_coefficient(share: float) -> None:
    """Same result as torch, which scales gradients in place before the step. The coefficient is
    max_norm / (norm + 1e-6) where that is below 1."""
    ours, theirs = optimizer_of(), params_of("fp32")
    reference = torch_ext.AdamW(theirs, lr=1e-2)
    for step in range(3):
        for own in (params(ours), theirs):
            set_grads(own, step)
        max_norm = share * torch_ext.clip_grad_norm_(theirs, math.inf).item()
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        assert torch_ext.clip_grad_norm_(ours, max_norm).item() == pytest.approx(expected.item(), rel=1e-6)
        ours.step()
        reference.step()
    for p, q in zip(params(ours), theirs, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=2e-6)


def test_G2_in_place_as_torch_does() -> None:
    own, theirs = params_of("fp32"), params_of("fp32")
    for ps in (own, theirs):
        set_grads(ps, 0)
    theirs[0].grad = None
    own[0].grad = None
    norm = torch_ext.clip_grad_norm_(own, 0.01)
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 0.01).item(), rel=1e-6)
    for p, q in zip(own[1:], theirs[1:], strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-6)
    single = nn.Parameter(torch.ones(4))
    single.grad = torch.full((4,), 2.0)
    assert torch_ext.clip_grad_norm_(single, 1.0).item() == 4
    assert torch.linalg.vector_norm(single.grad).item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_remainder", "8bit", "no master"])
def test_G2_non_finite_norm_skips_the_step_and_says_so(name: str, bad: float) -> None:
    optimizer = optimizer_of(name)
    train(optimizer, range(2))
    before = everything(optimizer)
    set_grads(params(optimizer), 2)
    params(optimizer)[2].grad.view(-1)[5] = bad
    assert not math.isfinite(torch_ext.clip_grad_norm_(optimizer, 1.0).item())
    with pytest.warns(RuntimeWarning, match="parameter 2 of group 0 is not finite"):
        optimizer.step()
    assert everything(optimizer) == before, "the step counter included"
    assert optimizer.skipped_steps() == 1
    train(optimizer, range(2, 3))
    assert optimizer.skipped_steps() == 1


def test_G2_skip_nonfinite_looks_by_itself() -> None:
    """skip_nonfinite=True finds a NaN although nothing was clipped."""
    careful, plain = optimizer_of("bf16", skip_nonfinite=True), optimizer_of("bf16")
    for step in range(4):
        for optimizer in (careful, plain):
            set_grads(params(optimizer), step)
        if step == 2:
            params(careful)[0].grad.view(-1)[0] = math.nan
            with pytest.warns(RuntimeWarning, match="parameter 0"):
                careful.step()
        else:
            careful.step()
            plain.step()
    assert careful.skipped_steps() == 1
    assert everything(careful) == everything(plain)


def test_G2_error_if_nonfinite_leaves_everything() -> None:
    optimizer = optimizer_of()
    set_grads(params(optimizer), 0)
    params(optimizer)[0].grad.view(-1)[0] = math.inf
    with pytest.raises(RuntimeError, match="total norm"):
        torch_ext.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    before = [p.grad.clone() for p in params(optimizer)]
    with pytest.raises(RuntimeError, match="total norm"):
        torch_ext.clip_grad_norm_(params(optimizer), 1.0, error_if_nonfinite=True)
    assert all(torch.equal(p.grad, g) for p, g in zip(params(optimizer), before, strict=True))


def test_G2_in_place_a_non_finite_norm_spoils_all_gradients() -> None:
    own = params_of("fp32", [(4,), (4,)])
    set_grads(own, 0)
    own[0].grad[1] = math.inf
    torch_ext.clip_grad_norm_(own, 1.0)
    assert all(p.grad.isnan().all() for p in own)


# -- how long a coefficient lives ---------------------------------------------------------------------------------


def stepped(optimizer: torch_ext.AdamW, step: int = 9) -> list[dict[str, bytes]]:
    """Takes a step with new gradients and returns all weights and states."""
    set_grads(params(optimizer), step)
    optimizer.step()
    return everything(optimizer)


FORGETS = {
    "zero_grad": lambda o: o.zero_grad(),
    "zero_grad to zeros": lambda o: o.zero_grad(set_to_none=False),
    "the model's zero_grad": lambda o: nn.ParameterList(params(o)).zero_grad(),
    "new gradients": lambda o: set_grads(params(o), 1),
}


@pytest.mark.parametrize("what", FORGETS)
def test_pending_coefficient_dies(what: str) -> None:
    """A clip before the gradients are discarded must not scale those that come after it."""
    clipped, plain = optimizer_of(), optimizer_of()
    for optimizer in (clipped, plain):
        set_grads(params(optimizer), 0)
    torch_ext.clip_grad_norm_(clipped, 0.5)
    for optimizer in (clipped, plain):
        FORGETS[what](optimizer)
    assert stepped(clipped) == stepped(plain)


def test_zero_grad_to_zeros_and_another_backward_into_the_same_memory() -> None:
    clipped, plain = optimizer_of(), optimizer_of()
    for optimizer in (clipped, plain):
        set_grads(params(optimizer), 0)
    torch_ext.clip_grad_norm_(clipped, 0.5)
    for optimizer in (clipped, plain):
        optimizer.zero_grad(set_to_none=False)
        for p in params(optimizer):
            p.grad.add_(0.25)
        optimizer.step()
    assert everything(clipped) == everything(plain)


def test_coefficient_holds_for_the_same_gradients_only() -> None:
    """The coefficient applies to each step with the clipped gradients, as torch's in-place clip does, and to no
    others."""
    again, plain = optimizer_of(), optimizer_of()
    for optimizer in (again, plain):
        set_grads(params(optimizer), 0)
    torch_ext.clip_grad_norm_(again, 0.5)
    torch_ext.clip_grad_norm_(params(plain), 0.5)
    for _ in range(2):  # a second step on the same gradients is clipped too, as after torch's in-place clip
        again.step()
        plain.step()
    for p, q in zip(params(again), params(plain), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)
    params(again)[0].grad.mul_(2)
    again.step()  # mul_ changed the gradients in place: no coefficient is left for them, and no error


def written(p: Any) -> None:
    p.grad.add_(1)


def replaced(p: Any) -> None:
    """What code does that adds noise after a clip."""
    p.grad = p.grad + 0.25


def copied(p: Any) -> None:
    p.grad = copy.copy(p.grad)


@pytest.mark.parametrize("at", [0, 3, -1])
@pytest.mark.parametrize("how", [written, replaced, copied])
def test_gradients_written_between_clip_and_step_are_an_error(how: Callable[[Any], None], at: int) -> None:
    optimizer = optimizer_of()
    set_grads(params(optimizer), 0)
    torch_ext.clip_grad_norm_(optimizer, 0.5)
    how(params(optimizer)[at])
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="Clip last"):
        optimizer.step()
    assert everything(optimizer) == before
    optimizer.zero_grad()
    stepped(optimizer)


@pytest.mark.parametrize("dropped", [(0,), (3,), (0, 1, 2), (5, 7)])
def test_gradients_dropped_between_clip_and_step_leave_the_others_clipped(dropped: tuple[int, ...]) -> None:
    """As after torch's in-place clip, where the other gradients have been scaled already."""
    ours, theirs = optimizer_of(), optimizer_of()
    for optimizer in (ours, theirs):
        for step in range(3):
            set_grads(params(optimizer), step)
            torch_ext.clip_grad_norm_(optimizer if optimizer is ours else params(optimizer), 0.5 / (1 + step))
            for i in dropped:
                params(optimizer)[i].grad = None
            optimizer.step()
    for p, q in zip(params(ours), params(theirs), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)


BAD = {
    "max_norm 0": (dict(max_norm=0.0), ValueError, "max_norm"),
    "max_norm NaN": (dict(max_norm=math.nan), ValueError, "max_norm"),
    "norm_type": (dict(max_norm=1.0, norm_type=1.0), ValueError, "norm_type"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    arguments, error, named = BAD[case]
    with pytest.raises(error, match=named):
        torch_ext.clip_grad_norm_(optimizer_of(), **arguments)


def test_another_optimizer_is_told_to_pass_parameters() -> None:
    with pytest.raises(TypeError, match=r"SGD.*parameters"):
        torch_ext.clip_grad_norm_(torch.optim.SGD(params_of("fp32")), 1.0)


def test_nothing_to_clip() -> None:
    assert torch_ext.clip_grad_norm_(optimizer_of(), 1.0).item() == 0
    assert torch_ext.clip_grad_norm_([], 1.0).item() == 0


@pytest.mark.parametrize("layout", ["transposed", "expanded", "slice"])
def test_gradients_of_any_layout(layout: str) -> None:
    p = nn.Parameter(torch.zeros(6, 5))
    grads = {
        "transposed": torch.randn(5, 6).t(),
        "expanded": torch.randn(1, 5).expand(6, 5),
        "slice": torch.randn(6, 9)[:, 2:7],
    }
    p.grad = grads[layout]
    optimizer = torch_ext.AdamW([p])
    assert torch_ext.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(p.grad.norm().item(), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"policy": {"clip_grad": 1.0}}, {"skip_nonfinite": True}], ids=str)
def test_a_sparse_gradient_is_named_by_who_reads_it_first(options: dict[str, Any]) -> None:
    table, head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)
    model = nn.ModuleDict({"unused": nn.Linear(2, 2), "head": head, "table": table})
    optimizer = torch_ext.AdamW(model.named_parameters(), **options)
    head(table(torch.tensor([1]))).sum().backward()
    says = r"^the gradient of 'table.weight' is sparse \(torch.sparse_coo\): .* sparse=False"
    with pytest.raises(RuntimeError, match=says):
        torch_ext.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match=says):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"^gradient 2 is sparse"):  # an iterable of parameters has no names
        torch_ext.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
