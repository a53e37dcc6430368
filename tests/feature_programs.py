"""Random histories that combine features, for test_feature_programs.py in tests/torch and the same with two ranks.

A history is a list of acts, drawn from a seed. Two trainers run it in lock step: `a` with features (an average, a
publisher with engines, health, states on the host, steps in backward, restarts from checkpoints), `b` without any.
After each act their weights must have the same bits, and what the features report must agree with the masters of `b`.
Any part of a history is a legal history, so one that fails can be shortened.
"""

import copy
import math
import random
from typing import Any, NamedTuple

import torch
from feature_oracles import Averages, Engine, masters_of, steps_of
from feature_restarts import RESTARTED
from feature_trainer import BF16, FP16, FP32, Config, Trainer, gathered, same_bits, whole
from torch import Tensor

import torch_ext

LEFT_OUT = "nothing was measured: the step was skipped, because a gradient was not finite"
COMMON = ["step"] * 6 + ["step_of_some", "write", "write_all_silently", "write_one_and_resync", "seed_masters"]
COMMON += ["clamp", "average_masters", "freeze", "group", "lr", "save", "load"]
COMMON += ["drop", "refused", "move"]
NOT_IN_BACKWARD = ["accumulate", "clip", "clip_by_torch", "scaled"]
FEATURES = ["publish"] * 4 + ["swap", "ask", "state_dict", "measure", "restart", "offload", "masters", "republish"]
FEATURES += ["patches", "consolidate", "resync", "load_own", "health_again"]
DISTRIBUTED_WITHOUT = ["step_of_some", "freeze", "group", "scaled", "accumulate"]


class Act(NamedTuple):
    what: str
    seed: int


class Compared:
    """Both trainers, and the comparisons after each act."""

    def __init__(self, seed: int, strategy: str | None = None) -> None:
        self.draw = random.Random(seed)
        self.strategy = strategy
        self.config = c = Config.of(self.draw, strategy)
        self.a, self.b = Trainer(c, True, strategy), Trainer(c, False, strategy)
        self.averages: Averages | None = None
        if "ema_decay" in c.features:
            self.averages = Averages(c.features["ema_decay"], c.features["ema_every"])
        self.saved_averages: Any = None
        self.measuring = self.measured = False
        self.publish_anew()

    def publish_anew(self) -> None:
        c = self.config
        self.publisher = torch_ext.WeightPublisher(self.a.model, self.a.optimizer, exact=c.exact, sliceable=c.sliceable)
        self.kept: list[Any] = []
        if not hasattr(self, "engine"):
            self.engine, self.late_engine = Engine(self.a, self.draw), Engine(self.a, self.draw)
        else:
            fulls = gathered(self.publisher.full())
            self.engine.subscriber.apply(fulls, "full")
            self.late_engine.subscriber.apply(fulls)
            self.follow(self.engine)

    def compare(self) -> None:
        b = self.b.params()
        differ = [name for name, p in self.a.params().items() if not same_bits(whole(p), whole(b[name]))]
        assert not differ, f"weights differ: {differ}"

    def after(self, act: Act, before: dict[str, Tensor], counts: dict[str, int]) -> None:
        now = steps_of(self.b)
        assert steps_of(self.a) == now, (steps_of(self.a), now)
        if act.what == "save":
            self.saved_averages = copy.deepcopy(self.averages)
        elif act.what == "load" and getattr(self.b, "saved", None) and self.b.saved[0] == self.b.late:
            self.averages = copy.deepcopy(self.saved_averages)
        elif act.what == "skip" and self.measuring:
            self.measuring = False
            assert self.a.optimizer.health().warnings == [LEFT_OUT]
        elif any(count != counts.get(name, 0) for name, count in now.items()):
            self.stepped(act, before, counts, now)

    def stepped(self, act: Act, before: dict[str, Tensor], counts: dict[str, int], now: dict[str, int]) -> None:
        masters = masters_of(self.b)
        if self.averages is not None:
            self.averages.stepped(now, masters)
        if self.measuring:
            self.measuring = False
            self.check_health([name for name in now if now[name] != counts.get(name, 0)], before, masters)

    def check_health(self, moved: list[str], before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        self.measured = True
        found = {p.name: p for p in self.a.optimizer.health().params}
        assert sorted(found) == sorted(moved), (sorted(found), sorted(moved))
        for name, p in found.items():
            update, weight = after[name] - before[name], after[name]
            assert p.elements == weight.numel(), (name, p.elements)
            self.check_numbers(name, p, update, weight)

    def check_numbers(self, name: str, p: Any, update: Tensor, weight: Tensor) -> None:
        rms = float(weight.square().mean().sqrt())
        assert math.isclose(p.weight_rms, rms, rel_tol=1e-4, abs_tol=1e-7), (name, p, rms)
        assert p.largest_weight == float(weight.abs().max()), (name, p)
        rms = float(update.square().mean().sqrt())
        assert math.isclose(p.update_rms, rms, rel_tol=1e-3, abs_tol=1e-9), (name, p, rms)

    def follow(self, engine: Engine) -> None:
        weights = engine.weights()
        differ = [name for name, p in self.b.params().items() if not same_bits(whole(p), weights[name])]
        assert not differ, f"the engine's weights differ: {differ}"

    def near(self, found: dict[str, Tensor], rounded: torch.dtype) -> None:
        assert self.averages is not None
        most = {BF16: 0.03, "24bit": 2e-4, FP32: 1e-5}[self.config.features["ema_dtype"]]
        most += {BF16: 4e-3, FP16: 1e-3, FP32: 0.0}[rounded]
        weights = {name: whole(p).double() for name, p in self.b.params().items()}
        for name, value in found.items():
            count = self.averages.counts.get(name, 0)
            if count == 0 or name not in self.averages.of:
                wanted = weights[name]
                if count:
                    continue  # between the first step and the first that is averaged
            else:
                wanted = self.averages.of[name]
            size = max(float(wanted.norm()), self.averages.sizes.get(name, 0.0), 1e-30)
            error = float((value - wanted).norm()) / size
            assert error < most, f"the average of {name} is off by {error} (most {most}), after {count} steps"


class Program(Compared):
    """Runs both trainers through one history. Its methods named in FEATURES are the acts of trainer `a` alone."""

    def acts(self, n: int) -> list[Act]:
        among = COMMON + FEATURES * 2
        if not self.config.features.get("step_in_backward"):
            among = among + NOT_IN_BACKWARD
        if self.config.options["skip_nonfinite"]:
            among = [*among, "skip", "skip"]
        if "on_external_write" in self.config.options:  # these acts take writes over, which are ignored here
            among = [one for one in among if one not in ("resync", "masters")]
        if self.strategy is not None:
            among = [one for one in among if one not in DISTRIBUTED_WITHOUT]
        return [Act(self.draw.choice(among), self.draw.randrange(1 << 30)) for _ in range(n)]

    def run(self, acts: list[Act]) -> None:
        for at, act in enumerate(acts):
            try:
                self.do(act)
            except Exception as error:
                history = f"at {at}: {act} of {[tuple(one) for one in acts[: at + 1]]}, {self.config}"
                raise AssertionError(history) from error

    def do(self, act: Act) -> None:
        if "on_external_write" in self.config.options:  # concerns writes after states exist: create them in both now
            for trainer in (self.a, self.b):
                trainer.optimizer.state_dict()
        if act.what in FEATURES:
            getattr(self, act.what)(act.seed)
        else:
            before = masters_of(self.b) if self.measuring else {}
            counts = steps_of(self.b)
            for trainer in (self.a, self.b):
                getattr(trainer, act.what)(act.seed)
            self.after(act, before, counts)
        self.compare()

    def measure(self, seed: int) -> None:
        self.measuring = True
        self.a.optimizer.measure_health()

    def publish(self, seed: int) -> None:
        parts = gathered(self.publisher.publish())
        draw = random.Random(seed)
        draw.shuffle(parts)
        self.kept += parts
        if draw.random() < 0.4:
            if self.late_engine.subscriber.version + 1 < self.publisher.version:
                self.refuses(parts, "versions between were lost")
            self.late_engine.subscriber.apply(torch_ext.merge_deltas(self.kept))
            self.kept = []
            self.follow(self.late_engine)
            self.refuses(parts, "was applied already")
        whole_version = [torch_ext.merge_deltas(parts)] if draw.random() < 0.3 else parts
        self.engine.subscriber.apply(whole_version, draw.choice(["touched", "full"]))
        self.follow(self.engine)
        if draw.random() < 0.2:
            joins = Engine(self.a, draw)
            for t in joins.tensors.values():
                t.zero_()
            joins.subscriber.apply(gathered(self.publisher.full()), "full")
            self.follow(joins)

    def refuses(self, parts: list[bytes], words: str) -> None:
        try:
            self.late_engine.subscriber.apply(parts)
        except RuntimeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"it applied, and should not: {words}")

    def patches(self, seed: int) -> None:
        """Publishes patches in place of a delta; the engines then need all weights again."""
        base = {name: value.clone() for name, value in self.engine.weights().items()}
        for patches in gathered([tuple(patch) for patch in self.publisher.publish_patches()]):
            for name, at, values, _ in patches:
                base[name].view(-1)[at.long()] = values
        differ = [name for name, p in self.b.params().items() if not same_bits(whole(p), base[name])]
        assert not differ, f"patches differ: {differ}"
        fulls = gathered(self.publisher.full())
        for engine in (self.engine, self.late_engine):
            engine.subscriber.apply(fulls)
        self.kept = []

    def republish(self, seed: int) -> None:
        self.publish_anew()

    def swap(self, seed: int) -> None:
        if self.averages is None:
            return
        with self.a.optimizer.ema_weights():
            inside = {name: whole(p).double() for name, p in self.a.params().items()}
        self.near(inside, self.config.dtype)

    def ask(self, seed: int) -> None:
        if self.averages is not None:
            found = self.a.optimizer.ema_state_dict()
            if self.strategy is None:
                self.near({str(name): value.double() for name, value in found.items()}, FP32)

    def state_dict(self, seed: int) -> None:
        self.a.optimizer.state_dict()

    def consolidate(self, seed: int) -> None:
        self.a.optimizer.consolidate_state_dict(to=None)

    def masters(self, seed: int) -> None:
        if random.Random(seed).random() < 0.5:
            self.a.optimizer.master_state_dict()
        else:
            with self.a.optimizer.master_weights():
                pass

    def resync(self, seed: int) -> None:
        """Resyncs the masters, as the next step would."""
        self.a.optimizer.resync_masters()

    def load_own(self, seed: int) -> None:
        """Loads the optimizer's own state, the same object or a copy."""
        state = self.a.optimizer.state_dict()
        self.a.optimizer.load_state_dict(copy.deepcopy(state) if random.Random(seed).random() < 0.7 else state)

    def health_again(self, seed: int) -> None:
        if self.measured:
            first, second = self.a.optimizer.health(), self.a.optimizer.health()
            assert first.as_dict() == second.as_dict()

    def offload(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds = {"params": draw.random() < 0.7, "grads": draw.random() < 0.5, "states": draw.random() < 0.7}
        torch_ext.offload(self.a.model, self.a.optimizer, **kinds)
        torch_ext.onload(self.a.model, self.a.optimizer)

    def restart(self, seed: int) -> None:
        draw = random.Random(seed)
        a = self.a
        way = draw.choice(list(RESTARTED) if self.strategy is None else ["dcp", "at_rest_dcp", "consolidated"])
        a.fraction = draw.choice([0.0, 0.5, 1.0])
        RESTARTED[way](a)
        self.measured = False
        if self.measuring:
            a.optimizer.measure_health()
        self.publish_anew()
