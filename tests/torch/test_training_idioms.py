"""Training loops with tools that torch has besides its optimizers: schedulers that cycle betas, parametrizations,
pruning, averaged models, functional calls, learning-rate finders, several optimizers. An fp32 model under
torch_ext.AdamW must have the losses of one under torch.optim.AdamW, and the same warnings."""

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler, swa_utils

import torch_ext

Make = Callable[..., torch.optim.Optimizer]
MAKERS: list[Make] = [torch.optim.AdamW, torch_ext.AdamW]

IDIOMS: dict[str, Callable[[Make], list[float]]] = {}


def idiom(f: Callable[[Make], list[float]]) -> Callable[[Make], list[float]]:
    """Registers a training loop: a function of the optimizer class that returns its losses."""
    IDIOMS[f.__name__] = f
    return f


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
    return x, 2 * x[:, :3].sin()


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    x, y = batch(step)
    return functional.mse_loss(model(x), y)


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    after: Callable[[int, float], Any] | None = None,
) -> list[float]:
    """Trains and returns the losses. after: called with each step and its loss."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after(step, losses[-1])
    return losses


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=5, cycle_momentum=True),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(o, 15)], [5]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 5)),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    def run(make: Make) -> list[float]:
        model = net()
        optimizer = make(model.parameters(), lr=1e-2)
        scheduler = SCHEDULERS[name](optimizer)
        return trained(model, optimizer, range(20), lambda *_: scheduler.step())

    same(run)


@idiom
def reduce_on_plateau(make: Make) -> list[float]:
    model = net()
    optimizer = make(model.parameters(), lr=3e-2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.1)
    losses = trained(model, optimizer, range(20), lambda _, loss: scheduler.step(loss))
    assert optimizer.param_groups[0]["lr"] < 3e-2
    return losses


@idiom
def settings_that_change_in_training(make: Make) -> list[float]:
    """Changes lr, betas, eps and weight decay between steps, one value at a time."""
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)

    def change(step: int, _: float) -> None:
        """Changes one value at a time."""
        k = step // 4 + 1
        turns = [
            ("lr", torch.tensor(0.01 * k)),
            ("betas", (0.9 - 0.1 * k, 0.95)),
            ("eps", 1e-3 * k),
            ("weight_decay", 0.1 * k),
        ]
        key, value = turns[step % 4]
        optimizer.param_groups[0][key] = value

    return trained(model, optimizer, range(12), change)


@idiom
def pruned_before(make: Make) -> list[float]:
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    losses = trained(model, make(model.parameters(), lr=1e-2), range(10))
    prune.remove(model[0], "weight")
    return losses + trained(model, make(model.parameters(), lr=1e-2), range(10, 15))


@idiom
def pruned_in_training(make: Make) -> list[float]:
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)
    losses = trained(model, optimizer, range(8))
    torch.manual_seed(1)
    prune.random_unstructured(model[2], "weight", 0.3)
    return losses + trained(model, optimizer, range(8, 16))


@idiom
def weight_norm_and_spectral_norm(make: Make) -> list[float]:
    model = net()
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return trained(model, make(model.parameters(), lr=1e-2), range(20))


@idiom
def orthogonal(make: Make) -> list[float]:
    model = net()
    parametrizations.orthogonal(model[0])
    return trained(model, make(model.parameters(), lr=1e-2), range(20))


@idiom
def averaged_model(make: Make) -> list[float]:
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    scheduler = swa_utils.SWALR(optimizer, swa_lr=5e-3, anneal_epochs=5)
    losses = trained(model, optimizer, range(20), lambda *_: (average.update_parameters(model), scheduler.step()))
    return [*losses, loss_of(average, 99).item()]


@idiom
def functional_calls(make: Make) -> list[float]:
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)
    params = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(torch.func.functional_call(model, values, (x,)), y)

    losses = []
    for step in range(10):
        x, y = batch(step)
        detached = {name: p.detach() for name, p in params.items()}
        grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(detached, x, y)
        for name, p in params.items():
            p.grad = grads[name].mean(0)
        optimizer.step()
        losses.append(loss_of(model, step).item())
    return losses


@idiom
def learning_rate_finder(make: Make) -> list[float]:
    model = net()
    optimizer = make(model.parameters(), lr=1e-6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def double(*_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 2

    losses = trained(model, optimizer, range(12), double)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.param_groups[0]["lr"] = 1e-2
    return losses + trained(model, optimizer, range(8))


@idiom
def back_to_the_best(make: Make) -> list[float]:
    model = net()
    optimizer = make(model.parameters(), lr=5e-2)
    best: list[Any] = [float("inf"), None]

    def keep(_: int, loss: float) -> None:
        if loss < best[0]:
            best[:] = loss, copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    losses = trained(model, optimizer, range(10), keep)
    model.load_state_dict(best[1][0])
    optimizer.load_state_dict(best[1][1])
    return losses + trained(model, optimizer, range(10, 15))


@idiom
def two_that_play_against_each_other(make: Make) -> list[float]:
    torch.manual_seed(1)
    maker, judge = nn.Linear(4, 12), nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))
    of_maker, of_judge = (make(m.parameters(), lr=1e-3, betas=(0.5, 0.9)) for m in (maker, judge))
    losses = []
    for step in range(10):
        made = maker(torch.randn(16, 4, generator=torch.Generator().manual_seed(step)))
        of_judge.zero_grad()
        judged = functional.softplus(-judge(batch(step)[0])).mean() + functional.softplus(judge(made.detach())).mean()
        judged.backward()
        of_judge.step()
        of_maker.zero_grad()
        fooled = functional.softplus(-judge(made)).mean()
        fooled.backward()
        of_maker.step()
        losses += [judged.item(), fooled.item()]
    return losses


@idiom
def an_optimizer_for_each_parameter_in_a_hook(make: Make) -> list[float]:
    model = net()
    optimizers = {p: make([p], lr=1e-2) for p in model.parameters()}

    def step_it(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_it)
    losses = []
    for step in range(10):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
    return losses


@idiom
def beside_lbfgs(make: Make) -> list[float]:
    model = net()
    optimizer = make(model[0].parameters(), lr=1e-2)
    beside = torch.optim.LBFGS(model[2].parameters(), lr=0.1, max_iter=2)

    def closure(step: int) -> Tensor:
        beside.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    losses = []
    for step in range(4):
        beside.step(lambda step=step: closure(step).item())
        optimizer.zero_grad()
        losses.append(closure(step).item())
        optimizer.step()
    return losses


@idiom
def a_layer_more(make: Make) -> list[float]:
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)
    losses = trained(model, optimizer, range(5))
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 1e-3})
    return losses + trained(model, optimizer, range(5, 11))


@idiom
def converted_there_and_back(make: Make) -> list[float]:
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)
    losses = trained(model, optimizer, range(4))
    for swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            model.to(torch.float64).to(torch.float32)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        losses += trained(model, optimizer, range(4, 8))
    return losses


@idiom
def resized_in_training(make: Make) -> list[float]:
    """As transformers' resize_token_embeddings: the same parameter with new data. Its state is removed, and a
    new one is created."""
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)
    losses = trained(model, optimizer, range(4))
    last = model[2]
    for p in (last.weight, last.bias):
        p.data = torch.cat([p.data, p.data[:1]])
        optimizer.state.pop(p)
    model.append(nn.Linear(4, 3))
    optimizer.add_param_group({"params": model[3].parameters()})
    return losses + trained(model, optimizer, range(4, 9))


@idiom
def under_anomaly_detection(make: Make) -> list[float]:
    model = net()
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return trained(model, make(model.parameters(), lr=1e-2), range(4))


@idiom
def evaluated_in_inference_mode(make: Make) -> list[float]:
    model = net()
    optimizer, evaluated = make(model.parameters(), lr=1e-2), []

    def evaluate(*_: Any) -> None:
        with torch.inference_mode():
            evaluated.append(loss_of(model, 99).item())

    return trained(model, optimizer, range(6), evaluate) + evaluated


@idiom
def random_numbers_beside_it(make: Make) -> list[float]:
    """Rounding to bf16 must not draw from torch's random number generators."""
    model = net().bfloat16()
    optimizer = make(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [torch.rand(()).item()]


def outcome(run: Callable[[Make], list[float]], make: Make) -> tuple[list[float], set[str]]:
    """Returns the losses and the texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return run(make), {str(each.message) for each in caught}


def same(run: Callable[[Make], list[float]]) -> None:
    """Asserts that our optimizer has the losses and the warnings of torch's."""
    (theirs, warned), (ours, said) = (outcome(run, make) for make in MAKERS)
    assert said == warned
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name: str) -> None:
    same(IDIOMS[name])


def test_a_parameter_that_was_replaced_and_the_new_one_share_memory() -> None:
    """weight_norm replaces the parameter, but the optimizer still has the old one, which no longer takes part in
    training."""
    model = net()
    optimizer = torch_ext.AdamW(model.parameters(), lr=1e-2)
    parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match="parameter 0 of group 0 and parameter 1 of group 1 share memory"):
        optimizer.add_param_group({"params": model[0].parametrizations.parameters()})
    assert len(optimizer.param_groups) == 1
    again = torch_ext.AdamW(model.parameters(), lr=1e-2)
    assert trained(model, again, range(5))[-1] < loss_of(net(), 0).item()
