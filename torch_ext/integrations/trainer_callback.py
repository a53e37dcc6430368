"""Hugging Face's Trainer: the average that the optimizer keeps, in evaluation, in checkpoints and after the end."""

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
    """A callback of Hugging Face's Trainer: evaluates, saves and ends with the average that the optimizer keeps.

        trainer.add_callback(torch_ext.trainer_ema_callback(trainer))

    trainer: a transformers.Trainer, or of a class derived from it (TRL's), whose optimizer is
    `torch_ext.AdamW(..., ema_decay=0.9999)`, say. The Trainer has no event before an evaluation: that is why the
    callback is given the Trainer, whose `evaluation_loop` it takes over. Within `train`:

    - every evaluation and prediction runs with the averages;
    - each `checkpoint-N` also has a folder `ema`, a model of its own for `from_pretrained`. The files beside it are of
      the weights in training: resuming needs these;
    - at the end the averages become the model's weights: the last ones or, with load_best_model_at_end, those of the
      best checkpoint.

    ValueError at the start of training where the optimizer keeps no average; ModuleNotFoundError without transformers.
    """
    from transformers import TrainerCallback

    return _class(TrainerCallback)(trainer)


_classes: dict[type, type] = {}  # by the framework's own


def _class(base: type) -> type:
    if base not in _classes:
        _classes[base] = type("EmaCallback", (_Events, base), {"__module__": __name__})
    return _classes[base]


class _Events:
    """Called by the Trainer's names for them."""

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
        """Before and after training the weights are what the user takes them for."""
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
        run = trainer._get_output_dir(getattr(trainer, "_trial", None))  # of a hyperparameter search, a folder each
        folder = os.path.join(run, f"checkpoint-{state.global_step}", _FOLDER)
        with self._averaged():
            trainer.save_model(folder, _internal_call=True)  # on all ranks; it chooses who writes

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
                f"{best} has no averages, in a folder {_FOLDER!r}: it was saved without {_CALL}. The model has its "
                "weights in training",
                stacklevel=2,
            )
