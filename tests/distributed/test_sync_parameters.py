"""B2: sync_parameters must visit every chunk, and return whether it synchronised one."""

from typing import Any

import ranks
import torch

import torch_ext

FULLY = "optim_grads_params"
CASES: list[tuple[list[str | None], bool]] = [
    (["optim_grads_params", "optim_grads_params"], True),
    (["optim_grads", "optim_grads_params"], True),
    (["optim_grads_params", "optim_grads"], True),
    (["optim_grads"], False),
    ([], False),
    ([None, "optim_grads_params", None], True),
    ([None], False),
]


def _chunk(strategy: str | None) -> Any:
    """Returns a model under the strategy, or a plain one."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if strategy is None:
        return model
    return torch_ext.parallelize(model, torch_ext.load_policy(model), strategy=strategy)


def _synced(rank: int, world: int) -> None:
    """Syncs several chunks in one call; each must be visited, also after one that had nothing to sync."""
    for strategies, expected in CASES:
        chunks = [_chunk(strategy) for strategy in strategies]
        changed = [_written_while_whole(chunk) for chunk, s in zip(chunks, strategies, strict=True) if s == FULLY]
        assert torch_ext.sync_parameters(chunks) is expected, strategies
        with torch.no_grad():
            assert not any(chunk(torch.ones(1, 4)).any() for chunk in changed), "no short circuit, nobody skipped"
        if len(chunks) == 1:
            assert torch_ext.sync_parameters(chunks[0]) is expected


def _written_while_whole(model: Any) -> Any:
    """Writes zeros to the shards of an FSDP2 model while its unsharded weights, which are not zero, stay in memory."""
    shards = list(model.parameters())
    with torch.no_grad():
        model(torch.ones(1, 4))
        for module in model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
                module.set_reshard_after_forward(False)
        model(torch.ones(1, 4))
    for module in model.modules():
        if hasattr(module, "reshard"):
            for p in module.parameters(recurse=False):
                if hasattr(p, "to_local"):
                    raise AssertionError("whole weights are what this test needs")
    with torch.no_grad():
        for p in shards:
            p.to_local().zero_()
        assert model(torch.ones(1, 4)).any()
    return model


def _fresh(rank: int, world: int) -> None:
    """The next forward must use what was written to the shards while unsharded weights were in memory."""
    model = _written_while_whole(_chunk(FULLY))
    assert torch_ext.sync_parameters(model)
    with torch.no_grad():
        assert not model(torch.ones(1, 4)).any()


def test_b2_every_chunk_is_visited() -> None:
    ranks.run(2, _synced)


def test_b2_the_next_forward_uses_what_is_in_the_shards() -> None:
    ranks.run(2, _fresh)
