"""A callback for Hugging Face's Trainer that uses the optimizer's average of weights in evaluation, in checkpoints and
at the end."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from torch_ext.integrations import kept_average
from torch_ext.optim.ema import AveragingOptimizer

_CALL = "trainer_ema_callback"
_FOLDER = "ema"  # within checkpoint-N


def trainer_ema_callback(trainer: Any) -> Any:
    """Returns a callback for Hugging Face's Trainer that evaluates, saves and ends with the optimizer's average of
    weights.

        trainer.add_callback(torch_ext.trainer_ema_callback(trainer))

    trainer: a transformers.Trainer, or an instance of a derived class (TRL's), whose optimizer is
    `torch_ext.AdamW(..., ema_decay=0.9999)`, say. The Trainer has no event before an evaluation. So the callback needs
    the Trainer, and replaces its `evaluation_loop`. Within `train`:

    - every evaluation and prediction runs with the averages;
    - each `checkpoint-N` also has a folder `ema`, a complete model for `from_pretrained`. The other files of the
      checkpoint have the weights in training, which resuming needs;
    - at the end the averages become the model's weights: the last ones or, with load_best_model_at_end, those of the
      best checkpoint.

    Raises ValueError at the start of training if the optimizer keeps no average; ModuleNotFoundError without
    transformers.
    """
    from transformers import TrainerCallback

    return _class(TrainerCallback)(trainer)


_classes: dict[type, type] = {}  # the framework's base class -> the class of our callback


def _class(base: type) -> type:
    if base not in _classes:
        _classes[base] = type("EmaCallback", (_Events, base), {"__module__": __name__})
    return _classes[base]


class _Events:
    """The methods of the callback, under the names by which the Trainer calls them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._training = False
        self._loop = trainer.evaluation_loop
        trainer.evaluation_loop = self._evaluation_loop

    def _evaluation_loop(self, *args: Any, **options: Any) -> Any:
        with self._averaged():
            return self._loop(*args, **options)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Context in which the weights are the averages; outside of training it changes nothing."""
        if not self._training:
            yield
            return
        with kept_average.averaged(self._optimizers()):
            yield

    def _optimizers(self) -> list[AveragingOptimizer]:
        return kept_average.averaging([self._trainer.optimizer], _CALL)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._optimizers()
        self._training = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        run = trainer._get_output_dir(getattr(trainer, "_trial", None))  # a hyperparameter search has one per trial
        folder = os.path.join(run, f"checkpoint-{state.global_step}", _FOLDER)
        with self._averaged():
            trainer.save_model(folder, _internal_call=True)  # on all ranks; the Trainer decides which rank writes

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = False
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is None:
            kept_average.keep(self._optimizers())
        elif os.path.isdir(averages := os.path.join(best, _FOLDER)):
            state.best_model_checkpoint = averages
            try:
                self._trainer._load_best_model()
            finally:
                state.best_model_checkpoint = best
        else:
            warnings.warn(
                f"{best} has no folder {_FOLDER!r} with averages: it was saved without {_CALL}. The model keeps its "
                "training weights",
                stacklevel=2,
            )
