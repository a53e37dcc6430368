"""Lightning: the average that the optimizer keeps, in validation, in checkpoints and after the end."""

import contextlib
import importlib
import sys
from typing import Any

from torch_ext.integrations import kept_average
from torch_ext.optim.ema import AveragingOptimizer

_NAMES = ("lightning.pytorch", "pytorch_lightning")  # one framework, published twice
_CALL = "lightning_ema_callback"


def lightning_ema_callback() -> Any:
    """A callback of Lightning's Trainer: validates, saves and ends with the average that the optimizer keeps.

        trainer = lightning.Trainer(callbacks=[torch_ext.lightning_ema_callback()])

    with `torch_ext.AdamW(..., ema_decay=0.9999)`, say, from `configure_optimizers`. Within `fit`:

    - validation runs with the averages;
    - a checkpoint has them as its "state_dict", and the weights in training as "current_model_state", where resuming
      finds them, as with Lightning's own WeightAveraging; one that is saved with save_weights_only=True has the weights
      in training alone, since Lightning does not ask callbacks then;
    - at the end they become the module's weights.

    ValueError at the start of training where an optimizer keeps no average; ModuleNotFoundError without Lightning.
    """
    return _class(_callback_class())()


def _callback_class() -> type:
    """Of the framework that the program uses: the one that it has imported."""
    name = next((name for name in _NAMES if name in sys.modules), None)
    for candidate in [name] if name else _NAMES:
        with contextlib.suppress(ModuleNotFoundError):
            base: type = importlib.import_module(candidate).Callback
            return base
    raise ModuleNotFoundError(f"{_CALL}(): neither of {', '.join(_NAMES)} is installed")


_classes: dict[type, type] = {}  # by the framework's own


def _class(base: type) -> type:
    if base not in _classes:
        _classes[base] = type("EmaCallback", (_Hooks, base), {"__module__": __name__})
    return _classes[base]


class _Hooks:
    """Called by Lightning's names for them."""

    _entered: contextlib.ExitStack | None = None

    def __reduce__(self) -> Any:
        return lightning_ema_callback, ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _optimizers(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._entered = kept_average.averaged(_optimizers(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.close()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        with kept_average.averaged(_optimizers(trainer)):
            state = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {key: _own(value) for key, value in state.items()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit" and "current_model_state" in checkpoint:
            weights = {"state_dict": checkpoint["current_model_state"]}
            trainer.strategy.load_model_state_dict(weights, strict=pl_module.strict_loading)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        kept_average.keep(_optimizers(trainer))


def _own(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


def _optimizers(trainer: Any) -> list[AveragingOptimizer]:
    return kept_average.averaging(trainer.optimizers, _CALL)
