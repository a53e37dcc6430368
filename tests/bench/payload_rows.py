"""The row `payload`: how many bytes it takes to publish the weights of a byte-level GPT in training, compared with the
entropy of the changes."""

import copy
import math
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ext
from bench.figures import Bar
from bench.publish_rows import one_thread
from bench.row import Bench
from bench.timing import spread

_STEPS = (1, 4, 16)  # steps from one published version to the next
_BARS = {1: Bar(1.15, 0.90, True), 4: Bar(1.35, 1.20, True), 16: Bar(1.35, 1.20, True)}
_EXACT = {16: Bar(1.10, 1.05, True)}
_POSITIONS = {1e-6: Bar(4, 5), 1e-5: Bar(5.5, 7)}
_DENSE = Bar(0.70, 0.67, True)

_POSITION_AND_VALUE = 48  # bits of a change as a 32-bit position and a bf16 value
_BLOCK = 8192  # weights per block of the entropy: each block has its own probability of a change
_LARGE = 1_000_000  # with so many parameters or more, the large model is measured, whose figures are claims


class ByteGPT(nn.Module):
    """A small GPT over bytes, with tied embeddings."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, max(width // 64, 1), 4 * width, 0.0, F.gelu, 1e-5, True, True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Returns the loss in nats per byte. text: int64 [batch, context + 1]."""
        x = self.bytes(text[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(self.context, dtype=x.dtype)
        logits = self.layers(x, mask, is_causal=True) @ self.bytes.weight.t()
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())


class Training:
    """Trains a model in bf16 with fp32 master weights, on the texts of Python's help()."""

    def __init__(self, model: ByteGPT, lr: float, seed: int) -> None:
        self.model = model
        self.optimizer = torch_ext.AdamW(model.named_parameters(), lr=lr, weight_decay=0.0)
        self._draw = torch.Generator().manual_seed(seed)
        text = "".join(pydoc_data.topics.topics.values()).encode()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def step(self) -> None:
        window = self.model.context + 1
        begins = torch.randint(self._text.numel() - window, (8,), generator=self._draw)
        self.model(torch.stack([self._text[b : b + window] for b in begins]).long()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def at(self, lr: float, seed: int) -> "Training":
        """Returns a copy of this training that continues with another learning rate."""
        other = Training(copy.deepcopy(self.model), lr, seed)
        other.optimizer.load_state_dict(self.optimizer.state_dict())
        for group in other.optimizer.param_groups:
            group["lr"] = lr
        return other

    def weights(self) -> list[Tensor]:
        return [p.detach().clone().view(-1) for p in self.model.parameters()]


def ordered(weights: Tensor) -> Tensor:
    """Maps bf16 weights to integers such that neighbouring bf16 numbers differ by 1."""
    bits = weights.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF) - 1, bits)


def entropy(before: list[Tensor], after: list[Tensor]) -> tuple[float, int]:
    """Returns the entropy of the changes in bits, and the number of changed weights. The entropy is that of the changed
    positions, block by block, plus that of the distances, counted in neighbouring bf16 numbers."""
    bits, distances = 0.0, []
    for old, new in zip(before, after, strict=True):
        distance = ordered(new) - ordered(old)
        for block in distance.split(_BLOCK):
            p = float((block != 0).double().mean())
            bits += block.numel() * sum(-q * math.log2(q) for q in (p, 1 - p) if q > 0)
        distances.append(distance[distance != 0])
    all_of_them = torch.cat(distances)
    shares = all_of_them.unique(return_counts=True)[1].double() / max(all_of_them.numel(), 1)
    return bits + all_of_them.numel() * float(-(shares * shares.log2()).sum()), all_of_them.numel()


def payload(bench: Bench) -> None:
    """Compares deltas after 1, 4 and 16 steps with the entropy of the changes, and with 48 bits for each change."""
    large = bench.params >= _LARGE
    model = ByteGPT(256, 4, 128) if large else ByteGPT(32, 1, 16)
    with one_thread():  # nothing is timed, and the model is small
        begun = Training(model.bfloat16(), 3e-4, bench.seed)
        for _ in range(100 if large else 2):
            begun.step()
        for lr in _POSITIONS:
            for exact in (False, True):
                _deltas(bench, begun.at(lr, bench.seed + 1), lr, exact)


def _deltas(bench: Bench, training: Training, lr: float, exact: bool) -> None:
    """Measures the sizes of deltas at one learning rate. exact: the publisher's option."""
    training.step()
    publisher = torch_ext.WeightPublisher(training.model, training.optimizer, exact=exact)
    numel = sum(p.numel() for p in training.model.parameters())
    for steps in _STEPS:
        before = training.weights()
        for _ in range(steps):
            training.step()
        sent = 8 * len(publisher.publish())
        bits, changed = entropy(before, training.weights())
        what = f"lr {lr:g}, {steps} step{'s' * (steps > 1)}{', exact' * exact}"
        beside = {"changed": changed / numel, "entropy, bits per parameter": bits / numel}
        bar = (_EXACT if exact else _BARS).get(steps)
        bench.add("payload", f"{what}: payload / entropy", spread([sent / bits]), bar, beside)
        if steps == 1 and not exact:
            ratio = _POSITION_AND_VALUE * changed / sent
            bench.add("payload", f"{what}: positions and values of 48 bits / ours", spread([ratio]), _POSITIONS[lr])
    dense = len(publisher.full()) / (2 * numel)
    if not exact:
        bench.add("payload", f"lr {lr:g}: full(), bytes / weights'", spread([dense]), _DENSE)
