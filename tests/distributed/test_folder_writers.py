"""Two jobs that save to one folder, stepped through their file operations in seeded orders, with locks, without locks,
and with locks that do not exclude. At every moment the last complete checkpoint must be there, whole."""

import pathlib
import random
import re
import shutil
import threading
from collections.abc import Callable

import pytest
from folders import Killed, Machine, bits, loaded, names, save, state, whole
from torch.distributed.checkpoint.api import CheckpointException

JOBS, SAVES, ORDERS = 2, 2, 12


class Job:
    """A process, simulated by a thread, that does its next file operation when it is told to."""

    def __init__(self, machine: Machine, number: int, body: Callable[[], None]) -> None:
        self.number, self.dead, self.at = number, False, ""
        self._may, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

        def run() -> None:
            machine.process = number
            self._may.acquire()
            body()
            self.at = "ended"
            self._stopped.release()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def step(self) -> None:
        """Lets the job go on to its next operation, and waits until it is there."""
        self._may.release()
        self._stopped.acquire()

    def pause(self, at: str) -> None:
        """Called in the job's thread before an operation: waits for `step`. Raises Killed if the job is to end here."""
        self.at = at
        self._stopped.release()
        self._may.acquire()
        if self.dead:
            raise Killed


class Run:
    """Both jobs, in an order that the seed draws; one of them may be killed."""

    def __init__(self, folder: pathlib.Path, locks: str, stale: float, seed: int) -> None:
        self.folder, self.chosen, self.machine = folder, random.Random(seed), Machine(locks, stale)
        self.complete: list[int] = [1]  # seeds of the states, in the order in which they became the folder's checkpoint
        self.refused: list[str] = []
        self.saving: dict[int, int] = {}
        self.jobs = {n: Job(self.machine, n, lambda n=n: self._save(n)) for n in range(10, 10 + JOBS)}
        self.victim = self.chosen.choice([None, *self.jobs])
        self.machine.before = self._before

    def _before(self, operation: str, path: str) -> None:
        if self.machine.process in self.jobs:
            self.jobs[self.machine.process].pause(operation)

    def _save(self, number: int) -> None:
        for turn in range(SAVES):
            self.saving[number] = number * 10 + turn
            try:
                save(state(self.saving[number]), self.folder)
            except CheckpointException as error:
                (cause, _) = error.failures[0]
                if isinstance(cause, Killed):
                    return
                assert isinstance(cause, RuntimeError), cause
                self.refused.append(str(cause))

    def go(self) -> None:
        """Steps the jobs in a random order and checks after each operation that the folder has a whole checkpoint."""
        while running := [job for job in self.jobs.values() if job.at != "ended"]:
            job = self.chosen.choice(running)
            if job.number == self.victim and self.chosen.random() < 0.02:
                job.dead = True
            renamed = job.at == "rename" and not job.dead
            before = (self.folder / ".metadata").read_bytes()
            job.step()
            if renamed and (self.folder / ".metadata").read_bytes() != before:
                self.complete.append(self.saving[job.number])
            if job.dead and job.at == "ended":
                self.machine.bury(job.number)
            assert whole(self.folder), (job.number, job.at)
            if self.chosen.random() < 0.1:
                assert loaded(self.folder) == bits(state(self.complete[-1]))


HELD = r"is being saved to by (process (1|1\d) on \S+, since .*|a process that left no name), and one save at a time"
GIVEN_UP = r"another save considered this one dead and removed its files"

# By name: locks, the seconds after which a save counts as dead where no lock tells, and the error of a job that
# is in the other's way.
CASES: dict[str, tuple[str, float, str | None]] = {
    "locks that work": ("work", 600.0, HELD),
    "no locks": ("none", 600.0, None),
    "no locks, and a clock that says that everybody is dead": ("none", -1e9, GIVEN_UP),
    "locks that everybody gets": ("lie", 600.0, GIVEN_UP),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_two_jobs_do_the_last_complete_checkpoint_loads(case: str, tmp_path: pathlib.Path) -> None:
    locks, stale, words = CASES[case]
    said: list[str] = []
    completed = 0
    for seed in range(ORDERS):
        folder = tmp_path / f"{seed}"
        save(state(1), folder)
        run = Run(folder, locks, stale, seed)
        with run.machine.installed():
            run.go()
            assert loaded(folder) == bits(state(run.complete[-1]))
        run.machine.stale = -1e9  # as if a day had passed: unfinished files count as left behind
        with run.machine.installed():
            save(state(2), folder)
        assert loaded(folder) == bits(state(2))
        (kept,) = set(names(folder)) - {".lock", ".metadata"}
        assert kept.startswith("__0_")
        said += run.refused
        completed += len(run.complete) - 1
        shutil.rmtree(folder)
    assert completed
    assert bool(said) == (words is not None)
    assert [each for each in said if not re.search(words or "", each)] == []
