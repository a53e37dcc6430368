"""Tests that docs/errors.md is right: a function for each row does what its second column says, and gets the message of
the first column. The rows about data parallelism are in tests/distributed/test_errors_page_ranks.py, which needs
ranks."""

import contextlib
import copy
import io
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pages
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torch_ext
from torch_ext import AdamW

ROWS = {
    table.rows[1][0]: [row[0].strip("`") for row in table.rows[1:]]
    for table in pages.read("docs/errors.md").tables
    if table.rows[0][0] == "message"
}
OF_RANKS = next(rows for rows in ROWS.values() if "torch.distributed is not initialised" in rows)

BF16 = torch.bfloat16


def model(dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).to(dtype)


def backward(trained: nn.Module, factor: float = 1.0) -> None:
    p = next(trained.parameters())
    (trained(torch.ones(2, 16, dtype=p.dtype)).float().square().mean() * factor).backward()


def stepped(dtype: torch.dtype = BF16, **options: Any) -> tuple[nn.Sequential, AdamW]:
    """Returns a model and its optimizer, after one step."""
    trained = model(dtype)
    optimizer = AdamW(trained.named_parameters(), lr=1e-2, **options)
    backward(trained)
    optimizer.step()
    optimizer.zero_grad()
    return trained, optimizer


# -- making an optimizer -----------------------------------------------------------------------------------------------


def a_tied_weight() -> None:
    trained = model()
    AdamW([trained[0].weight, trained[0].weight])


def views_of_one_memory() -> None:
    memory = torch.zeros(8, dtype=BF16)
    AdamW([nn.Parameter(memory[:6]), nn.Parameter(memory[4:])])


def a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        trained = model()
    AdamW(trained.parameters())


def writing_to_a_policy() -> None:
    torch_ext.load_policy(model()).lr = 1e-3


MAKING: list[tuple[str, Callable[[], Any]]] = [
    ("is not supported: leave it out", lambda: AdamW(model().parameters(), amsgrad=True)),
    ("is not supported: leave it out", lambda: AdamW(model().parameters(), differentiable=True)),
    (
        "is one per optimizer, not per group",
        lambda: AdamW([{"params": list(model().parameters()), "policy": {"adam_beta2": 0.95}}]),
    ),
    ("is one per optimizer, not per group", lambda: AdamW([{"params": list(model().parameters()), "states": "8bit"}])),
    ("pass tied weights once", a_tied_weight),
    ("pass tied weights once", views_of_one_memory),
    ("is a meta tensor, which holds no data", a_model_on_the_meta_device),
    ("are legal: convert the model, or leave the parameter out", lambda: AdamW(model(torch.float64).parameters())),
    (
        "are legal: convert the model, or leave the parameter out",
        lambda: AdamW([nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn))]),
    ),
    ("contradicts", lambda: AdamW(model().parameters(), states="8bit", policy={"exp_avg_dtype": "fp32"})),
    (
        "states sets both moments and the masters",
        lambda: AdamW(model().parameters(), states="8bit", policy={"exp_avg_dtype": "fp32"}),
    ),
    (
        "says how the optimizer's states are stored",
        lambda: AdamW(model().parameters(), state_dtype=BF16),  # type: ignore[call-arg]
    ),
    (
        "which selects none of the parameters",
        lambda: torch_ext.AdamW8bit(model().named_parameters(), keep_32bit=["embed*"]),
    ),
    ("unknown key", lambda: torch_ext.load_policy(model(), override_optimizer_config={"exp_avg_dtyp": "fp32"})),
    ("a policy is frozen", writing_to_a_policy),
]


# -- steps and gradients -----------------------------------------------------------------------------------------------


def a_sparse_embedding() -> None:
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = AdamW(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


def a_clip_of_a_sparse_gradient() -> None:
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = AdamW(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    torch_ext.clip_grad_norm_(optimizer, 1.0)


def a_model_that_was_converted() -> None:
    trained, optimizer = stepped()
    trained.half()
    backward(trained)
    optimizer.step()


def gradients_that_were_scaled_after_the_clip() -> None:
    trained, optimizer = stepped()
    backward(trained)
    torch_ext.clip_grad_norm_(optimizer, 1.0)
    for p in trained.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5)
    optimizer.step()


def a_norm_that_is_not_finite() -> None:
    trained, optimizer = stepped()
    backward(trained, float("inf"))
    torch_ext.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)


def a_clip_before_unscale() -> None:
    trained, optimizer = stepped(torch.float16)
    scaler = optimizer.policy.grad_scaler()
    scaler.scale(trained(torch.ones(2, 16).half()).float().square().mean()).backward()
    torch_ext.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)


def a_weight_that_was_written() -> None:
    trained, optimizer = stepped(on_external_write="error")
    with torch.no_grad():
        trained[0].weight.mul_(2)
    backward(trained)
    optimizer.step()


def within_a_step(call: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Returns a function that makes the call between a backward that steps and step()."""

    def cause() -> None:
        trained, optimizer = stepped(step_in_backward=True, ema_decay=0.9)
        publisher = torch_ext.WeightPublisher(trained, optimizer)
        backward(trained)
        call(optimizer, publisher)

    return cause


def enter(context: contextlib.AbstractContextManager[Any]) -> None:
    with context:
        pass


def another_clip_function_under_fp16() -> None:
    trained, optimizer = stepped(torch.float16)
    scaler = optimizer.policy.grad_scaler()
    scaler.scale(trained(torch.ones(2, 16).half()).float().square().mean()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
    scaler.step(optimizer)


def a_clip_where_backward_steps() -> None:
    trained, optimizer = stepped(step_in_backward=True)
    backward(trained)
    torch_ext.clip_grad_norm_(optimizer, 1.0)


def a_backward_that_raised() -> None:
    trained = nn.Sequential(nn.Linear(16, 600), nn.Linear(600, 600), nn.Linear(600, 4)).to(BF16)
    optimizer = AdamW(trained.named_parameters(), step_in_backward=True)
    trained[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(trained)
    optimizer.step()


def an_interrupted_step() -> None:
    trained = model()
    optimizer = AdamW(trained.parameters(), offload_fraction=0.5)
    backward(trained)

    def interrupt(frame: Any, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code.co_name == "step" and "cpu_offload" in frame.f_code.co_filename:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()


def within_one(name: str, call: Callable[[Any], Any], thread: bool) -> Callable[[], None]:
    """Returns a function that makes the call where a function of this name begins within step(): as a signal handler
    does, or in another thread."""

    def cause() -> None:
        trained = model()
        optimizer = AdamW(trained.parameters(), offload_fraction=0.5)
        backward(trained)
        raised: list[RuntimeError] = []

        def make() -> None:
            try:
                call(optimizer)
            except RuntimeError as error:
                raised.append(error)

        def at(frame: Any, event: str, _arg: object) -> None:
            if event == "call" and frame.f_code.co_name == name and "cpu_offload" in frame.f_code.co_filename:
                sys.setprofile(None)
                one = threading.Thread(target=make)
                (one.start if thread else make)()
                if thread:
                    one.join()

        sys.setprofile(at)
        optimizer.step()
        raise raised[0]

    return cause


STEPS: list[tuple[str, Callable[[], Any]]] = [
    ("is sparse (", a_sparse_embedding),
    ("is sparse (", a_clip_of_a_sparse_gradient),
    ("when its optimizer state was made, and is", a_model_that_was_converted),
    (
        "gradients were written between clip_grad_norm_(optimizer, ...) and step()",
        gradients_that_were_scaled_after_the_clip,
    ),
    ("its norm is of gradients that are still multiplied by the loss scale", a_clip_before_unscale),
    ("leave out error_if_nonfinite to skip such steps", a_norm_that_is_not_finite),
    ("modified outside the optimizer since the last step", a_weight_that_was_written),
    *(
        ("after a backward that stepped some weights already", within_a_step(call))
        for call in (
            lambda optimizer, publisher: publisher.publish(),
            lambda optimizer, publisher: optimizer.measure_health(),
            lambda optimizer, publisher: enter(optimizer.master_weights()),
            lambda optimizer, publisher: enter(optimizer.ema_weights()),
        )
    ),
    ("fp16 gradients were written between unscale_() and step()", another_clip_function_under_fp16),
    ("applied and freed before the norm of all is known", a_clip_where_backward_steps),
    ("after a backward that raised when it had stepped", a_backward_that_raised),
    ("after a step() that was interrupted, or raised, when it had perhaps stepped", an_interrupted_step),
    ("two calls that write to an optimizer at the same time", within_one("begin", lambda o: o.zero_grad(), True)),
    ("by a signal handler, perhaps", within_one("begin", lambda o: o.step(), False)),
    ("by a signal handler, perhaps", within_one("step", lambda o: o.state_dict(), False)),
]


# -- checkpoints, offloading -------------------------------------------------------------------------------------------


def a_file_of(content: bytes) -> Callable[[pathlib.Path], Any]:
    def cause(folder: pathlib.Path) -> None:
        (folder / "checkpoint.pt").write_bytes(content)
        torch_ext.load(folder / "checkpoint.pt")

    return cause


def saved(folder: pathlib.Path, **options: Any) -> pathlib.Path:
    trained, optimizer = stepped()
    path = folder / "checkpoint.pt"
    torch_ext.save({"model": trained.state_dict(), "optimizer": optimizer.state_dict()}, path, **options)
    return path


def a_file_that_is_truncated(folder: pathlib.Path) -> None:
    path = saved(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    torch_ext.load(path)


def a_file_at_rest_that_is_truncated(folder: pathlib.Path) -> None:
    path = saved(folder, states="at_rest")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    torch_ext.load(path)


def flip_a_byte(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def a_file_of_other_bytes(states: str) -> Callable[[pathlib.Path], Any]:
    def cause(folder: pathlib.Path) -> None:
        path = saved(folder, states=states)
        flip_a_byte(path)
        torch_ext.load(path)

    return cause


def a_folder_of_other_bytes(states: str) -> Callable[[pathlib.Path], Any]:
    def cause(folder: pathlib.Path) -> None:
        trained, _ = stepped()
        writer = torch_ext.CheckpointWriter(folder, states=states)
        dcp.save({"model": trained.state_dict()}, storage_writer=writer, no_dist=True)
        flip_a_byte(next(folder.glob("*.distcp")))
        reader = torch_ext.CheckpointReader(folder)
        dcp.load({"model": trained.state_dict()}, storage_reader=reader, no_dist=True)

    return cause


def weights_of_other_bytes(folder: pathlib.Path) -> None:
    trained, optimizer = stepped()
    weights = torch_ext.IncrementalWeights(folder, torch_ext.WeightPublisher(trained, optimizer))
    weights.save()
    flip_a_byte(max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    torch_ext.load_weights(folder, dict(trained.named_parameters()))


def a_state_of_another_model(_folder: pathlib.Path) -> None:
    _, optimizer = stepped()
    other = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)).to(BF16)
    AdamW(other.named_parameters()).load_state_dict(optimizer.state_dict())


class Own:
    """A class of the user's own."""


def an_object_of_ones_own(folder: pathlib.Path) -> None:
    dcp.save({"x": Own()}, storage_writer=torch_ext.CheckpointWriter(folder / "folder"), no_dist=True)
    dcp.load({"x": Own()}, storage_reader=torch_ext.CheckpointReader(folder / "folder"), no_dist=True)


def a_file_of_ones_own(folder: pathlib.Path) -> None:
    torch.save({"x": Own()}, folder / "file.pt")
    torch_ext.load(folder / "file.pt")


def a_device_that_is_not_here(folder: pathlib.Path) -> None:
    torch.save({"x": torch.ones(3)}, folder / "file.pt")
    torch_ext.load(folder / "file.pt", map_location="cuda:99")


def a_state_of_amsgrad(_folder: pathlib.Path) -> None:
    trained = model(torch.float32)
    theirs = torch.optim.AdamW(trained.parameters(), amsgrad=True)
    backward(trained)
    theirs.step()
    AdamW(trained.parameters()).load_state_dict(theirs.state_dict())


def masters_whose_memory_is_read(_folder: pathlib.Path) -> None:
    """Reads a master weight's storage, as safetensors' save_file does."""
    _, optimizer = stepped(states="bf16_remainder")
    next(iter(optimizer.master_state_dict().values())).storage()


CHECKPOINTS: list[tuple[str, Callable[[pathlib.Path], Any]]] = [
    ("is no checkpoint that can be loaded", a_file_that_is_truncated),
    ("is no checkpoint that can be loaded", a_file_at_rest_that_is_truncated),
    ("is no checkpoint that can be loaded", a_file_of(b"")),
    ("is no checkpoint that can be loaded", a_file_of(b"%PDF-1.7 a file of another kind" * 9)),
    ("is no checkpoint that can be loaded", a_file_of_other_bytes("logical")),
    ("is no checkpoint that can be loaded", a_file_of_other_bytes("at_rest")),
    ("is damaged:", a_folder_of_other_bytes("logical")),
    ("is damaged:", a_folder_of_other_bytes("at_rest")),
    ("is damaged:", weights_of_other_bytes),
    ("loaded state dict is of another architecture", a_state_of_another_model),
    ("is not made of tensors and plain values alone", an_object_of_ones_own),
    ("is not made of tensors and plain values alone", a_file_of_ones_own),
    ("cannot be loaded with map_location=", a_device_that_is_not_here),
    ("has no memory of its own, since its values are decoded", masters_whose_memory_is_read),
    ("was saved with amsgrad=True", a_state_of_amsgrad),
]


def while_offloaded(call: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Returns a function that makes the call while model and optimizer are offloaded."""

    def cause() -> None:
        trained, optimizer = stepped()
        torch_ext.offload(trained, optimizer)
        try:
            call(trained, optimizer)
        finally:
            torch_ext.onload(trained, optimizer)

    return cause


def memory_that_numpy_holds() -> None:
    trained, optimizer = stepped(torch.float32)
    held = trained[0].weight.detach().numpy()
    torch_ext.offload(trained, optimizer)
    del held


def memory_that_numpy_held_once() -> None:
    trained, optimizer = stepped(torch.float32)
    trained[0].weight.detach().numpy()
    torch_ext.offload(trained, optimizer)


OFFLOADING: list[tuple[str, Callable[[], Any]]] = [
    ("are offloaded;", while_offloaded(lambda trained, optimizer: trained(torch.ones(2, 16, dtype=BF16)))),
    ("are offloaded;", while_offloaded(lambda trained, optimizer: optimizer.step())),
    ("are offloaded;", while_offloaded(lambda trained, optimizer: optimizer.state_dict())),
    ("are offloaded;", while_offloaded(lambda trained, optimizer: torch.save(optimizer, io.BytesIO()))),
    ("cannot release", memory_that_numpy_holds),
    ("cannot release", memory_that_numpy_held_once),
    ("are offloaded;", while_offloaded(lambda trained, optimizer: copy.deepcopy(trained))),
]

ELSEWHERE = {
    "are on several devices": "needs two devices: tests/torch/test_cuda_step.py",
    "the step of Muon's matrices waits for the device": "needs a GPU: tests/torch/test_muon_stacks.py",
    "there is no state yet, so every replay would create it again": "needs a GPU: tests/torch/test_cuda_step.py",
    "is sharded over the ranks": "tests/distributed/test_errors_page_ranks.py",
    "gradients with NaN or Inf before communication": "tests/distributed/test_errors_page_ranks.py",
    "install the wheel": "needs a package that is not built: tests/package/test_import.py",
    "this build has no CUDA library": "needs such a build: tests/torch/test_info.py",
}


def test_every_row_of_the_page_has_a_case() -> None:
    cases = {part for part, _ in (*MAKING, *STEPS, *CHECKPOINTS, *OFFLOADING)}
    rows = {part for rows in ROWS.values() for part in rows} - set(OF_RANKS)
    assert rows == cases | set(ELSEWHERE)


@pytest.mark.parametrize(
    "part, cause", [pytest.param(*case, id=f"{i}-{case[0][:50]}") for i, case in enumerate(MAKING + STEPS + OFFLOADING)]
)
def test_who_does_what_the_page_says_meets_its_message(part: str, cause: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError)) as raised:
        cause()
    assert part in str(raised.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    "part, cause", [pytest.param(*case, id=f"{i}-{case[0][:50]}") for i, case in enumerate(CHECKPOINTS)]
)
def test_of_checkpoints(part: str, cause: Callable[[pathlib.Path], Any], tmp_path: pathlib.Path) -> None:
    with pytest.raises(BaseException) as raised:  # noqa: PT011  # torch.distributed.checkpoint raises one of its own
        cause(tmp_path)
    assert part in str(raised.value)
