"""Experiments on the effect of roundings on a run. `python tests/bench --quality` prints their results; tests check
them.

Every figure compares the optimizer itself (`torch_ext.AdamW` under a policy) with float64 arithmetic on the same
gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torch_ext.optim.adamw import AdamW
from torch_ext.policy.loader import load_policy

ROUNDINGS = ("nearest", "stochastic", "dithered")
STATES = {"fp32": "fp32", "bf16": "bf16", "8-bit": "fp8"}  # name in the tables -> name in the policy

# -- exp_avg_sq after the gradient has dropped --------------------------------------------------------------------

BETA2 = 0.999
DROP = 0.1  # the factor by which gradients are multiplied after the warm-up


@dataclass(frozen=True)
class Sample:
    """Statistics of v (exp_avg_sq) over all elements after one step."""

    step: int
    mean: float  # of v / exact
    median: float  # of v / exact
    step_error: float  # rms of sqrt(exact / v) - 1: the relative error of the update's length
    level: float  # mean of v / scale^2: 1 where v has settled on gradients N(0, scale^2)


@dataclass
class Track:
    """The samples of v for one dtype of the state and one rounding. In the track of the exact v only `level` means
    something."""

    state: str
    rounding: str
    samples: list[Sample] = field(default_factory=list)

    def at(self, step: int) -> Sample:
        return next(sample for sample in self.samples if sample.step == step)

    def after(self, step: int) -> list[Sample]:
        return [sample for sample in self.samples if sample.step >= step]


@dataclass(frozen=True)
class Decay:
    """Gradients whose magnitude drops: N(0, 1) times one lognormal scale per element for `warmup` steps, then DROP
    times that for `decay` steps. The scales within a block differ by a factor of hundreds. Gradients are bf16, as in a
    bf16 model."""

    elements: int = 16384
    warmup: int = 1000
    decay: int = 7000
    every: int = 100  # steps between samples

    @property
    def steps(self) -> int:
        return self.warmup + self.decay

    def gradients(self, seed: int) -> tuple[Tensor, Iterator[Tensor]]:
        """Returns the scales, float64 [elements], and an iterator over the gradient of each step."""
        generator = torch.Generator().manual_seed(seed)
        scale = torch.randn(self.elements, generator=generator, dtype=torch.float64).exp()

        def grads() -> Iterator[Tensor]:
            for step in range(self.steps):
                size = scale if step < self.warmup else DROP * scale
                yield (torch.randn(self.elements, generator=generator, dtype=torch.float64) * size).bfloat16()

        return scale, grads()


def follow_moments(decay: Decay, kinds: Sequence[tuple[str, str]], seed: int) -> tuple[list[Track], Track]:
    """Follows v of each (state, rounding), and the exact v, through the warm-up and the decay. Samples every
    `decay.every`-th step. All get the same gradients."""
    scale, grads = decay.gradients(seed)
    exact = torch.zeros_like(scale)
    runs = [(Track(state, rounding), _moment_optimizer(decay, state, rounding, seed)) for state, rounding in kinds]
    truth = Track("exact", "none")
    for step, grad in enumerate(grads, 1):
        exact += (1 - BETA2) * (grad.double().square() - exact)
        for _, optimizer in runs:
            _step(optimizer, grad)
        if step % decay.every == 0:
            truth.samples.append(_sample(step, exact, exact, scale))
            for track, optimizer in runs:
                v = optimizer.state_dict()["state"][0]["exp_avg_sq"].double()  # decoded
                track.samples.append(_sample(step, v, exact, scale))
    return [track for track, _ in runs], truth


def _moment_optimizer(decay: Decay, state: str, rounding: str, seed: int) -> AdamW:
    """Returns an AdamW with one bf16 weight whose moments have this dtype and rounding."""
    config = {"exp_avg_dtype": STATES[state], "exp_avg_sq_dtype": STATES[state]}
    policy = load_policy(torch.bfloat16, override_optimizer_config=config)
    weight = nn.Parameter(torch.zeros(decay.elements, dtype=torch.bfloat16))
    chosen = None if rounding == "any" else rounding  # fp32 is not rounded
    return AdamW([weight], betas=(0.9, BETA2), policy=policy, moment_rounding=chosen, seed=seed)


def _sample(step: int, v: Tensor, exact: Tensor, scale: Tensor) -> Sample:
    ratio = v / exact
    error = (ratio.rsqrt() - 1).square().mean().sqrt()
    level = (v / scale.square()).mean()
    return Sample(step, float(ratio.mean()), float(ratio.median()), float(error), float(level))


def _step(optimizer: AdamW, grad: Tensor) -> None:
    optimizer.param_groups[0]["params"][0].grad = grad
    optimizer.step()


# -- bf16 weights without a master --------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightError:
    """rms of weight - exact, relative to the rms of exact - start."""

    rounding: str
    shares: dict[int, float]  # by step


def follow_weights(steps: Sequence[int], seed: int, elements: int = 16384, lr: float = 1e-4) -> list[WeightError]:
    """Follows bf16 weights, initially N(0, 1), that a constant gradient of 1 or -1 moves by lr in each step, so that
    the exact weight is known. Moments are fp32, so that only the weight is rounded. The last row, "floor", is the exact
    weight rounded once."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(elements, generator=generator).bfloat16()
    grad = torch.randn(elements, generator=generator).sign().bfloat16()
    config = {"main_params_dtype": None, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
    policy = load_policy(torch.bfloat16, override_optimizer_config=config)

    def share(weight: Tensor, step: int) -> float:
        moved = -lr * step * grad.double()
        return float((weight.double() - start.double() - moved).square().mean().sqrt() / moved.square().mean().sqrt())

    errors = []
    for rounding in ROUNDINGS:
        weight = nn.Parameter(start.clone())
        optimizer = AdamW([weight], lr=lr, weight_decay=0.0, policy=policy, weight_rounding=rounding, seed=seed)
        shares = {}
        for step in range(1, max(steps) + 1):
            _step(optimizer, grad)
            if step in steps:
                shares[step] = share(weight.detach(), step)
        errors.append(WeightError(rounding, shares))
    rounded_once = {step: share((start.double() - lr * step * grad.double()).bfloat16(), step) for step in steps}
    return [*errors, WeightError("floor", rounded_once)]


# -- 16-bit remainders compared with fp32 masters -----------------------------------------------------------------


@dataclass(frozen=True)
class RemainderCheck:
    """The results of three runs on the same gradients: with remainders; with fp32 masters; and with fp32 masters to
    which the rule of `follow_remainders` is applied by hand after each step. The counts are elements, summed over the
    steps."""

    element_steps: int
    met: int  # how often the rule changed a master
    elements: int  # of the parameter, not summed
    elements_met: int  # elements whose master the rule changed at least once, not summed
    differ_from_rule: int  # elements whose weight, master or moments differ between remainders and the rule by hand
    differ_unmet: int  # elements that differ between remainders and plain fp32 masters before the rule changed them


def follow_remainders(steps: int, seed: int, elements: int = 4096, lr: float = 1e-3) -> RemainderCheck:
    """Compares remainders with fp32 masters in every bit after every step. Weights are bf16 over many binades, moments
    bf16, and there is weight decay.

    A bf16 weight and 16 bits can represent all fp32 masters but one pattern: the upper tie of an even weight that is
    not zero. The rule is that it is stored one fp32 ulp lower (csrc/math/remainder.h). From then on both configurations
    train from masters one ulp apart, so the test can only demand that they differ by nothing but the rule."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(elements, generator=generator).mul(2).exp()
    start = (torch.randn(elements, generator=generator) * size * 0.02).bfloat16()
    remainders, ruled, plain = (
        AdamW([nn.Parameter(start.clone())], lr=lr, weight_decay=0.1, policy=policy, seed=seed)
        for policy in (
            load_policy(torch.bfloat16, override_optimizer_config={"store_param_remainders": kept})
            for kept in (True, False, False)
        )
    )
    met = differ_from_rule = differ_unmet = 0
    ever_met = torch.zeros(elements, dtype=torch.bool)
    for _ in range(steps):
        grad = (torch.randn(elements, generator=generator) * size).bfloat16()
        for optimizer in (remainders, ruled, plain):
            _step(optimizer, grad)
        tie = _lower_upper_ties(ruled)
        met += int(tie.sum())
        ever_met |= tie
        kept = _bits(remainders)
        differ_from_rule += int(_differing(kept, _bits(ruled)).sum())
        differ_unmet += int((_differing(kept, _bits(plain)) & ~ever_met).sum())
    return RemainderCheck(steps * elements, met, elements, int(ever_met.sum()), differ_from_rule, differ_unmet)


def _lower_upper_ties(optimizer: AdamW) -> Tensor:
    """Applies the rule to fp32 masters. Returns the mask of the changed elements."""
    weight = optimizer.param_groups[0]["params"][0]
    master = optimizer.state[weight]["master_param"].view(torch.int32)
    upper = weight.detach().view(torch.int16).int()
    tie = (upper & 1 == 0) & (upper & 0x7FFF != 0) & (master - (upper << 16) == 0x8000)
    master -= tie.int()
    return tie


def _bits(optimizer: AdamW) -> list[Tensor]:
    """Returns the bits of weight, master and moments, decoded."""
    weight = optimizer.param_groups[0]["params"][0]
    state = optimizer.state_dict()["state"][0]
    tensors = (weight.detach(), state["master_param"], state["exp_avg"], state["exp_avg_sq"])
    return [t.view(torch.int32 if t.dtype == torch.float32 else torch.int16) for t in tensors]


def _differing(one: list[Tensor], other: list[Tensor]) -> Tensor:
    """Returns the mask of elements that differ in any of the tensors."""
    return torch.stack([a != b for a, b in zip(one, other, strict=True)]).any(0)
