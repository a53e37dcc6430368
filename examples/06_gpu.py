"""A fine-tuning loop on a GPU: clip and step in a CUDA graph, a schedule in a tensor, offload between phases.

On a GPU the host is often too slow: a step of many small tensors ends before the next one is queued. Clip and step are
captured into a CUDA graph once and replayed. They never wait for the device: learning rate and gradients are read
from fixed addresses, and a step whose gradients are not finite is skipped on the device. Between phases of training
something else needs the memory (here an evaluation), so gradients and states are moved to the host.

Without a GPU the same loop runs on the CPU, where nothing is captured: only `Captured` differs.

    python examples/06_gpu.py
"""

import math
import pathlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[1])
)  # the repository's root; not needed when installed
import torch_ext

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PHASES, STEPS, BATCH, WORDS, WIDTH = 3, 30, 32, 64, 64
LR, WARM_UP = 4e-3, 10


class Captured:
    """Wraps a function without arguments: on a GPU the first call captures it into a CUDA graph and every call replays
    that; on a CPU it is simply called. Memory that the function reads and writes must keep its address."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        if DEVICE.type == "cpu":
            return self._function()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self._function()
        self._graph.replay()  # the first time too: a capture executes nothing
        assert self._result is not None
        return self._result

    def forget(self) -> None:
        """Drops the graph. Call it before the memory that the function uses is moved."""
        self._graph = self._result = None


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Returns words and, as the target of each, a function of the word before it."""
    words = torch.randint(WORDS, (BATCH, 16), generator=torch.Generator().manual_seed(seed))
    pinned = words.pin_memory() if DEVICE.type == "cuda" else words  # copied while the device works
    there = pinned.to(DEVICE, non_blocking=True)
    return there, (5 * there.roll(1, 1) + 3) % WORDS


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        return self.out(torch.nn.functional.gelu(self.mix(torch.cat([x, x.roll(1, 1)], -1))))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    words, targets = batch(seed)
    return nn.functional.cross_entropy(model(words).float().flatten(0, 1), targets.flatten())


def rate(step: int) -> float:
    """The learning rate: warm-up, then a cosine down."""
    total = PHASES * STEPS
    return LR * min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / total))


def train(captures: bool = True, offloads: bool = True) -> tuple[list[float], list[float], int]:
    """Returns the mean loss of every phase, the evaluation after each, and the number of skipped steps."""
    torch.manual_seed(0)
    model = Model().bfloat16().to(DEVICE)
    # A graph would keep a Python number for ever; a tensor on the device is read again by every replay.
    lr = torch.tensor(0.0, dtype=torch.float64, device=DEVICE)
    optimizer = torch_ext.AdamW(model.parameters(), lr=lr, policy=torch_ext.load_policy(model), skip_nonfinite=True)

    def clip_and_step() -> Tensor:
        norm = torch_ext.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        return norm

    update = Captured(clip_and_step)
    means: list[float] = []
    evaluations: list[float] = []
    for phase in range(PHASES):
        torch_ext.onload(model, optimizer)  # does nothing the first time
        total = torch.zeros((), device=DEVICE)
        for i in range(STEPS):
            step = phase * STEPS + i
            loss = loss_of(model, step)
            loss.backward()
            lr.fill_(rate(step))
            if captures and i > 0:  # step 0 creates, or brings back, what the graph uses
                update()
            else:
                clip_and_step()
            optimizer.zero_grad(set_to_none=False)  # gradients keep the address that the graph reads
            total += loss.detach()  # read once per phase: .item() would wait for the device in every step
        means.append(total.item() / STEPS)
        if offloads:
            update.forget()
            torch_ext.offload(model, optimizer, params=False)
        with torch.no_grad():
            evaluations.append(loss_of(model, 1_000_000).item())
    return means, evaluations, optimizer.skipped_steps()


def peak() -> str:
    """Returns the peak of device memory in use, as text."""
    if DEVICE.type == "cpu":
        return "no GPU here: nothing is captured"
    return f"at most {torch.cuda.max_memory_allocated() / 1e6:.0f} MB of {torch.cuda.get_device_name()}"


def main() -> None:
    means, evaluations, skipped = train()
    print("mean loss of each phase:", ", ".join(f"{mean:.3f}" for mean in means))
    print("evaluations:", ", ".join(f"{loss:.3f}" for loss in evaluations), f"({peak()})")
    assert evaluations[-1] < 0.25 * means[0] and skipped == 0, "the model no longer learns"
    plain = train(captures=False, offloads=False)
    assert DEVICE.type != "cpu" or plain == (means, evaluations, skipped), "offload changed something"
    assert abs(plain[1][-1] - evaluations[-1]) < 0.1 * means[0], "capture or offload changed something"
    print("a loop that captures and offloads nothing ends at", f"{plain[1][-1]:.3f}")


if __name__ == "__main__":
    main()
