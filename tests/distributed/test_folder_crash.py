"""A save to a folder or a file is killed, fails at any of its file operations, or is interrupted at any line.

Then the former or the new checkpoint must load, whole; and the next save must work and leave no other files."""

import contextlib
import errno
import itertools
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from folders import Killed, Machine, bits, blank, loaded, names, save, state
from torch.distributed.checkpoint.api import CheckpointException

import torch_ext
from torch_ext.checkpoint import dcp as checkpoint_dcp
from torch_ext.checkpoint import files as checkpoint_files
from torch_ext.checkpoint import folder as checkpoint_folder
from torch_ext.checkpoint import folder_lock, new_file

FORMER, LATER, LAST = 1, 2, 3


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the checkpoint of FORMER."""
    folder = tmp_path_factory.mktemp("folders") / "former"
    save(state(FORMER), folder)
    return folder


def operations(former: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Returns the file operations of a save over the former checkpoint."""
    shutil.copytree(former, folder)
    machine, found = Machine(), []
    machine.before = lambda operation, path: found.append(operation)
    with machine.installed():
        save(state(LATER), folder)
    assert {"open", "write", "fsync", "rename", "unlink"} <= set(found)
    return found


def failing(machine: Machine, at: int, how: str) -> None:
    """Makes operation number `at` fail ("full"), or makes it the last one of the process ("killed")."""
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
    """Returns a list that gets the names of the folder's files when the next save first writes."""
    found: list[str] = []

    def before(operation: str, path: str) -> None:
        if operation == "write" and not found:
            found.extend(names(folder))

    machine.before = before
    return found


def one_checkpoint(folder: pathlib.Path) -> bool:
    """Whether the folder has the files of one checkpoint of one rank and no others."""
    found = names(folder)
    return found[:2] == [".lock", ".metadata"] and len(found) == 3 and found[2].startswith("__0_")


def writes_fail(operation: str, path: str) -> None:
    if operation == "write":
        raise OSError(errno.ENOSPC, "No space left on device")


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
    machine.before = writes_fail
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


@contextlib.contextmanager
def interrupted(at: int, modules: list[Any]) -> Iterator[list[int]]:
    """Raises Ctrl-C before line number `at` of these modules; yields a list with the number of executed lines."""
    files, count = {module.__file__ for module in modules}, [0]

    def line(frame: Any, event: str, argument: Any) -> Any:
        count[0] += event == "line"
        if event == "line" and count[0] == at + 1:
            raise KeyboardInterrupt
        return line

    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename in files else None)
    try:
        yield count
    finally:
        sys.settrace(None)


LINES = 31  # saves to a folder are interrupted at every 31st line; saves to a file at every third


def test_a_save_to_a_folder_may_be_interrupted_at_any_line(former: pathlib.Path, tmp_path: pathlib.Path) -> None:
    seen = []
    for at in itertools.count(0, LINES):
        folder = tmp_path / f"{at}"
        shutil.copytree(former, folder)
        with interrupted(at, [checkpoint_dcp, checkpoint_folder, folder_lock, new_file]) as count:
            try:
                save(state(LATER), folder)
            except CheckpointException as raised:
                assert isinstance(raised.failures[0][0], KeyboardInterrupt), (at, raised)
            except KeyboardInterrupt:
                pass
        found = loaded(folder)
        seen.append(FORMER if found == bits(state(FORMER)) else LATER)
        assert found == bits(state(seen[-1])), at
        save(state(LAST), folder)
        assert loaded(folder) == bits(state(LAST)), at
        assert one_checkpoint(folder), (at, names(folder))
        shutil.rmtree(folder)
        if count[0] <= at:
            break
    assert len(seen) > 20
    assert set(seen) == {FORMER, LATER}


def one_file(folder: pathlib.Path, seed: int) -> bool:
    """Whether the folder has nothing but the file, with this seed's state."""
    return names(folder) == ["file"] and bits(torch_ext.load(folder / "file")) == bits(state(seed))


@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_save_to_a_file_may_end_at_any_operation(how: str, tmp_path: pathlib.Path) -> None:
    file, seen = tmp_path / "file", []
    for at in itertools.count():
        torch_ext.save(state(FORMER), file)
        machine = Machine()
        failing(machine, at, how)
        error = None
        with machine.installed():
            try:
                torch_ext.save(state(LATER), file)
            except (Killed, OSError) as raised:
                error = type(raised)
        assert error in (None, Killed if how == "killed" else OSError)
        found = bits(torch_ext.load(file))
        seen.append(FORMER if found == bits(state(FORMER)) else LATER)
        assert found == bits(state(seen[-1])), at
        if how == "full":
            assert names(tmp_path) == ["file"], at
        torch_ext.save(state(LAST), file)
        assert one_file(tmp_path, LAST), (at, names(tmp_path))
        if error is None and how == "killed":
            break
        if how == "full" and seen[-3:] == [LATER] * 3:
            break
    assert seen.count(FORMER) > 5


def test_a_save_to_a_file_may_be_interrupted_at_any_line(tmp_path: pathlib.Path) -> None:
    file, seen = tmp_path / "file", []
    for at in itertools.count(0, 3):
        torch_ext.save({"a": torch.full((3,), FORMER)}, file)
        came = False
        with interrupted(at, [checkpoint_files, new_file]) as count:
            try:
                torch_ext.save({"a": torch.full((3,), LATER)}, file)
            except KeyboardInterrupt:
                came = True
        assert came or count[0] <= at, "nobody was told"
        found = torch_ext.load(file)["a"].tolist()
        seen.append(found[0])
        assert found in ([FORMER] * 3, [LATER] * 3), at
        torch_ext.save({"a": torch.full((3,), LAST)}, file)
        assert names(tmp_path) == ["file"], at
        if not came:
            break
    assert seen.count(FORMER) > 20
    assert seen.count(LATER) > 1


def test_a_full_disk_is_said_of_a_file_too(tmp_path: pathlib.Path) -> None:
    machine = Machine()
    machine.before = writes_fail
    with (
        machine.installed(),
        pytest.raises(OSError, match=r"file needs \d{4} bytes.*, and \d+ bytes are free there now"),
    ):
        torch_ext.save(state(LATER), tmp_path / "file")
    assert names(tmp_path) == []


def _full_on_one(rank: int, world: int, folder: str) -> list[str]:
    """One rank's disk is full. DCP does not tell the coordinator's writer; the former checkpoint must still load."""
    path, said = pathlib.Path(folder) / "folder", []
    for seed, full in ((FORMER, None), (LATER, 1), (LATER, 0), (LAST, None)):
        machine = Machine()
        if full == rank:
            machine.before = writes_fail
        with machine.installed():
            try:
                dcp.save({f"of {rank}": state(seed)}, storage_writer=torch_ext.CheckpointWriter(path))
            except CheckpointException as error:
                said.append(", ".join(f"{rank}: {cause}" for rank, (cause, _) in error.failures.items()))
        target = {f"of {each}": blank(state(0)) for each in range(world)}
        dcp.load(target, storage_reader=torch_ext.CheckpointReader(path))
        expected = LAST if seed == LAST else FORMER
        assert bits(target) == {f"of {each}": bits(state(expected)) for each in range(world)}
    dist.barrier()
    assert len([name for name in names(path) if name.startswith("__")]) == world
    return said


def test_a_full_disk_under_one_rank_alone(tmp_path: pathlib.Path) -> None:
    for said in ranks.run(2, _full_on_one, str(tmp_path)):
        assert [each[:2] for each in said] == ["1:", "0:"]
        assert all("No space left on device: rank " in each for each in said)
