"""Restarts of a trainer in a random history (tests/feature_programs.py): it is saved in one of several ways, recreated,
and loaded."""

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


def _restart_with(a: Trainer, through: Callable[[Any], Any]) -> None:
    """Recreates a trainer and loads its state_dicts. through: saves and loads the state_dicts."""
    state = through({"model": a.plain.state_dict(), "optimizer": a.optimizer.state_dict()})
    frozen = [name for name, p in a.params().items() if not p.requires_grad]
    _recreate(a, frozen)
    a.plain.load_state_dict(state["model"])
    a.optimizer.load_state_dict(state["optimizer"])


def _recreate(a: Trainer, frozen: list[str]) -> None:
    """Creates a trainer's model and optimizer again, with the same groups and frozen parameters."""
    a.make()
    if a.late:
        a.add_late()
    _freeze(a, frozen)


def _freeze(a: Trainer, frozen: list[str]) -> None:
    for name in frozen:
        a.params()[name].requires_grad_(False)


def _saved(save: Callable[[Any, Any], None], load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that saves a state to a file and loads it."""

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


def _restart_as_copy(a: Trainer, copier: Callable[[Any], Any]) -> None:
    plain = a.plain is a.model
    a.plain, a.optimizer = copier((a.plain, a.optimizer))
    assert plain
    a.model = a.plain


def _restart_by_dcp(a: Trainer, **options: Any) -> None:
    import torch.distributed.checkpoint as dcp

    folder = gathered(tempfile.mkdtemp())[0]
    dcp.save(
        {"model": a.plain.state_dict(), "optimizer": a.optimizer.state_dict()},
        storage_writer=torch_ext.CheckpointWriter(folder, **options),
    )
    frozen = [name for name, p in a.params().items() if not p.requires_grad]
    made = a.optimizer.state_dict()["state"]
    stateless = [name for index, (name, _) in enumerate(a.optimized()) if index not in made]
    _recreate(a, [name for name in frozen if name in stateless])  # frozen parameters have no state to load into
    state = {"model": a.plain.state_dict(), "optimizer": a.optimizer.state_dict()}
    dcp.load(state, storage_reader=torch_ext.CheckpointReader(folder))
    a.plain.load_state_dict(state["model"])
    a.optimizer.load_state_dict(state["optimizer"])
    _freeze(a, frozen)


def _restart_consolidated(a: Trainer) -> None:
    state = copy.deepcopy(a.optimizer.consolidate_state_dict(to=None))
    weights = copy.deepcopy(a.plain.state_dict())
    _recreate(a, [name for name, p in a.params().items() if not p.requires_grad])
    a.plain.load_state_dict(weights)
    a.optimizer.load_state_dict(state)


# Way -> the function that restarts a trainer.
RESTARTED: dict[str, Callable[[Trainer], None]] = {
    "copied state": lambda a: _restart_with(a, copy.deepcopy),
    "torch.save": lambda a: _restart_with(a, _in_memory),
    "logical": lambda a: _restart_with(a, _saved(torch_ext.save, torch_ext.load)),
    "at rest": lambda a: _restart_with(a, _saved(lambda s, f: torch_ext.save(s, f, states="at_rest"), torch_ext.load)),
    "async": lambda a: _restart_with(a, _saved(_async, torch_ext.load)),
    "deepcopy": lambda a: _restart_as_copy(a, copy.deepcopy),
    "pickle": lambda a: _restart_as_copy(a, lambda both: pickle.loads(pickle.dumps(both))),
    "dcp": _restart_by_dcp,
    "consolidated": lambda a: _restart_consolidated(a),
    "at_rest_dcp": lambda a: _restart_by_dcp(a, states="at_rest"),
}
