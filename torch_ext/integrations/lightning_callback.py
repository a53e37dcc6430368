"""A Lightning callback that uses the optimizer's average of weights in validation, in checkpoints and at the end."""

import contextlib
import importlib
import sys
from typing import Any

from torch_ext.integrations import kept_average
from torch_ext.optim.ema import AveragingOptimizer

_NAMES = ("lightning.pytorch", "pytorch_lightning")  # one framework, published twice
_CALL = "lightning_ema_callback"


def lightning_ema_callback() -> Any:
    """Returns a callback for Lightning's Trainer that validates, saves and ends with the optimizer's average weights.

        trainer = lightning.Trainer(callbacks=[torch_ext.lightning_ema_callback()])

    `configure_optimizers` returns `torch_ext.AdamW(..., ema_decay=0.9999)`, say. Within `fit`:

    - validation runs with the averages;
    - a checkpoint has the averages as its "state_dict", and the weights in training as "current_model_state", from
      which training resumes, as with Lightning's own WeightAveraging; a checkpoint that is saved with
      save_weights_only=True has only the weights in training, since Lightning does not call callbacks for it;
    - at the end the averages become the module's weights.

    Raises ValueError at the start of training if an optimizer keeps no average; ModuleNotFoundError without Lightning.
    """
    return _class(_callback_class())()


def _callback_class() -> type:
    """Returns the base class for callbacks: of the Lightning package that the program has imported, or else of
    the first one that is installed."""
    name = next((name for name in _NAMES if name in sys.modules), None)
    for candidate in [name] if name else _NAMES:
        with contextlib.suppress(ModuleNotFoundError):
            base: type = importlib.import_module(candidate).Callback
            return base
    raise ModuleNotFoundError(f"{_CALL}(): neither of {', '.join(_NAMES)} is installed")


_classes: dict[type, type] = {}  # the framework's base class -> the class of our callback


def _class(base: type) -> type:
    if base not in _classes:
        _classes[base] = type("EmaCallback", (_Hooks, base), {"__module__": __name__})
    return _classes[base]


class _Hooks:
    """The methods of the callback, under the names by which Lightning calls them."""

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
