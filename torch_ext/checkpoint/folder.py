"""How a save takes a folder over: all of it at once, whoever else saves there, and nothing of it when it fails.

A save has an id, which is in the names of its files, and the coordinator's file `.metadata.ID.unfinished` from before
its first data file on. When all data is on the disk `.metadata` is written into that file, which is then renamed to
`.metadata`: a save whose unfinished file somebody removed can be completed no more, and one that has none is either
what `.metadata` says or garbage. So whoever removes first the unfinished file and then the data of a save never takes
away what `.metadata` needs, with or without locks: renaming and removing decide who was first. Locks
(`checkpoint/folder_lock.py`) only say whether a save is still alive.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torch_ext.checkpoint import folder_lock, folder_metadata
from torch_ext.checkpoint.new_file import STALE, NewFile, sync_folder

METADATA = ".metadata"
_DATA = re.compile(r"__\d+_(?:(?P<id>[0-9a-zA-Z-]{8,})_)?\d+\.distcp")
_UNFINISHED = re.compile(r"\.metadata\.(?P<id>[0-9a-zA-Z-]{8,})\.unfinished")
_OLD_UNFINISHED = ".metadata.tmp"  # of torch, and of the first versions here


def prefix(rank: int, save_id: str) -> str:
    """How the names of a rank's data files begin."""
    return f"__{rank}_{save_id}_"


def _unfinished(folder: Path, save_id: str) -> Path:
    return folder / f".metadata.{save_id}.unfinished"


def begin(folder: Path, save_id: str) -> None:
    """Before any rank writes: removes what earlier saves left. RuntimeError, naming it, where another is under way."""
    folder_lock.acquire(folder, save_id)
    try:
        NewFile(_unfinished(folder, save_id)).close()
        _clean(folder, save_id)
    except BaseException:
        withdraw(folder, save_id)
        raise


def complete(folder: Path, save_id: str, metadata: bytes) -> None:
    """The folder's checkpoint is this one from now on; the former one and what others left are removed.

    RuntimeError where the save was given up: another one took the folder and found this one dead.
    """
    unfinished = _unfinished(folder, save_id)
    try:
        file = NewFile(unfinished, None)
        try:
            file.write(metadata)
            file.sync()
        finally:
            file.close()
        os.rename(unfinished, folder / METADATA)
    except FileNotFoundError:
        if _id_of_current(folder) != save_id:  # else a server did it and was asked again
            raise RuntimeError(
                f"{folder}: another save, which could not see that this one was alive, removed it. The checkpoint that "
                "is there is whole; let one job at a time save to a folder"
            ) from None
    sync_folder(folder)
    with contextlib.suppress(OSError):  # the checkpoint is complete: what stays now the next save removes
        _clean(folder, save_id)
        _remove(folder, [_OLD_UNFINISHED])
    folder_lock.release(folder, save_id)


def withdraw(folder: Path, save_id: str) -> None:
    """Removes whatever there is of a save that failed. Of one that is complete nothing."""
    with contextlib.suppress(OSError):
        os.unlink(_unfinished(folder, save_id))
        _remove(folder, [name for name in os.listdir(folder) if _id_in(_DATA, name) == save_id])
    folder_lock.release(folder, save_id)


def _clean(folder: Path, save_id: str) -> None:
    """Removes what belongs neither to the current checkpoint nor to a save that may yet be completed.

    Each list is made after the one that it is compared with: an unfinished file is there before the first data file of
    its save, and `.metadata` is that save's as soon as it is gone.
    """
    data = [name for name in os.listdir(folder) if _DATA.fullmatch(name)]
    unfinished = {found: name for name in os.listdir(folder) if (found := _id_in(_UNFINISHED, name))}
    alive = set()
    for found, name in unfinished.items():
        if found != save_id and not (_is_dead(folder, name, data, save_id) and _took(folder / name)):
            alive.add(found)
    current = _names_of_current(folder)
    if current is None:  # it cannot be said what `.metadata` needs: only what is known to be dead goes
        dead = set(unfinished) - alive
        _remove(folder, [name for name in data if _id_in(_DATA, name) in dead])
    else:
        _remove(folder, [name for name in data if _id_in(_DATA, name) not in alive and not current(name)])


def _is_dead(folder: Path, unfinished: str, data: list[str], save_id: str) -> bool:
    """Whether a save with an unfinished file has ended: certain under the lock, else it wrote nothing for long."""
    if folder_lock.has(folder, save_id):
        return True
    found = _id_in(_UNFINISHED, unfinished)
    now = _changed(folder, [_unfinished(folder, save_id).name, METADATA])  # by the clock of the disk
    return now - _changed(folder, [unfinished, *(name for name in data if _id_in(_DATA, name) == found)]) > STALE


def _changed(folder: Path, names: Iterable[str]) -> float:
    """When the last of them did."""
    latest = 0.0
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, os.stat(folder / name).st_mtime)
    return latest


def _took(path: Path) -> bool:
    """Whether the file was there and went by this call."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(folder / name)


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _id_in(pattern: re.Pattern[str], name: str) -> str | None:
    found = pattern.fullmatch(name)
    return found["id"] if found else None


def _id_of_current(folder: Path) -> str | None:
    try:
        return folder_metadata.save_id_of(_read(folder / METADATA))
    except (OSError, ValueError):
        return None


def _names_of_current(folder: Path) -> Callable[[str], bool] | None:
    """Whether a data file is of the checkpoint that is there; None where that cannot be known."""
    try:
        raw = _read(folder / METADATA)
    except FileNotFoundError:
        return lambda name: False
    except OSError:
        return None
    try:
        save_id = folder_metadata.save_id_of(raw)
        if save_id is not None:
            return lambda name: _id_in(_DATA, name) == save_id
        names = {info.relative_path for info in folder_metadata.parse(raw).storage_data.values()}
    except ValueError:
        return None
    return names.__contains__
