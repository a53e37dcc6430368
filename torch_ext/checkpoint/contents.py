"""Lists the contents of a checkpoint file or folder: each tensor's form, dtypes and bytes, and any damage."""

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_ext.checkpoint import at_rest_file, record, record_header, weight_files
from torch_ext.checkpoint.archive import damaged_record, summary
from torch_ext.checkpoint.load_weights import read


class Row(NamedTuple):
    """One key of a checkpoint: a tensor (all of its parts together), an object that is no tensor, or a weight file."""

    key: str
    form: str
    """ "logical", "object", or a form of `record_header`; for incremental weights "full" or "delta"."""
    dtype: str
    stored: str
    shape: tuple[int, ...]
    plain_bytes: int
    """Size of the values in `dtype`."""
    nbytes: int
    """Size in the file."""


class Contents(NamedTuple):
    """The contents of a checkpoint. rows: sorted by key. damage: messages, one for each defect. checked: whether
    everything in the checkpoint has a checksum."""

    rows: list[Row]
    damage: list[str]
    checked: bool
    nbytes: int


def contents_of(path: str | os.PathLike[str], check: bool = True) -> Contents:
    """Returns the contents of a checkpoint. Raises ValueError, naming the checkpoint, if it cannot be read at all, and
    FileNotFoundError if it does not exist.

    check: compares all checksums, which reads all data.
    """
    path = Path(path)
    if path.is_dir():
        of_weights = any(map(weight_files.chain_in, os.listdir(path)))
        return _contents_of_weights(path) if of_weights else _contents_of_folder(path, check)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch may raise any error for data that torch.save did not write
        raise ValueError(f"{path} is no checkpoint that can be read ({summary(error)})") from error
    packed = at_rest_file.is_packed(loaded)
    rows = list(_rows_of_object(loaded["object"] if packed else loaded))
    rows += list(_rows_of_records(loaded)) if packed else []
    return Contents(sorted(rows), _damage_in(path, loaded) if check else [], True, path.stat().st_size)


def _damage_in(path: Path, loaded: Any) -> list[str]:
    found = []
    try:
        with open(path, "rb") as file:
            if (damaged := damaged_record(file)) is not None:
                found.append(f"its record {damaged!r} has another checksum")
    except Exception as error:  # zipfile may raise any error for data that is no archive
        found.append(f"its archive cannot be read ({summary(error)})")
    if at_rest_file.is_packed(loaded):
        for name, raw in zip(loaded["names"], loaded["records"], strict=True):
            try:
                record.check(record_header.parse(at_rest_file.head_of(raw)), raw)
            except ValueError as error:
                found.append(f"{name!r}: {error}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows_of_object(obj: Any) -> Iterator[Row]:
    """Yields a row for each tensor that torch.save wrote as such."""
    for name, t in at_rest_file.tensors_of(obj):
        yield _logical(name, t.dtype, tuple(t.shape), t.nbytes)


def _logical(key: str, dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> Row:
    return Row(key, "logical", _name(dtype), _name(dtype), shape, prod(shape) * dtype.itemsize, nbytes)


def _rows_of_records(packed: dict[str, Any]) -> Iterator[Row]:
    for name, found in at_rest_file.described(packed):
        yield _at_rest(name, found, found.nbytes)


def _at_rest(key: str, found: record_header.Record, nbytes: int) -> Row:
    plain = prod(found.shape) * found.dtype.itemsize
    return Row(key, found.form, _name(found.dtype), found.stored, found.shape, plain, nbytes)


def _contents_of_weights(path: Path) -> Contents:
    """Lists a folder of IncrementalWeights, with all of its runs. Each file is one row. Every file is read."""
    rows, damage = [], []
    names = os.listdir(path)
    for chain in weight_files.chains_of(names):
        for file in sorted(chain.files.values(), key=lambda file: (file.version, file.part)):
            nbytes = (path / file.name).stat().st_size
            rows.append(Row(file.name, file.form, "", "", (), nbytes, nbytes))
            try:
                read(path, file)
            except ValueError as error:
                damage.append(str(error))
    try:
        weight_files.version_in(path, names)
    except ValueError as error:
        damage.append(str(error))
    return Contents(rows, damage, True, sum(row.nbytes for row in rows))


def _contents_of_folder(path: Path, check: bool) -> Contents:
    from torch_ext.checkpoint import folder_items, folder_metadata
    from torch_ext.checkpoint.dcp_reader import CheckpointReader
    from torch_ext.checkpoint.item_tensors import header_of

    reader = CheckpointReader(path)
    metadata = reader.read_metadata()
    rows: dict[str, Row] = {}
    damage: list[str] = []
    checked = True
    for index, info in sorted(metadata.storage_data.items(), key=lambda each: (each[1].relative_path, each[1].offset)):
        described: Any = metadata.state_dict_metadata[index.fqn]
        file = path / info.relative_path
        checked &= hasattr(info, folder_metadata.CHECKSUM)
        try:
            with open(file, "rb") as stream:
                if check:
                    folder_items.refuse_item(stream, file, index.fqn, info)
                found = header_of(folder_items.FileSlice(stream, info.offset, info.length))  # type: ignore[arg-type]
        except (OSError, ValueError) as error:
            damage.append(str(error))
            found = None
        size = getattr(described, "size", None)
        if size is None:
            row = Row(index.fqn, "object", "", "", (), info.length, info.length)
        else:
            row = _logical(index.fqn, described.properties.dtype, tuple(size), info.length)
            row = row if found is None else row._replace(form=found.form, stored=found.stored)
        before = rows.get(index.fqn)
        rows[index.fqn] = row if before is None else before._replace(nbytes=before.nbytes + info.length)
    return Contents(sorted(rows.values()), damage, checked, sum(file.stat().st_size for file in path.iterdir()))
