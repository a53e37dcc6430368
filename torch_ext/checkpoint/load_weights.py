"""`load_weights`, which reads the weights that `IncrementalWeights` saved."""

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
    """Loads weights that `IncrementalWeights` saved in the folder into tensors. Returns their version.

    tensors, mapping: as for `WeightSubscriber`, dict(model.named_parameters()) for example. To train these parameters
        further, call `optimizer.resync_masters()`, or load the optimizer's state of the same step.
    version: the version to load; None: the last version of the newest run for which the parts of all ranks are there.

    Raises FileNotFoundError if nothing was saved there. Raises ValueError if a file is missing, damaged, or of another
    version, rank or chain than its name says; the message has its name and the version that can be loaded instead.
    Raises RuntimeError if the weights are of another model. After an error no tensor has changed.
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
    """Returns the content of a part's file. Raises ValueError, naming the file, if it is missing, damaged or not what
    its name says; OSError if it cannot be read."""
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
        raise ValueError(f"{path} does not fit its name: its content is that of {held.name}")
    return data
