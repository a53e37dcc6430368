"""Sends versions of weights, of which one in a hundred is lost, repeated, too early, damaged, or another trainer's:
python tests/weight_versions.py --versions 100000 [--seed S]. After each version the engine must have the bits of the
version that it reports, and each fault must have raised its own error.
"""

import argparse
import collections
import pathlib
import random
import re
import sys
from dataclasses import dataclass, field

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).absolute().parent.parent))

import torch
from torch import Tensor, nn

import torch_ext

FAULTS = {
    "lost": r"version \d+ comes on top of \d+, the receiver is at \d+: versions between were lost, or come later",
    "repeated": r"version \d+ was applied already",
    "reordered": r"versions between were lost, or come later",
    "damaged": r"damaged|cut off|has format",
    "foreign": r"is of chain|of another model",
}
"""Each fault, and a pattern of the error that it must raise."""

_SHARE = 0.01
_SIZES = {"matrix": 300, "vector": 7, "norm": 130}


@dataclass
class Found:
    versions: int = 0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    """Versions with wrong bits, and faults that raised no error or another one."""


class _Trainer:
    """A trainer with random gradients and a model so small that a step takes a few microseconds."""

    def __init__(self, seed: int, exact: bool) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self._model = nn.Module()
        for name, size in _SIZES.items():
            values = torch.randn(size, generator=self._draw) * 0.02
            dtype = torch.float32 if name == "norm" else torch.bfloat16
            self._model.register_parameter(name, nn.Parameter(values.to(dtype)))
        self._optimizer = torch_ext.AdamW(self._model.named_parameters(), lr=1e-5)
        self.publisher = torch_ext.WeightPublisher(self._model, self._optimizer, exact=exact)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._model.named_parameters()}

    def next_version(self) -> bytes:
        for p in self._model.parameters():
            p.grad = torch.randn(p.shape, generator=self._draw).to(p.dtype)
        self._optimizer.step()
        return self.publisher.publish()


class _Channel:
    """A trainer, its engine, and the deltas between them."""

    def __init__(self, seed: int, exact: bool) -> None:
        self._draw = random.Random(seed)
        self._trainer, self._stranger = _Trainer(seed, exact), _Trainer(seed + 1, exact)
        self._foreign = self._stranger.next_version()
        self._engine = {name: t.clone() for name, t in self._trainer.weights().items()}
        self._subscriber = torch_ext.WeightSubscriber(self._engine)
        self._last = b""
        self.found = Found()

    def send(self) -> None:
        """Sends the next version, sometimes after a fault."""
        delta = self._trainer.next_version()
        self.found.versions += 1
        fault = ""
        if self._draw.random() < _SHARE and self._last:
            fault = self._draw.choice(list(FAULTS))
            self.found.faults[fault] += 1
            delta = self._fault(fault, delta)
        self._subscriber.apply(delta, "full" if self.found.versions % 10 == 0 else "touched")
        self._last = b"" if fault == "lost" else delta
        self._compare("applied")

    def _fault(self, fault: str, delta: bytes) -> bytes:
        """Sends a faulty message, which must raise; returns the delta that updates the engine afterwards."""
        before = {name: t.clone() for name, t in self._engine.items()}
        wrong, right = delta, delta
        if fault in ("lost", "reordered"):
            wrong = self._trainer.next_version()
            self.found.versions += 1
            right = torch_ext.merge_deltas([wrong, delta])
        elif fault == "repeated":
            wrong = self._last
        elif fault == "foreign":
            wrong = self._foreign
        else:
            at = self._draw.randrange(len(delta))
            cut, bit = self._draw.random() < 0.2, 1 << self._draw.randrange(8)
            wrong = delta[:at] if cut else delta[:at] + bytes([delta[at] ^ bit]) + delta[at + 1 :]
        if fault == "lost":
            right = self._trainer.publisher.full()  # which is no fault twice
        version = self._subscriber.version
        try:
            self._subscriber.apply(wrong)
            self._wrong(f"{fault}, and applied")
        except (ValueError, RuntimeError) as error:
            if not re.search(FAULTS[fault], str(error)):
                self._wrong(f"{fault}, and named {error}")
        if self._subscriber.version != version or not _equal(self._engine, before):
            self._wrong(f"{fault}, refused, and written")
        return right

    def _compare(self, what: str) -> None:
        if self._subscriber.version != self._trainer.publisher.version:
            self._wrong(f"{what}, and at version {self._subscriber.version}")
        if not _equal(self._engine, self._trainer.weights()):
            self._wrong(f"{what}, and other bits")

    def _wrong(self, what: str) -> None:
        self.found.wrong.append(f"version {self.found.versions}: {what}")


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def run(versions: int, seed: int, exact: bool = False) -> Found:
    channel = _Channel(seed, exact)
    while channel.found.versions < versions:
        channel.send()
    return channel.found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(options.versions, options.seed)
    print(f"{found.versions} versions, seed {options.seed}: {dict(found.faults)}; {len(found.wrong)} wrong")
    print("\n".join(found.wrong[:20]))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
