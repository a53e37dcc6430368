"""The benchmark's rows about backward: what a gradient costs there, and steps within backward."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import torch_ext
from bench import timing, workload
from bench.figures import Bar
from bench.row import Bench

# -- gradients: the work for each gradient in backward, against DistributedDataParallel --------------------------------

_TENSORS, _NUMEL = 1000, 64
_ROUNDS = 40


class _Small(torch.nn.Module):
    """A model of many small parameters, so that backward's time is that of the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(_NUMEL)) for _ in range(_TENSORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sum() for p in self.all]).sum()


class _Backward:
    """One contender: a training step whose backward is timed. It is timed in processor time of this thread, which
    depends less on how busy the machine is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._x, self.seconds = model, torch.ones(_NUMEL), list[float]()

    def __call__(self) -> None:
        self._model.zero_grad()
        loss = self._model(self._x)
        begin = time.thread_time()
        loss.backward()
        self.seconds.append(time.thread_time() - begin)


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _parallel(strategy: str) -> torch.nn.Module:
    model = _Small()
    return torch_ext.parallelize(model, torch_ext.load_policy(model), strategy=strategy)


def gradients(bench: Bench) -> None:
    strategies = ("no_shard", "optim", "optim_grads")
    threads = torch.get_num_threads()
    with _one_rank():
        torch.set_num_threads(1)
        found = {"plain": _Backward(_Small()), "DDP": _Backward(torch.nn.parallel.DistributedDataParallel(_Small()))}
        found |= {strategy: _Backward(_parallel(strategy)) for strategy in strategies}
        rounds = min(_ROUNDS, 2 * bench.rounds)
        bench.run("gradients", found, rounds)
        torch.set_num_threads(threads)
    own = {who: one.seconds[-rounds:] for who, one in found.items()}
    # Other load on the machine only adds to processor time, so the plain backward is represented by its quickest round.
    # A difference from the plain backward of the same round could be below zero.
    plain = min(own["plain"])
    over = {who: [seconds - plain for seconds in each] for who, each in own.items()}
    theirs = statistics.median(over["DDP"])
    for strategy in strategies:
        value = timing.spread([seconds / theirs for seconds in over[strategy]])
        us = {who: statistics.median(over[who]) / _TENSORS * 1e6 for who in (strategy, "DDP")}
        beside = {"us a gradient": us[strategy], "DDP's": us["DDP"]}
        what = f"{strategy}: {_TENSORS} gradients of {_NUMEL}, over plain backward / DDP's"
        bench.add("gradients", what, value, Bar(1.3, 1.0, lower_is_better=True), beside)


# -- release: a step within backward against a step after it -----------------------------------------------------------


def release(bench: Bench) -> None:
    """Times backward and step on the shapes of `bench.model`. The graph only creates gradients, so that the step takes
    most of the time."""

    def training(early: bool) -> Callable[[], None]:
        generator = torch.Generator().manual_seed(bench.seed)
        shapes = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in bench.model]
        params = [torch.nn.Parameter(p) for p in shapes]
        optimizer = torch_ext.AdamW(params, lr=1e-3, step_in_backward=early)

        def step() -> None:
            torch.stack([p.sum() for p in params]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    times = bench.run("release", {"after": training(False), "in backward": training(True)}, bench.rounds)
    ns = statistics.median(times["in backward"]) * 1e9 / workload.numel(bench.model)
    what = f"{len(bench.model)} tensors, bf16: backward and step / with step_in_backward"
    bench.add("release", what, timing.ratio(times, "after", "in backward"), Bar(0.95, 1.0), {"ns": ns})
