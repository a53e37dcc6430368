"""Muon under every strategy: each matrix must be orthogonalised by one rank of the world only, and weights and states
must have the bits of one process."""

import contextlib
import pathlib
from itertools import combinations
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gradients import BF16, FP32, Given, bits, noise, on_all_ranks
from muon_programs import STRATEGIES, Program, before_products, counted, everything
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ext

SHARDED = STRATEGIES[1:]
SHAPES: list[Any] = [(48, 16), (16, 32), (24, 24), (3, 8, 12), (7,)]

# -- the bits of one process ------------------------------------------------------------------------------------------


def _programs(rank: int, world: int, seeds: list[int], strategies: tuple[str | None, ...]) -> dict[Any, Any]:
    """Returns, by seed and strategy, the bits after three steps and the number of operations of this rank."""
    found: dict[Any, Any] = {}
    for seed in seeds:
        program = Program.of(seed)
        torch.set_num_threads(program.threads)
        for strategy in strategies:
            if strategy is None or program.fits(strategy):
                with counted() as made:
                    model, optimizer = program.made(strategy)
                    found[seed, strategy] = program.trained(model, optimizer, range(3)), sum(made)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    """By seed: the bits of one process, and its number of operations."""
    return {seed: found for (seed, _), found in ranks.run(1, _programs, list(range(9)), (None,))[0].items()}


@pytest.mark.parametrize(("world", "seeds"), [(1, [0]), (2, [0, 1, 2, 3, 4]), (3, [5, 6]), (4, [7, 8])])
def test_random_programs_have_the_bits_of_one_process(world: int, seeds: list[int], alone: Any) -> None:
    found = ranks.run(world, _programs, seeds, STRATEGIES)
    for seed, strategy in found[0]:
        expected, operations = alone[seed]
        for of_rank, _ in (one[seed, strategy] for one in found):
            differing = [key for key in expected if of_rank[key] != expected[key]]
            assert not differing, (strategy, differing, Program.of(seed))
        made = [one[seed, strategy][1] for one in found]
        assert sum(made) == operations > 0, "each matrix once in the world"


# -- one world for each strategy, in which all bodies run ------------------------------------------------------------


def _local(model: Any) -> dict[str, list[bytes]]:
    """Returns the bits of this rank's weights or shards, by name."""
    return {name: bits([p.to_local() if hasattr(p, "to_local") else p]) for name, p in model.named_parameters()}


def _build(strategy: str, dtype: torch.dtype = FP32, backward: bool = False, **options: Any) -> tuple[Any, Any]:
    model: Any = Given(SHAPES, dtype)
    policy = torch_ext.load_policy(model, override_ddp_config={"step_in_backward": backward})
    torch_ext.parallelize(model, policy, strategy=strategy)
    return model, torch_ext.Muon(model.named_parameters(), **{"ns_dtype": FP32} | options)


def _ones(dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [torch.ones(shape, dtype=dtype) for shape in SHAPES]


def _bytes(rank: int, strategy: str) -> int:
    """Returns the bytes that this rank sends for its matrices in one step."""
    sent: list[int] = []
    theirs = dist.all_to_all_single

    def counting(into: Any, given: Any, of_into: Any, of_given: Any, **options: Any) -> Any:
        sent.append(sum(n for to, n in enumerate(of_given) if to != rank) * given.element_size())
        return theirs(into, given, of_into, of_given, **options)

    model, optimizer = _build(strategy, BF16)
    model(_ones(BF16)).backward()
    dist.all_to_all_single = counting  # type: ignore[assignment]
    optimizer.step()
    dist.all_to_all_single = theirs
    return sum(sent)


def _measured(rank: int, strategy: str) -> str:
    """Returns the dtype of products that is chosen by measuring."""
    model, optimizer = _build(strategy, ns_dtype=None)
    model(_ones()).backward()
    optimizer.step()
    return optimizer.param_groups[0]["ns_dtype"]


def _refused(model: Any, optimizer: Any, gradients: list[torch.Tensor], keeps: str | None = None) -> str:
    """Returns the error of a step that must not change this rank's weights, or only not the parameter `keeps`."""
    before = _local(model)
    try:
        model(gradients).backward()
        optimizer.step()
    except RuntimeError as refusal:
        after = _local(model)
        assert after == before if keeps is None else after[keeps] == before[keeps]
        return str(refusal)
    return ""


def _differing(rank: int, strategy: str) -> str:
    """The ranks have different plans."""
    return _refused(*_build(strategy, split={"p0": 2} if rank else None), _ones())


def _nonfinite(rank: int, strategy: str) -> str:
    """A gradient has NaN."""
    gradients = _ones()
    gradients[1][0, 0] = torch.nan
    return _refused(*_build(strategy), gradients)


def _products(rank: int, strategy: str) -> str:
    """The products of p1 become NaN."""

    def breaks(task: Any) -> None:
        if task.x.shape == SHAPES[1]:
            task.x.fill_(torch.nan)

    with before_products(breaks):
        return _refused(*_build(strategy), _ones(), keeps="p1")


def _expert(rank: int, strategy: str) -> str:
    """The products of some matrices of a stack become NaN: no rank may step any matrix of it."""

    def breaks(task: Any) -> None:
        if rank == 0 and task.x.shape == (8, 12):
            task.x.fill_(torch.nan)

    with before_products(breaks):
        return _refused(*_build(strategy), _ones(), keeps="p3")


def _goes_on(rank: int, strategy: str) -> tuple[list[bytes], list[bytes]]:
    """Returns the weights as forwards see them: after a step in which products were NaN, and after the next one."""

    def breaks(task: Any) -> None:
        if task.x.shape == SHAPES[1]:
            task.x.fill_(torch.nan)

    def whole() -> list[bytes]:
        return bits([p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()])

    model, optimizer = _build(strategy)
    model(_ones()).backward()
    with before_products(breaks), pytest.raises(RuntimeError, match="p1"):
        optimizer.step()
    optimizer.zero_grad()
    first = whole()
    model(_ones()).backward()
    optimizer.step()
    return first, whole()


def _no_memory(rank: int, strategy: str) -> str:
    """The owner of a matrix raises. The other ranks must not wait for it."""

    def breaks(task: Any) -> None:
        if task.x.shape == SHAPES[1]:
            raise RuntimeError("no memory is left")

    with before_products(breaks):
        return _refused(*_build(strategy), _ones(), keeps="p1")


def _two_reasons(rank: int, strategy: str) -> dict[str, str]:
    """For pairs of matrices: in one step the products of the first are not finite, and the owner of the second raises.
    Returns the message by "first second"."""

    def broken(first: int, second: int) -> str:
        def breaks(task: Any) -> None:
            if task.x.shape == SHAPES[first]:
                task.x.fill_(torch.nan)
            elif task.x.shape == SHAPES[second]:
                raise RuntimeError("no memory is left")

        with before_products(breaks):
            return _refused(*_build(strategy), _ones(), keeps=f"p{first}")

    return {f"p{first} p{second}": broken(first, second) for first, second in combinations(range(3), 2)}


def _same_shapes(rank: int, strategy: str) -> str:
    """Of two matrices with equal shapes, each rank gives another one to AdamW."""
    model: Any = Given([(16, 16), (16, 16)], FP32)
    torch_ext.parallelize(model, torch_ext.load_policy(model), strategy=strategy)
    optimizer = torch_ext.Muon(model.named_parameters(), ns_dtype=FP32, adamw_params=f"p{rank}")
    return _refused(model, optimizer, [torch.ones(16, 16)] * 2)


def _in_backward(rank: int, strategy: str) -> str:
    """With step_in_backward, which Muon does not support."""
    if strategy not in ("optim", "optim_grads"):
        return ""
    model, optimizer = _build(strategy, backward=True)
    model(_ones()).backward()  # the first backward creates states; the second would step
    optimizer.step()
    optimizer.zero_grad()
    return _refused(model, optimizer, _ones())


def _followed(rank: int, strategy: str) -> list[Any]:
    """Measures health in steps in which one matrix's products are NaN, and in the steps after these; an engine must
    follow each such pair of steps as one version. Returns the element counts of every measurement."""

    def breaks(task: Any) -> None:
        if task.x.shape == SHAPES[1]:
            task.x.fill_(torch.nan)

    model, optimizer = _build(strategy, BF16, lr=1e-3)
    publisher = torch_ext.WeightPublisher(model, optimizer)
    engine = {name: p.detach().clone() for name, p in Given(SHAPES, BF16).named_parameters()}
    subscriber, measured = torch_ext.WeightSubscriber(engine), []
    for step in range(4):
        optimizer.measure_health()
        for fails in (True, False):
            model(noise(2 * step + fails, rank, SHAPES, BF16)).backward()
            with before_products(breaks if fails else lambda task: None):
                with pytest.raises(RuntimeError, match="p1") if fails else contextlib.nullcontext():
                    optimizer.step()
            optimizer.zero_grad()
            measured.append([p.elements for p in optimizer.health().params])
        subscriber.apply(on_all_ranks(publisher.publish()), "full")
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
        assert bits(list(engine.values())) == bits(weights)
    return measured


_BODIES = (
    *(_bytes, _measured, _differing, _same_shapes, _nonfinite, _products, _expert, _goes_on, _no_memory),
    *(_two_reasons, _in_backward, _followed),
)


def _all_bodies(rank: int, world: int, strategy: str) -> list[Any]:
    return [body(rank, strategy) for body in _BODIES]


@pytest.fixture(scope="module", params=STRATEGIES)
def answers(request: pytest.FixtureRequest) -> tuple[str, dict[Any, list[Any]]]:
    """The strategy, and by body what each rank returned."""
    found = ranks.run(2, _all_bodies, request.param)
    return request.param, dict(zip(_BODIES, zip(*found, strict=True), strict=True))


def test_two_bytes_to_the_owner_and_two_back(answers: Any) -> None:
    strategy, of = answers
    elements = sum(torch.Size(shape).numel() for shape in SHAPES if len(shape) > 1)
    assert (sum(of[_bytes]) > 0) == (strategy in SHARDED)
    assert sum(of[_bytes]) <= 4 * elements


def test_ranks_agree_on_the_dtype_of_products(answers: Any) -> None:
    first, second = answers[1][_measured]
    assert first == second
    assert first in ("float32", "bfloat16")


def test_plans_that_differ_are_refused_on_every_rank(answers: Any) -> None:
    for message in answers[1][_differing]:
        assert "the ranks' plans differ: rank 0 has 6 matrices and rank 1 has 7" in message


def test_a_gradient_that_is_not_finite_is_named_on_every_rank(answers: Any) -> None:
    for message in answers[1][_nonfinite]:
        assert "p1" in message and "not finite" in message


def test_products_that_are_not_finite_are_named_on_every_rank(answers: Any) -> None:
    for message in answers[1][_products]:
        assert "p1" in message and "products of its Newton-Schulz iteration are not finite" in message


def test_each_failure_is_reported_with_its_own_reason(answers: Any) -> None:
    """The rank that raised reports its own error; the others the first parameter that failed, with why that one did."""
    by_rank = answers[1][_two_reasons]
    for pair in by_rank[0]:
        not_finite, raised = pair.split()
        own, other = sorted((messages[pair] for messages in by_rank), key=lambda m: "no memory is left" not in m)
        assert raised in own and "no memory is left" in own
        assert not_finite in other and "products of its Newton-Schulz iteration are not finite" in other


def test_training_goes_on_with_the_same_weights_everywhere_where_products_were_not_finite(answers: Any) -> None:
    (first, second), other = answers[1][_goes_on]
    assert other == (first, second)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_step_in_which_products_were_not_finite_is_measured_once_and_published(answers: Any) -> None:
    elements = [768, 576, 288, 7]  # not of p1
    assert answers[1][_followed] == ([elements] * 8, [elements] * 8)


def test_a_stack_is_stepped_as_a_whole_or_not_at_all(answers: Any) -> None:
    for message in answers[1][_expert]:
        assert "p3" in message and "its weights are as they were" in message


def test_an_owner_that_raises_is_not_waited_for(answers: Any) -> None:
    messages = answers[1][_no_memory]
    assert sum("'p1': no memory is left; its weights are as they were" in message for message in messages) == 1
    assert all("p1" in message and "its weights are as they were" in message for message in messages)


def test_equal_shapes_of_other_parameters_are_refused(answers: Any) -> None:
    for message in answers[1][_same_shapes]:
        assert "of 'p0' rank 0 keeps exp_avg in fp32" in message and "must be the same on all ranks" in message


def test_stepping_in_backward_is_refused(answers: Any) -> None:
    strategy, of = answers
    for message in of[_in_backward]:
        assert (strategy in ("optim", "optim_grads")) == ("Muon needs the whole gradient of a matrix" in message), (
            message
        )


def _cut_otherwise(rank: int, world: int) -> list[str]:
    """Steps a DTensor that is cut by columns, and one that is replicated. Returns the errors."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for placement in (Shard(1), Replicate()):
        p = torch.nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [placement]))
        optimizer = torch_ext.Muon([("weight", p)], ns_dtype=FP32)
        p.grad = distribute_tensor(torch.ones(8, 6), mesh, [placement])
        try:
            optimizer.step()
            found.append("")
        except RuntimeError as refusal:
            found.append(str(refusal))
    return found


def test_dtensors_that_are_cut_otherwise_are_named() -> None:
    for message, of_replicas in ranks.run(2, _cut_otherwise):
        assert "'weight' is sharded with placements (Shard(dim=1),)" in message and "Shard(0)" in message
        assert not of_replicas


def _replicated_shards(rank: int, world: int) -> tuple[dict[str, Any], int]:
    """Trains under HSDP: two replicas of two shards. Returns the bits and the number of operations."""
    torch.set_num_threads(1)
    model: Any = Given(SHAPES, BF16)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch_ext.Muon(model.named_parameters(), lr=0.05, ns_dtype=FP32, states="bf16_remainder")
    with counted() as made:
        for step in range(3):
            for i, p in enumerate(model.parameters()):
                whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).bfloat16()
                p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if world > 1 else whole
            optimizer.step()
    return everything(model, optimizer), sum(made)


def test_replicated_shards_have_the_bits_of_one_process() -> None:
    """Each replica orthogonalises every matrix once."""
    ((alone, operations),) = ranks.run(1, _replicated_shards)
    found = ranks.run(4, _replicated_shards)
    for of_rank, _ in found:
        assert of_rank == alone
    assert [found[0][1] + found[1][1], found[2][1] + found[3][1]] == [operations, operations]


# -- checkpoints ------------------------------------------------------------------------------------------------------

SAVED = Program.of(0)._replace(
    shapes=[(30, 20), (7,), (3, 8, 12), (17, 33)],
    dtype=BF16,
    config={"bucket_size": 900},
    options={"lr": 0.05, "states": "bf16_remainder", "ns": "auto", "ns_dtype": FP32},
)


def _saves(rank: int, world: int, strategy: str, folder: str) -> None:
    """Trains two steps and saves: through DCP, and the whole state from rank 0."""
    model, optimizer = SAVED.made(strategy)
    SAVED.trained(model, optimizer, range(2))
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    whole = optimizer.consolidate_state_dict(to=0)
    weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    if rank == 0:
        torch.save({"model": weights, "optimizer": whole}, f"{folder}/whole.pt")


def _loads(rank: int, world: int, strategy: str | None, folder: str | None) -> list[Any]:
    """Returns the bits after two more steps from each save. folder None: after four steps without a save."""
    torch.set_num_threads(1)
    model, optimizer = SAVED.made(strategy)
    if folder is None:
        return [SAVED.trained(model, optimizer, range(4))]
    state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint = {"model": state, "optimizer": optimizer_state}
    dcp.load(checkpoint, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=checkpoint["optimizer"])
    found = [SAVED.trained(model, optimizer, range(2, 4))]
    if strategy != "optim_grads_params":  # FSDP2 models need another function to load whole weights
        saved = torch.load(f"{folder}/whole.pt", weights_only=True)
        model, optimizer = SAVED.made(strategy)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        found.append(SAVED.trained(model, optimizer, range(2, 4)))
    return found


def test_what_one_world_saved_others_go_on_with(tmp_path: pathlib.Path) -> None:
    ((expected,),) = ranks.run(1, _loads, None, None)
    strategies = ("optim", "optim_grads_params", "optim_grads")
    for saving, loading, world in zip(strategies, (*strategies[1:], "no_shard"), (3, 2, 2), strict=True):
        folder = tmp_path / saving
        ranks.run(2, _saves, saving, str(folder))
        for found in ranks.run(world, _loads, loading, str(folder)):
            assert all(one == expected for one in found), (saving, loading)


def _from_torchs(rank: int, world: int, strategy: str) -> bool:
    """Loads torch.optim.Muon's state, and gives it back; the momentum must keep its bits."""
    shapes = [shape for shape in SAVED.shapes if len(shape) == 2]
    program = SAVED._replace(shapes=shapes, dtype=FP32, options={"ns_dtype": FP32})
    model, optimizer = program.made(strategy)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in program.made(None)[0].parameters()]
    torchs = torch.optim.Muon(theirs, lr=0.03, momentum=0.7)
    for p in theirs:
        p.grad = torch.ones_like(p)
    torchs.step()
    names = [name for name, _ in model.named_parameters()]
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.param_groups[0]["momentum"] == 0.7
    whole = optimizer.consolidate_state_dict(to=None)
    assert whole is not None
    for i in range(len(names)):
        assert torch.equal(whole["state"][i]["momentum_buffer"], torchs.state[theirs[i]]["momentum_buffer"])
    back = torch.optim.Muon(theirs)
    back.load_state_dict(whole)
    return bits([s["momentum_buffer"] for s in back.state.values()]) == bits(
        [s["momentum_buffer"] for s in torchs.state.values()]
    )


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_states_from_and_into_torchs(strategy: str) -> None:
    assert all(ranks.run(2, _from_torchs, strategy))
