"""torch_ext.Muon against torch.optim.Muon's formula in float64 and against torch.optim.Muon itself: arithmetic, which
matrices it steps, training loops."""

import copy
import math
import random
from typing import Any

import pytest
import torch
from muon_params import BF16, F32, STATES, Tied, bits, filled, matrices
from torch import Tensor, nn

import torch_ext

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(u: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Returns torch.optim.Muon's iteration, computed in float64."""
    a, b, c = coefficients
    x = u.double() / u.double().norm().clamp(min=eps)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(steps):
        g = x @ x.T
        x = a * x + (b * g + c * g @ g) @ x
    return x.T if u.shape[0] > u.shape[1] else x


class Oracle:
    """Muon for a list of matrices, in float64."""

    def __init__(self, params: list[Tensor], **options: Any) -> None:
        self.p, self.m = [p.detach().double().clone() for p in params], [torch.zeros(p.shape).double() for p in params]
        self.o = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": None} | options

    def step(self, grads: list[Tensor]) -> None:
        o = self.o
        for p, m, grad in zip(self.p, self.m, grads, strict=True):
            g = grad.double()
            m.mul_(o["momentum"]).add_(g, alpha=1 - o["momentum"])
            u = o["momentum"] * m + (1 - o["momentum"]) * g if o["nesterov"] else m
            rows, columns = p.shape
            ratio = math.sqrt(max(1, rows / columns))
            if o["adjust_lr_fn"] == "match_rms_adamw":
                ratio = 0.2 * math.sqrt(max(rows, columns))
            x = orthogonalised(u, o.get("ns_coefficients", COEFFICIENTS), o.get("ns_steps", 5), o.get("eps", 1e-7))
            p.mul_(1 - o["lr"] * o["weight_decay"]).sub_(o["lr"] * ratio * x)


# -- the formula ------------------------------------------------------------------------------------------------------


def program(seed: int) -> dict[str, Any]:
    """Returns random hyper-parameters and shapes."""
    r = random.Random(seed)
    return {
        "lr": 10 ** r.uniform(-3, -1),
        "weight_decay": r.choice([0.0, 0.1]),
        "momentum": r.choice([0.0, 0.4, 0.9, 0.95]),
        "nesterov": r.random() < 0.7,
        "ns_steps": r.randint(1, 7),
        "eps": r.choice([1e-7, 1e-3]),
        "adjust_lr_fn": r.choice([None, "original", "match_rms_adamw"]),
        "ns": r.choice(["standard", "gram", "auto"]),
        "shapes": [(r.randint(1, 70), r.randint(1, 70)) for _ in range(r.randint(1, 4))],
    }


@pytest.mark.parametrize("seed", range(16))
def test_fp32_follows_the_formula_in_float64(seed: int) -> None:
    options = program(seed)
    params = matrices(options.pop("shapes"), seed=seed)
    of_ours = {key: options[key] for key in options if key != "ns"}
    oracle, ours = Oracle(params, **of_ours), torch_ext.Muon(params, **options, ns_dtype=F32)
    before = copy.deepcopy(oracle.p)
    for step in range(4):
        oracle.step(filled(params, 100 * seed + step))
        ours.step()
    for p, want, old in zip(params, oracle.p, before, strict=True):
        assert float((p.detach() - want).norm() / (want - old).norm()) < 1e-3, options


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_farther_from_the_formula_than_torchs(dtype: torch.dtype) -> None:
    """Our products are in bf16 here, as torch's always are."""
    shapes = [(48, 48), (96, 32), (32, 96)]
    ours_p, theirs_p = matrices(shapes, dtype), matrices(shapes, dtype)
    ours = torch_ext.Muon(ours_p, lr=0.02, ns_dtype=BF16)
    theirs = torch.optim.Muon(theirs_p, lr=0.02)
    oracle = Oracle(ours_p, lr=0.02)
    for step in range(8):
        oracle.step(filled(ours_p, step))
        filled(theirs_p, step)
        ours.step()
        theirs.step()
    masters = ours.master_state_dict()
    for i, (want, their) in enumerate(zip(oracle.p, theirs_p, strict=True)):
        error, theirs_error = float((masters[i] - want).norm()), float((their.detach() - want).norm())
        assert error < 1.1 * theirs_error
        assert error < 0.02 * float(want.norm())


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("seed", range(2))
def test_every_state_follows_the_direction(states: Any, seed: int) -> None:
    params = matrices([(64, 48), (40, 130)], BF16, seed)
    ours, oracle = torch_ext.Muon(params, lr=0.01, states=states, ns_dtype=F32, seed=seed), Oracle(params, lr=0.01)
    before = copy.deepcopy(oracle.p)
    for step in range(12):
        oracle.step(filled(params, 1000 * seed + step))
        ours.step()
    for i, (want, old) in enumerate(zip(oracle.p, before, strict=True)):
        moved, wanted = ours.master_state_dict()[i] - old, want - old
        assert float((moved - wanted).norm() / wanted.norm()) < (0.1 if states == "8bit" else 0.02)
    stored = ours.state[params[0]]
    assert stored["momentum_buffer"].dtype == {"fp32": F32, "8bit": torch.uint8}.get(states, BF16)


@pytest.mark.parametrize("ns_dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(16, 16), (24, 96), (130, 33), (1, 7), (7, 1)])
def test_gram_and_standard_are_one_function(shape: tuple[int, int], ns_dtype: torch.dtype) -> None:
    found = []
    for ns in ("standard", "gram", "auto"):
        params = matrices([shape])
        optimizer = torch_ext.Muon(params, lr=1.0, weight_decay=0.0, ns=ns, ns_dtype=ns_dtype)
        before = params[0].detach().clone()
        filled(params, 1)
        optimizer.step()
        found.append((before - params[0]).double())
    want = orthogonalised(params[0].grad, COEFFICIENTS, 5, 1e-7) * math.sqrt(max(1, shape[0] / shape[1]))  # type: ignore[arg-type]
    for moved in found:
        assert float((moved.detach() - want.detach()).norm() / want.norm().detach()) < (
            1e-4 if ns_dtype is F32 else 0.05
        )


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18])
def test_gradients_of_any_size(scale: float) -> None:
    """The squares of these gradients would overflow or underflow fp32."""
    params = matrices([(20, 30)])
    optimizer = torch_ext.Muon(params, lr=1.0, weight_decay=0.0, eps=0.0, ns_dtype=F32)
    before = params[0].detach().clone()
    (grad,) = filled(params, 1)
    want = orthogonalised(grad, COEFFICIENTS, 5, 0.0)
    grad.mul_(scale)
    optimizer.step()
    moved = (before - params[0]).double()
    assert float((moved - want).norm().detach() / want.norm()) < 1e-4


def test_a_zero_gradient_only_decays() -> None:
    params = matrices([(20, 30)])
    before = params[0].detach().clone()
    params[0].grad = torch.zeros(20, 30)
    torch_ext.Muon(params, lr=0.5, ns_dtype=F32).step()
    torch.testing.assert_close(params[0].detach(), before * 0.95)


# -- which matrices ---------------------------------------------------------------------------------------------------


def test_stacks_splits_and_convolutions_are_their_matrices() -> None:
    """The bits are those of a separate parameter for each matrix."""
    whole = [(3, 24, 16), (36, 20), (12, 8, 3, 3), (2, 30, 12)]
    parts = [(24, 16)] * 3 + [(12, 20)] * 3 + [(12, 72)] + [(20, 12), (10, 12)] * 2
    together, apart = matrices(whole), matrices(parts)
    flat = torch.cat([p.detach().view(-1) for p in together])
    with torch.no_grad():
        for p, values in zip(apart, flat.split([p.numel() for p in apart]), strict=True):
            p.copy_(values.view(p.shape))
    names = ["experts", "qkv", "conv", "gate_up"]
    ours = torch_ext.Muon(
        zip(names, together, strict=True), lr=0.1, split={"qkv": 3, "gate*": (20, 10)}, ns="auto", ns_dtype=F32
    )
    theirs = torch_ext.Muon(apart, lr=0.1, ns="auto", ns_dtype=F32)
    for step in range(3):
        grads = torch.cat([g.view(-1) for g in filled(together, step)])
        for p, values in zip(apart, grads.split([p.numel() for p in apart]), strict=True):
            p.grad = values.view(p.shape).clone()
        ours.step()
        theirs.step()
    got, want = (torch.cat([p.detach().view(-1) for p in params]) for params in (together, apart))
    assert torch.equal(got, want)


def test_channels_last_convolutions() -> None:
    plain, last = matrices([(12, 8, 3, 3)]), matrices([(12, 8, 3, 3)])
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    for params in (plain, last):
        optimizer = torch_ext.Muon(params, lr=0.1, ns_dtype=F32)
        filled(params, 3)
        optimizer.step()
    torch.testing.assert_close(plain[0], last[0], rtol=1e-5, atol=1e-6)


def of_muon(optimizer: torch_ext.Muon) -> set[str]:
    """Returns the names of the parameters that Muon steps as matrices."""
    optimizer.state_dict()
    return {
        name
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
        if "momentum_buffer" in optimizer.state[p]
    }


def test_embeddings_and_heads_are_adamws() -> None:
    assert of_muon(torch_ext.Muon(Tied())) == {"body.weight", "conv.weight"}
    assert of_muon(torch_ext.Muon(Tied(tied=False))) == {"body.weight", "conv.weight"}
    named = Tied(tied=False)
    assert of_muon(torch_ext.Muon(named.named_parameters(), adamw_params="head")) == {"body.weight", "conv.weight"}
    assert of_muon(torch_ext.Muon(named.named_parameters())) == {"body.weight", "conv.weight", "head.weight"}


def test_the_rest_is_adamws_bit_for_bit() -> None:
    torch.manual_seed(0)
    model, alone = Tied(), Tied()
    alone.load_state_dict(model.state_dict())
    mixed = torch_ext.Muon(model, lr=0.02, weight_decay=0.3, ns_dtype=F32, adamw={"lr": 1e-3, "betas": (0.8, 0.9)})
    of_adamw = {name: p for name, p in alone.named_parameters() if name not in ("body.weight", "conv.weight")}
    adamw = torch_ext.AdamW(of_adamw.items(), lr=1e-3, weight_decay=0.3, betas=(0.8, 0.9))
    for step in range(3):
        for group in (*mixed.param_groups, *adamw.param_groups):
            group["lr"] *= 0.5  # like a scheduler
        filled(list(model.parameters()), step)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        mixed.step()
        adamw.step()
    for name, q in of_adamw.items():
        assert torch.equal(dict(model.named_parameters())[name], q), name


def test_groups_choose_and_keep_their_order() -> None:
    a, b, c, d = matrices([(8, 8), (8,), (8, 6), (8, 4)])
    optimizer = torch_ext.Muon(
        [
            {"params": [a, b], "lr": 0.5},
            {"params": [c], "algorithm": "adamw", "lr": 1e-3, "betas": (0.7, 0.8), "eps": 1e-5},
            {"params": [d], "algorithm": "muon"},
        ],
        ns_dtype=F32,
    )
    saved = optimizer.state_dict()
    assert [g["params"] for g in saved["param_groups"]] == [[0, 1], [2], [3]]
    assert [sorted(saved["state"][i]) for i in range(4)] == [
        ["momentum_buffer", "step"],
        ["exp_avg", "exp_avg_sq", "step"],
        ["exp_avg", "exp_avg_sq", "step"],
        ["momentum_buffer", "step"],
    ]
    rows = optimizer.adamw_groups
    assert (rows[1]["lr"], rows[1]["betas"], rows[1]["eps"]) == (1e-3, (0.7, 0.8), 1e-5)
    assert (rows[0]["lr"], rows[0]["eps"]) == (0.5, 1e-8)
    assert list(optimizer.master_state_dict()) == [0, 1, 2, 3]


def test_what_a_group_says_of_itself_comes_before_the_arguments() -> None:
    """A group's own options override the constructor's: each group's parameters have the bits of a separate optimizer
    with those options."""
    shapes: list[Any] = [(48, 16), (48, 16), (16, 8), (8,)]
    together, apart = matrices(shapes), matrices(shapes)
    of_adamw = {"lr": 1e-3, "weight_decay": 0.0}
    optimizer = torch_ext.Muon(
        [
            {"params": together[:1], "ns_dtype": BF16, "weight_decay": 0.3},
            {"params": together[1:2], "ns_dtype": "float32", "ns": "standard"},
            {"params": together[2:], "algorithm": "adamw", **of_adamw},
        ],
        lr=0.02,
        adamw={"weight_decay": 0.5, "betas": (0.8, 0.9)},
    )
    others = [
        torch_ext.Muon(apart[:1], lr=0.02, ns_dtype=BF16, weight_decay=0.3),
        torch_ext.Muon(apart[1:2], lr=0.02, ns_dtype=F32, ns="standard"),
        torch_ext.AdamW(apart[2:], betas=(0.8, 0.9), **of_adamw),
    ]
    for step in range(3):
        filled(together, step)
        for p, q in zip(together, apart, strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        for other in others:
            other.step()
    assert bits(together) == bits(apart)


def test_groups_may_be_changed_between_steps_by_torchs_keys() -> None:
    """betas of any group, and all keys of an AdamW group, take effect as in torch.optim.AdamW."""
    a, b, c = matrices([(8, 8), (8,), (8, 6)])
    optimizer = torch_ext.Muon(
        [{"params": [a, b]}, {"params": [c], "algorithm": "adamw", "lr": 1e-3}],
        ns_dtype=F32,
        adamw={"betas": (0.7, 0.8), "eps": 1e-5},
    )
    assert [(g["betas"], g["eps"]) for g in optimizer.adamw_groups] == [((0.7, 0.8), 1e-5)] * 2
    copied = nn.Parameter(c.detach().clone())
    adamw = torch.optim.AdamW([copied], lr=1e-3, betas=(0.7, 0.8), eps=1e-5, weight_decay=0.1, foreach=False)
    changes: list[dict[str, Any]] = [{}, {"betas": (0.5, 0.6)}, {"eps": 0.1}, {"lr": 0.01, "weight_decay": 0.5}, {}]
    for step, change in enumerate(changes):
        filled([a, b, c], step)
        copied.grad = c.grad.clone()
        optimizer.param_groups[1].update(change)
        adamw.param_groups[0].update(change)
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        adamw.step()
        assert torch.allclose(c, copied, rtol=0, atol=1e-6), step


@pytest.mark.parametrize(("before", "after"), [(None, "adamw"), ("adamw", "muon"), (None, "muon")])
def test_an_algorithm_that_is_changed_between_steps_is_refused(before: Any, after: Any) -> None:
    params = matrices([(8, 8), (8,)])
    optimizer = torch_ext.Muon([{"params": params, "algorithm": before}], ns_dtype=F32)
    filled(params, 0)
    optimizer.step()
    now = bits(params)
    optimizer.param_groups[0]["algorithm"] = after
    with pytest.raises(ValueError, match=f"group 0: algorithm was changed to '{after}', but parameters keep"):
        optimizer.step()
    assert bits(params) == now
    optimizer.param_groups[0]["algorithm"] = before
    optimizer.step()


# -- in a loop --------------------------------------------------------------------------------------------------------


def test_clipping_reaches_the_momentum() -> None:
    one, two = matrices([(16, 12), (7,)]), matrices([(16, 12), (7,)])
    a, b = torch_ext.Muon(one, ns_dtype=F32), torch_ext.Muon(two, ns_dtype=F32)
    for step in range(3):
        filled(one, step)
        filled(two, step)
        norm = torch_ext.clip_grad_norm_(a, 1.0)
        theirs = torch.nn.utils.clip_grad_norm_(two, 1.0)
        torch.testing.assert_close(norm, theirs)
        a.step()
        b.step()
    torch.testing.assert_close(a.state[one[0]]["momentum_buffer"], b.state[two[0]]["momentum_buffer"])
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("shapes", [[(16, 12), (7,)], [(16, 12)]])
def test_a_loss_scale_is_divided_out_in_the_step(shapes: Any) -> None:
    """A GradScaler sets grad_scale and found_inf for one step, as here."""
    params, plain = matrices(shapes), matrices(shapes)
    optimizer, other = torch_ext.Muon(params, ns_dtype=F32), torch_ext.Muon(plain, ns_dtype=F32)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    for step in range(2):
        for grad in filled(params, step):
            grad.mul_(1024.0)
        filled(plain, step)
        optimizer.step()
        other.step()
    assert bits(params) == bits(plain)
    optimizer.found_inf.fill_(1.0)  # type: ignore[attr-defined]
    before = bits(params), bits([optimizer.state[params[0]]["momentum_buffer"]])
    optimizer.step()
    assert (bits(params), bits([optimizer.state[params[0]]["momentum_buffer"]])) == before
    assert optimizer.skipped_steps() == 1


def test_torchs_grad_scaler() -> None:
    params, plain = matrices([(16, 12)]), matrices([(16, 12)])
    optimizer, other = torch_ext.Muon(params, ns_dtype=F32), torch_ext.Muon(plain, ns_dtype=F32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for p, loss_scale in ((params, scaler), (plain, None)):
        loss = p[0].square().sum()
        (loss if loss_scale is None else loss_scale.scale(loss)).backward()
    scaler.step(optimizer)
    scaler.update()
    other.step()
    assert bits(params) == bits(plain)


@pytest.mark.parametrize("shapes", [[(16, 12), (7,)], [(16, 12)]])
def test_nonfinite_gradients(shapes: Any) -> None:
    params = matrices(shapes)
    for options, refused in (({}, True), ({"skip_nonfinite": True}, False)):
        optimizer = torch_ext.Muon(params, ns_dtype=F32, **options)
        filled(params, 0)
        optimizer.step()
        before = bits(params), bits([optimizer.state[params[0]]["momentum_buffer"]])
        params[0].grad[3, 3] = float("nan")  # type: ignore[index]
        if refused:
            with pytest.raises(RuntimeError, match="gradient of parameter 0 of group 0 is not finite"):
                optimizer.step()
        else:
            with pytest.warns(RuntimeWarning, match="a step was skipped"):
                optimizer.step()
            assert optimizer.skipped_steps() == 1
        assert (bits(params), bits([optimizer.state[params[0]]["momentum_buffer"]])) == before


@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR", "CosineAnnealingLR"])
def test_learning_rate_schedulers(kind: str) -> None:
    params, theirs_p = matrices([(16, 12)]), matrices([(16, 12)])
    made = []
    for cls, p in ((torch_ext.Muon, params), (torch.optim.Muon, theirs_p)):
        optimizer = cls(p, lr=0.02)
        scheduler: Any = {
            "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
            "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
            "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        }[kind](optimizer)
        for step in range(6):
            filled(p, step)
            optimizer.step()
            scheduler.step()
        made.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    assert made[0] == made[1]
    assert float((params[0] - theirs_p[0]).detach().norm() / theirs_p[0].detach().norm()) < 0.02


def test_lr_as_a_tensor() -> None:
    params, plain = matrices([(16, 12), (4,)]), matrices([(16, 12), (4,)])
    lr = torch.tensor(0.02)
    a, b = torch_ext.Muon(params, lr=lr, ns_dtype=F32), torch_ext.Muon(plain, lr=float(lr), ns_dtype=F32)
    for step in range(2):
        filled(params, step)
        filled(plain, step)
        a.step()
        b.step()
    torch.testing.assert_close(params, plain)
