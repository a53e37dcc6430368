"""What a step on the device writes in addition to states must have the CPU's bits: changes for deltas, averages,
health; in single steps and replayed from a CUDA graph."""

import itertools
import os
from typing import Any

import pytest
import torch
from test_gpu_graphs import WARM_UP, fill, static_grads
from test_gpu_training import DEVICE, POLICIES, assert_same, host_never_waits, optimizer, set_grads, train

import torch_ext

KEPT = ["changed", "moved", "distance"]


class Weights(torch.nn.Module):
    """A model with the optimizer's parameters."""

    def __init__(self, opt: torch_ext.AdamW) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList(opt.param_groups[0]["params"])


def publisher_of(opt: torch_ext.AdamW, exact: bool = False) -> tuple[Weights, torch_ext.WeightPublisher]:
    model = Weights(opt)
    return model, torch_ext.WeightPublisher(model, opt, exact)


def engine_of(model: Weights) -> tuple[dict[str, torch.Tensor], torch_ext.WeightSubscriber]:
    tensors = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return tensors, torch_ext.WeightSubscriber(tensors)


def kept(opt: torch_ext.AdamW) -> list[torch.Tensor]:
    """Returns what steps have recorded of the changes of all parameters."""
    changes = [opt._states.changes.record_of(p, p.numel(), p.device) for p in opt.param_groups[0]["params"]]
    return [each[key].cpu() for each in changes for key in KEPT if key in each]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_changes_have_the_cpus_bits_and_deltas_are_the_cpus(
    policy: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", lambda n: bytes(range(n)))  # gives both chains of deltas the same name
    here, there = optimizer(policy, "cpu", lr=1e-4), optimizer(policy, DEVICE, lr=1e-4)
    (_, ours), (model, theirs) = publisher_of(here, exact), publisher_of(there, exact)
    tensors, subscriber = engine_of(model)
    for begin, n in itertools.pairwise((0, 1, 5, 5, 8)):
        train(here, n - begin, begin)
        train(there, n - begin, begin)
        assert_equal(kept(here), kept(there))
        delta = theirs.publish()
        assert delta == ours.publish()
        subscriber.apply(delta, "full")
        assert all(torch.equal(tensors[name], p.detach().cpu()) for name, p in model.named_parameters())
    assert_same(here, there)


def test_a_step_with_a_publisher_waits_for_nothing() -> None:
    opt = optimizer("bf16", DEVICE, ema_decay=0.9)
    _, publisher = publisher_of(opt)
    train(opt, 2)
    publisher.publish()
    for i in range(3):
        set_grads(opt, i)
        with host_never_waits():
            opt.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, "24bit", torch.float32], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_average_has_the_cpus_bits(policy: str, dtype: Any) -> None:
    """Averages are compared as they are stored, in the state_dict."""
    options = {"ema_decay": 0.9, "ema_dtype": dtype, "ema_every": 2}
    here, there = optimizer(policy, "cpu", **options), optimizer(policy, DEVICE, **options)
    train(here)
    train(there)
    assert_same(here, there)
    a, b = here.ema_state_dict(), there.ema_state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[key].cpu(), b[key].cpu()) for key in a)


@pytest.mark.parametrize("policy", POLICIES)
def test_health_has_the_cpus_bits(policy: str) -> None:
    found = []
    for device in ("cpu", DEVICE):
        opt = optimizer(policy, device)
        train(opt, 2)
        opt.measure_health()
        train(opt, 1, 2)
        found.append(opt.health())
    here, there = found
    assert here.step == there.step == 3 and here.as_dict() == there.as_dict()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replayed_step_notes_and_averages_as_on_the_cpu(policy: str) -> None:
    """From replays the publisher learns which bits changed, but not how many steps there were."""
    options = {"ema_decay": 0.9, "ema_every": 2}
    lr = torch.tensor(1e-4, dtype=torch.float64, device=DEVICE)
    here = optimizer(policy, "cpu", lr=1e-4, **options)
    there = optimizer(policy, DEVICE, lr=lr, capturable=True, **options)
    (_, ours), (model, theirs) = publisher_of(here), publisher_of(there)
    tensors, subscriber = engine_of(model)
    grads = static_grads(there)
    for i in range(WARM_UP):
        fill(there, grads, i)
        there.step()
    train(here, WARM_UP, clip=None)
    subscriber.apply(theirs.publish())
    ours.publish()
    graph = torch.cuda.CUDAGraph()
    fill(there, grads, WARM_UP)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        there.step()
    for i in range(WARM_UP, WARM_UP + 4):
        fill(there, grads, i)
        graph.replay()
    train(here, 4, WARM_UP, clip=None)
    assert_equal(kept(here), kept(there))
    subscriber.apply(theirs.publish(), "full")
    assert all(torch.equal(tensors[name], p.detach().cpu()) for name, p in model.named_parameters())
    assert_same(here, there)


def test_publishing_in_a_capture_is_refused() -> None:
    opt = optimizer("bf16", DEVICE)
    _, publisher = publisher_of(opt)
    train(opt, 1)
    with (
        pytest.raises(RuntimeError, match=r"publish\(\) while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        publisher.publish()


@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder"])
def test_an_engine_on_the_device_follows_in_place(policy: str) -> None:
    opt = optimizer(policy, DEVICE, lr=1e-5)
    model, publisher = publisher_of(opt)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    subscriber, addresses = torch_ext.WeightSubscriber(tensors), {n: t.data_ptr() for n, t in tensors.items()}
    for begin, n in itertools.pairwise((0, 1, 5, 6)):
        train(opt, n - begin, begin)
        subscriber.apply(publisher.publish(), "full")
        assert all(torch.equal(tensors[name], p) for name, p in model.named_parameters())
    assert addresses == {name: t.data_ptr() for name, t in tensors.items()}
