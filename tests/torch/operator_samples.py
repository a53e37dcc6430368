"""Legal calls of every operator, as data. The tests of opcheck, tracing, leaks and wrong calls all start from these.

A sample creates new arguments each time, in the order of the operator's schema, from a fixed seed. A function that is
named like an operator returns arguments of that operator.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch_ext  # noqa: F401 -- registers the operators

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
U8, I16, I64 = torch.uint8, torch.int16, torch.int64
BLOCK, LIMBS = 128, 20
GROUP = (1e-2, 0.9, 0.999, 1e-8, 0.1, 0.0, 1.0)  # lr, beta1, beta2, eps, weight_decay, maximize, decoupled


@dataclasses.dataclass(frozen=True)
class Sample:
    """A legal call: `make` returns new arguments of the operator."""

    operator: str
    name: str
    make: Callable[[], list[Any]]

    @property
    def id(self) -> str:
        return f"{self.operator}-{self.name}"


def none(dtype: torch.dtype = F32) -> torch.Tensor:
    """Returns an empty tensor, which stands for an argument that is not given."""
    return torch.empty(0, dtype=dtype)


def one(value: float, dtype: torch.dtype = F32) -> torch.Tensor:
    """Returns a tensor with this one element."""
    return torch.full((1,), value, dtype=dtype)


def randoms(numels: Sequence[int], dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, generator=generator) * scale).to(dtype) for n in numels]


def scale_bytes(numel: int, moments: int) -> torch.Tensor:
    """Returns block scales that are all 1, for that many 8-bit or fp16 moments."""
    return torch.full((moments * -(-numel // BLOCK),), 127, dtype=U8)  # e8m0: 2^0


def adamw(
    numels: Sequence[int] = (5, 130, 0, 1),
    param: torch.dtype = F32,
    grad: torch.dtype | None = None,
    exp_avg: torch.dtype | None = None,
    exp_avg_sq: torch.dtype | None = None,
    master: torch.dtype | None = None,
    groups: Sequence[Sequence[float]] = (GROUP,),
    requires_grad: bool = False,
    extras: bool = False,
) -> list[Any]:
    """Returns the arguments of adamw_. Moments and remainders are zero, fp32 masters equal the weights. extras: also
    passes lrs, meta, grad_scale, clip_coef, found_inf and skipped."""
    exp_avg = exp_avg or (F32 if param is F32 else BF16)
    exp_avg_sq = exp_avg_sq or exp_avg
    params = randoms(numels, param, 1)
    masters = []
    if master is F32:
        masters = [p.float() for p in params]
    elif master is I16:
        masters = [torch.zeros(n, dtype=I16) for n in numels]
    scaled = [d in (F16, U8) for d in (exp_avg, exp_avg_sq)].count(True)
    exp_avgs = [torch.zeros(n, dtype=exp_avg) for n in numels]
    exp_avg_sqs = [torch.zeros(n, dtype=exp_avg_sq) for n in numels]
    meta = torch.tensor([[1000 + i, 0, i % len(groups)] for i in range(len(numels))], dtype=I64)
    return [
        [p.requires_grad_(requires_grad) for p in params],
        randoms(numels, grad or param, 2),
        exp_avgs,
        exp_avg_sqs,
        masters,
        [scale_bytes(n, scaled) for n in numels] if scaled else [],
        [one(3.0) for _ in numels],
        [one(g[0], F64) for g in groups] if extras else [],
        torch.tensor([list(g) for g in groups], dtype=F64),
        meta.reshape(-1, 3) if extras or len(groups) > 1 else none(I64),
        one(4.0) if extras else none(),
        one(0.5) if extras else none(),
        one(0.0) if extras else none(),
        torch.zeros(1, dtype=I64) if extras else none(I64),
        7,
        1,
        1,
    ]


def adamw_skipped() -> list[Any]:
    arguments = adamw(extras=True)
    arguments[12] = one(1.0)
    return arguments


def checksums_of(params: list[torch.Tensor], masters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the checksums of the weights as they are now."""
    per = {F32: 4096, I16: 1024}
    made = [torch.zeros(-(-m.numel() // per[m.dtype]), dtype=I64) for m in masters]
    torch.ops.torch_ext.master_checksum_(params, masters, made, none(I64), 2)
    return made


def adamw_flat(external: int = 0, leaves: bool = False, **options: Any) -> list[Any]:
    """Returns the arguments of adamw_flat_ for the call adamw(**options), with all states of a kind in one tensor. That
    tensor's first element belongs to no parameter. external: on_external_write; if not 0, checksums are passed too.
    leaves: also passes changed, moved and distances."""
    params, grads, *kinds_and_rest = adamw(**options)
    kinds, rest = kinds_and_rest[:5], kinds_and_rest[5:]
    if external:
        kinds.append(checksums_of(params, kinds[2]))
        rest[-4] = torch.zeros(2, dtype=I64)
    if leaves:
        kinds += [[]] * (6 - len(kinds))
        for dtype, per in ((U8, 8), (BF16, 128), (U8, 2)):
            kinds.append([torch.zeros(-(-p.numel() // per), dtype=dtype) for p in params])
    states: list[torch.Tensor] = []
    rows: list[list[int]] = [[] for _ in params]
    for tensors in (kind or [none() for _ in params] for kind in kinds):
        end = 1
        for row, t in zip(rows, tensors, strict=True):
            row += (len(states), end, t.numel())
            end += t.numel()
        states.append(torch.cat([torch.full((1,), 7, dtype=tensors[0].dtype), *tensors]) if tensors else none())
    table = torch.tensor(rows, dtype=I64).reshape(-1, 3 * len(kinds))
    return [params, grads, states, table, *rest, external, signature_of(params), 0.0, 1, 0]


def signature_of(params: Sequence[torch.Tensor]) -> int:
    """Returns what tx_signature returns, computed independently: FNV-1a over dtypes, dimensions and sizes."""
    codes = {F32: 1, F16: 2, BF16: 3}
    signature = 0xCBF29CE484222325
    for p in params:
        for word in (codes[p.dtype], *((p.dim(), *p.shape) if p.numel() else (-1,))):
            signature = (signature ^ word % 2**64) * 0x100000001B3 % 2**64
    return signature - 2**64 * (signature >= 2**63)


def grad_stats(numels: Sequence[int] = (5, 300, 0), dtype: torch.dtype = F32, first_bad: bool = True) -> list[Any]:
    return [
        randoms(numels, dtype),
        torch.zeros(LIMBS + 1, dtype=I64),
        torch.full((1,), 2**63 - 1, dtype=I64) if first_bad else none(I64),
    ]


def stats_of(grads: list[torch.Tensor]) -> torch.Tensor:
    """Returns the norm's partial sums of the gradients (grad_stats_)."""
    stats = torch.zeros(LIMBS + 1, dtype=I64)
    torch.ops.torch_ext.grad_stats_(grads, stats, none(I64))
    return stats


def grad_norm(max_norm: float = 1.0, norm: torch.dtype = F64, absent: bool = False) -> list[Any]:
    stats = stats_of(randoms((5, 300), F32))
    if absent:
        return [stats, none(), max_norm, one(-1, norm), none(), none()]
    return [stats, one(2.0), max_norm, one(-1, norm), one(-1), one(-1)]


def bucket_pack(
    dtype: torch.dtype = F32, wire: torch.dtype = BF16, numels: Sequence[int] = (5, 130, 0, 1)
) -> list[Any]:
    offsets, end = [], 0
    for n in numels:
        offsets.append(end)
        end = -(-(end + n) // BLOCK) * BLOCK
    scales = scale_bytes(end, 1) if wire is U8 else none(U8)
    bucket = torch.full((end,), 1, dtype=wire)
    return [randoms(numels, dtype), torch.tensor(offsets, dtype=I64), bucket, scales, 3, 2, 1]


def bucket_accumulate(main: torch.dtype = F32, grad: torch.dtype = BF16) -> list[Any]:
    return [randoms((5, 130, 0, 1), main, 1), randoms((5, 130, 0, 1), grad, 2)]


def bucket_reduce(
    wire: torch.dtype = BF16, shard: torch.dtype = F32, stats: bool = True, accumulate: bool = False
) -> list[Any]:
    chunks, scales = randoms((130, 130, 130), BF16 if wire is U8 else wire), []
    if wire is U8:
        chunks = [torch.arange(130, dtype=U8) % 100 for _ in range(3)]
        scales = [scale_bytes(130, 1) for _ in range(3)]
    total = torch.zeros(LIMBS + 1, dtype=I64) if stats else none(I64)
    return [chunks, scales, randoms((130,), shard, 9)[0], total, 1 / 3, accumulate]


def bucket_unpack(wire: torch.dtype = BF16, dtype: torch.dtype = F32) -> list[Any]:
    _, offsets, bucket, scales, *_ = bucket_pack(wire=wire)
    bucket.copy_(torch.arange(bucket.numel()) % 100)
    return [bucket, scales, offsets, [torch.zeros(n, dtype=dtype) for n in (5, 130, 0, 1)]]


def cast(
    src: torch.dtype = F32, dst: torch.dtype = BF16, scaled: bool = False, rounding: int = 0, meta: bool = False
) -> list[Any]:
    numels = (5, 130, 0, 1)
    table = torch.tensor([[i, 128 * i, 0] for i in range(len(numels))], dtype=I64) if meta else none(I64)
    scales = [scale_bytes(n, 1) for n in numels] if scaled else []
    return [randoms(numels, src), [torch.zeros(n, dtype=dst) for n in numels], [], scales, table, 0, rounding, 5, 6]


def master_encode() -> list[Any]:
    numels = (5, 130, 0, 1)
    return [
        randoms(numels, F32),
        [torch.zeros(n, dtype=BF16) for n in numels],
        [torch.zeros(n, dtype=I16) for n in numels],
    ]


def master_decode() -> list[Any]:
    numels = (5, 130, 0, 1)
    remainders = [torch.arange(n, dtype=I16) * 300 for n in numels]
    return [randoms(numels, BF16), remainders, [torch.zeros(n) for n in numels]]


def master_resync(
    param: torch.dtype = BF16, master: torch.dtype = F32, changed: bool = True, force: bool = False
) -> list[Any]:
    numels = (5, 130, 0, 1)
    masters = [torch.full((n,), 3, dtype=master) for n in numels]
    return [
        randoms(numels, param),
        masters,
        torch.zeros(len(numels), dtype=I64) if changed else none(I64),
        force,
        False,
    ]


def master_checksum(master: torch.dtype = F32, mode: int = 0) -> list[Any]:
    """Returns arguments in which the last element of every weight was written after the checksums were computed."""
    numels = (5, 1030, 0, 4100)
    params = randoms(numels, BF16)
    masters = [p.float() if master is F32 else torch.ones(p.numel(), dtype=I16) for p in params]
    checksums = checksums_of(params, masters)
    for p in params:
        p[-1:] += 1
    return [params, masters, checksums, torch.zeros(len(numels), dtype=I64), mode]


def parts_of(numels: Sequence[int]) -> torch.Tensor:
    """Returns Muon's table of parts: two matrices to a tensor, or one if the tensor is too small."""
    rows = [(i, begin) for i, n in enumerate(numels) for begin in sorted({0, n // 3}) if n]
    return torch.tensor(rows, dtype=I64).reshape(-1, 2)


def muon_momentum(
    grad: torch.dtype = F32,
    momentum: torch.dtype = F32,
    work: torch.dtype = F32,
    extras: bool = False,
    nesterov: bool = True,
) -> list[Any]:
    numels = (5, 130, 0, 1, 1030)
    return [
        randoms(numels, grad, 2),
        [torch.zeros(n, dtype=momentum) for n in numels],
        [scale_bytes(n, 1) for n in numels] if momentum in (F16, U8) else [],
        [torch.zeros(n, dtype=work) for n in numels],
        [one(3.0) for _ in numels],
        torch.tensor([[1000 + i, 0, 0] for i in range(len(numels))], dtype=I64) if extras else none(I64),
        one(4.0) if extras else none(),
        one(0.5) if extras else none(),
        0.95,
        nesterov,
        7,
        1,
    ]


def muon_update(
    param: torch.dtype = F32,
    update: torch.dtype = F32,
    master: torch.dtype | None = None,
    external: int = 0,
    extras: bool = False,  # all but healths, which must be aligned
) -> list[Any]:
    """Returns the arguments of muon_update_. external: on_external_write; if not 0, checksums are passed too."""
    numels = (5, 130, 0, 1, 1030)
    params, parts = randoms(numels, param, 1), parts_of(numels)
    masters = []
    if master is not None:
        masters = [p.float() if master is F32 else torch.zeros(p.numel(), dtype=I16) for p in params]
    return [
        params,
        randoms(numels, update, 2),
        masters,
        checksums_of(params, masters) if external else [],
        [one(3.0) for _ in numels],
        none(I64),
        parts,
        torch.tensor([(1e-2 * (i + 1), 1e-3) for i in range(len(parts))], dtype=F64),
        torch.zeros(1, dtype=I64) if external else none(I64),
        [torch.zeros(-(-n // 8), dtype=U8) for n in numels] if extras else [],
        [torch.zeros(-(-n // 128), dtype=BF16) for n in numels] if extras else [],
        [torch.zeros(-(-n // 2), dtype=U8) for n in numels] if extras else [],
        [torch.zeros(n, dtype=BF16) for n in numels] if extras else [],
        [torch.zeros(n, dtype=U8) for n in numels] if extras else [],
        [],
        7,
        1,
        external,
        0.9 if extras else 0.0,
        2 if extras else 1,
    ]


TWO_GROUPS = (GROUP, (5e-3, 0.8, 0.99, 1e-6, 0.0, 1.0, 0.0))

SAMPLES = [
    Sample("adamw_", "float32", adamw),
    Sample("adamw_", "leaves_that_require_grad", lambda: adamw(requires_grad=True)),
    Sample("adamw_", "bfloat16", lambda: adamw(param=BF16)),
    Sample("adamw_", "bfloat16_with_masters", lambda: adamw(param=BF16, master=F32, extras=True)),
    Sample("adamw_", "bfloat16_with_remainders", lambda: adamw(param=BF16, master=I16, groups=TWO_GROUPS, extras=True)),
    Sample(
        "adamw_", "float16_states_of_8_and_16_bits", lambda: adamw(param=F16, exp_avg=U8, exp_avg_sq=F16, master=F32)
    ),
    Sample("adamw_", "skipped", adamw_skipped),
    Sample("adamw_", "no_tensors", lambda: adamw(numels=())),
    Sample("adamw_flat_", "float32", adamw_flat),
    Sample("adamw_flat_", "bfloat16_with_masters", lambda: adamw_flat(param=BF16, master=F32, extras=True)),
    Sample("adamw_flat_", "float16_states_of_8_bits", lambda: adamw_flat(param=F16, exp_avg=U8, master=F32)),
    Sample("adamw_flat_", "checksums", lambda: adamw_flat(1, param=BF16, master=F32)),
    Sample("adamw_flat_", "checksums_of_remainders", lambda: adamw_flat(1, param=BF16, master=I16, extras=True)),
    Sample("adamw_flat_", "only_a_check", lambda: adamw_flat(2, param=BF16, master=I16)),
    Sample("adamw_flat_", "what_changed", lambda: adamw_flat(1, leaves=True, param=BF16, master=I16)),
    Sample("adamw_flat_", "no_tensors", lambda: adamw_flat(numels=())),
    Sample("grad_stats_", "float32", grad_stats),
    Sample("grad_stats_", "bfloat16_without_first_bad", lambda: grad_stats(dtype=BF16, first_bad=False)),
    Sample("grad_norm_", "clipped", grad_norm),
    Sample("grad_norm_", "unclipped", lambda: grad_norm(float("inf"), F32)),
    Sample("grad_norm_", "only_the_norm", lambda: grad_norm(absent=True)),
    Sample("bucket_pack_", "float32_to_bfloat16", bucket_pack),
    Sample("bucket_pack_", "bfloat16_to_8_bits", lambda: bucket_pack(BF16, U8)),
    Sample("bucket_pack_", "nothing", lambda: bucket_pack(numels=())),
    Sample("bucket_accumulate_", "bfloat16_to_float32", bucket_accumulate),
    Sample("bucket_accumulate_", "float16", lambda: bucket_accumulate(F16, F16)),
    Sample("bucket_reduce_", "bfloat16_to_float32", bucket_reduce),
    Sample("bucket_reduce_", "8_bits_added_to_bfloat16", lambda: bucket_reduce(U8, BF16, False, True)),
    Sample("bucket_unpack_", "bfloat16_to_float32", bucket_unpack),
    Sample("bucket_unpack_", "8_bits_to_bfloat16", lambda: bucket_unpack(U8, BF16)),
    Sample("cast_", "float32_to_bfloat16", cast),
    Sample("cast_", "stochastic_with_meta", lambda: cast(rounding=2, meta=True)),
    Sample("cast_", "bfloat16_to_8_bits", lambda: cast(BF16, U8, scaled=True, rounding=1)),
    Sample("master_encode_", "split", master_encode),
    Sample("master_decode_", "join", master_decode),
    Sample("master_resync_", "float32_beside_bfloat16", master_resync),
    Sample("master_resync_", "forced_remainders", lambda: master_resync(BF16, I16, False, True)),
    Sample("master_resync_", "only_a_check", lambda: [*master_resync()[:4], True]),
    Sample("master_checksum_", "checked", master_checksum),
    Sample("master_checksum_", "remainders_resynced", lambda: master_checksum(I16, 1)),
    Sample("master_checksum_", "renewed", lambda: master_checksum(F32, 2)),
    Sample("muon_momentum_", "float32", muon_momentum),
    Sample("muon_momentum_", "bfloat16", lambda: muon_momentum(BF16, BF16, BF16, extras=True, nesterov=False)),
    Sample("muon_momentum_", "8_bits", lambda: muon_momentum(BF16, U8, F32)),
    Sample("muon_update_", "float32", muon_update),
    Sample("muon_update_", "bfloat16", lambda: muon_update(BF16, BF16)),
    Sample("muon_update_", "bfloat16_with_masters", lambda: muon_update(BF16, F32, F32, external=1)),
    Sample("muon_update_", "bfloat16_with_remainders", lambda: muon_update(BF16, BF16, I16, external=1)),
    Sample("muon_update_", "leaving_changes_and_averages", lambda: muon_update(BF16, BF16, I16, 1, extras=True)),
    Sample("muon_mirror_", "float32", lambda: [randoms([130 * 130], F32)[0].view(130, 130), 64]),
    Sample("muon_mirror_", "bfloat16", lambda: [randoms([130 * 130], BF16)[0].view(130, 130), 64]),
]
FIRST_SAMPLES = list({s.operator: s for s in reversed(SAMPLES)}.values())  # the first sample of each operator


def overload(operator: str) -> Any:
    return getattr(torch.ops.torch_ext, operator).default


def run(operator: str, arguments: list[Any]) -> list[Any]:
    overload(operator)(*arguments)
    return arguments


def tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Returns every tensor among the arguments, in order."""
    flat: list[torch.Tensor] = []
    for argument in arguments:
        flat.extend(
            [argument] if isinstance(argument, torch.Tensor) else argument if isinstance(argument, list) else []
        )
    return flat


def bits(arguments: Sequence[Any]) -> list[bytes]:
    """Returns every byte behind the arguments: whole storages, so that a write outside of a view shows too."""
    storages = [t.untyped_storage() for t in tensors(arguments) if t.layout is torch.strided and t.device.type == "cpu"]
    return [ctypes.string_at(s.data_ptr(), s.nbytes()) if s.nbytes() else b"" for s in storages]


HOST_ONLY = ("muon_mirror_",)  # operators without a CUDA implementation
DISPATCHED = [sample for sample in SAMPLES if sample.operator not in HOST_ONLY]

TABLES = {"groups", "meta", "slices", "offsets", "parts", "rates"}  # arguments that stay on the CPU next to GPU tensors


def moved(operator: str, arguments: Sequence[Any], move: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Returns the call's arguments with each tensor but tables moved by `move` to another device."""

    def one(name: str, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return a if name in TABLES else move(a.detach())
        return [move(t.detach()) for t in a] if isinstance(a, list) else a

    return [one(a.name, value) for a, value in zip(overload(operator)._schema.arguments, arguments, strict=True)]


def copy(arguments: Sequence[Any]) -> list[Any]:
    """Returns the same values in new memory."""

    def fresh(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    return [
        fresh(a) if isinstance(a, torch.Tensor) else [fresh(t) for t in a] if isinstance(a, list) else a
        for a in arguments
    ]
