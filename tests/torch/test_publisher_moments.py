"""When weights are published: only between whole steps, whatever else an optimizer does meanwhile."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import POLICIES, policy_of, set_grads
from weight_sync import Engine, Trainer

import torch_ext

BF16 = torch.bfloat16


class Net(nn.Module):
    """A model with a method that runs a backward."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(10, 40), nn.Linear(40, 64), nn.Linear(64, 24)
        self.to(dtype)

    def forward(self, at: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.embed(at))))  # type: ignore[no-any-return]

    def backward(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self(torch.randint(0, 10, (8,), generator=generator)).float().square().mean().backward()


class Following:
    """An engine that applies each version of a publisher and is compared with the trainer."""

    def __init__(self, model: nn.Module, publisher: torch_ext.WeightPublisher) -> None:
        self.model, self.publisher, self.engine = model, publisher, Engine(model)

    def takes(self) -> int:
        """Publishes and applies the next version; returns its size in bytes."""
        delta = self.publisher.publish()
        self.engine.subscriber.apply(delta, "full")
        assert [n for n, p in self.model.named_parameters() if not _same(p, self.engine.tensors[n])] == []
        return len(delta)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal. It avoids numpy, because memory that numpy has seen cannot be released."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.detach().view(kind), b.detach().view(kind))


def _refused(call: Callable[[], Any]) -> str:
    """Returns the text of the RuntimeError that the call must raise."""
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def _calls(publisher: torch_ext.WeightPublisher, model: nn.Module, optimizer: Any) -> dict[str, Callable[[], Any]]:
    """Returns everything that reads weights to publish them, by the name that errors use."""
    return {
        "publish()": publisher.publish,
        "full()": publisher.full,
        "publish_patches()": publisher.publish_patches,
        "WeightPublisher()": lambda: torch_ext.WeightPublisher(model, optimizer),
    }


# -- steps in backward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "fp32", "no master"])
def test_steps_in_backward(policy: str) -> None:
    """The publisher knows what steps in backward wrote as it knows what step() wrote: deltas have equal sizes."""
    sizes = []
    for in_backward in (False, True):
        net = Net(POLICIES[policy][0])
        options: Any = {"policy": policy_of(policy), "step_in_backward": in_backward}
        optimizer = torch_ext.AdamW(net.named_parameters(), lr=1e-6, **options)
        publisher = torch_ext.WeightPublisher(net, optimizer)
        following = Following(net, publisher)
        net.up.weight.data[0, 0] = 9  # before the first step
        found = []
        for version in range(4):
            for step in range(1 + version % 2):
                net.backward(10 * version + step)
                optimizer.step()
                optimizer.zero_grad()
            if version == 2:
                with torch.no_grad():
                    net.down.weight.mul_(1.5)
            found.append(following.takes())
        sizes.append(found)
    assert sizes[0] == sizes[1]


def test_between_a_backward_that_steps_and_step() -> None:
    """Some weights are stepped and others are not: nothing can be published until step() or zero_grad()."""
    net = Net()
    optimizer = torch_ext.AdamW(net.named_parameters(), lr=1e-3, step_in_backward=True)
    publisher = torch_ext.WeightPublisher(net, optimizer)
    following = Following(net, publisher)
    for finish in (optimizer.step, optimizer.zero_grad):
        net.backward(1)
        for doing, call in _calls(publisher, net, optimizer).items():
            assert _refused(call) == f"{doing} after a backward that stepped some weights already: call step() first"
        finish()
        following.takes()
    assert publisher.version == 2


# -- weights that are swapped for a while ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "fp32", "no master"])
def test_averages_and_masters_that_are_swapped_in(policy: str) -> None:
    """Nothing can be published inside the contexts. Afterwards the weights are unchanged."""
    net = Net(POLICIES[policy][0])
    averaged: Any = {} if policy == "no master" else {"ema_decay": 0.9}
    optimizer = torch_ext.AdamW(net.named_parameters(), lr=1e-3, policy=policy_of(policy), **averaged)
    publisher = torch_ext.WeightPublisher(net, optimizer)
    following = Following(net, publisher)
    swaps: dict[str, tuple[Any, str]] = {"master_weights()": (optimizer.master_weights, "masters")}
    if averaged:
        swaps["ema_weights()"] = (optimizer.ema_weights, "averages")
    for step in range(2):
        net.backward(step)
        optimizer.step()
        optimizer.zero_grad()
        for where, (swapped, what) in swaps.items():
            with swapped():
                for doing, call in _calls(publisher, net, optimizer).items():
                    expected = f"{doing} within {where}, where parameters hold their {what}; leave it first"
                    assert _refused(call) == expected
        following.takes()
        if averaged:
            with optimizer.ema_weights():
                net(torch.arange(3))
        assert following.takes() < 200, "nothing has changed"


# -- parameters that come and go ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "fp32", "no master"])
def test_parameters_that_are_frozen_thawed_and_given_to_the_optimizer_later(policy: str) -> None:
    trainer = Trainer(policy, lr=1e-3)
    following = Following(trainer.model, trainer.publisher)
    trainer.step(2)
    following.takes()
    first = trainer.params[0]

    def step() -> None:
        trainer.steps += 1
        set_grads([p for p in trainer.params if p.requires_grad], trainer.steps)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        following.takes()

    first.requires_grad_(False)
    step()
    first.data[0, 0] = 5
    step()
    first.requires_grad_(True)
    step()
    frozen = trainer.model.frozen.requires_grad_(True)
    trainer.optimizer.add_param_group({"params": [("frozen", frozen)], "lr": 1e-2})
    trainer.params.append(trainer.model.frozen)
    for _ in range(2):
        step()
    frozen.requires_grad_(False)
    frozen.data[3] = 7
    following.takes()


# -- steps that are left out, states that move -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*a step was skipped")
@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "no master"])
def test_steps_that_are_skipped(policy: str) -> None:
    trainer = Trainer(policy, lr=1e-3, skip_nonfinite=True)
    following = Following(trainer.model, trainer.publisher)
    trainer.step(2)
    following.takes()
    for write in (False, True):
        if write:
            trainer.params[0].data[0, 0] = 5
        set_grads(trainer.params, 77)
        grad = trainer.params[0].grad
        assert grad is not None
        grad[0, 0] = torch.inf
        trainer.optimizer.step()
        assert (following.takes() < 250) is not write
    trainer.step()
    following.takes()


@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "fp32", "no master"])
def test_weights_that_are_offloaded_between_phases(policy: str) -> None:
    """The weights have new addresses afterwards, which must not count as a write: deltas stay small."""
    trainer = Trainer(policy, lr=1e-6)
    model, optimizer = trainer.model, trainer.optimizer
    following = Following(model, trainer.publisher)
    trainer.step(2)
    following.takes()
    trainer.step(2)
    usual = following.takes()
    trainer.step()
    torch_ext.offload(model, optimizer)
    torch_ext.offload(model, optimizer)
    torch_ext.onload(model, optimizer, states=False)
    doing = "publish(): the states of this optimizer are offloaded; call torch_ext.onload(model, optimizer) first"
    assert _refused(trainer.publisher.publish) == doing
    torch_ext.onload(model, optimizer)
    trainer.step()
    assert following.takes() < 1.5 * usual
    trainer.step()
    torch_ext.offload(model, optimizer, params=False)
    with torch.no_grad():
        trainer.params[0].mul_(1.5)
    torch_ext.onload(model, optimizer)
    trainer.step()
    following.takes()


# -- writes that the step ignores or that leave no trace ---------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "8bit", "fp16"])
def test_writes_that_the_step_ignores(policy: str, in_place: bool) -> None:
    """on_external_write="ignore": a step restores the weight from its master, after another value was published."""
    trainer = Trainer(policy, lr=1e-3, on_external_write="ignore")
    following = Following(trainer.model, trainer.publisher)
    trainer.step(2)
    following.takes()
    for steps in (0, 1):
        trainer.step()
        if in_place:
            with torch.no_grad():
                trainer.params[0].mul_(1.5)
        else:
            trainer.params[0].data[3, 5] = 7
        trainer.step(steps)
        following.takes()
    trainer.step()
    following.takes()


@pytest.mark.parametrize("at", [0, 300, 1023])
@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "8bit"])
def test_a_write_beside_which_a_step_changed_a_weight_or_two(policy: str, at: int) -> None:
    """The write and the step's changes are in the same 1024 elements that share a checksum, but not in the same 128
    that share a bound."""
    model = nn.Linear(1024, 2, bias=False).to(POLICIES[policy][0])
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.0, policy=policy_of(policy))
    following = Following(model, torch_ext.WeightPublisher(model, optimizer))
    for _ in range(2):
        model.weight.grad = torch.zeros_like(model.weight)
        model.weight.grad[0, 140] = 1
        optimizer.step()
        model.weight.data[0, at] = 5
        following.takes()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "8bit"])
def test_a_write_before_somebody_makes_the_state(policy: str, late: bool) -> None:
    """state_dict() creates the state from weights that were not published. The parameter may also be one that was added
    later."""
    trainer = Trainer(policy, lr=1e-3)
    following = Following(trainer.model, trainer.publisher)
    written = trainer.params[0]
    if late:
        trainer.step()
        written = trainer.model.frozen.requires_grad_(True)
        trainer.optimizer.add_param_group({"params": [("frozen", written)]})
        trainer.params.append(written)
        following.takes()
    with torch.no_grad():
        written.mul_(1.25)
    trainer.optimizer.state_dict()
    trainer.step()
    following.takes()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("how", ["model first", "model last", "masters of a state_dict", "in place"])
@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "8bit", "fp16", "fp32"])
def test_weights_and_masters_that_are_both_loaded(policy: str, how: str, steps: int) -> None:
    """They agree with each other, but not with anything that was published."""
    trainer = Trainer(policy, lr=1e-4)
    model, optimizer = trainer.model, trainer.optimizer
    following = Following(model, trainer.publisher)
    trainer.step()
    following.takes()
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trainer.step(5)
    following.takes()
    trainer.step()
    if how != "model last":
        model.load_state_dict(weights)
    if how == "masters of a state_dict":
        optimizer.resync_masters(state_dict=weights)
    elif how == "in place":  # like torch.distributed.checkpoint.load
        for index, entry in optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                value.copy_(state["state"][index][key])
    else:
        optimizer.load_state_dict(state)
    if how == "model last":
        model.load_state_dict(weights)
    trainer.step(steps)
    following.takes()


@pytest.mark.parametrize("policy", ["bf16", "bf16_remainder", "fp32"])
def test_a_backward_that_stepped_and_whose_gradients_were_dropped_is_a_step(policy: str) -> None:
    """Two steps may move a weight further than the bound of one step."""
    net = Net(POLICIES[policy][0])
    options: Any = {"policy": policy_of(policy), "step_in_backward": True}
    optimizer = torch_ext.AdamW(net.named_parameters(), lr=1e-3, **options)
    following = Following(net, torch_ext.WeightPublisher(net, optimizer))
    for step in range(4):
        net.backward(2 * step)
        optimizer.zero_grad()
        net.backward(2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
        following.takes()


def test_a_silent_write_without_a_master_is_found_by_the_engine() -> None:
    trainer = Trainer("no master", lr=1e-3)
    engine = Engine(trainer.model)
    trainer.step()
    engine.subscriber.apply(trainer.publisher.publish(), "full")
    trainer.step()
    trainer.params[0].data[3, 5] = 7
    assert _refused(lambda: engine.subscriber.apply(trainer.publisher.publish())) == (
        '"p0[130, 37]": elements [0, 4810) are not those of version 1 (they were written after it was applied; part '
        "0 of version 2); legal: begin with a full message"
    )
    engine.subscriber.apply(trainer.publisher.full(), "full")
    assert engine.differs(trainer.model) == []


@pytest.mark.parametrize("left_out", ["frozen", "without a gradient"])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16_remainder"])
def test_a_write_to_a_parameter_that_the_last_step_left_alone(policy: str, left_out: str) -> None:
    net = Net(torch.float32 if policy == "fp32" else BF16)
    optimizer = torch_ext.AdamW(net.parameters(), lr=1e-4, states=policy)
    following = Following(net, torch_ext.WeightPublisher(net, optimizer))
    for step in range(2):  # both steps are in one version
        net.backward(step)
        if step == 1:
            net.up.weight.grad = None
            net.up.weight.requires_grad_(left_out != "frozen")
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        net.up.weight.mul_(1.25)
    following.takes()


def test_a_forced_resync_tells_of_a_write_that_leaves_remainders_as_they_were() -> None:
    net = Net()
    optimizer = torch_ext.AdamW(net.parameters(), lr=1e-4, states="bf16_remainder")
    optimizer.state_dict()  # all remainders are zero
    following = Following(net, torch_ext.WeightPublisher(net, optimizer))
    net.down.bias.data[3] = 7
    optimizer.resync_masters(force=True)
    net.backward(0)
    optimizer.step()
    following.takes()


# -- other optimizers and publishers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["fp32", "bf16", "bf16_remainder", "8bit"])
def test_muon(states: Any) -> None:
    """Every version of an engine that follows Muon has its bits, after several steps and after a silent write."""
    net = Net()
    optimizer = torch_ext.Muon(net, lr=1e-5, states=states)
    following = Following(net, torch_ext.WeightPublisher(net, optimizer))
    for version in range(4):
        for step in range(1 + version):
            net.backward(10 * version + step)
            optimizer.step()
            optimizer.zero_grad()
        if version == 2:
            net.up.weight.data[3, 4] = 7
        following.takes()


def test_of_two_publishers_the_later_one_is_told() -> None:
    """An optimizer records changes for one publisher, the latest; the earlier one raises."""
    trainer = Trainer("bf16", lr=1e-3)
    following = Following(trainer.model, torch_ext.WeightPublisher(trainer.model, trainer.optimizer))
    trainer.step()
    earlier = _calls(trainer.publisher, trainer.model, trainer.optimizer)
    for doing in ("publish()", "full()", "publish_patches()"):
        expected = f"{doing}: a newer WeightPublisher was made for this optimizer; use that one"
        assert _refused(earlier[doing]) == expected
    following.takes()


def test_a_state_that_is_loaded_while_weights_stay() -> None:
    """A master becomes the saved one if that rounds to its weight, and the weight otherwise: the published weights are
    right in both cases."""
    trainer = Trainer("bf16", lr=1e-3)
    following = Following(trainer.model, trainer.publisher)
    trainer.step()
    saved = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, trainer.optimizer.state_dict()
    following.takes()
    trainer.step()
    trainer.model.load_state_dict(saved[0])
    trainer.optimizer.load_state_dict(saved[1])
    following.takes()
    trainer.step()
    following.takes()
