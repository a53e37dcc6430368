"""Wrong calls of torch.ops.torch_ext.*: the error says what is wrong, and no argument's memory has changed."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import operator_samples as samples
import pytest
import torch
from operator_samples import BF16, F16, F32, F64, I16, I64, U8, bits, none, one, overload, run


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A wrong call: the sample of `make` (by default the operator's first sample) after `spoil`. The message must
    contain all of `says`."""

    operator: str
    name: str
    spoil: Callable[[list[Any]], None]
    says: tuple[str, ...]
    make: Callable[[], list[Any]] | None = None

    @property
    def id(self) -> str:
        return f"{self.operator}-{self.name}"

    def arguments(self) -> list[Any]:
        make = self.make or next(s.make for s in samples.SAMPLES if s.operator == self.operator)
        arguments = make()
        self.spoil(arguments)
        return arguments


def put(position: int, value: Any, index: int | None = None) -> Callable[[list[Any]], None]:
    """Returns a function that replaces an argument, or the tensor at `index` of a list."""

    def spoil(arguments: list[Any]) -> None:
        if index is None:
            arguments[position] = value() if callable(value) else value
        else:
            arguments[position][index] = value() if callable(value) else value

    return spoil


def put_hyper(column: int, value: float) -> Callable[[list[Any]], None]:
    """Returns a function that sets a hyper-parameter of group 0."""

    def spoil(arguments: list[Any]) -> None:
        arguments[8][0, column] = value

    return spoil


def alias(target: tuple[int, int], source: tuple[int, int]) -> Callable[[list[Any]], None]:
    """Returns a function that puts the source tensor in the target's place. Each is (argument, index)."""

    def spoil(arguments: list[Any]) -> None:
        arguments[target[0]][target[1]] = arguments[source[0]][source[1]]

    return spoil


def put_slice(row: int, column: int, value: int) -> Callable[[list[Any]], None]:
    """Returns a function that sets an entry of adamw_flat_'s table of slices."""

    def spoil(arguments: list[Any]) -> None:
        arguments[3][row, column] = value

    return spoil


def signed_for(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> Callable[[list[Any]], None]:
    """Returns a function that passes the signature of other parameters: of these shapes, by default of the same ones,
    in that dtype."""

    def spoil(arguments: list[Any]) -> None:
        others = [torch.empty(shape, dtype=dtype) for shape in shapes] or [p.to(dtype) for p in arguments[0]]
        arguments[15] = samples.signature_of(others)

    return spoil


def with_extras() -> list[Any]:
    return samples.adamw(extras=True)


def overlapping_views(arguments: list[Any]) -> None:
    memory = torch.zeros(134)
    arguments[0][0], arguments[0][1] = memory[:5], memory[4:]


WRONG = [
    # hyper-parameters
    Wrong("adamw_", "negative_lr", put_hyper(0, -1e-3), ("groups[0]", "lr", "-0.001", ">= 0")),
    Wrong("adamw_", "nan_lr", put_hyper(0, math.nan), ("groups[0]", "lr", "nan")),
    Wrong("adamw_", "negative_tensor_lr", put(7, lambda: one(-1.0), 0), ("lr", "-1"), with_extras),
    Wrong("adamw_", "beta1_of_1", put_hyper(1, 1.0), ("beta1", "[0, 1)")),
    Wrong("adamw_", "negative_beta2", put_hyper(2, -0.1), ("beta2", "[0, 1)")),
    Wrong("adamw_", "nan_beta2", put_hyper(2, math.nan), ("beta2", "nan")),
    Wrong("adamw_", "negative_eps", put_hyper(3, -1e-8), ("eps", ">= 0")),
    Wrong("adamw_", "negative_weight_decay", put_hyper(4, -0.1), ("weight_decay", ">= 0")),
    Wrong("adamw_", "half_maximize", put_hyper(5, 0.5), ("maximize", "0 or 1")),
    Wrong("adamw_", "unknown_rounding", put(15, 7), ("moment_rounding", "7", "stochastic")),
    Wrong("adamw_", "a_code_beyond_32_bits", put(16, 2**32 + 1), ("weight_rounding", "stochastic")),
    Wrong("cast_", "a_code_below_32_bits", put(6, -(2**40)), ("rounding", "stochastic")),
    Wrong("cast_", "unknown_format", put(5, 3), ("format", "square root")),
    Wrong("grad_norm_", "max_norm_of_0", put(2, 0.0), ("max_norm", "> 0")),
    Wrong("grad_norm_", "negative_max_norm", put(2, -1.0), ("max_norm", "-1")),
    Wrong("grad_norm_", "nan_max_norm", put(2, math.nan), ("max_norm", "nan")),
    Wrong("bucket_reduce_", "nan_scale", put(4, math.nan), ("scale", "nan")),
    # tables
    Wrong("adamw_", "groups_in_float32", lambda a: put(8, a[8].float())(a), ("groups", "float64", "[rows, 7]")),
    Wrong("adamw_", "groups_of_6_columns", put(8, lambda: torch.zeros(1, 6, dtype=F64)), ("groups", "[rows, 7]")),
    Wrong("adamw_", "flat_groups", put(8, lambda: torch.zeros(7, dtype=F64)), ("groups", "[rows, 7]")),
    Wrong("adamw_", "no_groups", put(8, lambda: none(F64)), ("groups", "0 rows")),
    Wrong("adamw_", "lrs_of_another_length", put(7, lambda: [one(0.1)] * 2), ("lrs", "2", "groups")),
    Wrong("adamw_", "meta_in_int32", lambda a: put(9, a[9].int())(a), ("meta", "int64", "[rows, 3]"), with_extras),
    Wrong("adamw_", "meta_with_a_row_too_many", put(9, lambda: torch.zeros(5, 3, dtype=I64)), ("meta", "5", "params")),
    Wrong("adamw_", "unknown_group", lambda a: a[9][0].__setitem__(2, 1), ("meta[0]", "group 1"), with_extras),
    Wrong("adamw_", "negative_start", lambda a: a[9][1].__setitem__(1, -1), ("meta[1]", "start -1"), with_extras),
    Wrong("adamw_flat_", "slices_in_int32", lambda a: put(3, a[3].int())(a), ("slices", "int64", "[rows, 15]")),
    Wrong("adamw_flat_", "slices_of_5_columns", put(3, lambda: torch.zeros(4, 5, dtype=I64)), ("slices", "[rows, 15]")),
    Wrong("adamw_flat_", "slices_too_few", lambda a: put(3, a[3][:3])(a), ("slices", "3 rows", "params")),
    Wrong("adamw_flat_", "no_such_state", put_slice(1, 0, 5), ("slices[1]", "exp_avg ", "states[5]", "of 5 states")),
    Wrong("adamw_flat_", "a_state_before_the_first", put_slice(1, 3, -1), ("slices[1]", "exp_avg_sq", "states[-1]")),
    Wrong("adamw_flat_", "a_slice_before_its_state", put_slice(0, 1, -1), ("slices[0]", "5 elements from -1")),
    Wrong("adamw_flat_", "a_slice_beyond_its_state", put_slice(1, 1, 8), ("slices[1]", "130 elements from 8", "137")),
    Wrong("adamw_flat_", "a_slice_of_2_to_the_63", put_slice(3, 14, 2**63 - 1), ("slices[3]", "step is 9223372036854")),
    Wrong("adamw_flat_", "a_slice_of_negative_length", put_slice(3, 14, -1), ("slices[3]", "-1 elements")),
    Wrong("adamw_flat_", "a_slice_too_short", put_slice(1, 2, 129), ("exp_avgs[1]", "129", "params[1]", "130")),
    Wrong("adamw_flat_", "slices_that_overlap", put_slice(1, 1, 5), ("exp_avgs[0]", "exp_avgs[1]", "share memory")),
    Wrong("adamw_flat_", "moments_that_are_one", put_slice(1, 3, 0), ("exp_avgs[1]", "exp_avg_sqs[1]", "share memory")),
    Wrong("adamw_flat_", "params_of_another_shape", signed_for((1, 5), (130,), (0,), (1,)), ("params", "signature")),
    Wrong("adamw_flat_", "params_of_another_dtype", signed_for(dtype=BF16), ("params", "shapes", "signature")),
    Wrong("adamw_flat_", "params_in_another_order", signed_for((130,), (5,), (0,), (1,)), ("params", "signature")),
    Wrong("adamw_flat_", "a_parameter_too_many", signed_for((5,), (130,), (0,), (1,), (0,)), ("params", "signature")),
    Wrong("adamw_flat_", "params_elsewhere", put(18, lambda: 1), ("params", "other addresses", "slices")),
    Wrong("adamw_flat_", "a_parameter_without_step", put_slice(0, 14, 0), ("steps[0]", "0 elements")),
    Wrong("cast_", "meta_with_a_row_too_few", put(4, lambda: torch.zeros(3, 3, dtype=I64)), ("meta", "3 rows", "srcs")),
    Wrong("bucket_pack_", "offsets_in_int32", lambda a: put(1, a[1].int())(a), ("offsets", "int64", "[n]")),
    Wrong("bucket_pack_", "offsets_too_few", lambda a: put(1, a[1][:3])(a), ("offsets", "3 rows", "grads")),
    Wrong("bucket_pack_", "no_offsets", put(1, lambda: none(I64)), ("offsets", "0 rows", "grads")),
    Wrong("bucket_pack_", "offsets_that_overlap", lambda a: a[1].__setitem__(1, 4), ("offsets[1]", "overlap")),
    Wrong("bucket_pack_", "offset_beyond_the_end", lambda a: a[1].__setitem__(3, 10**6), ("offsets[3]", "leaves")),
    Wrong("bucket_pack_", "negative_offset", lambda a: a[1].__setitem__(0, -1), ("offsets[0]", "-1")),
    Wrong("bucket_unpack_", "offset_beyond_the_end", lambda a: a[2].__setitem__(3, 10**6), ("offsets[3]", "leaves")),
    # one-element tensors and counters
    Wrong("adamw_", "two_steps_for_one_tensor", put(6, lambda: torch.zeros(2), 1), ("steps[1]", "2 elements")),
    Wrong("adamw_", "steps_in_float64", put(6, lambda: one(1, F64), 0), ("steps[0]", "float64")),
    Wrong("adamw_", "negative_step", put(6, lambda: one(-1), 0), ("steps[0]", "-1")),
    Wrong("adamw_", "nan_step", put(6, lambda: one(math.nan), 0), ("steps[0]", "nan")),
    Wrong("adamw_", "skipped_in_int32", put(13, lambda: torch.zeros(1, dtype=torch.int32)), ("skipped", "int32")),
    Wrong("adamw_", "grad_scale_of_2", put(10, lambda: torch.ones(2)), ("grad_scale", "2 elements")),
    Wrong("adamw_", "found_inf_in_int64", put(12, lambda: one(0, I64)), ("found_inf", "int64")),
    Wrong("grad_stats_", "stats_of_20", put(1, lambda: torch.zeros(20, dtype=I64)), ("stats", "20", "21")),
    Wrong("grad_norm_", "stats_in_float32", put(0, lambda: torch.zeros(21)), ("stats",)),
    Wrong("master_resync_", "changed_of_another_length", put(2, lambda: torch.zeros(3, dtype=I64)), ("changed", "3")),
    # shapes
    Wrong("adamw_", "numels_that_differ", put(1, lambda: torch.zeros(6), 0), ("grads[0]", "6", "params[0]", "5")),
    Wrong(
        "adamw_",
        "transposed_shapes",
        lambda a: (put(0, torch.zeros(2, 3), 0)(a), put(1, torch.zeros(3, 2), 0)(a)),
        ("params[0]", "grads[0]", "differ in shape"),
    ),
    Wrong(
        "adamw_",
        "masters_of_another_size",
        put(4, lambda: torch.zeros(4), 0),
        ("masters[0]", "4", "params[0]"),
        lambda: samples.adamw(param=BF16, master=F32),
    ),
    Wrong("adamw_", "scales_missing", put(5, list), ("scales[0]", "uint8"), lambda: samples.adamw(exp_avg=U8)),
    Wrong(
        "adamw_",
        "scales_of_another_size",
        put(5, lambda: none(U8), 1),
        ("scales[1]", "4"),
        lambda: samples.adamw(exp_avg=U8, exp_avg_sq=U8),
    ),
    Wrong("bucket_reduce_", "a_chunk_too_short", put(0, lambda: torch.zeros(129, dtype=BF16), 1), ("chunks[1]", "129")),
    Wrong("bucket_reduce_", "no_chunks", put(0, list), ("chunks", "at least 1")),
    Wrong(
        "bucket_accumulate_",
        "numels_that_differ",
        put(1, lambda: torch.zeros(6), 0),
        ("main_grads[0]", "grads[0]", "6"),
    ),
    # dtypes that an operator does not take: the message names the argument and what is legal
    Wrong(
        "adamw_", "params_in_float64", put(0, lambda: torch.zeros(5, dtype=F64), 0), ("params[0]", "float64", "may be")
    ),
    Wrong("adamw_", "grads_in_int16", put(1, lambda: torch.zeros(5, dtype=I16), 0), ("grads[0]", "int16", "may be")),
    Wrong(
        "adamw_", "exp_avgs_in_int64", put(2, lambda: torch.zeros(5, dtype=I64), 0), ("exp_avgs[0]", "int64", "may be")
    ),
    Wrong(
        "adamw_",
        "masters_beside_float32",
        put(4, lambda: [torch.zeros(n) for n in (5, 130, 0, 1)]),
        ("masters[0]", "may be"),
    ),
    Wrong(
        "adamw_",
        "remainders_beside_float16",
        lambda a: None,
        ("masters[0]", "int16", "may be"),
        lambda: samples.adamw(param=F16, master=I16),
    ),
    Wrong("adamw_", "complex_params", put(0, lambda: torch.zeros(5, dtype=torch.complex64), 0), ("params[0]",)),
    Wrong("grad_stats_", "integers", put(0, lambda: torch.zeros(5, dtype=I64), 0), ("grads[0]", "int64")),
    Wrong("cast_", "from_bool", put(0, lambda: torch.zeros(5, dtype=torch.bool), 0), ("srcs[0]",)),
    Wrong("cast_", "8_bits_without_scales", put(1, lambda: torch.zeros(5, dtype=U8), 0), ("dsts[0]", "dst_scales")),
    Wrong("bucket_pack_", "bucket_in_int16", lambda a: put(2, a[2].to(I16))(a), ("bucket", "int16")),
    Wrong("bucket_reduce_", "chunks_of_two_dtypes", put(0, lambda: torch.zeros(130), 1), ("chunks[1]", "chunks[0]")),
    Wrong("master_encode_", "float16_weights", put(1, lambda: torch.zeros(5, dtype=F16), 0), ("params[0]", "legal")),
    Wrong("master_resync_", "force_and_check", lambda a: put(4, True)(put(3, True)(a) or a), ("force", "check")),
    Wrong(
        "master_checksum_", "checksums_too_few", put(2, lambda: torch.zeros(1, dtype=I64), 3), ("checksums[3]", "2 of")
    ),
    Wrong("master_checksum_", "checksums_in_float64", put(2, lambda: torch.zeros(1, dtype=F64), 0), ("checksums[0]",)),
    Wrong("master_checksum_", "unknown_mode", put(4, 3), ("mode is 3", "2 (renew)")),
    Wrong(
        "master_checksum_",
        "float16_beside_remainders",
        put(0, lambda: torch.zeros(5, dtype=F16), 0),
        ("params[0]",),
        lambda: samples.master_checksum(I16),
    ),
    Wrong("adamw_flat_", "unknown_on_external_write", put(14, 3), ("on_external_write is 3", "2 (check)")),
    Wrong("master_resync_", "float64_masters", put(1, lambda: torch.zeros(5, dtype=F64), 0), ("masters[0]",)),
    # memory written twice
    Wrong(
        "adamw_",
        "a_parameter_twice",
        lambda a: (
            alias((0, 1), (0, 0))(a),
            put(1, a[1][0].clone(), 1)(a),
            put(2, torch.zeros(5), 1)(a),
            put(3, torch.zeros(5), 1)(a),
        ),
        ("params[0]", "params[1]"),
    ),
    Wrong("adamw_", "params_that_overlap", overlapping_views, ("params[0]", "params[1]")),
    Wrong("adamw_", "grad_is_the_parameter", alias((1, 1), (0, 1)), ("grads[1]", "params[1]")),
    Wrong("adamw_", "one_step_for_two", alias((6, 1), (6, 0)), ("steps[0]", "steps[1]")),
    Wrong("bucket_accumulate_", "a_gradient_added_to_itself", alias((1, 0), (0, 0)), ("main_grads[0]", "grads[0]")),
    Wrong("bucket_unpack_", "into_the_bucket", lambda a: put(3, a[0][:5], 0)(a), ("bucket", "tensors[0]")),
    Wrong("cast_", "in_place", alias((1, 0), (0, 0)), ("srcs[0]", "dsts[0]")),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda c: c.id)
def test_wrong_calls_say_what_and_change_nothing(case: Wrong) -> None:
    check_refused(case.operator, case.arguments(), case.says)


def check_refused(operator: str, arguments: list[Any], says: tuple[str, ...]) -> None:
    """Asserts that the call raises with all the words in `says`, and changes no byte behind its arguments."""
    before = bits(arguments)
    with pytest.raises(RuntimeError) as refusal:
        run(operator, arguments)
    message = str(refusal.value)
    assert message.startswith(f"torch_ext::{operator}: "), message
    assert all(words in message for words in says), message
    assert bits(arguments) == before


# The tests below are generated from the schemas: each tensor argument of each operator is spoiled in each way.


# Lists whose length no other argument determines: any length is legal.
ALONE = {("adamw_flat_", "states"), ("grad_stats_", "grads"), ("bucket_reduce_", "chunks")}


def argument_cases(kinds: str, at_least: int = 1, alone: bool = True) -> list[Any]:
    """Returns a case for every tensor argument ("tensors", lists included) or every list ("lists"). In a list, the
    first tensor with `at_least` elements is spoiled. alone=False leaves out the lists in ALONE."""
    cases = []
    for sample in {s.operator: s for s in reversed(samples.SAMPLES)}.values():
        arguments = sample.make()
        for position, (spec, argument) in enumerate(
            zip(overload(sample.operator)._schema.arguments, arguments, strict=True)
        ):
            is_list = isinstance(argument, list)
            if not (is_list if kinds == "lists" else isinstance(argument, list | torch.Tensor)):
                continue
            index = next((i for i, t in enumerate(argument) if t.numel() >= at_least), None) if is_list else None
            if (is_list and index is None) or (not is_list and argument.numel() < at_least):
                continue
            if not alone and (sample.operator, spec.name) in ALONE:
                continue
            cases.append(pytest.param(sample, position, index, spec.name, id=f"{sample.operator}-{spec.name}"))
    return cases


def spoiled(
    sample: samples.Sample, position: int, index: int | None, by: Callable[[torch.Tensor], torch.Tensor]
) -> list[Any]:
    """Returns the sample's arguments with one tensor replaced by what `by` returns for it."""
    arguments = sample.make()
    if index is None:
        arguments[position] = by(arguments[position])
    else:
        arguments[position][index] = by(arguments[position][index])
    return arguments


def label(name: str, index: int | None) -> str:
    return name if index is None else f"{name}[{index}]"


@pytest.mark.parametrize("sample, position, index, name", argument_cases("tensors", at_least=2))
def test_memory_that_is_not_contiguous_is_refused(sample: Any, position: int, index: int | None, name: str) -> None:
    def strided(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t, t], dim=-1)[..., 0]

    arguments = spoiled(sample, position, index, strided)
    check_refused(sample.operator, arguments, (label(name, index), "is not contiguous", "pass a contiguous tensor"))


@pytest.mark.parametrize("sample, position, index, name", argument_cases("tensors", at_least=2))
def test_expanded_memory_is_refused(sample: Any, position: int, index: int | None, name: str) -> None:
    arguments = spoiled(sample, position, index, lambda t: t.reshape(-1)[:1].clone().expand(t.shape))
    check_refused(sample.operator, arguments, (label(name, index), "is not contiguous"))


@pytest.mark.parametrize("sample, position, index, name", argument_cases("tensors"))
def test_sparse_tensors_are_refused(sample: Any, position: int, index: int | None, name: str) -> None:
    arguments = spoiled(sample, position, index, lambda t: t.to_sparse())
    check_refused(sample.operator, arguments, (label(name, index), "is not strided", "dense"))


@pytest.mark.parametrize("sample, position, index, name", argument_cases("tensors"))
def test_meta_tensors_are_refused(sample: Any, position: int, index: int | None, name: str) -> None:
    arguments = spoiled(sample, position, index, lambda t: t.to("meta"))
    check_refused(sample.operator, arguments, ("meta tensors hold no data", "to_empty"))


@pytest.mark.parametrize("sample, position, index, name", argument_cases("tensors"))
def test_dtypes_nobody_knows_are_refused(sample: Any, position: int, index: int | None, name: str) -> None:
    arguments = spoiled(sample, position, index, lambda t: torch.zeros(t.shape, dtype=torch.uint16))
    check_refused(sample.operator, arguments, (label(name, index), "a dtype that this library does not know"))


@pytest.mark.parametrize("sample, position, index, name", argument_cases("lists", alone=False))
def test_lists_of_another_length_are_refused(sample: Any, position: int, index: int, name: str) -> None:
    arguments = sample.make()
    arguments[position].append(arguments[position][index].clone())
    check_refused(sample.operator, arguments, (name,))
