"""AdamW and Adam: accuracy against torch.optim and against a float64 oracle, and the behaviour of a
torch.optim.Optimizer (semantics.md, G1 and D8)."""

import copy
import inspect
import pickle

import oracle
import pytest
import torch
from torch import Tensor, nn
from training import POLICIES, SHAPES, bits, everything, params_of, policy_of, set_grads, train

import torch_ext


class Exact:
    """The same training as an optimizer's, in float64."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        keys = ("lr", "betas", "eps", "weight_decay", "maximize")
        self.exact = [
            oracle.AdamW(p, decoupled=group["decoupled_weight_decay"], **{key: group[key] for key in keys})
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def step(self) -> None:
        for p, exact in zip(self.params, self.exact, strict=True):
            exact.step(p.grad)


# -- against torch and the oracle ---------------------------------------------------------------------------------

HYPER = {
    "defaults": (torch_ext.AdamW, torch.optim.AdamW, dict(lr=1e-3)),
    "decay": (torch_ext.AdamW, torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.3)),
    "no decay": (torch_ext.AdamW, torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.0)),
    "betas and eps": (torch_ext.AdamW, torch.optim.AdamW, dict(lr=1e-3, betas=(0.8, 0.95), eps=1e-3)),
    "small betas": (torch_ext.AdamW, torch.optim.AdamW, dict(lr=1e-3, betas=(0.5, 0.5))),
    "maximize": (torch_ext.AdamW, torch.optim.AdamW, dict(lr=1e-3, maximize=True)),
    "Adam": (torch_ext.Adam, torch.optim.Adam, dict(lr=1e-3)),
    "Adam, L2": (torch_ext.Adam, torch.optim.Adam, dict(lr=1e-3, weight_decay=0.1)),
    "Adam, decoupled": (
        torch_ext.Adam,
        torch.optim.Adam,
        dict(lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    "foreach": (torch_ext.AdamW, torch.optim.AdamW, dict(lr=1e-3, foreach=True)),
    "fused": (torch_ext.AdamW, torch.optim.AdamW, dict(lr=1e-3, fused=True)),
}


def error_in_ulps(params: list[nn.Parameter], run: Exact) -> float:
    """Returns the largest error in ulps of max(|p|, 1/8). For a smaller p, the error of the update itself may exceed an
    ulp of p, and that is not an error in rounding p."""
    pairs = [(p.detach().double(), each.p) for p, each in zip(params, run.exact, strict=True) if p.numel()]
    return max(((p - e).abs() / oracle.ulp(e.abs().clamp_min(0.125), torch.float32)).max().item() for p, e in pairs)


@pytest.mark.parametrize("case", HYPER)
def test_G1_fp32_one_step_within_an_ulp(case: str) -> None:
    """After one step from the same state ours is within 1 ulp of the exact result and torch's within 2, so the two
    differ by at most 3."""
    ours_class, torch_class, hyper = HYPER[case]
    ours, theirs = params_of("fp32"), params_of("fp32")
    a, b = ours_class(ours, **hyper), torch_class(theirs, **hyper)
    train(a, range(7))
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p)
    state = copy.deepcopy(a.state_dict()["state"])  # torch would step our tensors in place
    b.load_state_dict({"state": state, "param_groups": b.state_dict()["param_groups"]})
    exact = Exact(a)
    for own, each in zip(ours, exact.exact, strict=True):
        each.m, each.v, each.t = a.state[own]["exp_avg"].double(), a.state[own]["exp_avg_sq"].double(), 7
    set_grads(ours, 7)
    set_grads(theirs, 7)
    for stepped in (exact, a, b):
        stepped.step()
    assert error_in_ulps(ours, exact) <= 1
    assert error_in_ulps(theirs, exact) <= 2


@pytest.mark.parametrize("case", ["defaults", "decay", "betas and eps", "maximize", "Adam, L2"])
def test_G1_fp32_100_steps_no_worse_than_torch(case: str) -> None:
    """Each step rounds p once. Over 100 steps the error is at most 24 ulps for ours and 100 for torch's, which computes
    lr * weight_decay in fp32."""
    ours_class, torch_class, hyper = HYPER[case]
    ours, theirs = params_of("fp32", [(64, 37), (129,)]), params_of("fp32", [(64, 37), (129,)])
    a, b = ours_class(ours, **hyper), torch_class(theirs, **hyper)
    exact = Exact(a)
    for step in range(100):
        set_grads(ours, step)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad
        for stepped in (exact, a, b):
            stepped.step()
    own_error, torch_error = error_in_ulps(ours, exact), error_in_ulps(theirs, exact)
    assert own_error <= 24
    assert torch_error <= 100
    assert own_error <= 1.2 * torch_error


# Policy -> bound of the error of the (master) weights after 60 steps, relative to how far the weights have moved (both
# rms).
SHARES = {
    "fp32": 1e-5,
    "bf16": 0.02,
    "bf16_remainder": 0.02,
    "8bit": 0.08,
    "no master": 0.35,
    "fp32 moments": 1e-5,
    "fp16": 1e-5,
    "fp16 moments": 0.003,
    "mixed moments": 0.06,
}


@pytest.mark.parametrize("name", POLICIES)
def test_G1_every_policy_follows_the_exact_run(name: str) -> None:
    params = params_of(name, [(64, 64), (1000,)])
    start = [p.detach().double().clone() for p in params]
    optimizer = torch_ext.AdamW(params, lr=1e-2, policy=policy_of(name))
    run = Exact(optimizer)
    for step in range(60):
        set_grads(params, step)
        run.step()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    for i, (p, begin, exact) in enumerate(zip(params, start, (each.p for each in run.exact), strict=True)):
        reached = state[i].get("master_param", p.detach()).double()
        share = ((reached - exact).square().mean() / (exact - begin).square().mean()).sqrt()
        assert share <= SHARES[name], f"{share:.5f}"


def test_G1_groups_in_one_call_equal_optimizers_of_their_own() -> None:
    hypers = [dict(lr=1e-2), dict(lr=1e-3, weight_decay=0.5, betas=(0.5, 0.9)), dict(lr=1e-2, maximize=True, eps=1e-4)]
    together = [params_of("bf16", seed=i) for i in range(3)]
    apart = [params_of("bf16", seed=i) for i in range(3)]
    one = torch_ext.AdamW([{"params": ps} | hyper for ps, hyper in zip(together, hypers, strict=True)])
    several = [torch_ext.AdamW(ps, **hyper) for ps, hyper in zip(apart, hypers, strict=True)]
    # Rounding thresholds depend on a parameter's position, which differs between one optimizer and three: round to
    # nearest.
    one.defaults["moment_rounding"] = "nearest"
    for optimizer in (one, *several):
        for group in optimizer.param_groups:
            group["moment_rounding"] = "nearest"
    for step in range(5):
        for i in range(3):
            set_grads(together[i], 10 * step + i)
            set_grads(apart[i], 10 * step + i)
        one.step()
        for optimizer in several:
            optimizer.step()
    assert everything(one) == [entry for optimizer in several for entry in everything(optimizer)]


def test_one_operator_call_per_step_for_all_groups() -> None:
    params = params_of("bf16")
    optimizer = torch_ext.AdamW([{"params": params[:3]}, {"params": params[3:], "lr": 1.0}])
    train(optimizer, range(2))
    set_grads(params, 2)
    with torch.profiler.profile() as profile:
        optimizer.step()
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("torch_ext::")}
    assert calls == {"torch_ext::adamw_flat_": 1}


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_another_dtype(grad_dtype: torch.dtype) -> None:
    """A gradient counts by its value: a step is the same for every dtype that can represent the gradient."""
    steps = []
    for dtype in (torch.float32, grad_dtype):
        p = nn.Parameter(torch.linspace(-1, 1, 300))
        optimizer = torch_ext.AdamW([p], lr=1e-2)
        if dtype != torch.float32:
            p.grad_dtype = dtype
        p.grad = torch.linspace(-2, 2, 300).to(grad_dtype).to(dtype)
        optimizer.step()
        steps.append(bits(p))
    assert steps[0] == steps[1]


@pytest.mark.parametrize("skip_nonfinite", [False, True], ids=["applied", "skip_nonfinite"])
@pytest.mark.parametrize("huge", [1.85e19, -3e38])
@pytest.mark.parametrize("name", [name for name, (dtype, _) in POLICIES.items() if dtype != torch.float16])
@pytest.mark.parametrize("kind", [torch_ext.AdamW, torch_ext.Adam], ids=["AdamW", "Adam"])
def test_a_huge_gradient_is_no_end_of_the_training(
    kind: type[torch.optim.Optimizer], name: str, huge: float, skip_nonfinite: bool
) -> None:
    """The gradient is finite, so no step is skipped, but its square overflows fp32. Weights must stay finite, as with
    torch, and keep moving."""
    params = params_of(name)
    optimizer = kind(params, lr=1e-2, weight_decay=0.1, policy=policy_of(name), skip_nonfinite=skip_nonfinite)
    for step in range(4):
        set_grads(params, step)
        if step == 1:
            params[0].grad[3, 5] = huge
        before = [bits(p) for p in params]
        optimizer.step()
        assert all(bool(p.isfinite().all()) and float(p.abs().amax() if p.numel() else 0) < 10 for p in params)
        assert all(old != bits(p) for old, p in zip(before, params, strict=True) if p.numel())
    for state in optimizer.state_dict()["state"].values():
        assert all(bool(value.isfinite().all()) for value in state.values())


# -- D8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_D8_parameter_without_a_gradient_is_left_alone(name: str) -> None:
    params = params_of(name)
    optimizer = torch_ext.AdamW(params, lr=1e-2, policy=policy_of(name))
    train(optimizer, range(3))
    before = everything(optimizer)
    set_grads(params, 3)
    for p in params[::2]:
        p.grad = None
    optimizer.step()
    after = everything(optimizer)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert (old == new) == (i % 2 == 0)
    for p in params:
        p.grad = None
    optimizer.step()
    assert everything(optimizer) == after, "a stale gradient was applied again"


def test_D8_who_has_a_gradient_may_change_in_every_step() -> None:
    """Stepping the parameters that have gradients together gives the bits of stepping each of them alone."""
    together, alone = params_of("bf16"), params_of("bf16")
    one = torch_ext.AdamW(together, lr=1e-2)
    each = torch_ext.AdamW(alone, lr=1e-2)
    for step in range(6):
        set_grads(together, step)
        set_grads(alone, step)
        for i, (p, q) in enumerate(zip(together, alone, strict=True)):
            if (i + step) % 3 == 0:
                p.grad = q.grad = None
        one.step()
        grads = [q.grad for q in alone]
        for q, grad in zip(alone, grads, strict=True):  # step one parameter per call
            for other in alone:
                other.grad = None
            q.grad = grad
            each.step()
    assert everything(one) == everything(each)


# -- a torch.optim.Optimizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours, theirs", [(torch_ext.AdamW, torch.optim.AdamW), (torch_ext.Adam, torch.optim.Adam)])
def test_signature_is_torchs_and_more(ours: type, theirs: type) -> None:
    own, expected = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    for (name, parameter), (_, other) in zip(expected.items(), own.items(), strict=False):
        assert own[name].kind == parameter.kind, name
        assert own[name].default == parameter.default, name
        if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert other.name == name
    for name in set(own) - set(expected):
        assert own[name].kind == inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError):
        ours(params_of("fp32"), offload_frction=0.5)


def test_closure_hooks_and_return_value() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch_ext.AdamW([p], lr=0.1)
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: order.append("pre"))
    optimizer.register_step_post_hook(lambda *_: order.append("post"))

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        order.append("closure")
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert order == ["pre", "closure", "post"]
    assert (p < 1).all()
    optimizer.zero_grad()
    assert optimizer.step() is None


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycle (lr and betas)": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "Lambda from 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 10),
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_move_the_step(scheduler: str, tensor_lr: bool) -> None:
    ours, theirs = params_of("fp32"), params_of("fp32")
    optimizers = []
    for make, params in ((torch_ext.AdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = make(params, lr=torch.tensor(0.01) if tensor_lr else 0.01)
        schedule = SCHEDULERS[scheduler](optimizer)
        for step in range(10):
            set_grads(params, step)
            optimizer.step()
            schedule.step()
        optimizers.append(optimizer)
    assert float(optimizers[0].param_groups[0]["lr"]) == float(optimizers[1].param_groups[0]["lr"])
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-5)


def test_tensor_lr_beside_a_float_and_tensor_betas() -> None:
    ours, theirs = params_of("fp32"), params_of("fp32")
    betas = (torch.tensor(0.85), torch.tensor(0.99))
    lr = torch.tensor(0.01)
    for make, params in ((torch_ext.AdamW, ours), (torch.optim.AdamW, theirs)):
        floats = tuple(float(b) for b in betas) if make is torch.optim.AdamW else betas
        train(make([{"params": params[:4], "lr": lr}, {"params": params[4:]}], lr=0.003, betas=floats), range(5))
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replace", [False, True], ids=["in place", "another tensor"])
def test_tensor_lr_may_change_between_steps(replace: bool) -> None:
    ours, theirs = params_of("fp32"), params_of("fp32")
    a = torch_ext.AdamW([{"params": ours[:3], "lr": torch.tensor(0.5)}, {"params": ours[3:], "lr": 0.1}])
    b = torch_ext.AdamW([{"params": theirs[:3], "lr": 0.5}, {"params": theirs[3:], "lr": 0.1}])
    for step in range(4):
        train(a, [step])
        train(b, [step])
        b.param_groups[0]["lr"] /= 2
        if replace:
            a.param_groups[0]["lr"] = a.param_groups[0]["lr"] / 2
        else:
            a.param_groups[0]["lr"].div_(2)
    assert everything(a) == everything(b)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alike_and_on_their_own(name: str, how: object) -> None:
    """A copy trains to the bits of its original and shares no memory with it."""
    original = torch_ext.AdamW(
        params_of(name), lr=1e-2, policy=policy_of(name), skip_nonfinite=True, on_external_write="error", seed=5
    )
    train(original, range(3))
    twin = how(original)
    assert everything(twin) == everything(original)
    assert (twin.policy, twin.skip_nonfinite, twin.on_external_write) == (original.policy, True, "error")
    before = everything(original)
    train(twin, range(3, 6))
    assert everything(original) == before
    train(original, range(3, 6))
    assert everything(twin) == everything(original)


def test_add_param_group_later() -> None:
    params = params_of("bf16")
    optimizer = torch_ext.AdamW(params[:4], lr=1e-2)
    train(optimizer, range(3))
    optimizer.add_param_group({"params": params[4:], "lr": 1.0})
    train(optimizer, range(3, 5))
    assert [float(optimizer.state[p]["step"]) for p in params] == [5.0] * 4 + [2.0] * 4


def test_parameters_may_be_replaced_before_and_after_the_first_step() -> None:
    """Frameworks replace parameters between the constructor and the first step, pruning does so later."""
    optimizer = torch_ext.AdamW(params_of("bf16"), lr=1e-2)
    replaced = params_of("bf16_remainder", seed=3)
    optimizer.param_groups[0]["params"][:] = replaced
    train(optimizer, range(2))
    assert set(optimizer.state) == set(replaced), "state of parameters that left is dropped"
    assert [float(state["step"]) for state in optimizer.state.values()] == [2.0] * len(replaced)
    newcomer = nn.Parameter(replaced[1].detach().clone())
    optimizer.param_groups[0]["params"][1] = newcomer
    left = bits(replaced[1])
    train(optimizer, range(2, 3))
    assert bits(replaced[1]) == left
    assert float(optimizer.state[newcomer]["step"]) == 1
    old = replaced[0]
    kept = {key: value[:10].clone() if value.dim() else value for key, value in optimizer.state.pop(old).items()}
    pruned = nn.Parameter(old.detach()[:10].clone())
    optimizer.param_groups[0]["params"][0] = pruned
    optimizer.state[pruned] = kept
    train(optimizer, range(3, 4))
    assert float(optimizer.state[pruned]["step"]) == 4
    optimizer.state.clear()
    train(optimizer, range(4, 5))
    assert float(optimizer.state[pruned]["step"]) == 1


def test_thresholds_are_seeded_by_name_whatever_wraps_the_model() -> None:
    def run(rename: object, seed: int = 0) -> list[dict[str, bytes]]:
        params = params_of("bf16")
        named = [(rename(f"block.{i}.weight"), p) for i, p in enumerate(params)]
        optimizer = torch_ext.AdamW(named if rename("x") else params, lr=1e-2, seed=seed)
        train(optimizer, range(4))
        return everything(optimizer)

    plain = run(lambda name: name)
    assert run(lambda name: "module." + name) == plain
    assert run(lambda name: "module._orig_mod." + name.replace("block", "block._orig_mod")) == plain
    assert run(lambda name: "other." + name) != plain
    assert run(lambda name: "") != plain, "by position"
    assert run(lambda name: name, seed=1) != plain


def test_rounding_is_what_was_asked_for() -> None:
    """Each rounding that can be asked for gives other bits, and the default is dithered."""

    def run(**asked: str) -> list[dict[str, bytes]]:
        optimizer = torch_ext.AdamW(params_of("no master"), lr=1e-2, policy=policy_of("no master"), **asked)
        train(optimizer, range(3))
        return everything(optimizer)

    runs = [run(**{key: how}) for key in ("moment_rounding", "weight_rounding") for how in ("nearest", "stochastic")]
    runs.append(run())
    assert all(a != b for i, a in enumerate(runs) for b in runs[:i])
    assert run(moment_rounding="dithered", weight_rounding="dithered") == runs[-1]


def test_backward_notices_that_a_step_wrote_the_weights() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch_ext.AdamW([p])
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_parameters_of_any_kind_may_be_in_the_groups() -> None:
    frozen = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    p = nn.Parameter(torch.ones(3))
    optimizer = torch_ext.AdamW([frozen, p])
    p.grad = torch.ones(3)
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == [1]


def test_torch_compile_looks_away_from_the_step() -> None:
    """torch.compile leaves step() to Python, also in the middle of a compiled function."""
    model = nn.Linear(8, 1)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.05)

    @torch.compile(backend="eager")
    def iteration(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    losses = [iteration(x).item() for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert [float(state["step"]) for state in optimizer.state.values()] == [20.0, 20.0]


# -- memory layouts -----------------------------------------------------------------------------------------------


def laid_out(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised tensor of that shape in that memory layout."""
    if kind == "channels_last":
        return torch.empty(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    if kind == "transposed":
        return torch.empty(tuple(reversed(shape)), dtype=dtype).permute(*reversed(range(len(shape))))
    if kind == "slice":
        return torch.empty((*shape[:-1], shape[-1] + 3), dtype=dtype)[..., 1:-2]
    if kind == "every other":
        return torch.empty((*shape[:-1], shape[-1] * 2), dtype=dtype)[..., ::2]
    if kind == "unaligned":
        return torch.empty(torch.Size(shape).numel() + 1, dtype=dtype)[1:].view(shape)
    return torch.empty(shape, dtype=dtype)


LAYOUTS = ["contiguous", "channels_last", "transposed", "slice", "every other", "unaligned"]


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_remainder"])
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_does_not_matter(layout: str, grad_layout: str, name: str) -> None:
    shape, dtype = (4, 3, 5, 7), POLICIES[name][0]
    plain = params_of(name, [shape])
    p = nn.Parameter(laid_out(layout, shape, dtype).copy_(plain[0].detach()))
    assert p.shape == shape
    optimizers = [
        torch_ext.AdamW(params, lr=1e-2, policy=policy_of(name), moment_rounding="nearest") for params in (plain, [p])
    ]
    for step in range(3):
        set_grads(plain, step)
        p.grad = laid_out(grad_layout if step else "contiguous", shape, dtype).copy_(plain[0].grad)
        for optimizer in optimizers:
            optimizer.step()
    assert everything(optimizers[0]) == everything(optimizers[1])
    saved = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert {k: bits(v) for k, v in saved[0].items()} == {k: bits(v) for k, v in saved[1].items()}


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_remainder", "8bit"])
def test_state_follows_a_model_that_becomes_channels_last(name: str) -> None:
    """With rounding to nearest the bits are those of a model that stays contiguous. 8-bit blocks then hold other
    elements, so "8bit" is only close."""
    models = [nn.Conv2d(3, 8, 3).to(POLICIES[name][0]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        torch_ext.AdamW(m.parameters(), lr=1e-2, policy=policy_of(name), moment_rounding="nearest") for m in models
    ]
    for step in range(4):
        if step == 2:
            models[1].to(memory_format=torch.channels_last)
            assert not models[1].weight.is_contiguous()
        for optimizer in optimizers:
            train(optimizer, [step])
    if name == "8bit":
        weights = [m.weight.detach().float() for m in models]
        assert torch.allclose(*weights, rtol=0, atol=5e-3)
    else:
        assert everything(optimizers[0]) == everything(optimizers[1])


def test_expanded_gradient() -> None:
    p, q = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(4, 5))
    optimizer = torch_ext.AdamW([p, q])
    p.grad, q.grad = torch.ones(1, 5).expand(4, 5), torch.ones(4, 5)
    optimizer.step()
    assert bits(p) == bits(q)


def test_shapes_of_zero_and_one_element_are_no_error() -> None:
    assert (0,) in SHAPES
    optimizer = torch_ext.AdamW(params_of("8bit", [(0,), (), (0, 3)]), policy=policy_of("8bit"))
    train(optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, range(2))
