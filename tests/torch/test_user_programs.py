"""Random programs of what users of torch.optim.AdamW do between steps, compared with torch.optim.AdamW in float64 on
the same gradients: schedules, groups that are changed or added, hooks, clips, closures, frozen parameters, writes to
weights, copies and checkpoints. Compared are masters, hyper-parameters and step counts."""

import collections
import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import torch_ext

SHAPES = [(40, 70), (33,), (), (0,), (1,), (2, 3, 5, 4), (3000,)]
# kind -> dtype, options, and how far masters may be from float64, relative to the distance that they have moved
KINDS: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "fp32": (torch.float32, {}, 5e-5),
    "fp32 on the host": (torch.float32, {"offload_fraction": 0.5}, 5e-5),
    "fp32 moments": (torch.bfloat16, {"states": "fp32"}, 5e-5),
    "bf16": (torch.bfloat16, {}, 0.03),
    "remainders": (torch.bfloat16, {"states": "bf16_remainder"}, 0.03),
    "fp16": (torch.float16, {}, 0.03),
}
SCHEDULES: list[Any] = [
    lambda o: schedules.StepLR(o, 2, 0.5),
    lambda o: schedules.CosineAnnealingLR(o, 7),
    lambda o: schedules.OneCycleLR(o, max_lr=0.01, total_steps=100),
    lambda o: schedules.CyclicLR(o, base_lr=1e-3, max_lr=1e-2, step_size_up=3),
    lambda o: schedules.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, 0.1), schedules.CosineAnnealingLR(o, 9)], [3]),
    lambda o: torch.optim.swa_utils.SWALR(o, 0.002, 4),
]
CHANGES: list[tuple[str, Any]] = [
    *(("lr", 1e-3), ("lr", 0.02), ("betas", (0.5, 0.9)), ("betas", [0.9, 0.99])),
    *(("weight_decay", 0), ("weight_decay", 0.3), ("eps", 1e-6), ("maximize", True), ("maximize", False)),
]


class Program:
    """Random calls on our optimizer and on torch's; each has parameters of its own."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.dtype, options, self.share = KINDS[kind]
        generator = torch.Generator().manual_seed(seed)
        shapes = [self.random.choice(SHAPES) for _ in range(6)]
        self.ours = [nn.Parameter(torch.randn(shape, generator=generator).to(self.dtype)) for shape in shapes]
        self.theirs = [nn.Parameter(p.detach().double()) for p in self.ours]
        self.way, self.slack = [0.0] * 6, [0.0] * 6  # distance moved; how much of the old master a write may have left
        self.written = set[int]()  # parameters that were written since the last step
        self.late, self.kind, self.schedules = [4, 5], kind, list[Any]()
        lr: Any = self.random.choice([0.01, torch.tensor(0.003)])
        self.options: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.both = [
            torch_ext.AdamW(self.groups(self.ours), **copy.deepcopy(self.options), **options),
            torch.optim.AdamW(self.groups(self.theirs), foreach=False, **copy.deepcopy(self.options)),
        ]

    def groups(self, params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": 0.02}, {"params": params[2:4]}]

    def run(self, length: int) -> list[str]:
        actions = [*["step"] * 5, *("change", "schedule", "add", "write", "freeze", "hook", "fail", "copy", "reload")]
        trace: list[str] = []
        for action in [*(self.random.choice(actions) for _ in range(length)), "step"]:
            trace.append(action)
            getattr(self, action)()
            try:
                self.check()
            except AssertionError as failure:
                raise AssertionError("; ".join(trace)) from failure
        return trace

    def step(self) -> None:
        before = [p.detach().clone() for p in self.theirs]
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        for p, q in zip(self.ours, self.theirs, strict=True):
            grad = torch.randn(p.shape, generator=generator)
            p.grad = (grad.sign() * grad.abs().clamp(min=0.05)).to(self.dtype) if p.requires_grad else None
            p.grad = p.grad if self.random.random() < 0.9 else None
            q.grad = None if p.grad is None else p.grad.double()
        stepped = [i for i in range(6) if i not in self.late and self.ours[i].grad is not None]
        if clips := self.random.random() < 0.4:
            limit = self.random.choice([0.5, 1e9])
            torch_ext.clip_grad_norm_(self.both[0], limit)
            torch.nn.utils.clip_grad_norm_([self.theirs[i] for i in stepped], limit)
        closure: Any = (lambda: 1.0) if not clips and self.random.random() < 0.3 else None
        assert [optimizer.step(closure) for optimizer in self.both] == [closure and 1.0] * 2
        self.written -= set(stepped)
        for i, (p, was) in enumerate(zip(self.theirs, before, strict=True)):
            self.way[i] += float((p.detach() - was).norm())
        for one in self.schedules if stepped else ():
            one.step()

    def change(self) -> None:
        group, (key, value) = self.random.randrange(2), self.random.choice(CHANGES)
        for optimizer in self.both:
            optimizer.param_groups[group][key] = copy.copy(value)

    def schedule(self) -> None:
        tensors = isinstance(self.both[0].param_groups[1]["lr"], Tensor)
        if not self.schedules and not tensors:
            make = self.random.choice(SCHEDULES)
            self.schedules = [make(optimizer) for optimizer in self.both]

    def add(self) -> None:
        if self.late and not self.schedules:
            i = self.late.pop()
            for optimizer, params in zip(self.both, (self.ours, self.theirs), strict=True):
                optimizer.add_param_group({"params": [params[i]], "weight_decay": 0.0})

    def write(self) -> None:
        """If the written value equals the old weight, the master keeps what rounding took from it."""
        i = self.random.randrange(6)
        p, generator = self.ours[i], torch.Generator().manual_seed(self.random.randrange(1 << 30))
        value = torch.randn(p.shape, generator=generator).to(self.dtype)
        how = self.random.choice(["copy_", "data", "swap"])
        with torch.no_grad():
            p.copy_(value) if how == "copy_" else p.data.copy_(value) if how == "data" else None
            p.data = value if how == "swap" else p.data
            self.theirs[i].copy_(value)
        self.written.add(i)
        self.slack[i] = 0.0 if self.dtype == torch.float32 else 4e-3 * (1 + 0.2 * p.numel() ** 0.5)

    def freeze(self) -> None:
        i = self.random.randrange(6)
        for p in (self.ours[i], self.theirs[i]):
            p.requires_grad_(not p.requires_grad)

    def hook(self) -> None:
        def decay(optimizer: Any, _args: Any, _options: Any) -> None:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.05

        for optimizer in self.both:
            optimizer.register_step_pre_hook(decay)

    def fail(self) -> None:
        def closure() -> Any:
            raise KeyError("no batch")

        for optimizer in self.both:
            with pytest.raises(KeyError, match="no batch"):
                optimizer.step(closure)

    def copy(self) -> None:
        """Neither optimizer's copy has hooks."""
        if not self.schedules:
            how = self.random.choice([copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
            self.ours, self.both[0] = how((self.ours, self.both[0]))
            self.theirs, self.both[1] = how((self.theirs, self.both[1]))

    def reload(self) -> None:
        saved = copy.deepcopy(self.both[0].state_dict())
        with torch.no_grad():
            [p.grad.zero_() for p in self.ours if p.grad is not None]
        self.both[0].load_state_dict(saved)

    def check(self) -> None:
        for ours, theirs in zip(*(optimizer.param_groups for optimizer in self.both), strict=True):
            for key in ("lr", "eps", "weight_decay", "maximize"):
                assert float(ours[key]) == pytest.approx(float(theirs[key]), rel=1e-6)
            assert tuple(ours["betas"]) == pytest.approx(tuple(theirs["betas"]))
        masters: dict[Any, Any] = self.both[0].master_state_dict()  # type: ignore[attr-defined]
        all_params = [p for group in self.both[0].param_groups for p in group["params"]]
        for at, p in enumerate(all_params):
            i = next(i for i, q in enumerate(self.ours) if q is p)
            found, exact = (p if i in self.written else masters[at]).detach().double(), self.theirs[i].detach()
            limit = self.share * self.way[i] + self.slack[i] + 3e-7 * float(exact.norm()) + 1e-6
            assert float((found - exact).norm()) <= limit, (i, tuple(p.shape))
            steps = [
                optimizer.state[q].get("step", 0) for optimizer, q in zip(self.both, (p, self.theirs[i]), strict=True)
            ]
            assert float(steps[0]) == float(steps[1])


@pytest.mark.filterwarnings("ignore:torch_ext. step", "ignore:Detected call of")
@pytest.mark.parametrize("kind", KINDS)
def test_what_users_do_between_steps_is_what_it_is_in_torch(kind: str) -> None:
    done = collections.Counter[str]()
    for seed in range(16):
        done.update(Program(kind, seed).run(14))
    assert len(done) == 10 and min(done.values()) >= 5, done
