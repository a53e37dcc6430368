"""`states`, `keep_32bit` and `min_8bit_size` with sharded states: the same kinds and bits as in one process,
checkpoints that move between strategies, and an error if ranks keep different kinds."""

import io
from typing import Any

import pytest
import ranks
import strategies
import torch
from gradients import BF16, FP32, Given, bits, noise
from torch import nn
from torch.distributed.tensor import DTensor

import torch_ext

SHAPES: list[Any] = [(3, 5), (700,), (129,), (16, 130), (1,)]
FULL = "optim_grads_params"
KEPT = ["p1", "*4"]
MIN = 130


class Layers(nn.Module):
    """Given inside of another module, so that its parameters' names have a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Given(SHAPES, BF16)

    def forward(self, grads: Any) -> torch.Tensor:
        return self.given(grads)  # type: ignore[no-any-return]


def _build(strategy: str | None, **options: Any) -> tuple[Any, Any]:
    """Returns a model and its optimizer with 8-bit states and some in 32 bits. strategy: None: one process."""
    policy = torch_ext.load_policy(
        BF16, override_optimizer_config={"main_grads_dtype": FP32}, override_ddp_config={"grad_comm_dtype": FP32}
    )
    torch.manual_seed(7)
    model: Any = Layers()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    if strategy is not None:
        torch_ext.parallelize(model, policy, strategy=strategy)
    options = {"states": "8bit", "keep_32bit": ["given." + k for k in KEPT], "min_8bit_size": MIN} | options
    return model, torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=policy, **options)


def _steps(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(noise(step, 0, SHAPES, BF16)).backward()  # the same on every rank, so the mean is the same in any world
        optimizer.step()
        optimizer.zero_grad()


def _kinds(optimizer: Any) -> list[torch.dtype]:
    """Returns the dtype of each parameter's exp_avg."""
    return [optimizer.state[p]["exp_avg"].dtype for group in optimizer.param_groups for p in group["params"]]


def _whole(optimizer: Any) -> list[torch.Tensor]:
    return [v for entry in optimizer.consolidate_state_dict(to=None)["state"].values() for v in entry.values()]


def _trained(rank: int, world: int, strategy: str) -> tuple[list[torch.dtype], list[bytes], bytes]:
    """Returns kinds, bits and a saved checkpoint after three steps."""
    model, optimizer = _build(strategy)
    _steps(model, optimizer, range(3))
    kinds, file = _kinds(optimizer), io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.consolidate_state_dict(to=None)}, file)
    return kinds, bits([*model.parameters(), *_whole(optimizer)]), file.getvalue()


def _alone() -> tuple[list[torch.dtype], list[bytes]]:
    """Returns kinds and bits of one process after three steps."""
    model, optimizer = _build(None)
    for step in range(3):
        grads = noise(step, 0, SHAPES, BF16)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad.float().to(p.dtype)
        optimizer.step()
    return _kinds(optimizer), bits([*model.parameters(), *_whole(optimizer)])


def test_each_strategy_keeps_and_trains_what_one_process_does() -> None:
    expected, trained = _alone()
    assert expected == [FP32, FP32, FP32, torch.uint8, FP32]
    for strategy, answers in strategies.run(2, _trained).items():
        for kinds, found, _ in answers:
            assert kinds == expected and found == trained, strategy


def _resumed(rank: int, world: int, strategy: str, saved: bytes) -> list[bytes]:
    """Resumes from the checkpoint and returns the bits after two more steps."""
    model, optimizer = _build(strategy)
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    model.load_state_dict(checkpoint["model"])
    _steps(model, optimizer, range(3, 5))
    return bits([*model.parameters(), *_whole(optimizer)])


def test_a_checkpoint_moves_between_strategies() -> None:
    saved = strategies.run(2, _trained, chosen=["optim"])["optim"][0][2]
    answers = strategies.run(3, _resumed, saved)
    assert len({str(found) for each in answers.values() for found in each}) == 1


def _full(rank: int, world: int) -> tuple[list[torch.dtype], list[bytes]]:
    """FSDP2, where a shard may have few elements of a parameter that is not small. The state must load into a new
    optimizer."""
    model, optimizer = _build(FULL)
    _steps(model, optimizer, range(2))
    whole = optimizer.consolidate_state_dict(to=None)
    again, fresh = _build(FULL)
    fresh.load_state_dict(whole)
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    for each in ((model, optimizer), (again, fresh)):
        _steps(*each, range(2, 3))
    assert bits(_whole(optimizer)) == bits(_whole(fresh))
    return _kinds(optimizer), bits(_whole(optimizer))


def test_full_sharding_counts_the_elements_of_whole_parameters() -> None:
    answers = ranks.run(2, _full)
    assert [kinds for kinds, _ in answers] == [[FP32, FP32, FP32, torch.uint8, FP32]] * 2
    assert answers[0][1] == answers[1][1]


def _taken_along(rank: int, world: int) -> list[torch.dtype]:
    """States must keep their kinds under another strategy; a policy that asks for other kinds must be rejected."""
    model, optimizer = _build("optim")
    _steps(model, optimizer, range(1))
    policy = torch_ext.load_policy(BF16, override_optimizer_config={"main_grads_dtype": FP32})
    torch_ext.parallelize(model, optimizer.policy, strategy="optim_grads", optimizer=optimizer)
    _steps(model, optimizer, range(1, 2))
    with pytest.raises(
        ValueError, match="the policy has changed: it stores the state of .*given.p0.* as moments in torch.bf"
    ):
        torch_ext.parallelize(model, policy, strategy="optim", optimizer=optimizer)
    return _kinds(optimizer)


def test_states_are_taken_along_as_they_are() -> None:
    assert ranks.run(2, _taken_along) == [[FP32, FP32, FP32, torch.uint8, FP32]] * 2


# -- ranks that differ --------------------------------------------------------------------------------------------

DIFFERING: dict[str, tuple[dict[str, Any], str]] = {
    "states": ({"states": "bf16"}, "given.p0"),
    "a size": ({"min_8bit_size": 3000}, "given.p3"),
    "names": ({"keep_32bit": ["given.p3"]}, "given.p1"),
    "remainders": ({"states": "bf16", "keep_32bit": ["*"]}, "given.p0"),
}


def _local(model: Any) -> list[bytes]:
    return bits([p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()])


def _differing(rank: int, world: int, strategy: str) -> dict[str, str]:
    """Rank 1 has other options; returns the errors of step(), which must change nothing."""
    told = {}
    for case, (options, _) in DIFFERING.items():
        model, optimizer = _build(strategy, **(options if rank == 1 else {}))
        before = _local(model)
        model(noise(0, 0, SHAPES, BF16)).backward()
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        assert _local(model) == before, "nothing was stepped"
        told[case] = str(raised.value)
    return told


def test_ranks_that_keep_different_kinds_are_told() -> None:
    for strategy, (told, other) in strategies.run(2, _differing, chosen=[*strategies.STRATEGIES, FULL]).items():
        assert told == other, strategy
        for case, (_, name) in DIFFERING.items():
            of = f"step(): what each rank keeps as optimizer state: of {name!r} rank 0 keeps exp_avg in "
            assert told[case].startswith(of), told[case]
            assert told[case].endswith("; states, policy, min_8bit_size and keep_32bit must be the same on all ranks")
