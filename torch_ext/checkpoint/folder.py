"""Replaces the checkpoint in a folder atomically: either completely or not at all, even if several jobs save there.

Note: saves to one folder. Two saves to the same folder must never delete files that `.metadata` refers to, even on file
systems without locks. Each save has an id, which is part of its file names. Before the first data file is written, the
coordinator creates `.metadata.ID.unfinished`. When all data is durable, it writes the metadata into that file and
renames it to `.metadata`. A save whose unfinished file is gone can no longer complete. Data files without an unfinished
file therefore belong to `.metadata` or are garbage. Cleaning up removes the unfinished file first and the data second.
Rename and unlink are atomic, so this never removes what `.metadata` needs. Locks (`folder_lock`) only tell whether a
save is still alive.
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
_OLD_UNFINISHED = ".metadata.tmp"  # the name that torch and the first versions of torch_ext use


def prefix(rank: int, save_id: str) -> str:
    """Returns the prefix of the names of a rank's data files."""
    return f"__{rank}_{save_id}_"


def _unfinished(folder: Path, save_id: str) -> Path:
    return folder / f".metadata.{save_id}.unfinished"


def begin(folder: Path, save_id: str) -> None:
    """Starts a save, before any rank writes: takes the lock and removes the files of failed saves. Raises RuntimeError,
    naming the holder of the lock, if another save is running."""
    folder_lock.acquire(folder, save_id)
    try:
        NewFile(_unfinished(folder, save_id)).close()
        _clean(folder, save_id)
    except BaseException:
        withdraw(folder, save_id)
        raise


def complete(folder: Path, save_id: str, metadata: bytes) -> None:
    """Makes this save the folder's checkpoint and removes the previous one and the files of failed saves.

    Raises RuntimeError if another save considered this one dead and removed its unfinished file.
    """
    unfinished = _unfinished(folder, save_id)
    try:
        with contextlib.closing(NewFile(unfinished, None)) as file:
            file.write(metadata)
            file.sync()
        os.rename(unfinished, folder / METADATA)
    except FileNotFoundError:
        if _id_of_current(folder) != save_id:  # else the file server had renamed it already and got the request twice
            raise RuntimeError(
                f"{folder}: another save considered this one dead and removed its files. The checkpoint that is in "
                "the folder is complete; let one job at a time save to a folder"
            ) from None
    sync_folder(folder)
    with contextlib.suppress(OSError):  # the checkpoint is complete; the next save removes leftover files
        _clean(folder, save_id)
        _remove(folder, [_OLD_UNFINISHED])
    folder_lock.release(folder, save_id)


def withdraw(folder: Path, save_id: str) -> None:
    """Removes all files of a failed save and releases its lock. The files of a complete save stay."""
    with contextlib.suppress(OSError):
        os.unlink(_unfinished(folder, save_id))
        _remove(folder, [name for name in os.listdir(folder) if _id_in(_DATA, name) == save_id])
    folder_lock.release(folder, save_id)


def _clean(folder: Path, save_id: str) -> None:
    """Removes files that belong neither to the current checkpoint nor to a save that may still complete.

    The order of the three reads matters: data files, then unfinished files, then `.metadata`. A save's unfinished file
    exists before its first data file, and once a save has completed, `.metadata` is its own.
    """
    data = [name for name in os.listdir(folder) if _DATA.fullmatch(name)]
    unfinished = {found: name for name in os.listdir(folder) if (found := _id_in(_UNFINISHED, name))}
    alive = set()
    for found, name in unfinished.items():
        if found != save_id and not (_is_dead(folder, name, data, save_id) and _try_remove(folder / name)):
            alive.add(found)
    current = _names_of_current(folder)
    if current is None:  # it is unknown which files `.metadata` needs: remove only the files of dead saves
        dead = set(unfinished) - alive
        _remove(folder, [name for name in data if _id_in(_DATA, name) in dead])
    else:
        _remove(folder, [name for name in data if _id_in(_DATA, name) not in alive and not current(name)])


def _is_dead(folder: Path, unfinished: str, data: list[str], save_id: str) -> bool:
    """Whether a save with an unfinished file has ended. Certain if this save has the lock. Otherwise a save counts as
    dead if it wrote nothing for STALE seconds."""
    if folder_lock.has(folder, save_id):
        return True
    found = _id_in(_UNFINISHED, unfinished)
    now = _last_modified(folder, [_unfinished(folder, save_id).name, METADATA])  # by the file system's clock
    return now - _last_modified(folder, [unfinished, *(name for name in data if _id_in(_DATA, name) == found)]) > STALE


def _last_modified(folder: Path, names: Iterable[str]) -> float:
    """Returns the latest modification time of these files, 0 if none exists."""
    latest = 0.0
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, os.stat(folder / name).st_mtime)
    return latest


def _try_remove(path: Path) -> bool:
    """Removes the file. Returns whether it existed and this call removed it."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        _try_remove(folder / name)


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
    """Returns a predicate: whether a data file belongs to the current checkpoint. None if `.metadata` is unreadable."""
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
