"""Patches as a version of slime's delta weight sync, which its SGLang reads from a folder."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from torch_ext.weight_sync import byte_diff
from torch_ext.weight_sync.byte_diff import Compress, Digest
from torch_ext.weight_sync.weight_patch import WeightPatch


class SlimeVersion(NamedTuple):
    """What slime writes into `weight_v000001`: save tensors and checksums with safetensors' `save_file(tensors, path,
    metadata=checksums)`, and an index with index_metadata and the file of each tensor.

    tensors: by name of the parameter, of those that changed: the compressed difference, uint8.
    checksums: of each of them, of the bytes of the new version.
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
    """One version of weights for slime's `/pull_weights`, on top of version - 1.

    patches: of all ranks together.
    base: the weights of version - 1 by name, whole, contiguous, on the host; they become those of
        `version`. (A difference of bytes needs both versions, and the trainer keeps none: keep them where the files are
        written.) Where this raises, base is what it was.
    encoding: "xor", or "overwrite": positions and values of bytes that changed.
    compress: slime's: `zstandard.ZstdCompressor(level=1).compress`.
    digest: of the algorithm that checksum_format names, as text: `xxhash.xxh3_128_hexdigest`;
        `lambda data: f"{zlib.adler32(data):08x}"` for "adler32".
    checksum_format: "xxh3-128", "blake3" or "adler32", written into the index.

    ValueError for other words; ValueError or TypeError, naming the parameter, where patches and base do not fit each
    other.
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
