"""Converts patches to a version of SkyRL's delta weight sync: payload files and a manifest."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torch_ext.weight_sync import byte_diff
from torch_ext.weight_sync.byte_diff import ByteDiff, Compress, Digest
from torch_ext.weight_sync.weight_patch import WeightPatch


class SkyRLVersion(NamedTuple):
    """The contents of a folder that SkyRL writes for a version, `delta-00000001` for example. Save tensors with
    safetensors' `save_file` under the name passed as payload_file, and the manifest as `manifest.json`.

    tensors: name of each changed parameter -> the compressed XOR of its bytes, uint8.
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
    """Returns one version of the weights for SkyRL's `fetch_weights`, as a difference from `version` - 1.

    patches: the patches of all ranks together.
    base: the weights of `version` - 1 by name: whole parameters, contiguous, on the host. They are updated to
        `version`; after an error they are unchanged.
    compress: compresses bytes as SkyRL does: `zstandard.ZstdCompressor(level=1).compress`.
    digest: returns the checksum of bytes as text, by checksum_algorithm: `xxhash.xxh3_128_hexdigest`, or
        `lambda data: hashlib.sha256(data).hexdigest()`.
    checksum_algorithm: "xxh3-128" or "sha256", written to the manifest with each digest.
    payload_file: the file's name, without a folder.

    Raises ValueError for another algorithm. Raises ValueError or TypeError, with the parameter's name, if patches and
    base do not fit each other.
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
