"""Changed weights in the formats of verl, vLLM, slime and SkyRL, checked with rebuilt versions of their encoders and
readers."""

import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import weight_formats_rebuilt as theirs
from torch import Tensor

import torch_ext
from torch_ext import WeightPatch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Codec(NamedTuple):
    compress: Callable[[Any], bytes]
    decompress: Callable[[bytes], bytes]
    digest: Callable[[Any], str]


def _zstd() -> Codec:
    zstandard, xxhash = pytest.importorskip("zstandard"), pytest.importorskip("xxhash")
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return Codec(compressor.compress, decompressor.decompress, xxhash.xxh3_128_hexdigest)


def _stdlib() -> Codec:
    return Codec(zlib.compress, zlib.decompress, lambda data: f"{zlib.adler32(data):08x}")


CODECS = [pytest.param(_stdlib, id="stdlib"), pytest.param(_zstd, id="zstd and xxh3")]


def _weights(seed: int, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (50, 7), "up.weight": (16, 33), "bias": (5,), "scale": ()}
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def _changed(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Returns weights in which some elements of all parameters but the bias differ: some in one byte, some in both, one
    in its sign only."""
    new = {name: weight.clone() for name, weight in weights.items()}
    g = torch.Generator().manual_seed(seed)
    for name in ("embed.weight", "up.weight", "scale"):
        bits = new[name].view(-1).view(torch.int16 if new[name].element_size() == 2 else torch.int32)
        at = torch.rand(bits.shape, generator=g) < 0.1
        bits[at] += 1
        bits[-1] += 257  # both bytes
    new["up.weight"][0, 0] *= -1
    return new


def _patches(old: dict[str, Tensor], new: dict[str, Tensor], cut: bool = False) -> list[WeightPatch]:
    """Returns the patches from `old` to `new`. cut: each parameter in two parts, as from two ranks."""
    found = []
    for name, weight in new.items():
        ints = torch.int16 if weight.element_size() == 2 else torch.int32
        flat = weight.view(-1)
        at = (flat.view(ints) != old[name].view(-1).view(ints)).nonzero().view(-1)
        half = flat.numel() // 2
        for mine in (at[at < half], at[at >= half]) if cut else (at,):
            found.append(WeightPatch(name, mine.to(torch.int32), flat[mine], tuple(weight.shape)))
    return found


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(bool((theirs.raw(a[name]) == theirs.raw(b[name])).all()) for name in a.keys() | b.keys())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_vllm_takes_patches_as_they_are(dtype: torch.dtype) -> None:
    old = _weights(0, dtype)
    new = _changed(old, 1)
    theirs.vllm_loads(old, _patches(old, new))
    assert _same(old, new)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_verl_flushes_are_verls_own(dtype: torch.dtype) -> None:
    old = _weights(0, dtype)
    new = _changed(old, 1)
    (flush,) = torch_ext.verl_flushes(_patches(old, new))
    expected = theirs.verl_flush(old, new)
    assert flush.keys() == expected.keys()
    assert json.loads(bytes(flush["__delta_spec__"].tolist())) == json.loads(bytes(expected["__delta_spec__"].tolist()))
    assert all(torch.equal(flush[key], expected[key]) for key in ("__positions__", "__values__"))
    theirs.verl_loads(old, flush)
    assert _same(old, new)


def test_verl_flushes_of_two_ranks_and_two_dtypes() -> None:
    old = _weights(0) | {f"fp32.{name}": weight for name, weight in _weights(2, FP32).items()}
    new = _changed(_weights(0), 1) | {f"fp32.{name}": w for name, w in _changed(_weights(2, FP32), 3).items()}
    flushes = torch_ext.verl_flushes(_patches(old, new, cut=True))
    assert [flush["__values__"].dtype for flush in flushes] == [BF16, FP32]
    for flush in flushes:
        theirs.verl_loads(old, flush)
    assert _same(old, new)
    assert torch_ext.verl_flushes(_patches(new, new)) == []


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_slime_reads_versions(codec: Callable[[], Codec], encoding: str, dtype: torch.dtype) -> None:
    kept = codec()
    engine, base = _weights(0, dtype), _weights(0, dtype)
    for version in (1, 2, 3):
        new = _changed(base, version)
        found = torch_ext.slime_version(
            _patches(base, new, cut=version > 1),
            base,
            version,
            encoding=encoding,
            compress=kept.compress,
            digest=kept.digest,
        )
        assert _same(base, new)
        assert "bias" not in found.tensors
        assert found.tensors.keys() == found.checksums.keys()
        expected = {name: theirs.slime_encodes(engine[name], new[name], encoding) for name in found.tensors}
        assert {name: kept.decompress(theirs.raw(t).tobytes()) for name, t in found.tensors.items()} == expected
        theirs.slime_applies(engine, found, version - 1, kept.decompress, kept.digest)
        assert _same(engine, new)


@pytest.mark.parametrize("codec", CODECS)
def test_skyrl_reads_versions(codec: Callable[[], Codec]) -> None:
    kept = codec()
    engine, base = _weights(0), _weights(0)
    for version in (1, 2):
        new = _changed(base, version)
        found = torch_ext.skyrl_version(
            _patches(base, new), base, version, compress=kept.compress, digest=kept.digest, payload_file="a.safetensors"
        )
        assert _same(base, new)
        theirs.skyrl_applies(engine, found, version - 1, kept.decompress, kept.digest)
        assert _same(engine, new)
    same = torch_ext.skyrl_version(_patches(base, base), base, 3, compress=kept.compress, digest=kept.digest)
    assert same.tensors == {} and same.manifest["tensors"] == [] and same.manifest["payload_files"] == []


def test_a_version_that_fails_leaves_the_base_as_it_was() -> None:
    base = _weights(0)
    patches = _patches(base, _changed(base, 1))

    def fails(data: Any) -> str:
        if len(data) < 100:  # it is the last parameter
            raise OSError("no space left")
        return hashlib.sha256(data).hexdigest()

    with pytest.raises(OSError, match="no space left"):
        torch_ext.skyrl_version(patches, base, 1, compress=zlib.compress, digest=fails, checksum_algorithm="sha256")
    assert _same(base, _weights(0))


PATCH = WeightPatch("w", torch.tensor([1, 5], dtype=torch.int32), torch.ones(2, dtype=BF16), (2, 4))
BAD_PATCHES = [
    (
        PATCH._replace(indices=torch.tensor([1, 8], dtype=torch.int32)),
        ValueError,
        "w has positions from 1 to 8.* to 7",
    ),
    (PATCH._replace(indices=torch.tensor([-1, 2], dtype=torch.int32)), ValueError, "positions from -1"),
    (PATCH._replace(indices=torch.tensor([1.0, 2.0])), TypeError, "indices in torch.float32; int32 and int64"),
    (PATCH._replace(values=torch.ones(3, dtype=BF16)), ValueError, "equal lengths"),
]


@pytest.mark.parametrize(("patch", "kind", "message"), BAD_PATCHES)
def test_patches_that_fit_nothing(patch: WeightPatch, kind: type[Exception], message: str) -> None:
    base = {"w": torch.zeros(2, 4, dtype=BF16)}
    with pytest.raises(kind, match=message):
        torch_ext.verl_flushes([patch])
    with pytest.raises(kind, match=message):
        torch_ext.skyrl_version([patch], base, 1, compress=zlib.compress, digest=str)
    assert not base["w"].any()


@pytest.mark.parametrize(
    ("base", "kind", "message"),
    [
        ({}, ValueError, "base has no 'w'"),
        ({"w": torch.zeros(2, 4)}, TypeError, "is torch.float32 and its patch torch.bfloat16"),
        ({"w": torch.zeros(8, dtype=BF16)}, ValueError, r"has shape \(8,\) and the parameter \(2, 4\)"),
        ({"w": torch.zeros(4, 2, dtype=BF16).t()}, ValueError, "contiguous on the host"),
    ],
)
def test_a_base_that_is_not_the_weights(base: dict[str, Tensor], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        torch_ext.slime_version([PATCH], base, 1, compress=zlib.compress, digest=str)


def test_what_no_format_can_say() -> None:
    """NaN, too large positions, repeated positions, and unknown encodings and checksums raise."""
    nan = PATCH._replace(values=torch.full((2,), torch.nan, dtype=BF16))
    with pytest.raises(ValueError, match="w has weights that are NaN"):
        torch_ext.verl_flushes([nan])
    with pytest.raises(ValueError, match="int32: at most"):
        torch_ext.verl_flushes([PATCH._replace(full_shape=(1 << 16, 1 << 15))])
    base = {"w": torch.zeros(2, 4, dtype=BF16)}
    with pytest.raises(ValueError, match="elements of w twice"):
        torch_ext.slime_version([PATCH, PATCH], base, 1, compress=zlib.compress, digest=str)
    with pytest.raises(ValueError, match="encoding is 'add'; 'xor' and 'overwrite'"):
        torch_ext.slime_version([PATCH], base, 1, encoding="add", compress=zlib.compress, digest=str)
    with pytest.raises(ValueError, match="checksum_format is 'md5'; 'xxh3-128' and 'blake3' and 'adler32' are legal"):
        torch_ext.slime_version([PATCH], base, 1, checksum_format="md5", compress=zlib.compress, digest=str)
    with pytest.raises(ValueError, match="checksum_algorithm is 'adler32'; 'xxh3-128' and 'sha256' are legal"):
        torch_ext.skyrl_version([PATCH], base, 1, checksum_algorithm="adler32", compress=zlib.compress, digest=str)
    assert not base["w"].any()
