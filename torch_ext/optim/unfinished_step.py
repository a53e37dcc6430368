"""Remembers that a step of several library calls raised, or was interrupted, between two of them."""

from torch_ext.optim.step_plan import StepPlan
from torch_ext.optim.step_progress import NotStepped, RunningStep, StepProgress


class UnfinishedStep(RunningStep):
    """Remembers whether the last step may have stepped some parameters and not the others, and whether the running one
    has."""

    def __init__(self) -> None:
        self._unfinished = False

    def note(self, plan: StepPlan | None, progress: StepProgress, error: BaseException) -> None:
        """Called when a step that had written something raised the error."""
        known = progress.wrote_all or isinstance(error, NotStepped)  # its message says what was not stepped
        self._unfinished = not known and plan is not None and plan.takes_several_calls

    def is_halfway(self, plan: StepPlan | None) -> bool:
        """Whether a step is running that may have written some of the weights and not the others."""
        progress = self.progress
        if progress is None or plan is None or not progress.wrote:
            return False
        return plan.gathers_weights or (plan.takes_several_calls and not progress.wrote_all)

    def forget(self) -> None:
        self._unfinished = False

    def refuse(self, doing: str) -> None:
        """Raises RuntimeError if the last step is unfinished."""
        if self._unfinished:
            raise RuntimeError(
                f"{doing} after a step() that was interrupted, or raised, when it had perhaps stepped some of the "
                "parameters and not the others: load a checkpoint of model and optimizer, or call zero_grad(), which "
                "keeps what was stepped and drops the gradients"
            )
