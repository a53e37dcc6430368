"""How a save replaces the checkpoint in a folder: as a whole, whoever else saves there, or not at all.

Note: saves to one folder. A save has an id, which is in the names of its files. Before its first data file is written
the coordinator creates `.metadata.ID.unfinished`; when all data is durable it writes the metadata into that file and
renames it to `.metadata`. A save whose unfinished file was removed cannot be completed any more, and data files whose
save has none are either those of `.metadata` or garbage. So who removes the unfinished file of a save first, and then
its data, never removes what `.metadata` needs, with or without locks: renaming and removing are atomic. Locks
(`folder_lock`) only say whether a save is still alive.
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
    """Before any rank writes: removes the files of saves that failed. RuntimeError, naming it, where another save is
    under way."""
    folder_lock.acquire(folder, save_id)
    try:
        NewFile(_unfinished(folder, save_id)).close()
        _clean(folder, save_id)
    except BaseException:
        withdraw(folder, save_id)
        raise


def complete(folder: Path, save_id: str, metadata: bytes) -> None:
    """The folder's checkpoint is this one from now on; the former one and files of saves that failed are removed.

    RuntimeError where another save took this one for dead and removed it.
    """
    unfinished = _unfinished(folder, save_id)
    try:
        with contextlib.closing(NewFile(unfinished, None)) as file:
            file.write(metadata)
            file.sync()
        os.rename(unfinished, folder / METADATA)
    except FileNotFoundError:
        if _id_of_current(folder) != save_id:  # else a file server did it and was asked again
            raise RuntimeError(
                f"{folder}: another save, which could not see that this one was alive, removed it. The checkpoint that "
                "is there is whole; let one job at a time save to a folder"
            ) from None
    sync_folder(folder)
    with contextlib.suppress(OSError):  # the checkpoint is complete: the next save removes what stays now
        _clean(folder, save_id)
        _remove(folder, [_OLD_UNFINISHED])
    folder_lock.release(folder, save_id)


def withdraw(folder: Path, save_id: str) -> None:
    """Removes all files of a save that failed; nothing of one that is complete."""
    with contextlib.suppress(OSError):
        os.unlink(_unfinished(folder, save_id))
        _remove(folder, [name for name in os.listdir(folder) if _id_in(_DATA, name) == save_id])
    folder_lock.release(folder, save_id)


def _clean(folder: Path, save_id: str) -> None:
    """Removes what belongs neither to the current checkpoint nor to a save that may yet be completed.

    The order of the three reads matters: an unfinished file exists before the first data file of its save, and when it
    is gone `.metadata` is that save's.
    """
    data = [name for name in os.listdir(folder) if _DATA.fullmatch(name)]
    unfinished = {found: name for name in os.listdir(folder) if (found := _id_in(_UNFINISHED, name))}
    alive = set()
    for found, name in unfinished.items():
        if found != save_id and not (_is_dead(folder, name, data, save_id) and _removed(folder / name)):
            alive.add(found)
    current = _names_of_current(folder)
    if current is None:  # what `.metadata` needs is not known: only the files of dead saves are removed
        dead = set(unfinished) - alive
        _remove(folder, [name for name in data if _id_in(_DATA, name) in dead])
    else:
        _remove(folder, [name for name in data if _id_in(_DATA, name) not in alive and not current(name)])


def _is_dead(folder: Path, unfinished: str, data: list[str], save_id: str) -> bool:
    """Whether a save with an unfinished file has ended: certain under the lock, else if it wrote nothing for STALE
    seconds."""
    if folder_lock.has(folder, save_id):
        return True
    found = _id_in(_UNFINISHED, unfinished)
    now = _changed(folder, [_unfinished(folder, save_id).name, METADATA])  # by the file system's clock
    return now - _changed(folder, [unfinished, *(name for name in data if _id_in(_DATA, name) == found)]) > STALE


def _changed(folder: Path, names: Iterable[str]) -> float:
    """When the last of them was modified."""
    latest = 0.0
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, os.stat(folder / name).st_mtime)
    return latest


def _removed(path: Path) -> bool:
    """Whether the file was there and this call removed it."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        _removed(folder / name)


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
