"""torch.ops.torch_ext.*: each argument reaches the library as the right one."""

import math
from typing import Any

import operator_samples as samples
import pytest
import torch
from operator_samples import BF16, F16, F32, F64, I16, I64, U8, bits, none, one, overload, run

ops = torch.ops.torch_ext


# -- each argument reaches the library as the right one: results against a few lines of torch --------------------------


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_adamw_matches_torch(decoupled: bool) -> None:
    group = (1e-2, 0.8, 0.95, 1e-6, 0.1, 1.0, float(decoupled))
    params, grads, exp_avgs, exp_avg_sqs, *_ = arguments = samples.adamw((5, 130, 1), groups=(group,))
    reference = [p.clone().requires_grad_() for p in params]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind(reference, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, maximize=True)
    for p, g in zip(reference, grads, strict=True):
        p.grad = g.clone()
        theirs.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(g), "exp_avg_sq": torch.zeros_like(g)}
    run("adamw_", arguments)
    theirs.step()
    for p, q, m, v, step in zip(params, reference, exp_avgs, exp_avg_sqs, arguments[6], strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(m, theirs.state[q]["exp_avg"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(v, theirs.state[q]["exp_avg_sq"], rtol=1e-6, atol=1e-7)
        assert step.item() == 4


FLAT: dict[str, dict[str, Any]] = {
    "float32": {},
    "two_groups": dict(groups=samples.TWO_GROUPS, extras=True),
    "bfloat16": dict(param=BF16),
    "masters": dict(param=BF16, master=F32),
    "remainders": dict(param=BF16, master=I16),
    "8_and_16_bits": dict(param=F16, exp_avg=U8, exp_avg_sq=F16, master=F32),
}


@pytest.mark.parametrize("options", FLAT.values(), ids=FLAT.keys())
def test_adamw_flat_is_adamw(options: dict[str, Any]) -> None:
    arguments = run("adamw_", samples.adamw(**options))
    params, grads, states, slices, *rest = run("adamw_flat_", samples.adamw_flat(**options))
    assert bits([params, grads, *rest]) == bits([*arguments[:2], *arguments[7:]])
    for k, tensors in enumerate(arguments[2:7]):
        for i, t in enumerate(tensors):
            state, first, numel = slices[i, 3 * k : 3 * k + 3].tolist()
            assert torch.equal(states[state][first : first + numel].view(U8), t.view(U8)), (k, i)
    assert all(state[0] == 7 for state in states), "what no slice names stays as it is"


def test_adamw_reads_scale_clip_lr_and_group() -> None:
    first, second = (1e-2, 0.9, 0.999, 1e-8, 0.0, 0.0, 1.0), (1e-3, 0.5, 0.9, 1e-4, 0.2, 0.0, 1.0)
    together = samples.adamw((5, 130), groups=(first, second), extras=True)
    alone = [samples.adamw((5, 130), groups=(group,)) for group in (first, second)]
    together[7] = [one(0.5, F64), one(0.25, F32)]
    run("adamw_", together)
    for i, arguments in enumerate(alone):
        arguments[1] = [g * 0.5 / 4.0 for g in arguments[1]]
        arguments[8][0, 0] = (0.5, 0.25)[i]
        run("adamw_", arguments)
        for position in (0, 2, 3):
            assert torch.equal(together[position][i], arguments[position][i])


def test_adamw_skips_and_counts() -> None:
    arguments = samples.adamw_skipped()
    before = bits(arguments[:13])
    run("adamw_", arguments)
    assert bits(arguments[:13]) == before
    assert arguments[13].item() == 1


@pytest.mark.parametrize(
    "position, value", [(14, 8), (15, 2), (16, 0)], ids=["seed", "moment_rounding", "weight_rounding"]
)
def test_adamw_integers_matter(position: int, value: int) -> None:
    """seed, moment_rounding and weight_rounding each affect the states or weights that they are for."""
    one_way = run("adamw_", samples.adamw(param=BF16))
    arguments = samples.adamw(param=BF16)
    arguments[position] = value
    other_way = run("adamw_", arguments)
    lists = (2, 3) if position == 15 else (0,) if position == 16 else (0, 2, 3)
    for i in lists:
        assert not torch.equal(one_way[i][1], other_way[i][1])


def test_a_masters_weight_is_its_rounding() -> None:
    params, *_, masters = run("adamw_", samples.adamw(param=BF16, master=F32))[:5]
    for p, m in zip(params, masters, strict=True):
        assert torch.equal(p, m.to(BF16))


def test_grad_stats_and_norm() -> None:
    grads, stats, first_bad = run("grad_stats_", samples.grad_stats((5, 300, 0, 70000)))
    norm, clip, found = one(0, F64), one(0), one(0)
    ops.grad_norm_(stats, one(2.0), 1.5, norm, clip, found)
    exact = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads)) / 2
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    assert clip.item() == pytest.approx(1.5 / (exact + 1e-6), rel=1e-6)
    assert found.item() == 0 and first_bad.item() == 2**63 - 1


def test_grad_stats_finds_the_first_bad_tensor() -> None:
    grads, stats, first_bad = samples.grad_stats((5, 300, 7))
    grads[1][3], grads[2][0] = math.inf, math.nan
    found = one(0)
    ops.grad_stats_(grads, stats, first_bad)
    ops.grad_norm_(stats, none(), math.inf, none(), none(), found)
    assert (first_bad.item(), stats[-1].item(), found.item()) == (1, 2, 1)


@pytest.mark.parametrize("wire", [F32, BF16, F16], ids=str)
def test_bucket_pack_and_unpack(wire: torch.dtype) -> None:
    grads, offsets, bucket, scales, *_ = run("bucket_pack_", samples.bucket_pack(F32, wire))
    expected = torch.zeros_like(bucket)
    for g, at in zip(grads, offsets.tolist(), strict=True):
        expected[at : at + g.numel()] = g.to(wire)
    assert torch.equal(bucket, expected)
    back = [torch.ones_like(g) for g in grads]
    ops.bucket_unpack_(bucket, scales, offsets, back)
    for g, b in zip(grads, back, strict=True):
        assert torch.equal(b, g.to(wire).float())


def test_bucket_of_8_bits_comes_back_within_its_precision() -> None:
    grads, offsets, bucket, scales, *_ = run("bucket_pack_", samples.bucket_pack(F32, U8))
    back = [torch.ones_like(g) for g in grads]
    ops.bucket_unpack_(bucket, scales, offsets, back)
    for g, b in zip(grads, back, strict=True):
        torch.testing.assert_close(b, g, rtol=0.125, atol=0.02)


def test_bucket_accumulate() -> None:
    mains, grads = samples.bucket_accumulate(F32, BF16)
    expected = [m + g.float() for m, g in zip(mains, grads, strict=True)]
    ops.bucket_accumulate_(mains, grads)
    assert all(torch.equal(m, e) for m, e in zip(mains, expected, strict=True))


@pytest.mark.parametrize("accumulate", [False, True], ids=["copy", "add"])
def test_bucket_reduce(accumulate: bool) -> None:
    chunks, scales, shard, stats, scale, _ = samples.bucket_reduce(BF16, F32)
    mean = ((chunks[0].float() + chunks[1].float()) + chunks[2].float()) * torch.tensor(scale, dtype=F32)
    expected = shard + mean if accumulate else mean
    ops.bucket_reduce_(chunks, scales, shard, stats, scale, accumulate)
    assert torch.equal(shard, expected)
    norm = one(0, F64)
    ops.grad_norm_(stats, none(), math.inf, norm, none(), none())
    assert norm.item() == pytest.approx(shard.double().norm().item(), rel=1e-6)


def test_cast() -> None:
    srcs, dsts, *_ = run("cast_", samples.cast())
    assert all(torch.equal(d, s.to(BF16)) for s, d in zip(srcs, dsts, strict=True))


@pytest.mark.parametrize("position", [4, 7, 8], ids=["meta", "seed", "step"])
def test_cast_thresholds_depend_on(position: int) -> None:
    one_way = run("cast_", samples.cast(rounding=2, meta=True))
    arguments = samples.cast(rounding=2, meta=True)
    arguments[position] = arguments[position] + 1 if isinstance(arguments[position], int) else arguments[4] + 2
    other_way = run("cast_", arguments)
    assert not torch.equal(one_way[1][1], other_way[1][1])
    assert torch.equal(run("cast_", samples.cast(rounding=2, meta=True))[1][1], one_way[1][1])


def test_cast_format_is_passed_on() -> None:
    values = [torch.rand(130)]
    signed, square = ([torch.zeros(130, dtype=U8)] for _ in range(2))
    scales = [[samples.scale_bytes(130, 1)] for _ in range(2)]
    ops.cast_(values, signed, [], scales[0], none(I64), 0)
    ops.cast_(values, square, [], scales[1], none(I64), 1)
    assert not torch.equal(signed[0], square[0])
    back = [torch.zeros(130)]
    ops.cast_(square, back, scales[1], [], none(I64), 1)
    torch.testing.assert_close(back[0], values[0], rtol=0.13, atol=1e-2)


def test_masters_split_and_join() -> None:
    masters, params, remainders = run("master_encode_", samples.master_encode())
    back = [torch.zeros_like(m) for m in masters]
    ops.master_decode_(params, remainders, back)
    for m, p, b in zip(masters, params, back, strict=True):
        assert torch.equal(p, m.to(BF16)) and torch.equal(b, m)


@pytest.mark.parametrize("force", [False, True])
def test_master_resync(force: bool) -> None:
    params, masters, changed, *_ = samples.master_resync()
    masters[1] = params[1].float() * (1 + 2**-12)  # still rounds to its weight
    ops.master_resync_(params, masters, changed, force)
    assert torch.equal(masters[0], params[0].float())
    assert torch.equal(masters[1], params[1].float()) == force
    assert changed.tolist() == [5, int((params[1] != 0).sum()) if force else 0, 0, 1]


def test_master_resync_only_counts_where_it_checks() -> None:
    params, masters, changed, *_ = samples.master_resync()
    before = bits(masters)
    ops.master_resync_(params, masters, changed, False, True)
    assert bits(masters) == before and changed.tolist() == [5, 130, 0, 1]


@pytest.mark.parametrize("master, counts", [(F32, [1, 1, 0, 1]), (I16, [5, 6, 0, 4])], ids=["fp32", "remainders"])
def test_master_checksum(master: torch.dtype, counts: list[int]) -> None:
    """With remainders a whole block is taken over: of 1030 weights the last 6, of 4100 the last 4."""
    params, masters, checksums, stale, _ = samples.master_checksum(master)
    before, old = bits(masters), [m.clone() for m in masters]
    ops.master_checksum_(params, masters, checksums, stale, 0)
    assert stale.tolist() == counts and bits(masters) == before
    ops.master_checksum_(params, masters, checksums, stale, 1)
    assert stale.tolist() == [2 * n for n in counts]
    for p, m, o in zip(params, masters, old, strict=True):
        assert torch.equal(m[-1:].float(), p[-1:].float() if master is F32 else torch.zeros(len(m[-1:])))
        assert torch.equal(m[:1024], o[:1024]) or len(m) < 1024
    ops.master_checksum_(params, masters, checksums, stale, 1)
    assert stale.tolist() == [2 * n for n in counts]


def test_a_sample_of_a_large_tensor_is_32_of_every_2048() -> None:
    p = samples.randoms((3 * 4096 + 100,), BF16)
    masters = [p[0].float()]
    checksums = samples.checksums_of(p, masters)
    for i in range(p[0].numel()):
        if i % 2048 in (0, 31, 32, 1024, 2047) or i > 3 * 4096 + 90:
            stale = torch.zeros(1, dtype=I64)
            old = p[0][i].clone()
            p[0][i] += 1
            ops.master_checksum_(p, masters, checksums, stale, 0)
            p[0][i] = old
            assert int(stale) == int(i % 2048 < 32), i


# -- legal, though unusual ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", samples.SAMPLES, ids=lambda s: s.id)
def test_unaligned_memory_gives_the_same_bits(sample: samples.Sample) -> None:
    arguments = sample.make()
    keep: list[Any] = []

    def unaligned(t: torch.Tensor) -> torch.Tensor:
        if t.numel() == 0:
            return t
        memory = bytearray(b"\0") + bytearray(t.detach().reshape(-1).view(U8).tolist())
        keep.append(memory)
        moved = torch.frombuffer(memory, dtype=t.dtype, offset=1).reshape(t.shape)
        assert moved.data_ptr() % 2 == 1 or t.element_size() == 1
        return moved

    schema = overload(sample.operator)._schema.arguments
    moved = [
        a if spec.name in samples.TABLES else unaligned(a) if isinstance(a, torch.Tensor)
        else [unaligned(t) for t in a] if isinstance(a, list) else a
        for spec, a in zip(schema, arguments, strict=True)
    ]  # fmt: skip
    run(sample.operator, arguments)
    run(sample.operator, moved)
    for a, b in zip(samples.tensors(arguments), samples.tensors(moved), strict=True):
        assert bits([a.detach().clone()]) == bits([b.clone()])


def test_unaligned_tables_are_refused() -> None:
    table = torch.frombuffer(bytearray(57), dtype=F64, offset=1).reshape(1, 7)
    arguments = samples.adamw()
    arguments[8] = table
    with pytest.raises(RuntimeError, match="groups must begin at a multiple of 8 bytes"):
        run("adamw_", arguments)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    before = torch.get_num_threads()
    expected = run("adamw_", samples.adamw((50000, 3, 40000), param=BF16, master=F32))
    try:
        torch.set_num_threads(threads)
        found = run("adamw_", samples.adamw((50000, 3, 40000), param=BF16, master=F32))
    finally:
        torch.set_num_threads(before)
    assert bits(found) == bits(expected)


def test_more_tensors_than_fit_the_callers_stack() -> None:
    numels = [1 + i % 5 for i in range(700)]
    arguments = samples.bucket_accumulate()
    arguments = [samples.randoms(numels, F32, 1), samples.randoms(numels, BF16, 2)]
    expected = [m + g.float() for m, g in zip(*arguments, strict=True)]
    run("bucket_accumulate_", arguments)
    assert all(torch.equal(m, e) for m, e in zip(arguments[0], expected, strict=True))


def test_a_flat_range_stands_for_a_shaped_tensor() -> None:
    flat = torch.zeros(6)
    ops.bucket_accumulate_([flat], [torch.ones(2, 3)])
    assert flat.tolist() == [1.0] * 6


def test_views_into_a_flat_buffer() -> None:
    flat = torch.zeros(10)
    ops.bucket_accumulate_([flat[1:4], flat[4:9].view(5, 1)], [torch.ones(3), torch.full((5, 1), 2.0)])
    assert flat.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2, 0]


def test_memory_shared_until_written_is_copied_first() -> None:
    original = torch.zeros(5)
    lazy = torch._lazy_clone(original)
    ops.bucket_accumulate_([lazy], [torch.ones(5)])
    assert original.tolist() == [0.0] * 5 and lazy.tolist() == [1.0] * 5


def test_defaults_of_the_schema() -> None:
    arguments = samples.adamw(param=BF16)
    arguments[14] = 0
    assert bits(run("adamw_", arguments)) == bits(run("adamw_", samples.adamw(param=BF16)[:14] + [0, 1, 1]))
    short = samples.adamw(param=BF16)[:14]
    assert bits(run("adamw_", short)) == bits(arguments[:14])
