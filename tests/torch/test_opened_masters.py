"""Masters that are seeded from weights of higher precision (docs/specification.md, D5), dropped where weights are
loaded (D6), and opened: swapped with the weights to look at them."""

import pytest
import torch
from torch import Tensor, nn
from training import WITH_MASTER, bits, everything, policy_of, set_grads, train
from watched_model import Model, made

import torch_ext


def precise(model: nn.Module, seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(p.shape, generator=generator) for key, p in model.named_parameters()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("when", ["before the first step", "after some"])
@pytest.mark.parametrize("name", WITH_MASTER)
def test_D5_masters_from_a_state_of_higher_precision(name: str, when: str, prefix: str) -> None:
    model = Model(name)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy_of(name))
    if when == "after some":
        train(optimizer, range(2))
    wide = precise(model)
    model.load_state_dict(wide)
    changed = optimizer.resync_masters(state_dict={prefix + key: value for key, value in wide.items()} | {"buffer": 1})
    assert changed > 0
    found = optimizer.master_state_dict()
    for key, value in wide.items():
        # A remainder cannot represent the upper tie of an even weight: one fp32 ulp off (G4).
        distance = (found[key].view(torch.int32) - value.view(torch.int32)).abs()
        assert int(distance.max()) <= (1 if name in ("bf16_remainder", "8bit") else 0)
    train(optimizer, [5])
    assert optimizer.external_writes() == 0


REFUSED = {
    "missing": (lambda s: s.pop("weights.2"), ValueError, r"no 'weights.2' in it"),
    "another shape": (lambda s: s.update({"weights.2": torch.zeros(8)}), ValueError, r"'weights.2' has shape \(8,\)"),
    "no tensor": (lambda s: s.update({"weights.2": 1}), TypeError, "'weights.2' is int"),
    "integers": (lambda s: s.update({"weights.2": torch.zeros(7, dtype=torch.int64)}), TypeError, "torch.int64"),
    "others than the weights": (
        lambda s: s["weights.0"].view(-1)[3].add_(1),
        ValueError,
        r"1 elements of 'weights.0'.*model first",
    ),
}


@pytest.mark.parametrize("name", ["bf16", "bf16_remainder"])
@pytest.mark.parametrize("what", REFUSED)
def test_D5_a_state_that_does_not_fit_changes_nothing(what: str, name: str) -> None:
    spoil, kind, message = REFUSED[what]
    model, optimizer = made(name)
    wide = precise(model)
    model.load_state_dict(wide)
    optimizer.resync_masters()
    before = everything(optimizer)
    spoil(wide)
    with pytest.raises(kind, match=message):
        optimizer.resync_masters(state_dict=wide)
    assert everything(optimizer) == before
    with pytest.raises(ValueError, match="force=True"):
        optimizer.resync_masters(state_dict=precise(model), force=True)


def test_D5_names_are_needed() -> None:
    model = Model("bf16")
    optimizer = torch_ext.AdamW(model.parameters())
    with pytest.raises(ValueError, match="named_parameters"):
        optimizer.resync_masters(state_dict=precise(model))


@pytest.mark.parametrize("name", ["bf16_remainder", "8bit"])
def test_D6_remainders_are_dropped_where_weights_are_loaded(name: str) -> None:
    model, optimizer = made(name)
    model.load_state_dict(precise(model))
    assert optimizer.resync_masters() > 0
    found = optimizer.master_state_dict()
    expected = {key: bits(p.float()) for key, p in model.named_parameters()}
    assert {key: bits(value) for key, value in found.items()} == expected
    assert optimizer.resync_masters() == 0


@pytest.mark.parametrize("name", WITH_MASTER)
def test_opened_masters_are_the_parameters_and_their_weights_follow(name: str) -> None:
    model, optimizer = made(name)
    before = {key: value.clone() for key, value in optimizer.master_state_dict().items()}
    places = [p.data_ptr() for p in model.parameters()]
    with optimizer.master_weights() as masters:
        assert list(masters) == [key for key, _ in model.named_parameters()]
        for key, p in model.named_parameters():
            assert p.dtype == torch.float32 and bits(p) == bits(before[key]) == bits(masters[key])
            p.clamp_(-0.5, 0.5)
    assert [p.data_ptr() for p in model.parameters()] == places
    for key, p in model.named_parameters():
        assert bits(p) == bits(before[key].clamp(-0.5, 0.5).to(p.dtype))
    found = optimizer.master_state_dict()
    distance = [
        (found[k].view(torch.int32) - m.clamp(-0.5, 0.5).view(torch.int32)).abs().max() for k, m in before.items()
    ]
    assert max(map(int, distance)) <= (1 if name in ("bf16_remainder", "8bit") else 0)
    train(optimizer, [7])
    assert optimizer.external_writes() == 0


@pytest.mark.parametrize("how", ["read", "the mapping", "p.data =", "an exception"])
@pytest.mark.parametrize("name", ["bf16", "bf16_remainder", "no master", "fp32"])
def test_opened_masters(name: str, how: str) -> None:
    """What is written to opened masters, in whichever way, is kept. Reading them, or an exception inside, changes
    nothing."""
    (model, optimizer), (_, plain) = made(name), made(name)
    try:
        with optimizer.master_weights() as masters:
            if how == "the mapping":
                for value in masters.values():
                    value.zero_()
            elif how == "p.data =":
                for p in model.parameters():
                    p.data = torch.zeros_like(p)
            elif how == "an exception":
                raise KeyError("theirs")
    except KeyError:
        assert how == "an exception"
    if how in ("the mapping", "p.data ="):
        assert not any(p.any() for p in model.parameters())
        assert not any(value.any() for value in optimizer.master_state_dict().values())
    else:
        for o in (optimizer, plain):
            train(o, [3])
        assert everything(optimizer) == everything(plain)


@pytest.mark.parametrize(
    "what",
    [
        "step",
        "state_dict",
        "master_state_dict",
        "consolidate_state_dict",
        "load_state_dict",
        "resync_masters",
        "master_weights",
    ],
)
def test_opened_masters_are_closed_before_anything_else(what: str) -> None:
    model, optimizer = made("bf16")
    state = optimizer.state_dict()
    before = everything(optimizer)
    set_grads(model.parameters(), 4)
    with optimizer.master_weights(), pytest.raises(RuntimeError, match=rf"{what}\(\) within master_weights"):
        getattr(optimizer, what)(*([state] if what == "load_state_dict" else [])).__enter__()
    assert everything(optimizer) == before
    optimizer.step()


@pytest.mark.parametrize("name", WITH_MASTER)
def test_opening_masters_notices_a_write_as_a_step_does(name: str) -> None:
    model, optimizer = made(name, on_external_write="error")
    model.weights[1].data.mul_(1.5)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"'weights.1' \(\d+ elements\) no longer"), optimizer.master_weights():
        pass
    assert everything(optimizer) == before
    model, optimizer = made(name)
    model.weights[1].data.mul_(1.5)
    with optimizer.master_weights():
        pass
    assert optimizer.external_writes() > 0


def test_opened_masters_overwrite_a_write_that_is_ignored() -> None:
    (model, ignoring), (_, plain) = made("bf16", on_external_write="ignore"), made("bf16")
    model.weights[1].data.mul_(1.5)
    with ignoring.master_weights():
        pass
    assert everything(ignoring) == everything(plain)


@pytest.mark.parametrize("name", WITH_MASTER)
def test_opening_masters_leaves_hooks_of_gradients_where_they_are(name: str) -> None:
    """torch replaces a parameter's gradient accumulation node if `.data` changes its dtype. DistributedDataParallel and
    others put hooks on that node, which must survive."""
    model, optimizer = made(name)
    called = []
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: called.append(1))
    with optimizer.master_weights():
        assert all(p.dtype == torch.float32 and type(p) is nn.Parameter for p in model.parameters())
        model.weights[0].mul_(0.5)
    torch.stack([p.float().sum() for p in model.parameters()]).sum().backward()
    assert len(called) == len(nodes)
    assert all(p.dtype == model.weights[0].dtype for p in model.parameters())


def test_average_of_masters_is_finer_than_that_of_weights() -> None:
    model, optimizer = made("bf16", lr=1e-4)
    ema = {key: value.clone() for key, value in optimizer.master_state_dict().items()}
    exact = {key: value.double() for key, value in ema.items()}
    rough = {key: p.detach().clone() for key, p in model.named_parameters()}
    for step in range(3, 13):
        train(optimizer, [step])
        with optimizer.master_weights():
            for key, p in model.named_parameters():
                ema[key].lerp_(p, 0.1)
                exact[key].lerp_(p.double(), 0.1)
        for key, p in model.named_parameters():
            rough[key].lerp_(p.detach(), 0.1)
    for key in ("weights.0", "weights.1"):
        errors = [(average[key].double() - exact[key]).abs().mean() for average in (ema, rough)]
        assert errors[0] < errors[1] / 1000
