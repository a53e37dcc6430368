"""All-gathers weights that were written outside of a step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch_ext.optim.state.param_state import ParamState, gather_of, gathers_in_order
from torch_ext.params import reducer_registry

if TYPE_CHECKING:
    from torch_ext.comm.communicator import Work


class Gathers:
    """The all-gathers of some parameters' buckets, each bucket once."""

    def __init__(self, members: Iterable[ParamState], doing: str) -> None:
        """Raises RuntimeError where the process group was destroyed or has failed. doing: begins the message."""
        found = gathers_in_order([gather_of(m, reducer_registry.owner_of(m.param)) for m in members])
        self._left = list(filter(None, found))
        self._begun: list[Work] = []
        for owner in dict.fromkeys(owner for owner, _ in self._left):
            owner.check_process_group(doing)

    def run(self) -> None:
        """Runs the all-gathers. Collective. A call after an interrupted one continues where that stopped."""
        while self._left:
            owner, bucket = self._left[0]
            self._begun.append(owner.gather(bucket))
            del self._left[0]
        for work in self._begun:
            work.result()
