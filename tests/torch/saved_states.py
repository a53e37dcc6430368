"""Saved states as users have them, kept in the repository so that later versions can be tested to load them.

    python tests/torch/saved_states.py    # writes tests/torch/saved/VERSION

Run once for each version that changes the format of states; what an earlier version wrote is never written again. Each
configuration has a folder with the files that `torch_ext.save`, `torch.save` and a `CheckpointWriter` wrote of one
training, and with expected.json: every tensor of the state that must come back, and the weights after the next step, in
hexadecimal.
"""

import copy
import json
import pathlib
import sys
from typing import Any

import torch
from torch import Tensor

SAVED = pathlib.Path(__file__).absolute().parent / "saved"

# configuration -> the model's dtype, override_optimizer_config
CONFIGURATIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16_remainder": (torch.bfloat16, {"store_param_remainders": True}),
    "8bit": (
        torch.bfloat16,
        {"store_param_remainders": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    ),
}
SHAPES = {"weight": (10, 27), "bias": (10,)}  # more than two blocks of 128 elements, and less than one


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns numbers of both signs and many magnitudes. They are computed from integers, so every torch gives the same
    ones."""
    count = torch.Size(shape).numel()
    bits = (torch.arange(count) + 1) * (2654435761 + 2 * seed) % 2**32
    return ((bits - 2**31).double() / 2**31 / 2.0 ** (bits % 7)).to(dtype).reshape(shape)


def begin(configuration: str) -> tuple[torch.nn.Module, Any]:
    """Returns a model and its optimizer before the first step."""
    import torch_ext

    dtype, overrides = CONFIGURATIONS[configuration]
    model = torch.nn.Linear(27, 10, dtype=dtype)
    with torch.no_grad():
        for i, (name, shape) in enumerate(SHAPES.items()):
            model.get_parameter(name).copy_(numbers(i, shape, dtype))
    policy = torch_ext.load_policy(model, override_optimizer_config=overrides)
    return model, torch_ext.AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, seed=3, policy=policy)


def step(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    for i, (name, shape) in enumerate(SHAPES.items()):
        param = model.get_parameter(name)
        param.grad = numbers(100 * number + i, shape, param.dtype) / 16
    optimizer.step()


def as_hexadecimal(tensor: Tensor) -> list[Any]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bytes(data.tolist()).hex()]


def recorded(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Returns the weights and the logical state, by parameter name, in hexadecimal."""
    state = optimizer.state_dict()["state"]
    names = list(SHAPES)
    return {
        "weights": {name: as_hexadecimal(model.get_parameter(name)) for name in names},
        "state": {
            names[i]: {key: as_hexadecimal(value) for key, value in entry.items() if isinstance(value, Tensor)}
            for i, entry in state.items()
        },
    }


def make(folder: pathlib.Path, configuration: str) -> None:
    """Trains three steps and writes the configuration's folder."""
    import torch.distributed.checkpoint as dcp

    import torch_ext

    folder.mkdir(parents=True)
    model, optimizer = begin(configuration)
    for number in range(3):
        step(model, optimizer, number)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch_ext.save(checkpoint, folder / "torch_ext.pt")
    torch.save(checkpoint, folder / "torch.pt")
    dcp.save(copy.copy(checkpoint), storage_writer=torch_ext.CheckpointWriter(folder / "folder"), no_dist=True)
    expected = recorded(model, optimizer)
    step(model, optimizer, 3)
    expected["next"] = recorded(model, optimizer)["weights"]
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(SAVED.parents[2]))
    import torch_ext

    target = SAVED / torch_ext.__version__
    if target.exists():
        sys.exit(f"{target} is there: what a version wrote is kept")
    for each in CONFIGURATIONS:
        make(target / each, each)
