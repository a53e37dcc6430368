"""docs/errors.md as a contract: a call that its second column describes raises the message of the first, on every rank.

These are the rows of "Data parallelism"; the others are in tests/docs/test_errors_page.py."""

import io
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import torch_ext

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "errors.md"


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).to(dtype)


def parallel(strategy: str, trained: nn.Module | None = None, **options: Any) -> tuple[Any, torch_ext.AdamW]:
    """Returns a parallel model and its optimizer. ddp: overrides of the policy; other options: of parallelize."""
    trained = model() if trained is None else trained
    policy = torch_ext.load_policy(trained, override_ddp_config=options.pop("ddp", {}))
    torch_ext.parallelize(trained, policy, strategy=strategy, **options)
    return trained, torch_ext.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2, policy=policy)


def backward(trained: nn.Module, factor: float = 1.0) -> None:
    p = next(trained.parameters())
    (trained(torch.ones(2, 16, dtype=p.dtype)).float().square().mean() * factor).backward()


def train(trained: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        backward(trained)
        optimizer.step()
        optimizer.zero_grad()


def no_process_group(rank: int) -> None:
    dist.barrier()  # a rank that is gone too early would leave the others unconnected
    dist.destroy_process_group()
    try:
        parallel("no_shard")
    finally:  # ranks.py destroys the group at the end
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def another_model(rank: int) -> None:
    parallel("optim", nn.Linear(16, 4 + rank).bfloat16())


def another_policy(rank: int) -> None:
    parallel("optim", ddp={"grad_comm_dtype": ("fp32", "bf16")[rank]})


def a_loss_without_a_parameter(rank: int) -> None:
    trained, _ = parallel("optim_grads")
    trained[0](torch.ones(2, 16).bfloat16()).float().sum().backward()
    trained[0](torch.ones(2, 16).bfloat16()).float().sum().backward()


def frozen_on_one_rank(rank: int) -> None:
    trained, _ = parallel("no_shard")
    trained[0].bias.requires_grad_(rank == 0)
    backward(trained)


def parallelize_of_ddp(rank: int) -> None:
    trained = model()
    torch_ext.parallelize(nn.parallel.DistributedDataParallel(trained), torch_ext.load_policy(trained))


def parallelize_in_ddp(strategy: str) -> Callable[[int], None]:
    def cause(rank: int) -> None:
        trained = model()
        ddp = nn.parallel.DistributedDataParallel(trained)
        parallel(strategy, trained)
        backward(trained)  # DistributedDataParallel does not see this call
        backward(ddp)

    return cause


def ddp_of_a_parallelized_model(rank: int) -> None:
    trained, _ = parallel("optim")
    nn.parallel.DistributedDataParallel(trained)


def thawed(rank: int) -> None:
    trained = model()
    trained[0].weight.requires_grad_(False)
    parallel("no_shard", trained)
    trained[0].weight.requires_grad_(True)
    backward(trained)


def replaced(rank: int) -> None:
    trained, _ = parallel("no_shard")
    trained.load_state_dict({name: p.clone() for name, p in model().state_dict().items()}, assign=True)
    backward(trained)


def converted(strategy: str) -> Callable[[int], None]:
    def cause(rank: int) -> None:
        trained, optimizer = parallel(strategy)
        trained.float()
        train(trained, optimizer)

    return cause


def an_optimizer_with_state(rank: int) -> None:
    trained = model()
    optimizer = torch_ext.AdamW(trained.parameters())
    train(trained, optimizer)
    torch_ext.parallelize(trained, optimizer.policy, strategy="optim")


def another_optimizer(strategy: str) -> Callable[[int], None]:
    def cause(rank: int) -> None:
        trained, _ = parallel(strategy)
        train(trained, torch.optim.SGD(trained.parameters(), lr=0.1))

    return cause


def accumulation_where_backward_steps(strategy: str) -> Callable[[int], None]:
    def cause(rank: int) -> None:
        trained, optimizer = parallel(strategy, ddp={"step_in_backward": True})
        train(trained, optimizer, 2)
        backward(trained)
        backward(trained)

    return cause


def accumulation_where_an_optimizer_steps_in_backward(rank: int) -> None:
    trained = model()
    optimizer = torch_ext.AdamW(trained.parameters(), step_in_backward=True)
    train(trained, optimizer)
    backward(trained)
    backward(trained)


def a_step_after_no_sync(strategy: str) -> Callable[[int], None]:
    def cause(rank: int) -> None:
        trained, optimizer = parallel(strategy)
        with trained.no_sync():
            train(trained, optimizer)

    return cause


def a_group_that_was_destroyed(rank: int) -> None:
    group = dist.new_group()
    trained, optimizer = parallel("optim", process_group=group)
    train(trained, optimizer)
    backward(trained)
    dist.destroy_process_group(group)
    torch_ext.clip_grad_norm_(optimizer, 1.0)


def save_of_sharded_state(strategy: str) -> Callable[[int], None]:
    def cause(rank: int) -> None:
        trained, optimizer = parallel(strategy)
        train(trained, optimizer)
        torch.save(optimizer.state_dict(), io.BytesIO())

    return cause


def gradients_with_nan(rank: int) -> None:
    trained, _ = parallel("optim", ddp={"check_for_nan_in_grad": True})
    backward(trained, float("nan") if rank else 1.0)


CASES: list[tuple[str, Callable[[int], Any]]] = [
    # (a part of the message, the function that must cause it on each rank)
    ("torch.distributed is not initialised", no_process_group),
    ("Every rank must have the same model, policy and version of torch_ext", another_model),
    ("Every rank must have the same model, policy and version of torch_ext", another_policy),
    ("no gradient is ready for", a_loss_without_a_parameter),
    ("the ranks train different parameters", frozen_on_one_rank),
    ("is in DistributedDataParallel, which reduces already", parallelize_of_ddp),
    *(
        ("is in DistributedDataParallel, which reduces already", parallelize_in_ddp(strategy))
        for strategy in ("no_shard", "optim", "optim_grads")
    ),
    ("DistributedDataParallel around a model that was parallelized", ddp_of_a_parallelized_model),
    ("so its gradient is not reduced: call parallelize again", thawed),
    ("so its gradient is not reduced: call parallelize again", replaced),
    *(
        ("after parallelize planned its gradients for", converted(strategy))
        for strategy in ("no_shard", "optim", "optim_grads")
    ),
    ("an optimizer (", an_optimizer_with_state),
    *(
        (
            "would step whole parameters, but this rank has only its shard of each gradient",
            another_optimizer(strategy),
        )
        for strategy in ("optim", "optim_grads")
    ),
    *(
        ("a second backward before step()", accumulation_where_backward_steps(strategy))
        for strategy in ("optim", "optim_grads")
    ),
    ("a second backward before step()", accumulation_where_an_optimizer_steps_in_backward),
    *(
        ("with gradients that no rank has reduced", a_step_after_no_sync(strategy))
        for strategy in ("no_shard", "optim")
    ),
    ("its process group was destroyed", a_group_that_was_destroyed),
    *(("is not legal", lambda rank, name=name: parallel(name)) for name in ("zero1", "ddp", "FSDP", "7")),
    *(("is sharded over the ranks", save_of_sharded_state(strategy)) for strategy in ("optim", "optim_grads")),
    ("gradients with NaN or Inf before communication", gradients_with_nan),
]


def _messages_on_page() -> set[str]:
    """Returns the messages in the first column of the page's section."""
    section = PAGE.read_text().split("\n## Data parallelism\n")[1].split("\n## ")[0]
    return {part for part in re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)}


def test_every_row_of_data_parallelism_has_a_case() -> None:
    rows = _messages_on_page()
    assert len(rows) > 10
    assert {part for part, _ in CASES} - rows == {
        "is sharded over the ranks",
        "gradients with NaN or Inf before communication",
    }
    assert rows - {part for part, _ in CASES} == set()


def _message_of_case(rank: int, world: int, case: int) -> str:
    """Returns the error's text on this rank."""
    try:
        CASES[case][1](rank)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "nothing was raised"


CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    # the words with which the message begins: what the user calls with a model, its optimizer and its loss scale
    "step()": lambda trained, optimizer, scaler: optimizer.step(),
    "step() of a scaler": lambda trained, optimizer, scaler: scaler.step(optimizer),
    "unscale_()": lambda trained, optimizer, scaler: scaler.unscale_(optimizer),
    "clip_grad_norm_()": lambda trained, optimizer, scaler: torch_ext.clip_grad_norm_(optimizer, 1.0),
    "clip_grad_norm_() of parameters": lambda trained, optimizer, scaler: torch_ext.clip_grad_norm_(
        trained.parameters(), 1.0
    ),
    "clip_grad_norm_() of torch": lambda trained, optimizer, scaler: nn.utils.clip_grad_norm_(
        trained.parameters(), 1.0
    ),
    "clip_grad_value_()": lambda trained, optimizer, scaler: nn.utils.clip_grad_value_(trained.parameters(), 1.0),
}


def _messages_of_calls(rank: int, world: int, fused: bool) -> dict[str, str]:
    """Returns what each call of CALLS raises after a backward under no_sync()."""
    trained = model(torch.float16)
    policy = torch_ext.load_policy(trained)
    torch_ext.parallelize(trained, policy, strategy="optim")
    optimizer = torch_ext.AdamW(trained.parameters(), policy=policy, fused=fused)
    scaler = policy.grad_scaler()
    parallel: Any = trained
    with parallel.no_sync():
        scaler.scale(trained(torch.ones(2, 16).half()).float().square().mean()).backward()
    messages = {}
    for name, call in CALLS.items():
        with pytest.raises(RuntimeError) as error:
            call(trained, optimizer, scaler)
        messages[name] = str(error.value)
    return messages


@pytest.mark.parametrize("fused", [False, True])
def test_the_message_names_the_call_that_was_made_with_unreduced_gradients(fused: bool) -> None:
    for messages in ranks.run(2, _messages_of_calls, fused):
        for name, message in messages.items():
            begins = f"{name.split(' of ')[0]} with gradients that no rank has reduced (parameter '"
            assert message.startswith(begins), (name, message)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{i}-{part[:50]}" for i, (part, _) in enumerate(CASES)])
def test_who_does_what_the_page_says_meets_its_message(case: int) -> None:
    answers = ranks.run(2, _message_of_case, case, timeout=10.0)
    assert [CASES[case][0] in answer for answer in answers] == [True, True], answers
