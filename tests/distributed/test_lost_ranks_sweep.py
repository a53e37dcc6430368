"""A rank is killed or stopped at a random message of a random call. Every other rank must get an error that names this
rank and the call that was made.

Each seed is one case. TORCH_EXT_LOST_RANK_SEEDS=200 (or 200-300) runs many; the default seeds cover each call once.
"""

import contextlib
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import FP16, FP32, Given, policy
from ranks import Died
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_ext
from torch_ext.comm import group_calls, lost_ranks
from torch_ext.parallel import parallel_module

TIMEOUT = {"kill": 2.0, "stall": 2.5}
# Functions of torch_ext.comm.group_calls that send messages.
_SPEAKING = ["all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_to_all_single", "send"]
_SPEAKING += ["receive", "new_group", "translated_over"]


def _model(dtype: torch.dtype = FP32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)).to(dtype)


class _Program:
    """A small training under one strategy ("hook": DistributedDataParallel with our hook), and the calls of CALLS."""

    def __init__(self, how: str, group: Any, dtype: torch.dtype) -> None:
        self.how, self.group = how, group
        checks = dtype == FP32  # not with a loss scale, with which gradients may overflow
        self.policy = policy(dtype, FP32, bucket_size=1, overlap_grad_reduce=True, check_for_nan_in_grad=checks)
        self.model: Any = _model(dtype)
        self.inputs = torch.ones(3, 6, dtype=dtype)
        if how == "hook":
            self.model = DistributedDataParallel(self.model, process_group=group, bucket_cap_mb=0.0001)
            torch_ext.register_comm_hook(self.model, self.policy)
        else:
            self.parallelize()
        self.optimizer = torch_ext.AdamW(self.model.parameters(), lr=0.01, policy=self.policy)
        self.scaler = self.policy.grad_scaler(process_group=group)
        for _ in range(3):
            self.backward()
            self.optimizer.step()
            self.model.zero_grad()

    def parallelize(self) -> None:
        torch_ext.parallelize(self.model, self.policy, strategy=self.how, process_group=self.group)

    def rebuild(self) -> None:
        self.model = _model()
        self.parallelize()

    def hook(self) -> None:
        """Registers the hook with a DDP that `_bare` has created: DDP's constructor has errors of torch's own."""
        torch_ext.register_comm_hook(self.bare, self.policy)

    def backward(self) -> None:
        loss = self.model(self.inputs).float().sum()
        (self.scaler.scale(loss) if self.policy.fp16 else loss).backward()

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()

    def first_step(self) -> None:
        optimizer = torch_ext.AdamW(self.model.parameters(), lr=0.0, policy=self.policy)
        optimizer.step()

    def masters(self) -> None:
        with self.optimizer.master_weights():
            pass


# By call: the strategies under which it sends messages, what is done before it, the call, a pattern of its error.
_OURS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
_SHARDED = _OURS[1:]
CALLS: dict[str, tuple[list[str], Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "parallelize": (_OURS, lambda p: None, _Program.rebuild, "^parallelize: "),
    "register_comm_hook": (["hook"], lambda p: _bare(p), _Program.hook, "^register_comm_hook: "),
    "backward": ([*_OURS, "hook"], lambda p: p.model.zero_grad(), _Program.backward, "gradient|weights of"),
    "step": (["optim", "optim_grads"], _Program.backward, lambda p: p.optimizer.step(), "weights of bucket"),
    "clip_grad_norm_ of an optimizer": (
        _SHARDED,
        _Program.backward,
        lambda p: torch_ext.clip_grad_norm_(p.optimizer, 1.0),
        "the norm of the gradients",
    ),
    "clip_grad_norm_ of parameters": (
        _SHARDED,
        _Program.backward,
        lambda p: torch_ext.clip_grad_norm_(p.model.parameters(), 1.0),
        "the norm of the gradients",
    ),
    "torch's clip_grad_norm_": (
        ["optim", "optim_grads"],
        _Program.backward,
        lambda p: nn.utils.clip_grad_norm_(p.model.parameters(), 1.0),
        "the norm of the gradients",
    ),
    "consolidate_state_dict": (
        _SHARDED,
        lambda p: None,
        lambda p: p.optimizer.consolidate_state_dict(),
        r"consolidate_state_dict\(\): ",
    ),
    "consolidate_state_dict to one rank": (
        ["optim"],
        lambda p: None,
        lambda p: p.optimizer.consolidate_state_dict(to=0),
        r"consolidate_state_dict\(\): ",
    ),
    "the scaler": (["no_shard", "hook", "optim"], _Program.backward, _Program.unscale, "the loss scale|gradient"),
    "the first step": (_SHARDED, _Program.backward, _Program.first_step, r"step\(\)|weights of bucket"),
    "master_weights": (["optim", "optim_grads"], lambda p: None, _Program.masters, "weights of|master_weights"),
}


def _bare(program: _Program) -> None:
    """Creates the DDP model that `hook` needs."""
    program.bare = DistributedDataParallel(_model(), process_group=program.group)  # type: ignore[attr-defined]


def _case(seed: int) -> tuple[str, str, str, int, int, float, bool]:
    """Draws a case: the call, the strategy, the fault, the number of ranks, the faulty rank, how far in the call's
    messages the fault comes (0 to 1), and whether ranks exit as soon as they have the error."""
    chosen = random.Random(seed)
    call = list(CALLS)[seed % len(CALLS)]
    how = chosen.choice(CALLS[call][0])
    fault = "stall" if chosen.random() < 0.3 else "kill"
    world = chosen.choice([3, 4])
    return call, how, fault, world, chosen.randrange(world), chosen.random(), chosen.random() < 0.5


class _Fault:
    """Counts the messages that this rank sends. At message `at` the rank is killed or stopped."""

    def __init__(self, fault: str) -> None:
        self.fault, self.said, self.at = fault, 0, -1
        for name in _SPEAKING:
            setattr(group_calls, name, self._counting(getattr(group_calls, name)))

    def _counting(self, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.said += 1
            if self.said == self.at:
                self.strike()
            return function(*args, **options)

        return counted

    def strike(self) -> None:
        """Causes the fault. A stopped rank is killed later."""
        if self.fault == "stall":  # until every other rank has given up
            subprocess.Popen(["sh", "-c", f"sleep {2 * TIMEOUT['stall']}; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)


def _runs(rank: int, world: int, seed: int) -> tuple[str, float]:
    """The body of a rank: runs the call until the fault; returns the error and how long the call took."""
    call, how, kind, _, who, far, leaves = _case(seed)
    _, prepare, act, _ = CALLS[call]
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=60))
    program = _Program(how, group, FP16 if call == "the scaler" else FP32)
    fault = _Fault(kind)
    prepare(program)
    before = fault.said
    act(program)
    prepare(program)
    if rank == who:
        fault.at = fault.said + 1 + int(far * (fault.said - before))
    dist.barrier()
    # The time-out counts from here on; the setup may take long on a busy machine.
    group._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=TIMEOUT[kind]))
    message, seconds = "", 0.0
    for _ in range(4):
        begin = time.monotonic()
        try:
            act(program)
            if call == "the scaler" and rank != who:
                prepare(program)
        except RuntimeError as error:
            message, seconds = str(error), time.monotonic() - begin
            break
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            break
        if rank == who:
            fault.strike()
    if not leaves:
        time.sleep(TIMEOUT[kind])
    return message, seconds


def _seeds() -> list[int]:
    first, _, last = os.environ.get("TORCH_EXT_LOST_RANK_SEEDS", str(len(CALLS))).rpartition("-")
    return list(range(int(first or 0), int(last)))


@pytest.fixture(scope="module")
def answers_of() -> dict[int, list[Any]]:
    """By seed: each rank's answer. Ranks mostly wait, so six cases run at a time."""
    seeds, found = _seeds(), {}
    for first in range(0, len(seeds), 6):
        with contextlib.ExitStack() as stack:
            worlds = {
                seed: stack.enter_context(ranks.world(_case(seed)[3], _runs, seed, timeout=60.0))
                for seed in seeds[first : first + 6]
            }
            deadline = time.monotonic() + 120.0
            found |= {seed: ranks.collect(started, deadline) for seed, started in worlds.items()}
    return found


@pytest.mark.parametrize("seed", _seeds())
def test_a_lost_rank_is_named_wherever_it_is_lost(seed: int, answers_of: dict[int, list[Any]]) -> None:
    call, _, kind, _, who, _, _ = case = _case(seed)
    answers = answers_of[seed]
    assert answers[who] == Died(-9), case
    for rank, answer in enumerate(answers):
        if rank == who:
            continue
        assert isinstance(answer, tuple), (case, answer)
        message, seconds = answer
        named = re.findall(r"ranks? ([\d, ]+) did not respond", message)
        assert named == [str(who)], (case, rank, message)
        assert re.search(CALLS[call][3], message), (case, rank, message)
        assert seconds < 2 * TIMEOUT[kind] + 5, (case, rank, message)


# -- the calls after the one that raised ---------------------------------------------------------------------------


def _dies_between_buckets(rank: int, world: int, strategy: str) -> list[str]:
    """Rank 1 dies after it has sent one bucket of weights; returns the errors of step, step and backward."""
    shapes = [(4,), (200,), (3,)]
    ones = [torch.ones(s) for s in shapes]
    chosen = policy(bucket_size=1, overlap_grad_reduce=True)
    model: Any = torch_ext.parallelize(Given(shapes), chosen, strategy=strategy)
    optimizer = torch_ext.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(ones).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(ones).backward()
    if rank == 1:  # dies after it has sent one bucket
        engine: Any = parallel_module.reducer_of(model)
        gather = engine.gather
        engine.gather = lambda bucket: os._exit(7) if bucket == 1 else gather(bucket)
    messages = []
    for attempt in (optimizer.step, optimizer.step, lambda: model(ones).backward()):
        with pytest.raises(RuntimeError) as raised:
            attempt()
        messages.append(str(raised.value))
    return messages


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_a_rank_that_dies_while_weights_travel_is_a_message_on_the_others(strategy: str) -> None:
    answers = ranks.outcomes(3, _dies_between_buckets, strategy)
    assert answers[1] == Died(7)
    for first, again, backward in (answers[0], answers[2]):
        assert "weights of bucket" in first and ("did not respond" in first or "cannot be reached" in first)
        assert "step() after an exchange that failed: weights of bucket" in again
        assert "gradients cannot be reduced any more: weights of bucket" in backward


# A store that takes longer to answer than the inquiry waits.
INQUIRIES = """
import atexit, sys, threading, time
atexit.register(lambda: print(*(t.name for t in threading.enumerate() if "torch_ext" in t.name), file=sys.stderr))
from torch_ext.comm import lost_ranks

class Store:
    def check(self, keys): time.sleep(1)
    set = delete_key = lambda self, *_: time.sleep(1)

lost_ranks._store_of = lambda group: Store()
lost_ranks._BROKEN = 0.1
group = type("Group", (), {})()
"""


@pytest.mark.parametrize(
    "call", ["translated_error(group, 'a call', RuntimeError())", "announce_error(group, 'a call')"]
)
def test_no_thread_asks_a_store_when_the_interpreter_is_torn_down(call: str) -> None:
    program = INQUIRIES + f"lost_ranks.{call}; lost_ranks.withdraw_error(group)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "\n")


# -- stores that end or hang -----------------------------------------------------------------------------------------


class _Store:
    """A store in rank 0's process that ends, or hangs, after so many answers. It accepts records even after its end."""

    def __init__(self, answers: int, hangs: bool, records: dict[int, Any]) -> None:
        self._left, self._hangs = answers, hangs
        self._records = {f"torch_ext/failed/{rank}": json.dumps(record) for rank, record in records.items()}

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return keys[0] in self._records

    def get(self, key: str) -> str:
        self._answer()
        return self._records[key]

    def _answer(self) -> None:
        self._left -= 1
        if self._left < 0 and self._hangs:
            time.sleep(1.0)
        elif self._left < 0:
            raise dist.DistNetworkError("Broken pipe")


LATE, BROKEN = "Timed out waiting 3000ms for recv operation", "Connection closed by peer"
ANSWERS, ENDED, HANGS = "", "has ended", "does not answer"
RANK_0 = {0: ["call", [1], [1]]}

# By what rank 2 of 3 meets: the error, the ranks whose messages are missing, the store's answers, whether it hangs, the
# records in it; the ranks that are named, and what the message says about the store.
INQUIRED: dict[str, tuple[str, list[int], int, bool, dict[int, Any], str, str]] = {
    "rank 0 gave up because of rank 1, and ended": (LATE, [1], 0, False, {}, "rank 1", ENDED),
    "the same, and rank 0 did not send either": (LATE, [0, 1], 0, False, {}, "rank 1", ENDED),
    "rank 0 alone did not send, and ended": (LATE, [0], 0, False, {}, "rank 0", ENDED),
    "rank 0 ended, a back end that does not say who is missing": (LATE, [], 0, False, {}, "a rank", ENDED),
    "rank 0 died": (BROKEN, [0], 0, False, {}, "rank 0", ENDED),
    "rank 0 died, and rank 1 closed its connections": (BROKEN, [1], 0, False, {}, "rank 0", ENDED),
    "rank 0 is stopped": (LATE, [0, 1], 0, True, {}, "rank 0", HANGS),
    "rank 0 is stopped, and rank 1 closed its connections": (BROKEN, [1], 0, True, {}, "rank 0", HANGS),
    "rank 1 is stopped, and rank 0 does not answer": (LATE, [1], 0, True, {}, "rank 1", HANGS),
    "rank 0 ends before its record can be read": (LATE, [1], 1, False, RANK_0, "rank 1", ENDED),
    "rank 0 ends after its record was read": (LATE, [1], 2, False, RANK_0, "rank 1", ANSWERS),
    "rank 0 ends without a record": (LATE, [1], 3, False, {}, "rank 0", ANSWERS),
}


@pytest.mark.parametrize("what", INQUIRED)
def test_who_is_named_where_the_store_ends_or_hangs(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason, missing, answers, hangs, records, named, said = INQUIRED[what]
    group = type("Group", (), {})()
    store = _Store(answers, hangs, records)
    for name, value in {
        "_store_of": lambda group: store,
        "_ranks_of": lambda group: (2, 3, [0, 1, 2]),
        "_close": lambda *_: None,
        "_broken": lambda group, rank, others: others,
        "timeout_of": lambda *_: 0.2,
    }.items():
        monkeypatch.setattr(lost_ranks, name, value)
    message = str(lost_ranks.translated_error(group, "a call", RuntimeError(reason), missing))
    assert message.startswith(f"a call: {named} did not respond ({reason})"), message
    assert [said] == (
        re.findall("the group's store, .* process, (.*), so no rank could be asked", message) or [ANSWERS]
    )
    assert ("cannot tell which one" in message) == (named == "a rank"), message
