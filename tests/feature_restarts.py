"""Ways to save a trainer of a random history (tests/feature_programs.py), create it again and load it."""

import copy
import io
import pathlib
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from feature_trainer import Trainer, gathered

import torch_ext


def _fresh(a: Trainer, through: Callable[[Any], Any]) -> None:
    state = through({"model": a.plain.state_dict(), "optimizer": a.optimizer.state_dict()})
    frozen = [name for name, p in a.params().items() if not p.requires_grad]
    _make_as(a, frozen)
    a.plain.load_state_dict(state["model"])
    a.optimizer.load_state_dict(state["optimizer"])


def _make_as(a: Trainer, frozen: list[str]) -> None:
    a.make()
    if a.late:
        a.add_late()
    _freeze(a, frozen)


def _freeze(a: Trainer, frozen: list[str]) -> None:
    for name in frozen:
        a.params()[name].requires_grad_(False)


def _saved(save: Callable[[Any, Any], None], load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def through(state: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "checkpoint.pt"
            save(state, file)
            return load(file)

    return through


def _async(state: Any, file: Any) -> None:
    with torch_ext.AsyncSaver(states="at_rest") as saver:
        saver.save(state, file)


def _in_memory(state: Any) -> Any:
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


def _copied(a: Trainer, copier: Callable[[Any], Any]) -> None:
    plain = a.plain is a.model
    a.plain, a.optimizer = copier((a.plain, a.optimizer))
    assert plain
    a.model = a.plain


def _by_dcp(a: Trainer, **options: Any) -> None:
    import torch.distributed.checkpoint as dcp

    folder = gathered(tempfile.mkdtemp())[0]
    dcp.save(
        {"model": a.plain.state_dict(), "optimizer": a.optimizer.state_dict()},
        storage_writer=torch_ext.CheckpointWriter(folder, **options),
    )
    frozen = [name for name, p in a.params().items() if not p.requires_grad]
    made = a.optimizer.state_dict()["state"]
    stateless = [name for index, (name, _) in enumerate(a.optimized()) if index not in made]
    _make_as(a, [name for name in frozen if name in stateless])  # of what is frozen there is no state to load into
    state = {"model": a.plain.state_dict(), "optimizer": a.optimizer.state_dict()}
    dcp.load(state, storage_reader=torch_ext.CheckpointReader(folder))
    a.plain.load_state_dict(state["model"])
    a.optimizer.load_state_dict(state["optimizer"])
    _freeze(a, frozen)


def _consolidated(a: Trainer) -> None:
    state = copy.deepcopy(a.optimizer.consolidate_state_dict(to=None))
    weights = copy.deepcopy(a.plain.state_dict())
    _make_as(a, [name for name, p in a.params().items() if not p.requires_grad])
    a.plain.load_state_dict(weights)
    a.optimizer.load_state_dict(state)


RESTARTED: dict[str, Callable[[Trainer], None]] = {
    "copied state": lambda a: _fresh(a, copy.deepcopy),
    "torch.save": lambda a: _fresh(a, _in_memory),
    "logical": lambda a: _fresh(a, _saved(torch_ext.save, torch_ext.load)),
    "at rest": lambda a: _fresh(a, _saved(lambda s, f: torch_ext.save(s, f, states="at_rest"), torch_ext.load)),
    "async": lambda a: _fresh(a, _saved(_async, torch_ext.load)),
    "deepcopy": lambda a: _copied(a, copy.deepcopy),
    "pickle": lambda a: _copied(a, lambda both: pickle.loads(pickle.dumps(both))),
    "dcp": _by_dcp,
    "consolidated": lambda a: _consolidated(a),
    "at_rest_dcp": lambda a: _by_dcp(a, states="at_rest"),
}
