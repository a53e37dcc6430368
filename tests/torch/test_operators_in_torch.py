"""torch.ops.torch_ext.* as a part of torch: versions, autograd, modes, threads; and the package's own way to call
them, which bypasses torch's dispatcher where nothing intercepts operators."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any

import operator_samples as samples
import pytest
import torch
from operator_samples import BF16, I16, I64, U8, bits, copy, none, overload, run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ext.native.direct_call
import torch_ext.native.ops
from torch_ext import AdamW

ops = torch.ops.torch_ext


# -- torch's side: autograd, inference mode, fake tensors --------------------------------------------------------------


# ways to call an operator: this package's, and torch's
WAYS: dict[str, Any] = {
    "call": torch_ext.native.ops.call,
    "torch.ops": lambda name, *arguments: getattr(ops, name)(*arguments),
    "overload": lambda name, *arguments: overload(name)(*arguments),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sample", samples.SAMPLES, ids=lambda s: s.id)
def test_versions_go_up_of_what_is_written_and_of_nothing_else(sample: samples.Sample, way: str) -> None:
    arguments = sample.make()
    before = [t._version for t in samples.tensors(arguments)]
    WAYS[way](sample.operator, *arguments)
    position = 0
    for spec, argument in zip(overload(sample.operator)._schema.arguments, arguments, strict=False):
        for t in samples.tensors([argument]):
            written = spec.alias_info is not None and spec.alias_info.is_write
            assert t._version == before[position] + written, spec.name
            position += 1


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WAYS)
def test_a_backward_through_an_overwritten_value_is_an_error(way: str, grad_mode: Any) -> None:
    w, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    loss = (w * w).sum()
    intact = (other * other).sum()
    with grad_mode():
        WAYS[way]("bucket_accumulate_", [w], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    intact.backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_is_refused_counts_nothing_up(way: str) -> None:
    w = torch.ones(3, requires_grad=True)
    loss = (w * w).sum()
    with pytest.raises(RuntimeError, match="elements"):
        WAYS[way]("bucket_accumulate_", [w], [torch.ones(4)])
    loss.backward()
    assert w._version == 0


@pytest.mark.parametrize("sample", samples.FIRST_SAMPLES, ids=lambda s: s.operator)
def test_call_keeps_no_storage(sample: samples.Sample) -> None:
    arguments = sample.make()
    counts = [t._use_count() for t in samples.tensors(arguments)]
    for _ in range(3):
        torch_ext.native.ops.call(sample.operator, *arguments)
    assert [t._use_count() for t in samples.tensors(arguments)] == counts
    living = [StorageWeakRef(t.untyped_storage()) for t in samples.tensors(arguments)]
    del arguments
    gc.collect()
    assert all(storage.expired() for storage in living)


def test_look_counts_nothing_up() -> None:
    """call_unversioned leaves version counters alone."""
    w = torch.ones(3)
    torch_ext.native.ops.call_unversioned("bucket_accumulate_", [w], [torch.ones(3)])
    assert w._version == 0 and w.tolist() == [2.0] * 3


def test_views_of_what_is_written_count_with_it() -> None:
    base = torch.ones(6, requires_grad=True)
    loss = (base[:3] * base[3:]).sum()
    ops.bucket_accumulate_([base.detach()[:3]], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_operators_let_other_threads_run() -> None:
    """The kernel that updates version counters is in Python; the computation must not hold the interpreter's lock."""
    import threading

    main, grad = torch.zeros(30_000_000), torch.ones(30_000_000)
    passes, done = 0, threading.Event()

    def watch() -> None:
        nonlocal passes
        while not done.is_set():
            passes += 1
            done.wait(1e-4)

    thread = threading.Thread(target=watch)
    ops.bucket_accumulate_([main], [grad])
    thread.start()
    ops.bucket_accumulate_([main], [grad])
    done.set()
    thread.join()
    assert passes > 2


@pytest.mark.parametrize("way", WAYS)
def test_inference_tensors_are_refused_outside_of_inference_mode(way: str) -> None:
    with torch.inference_mode():
        frozen = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"main_grads\[1\] is an inference tensor"):
        WAYS[way]("bucket_accumulate_", [torch.zeros(3), frozen], [torch.ones(3), torch.ones(3)])
    assert frozen.tolist() == [0.0] * 3
    with torch.inference_mode():
        WAYS[way]("bucket_accumulate_", [frozen], [torch.ones(3)])
    assert frozen.tolist() == [1.0] * 3


def test_nothing_is_recorded_for_backward() -> None:
    arguments = samples.adamw(requires_grad=True)
    run("adamw_", arguments)
    assert all(p.grad_fn is None and p.requires_grad and p.is_leaf for p in arguments[0])


def test_wrong_types_are_torchs_own_errors() -> None:
    with pytest.raises(RuntimeError, match="Expected a value of type"):
        ops.bucket_accumulate_([torch.zeros(3)], torch.zeros(3).tolist())


def test_a_copy_of_the_arguments_gives_the_same_bits() -> None:
    arguments = samples.adamw(param=BF16, master=I16)
    twin = copy(arguments)
    assert bits(run("adamw_", arguments)) == bits(run("adamw_", twin))


def test_errors_in_many_threads_at_once() -> None:
    """Each call gets its own error message, not that of a call in another thread."""
    import concurrent.futures

    def fail(n: int) -> str:
        with pytest.raises(RuntimeError) as refusal:
            ops.bucket_accumulate_([torch.zeros(n)], [torch.zeros(n + 1)])
        return str(refusal.value)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, message in zip(range(1, 200), pool.map(fail, range(1, 200)), strict=True):
            assert f" {n} elements" in message and f" {n + 1}" in message


def test_pointer_size_is_as_the_stack_reader_assumes() -> None:
    assert ctypes.sizeof(ctypes.c_void_p) == 8


@pytest.mark.parametrize(
    "operator, arguments",
    [
        ("bucket_accumulate_", [[], []]),
        ("master_encode_", [[], [], []]),
        ("master_decode_", [[], [], []]),
        ("master_resync_", [[], [], none(I64)]),
        ("master_checksum_", [[], [], [], none(I64)]),
        ("grad_stats_", [[], torch.zeros(21, dtype=I64), none(I64)]),
        ("cast_", [[], [], [], [], none(I64)]),
        ("bucket_unpack_", [torch.zeros(128), none(U8), none(I64), []]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_empty_lists_do_nothing(operator: str, arguments: list[Any]) -> None:
    before = bits(arguments)
    run(operator, arguments)
    torch_ext.native.ops.call(operator, *arguments)
    assert bits(arguments) == before


# -- which calls bypass torch's dispatcher -----------------------------------------------------------------------------


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list to which each call appends whether it bypassed the dispatcher."""
    if torch_ext.native.direct_call.caller() is None:
        pytest.skip("this torch shows C no tensors")
    calls: list[bool] = []
    run = torch_ext.native.direct_call.run

    def counted(*arguments: Any) -> bool:
        calls.append(run(*arguments))
        return calls[-1]

    monkeypatch.setattr(torch_ext.native.direct_call, "run", counted)
    return calls


def accumulate(grad: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(grad.shape)
    torch_ext.native.ops.call("bucket_accumulate_", [total], [grad])
    return total


def test_a_step_is(direct: list[bool]) -> None:
    """An optimizer's step makes one operator call, which bypasses the dispatcher. A step that repeats the one before
    makes none: the library takes it in a call of its own (`torch_ext/optim/repeated_step.py`)."""
    opt = AdamW([torch.nn.Parameter(torch.ones(n)) for n in (1, 300)], lr=1e-2)
    calls = []
    for _ in range(3):
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        opt.step()
        calls.append(list(direct))
        direct.clear()
    assert calls == [[True], [], []]
    opt.param_groups[0]["params"][0].data.zero_()
    opt.step()
    assert direct == []
    entry = opt.state[opt.param_groups[0]["params"][1]]
    entry["exp_avg"] = entry["exp_avg"].clone()
    opt.step()
    assert direct == [True]


def test_a_step_after_one_that_found_a_written_master_is(direct: list[bool]) -> None:
    """It repeats that one: what was written is noticed once."""
    p = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    opt = AdamW([p], lr=1e-2)
    p.grad = torch.ones_like(p)
    opt.step()
    opt.state_dict()["state"][0]["master_param"].mul_(2)
    for expected in (True, False):
        direct.clear()
        opt.step()
        assert bool(direct) == expected
    assert opt.external_writes() == 300


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.parametrize("traced", [False, True])
def test_what_torch_compile_must_not_trace_is_wrapped_while_it_looks_at_calls(
    monkeypatch: pytest.MonkeyPatch, traced: bool
) -> None:
    """torch.compiler.disable's wrapper, which does nothing while no callback is set, is left out then."""
    seen = list[bool]()
    compiled = torch.compile(lambda x: (seen.append(torch_ext.native.untraced.may_trace()), x + 1)[1], backend="eager")
    if traced:
        compiled(torch.ones(1))
    assert seen == [True] * traced and not torch_ext.native.untraced.may_trace()
    monkeypatch.setattr("torch_ext.optim.step_label.may_trace", lambda: traced)
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8)
    opt, opened = AdamW([p]), list[str]()
    region = torch.autograd.profiler.record_function

    def noting(name: str) -> Any:
        opened.append(name)
        return region(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", noting)
    opt.step()
    assert opened == ["Optimizer.step#AdamW.step"] * traced


def test_a_call_that_repeats_is_checked(direct: list[bool]) -> None:
    """`notes` keep what a call has checked. A repeated call has the same bits, and one that reads memory which it
    writes, or gets gradients of another dtype, is rejected nevertheless."""
    arguments = samples.adamw_flat()
    expected = run("adamw_flat_", copy(arguments))
    notes = torch_ext.native.direct_call.Notes(len(arguments[0]))
    stepped = copy(arguments)
    for _ in range(2):
        repeated = copy(arguments)
        for to, new in zip(samples.tensors(stepped), samples.tensors(repeated), strict=True):
            to.copy_(new)
        torch_ext.native.ops.call_unversioned("adamw_flat_", *stepped, notes=notes)
        assert bits(stepped) == bits(expected)
        assert notes.noted
    grad = stepped[1][1]
    for illegal, message in ((stepped[0][1].detach(), "share memory"), (grad.to(torch.int64), "grads.1. may be")):
        stepped[1][1] = illegal
        with pytest.raises(RuntimeError, match=message):
            torch_ext.native.ops.call_unversioned("adamw_flat_", *stepped, notes=notes)
    assert direct == [True] * 2


class Sees(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Sees, SeesFunctions])
def test_modes_see_the_operator(kind: Any, direct: list[bool]) -> None:
    with kind() as mode:
        assert accumulate(torch.ones(3)).tolist() == [1, 1, 1]
    assert any("bucket_accumulate_" in name for name in mode.seen)
    assert direct == [False]


def test_the_profiler_sees_it(direct: list[bool]) -> None:
    with torch.profiler.profile() as profile:
        accumulate(torch.ones(3))
    assert "torch_ext::bucket_accumulate_" in {event.name for event in profile.events()}
    assert direct == [False]


class Logging(torch.Tensor):
    seen: list[str] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls.seen.append(str(func))
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def test_a_tensor_that_overrides_operators_sees_it(direct: list[bool]) -> None:
    assert accumulate(torch.ones(3).as_subclass(Logging)).tolist() == [1, 1, 1]
    assert "torch_ext.bucket_accumulate_.default" in Logging.seen
    assert direct == [False]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,)])
def test_a_negated_gradient_has_its_sign(shape: tuple[int, ...], direct: list[bool]) -> None:
    """Autograd returns such a gradient if a parameter is the imaginary part of something conjugated. Its memory holds
    the negated numbers."""
    negated = torch.complex(torch.zeros(shape), torch.full(shape, 2.0)).conj().imag
    assert negated.is_neg()
    total = accumulate(negated)
    assert total.flatten().tolist() == [-2.0] * total.numel()
    assert direct == [False]


def test_no_object_is_kept_or_lost(direct: list[bool]) -> None:
    grad, total = torch.ones(1), torch.zeros(1)
    objects = [torch.Tensor, grad, total]
    gc.collect()  # other tests' tensors also refer to their class
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(1000):
        torch_ext.native.ops.call_unversioned("bucket_accumulate_", [total], [grad])
        with pytest.raises(RuntimeError):
            torch_ext.native.ops.call_unversioned("bucket_accumulate_", [total], [grad, grad])
    assert direct[0] is True
    assert all(abs(sys.getrefcount(o) - n) < 50 for o, n in zip(objects, before, strict=True))


def test_left_out_arguments_and_no_lists_are_torchs(direct: list[bool]) -> None:
    """Such calls go through torch's dispatcher, which raises its own errors."""
    with pytest.raises(RuntimeError):
        torch_ext.native.ops.call_unversioned("bucket_accumulate_", [torch.ones(1)])
    with pytest.raises((RuntimeError, TypeError)):
        torch_ext.native.ops.call_unversioned("bucket_accumulate_", 3, [torch.ones(1)])
    assert direct == [False, False]


# -- what C reads of many tensors at once ------------------------------------------------------------------------------


class Renamed(torch.Tensor):
    """A subclass that overrides nothing."""


@pytest.fixture(params=["C", "mode", "no_table"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reads with C, with C under a mode, and as with a torch that has no table of functions for C."""
    if request.param == "no_table":
        monkeypatch.setattr(torch_ext.native.direct_call, "caller", lambda: None)
    with SeesFunctions() if request.param == "mode" else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("own", [0, 3])
def test_version_counters_are_torchs(own: int) -> None:
    tensors = [torch.ones(3) for _ in range(4)] + [
        torch.ones(2).as_subclass(Renamed),
        torch.nn.Parameter(torch.ones(())),
    ]
    for n, t in enumerate(tensors):
        for _ in range(n):
            t.detach().add_(1)
    assert list(torch_ext.native.direct_call.versions(tensors, own)) == [t._version - own for t in tensors]
    assert list(torch_ext.native.direct_call.versions([], own)) == []


def test_a_tensor_without_a_version_counter_raises_torchs_error() -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    with pytest.raises(RuntimeError) as expected:
        inference._version  # noqa: B018
    with pytest.raises(RuntimeError) as found:
        torch_ext.native.direct_call.versions([torch.ones(3), inference], 0)
    assert str(found.value) == str(expected.value)


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("missing", [0, 1, 4])
def test_gradients_are_those_of_the_parameters(missing: int) -> None:
    held = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 5), (7,), (1,), ())]
    for p in held[missing:]:
        p.grad = torch.ones_like(p)
    if missing == 0:
        held[0].grad = torch.ones_like(held[0]).as_subclass(Renamed)
    found, count = torch_ext.native.direct_call.grads(list(held))
    assert count == missing
    assert all(g is p.grad for g, p in zip(found, held, strict=True))
    first = found[-1]
    references = sys.getrefcount(first)
    for _ in range(3):
        torch_ext.native.direct_call.grads(list(held))
    assert sys.getrefcount(first) == references or first is None
    assert torch_ext.native.direct_call.grads([]) == ([], 0)


def test_what_has_no_gradient_raises_pythons_error() -> None:
    with pytest.raises(AttributeError, match="grad"):
        torch_ext.native.direct_call.grads([torch.ones(3), 5])  # type: ignore[list-item]
