"""optim_grads_params in whole training loops: the bits of no_shard, clipping, prefetch, models of all kinds."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import BF16, FP16, FP32, bits, policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import torch_ext
from torch_ext.parallel import parallel_module

FULLY = "optim_grads_params"
RECOVERS = hasattr(FSDPModule, "reset_iter_state")


class _Out(torch.nn.Module):
    """Returns a new tensor instead of a view; FSDP2 warns of views."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1


class Net(torch.nn.Module):
    """An embedding, blocks, a norm and a head; odd sizes, so that shards are uneven and some are empty."""

    def __init__(self, tied: bool = False, checkpointed: str = "", shared: str = "") -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 9)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.GELU(), torch.nn.Linear(33, 9), _Out())
            for _ in range(3)
        )
        self.norm = torch.nn.LayerNorm(9)
        self.head = torch.nn.Linear(9, 11, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight
        if shared == "by blocks":
            self.blocks[1][0] = self.blocks[0][0]
        elif shared == "by a block and the model":
            self.blocks[1].insert(0, self.norm)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointed:
                x = x + checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = x + block(x)
        return self.head(self.norm(x) * self.scale)  # type: ignore[no-any-return]


def _net(dtype: torch.dtype, **options: Any) -> Net:
    torch.manual_seed(7)
    return Net(**options).to(dtype)


def _tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    """Returns the loss of one rank's tokens of this step."""
    tokens = _tokens(step, rank)
    logits = model(tokens).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), (tokens * 3 + 1).remainder(11).flatten())


def _loss_of_two(model: Any, step: int, rank: int) -> torch.Tensor:
    """Returns a loss in which the model is used twice."""
    return _loss(model, step, rank) * _loss(model, step + 50, rank)


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


def _backward_on_a_thread(loss: torch.Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def _nothing(model: Any, step: int) -> None:
    pass


def _freeze(model: Any, step: int) -> None:
    model.blocks[1].requires_grad_(step not in (1, 2))
    model.blocks[0][0].bias.requires_grad_(step != 2)


def _evaluate(model: Any, step: int) -> None:
    """Uses the model between two steps: in evaluation, without a backward, and for a gradient of an input."""
    model.eval()
    with torch.no_grad():
        model(_tokens(step, 0))
    model.train()
    (model(_tokens(step, 0)).sum() * 0).detach()  # a graph without a backward
    hidden = torch.ones(1, 9, dtype=model.norm.weight.dtype, requires_grad=True)
    torch.autograd.grad(model.blocks[0](hidden).sum(), hidden)


def _whole(model: torch.nn.Module) -> list[bytes]:
    return bits([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])


def _run(
    rank: int,
    dtypes: Any,
    strategy: str,
    microbatches: int = 1,
    steps: int = 6,
    max_norm: float = float("inf"),
    loss_of: Callable[[Any, int, int], torch.Tensor] = _loss,
    backward: Callable[[torch.Tensor], None] = _backward,
    before: Callable[[Any, int], None] = _nothing,
    **options: Any,
) -> tuple[list[bytes], float, list[float]]:
    """Trains and returns the bits of the whole weights, the last loss, and the norms.

    loss_of, backward, before: replace how the loss is computed and differentiated, and act before each step."""
    model = _net(dtypes[0], **options)
    model_policy = policy(*dtypes, loss_scale=64.0 if dtypes[0] == FP16 else None, bucket_size=1)
    torch_ext.parallelize(model, model_policy, strategy=strategy)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=3e-3, policy=model_policy)
    scaler = model_policy.grad_scaler()
    losses, norms = [], []
    for step in range(steps):
        before(model, step)
        for i in range(microbatches):
            with model.sync() if i == microbatches - 1 else model.no_sync():
                loss = loss_of(model, step * microbatches + i, rank)
                backward(scaler.scale(loss / microbatches))
        scaler.unscale_(optimizer)
        norms.append(float(torch_ext.clip_grad_norm_(optimizer, max_norm)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return _whole(model), losses[-1], norms


DTYPES = [
    pytest.param((FP32, FP32, FP32), id="fp32"),
    pytest.param((BF16, BF16, BF16), id="bf16"),
    pytest.param((BF16, FP32, FP32), id="bf16-main-fp32"),
    pytest.param((FP16, FP32, FP32), id="fp16"),
]


def _same_bits(rank: int, world: int, dtypes: Any, options: dict[str, Any]) -> None:
    """FSDP2 and no_shard must train the same weights, to the bit."""
    ours, reference = (_run(rank, dtypes, strategy, **options) for strategy in (FULLY, "no_shard"))
    # no_shard rounds nothing more: on one rank nothing is sent, and bf16 gradients are sent as they are.
    assert ours[0] == reference[0]
    for norm, other in zip(ours[2], reference[2], strict=True):
        assert abs(norm - other) <= 2**-23 * other


@pytest.mark.parametrize("dtypes", DTYPES)
def test_the_bits_of_no_shard(dtypes: Any) -> None:
    ranks.run(3, _same_bits, dtypes, {})


# Fewer ranks change whether gradients are sent, and between how many. The other loops below run on two ranks.
@pytest.mark.parametrize(
    ("world", "dtypes"),
    [pytest.param(1, (BF16, BF16, BF16), id="1-bf16")]
    + [pytest.param(world, (FP16, FP32, FP32), id=f"{world}-fp16") for world in (1, 2)],
)
def test_the_bits_of_no_shard_on_fewer_ranks(world: int, dtypes: Any) -> None:
    ranks.run(world, _same_bits, dtypes, {})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_norm": 0.01}, id="clipped"),
        pytest.param({"tied": True}, id="tied weights"),
        pytest.param({"shared": "by blocks"}, id="a module of two blocks"),
        pytest.param({"shared": "by a block and the model"}, id="a module of a block and the model"),
        pytest.param({"checkpointed": "not reentrant"}, id="checkpoints"),
        pytest.param({"checkpointed": "reentrant"}, id="reentrant checkpoints"),
        pytest.param({"loss_of": _loss_of_two}, id="the model used twice"),
        pytest.param({"before": _freeze}, id="frozen and thawed"),
        pytest.param({"before": _evaluate}, id="evaluated between"),
        pytest.param({"backward": _backward_on_a_thread}, id="backward on a thread"),
    ],
)
def test_the_bits_of_no_shard_in_other_loops(options: dict[str, Any]) -> None:
    ranks.run(2, _same_bits, (BF16, BF16, BF16), options)


def _clipped(rank: int, world: int) -> None:
    """The norm must be that of all ranks' shards, with replicas counted once."""
    norms = {}
    for how in ("no_shard", FULLY, "hybrid"):
        model = _net(BF16)
        if how == "hybrid":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
        model_policy = policy(BF16, FP32)
        torch_ext.parallelize(model, model_policy, strategy="no_shard" if how == "no_shard" else FULLY)
        optimizer = torch_ext.AdamW(model.parameters(), lr=1e-3, policy=model_policy)
        _loss(model, 0, rank).backward()
        norms[how] = float(torch_ext.clip_grad_norm_(optimizer, 1e-3))
    # no_shard rounds its gradients to bf16 once more; HSDP adds replicas in another order.
    assert abs(norms[FULLY] - norms["no_shard"]) < 2**-8 * norms[FULLY]
    assert abs(norms[FULLY] - norms["hybrid"]) < 1e-6 * norms[FULLY]


def test_the_norm_of_all_shards() -> None:
    ranks.run(4, _clipped)


def _before(rank: int, world: int, kind: str) -> None:
    """An optimizer that was created before parallelize must step the model's new parameters."""
    model = _net(FP32)
    model_policy = policy(FP32)
    if kind == "ours":
        optimizer: torch.optim.Optimizer = torch_ext.AdamW(model.parameters(), lr=1e-2, policy=model_policy)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch_ext.parallelize(model, model_policy, strategy=FULLY)
    for step in range(3):
        _loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    later = _net(FP32)
    torch_ext.parallelize(later, model_policy, strategy=FULLY)
    other = type(optimizer)(later.parameters(), lr=1e-2)
    for step in range(3):
        _loss(later, step, rank).backward()
        other.step()
        other.zero_grad()
    assert _whole(model) == _whole(later)


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_an_optimizer_made_before(kind: str) -> None:
    ranks.run(2, _before, kind)


def _mixed(rank: int, world: int) -> None:
    """fp32 norms in a bf16 model become units of their own; frozen parameters must not change."""
    model = _net(BF16)
    model.norm.float()
    for block in model.blocks:
        block.insert(0, torch.nn.LayerNorm(9).float())
        block.insert(1, _ToBf16())
    model.norm = torch.nn.Sequential(_ToFp32(), model.norm, _ToBf16())
    model.embedding.weight.requires_grad_(False)
    frozen = model.embedding.weight.detach().clone()
    for block in model.blocks:
        block.insert(0, _ToFp32())
    model_policy = policy(BF16, FP32)
    torch_ext.parallelize(model, model_policy, strategy=FULLY)
    assert {p.dtype for m in model.modules() if isinstance(m, torch.nn.LayerNorm) for p in m.parameters()} == {FP32}
    optimizer = torch_ext.AdamW(model.parameters(), lr=1e-2, policy=model_policy)
    losses = []
    for _ in range(30):
        loss = _loss(model, 0, 0)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(model.embedding.weight.full_tensor(), frozen)


class _ToBf16(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(BF16)


class _ToFp32(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(FP32)


def test_several_dtypes_and_frozen_parameters() -> None:
    ranks.run(2, _mixed)


def _several(rank: int, world: int) -> None:
    """Two models at a time: one on a group of its own, one parallelized twice."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = pairs[0] if rank < 2 else pairs[1]
    models = [_net(BF16), _net(BF16)]
    model_policy = policy(BF16)
    torch_ext.parallelize(models[0], model_policy, strategy=FULLY)
    torch_ext.parallelize(models[1], model_policy, strategy=FULLY, process_group=mine)
    torch_ext.parallelize(models[0], model_policy, strategy=FULLY)
    optimizers = [torch_ext.AdamW(m.named_parameters(), lr=1e-2, policy=model_policy) for m in models]
    for step in range(4):
        sum(_loss(m, step, rank) for m in models).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = [_whole(m) for m in models]
    others: list[Any] = [None] * world
    dist.all_gather_object(others, weights)
    assert others[0][0] == others[1][0] == others[2][0]
    assert others[0][1] == others[1][1] != others[2][1]


def test_several_models_and_groups() -> None:
    ranks.run(3, _several)


def _prefetched(rank: int, world: int) -> list[list[str]]:
    """Returns the order of gathers and forwards. A unit's weights are gathered while the unit before it runs.

    Weights that were gathered for a unit that then did not run must not be kept for later."""
    model = _net(BF16)
    torch_ext.parallelize(model, policy(BF16, bucket_size=1), strategy=FULLY)
    optimizer = torch_ext.AdamW(model.parameters(), lr=1e-1, policy=policy(BF16))
    started: list[str] = []
    weights = parallel_module.reducer_of(model).weights
    real = weights.all_gather

    def all_gather(unit: Any, *arguments: Any) -> Any:
        started.append(unit.name)
        return real(unit, *arguments)

    weights.all_gather = all_gather  # type: ignore[method-assign]
    for name, block in model.blocks.named_children():
        block.register_forward_pre_hook(lambda m, args, name=name: started.append(f"run {name}"))
    seen = []
    for step in range(2):
        _loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(started.copy())
        started.clear()
    _loss(model, 2, rank).backward()
    blocks = model.blocks
    with torch.no_grad():
        model.blocks = torch.nn.ModuleList([blocks[0]])  # blocks.1 is prefetched but does not run
        _loss(model, 0, rank)  # leaves the root's weights unsharded until the step
        model.blocks = blocks
        assert "blocks.1" in started
        optimizer.step()
        after = float(_loss(model, 3, 0))
    assert after == _loss_of_shards(model, 3)
    return seen


def _loss_of_shards(model: Any, step: int) -> float:
    """Returns the loss of a plain model with the weights of the shards."""
    model.reshard()
    plain = _net(BF16)
    with torch.no_grad():
        for mine, whole in zip(plain.parameters(), model.parameters(), strict=True):
            assert isinstance(whole, DTensor)
            mine.copy_(whole.full_tensor())
        return float(_loss(plain, step, 0))


def test_prefetch() -> None:
    for first, second in ranks.run(2, _prefetched):
        # Forwards: the first one records the order, the second gathers one unit ahead.
        assert first[:7] == ["", "blocks.0", "run 0", "blocks.1", "run 1", "blocks.2", "run 2"]
        assert second[:7] == ["", "blocks.0", "blocks.1", "run 0", "blocks.2", "run 1", "run 2"]
        # Backwards: FSDP2 itself gathers one unit ahead, since our gathers do not block.
        assert first[7:] == second[7:] == ["blocks.2", "blocks.1", "blocks.0"]


class _Stop(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stop


def _cut_short(rank: int, world: int, how: str, then: str) -> None:
    """Weights that were gathered and not used by a forward are out of date after a step or a load."""
    model = _net(BF16)
    torch_ext.parallelize(model, policy(BF16, bucket_size=1), strategy=FULLY)
    optimizer = torch_ext.AdamW(model.parameters(), lr=1e-1, policy=policy(BF16))
    shards = list(model.parameters())
    _loss(model, 0, rank).backward()  # records the order in which weights are gathered from now on
    _loss(model, 1, rank).backward()

    if how == "a block alone":
        with torch.no_grad():
            model.blocks[0](torch.ones(1, 9, dtype=BF16))
    else:
        handle = model.blocks[0].register_forward_hook(_stop)
        with pytest.raises(_Stop):
            _loss(model, 2, rank)
        handle.remove()
    if then == "step":
        optimizer.step()
    else:
        with torch.no_grad():
            for shard in shards:
                shard.to_local().mul_(-0.5)  # type: ignore[attr-defined]
        assert torch_ext.sync_parameters(model)
    with torch.no_grad():
        after = float(_loss(model, 3, 0))
    assert after == _loss_of_shards(model, 3)


@pytest.mark.parametrize("then", ["step", "load"])
@pytest.mark.parametrize("how", ["a forward that raises", "a block alone"])
def test_weights_that_no_forward_used_are_dropped(how: str, then: str) -> None:
    ranks.run(2, _cut_short, how, then)


def _remainders(rank: int, world: int) -> None:
    """bf16 shards whose fp32 masters are stored as 16-bit remainders."""
    model_policy = torch_ext.load_policy(
        BF16,
        override_optimizer_config={"store_param_remainders": True, "main_grads_dtype": FP32},
        override_ddp_config={"grad_comm_dtype": FP32},
    )
    weights, masters = [], []
    for strategy in (FULLY, "no_shard"):
        model = torch_ext.parallelize(_net(BF16), model_policy, strategy=strategy)
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-3, policy=model_policy)
        for step in range(5):
            _loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(_whole(model))
        masters.append({key for state in optimizer.state.values() for key in state if "master" in key})
    assert weights[0] == weights[1]
    assert masters == [{"master_remainder"}] * 2


def test_remainders_beside_bf16_shards() -> None:
    ranks.run(2, _remainders)


def _raise_in_backward(model: Any, x: torch.Tensor) -> None:
    """Raises in a backward and zeroes the gradients."""
    handle = model[0].register_full_backward_pre_hook(_stop)
    loss = model(x).square().sum()
    handle.remove()
    with pytest.raises(_Stop):
        loss.backward()
    model.zero_grad()


def _beside_tensor_parallelism(rank: int, world: int) -> None:
    """Two FSDP2 shards of a model that two tensor-parallel ranks compute: unsharded parameters are DTensors."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    model: Any = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    torch_ext.parallelize(model, policy(FP32), strategy=FULLY)
    optimizers = [torch_ext.AdamW(m.parameters(), lr=1e-2, policy=policy(FP32)) for m in (model, plain)]
    for step in range(3):
        for half in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + half))
            if half == mesh["shard"].get_local_rank():
                if step == 1 and RECOVERS:
                    _raise_in_backward(model, x)
                model(x).square().sum().backward()
            (plain(x).square().sum() / 2).backward()
        norms = [float(torch_ext.clip_grad_norm_(optimizer, 1.0)) for optimizer in optimizers]
        assert abs(norms[0] - norms[1]) < 1e-5 * norms[1]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-6)


def test_beside_tensor_parallelism() -> None:
    ranks.run(4, _beside_tensor_parallelism)


def _dropped(rank: int, world: int) -> None:
    """A model that is gone must take its reducer and its shards with it."""
    model = torch_ext.parallelize(_net(BF16), policy(BF16, FP32), strategy=FULLY)
    engine = weakref.ref(parallel_module.reducer_of(model))
    shards = [weakref.ref(p) for p in model.parameters()]
    _loss(model, 0, rank).backward()
    ended = weakref.ref(model)
    del model
    gc.collect()
    assert ended() is None and engine() is None
    assert all(shard() is None for shard in shards)


def test_an_engine_ends_with_its_model() -> None:
    ranks.run(2, _dropped)
