"""After destroy_process_group, every call that needs the group raises an error with the call's name."""

import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, FP16, FP32, Given, noise, on_all_ranks, policy
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES = [(4,), (200,), (3,)]


class _Training:
    """A model under a strategy and its optimizer, with gradients that were not stepped yet."""

    def __init__(self, rank: int, strategy: str, group: Any) -> None:
        self.rank, self.group, self.strategy = rank, group, strategy
        self.model: Any = Given(SHAPES, BF16)
        self.policy = policy(BF16, FP32)
        torch_ext.parallelize(self.model, self.policy, strategy=strategy, process_group=group)
        self.optimizer = torch_ext.AdamW(self.model.parameters(), lr=0.1, policy=self.policy)
        self.scaler = policy(FP16, FP32).grad_scaler(process_group=group)
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scaler.scale(torch.ones(1))
        self.backward()

    def backward(self) -> None:
        self.model(noise(1, self.rank, SHAPES, BF16)).backward()

    def masters(self) -> None:
        with self.optimizer.master_weights():
            pass


# Name -> the call as a message names it (a regular expression), and the call. Where collectives fail, those that need
# gradients find it out when they check, first, whether these may be read.
CALLS: dict[str, tuple[str, Callable[[_Training], Any]]] = {
    "clip_grad_norm_ of an optimizer": (
        r"the norm of the grad|^clip_grad_norm_\(\): ",
        lambda t: torch_ext.clip_grad_norm_(t.optimizer, 1.0),
    ),
    "clip_grad_norm_ of parameters": (
        r"the norm of the grad|^clip_grad_norm_\(\): ",
        lambda t: torch_ext.clip_grad_norm_(t.model.parameters(), 1.0),
    ),
    "consolidate_state_dict": ("consolidate_state_dict", lambda t: t.optimizer.consolidate_state_dict()),
    "the scaler": (r"the loss scale|^unscale_\(\): ", lambda t: t.scaler.unscale_(t.optimizer)),
    "parallelize": (
        "parallelize",
        lambda t: torch_ext.parallelize(Given(SHAPES), t.policy, process_group=t.group),
    ),
}
# Calls that also fail over a back end whose collectives torch has to look up. gloo's messages still work.
COLLECTIVE_CALLS = CALLS | {
    "step": (r"^step\(\): ", lambda t: t.optimizer.step()),
    "master_weights": (r"master_weights\(\)", _Training.masters),
    "backward": ("gradient", _Training.backward),
}


def _after_the_end(rank: int, world: int, strategy: str, collectives: bool) -> dict[str, str]:
    """Destroys the group and returns each call's error. The weights must not change."""
    group = ranks.group_with_collectives() if collectives else dist.new_group()
    training = _Training(rank, strategy, group)
    dist.destroy_process_group(group)
    before = [p.detach().clone() for p in training.model.parameters()]
    messages = {}
    for name, (_, call) in (COLLECTIVE_CALLS if collectives else CALLS).items():
        with pytest.raises(RuntimeError) as raised:
            call(training)
        messages[name] = str(raised.value)
    assert all(map(torch.equal, before, training.model.parameters())), "a failed call changes nothing"
    assert len(training.optimizer.state_dict()["state"]) == len(SHAPES), "which is no collective"
    return messages


@pytest.mark.parametrize("collectives", [False, True], ids=["gloo", "collectives"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_what_speaks_over_the_group_says_so(strategy: str, collectives: bool) -> None:
    for messages in ranks.run(2, _after_the_end, strategy, collectives):
        for name, message in messages.items():
            assert "destroy_process_group" in message, (name, message)
            assert re.search(COLLECTIVE_CALLS[name][0], message), (name, message)


def _hooked(rank: int, world: int) -> str:
    """Destroys a DDP model's group; returns the error of register_comm_hook."""
    group = dist.new_group()
    model = DistributedDataParallel(Given(SHAPES), process_group=group)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError) as raised:
        torch_ext.register_comm_hook(model, policy())
    return str(raised.value)


def test_register_comm_hook_says_so() -> None:
    for message in ranks.run(2, _hooked):
        assert message.startswith("register_comm_hook: its process group was destroyed (destroy_process_group)")


def _everything_ends(rank: int, world: int, strategy: str) -> None:
    """Destroys all groups. Calls that need no other rank must still work: saving the state, a local norm."""
    folder = on_all_ranks(tempfile.mkdtemp() if rank == 0 else "")[0]
    training = _Training(rank, strategy, dist.group.WORLD)
    dist.destroy_process_group()
    optimizer = torch_ext.AdamW(training.model.parameters(), lr=0.1, policy=training.policy)
    assert optimizer.state_dict()["param_groups"]
    if strategy == "no_shard":
        assert torch_ext.clip_grad_norm_(training.optimizer, 1.0) > 0
        training.optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="destroy_process_group"):
            torch_ext.clip_grad_norm_(training.optimizer, 1.0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_what_needs_no_other_rank_goes_on(strategy: str) -> None:
    ranks.run(2, _everything_ends, strategy)
