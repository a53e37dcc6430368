"""Rebuilds how verl, vLLM, slime and SkyRL make and read changes of weights, for tests without these frameworks.

Written from their public sources of August 2026: verl (checkpoint_engine/delta_sync, sglang_rollout/delta_loader), vLLM
(weight_transfer/sparse_nccl_engine, model_loader/checkpoint_weight_patch), slime (utils/disk_delta,
update_weight_from_disk_delta) and SkyRL (weight_sync/delta_checkpoint).
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]


def raw(t: Tensor) -> "np.ndarray[Any, Any]":
    """Returns the bytes of a tensor, without a copy if it is contiguous."""
    return t.detach().contiguous().view(-1).view(torch.uint8).numpy()


# -- vLLM and verl: positions and values, loaded through a tensor of NaN ----------------------------------------------


def load_masked(weights: Weights, name: str, shape: tuple[int, ...], indices: Tensor, values: Tensor) -> None:
    """Loads positions and values as both loaders do: a NaN means "unchanged"."""
    flat = torch.full((math.prod(shape),), math.nan, dtype=values.dtype)
    flat.index_copy_(0, indices.long(), values)
    loaded = flat.view(shape)
    weights[name].copy_(torch.where(loaded.isnan(), weights[name], loaded))


def vllm_loads(weights: Weights, patches: Any) -> None:
    """Makes the checks of vLLM's trainer and worker, then loads."""
    for patch in patches:
        assert patch.full_shape is not None and patch.indices.dtype == torch.int32
        assert patch.indices.ndim == patch.values.ndim == 1 and patch.indices.numel() == patch.values.numel()
        assert not patch.values.isnan().any() and patch.indices.unique().numel() == patch.indices.numel()
        load_masked(weights, patch.name, patch.full_shape, patch.indices, patch.values)


def verl_flush(old: Weights, new: Weights) -> dict[str, Tensor]:
    """Makes a message as verl does: compares bits with a snapshot, and joins positions and values of all parameters."""
    params: list[dict[str, Any]] = []
    positions, values, begin = [], [], 0
    for name, weight in new.items():
        ints = torch.int16 if weight.element_size() == 2 else torch.int32
        changed = (weight.view(-1).view(ints) != old[name].view(-1).view(ints)).nonzero().view(-1)
        if not changed.numel():
            continue
        end = begin + changed.numel()
        params.append(
            {
                "name": name,
                "dtype": str(weight.dtype).split(".")[1],
                "shape": list(weight.shape),
                "pos_start": 4 * begin,
                "pos_end": 4 * end,
                "pos_width": 4,
                "val_start": begin,
                "val_end": end,
            }
        )
        positions.append(changed.to(torch.int32))
        values.append(weight.view(-1)[changed])
        begin = end
    packed, flat = torch.cat(positions).view(torch.uint8), torch.cat(values)
    spec = {"encoding": "indices", "params": params, "checksum": verl_checksum(packed, flat)}
    text = torch.tensor(list(json.dumps(spec).encode()), dtype=torch.uint8)
    return {"__delta_spec__": text, "__positions__": packed, "__values__": flat}


def verl_checksum(positions: Tensor, values: Tensor) -> int:
    return int(torch.hash_tensor(positions).item()) ^ (int(torch.hash_tensor(values).item()) << 1)


def verl_loads(weights: Weights, tensors: Mapping[str, Tensor]) -> None:
    """verl's delta_loader.apply_delta, on tensors in place of a model."""
    spec = json.loads(bytes(tensors["__delta_spec__"].tolist()).decode())
    positions, values = tensors["__positions__"], tensors["__values__"]
    assert spec["checksum"] == verl_checksum(positions, values)
    assert spec["encoding"] == "indices"
    for p in spec["params"]:
        indices = positions[p["pos_start"] : p["pos_end"]].view(torch.int32)
        own = values[p["val_start"] : p["val_end"]].to(getattr(torch, p["dtype"]))
        load_masked(weights, p["name"], tuple(p["shape"]), indices, own)


# -- slime and SkyRL: differences of bytes ----------------------------------------------------------------------------


def slime_encodes(old: Tensor, new: Tensor, encoding: str) -> bytes:
    """Returns slime's encoding of a change, before compression."""
    before, after = raw(old), raw(new)
    if encoding == "xor":
        return (before ^ after).tobytes()
    changed = before != after
    positions = np.flatnonzero(changed).astype("<u4")
    return np.uint32(positions.size).tobytes() + positions.tobytes() + after[changed].tobytes()


def slime_applies(
    weights: Weights, version: Any, at: int, decompress: Callable[[bytes], bytes], digest: Callable[[Any], str]
) -> None:
    """Applies a version's folder as an engine does that has version `at`."""
    assert int(version.index_metadata["base_version"]) == at and int(version.index_metadata["version"]) == at + 1
    assert version.index_metadata["compression_format"] == "zstd"
    for name, payload in version.tensors.items():
        data = np.frombuffer(decompress(raw(payload).tobytes()), dtype=np.uint8)
        own = raw(weights[name])
        if version.index_metadata["delta_encoding"] == "xor":
            own ^= data
        else:
            count = int(data[:4].view("<u4")[0])
            own[data[4 : 4 + 4 * count].view("<u4")] = data[4 + 4 * count :]
        assert digest(own) == version.checksums[name]


def skyrl_applies(
    weights: Weights, version: Any, at: int, decompress: Callable[[bytes], bytes], digest: Callable[[Any], str]
) -> None:
    """SkyRL's LocalCheckpointStore, on tensors in place of files. The manifest goes through JSON, as SkyRL's does."""
    manifest = json.loads(json.dumps(version.manifest))
    assert (manifest["version"], manifest["base_version"]) == (at + 1, at)
    assert manifest["total_compressed_num_bytes"] == sum(t.numel() for t in version.tensors.values())
    for record in manifest["tensors"]:
        assert record["payload_file"] in manifest["payload_files"]
        own = raw(weights[record["name"]])
        assert own.nbytes == record["uncompressed_num_bytes"]
        assert record["shape"] == list(weights[record["name"]].shape)
        patch = decompress(raw(version.tensors[record["payload_key"]]).tobytes())
        assert len(patch) == own.nbytes
        own ^= np.frombuffer(patch, dtype=np.uint8)
        assert digest(own) == record["checksum"]
