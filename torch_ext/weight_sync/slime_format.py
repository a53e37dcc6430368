"""Converts patches to a version of slime's delta weight sync, which its SGLang reads from a folder."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from torch_ext.weight_sync import byte_diff
from torch_ext.weight_sync.byte_diff import Compress, Digest
from torch_ext.weight_sync.weight_patch import WeightPatch


class SlimeVersion(NamedTuple):
    """The contents of a folder that slime writes for a version, `weight_v000001` for example. Save tensors and
    checksums with safetensors' `save_file(tensors, path, metadata=checksums)`, and an index with index_metadata and the
    file of each tensor.

    tensors: name of each changed parameter -> the compressed difference of its bytes, uint8.
    checksums: name of each changed parameter -> checksum of the bytes of its new version.
    index_metadata: the "metadata" of `model.safetensors.index.json`.
    """

    tensors: dict[str, Tensor]
    checksums: dict[str, str]
    index_metadata: dict[str, str]


def slime_version(
    patches: Iterable[WeightPatch],
    base: Mapping[str, Tensor],
    version: int,
    *,
    encoding: str = "xor",
    compress: Compress,
    digest: Digest,
    checksum_format: str = "xxh3-128",
) -> SlimeVersion:
    """Returns one version of the weights for slime's `/pull_weights`, as a difference from `version` - 1.

    patches: the patches of all ranks together.
    base: the weights of `version` - 1 by name: whole parameters, contiguous, on the host. They are updated to
        `version`; after an error they are unchanged. (A byte difference needs the previous version, and the trainer has
        no copy of it. So keep `base` where the files are written.)
    encoding: "xor", or "overwrite": positions and values of the changed bytes.
    compress: compresses bytes as slime does: `zstandard.ZstdCompressor(level=1).compress`.
    digest: returns the checksum of bytes as text, by the algorithm that checksum_format names:
        `xxhash.xxh3_128_hexdigest`; `lambda data: f"{zlib.adler32(data):08x}"` for "adler32".
    checksum_format: "xxh3-128", "blake3" or "adler32", written into the index.

    Raises ValueError for another encoding or checksum_format. Raises ValueError or TypeError, with the parameter's
    name, if patches and base do not fit each other.
    """
    byte_diff.refuse_other("checksum_format", checksum_format, ("xxh3-128", "blake3", "adler32"))
    found = byte_diff.diffs(patches, base, encoding, compress, digest)
    index = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum_format,
    }
    return SlimeVersion({d.name: d.payload for d in found}, {d.name: d.digest for d in found}, index)
