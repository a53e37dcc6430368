"""torch.distributed.checkpoint under every strategy: what one world saves, every other world loads, bit for bit."""

import itertools
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from gradients import BF16, FP16, FP32, Given, bits, noise
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import torch_ext

SHAPES: list[Any] = [(3, 5), (700,), (129,), (16, 130), (1,), (7, 3, 4, 5)]
CHANNELS_LAST = 5
STATES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "remainders": (BF16, {"store_param_remainders": True}),
    "8-bit moments": (BF16, {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}),
    "fp16 moments": (FP16, {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"}),
}
# By name: world size, strategy, bucket_size. They cover several buckets, and shards that are padded or uneven.
WORLDS: dict[str, tuple[int, str, int | None]] = {
    "1 none": (1, "none", None),
    "2 ddp": (2, "ddp", None),
    "2 no_shard": (2, "no_shard", 900),
    "2 optim": (2, "optim", None),
    "3 optim": (3, "optim", 900),
    "4 optim_grads": (4, "optim_grads", 1),
    "3 optim_grads_params": (3, "optim_grads_params", None),
}


def made(strategy: str, states: str, size: int | None, seed: int = 7) -> tuple[Any, Any]:
    """Returns the model, with weights drawn from `seed`, and its AdamW. size: bucket_size."""
    dtype, config = STATES[states]
    chosen = torch_ext.load_policy(
        dtype,
        override_optimizer_config={"main_grads_dtype": FP32, "use_precision_aware_optimizer": True, **config},
        override_ddp_config={"grad_comm_dtype": FP32, "bucket_size": size},
    )
    model: Any = Given(SHAPES, dtype)
    weights = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=weights))
        last = getattr(model, f"p{CHANNELS_LAST}")
        if strategy != "optim_grads_params":  # FSDP2 accepts contiguous parameters only
            last.data = last.data.to(memory_format=torch.channels_last)
    if strategy == "ddp":
        model = DistributedDataParallel(model)
        torch_ext.register_comm_hook(model, chosen)
    elif strategy != "none":
        torch_ext.parallelize(model, chosen, strategy=strategy)
    return model, torch_ext.AdamW(model.named_parameters(), lr=0.1, policy=chosen)


def steps(model: Any, optimizer: Any, which: range) -> None:
    """Takes the training steps whose numbers are in `which`."""
    for step in which:
        model(noise(step, 0, SHAPES, BF16)).backward()  # the same on every rank, so the mean is, too
        optimizer.step()
        optimizer.zero_grad()


def logical(model: Any, optimizer: Any) -> list[bytes]:
    """Returns the bits of the whole weights and of the whole logical state, on every rank."""
    whole = optimizer.consolidate_state_dict(to=None)["state"]
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return bits([*weights, *(value.clone() for entry in whole.values() for value in entry.values())])


def at_rest(model: Any, optimizer: Any) -> list[bytes]:
    """Returns the bits that this rank stores: its weights and optimizer state, compressed where they are."""
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return bits([*weights, *(value for entry in optimizer.state.values() for value in entry.values())])


def _save(rank: int, world: int, strategy: str, size: int | None, folder: str) -> dict[str, list[bytes]]:
    """Saves with torch's and with our writer; returns the logical bits by states."""
    found = {}
    for states in STATES:
        model, optimizer = made(strategy, states, size)
        steps(model, optimizer, range(2))
        before = at_rest(model, optimizer)
        state, optimizer_state = get_state_dict(model, optimizer)
        checkpoint = {"model": state, "optimizer": optimizer_state}
        dcp.save(checkpoint, checkpoint_id=f"{folder}/{states}")
        dcp.save(checkpoint, storage_writer=torch_ext.CheckpointWriter(f"{folder}/{states} at rest", states="at_rest"))
        assert at_rest(model, optimizer) == before, "E11: saving moves no weight and no counter"
        found[states] = logical(model, optimizer)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, list[bytes]]]]:
    """By world: the folder of its checkpoints, and the bits that were saved."""
    found = {}
    for name, (world, strategy, size) in WORLDS.items():
        folder = str(tmp_path_factory.mktemp("saved"))
        answers = ranks.run(world, _save, strategy, size, folder, limit=60.0)
        assert all(answer == answers[0] for answer in answers), "every rank has the same logical state"
        found[name] = folder, answers[0]
    return found


def _load(rank: int, world: int, strategy: str, size: int | None, sources: dict[str, Any]) -> list[str]:
    """Loads checkpoints of other worlds, through set_state_dict or in place. Returns what differs."""
    wrong = []
    ways = itertools.cycle(("set_state_dict", "in place, from what is at rest", "set_state_dict of what is at rest"))
    for source, (folder, expected) in sources.items():
        for (states, bits_saved), way in zip(expected.items(), ways, strict=False):
            model, optimizer = made(strategy, states, size, seed=8)
            steps(model, optimizer, range(5, 6))
            state, optimizer_state = get_state_dict(model, optimizer)
            checkpoint = {"model": state, "optimizer": optimizer_state}
            if "at rest" in way:
                dcp.load(checkpoint, storage_reader=torch_ext.CheckpointReader(f"{folder}/{states} at rest"))
            else:
                dcp.load(checkpoint, checkpoint_id=f"{folder}/{states}")
            if "set_state_dict" in way:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=checkpoint["optimizer"])
            if logical(model, optimizer) != bits_saved:
                wrong.append(f"{source}, {states}, {way}: other bits than were saved")
            if states in ("remainders", "8-bit moments") and _next_step_differs(
                model, optimizer, made(strategy, states, size)
            ):
                wrong.append(f"{source}, {states}, {way}: goes on otherwise than from whole tensors")
    return wrong


def _next_step_differs(model: Any, optimizer: Any, other: tuple[Any, Any]) -> bool:
    """Whether one more step differs from that of a twin that loads the whole tensors."""
    other_model, other_optimizer = other
    other_optimizer.load_state_dict(optimizer.consolidate_state_dict(to=None))
    other_model.load_state_dict(model.state_dict())
    steps(model, optimizer, range(2, 3))
    steps(other_model, other_optimizer, range(2, 3))
    return logical(model, optimizer) != logical(other_model, other_optimizer)


@pytest.mark.parametrize("into", WORLDS)
def test_G5_any_world_and_strategy_loads_what_others_saved(into: str, saved: Any) -> None:
    world, strategy, size = WORLDS[into]
    place, names = list(WORLDS).index(into), list(WORLDS)
    sources = {name: saved[name] for name in (names[(place + 2) % len(names)], names[(place + 5) % len(names)])}
    for wrong in ranks.run(world, _load, strategy, size, sources, limit=100.0):
        assert not wrong, "\n".join(wrong)
