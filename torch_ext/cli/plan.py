"""python -m torch_ext plan: prints a model's bytes per rank under each strategy, before anything is allocated."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_ext.cli import named_function
from torch_ext.comm.communicator import IN_FLIGHT
from torch_ext.native import dtypes as native_dtypes
from torch_ext.optim.muon import hyper
from torch_ext.optim.muon.planned_matrices import MuonOptions
from torch_ext.optim.state.state_dtypes import MASTERS, StateDtypes
from torch_ext.parallel import bucket_plan, memory_plan
from torch_ext.parallel.bucket_plan import BucketPlan, plan_buckets
from torch_ext.parallel.memory_plan import MemoryPlan, Unit
from torch_ext.parallel.strategies import table
from torch_ext.policy.loader import load_policy
from torch_ext.policy.policy import Policy

_FULL = "optim_grads_params"
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_EMA_DTYPES: dict[str, Any] = {"bf16": torch.bfloat16, "24bit": "24bit", "fp32": torch.float32}
_TENSORS = 256  # into how many equal tensors a bare number of parameters (--params) is divided


class _PlanInput(NamedTuple):
    """The model that memory is planned for."""

    params: list[tuple[str, Any]]  # as plan_buckets takes them
    units: list[Unit] | None  # of full sharding; None: unknown
    refusal: str | None  # why full sharding rejects the model, which has no units then
    frozen_bytes: int
    of_dtype: Any  # the model or dtype, as load_policy takes it
    what: str  # a description, to print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--params", type=_count, metavar="N", help=f"number of parameters, such as 7B, in {_TENSORS} equal tensors"
    )
    model.add_argument(
        "--numels",
        metavar="FILE",
        help='file of lines "elements" or "name elements", in registration order; - is the standard input',
    )
    model.add_argument(
        "--model",
        metavar="MODULE:CALLABLE",
        help="function that returns the model; called without arguments, on the meta device",
    )
    parser.add_argument("--dtype", help="dtype of the parameters; default: bf16, or the model's")
    parser.add_argument("--world-size", type=_count, default=1, metavar="RANKS")
    parser.add_argument(
        "--slots",
        action="store_true",
        help="for GPUs with NCCL: buckets are sent from slots, buffers that are kept between steps; with --muon, "
        "matrices are multiplied by GPUs",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        type=_strategy,
        metavar="STRATEGY",
        help=f"{', '.join(table.strategies())}, or their numbers from 0; default: all",
    )
    parser.add_argument(
        "--states", metavar="WORD", help="fp32, bf16, bf16_remainder or 8bit: how the optimizer's states are stored"
    )
    parser.add_argument(
        "--min-8bit-size",
        type=_count,
        metavar="N",
        help="with 8-bit moments, parameters with fewer elements than this keep fp32 moments",
    )
    parser.add_argument(
        "--keep-32bit",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="parameters that keep fp32 moments: names of them or of modules that contain them, or patterns ('*norm*')",
    )
    _add_what_steps(parser)
    parser.add_argument(
        "--override",
        nargs="+",
        action="extend",
        type=_override,
        default=[],
        metavar="KEY=VALUE",
        help="keys of the policy: exp_avg_dtype=fp8 store_param_remainders=true bucket_size=25000000 ...",
    )
    parser.set_defaults(refuse=parser.error)


def _add_what_steps(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what a step needs besides states."""
    parser.add_argument(
        "--ema-dtype",
        choices=_EMA_DTYPES,
        help="counts an average of the weights (ema_decay), stored in this dtype",
    )
    parser.add_argument(
        "--publisher",
        nargs="?",
        const="bits",
        choices=("bits", "exact"),
        help="counts a WeightPublisher of the trained weights; exact: made with exact=True",
    )
    parser.add_argument(
        "--muon",
        action="store_true",
        help="with --model: its matrices are stepped by torch_ext.Muon, everything else by AdamW",
    )
    parser.add_argument(
        "--ns-dtype",
        choices=hyper.NS_DTYPES,
        help="with --muon: dtype of its matrix products; default: fp32, which needs more memory",
    )
    parser.add_argument(
        "--adamw-params",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="with --muon: matrices that AdamW steps: names of them or of modules that contain them, or patterns",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the table. Raises SystemExit(2), with a message, if the arguments are not legal."""
    try:
        print(_text(options))
    except (ValueError, TypeError, OSError) as error:
        options.refuse(str(error))
    return 0


# -- arguments ----------------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    """Returns the text as a whole number > 0; 7e9, 7B and 1.5B are legal."""
    digits, suffix = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        factor = _SUFFIXES[suffix]
        number = Decimal(digits) * factor if set(digits) & set(".eE") else int(digits) * factor
    except (ValueError, KeyError, InvalidOperation):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number; 7000000000, 7e9 and 7B are, with K, M, B (or G) and T for thousands, millions, "
            "billions and trillions"
        ) from None
    if not 1 <= number < 2**63 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r}; a whole number from 1 to 2^63 is legal")
    return int(number)


def _strategy(text: str) -> str:
    try:
        return table.strategy_of(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}; KEY=VALUE is legal, such as exp_avg_dtype=fp8")
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return key, words[value.lower()]
    for number in (int, float):
        try:
            return key, number(value)
        except ValueError:
            pass
    return key, value


def _policy_of(options: argparse.Namespace, of_dtype: Any) -> Policy:
    """Returns the policy for the options. Keys of --override belong to the optimizer's or the buckets' side."""
    given = dict(options.override)
    words = {"states": options.states, "min_8bit_size": options.min_8bit_size}
    given |= {key: value for key, value in words.items() if value is not None}
    of_buckets = load_policy(of_dtype)
    ddp = {
        key: given.pop(key) for key in list(given) if key in of_buckets.ddp_config.keys() - of_buckets.optimizer_config
    }
    return load_policy(of_dtype, override_optimizer_config=given, override_ddp_config=ddp)


# -- what to plan for ---------------------------------------------------------------------------------------------


def _plan_input(options: argparse.Namespace) -> _PlanInput:
    if options.model:
        return _of_model(options)
    dtype = options.dtype or "bf16"
    if options.params:
        tensors = min(_TENSORS, options.params)
        numels = [options.params // tensors + (i < options.params % tensors) for i in range(tensors)]
        return _PlanInput([(str(i), n) for i, n in enumerate(numels)], None, None, 0, dtype, f"{tensors} equal tensors")
    params = list(_lines(options.numels))
    if not params:
        raise ValueError(f"{options.numels} has no line with a number of elements")
    return _PlanInput(params, None, None, 0, dtype, f"{len(params)} tensors of {options.numels}")


def _lines(file: str) -> Iterator[tuple[str, int]]:
    """Yields name and number of elements of each line of a --numels file."""
    text = sys.stdin.read() if file == "-" else Path(file).read_text()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            (*name, count) = words
            if len(name) > 1:
                raise argparse.ArgumentTypeError(f"{len(words)} words")
            yield (name[0] if name else str(number)), _count(count)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f'{file}, line {number}: {error}; "elements" or "name elements" is legal') from None


def _of_model(options: argparse.Namespace) -> _PlanInput:
    text, dtype = options.model, options.dtype
    make = named_function.load(text, "--model", "my_package.model:build")
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise ValueError(f"--model {text}: building it on the meta device: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"--model {text} returns a {type(model).__name__}; a torch.nn.Module is expected")
    if dtype is not None:
        model = model.to(native_dtypes.coerce_dtypes({"param_dtype": dtype})["param_dtype"])
    params = bucket_plan.trainable(model)
    if not params:
        raise ValueError(f"--model {text}: {type(model).__name__} has no trainable parameter")
    policy = _policy_of(options, model)
    units: list[Unit] | None = None
    refusal: str | None = None
    try:
        units = memory_plan.units_of(model, policy.bucket_size)
    except ValueError as error:
        refusal = str(error)
    return _PlanInput(params, units, refusal, memory_plan.frozen_bytes(model), model, type(model).__name__)


def _muon_of(options: argparse.Namespace, asked: _PlanInput) -> MuonOptions | None:
    if not options.muon:
        if options.ns_dtype or options.adamw_params:
            raise ValueError("--ns-dtype and --adamw-params need --muon")
        return None
    if not isinstance(asked.of_dtype, nn.Module):
        raise ValueError("--muon needs the shapes of matrices: give the model with --model")
    return MuonOptions(ns_dtype=options.ns_dtype, adamw_params=options.adamw_params, model=asked.of_dtype)


# -- the table ----------------------------------------------------------------------------------------------------

_COLUMNS = ("parameters", "gradients", "masters", "moments", "scales, steps")
_OPTIONAL_COLUMNS = {
    "averages": "emas",
    "publisher": "changes",
    "products": "products",
}  # optional columns -> the fields of a plan that they show
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def _text(options: argparse.Namespace) -> str:
    asked = _plan_input(options)
    policy = _policy_of(options, asked.of_dtype)
    layout = plan_buckets(asked.params, policy, options.world_size)
    chosen = list(options.strategy or table.strategies())
    if asked.refusal is not None and _FULL in chosen:
        if chosen == [_FULL]:
            raise ValueError(f"{_FULL}: {asked.refusal}")
        chosen.remove(_FULL)
    plans = memory_plan.plan_memory(
        asked.params,
        policy,
        options.world_size,
        chosen,
        units=asked.units,
        frozen_bytes=asked.frozen_bytes,
        slots=options.slots,
        keep_32bit=options.keep_32bit,
        ema_dtype=_EMA_DTYPES.get(options.ema_dtype),
        publisher=options.publisher is not None,
        exact=options.publisher == "exact",
        muon=_muon_of(options, asked),
    )
    notes = [*_notes(asked, plans, options.slots), *_note_of_gathers(policy)]
    return "\n".join([*_facts(asked, policy, layout), "", *_table(plans), "", *notes])


def _facts(asked: _PlanInput, policy: Policy, layout: BucketPlan) -> Iterator[str]:
    numel = sum({(p.buffer, p.start): p.numel for p in layout.parameters}.values())
    yield f"{numel:,} trainable parameters ({asked.what}), {_plural(layout.world_size, 'rank')}"
    dtypes = {(p.param_dtype, p.main_grads_dtype, p.grad_comm_dtype) for p in layout.parameters}
    for dtype, main, wire in sorted(dtypes, key=str):
        kinds = StateDtypes.of(policy, dtype, 2**62, False)  # without the exceptions min_8bit_size and keep_32bit
        master = "none" if kinds.master is None else native_dtypes.name_of(MASTERS[kinds.master])
        names = [native_dtypes.name_of(d) for d in (dtype, main, wire, kinds.exp_avg, kinds.exp_avg_sq)]
        yield "{}: gradients {}, wire {}, exp_avg {}, exp_avg_sq {}, master {}".format(*names, master)
    largest = max(b.numel for b in layout.buckets)
    yield f"{_plural(len(layout.buckets), 'bucket')}, the largest of {largest:,} elements"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _table(plans: Sequence[MemoryPlan]) -> list[str]:
    unit, size = _unit_of(max(plan.peak for plan in plans))
    asked = {column: part for column, part in _OPTIONAL_COLUMNS.items() if any(getattr(plan, part) for plan in plans)}
    stepping = any(plan.stepping for plan in plans)
    sums = ("total", "transient", *["stepping"] * stepping, "peak")
    rows: list[tuple[str, ...]] = [(unit, *_COLUMNS, *asked, *sums)]
    for p in plans:
        kept = (p.params, p.grads, p.masters, p.moments, p.scales + p.steps)
        way = (p.stepping,) if stepping else ()
        cells = (*kept, *(getattr(p, part) for part in asked.values()), p.total, p.transient, *way, p.peak)
        rows.append((p.strategy, *(f"{cell / size:.2f}" for cell in cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _notes(asked: _PlanInput, plans: Sequence[MemoryPlan], slots: bool) -> Iterator[str]:
    """Yields the notes below the table."""
    yield "Memory of one rank. Not counted: activations, buffers of modules, the overhead of allocators and transports."
    of = {plan.strategy: plan for plan in plans}
    if any(strategy != _FULL for strategy in of):
        how = "two slots for each bucket size" if slots else f"at most {IN_FLIGHT} buckets in flight at a time"
        joined = " (no_shard: or two messages of joined buckets)" * ("no_shard" in of and not slots)
        yield f"transient: {how}{joined}."
    if any(plan.products for plan in plans):
        yield "products: workspaces of Muon's matrix products, kept from the first step on."
    if any(plan.stepping for plan in plans):
        yield (
            "stepping: momentum and updates of Muon's matrices, sent to the owner ranks and back; not at the same "
            "time as transient."
        )
    moving = {strategy: plan.moving for strategy, plan in of.items() if plan.moving}
    if moving:
        sizes = ", ".join(f"{strategy} {_size(nbytes)}" for strategy, nbytes in moving.items())
        yield (
            "peak: during steps, or while parallelize moves weights or rebuilds buckets after the first backward, "
            "if that is more. That move comes before there are states, but needs, in addition to parameters and "
            f"gradients: {sizes}. If no_shard's states were loaded before the first backward, it is in addition to "
            "the total."
        )
    if asked.refusal is not None:
        yield f"{_FULL} is not possible for this model: {asked.refusal}"
    elif _FULL in of:
        units, bound = ("parameters", ", a lower bound") if asked.units is None else ("units", "")
        yield f"transient of {_FULL}{bound}: the two largest {units}, all-gathered, and their gradients in flight."


def _note_of_gathers(policy: Policy) -> Iterator[str]:
    if policy.create_all_gather_group:
        yield (
            "create_all_gather_group: NCCL keeps the memory of a second communicator, which is not counted either: "
            "some hundred MB on each rank (docs/gpus.md)."
        )


def _size(nbytes: int) -> str:
    unit, size = _unit_of(nbytes)
    return f"{nbytes / size:.2f} {unit}"


def _unit_of(nbytes: int) -> tuple[str, int]:
    return next(((unit, size) for unit, size in _UNITS if nbytes >= size), _UNITS[-1])
