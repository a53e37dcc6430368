"""Random programs of a trainer (steps, external writes, loads, restarts, publishes; one or two ranks, any strategy) and
of engines that get deltas late, twice, damaged or not at all. Bits must be equal at every version, or there must be an
error and nothing may have changed. WEIGHT_PROGRAMS=1000 runs 1000 more; a seed that failed once is added to SEEDS."""

import os
import random
from typing import Any

import pytest
import ranks
import torch
from gradients import BF16, FP32, Given, noise
from torch import Tensor, nn

import torch_ext

SHAPES: list[Any] = [(3, 5), (2600,), (129,), (16, 130), (1,)]
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
SEEDS = [*range(6), 1027, 3163]
MORE = int(os.environ.get("WEIGHT_PROGRAMS", "0"))


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.given = Given(SHAPES, dtype)
        self.frozen = nn.Parameter(torch.ones(1500, dtype=dtype), requires_grad=False)

    def forward(self, grads: Any) -> Tensor:
        return self.given(grads)  # type: ignore[no-any-return]


def _model(dtype: torch.dtype) -> Any:
    torch.manual_seed(7)
    model = Layers(dtype)
    with torch.no_grad():
        for p in model.given.parameters():
            p.copy_(torch.randn(p.shape))
    return model


def _local(p: Any) -> Tensor:
    return (p.detach().to_local() if hasattr(p, "to_local") else p).detach()  # type: ignore[no-any-return]


class Program:
    """What the ranks of a trainer do; drawn from the seed, the same on each rank."""

    def __init__(self, rank: int, world: int, strategy: str | None, seed: int) -> None:
        self.draw, self.rank = random.Random(seed), rank
        self.dtype = self.draw.choice([BF16, BF16, BF16, FP32])
        self.model = _model(self.dtype)
        policy = torch_ext.load_policy(self.dtype)
        if strategy is not None:
            torch_ext.parallelize(self.model, policy, strategy=strategy)
        self.optimizer: Any = self._optimizer(policy, strategy)
        self.steps, self.saved = 0, None
        self.restart()

    def _optimizer(self, policy: torch_ext.Policy, strategy: str | None) -> Any:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        options: dict[str, Any] = {
            "lr": 10.0 ** self.draw.randint(-6, -2),
            "policy": policy,
            "states": None if self.dtype == FP32 else self.draw.choice(["bf16", "bf16_remainder", "8bit"]),
            "skip_nonfinite": self.draw.random() < 0.4,
        }
        if self.draw.random() < 0.25:
            return torch_ext.Muon(named, ns_dtype=FP32, **options)
        options["offload_fraction"] = self.draw.choice([0.0, 0.0, 0.5, 1.0])
        if self.draw.random() < 0.4:
            options |= {"ema_decay": 0.9}
        if strategy is None and not options["skip_nonfinite"] and not options["offload_fraction"]:
            options["step_in_backward"] = self.draw.random() < 0.6
        return torch_ext.AdamW(named, **options)

    def restart(self) -> None:
        """Creates a new publisher, which begins a new chain of deltas."""
        exact, sliceable = self.draw.random() < 0.3, self.draw.random() < 0.3
        self.publisher = torch_ext.WeightPublisher(self.model, self.optimizer, exact, sliceable=sliceable)

    def step(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            self._step(noise)

    def _step(self, made: Any) -> None:
        self.steps += 1
        self.model(made(self.steps, self.rank, SHAPES, self.dtype)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self) -> None:
        """Takes a step with infinite gradients, which is skipped."""
        if self.optimizer.skip_nonfinite:
            self._step(lambda *form: [grad * torch.inf for grad in noise(*form)])

    def swap_averages(self) -> None:
        if self.optimizer.averaging.dtype is not None:
            with self.optimizer.ema_weights(), pytest.raises(RuntimeError, match=r"publish\(\) within ema_weights"):
                self.publisher.publish()

    def offload(self) -> None:
        torch_ext.offload(self.model, self.optimizer)
        with pytest.raises(RuntimeError, match=r"publish\(\): .* offloaded; call torch_ext.onload"):
            self.publisher.publish()
        torch_ext.onload(self.model, self.optimizer)

    def write(self) -> None:
        """Writes to a whole parameter in place, as version counters see. Every rank writes the same: replicas must be
        equal."""
        with torch.no_grad():
            self.draw.choice(list(self.model.parameters())).mul_(self.draw.choice([0.5, 1.0, 1.25]))

    def write_silently(self) -> None:
        """Writes to this rank's first element of a parameter with a master, unseen. In a sharded parameter it is
        another element on each rank."""
        p = self.draw.choice(list(self.model.parameters()))
        value = self.draw.uniform(-2, 2)
        if self.dtype == BF16 and _local(p).numel():
            _local(p).view(-1)[0] = value

    def clamp(self) -> None:
        with self.optimizer.master_weights() as masters:
            for master in masters.values():
                master.clamp_(-1.5, 1.5)

    def save(self) -> None:
        self.saved = self.optimizer.state_dict()

    def load(self) -> None:
        if self.saved is not None:
            self.optimizer.load_state_dict(self.saved)

    def run(self, length: int) -> list[tuple[str, bytes, bytes, dict[str, bytes]]]:
        """Returns for each publish: the number of its chain, this rank's delta and full message, and the weights."""
        found = []
        chain = 0
        acts = [self.step] * 6 + [self.write, self.write_silently, self.clamp, self.save, self.load]
        acts += [self.skip, self.swap_averages, self.offload]
        for _ in range(length):
            for _ in range(self.draw.randint(0, 3)):
                self.draw.choice(acts)()
            if self.draw.random() < 0.1:
                self.restart()
                chain += 1
                delta = b""
            else:
                delta = self.publisher.publish()
            found.append((str(chain), delta, self.publisher.full(), _whole(self.model)))
        return found


def _whole(model: Any) -> dict[str, bytes]:
    """Returns the bytes of the whole weights."""
    found = {}
    for name, p in model.named_parameters():
        value: Any = p.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        # A clone: memory that numpy has seen cannot be offloaded.
        found[name] = value.clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def _programs(rank: int, world: int, seeds: list[int]) -> list[Any]:
    return [Program(rank, world, STRATEGIES[seed % len(STRATEGIES)], seed).run(8) for seed in seeds]


def _follow(seed: int, versions: Any) -> None:
    """Makes two engines follow the versions. versions: one list per rank."""
    Engine(seed).follow(versions)
    Engine(seed).follow_merged(versions)


class Engine:
    """An engine that gets messages in the order in which they come, some of them spoiled."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(-1 - seed)
        dtype = random.Random(seed).choice([BF16, BF16, BF16, FP32])
        self.tensors = {name: p.detach().clone() for name, p in _model(dtype).named_parameters()}
        self.subscriber = torch_ext.WeightSubscriber(self.tensors)

    def bits(self) -> dict[str, bytes]:
        return {name: t.view(-1).view(torch.uint8).numpy().tobytes() for name, t in self.tensors.items()}

    def refuses(self, parts: list[bytes]) -> None:
        """The parts must be rejected, and change neither a weight nor the version."""
        before, version = self.bits(), self.subscriber.version
        with pytest.raises((ValueError, RuntimeError)) as raised:
            self.subscriber.apply(parts, self._verify())
        assert len(str(raised.value)) > 20
        assert self.bits() == before and self.subscriber.version == version

    def _verify(self) -> Any:
        return self.draw.choice(["touched", "full"])

    def _spoiled(self, parts: list[bytes], before: list[bytes]) -> list[bytes]:
        """Returns parts that are not this version's: one is missing, repeated, of the version before, or damaged."""
        parts = list(parts)
        i = self.draw.randrange(len(parts))
        how = self.draw.randrange(4)
        if how == 0:
            return parts[:i] + parts[i + 1 :]
        if how == 1:
            return [*parts, parts[i]]
        if how == 2 and before:
            parts[i] = before[i]
        else:
            at = self.draw.randrange(len(parts[i]))
            parts[i] = parts[i][:at] + bytes([parts[i][at] ^ 1 << self.draw.randrange(8)]) + parts[i][at + 1 :]
        return parts

    def follow(self, versions: list[list[tuple[str, bytes, bytes, dict[str, bytes]]]]) -> None:
        """Follows version after version. versions: one list per rank."""
        before: list[bytes] = []
        chain, joined = "0", True
        for version in zip(*versions, strict=True):
            parts, fulls, expected = [p[1] for p in version], [p[2] for p in version], version[0][3]
            if version[0][0] != chain:
                chain, joined = version[0][0], False
            if joined and self.draw.random() < 0.15:
                joined = False  # the engine does not get this version
                continue
            if not joined:
                if all(parts):
                    self.refuses(parts)
                self.subscriber.apply(fulls, self._verify())
                joined = True
            else:
                if self.draw.random() < 0.5:
                    self.refuses(self._spoiled(parts, before))
                self.draw.shuffle(parts)
                whole = [torch_ext.merge_deltas(parts)] if self.draw.random() < 0.3 else parts
                self.subscriber.apply(whole, self._verify())
                self.refuses(whole)
                before = [p[1] for p in version]
            assert [name for name, bits in self.bits().items() if bits != expected[name]] == []

    def follow_merged(self, versions: list[list[tuple[str, bytes, bytes, dict[str, bytes]]]]) -> None:
        """Follows with messages that merge several versions."""
        kept: list[bytes] = []
        for version in zip(*versions, strict=True):
            if not all(p[1] for p in version):  # a new chain begins
                self.subscriber.apply([p[2] for p in version])
                kept = []
            else:
                kept += [p[1] for p in version]
                if self.draw.random() < 0.6:
                    continue
                self.subscriber.apply(torch_ext.merge_deltas(kept), self._verify())
                kept = []
            assert [name for name, bits in self.bits().items() if bits != version[0][3][name]] == []


@pytest.mark.filterwarnings("ignore:.*a step was skipped")
@pytest.mark.parametrize("seed", [*SEEDS, *range(2000, 2000 + MORE)])
def test_programs_of_one_process(seed: int) -> None:
    _follow(seed, [Program(0, 1, None, seed).run(8)])


@pytest.mark.parametrize("first", [0, *range(2000, 2000 + MORE, 8)])
def test_programs_of_two_ranks(first: int) -> None:
    seeds = list(range(first, first + 8))
    answers = ranks.run(2, _programs, seeds, limit=300.0)
    for i, seed in enumerate(seeds):
        _follow(seed, [answer[i] for answer in answers])
