"""The full text of WeightPublisher's and WeightSubscriber's errors: what is wrong, where, and what would be legal."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weight_sync import Layers, Trainer, weights

import torch_ext

BF16 = torch.bfloat16
OTHER_MODEL = (
    "the delta is of another model (names, dtypes or sizes of its parameters differ from the 9 of the receiver); "
    "legal: the receiver's own"
)
DENSE = "dense tensors in memory are legal"


def _message(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def _trainer() -> Trainer:
    trainer = Trainer("bf16", lr=1e-3)
    trainer.step()
    return trainer


@pytest.mark.parametrize("doing", ["publish()", "full()", "publish_patches()"])
def test_a_model_that_has_other_parameters_now(doing: str) -> None:
    trainer = _trainer()
    call = getattr(trainer.publisher, doing[:-2])
    trainer.model.late = nn.Parameter(torch.ones(3))
    expected = f"{doing}: 'late' was added since the WeightPublisher was made; make a new one"
    assert _message(call, ValueError) == expected
    del trainer.model.late
    frozen = trainer.model.frozen
    trainer.model.frozen = nn.Parameter(torch.ones(34, dtype=BF16), requires_grad=False)
    expected = f"{doing}: 'frozen' became ((34,), torch.bfloat16) since the WeightPublisher was made; make a new one"
    assert _message(call, ValueError) == expected
    del trainer.model.frozen
    expected = f"{doing}: 'frozen' has gone since the WeightPublisher was made; make a new one"
    assert _message(call, ValueError) == expected
    trainer.model.frozen = frozen
    trainer.publisher.publish()


@pytest.mark.parametrize("doing", ["publish()", "full()", "publish_patches()", "WeightPublisher()"])
def test_during_a_backward(doing: str) -> None:
    trainer = _trainer()
    makes: dict[str, Any] = {"WeightPublisher()": lambda: torch_ext.WeightPublisher(trainer.model, trainer.optimizer)}
    call = makes.get(doing) or getattr(trainer.publisher, doing[:-2])
    x = torch.ones((), requires_grad=True)
    x.register_hook(lambda _: call())
    expected = f"{doing} during a backward, which may step: call it between steps"
    assert _message((x * 2).backward, RuntimeError) == expected
    assert trainer.publisher.version == 0


def test_all_weights_of_a_version_that_is_over() -> None:
    """full() is the weights of the last published version, so it raises if a step has changed them since."""
    trainer = _trainer()
    assert _message(trainer.publisher.full, RuntimeError) == (
        '"p0[130, 37]" has changed since version 0; legal: a full message right after a publish'
    )


ENGINES: list[tuple[dict[str, Tensor], type[Exception], str]] = [
    ({"p1": torch.zeros(130, dtype=torch.float16)}, RuntimeError, OTHER_MODEL),
    ({"p1": torch.zeros(131, dtype=BF16)}, RuntimeError, OTHER_MODEL),
    ({"p0": torch.zeros(37, 130, dtype=BF16)}, RuntimeError, OTHER_MODEL),
    (
        {"p1": torch.zeros(130, dtype=BF16, device="meta")},
        ValueError,
        f"tensors['p1'] is torch.strided on meta; {DENSE}",
    ),
    (
        {"p1": torch.zeros(130, dtype=BF16).to_sparse()},
        ValueError,
        f"tensors['p1'] is torch.sparse_coo on cpu; {DENSE}",
    ),
    (
        {"p1": torch.zeros(130, dtype=torch.int16)},
        ValueError,
        "tensors['p1'] is torch.int16; float32, bfloat16 and float16 are legal",
    ),
    (
        {"p1": torch.zeros(1, dtype=BF16).expand(130)},
        ValueError,
        "tensors['p1'] is an expanded tensor, in which several elements share memory",
    ),
]


@pytest.mark.parametrize(("given", "kind", "expected"), ENGINES)
def test_an_engine_of_other_tensors(given: dict[str, Tensor], kind: type[Exception], expected: str) -> None:
    delta = _trainer().publisher.publish()
    tensors = weights(Layers("bf16")) | given

    def applied() -> None:
        torch_ext.WeightSubscriber(tensors).apply(delta)

    assert _message(applied, kind) == expected


def test_an_engine_whose_tensors_lie_otherwise_follows() -> None:
    """The engine's tensors may have other strides than the trainer's."""
    trainer = Trainer("bf16", lr=1e-3)
    tensors = weights(trainer.model)
    tensors["p0"] = tensors["p0"].t().contiguous().t()
    subscriber = torch_ext.WeightSubscriber(tensors)
    trainer.step()
    subscriber.apply(trainer.publisher.publish(), "full")
    assert all(torch.equal(tensors[name], p) for name, p in trainer.model.named_parameters())


def test_versions_that_do_not_follow() -> None:
    trainer = _trainer()
    subscriber = torch_ext.WeightSubscriber(weights(Layers("bf16")))
    first = trainer.publisher.publish()
    trainer.step()
    second = trainer.publisher.publish()
    lost = (
        "version 2 comes on top of 1, the receiver is at 0: versions between were lost, or come later; legal: version "
        "1, or a full message"
    )
    assert _message(lambda: subscriber.apply(second), RuntimeError) == lost
    assert subscriber.version == 0
    subscriber.apply([second, first])
    assert subscriber.version == 2


def test_a_publisher_that_cannot_be_made() -> None:
    model = nn.Linear(3, 3)
    expected = (
        "optimizer is torch.optim.adamw.AdamW; torch_ext.AdamW, Adam, AdamW8bit and Muon note what their steps change"
    )
    adamw = torch.optim.AdamW(model.parameters())
    assert _message(lambda: torch_ext.WeightPublisher(model, adamw), ValueError) == expected


def test_averages_that_cannot_be_kept() -> None:
    params = list(nn.Linear(3, 3).to(BF16).named_parameters())
    options: Any = {"ema_decay": 0.9, "ema_dtype": torch.float8_e4m3fn}
    assert _message(lambda: torch_ext.AdamW(params, **options), ValueError) == (
        "ema_dtype is torch.float8_e4m3fn; torch.bfloat16, '24bit' (bfloat16 and 8 more bits) and torch.float32 are "
        "legal: an average at a decay of 0.999 moves by less than the distance between 8-bit "
        "numbers"
    )
    options = {"ema_decay": 0.9, "policy": {"main_params_dtype": None}}
    assert _message(lambda: torch_ext.AdamW(params, **options), ValueError) == (
        "ema_decay: 'weight' is in torch.bfloat16 without a master, and an average needs more than 16 bits of each "
        "weight: leave main_params_dtype at its default (a master), train in float32, or leave ema_decay out"
    )


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_would_use_memory_that_is_not_its_own(how: Callable[[Any], Any]) -> None:
    """Both use memory of the library, which is freed when the original is."""
    trainer = _trainer()
    subscriber = torch_ext.WeightSubscriber(weights(Layers("bf16")))
    assert "a WeightSubscriber cannot be copied or pickled: it writes to" in _message(
        lambda: how(subscriber), TypeError
    )
    assert "cannot be copied or pickled: it notes what" in _message(lambda: how(trainer.publisher), TypeError)
