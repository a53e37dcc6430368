"""Code of torch.optim's users that reads or changes optimizer.state, to restart moments for example. Random programs
are compared with torch.optim.AdamW, with states on the device and on the host."""

import collections
import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn
from training import set_grads

import torch_ext

SHAPES = [(130, 37), (130,), (3, 5, 7), (1,), (), (257,)]


class Program:
    """Random calls on an optimizer; equal seeds make equal calls."""

    def __init__(self, seed: int, kind: Any, **options: Any) -> None:
        self.random, self.steps = random.Random(seed), 0
        generator = torch.Generator().manual_seed(seed)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.make = lambda params: kind(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, **options)
        self.optimizer = self.make(self.params)

    def run(self, length: int) -> list[str]:
        resets = ["clear", "another", "pop", "delete", "empty", "zero"]
        others = ["step", "step", "step", "read", "replicate", "pickled", "load", "restep", "replace"]
        trace = [self.random.choice(self.random.choice([resets, others, others])) for _ in range(length)]
        for action in trace:
            getattr(self, action)()
        self.step()
        return trace

    def one(self) -> nn.Parameter:
        return self.random.choice(self.params)

    def step(self) -> None:
        self.steps += 1
        set_grads(self.params, self.steps)
        for p in self.params:
            if self.random.random() < 0.2:
                p.grad = None
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.state.clear()

    def another(self) -> None:
        self.optimizer.state = collections.defaultdict(dict)

    def pop(self) -> None:
        self.optimizer.state.pop(self.one(), None)

    def delete(self) -> None:
        p = self.one()
        if p in self.optimizer.state:
            del self.optimizer.state[p]

    def empty(self) -> None:
        self.optimizer.state[self.one()] = {}

    def zero(self) -> None:
        for key, value in self.optimizer.state[self.one()].items():
            if key in ("exp_avg", "exp_avg_sq", "step"):
                value.zero_()

    def restep(self) -> None:
        state = self.optimizer.state[self.one()]
        if float(state.get("step", 0)) > 0:
            state["step"] = torch.tensor(3.0)

    def replace(self) -> None:
        """Replaces a parameter by another one, which takes over its state or starts without one."""
        i = self.random.randrange(len(self.params))
        old, new = self.params[i], nn.Parameter(self.params[i].detach().clone())
        (group,) = self.optimizer.param_groups
        self.params[i] = group["params"][i] = new
        state, takes_over = self.optimizer.state.pop(old, None), self.random.random() < 0.7
        if state is not None and takes_over:
            self.optimizer.state[new] = state

    def read(self) -> None:
        assert self.optimizer.state[self.one()].get("max_exp_avg_sq") is None

    def replicate(self) -> None:
        self.params, self.optimizer = copy.deepcopy((self.params, self.optimizer))

    def pickled(self) -> None:
        self.params, self.optimizer = pickle.loads(pickle.dumps((self.params, self.optimizer)))

    def load(self) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = self.make(self.params)
        self.optimizer.load_state_dict(saved)

    def everything(self) -> tuple[list[torch.Tensor], list[float]]:
        steps = [float(self.optimizer.state[p].get("step", 0)) for p in self.params]
        return [p.detach() for p in self.params], steps


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("block", range(4))
def test_states_that_are_dropped_or_written_are_what_torchs_are(block: int, fraction: float) -> None:
    kinds = collections.Counter[str]()
    for seed in range(20 * block, 20 * (block + 1)):
        theirs = Program(seed, torch.optim.AdamW, foreach=False)
        # For states on the host, optimizer.state has only the step: writes to the other keys have no effect.
        ours = Program(seed, torch_ext.AdamW, offload_fraction=fraction)
        if fraction:
            ours.zero = theirs.zero = ours.restep = theirs.restep = lambda: None  # type: ignore[method-assign]
        kinds.update(theirs.run(12))
        trace = ours.run(12)
        weights, steps = ours.everything()
        expected, expected_steps = theirs.everything()
        assert steps == expected_steps, (seed, trace)
        for p, q in zip(weights, expected, strict=True):
            assert torch.allclose(p, q, rtol=0, atol=2e-5), (seed, trace)
    assert len(kinds) == 13, kinds


def test_a_state_that_somebody_read_before_there_was_one_loads() -> None:
    """torch's optimizer.state is a defaultdict: reading an absent entry creates {}, which torch saves and loads."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    theirs = torch.optim.AdamW(params, lr=0.1)
    params[0].grad = torch.ones(3)
    theirs.step()
    assert theirs.state[params[1]].get("exp_avg") is None
    saved = theirs.state_dict()
    assert saved["state"][1] == {}
    ours = torch_ext.AdamW(params, lr=0.1)
    ours.load_state_dict(saved)
    assert torch.equal(ours.state[params[0]]["exp_avg"], theirs.state[params[0]]["exp_avg"])
    assert float(ours.state[params[1]]["step"]) == 0
