"""torch.set_default_device(...) and set_default_dtype(...) affect what users create; no bit of this library's results
may depend on them.

Many scripts for GPUs begin with torch.set_default_device("cuda"). Here "meta" stands in for it: a tensor that is
created on it by mistake has no content at all.
"""

import contextlib
import copy
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import bits

import torch_ext


@contextlib.contextmanager
def defaults(device: str | None, dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default device and dtype in this context."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


DEFAULTS = {
    "device": ("meta", torch.float32),
    "float64": (None, torch.float64),
    "bfloat16": (None, torch.bfloat16),
}
OPTIMIZERS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "fp32": (torch_ext.AdamW, torch.float32, {}),
    "bf16": (torch_ext.AdamW, torch.bfloat16, {}),
    "8bit": (torch_ext.AdamW, torch.bfloat16, {"states": "8bit"}),
    "fp16": (torch_ext.AdamW, torch.float16, {"skip_nonfinite": True}),
    "on the host": (torch_ext.AdamW, torch.bfloat16, {"offload_fraction": 0.5}),
    "in backward": (torch_ext.AdamW, torch.bfloat16, {"step_in_backward": True}),
    "Muon": (torch_ext.Muon, torch.bfloat16, {"states": "bf16_remainder", "ns_dtype": torch.float32}),
}


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.Linear(70, 5)).to(dtype)


class Run:
    """A training that uses every feature once, in a fixed order. `dtype` is the model's."""

    def __init__(self, kind: str, folder: pathlib.Path) -> None:
        self.make, self.dtype, self.options = OPTIMIZERS[kind]
        self.file = folder / "checkpoint.pt"
        self.model = model_of(self.dtype)
        self.batches = [torch.randn(8, 40).to(self.dtype) for _ in range(20)]
        self.lr = torch.tensor(0.01)

    def run(self) -> None:
        params = self.model.named_parameters()
        self.optimizer: Any = self.make(params, lr=self.lr, ema_decay=0.9, seed=3, **self.options)
        for action in (
            *(self.train, self.clip, self.write, self.swap, self.copy, self.offload, self.scaled, self.measure),
            *(self.save, self.train, self.save_at_rest, self.train, self.publish, self.train, self.diagnose),
        ):
            action()

    def train(self, before: Callable[[], Any] = lambda: None) -> None:
        """Takes a step; `before` is called between backward and step."""
        self.model(self.batches.pop()).square().mean().backward()
        before()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        if not self.optimizer.step_in_backward:
            self.train(lambda: torch_ext.clip_grad_norm_(self.optimizer, 0.1))

    def write(self) -> None:
        next(self.model.parameters()).data.mul_(0.5)
        self.train()
        self.optimizer.resync_masters()

    def swap(self) -> None:
        with self.optimizer.ema_weights():
            pass
        with self.optimizer.master_weights():
            pass
        self.train()

    def copy(self) -> None:
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        self.model, self.optimizer = pickle.loads(pickle.dumps((self.model, self.optimizer)))
        self.train()

    def offload(self) -> None:
        torch_ext.offload(self.model, self.optimizer)
        torch_ext.onload(self.model, self.optimizer)
        self.train()

    def scaled(self) -> None:
        if self.optimizer.step_in_backward:
            return
        scaler = self.optimizer.policy.grad_scaler() or torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(self.model(self.batches.pop()).square().mean()).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def measure(self) -> None:
        self.optimizer.measure_health()
        self.train()
        assert str(self.optimizer.health())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, **options: Any) -> None:
        torch_ext.save(self.state(), self.file, **options)
        saved = torch_ext.load(self.file)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def save_at_rest(self) -> None:
        self.save(states="at_rest")

    def publish(self) -> None:
        self.publisher = torch_ext.WeightPublisher(self.model, self.optimizer)
        self.train()

    def diagnose(self) -> None:
        torch_ext.diagnose(self.model, self.optimizer)

    def everything(self) -> list[bytes]:
        """Returns the bytes of all weights and states, and asserts that all are on the CPU."""
        states = self.optimizer.state_dict()["state"].values()
        found: list[Tensor] = [*self.model.parameters(), *(t for entry in states for t in entry.values())]
        assert all(t.device.type == "cpu" for t in found)
        return [bits(t.detach().clone()) for t in found]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_defaults_of_torch_change_no_bit(kind: str, default: str, tmp_path: pathlib.Path) -> None:
    plain, other = Run(kind, tmp_path), Run(kind, tmp_path)
    plain.run()
    with defaults(*DEFAULTS[default]):
        other.run()
    assert other.everything() == plain.everything()
