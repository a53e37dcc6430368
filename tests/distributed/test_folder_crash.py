"""A save to a folder that is killed, or fails, at any of its operations on files: what was there before loads or the
new one does, and the next save works and leaves nothing of it."""

import errno
import pathlib
import shutil
from typing import Any

import pytest
from folders import Killed, Machine, bits, loaded, names, save, state
from torch.distributed.checkpoint.api import CheckpointException

FORMER, LATER, LAST = 1, 2, 3


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("folders") / "former"
    save(state(FORMER), folder)
    return folder


def operations(former: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Of a save over the former one."""
    shutil.copytree(former, folder)
    machine, found = Machine(), []
    machine.before = lambda operation, path: found.append(operation)
    with machine.installed():
        save(state(LATER), folder)
    assert {"open", "write", "fsync", "rename", "unlink"} <= set(found)
    return found


def failing(machine: Machine, at: int, how: str) -> None:
    """The operation of that number fails, or is the last one of the process."""
    count = 0

    def before(operation: str, path: str) -> None:
        nonlocal count
        count += 1
        if how == "killed" and count > at:
            raise Killed
        if how == "full" and count == at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    machine.before = before


def at_the_first_write(machine: Machine, folder: pathlib.Path) -> list[str]:
    """Will have the names that are in the folder then."""
    found: list[str] = []

    def before(operation: str, path: str) -> None:
        if operation == "write" and not found:
            found.extend(names(folder))

    machine.before = before
    return found


def one_checkpoint(folder: pathlib.Path) -> bool:
    found = names(folder)
    return found[:2] == [".lock", ".metadata"] and len(found) == 3 and found[2].startswith("__0_")


@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_save_may_end_at_any_operation(how: str, former: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ended: dict[Any, int] = {}
    for at in range(len(operations(former, tmp_path / "counted"))):
        folder = tmp_path / f"{at}"
        shutil.copytree(former, folder)
        machine = Machine()
        failing(machine, at, how)
        with machine.installed():
            error: BaseException | None = None
            try:
                save(state(LATER), folder)
            except CheckpointException as raised:
                error = raised.failures[0][0]
            assert isinstance(error, Killed if how == "killed" else OSError | None), (at, error)
            machine.before = lambda operation, path: None
            if how == "killed":
                machine.bury(1)
                machine.process = 2
            elif error is not None:
                assert set(names(folder)) - {".lock"} <= set(names(former)) or loaded(folder) == bits(state(LATER))
            found = loaded(folder)
            seed = FORMER if found == bits(state(FORMER)) else LATER
            assert found == bits(state(seed)), at
            ended[seed, type(error)] = ended.get((seed, type(error)), 0) + 1
            first = at_the_first_write(machine, folder)
            save(state(LAST), folder)
        assert loaded(folder) == bits(state(LAST)), at
        assert len([name for name in first if name.startswith("__0_")]) == 2, (
            "the checkpoint that is there, and its own"
        )
        assert one_checkpoint(folder), (at, names(folder))
        shutil.rmtree(folder)
    assert {seed for seed, _ in ended} == {FORMER, LATER}


def test_a_full_disk_is_said_with_what_is_needed_and_what_is_free(former: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "full"
    shutil.copytree(former, folder)
    machine = Machine()

    def before(operation: str, path: str) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    machine.before = before
    with (
        machine.installed(),
        pytest.raises(
            CheckpointException,
            match=r"No space left on device: rank 0's file in \S+full needs more than 1140 bytes, and \d+ bytes",
        ),
    ):
        save(state(LATER), folder)
    assert set(names(folder)) == {".lock", *names(former)}
    save(state(LAST), folder)
    assert loaded(folder) == bits(state(LAST))
    assert one_checkpoint(folder)
