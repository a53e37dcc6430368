"""Reading what `IncrementalWeights` saved."""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from torch_ext.checkpoint import weight_files
from torch_ext.checkpoint.weight_files import PartFile
from torch_ext.weight_sync.delta_info import delta_info
from torch_ext.weight_sync.subscriber import WeightSubscriber
from torch_ext.weight_sync.weight_slice import Place


def load_weights(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    version: int | None = None,
    mapping: Mapping[str, Place] | None = None,
) -> int:
    """Writes the weights that `IncrementalWeights` saved in the folder into tensors; returns their version.

    tensors, mapping: as of `WeightSubscriber`: dict(model.named_parameters()), say. A part of an optimizer's model that
        is trained further needs `optimizer.resync_masters()`, or the optimizer's state of the same step.
    version: None: the last one of which the parts of all ranks are there, of the newest run.

    FileNotFoundError where nothing was saved there. ValueError, naming it, where a file is missing, damaged, or of
    another version, rank or chain than its name says, and which version can be loaded instead. RuntimeError where the
    weights are of another model. No tensor has changed then.
    """
    path = Path(folder)
    names = os.listdir(path)
    found = weight_files.version_in(path, names, version)
    messages = []
    for file in found.files:
        try:
            messages.append(read(path, file))
        except ValueError as error:
            raise ValueError(f"{error}{weight_files.without(names, file)}") from error
    try:
        WeightSubscriber(tensors, mapping).apply(messages)
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"{path}, version {found.number}: {error}") from error
    return found.number


def read(folder: Path, file: PartFile) -> bytes:
    """A part, which is checked. ValueError, naming the file, where it is not what its name says; OSError."""
    path = folder / file.name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    try:
        info = delta_info(data)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error
    held = PartFile(info.chain, info.version, info.part, info.parts, "full" if info.full else "delta")
    if held != file or info.n_parts != 1:
        raise ValueError(f"{path} is not what its name says: in it is what {held.name} has")
    return data
