"""Patches as a version of SkyRL's delta weight sync: payload files and a manifest."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torch_ext.weight_sync import byte_diff
from torch_ext.weight_sync.byte_diff import ByteDiff, Compress, Digest
from torch_ext.weight_sync.weight_patch import WeightPatch


class SkyRLVersion(NamedTuple):
    """What SkyRL writes into `delta-00000001`: save tensors with safetensors' `save_file` under the name that was given
    as payload_file, and the manifest as `manifest.json`.

    tensors: by name of the parameter, of those that changed: the compressed XOR of their bytes, uint8.
    manifest: the version, and a record for each tensor.
    """

    tensors: dict[str, Tensor]
    manifest: dict[str, Any]


def skyrl_version(
    patches: Iterable[WeightPatch],
    base: Mapping[str, Tensor],
    version: int,
    *,
    compress: Compress,
    digest: Digest,
    checksum_algorithm: str = "xxh3-128",
    payload_file: str = "delta-rank00000-file000000.safetensors",
) -> SkyRLVersion:
    """One version of weights for SkyRL's `fetch_weights`, on top of version - 1.

    patches: of all ranks together.
    base: the weights of version - 1 by name, whole, contiguous, on the host; they become those of
        `version`. Where this raises, they are what they were.
    compress: SkyRL's: `zstandard.ZstdCompressor(level=1).compress`.
    digest: of checksum_algorithm, as text: `xxhash.xxh3_128_hexdigest`, or
        `lambda data: hashlib.sha256(data).hexdigest()`.
    checksum_algorithm: "xxh3-128" or "sha256", written beside each digest.
    payload_file: the file's name, without a folder.

    ValueError for another algorithm; ValueError or TypeError, naming the parameter, where patches and base do not fit
    each other.
    """
    byte_diff.refuse_other("checksum_algorithm", checksum_algorithm, ("xxh3-128", "sha256"))
    found = byte_diff.diffs(patches, base, "xor", compress, digest)
    manifest = {
        "version": version,
        "base_version": version - 1,
        "tensors": [_record(diff, payload_file, checksum_algorithm) for diff in found],
        "total_uncompressed_num_bytes": sum(diff.nbytes for diff in found),
        "total_compressed_num_bytes": sum(diff.payload.numel() for diff in found),
        "payload_files": [payload_file] if found else [],
    }
    return SkyRLVersion({diff.name: diff.payload for diff in found}, manifest)


def _record(diff: ByteDiff, payload_file: str, algorithm: str) -> dict[str, Any]:
    return {
        "name": diff.name,
        "dtype": str(diff.old.dtype).removeprefix("torch."),
        "shape": list(diff.old.shape),
        "uncompressed_num_bytes": diff.nbytes,
        "compressed_num_bytes": diff.payload.numel(),
        "payload_file": payload_file,
        "payload_key": diff.name,
        "checksum": diff.digest,
        "checksum_algorithm": algorithm,
    }
