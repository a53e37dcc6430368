"""What is remembered of a step in parts that raised, or was interrupted, between them, where no other rank knows."""

from torch_ext.optim.step_plan import StepPlan
from torch_ext.optim.step_progress import NotStepped, StepProgress


class UnfinishedStep:
    """Whether the last step stepped some parameters and not the others."""

    def __init__(self) -> None:
        self._is = False

    def note(self, plan: StepPlan | None, progress: StepProgress, error: BaseException) -> None:
        """A step that wrote something raised the error."""
        known = progress.wrote_all or isinstance(error, NotStepped)  # whose message says what was stepped
        self._is = not known and plan is not None and plan.in_parts

    def forget(self) -> None:
        self._is = False

    def refuse(self, doing: str) -> None:
        """RuntimeError where there is one."""
        if self._is:
            raise RuntimeError(
                f"{doing} after a step() that was interrupted, or raised, when it had perhaps stepped some of the "
                "parameters and not the others: load a checkpoint of model and optimizer, or call zero_grad(), which "
                "keeps what was stepped and drops the gradients"
            )
