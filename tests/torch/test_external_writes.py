"""Weights that other code writes between steps (docs/specification.md, D7): every way of writing, how much of a write
is seen, and what does not count as one."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from training import WITH_MASTER, bits, everything, params_of, policy_of, set_grads, train
from watched_model import Model, made, others, quiet_step

import torch_ext

# -- every way of writing -------------------------------------------------------------------------------------------


def in_numpy(p: Tensor, value: Tensor) -> None:
    bytes_of = p.detach().view(-1).view(torch.uint8).numpy()
    bytes_of[:] = value.contiguous().view(-1).view(torch.uint8).numpy()


def in_storage(p: Tensor, value: Tensor) -> None:
    p.untyped_storage().copy_(value.contiguous().untyped_storage())


def broadcast(p: Tensor, value: Tensor) -> None:
    value = value.contiguous()
    dist.broadcast(value, 0)
    p.data.copy_(value)
    dist.broadcast(p.data, 0)


def in_place(p: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        p.copy_(value)


def new_memory(p: nn.Parameter, value: Tensor) -> None:
    p.data = value.clone()


WRITES: dict[str, Callable[[nn.Parameter, Tensor], None]] = {
    "p.data.copy_": lambda p, value: p.data.copy_(value),
    "p.data.mul_": lambda p, value: p.data.mul_(0).add_(value),
    "p.data =": new_memory,
    "p.copy_": in_place,
    "numpy": in_numpy,
    "storage": in_storage,
    "dist.broadcast": broadcast,
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", WITH_MASTER)
@pytest.mark.parametrize("write", WRITES)
def test_D7_every_write_takes_effect_without_a_call(write: str, name: str) -> None:
    model, optimizer = made(name)
    values = others(model)
    for p, value in zip(model.parameters(), values, strict=True):
        WRITES[write](p, value)
    quiet_step(model, optimizer)
    assert [bits(p) for p in model.parameters()] == [bits(value) for value in values]
    assert optimizer.external_writes() > 0


@pytest.mark.parametrize("name", WITH_MASTER)
def test_D7_vector_to_parameters(name: str) -> None:
    model, optimizer = made(name)
    values = others(model)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(values), model.parameters())
    quiet_step(model, optimizer)
    assert [bits(p) for p in model.parameters()] == [bits(value) for value in values]


@pytest.mark.parametrize("name", ["bf16", "bf16_remainder"])
def test_D7_a_flat_buffer_that_parameters_view(name: str) -> None:
    model = Model(name)
    params = list(model.parameters())
    flat = torch.cat([p.detach().view(-1) for p in params])
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.data = part.view(p.shape)
    optimizer = torch_ext.AdamW(params, lr=1e-2, weight_decay=0.0, policy=policy_of(name))
    train(optimizer, range(3))
    flat.uniform_(-1, 1)
    expected = [bits(p) for p in params]
    quiet_step(model, optimizer)
    assert [bits(p) for p in params] == expected


def test_D7_assign_leaves_an_orphan_and_says_so() -> None:
    """load_state_dict(assign=True) gives the model new parameters; the optimizer still has the old ones, and warns that
    none of them gets a gradient."""
    model, optimizer = made("bf16")
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    model.weights[0].grad = torch.zeros_like(model.weights[0])
    with pytest.warns(UserWarning, match=r"no gradient for any of 6 parameters.*assign=True"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # only the first step warns


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["bf16", "bf16_remainder"])
@pytest.mark.parametrize("way", ["copy_", "to_local().mul_", "to_local().copy_ without a trace"])
def test_D7_dtensors(way: str, name: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    whole = params_of(name, [(4, 4096)])[0]
    p = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    optimizer = torch_ext.AdamW([p], lr=1e-2, weight_decay=0.0, policy=policy_of(name))

    def step(factor: float) -> None:
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(3)).to(p.dtype) * factor
        p.grad = distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()

    step(1.0)
    optimizer.state[p]["exp_avg"].zero_()
    before = optimizer.external_writes()
    with torch.no_grad():
        if way == "copy_":
            p.copy_(distribute_tensor(torch.ones_like(whole), mesh, [Shard(0)]))
        elif way == "to_local().mul_":
            p.to_local().mul_(0.5)
        else:
            p.to_local().data.copy_(torch.ones_like(whole))
        expected = bits(p.to_local())
    step(0.0)
    assert bits(p.to_local()) == expected
    assert optimizer.external_writes() > before


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_weight_that_is_stepped_through_a_view_is_stepped_where_it_lies_now(name: str) -> None:
    """The operator takes tensors in memory order, so a channels_last weight is passed as a view. `p.data =` gives the
    weight new memory, and a cached view would still step the old."""
    original = params_of(name, [(2, 3, 4, 5)])[0].detach().to(memory_format=torch.channels_last)
    moved, stays = nn.Parameter(original.clone()), nn.Parameter(original.clone())
    optimizers = [torch_ext.AdamW([p], lr=1e-2, policy=policy_of(name)) for p in (moved, stays)]
    for step in range(4):
        for optimizer in optimizers:
            train(optimizer, [step])
        moved.data = moved.data.clone(memory_format=torch.preserve_format)
    assert bits(moved) == bits(stays) != bits(original)


@pytest.mark.parametrize("released", [False, True])
def test_a_weight_without_a_gradient_is_watched(released: bool) -> None:
    """A single element between the samples is written: only the version counter shows it, and the steps in between did
    not increase the counter."""
    model = Model("bf16")
    optimizer = torch_ext.AdamW(
        model.parameters(), lr=0.0, weight_decay=0.0, policy=policy_of("bf16"), step_in_backward=released
    )
    first, second, *_ = model.parameters()

    def step(*params: Tensor) -> None:
        torch.stack([(p * 0.5).sum().float() for p in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(first, second)
    for written, other in ((second, first), (first, second)) * 2:
        step(other)
        with torch.no_grad():
            written.view(-1)[33].add_(1)  # a single write
        expected = bits(written)
        step(first, second)
        assert bits(written) == expected


def test_a_weight_that_moves_is_a_write_and_costs_no_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator rejects the first call after a weight has moved; the retry uses the same plan, and later steps
    repeat that one (torch_ext/optim/repeated_step.py)."""
    model, optimizer = made("bf16")
    plan = optimizer._stepper.plan
    assert plan is not None
    run, calls = plan.device.run, list[object]()

    def counted(*arguments: object) -> None:
        calls.append(arguments)
        run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(plan.device, "run", counted)
    for elements in (0, model.weights[0].numel() + model.weights[2].numel()):
        before = optimizer.external_writes()
        for p in (model.weights[0], model.weights[2]):
            p.data = p.data.clone() + bool(elements)
        expected = [bits(p) for p in model.parameters()]
        for expected_calls in (2, 0):
            calls.clear()
            quiet_step(model, optimizer)
            assert len(calls) == expected_calls
        assert optimizer.external_writes() - before == elements
        assert [bits(p) for p in model.parameters()] == expected
        assert optimizer._stepper.plan is plan


def test_D7_a_master_that_is_written_in_a_state_dict_gives_way_to_its_weight() -> None:
    """torch.distributed.checkpoint.load writes masters like this. If the model is not loaded too, its weights win and
    must not move."""
    model, optimizer = made("bf16")
    values = [bits(p) for p in model.parameters()]
    quiet_step(model, optimizer)  # the state has been read, so entries count as handed out
    for entry in optimizer.state_dict()["state"].values():
        entry["master_param"].add_(1)
    quiet_step(model, optimizer)
    assert [bits(p) for p in model.parameters()] == values
    assert optimizer.external_writes() == sum(p.numel() for p in model.parameters())


# -- how much of a write is seen -------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 31, 32, 2000, 4096, 9000, 18431])
def test_D7_2048_neighbours_beside_fp32_masters_are_seen_wherever_they_are(start: int) -> None:
    model, optimizer = made("bf16")
    p = model.weights[0]
    p.data.view(-1)[start : start + 2048] += 1
    expected = bits(p)
    quiet_step(model, optimizer)
    assert bits(p) == expected


@pytest.mark.parametrize("name, seen", [("bf16", False), ("bf16_remainder", True), ("8bit", True)])
def test_D7_one_element_between_the_samples_needs_the_call(name: str, seen: bool) -> None:
    """The documented limit: with fp32 masters, a write that changes no version counter and is between two samples goes
    unnoticed until resync_masters()."""
    model, optimizer = made(name)
    p = model.weights[0]
    p.data.view(-1)[1000] += 1
    expected, stale = bits(p), optimizer.external_writes()
    if not seen:
        assert optimizer.resync_masters() == 1
    quiet_step(model, optimizer)
    assert bits(p) == expected
    assert optimizer.external_writes() - stale == (1024 if seen else 0)


def test_D7_a_counter_is_enough_for_one_element() -> None:
    """A write to one element that changes the version counter is noticed."""
    model, optimizer = made("bf16")
    with torch.no_grad():
        model.weights[0].view(-1)[1000] += 1
    expected = bits(model.weights[0])
    quiet_step(model, optimizer)
    assert bits(model.weights[0]) == expected and optimizer.external_writes() == 1


def test_D7_only_the_block_that_was_written_loses_its_remainders() -> None:
    """A block of remainders has 1024 elements; the others keep theirs."""
    written, plain = (made("bf16_remainder") for _ in range(2))
    written[0].weights[0].data.view(-1)[5000] += 1
    for _, optimizer in (written, plain):
        set_grads([p for g in optimizer.param_groups for p in g["params"]], 3)
        optimizer.step()
    masters = [o.state_dict()["state"][0]["master_param"].view(-1) for _, o in (written, plain)]
    same = masters[0] == masters[1]
    assert same[:4096].all() and same[5120:].all() and not same[4096:5120].all()


# -- what is no write -------------------------------------------------------------------------------------------------


def resumed(model: Model, optimizer: torch_ext.AdamW) -> None:
    """Saves, then loads the state between two loads of the weights, so both orders occur."""
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)


def clipped(model: Model, optimizer: torch_ext.AdamW) -> None:
    set_grads(model.parameters(), 3)
    torch_ext.clip_grad_norm_(optimizer, 0.1)


def swapped(model: Model, optimizer: torch_ext.AdamW) -> None:
    """Swaps an average in, saves, and swaps it out."""
    own = [p.detach().clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), others(model), strict=True):
        p.data.copy_(value)
    copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for p, value in zip(model.parameters(), own, strict=True):
        p.data.copy_(value)


def swapped_memory(model: Model, optimizer: torch_ext.AdamW) -> None:
    """Swaps in other tensors through `.data`, and the originals out again."""
    own = [p.data for p in model.parameters()]
    for p, value in zip(model.parameters(), others(model), strict=True):
        p.data = value
    optimizer.state_dict()
    for p, value in zip(model.parameters(), own, strict=True):
        p.data = value


OWN: dict[str, Callable[[Model, torch_ext.AdamW], object]] = {
    "nothing": lambda model, optimizer: None,
    "gradients that are dropped": lambda model, optimizer: (set_grads(model.parameters(), 9), optimizer.zero_grad()),
    "a clip": clipped,
    "a resume": resumed,
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "reading opt.state": lambda model, optimizer: [optimizer.state[p] for p in model.parameters()],
    "an average swapped in, saved, swapped out": swapped,
    "the same by pointers": swapped_memory,
    "a forward under no_grad": lambda model, optimizer: [p.detach().float().sum() for p in model.parameters()],
    "copies of the model": lambda model, optimizer: copy.deepcopy(model),
}


@pytest.mark.parametrize("name", WITH_MASTER)
@pytest.mark.parametrize("what", OWN)
def test_what_is_no_write_changes_no_bit(what: str, name: str) -> None:
    (model, optimizer), (_, plain) = made(name), made(name)
    for step in range(3, 6):
        OWN[what](model, optimizer)
        train(optimizer, [step])
        train(plain, [step]) if what != "a clip" else None
    assert optimizer.external_writes() == 0
    if what != "a clip":
        assert everything(optimizer) == everything(plain)


@pytest.mark.parametrize("name", WITH_MASTER)
def test_saved_masters_during_a_swap(name: str) -> None:
    """While other weights are swapped in, a saved fp32 master is still that of the original weight. A remainder means
    nothing next to another weight, so the current weight is saved as its own master."""
    model, optimizer = made(name)
    kept = [e["master_param"].clone() for e in optimizer.state_dict()["state"].values()]
    values = others(model)
    for p, value in zip(model.parameters(), values, strict=True):
        p.data.copy_(value)
    saved = [e["master_param"] for e in copy.deepcopy(optimizer.state_dict())["state"].values()]
    expected = kept if "master_param" in optimizer.state[model.weights[0]] else [v.float() for v in values]
    assert [bits(m) for m in saved] == [bits(m) for m in expected]


# -- "error" and "ignore" ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_MASTER)
def test_error_names_a_silent_write_and_changes_nothing(name: str) -> None:
    model, optimizer = made(name, on_external_write="error")
    train(optimizer, range(3, 5))
    model.weights[1].data.mul_(1.5)
    before = everything(optimizer)
    set_grads(model.parameters(), 5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'weights.1' \(\d+ elements\) no longer.*resync_masters"):
            optimizer.step()
        assert everything(optimizer) == before
    assert optimizer.resync_masters() > 0
    optimizer.step()
    assert optimizer.external_writes() == 0


@pytest.mark.parametrize("loud", [False, True], ids=["p.data", "p"])
@pytest.mark.parametrize("name", ["bf16_remainder", "8bit"])
def test_ignore_leaves_what_was_written_above_the_old_remainder(name: str, loud: bool) -> None:
    """With remainders the weight is the master's only upper half: the written value stays, and nothing can overwrite
    it."""
    model, optimizer = made(name, on_external_write="ignore")
    remainders = [optimizer.state[p]["master_remainder"].clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), others(model), strict=True):
        (p.detach() if loud else p.data).copy_(value)
    quiet_step(model, optimizer)
    for p, value, remainder in zip(model.parameters(), others(model), remainders, strict=True):
        assert torch.equal(p, value)
        moved = optimizer.state[p]["master_remainder"].int() - remainder.int()
        assert int(moved.abs().max()) <= 1, "where both together are a tie, which has another remainder"
        assert int((moved != 0).sum()) <= 1
    assert optimizer.external_writes() == 0


def test_ignore_lets_the_master_overwrite_a_silent_write() -> None:
    """With fp32 masters and "ignore", the next step restores the weight from its master."""
    (model, ignoring), (_, plain) = made("bf16", on_external_write="ignore"), made("bf16")
    for p in model.parameters():
        p.data.zero_()
    for optimizer in (ignoring, plain):
        train(optimizer, [3])
    assert everything(ignoring) == everything(plain)


# -- writes by the operators themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_MASTER)
def test_a_raw_operator_that_writes_a_weight_is_somebody_else(name: str) -> None:
    """A raw operator call that writes one element, which is no sample: only the version counter shows it."""
    model, optimizer = made(name)
    p = model.weights[0]
    flat, change = p.detach().view(-1), torch.zeros(p.numel())
    change[1000] = 1.0
    torch.ops.torch_ext.bucket_accumulate_([flat], [change])
    expected, stale = bits(p), optimizer.external_writes()
    quiet_step(model, optimizer)
    assert bits(p) == expected and optimizer.external_writes() > stale


@pytest.mark.parametrize("name", ["fp32", *WITH_MASTER])
def test_a_step_counts_every_parameter_up_once_and_no_state(name: str) -> None:
    """Each step increases every parameter's version counter by exactly 1, and no state's."""
    model, optimizer = made(name)
    states = [dict(optimizer.state[p]) for p in model.parameters()]
    seen = [[t._version for t in (p, *state.values())] for p, state in zip(model.parameters(), states, strict=True)]
    for step in range(3, 6):
        set_grads(model.parameters(), step)
        optimizer.step()
    now = [[t._version for t in (p, *state.values())] for p, state in zip(model.parameters(), states, strict=True)]
    assert now == [[version + 3, *others] for version, *others in seen]
    assert optimizer.external_writes() == 0
