"""A trainer's side: what changed in the weights since the last time."""

import ctypes
from typing import Any

import torch

from torch_ext.native import graph_capture
from torch_ext.optim.cpu_offload.staged_args import threads
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.params.param_groups import innermost
from torch_ext.tensors import offload_guard
from torch_ext.weight_sync import delta_library, trainer_ranks
from torch_ext.weight_sync.kept_changes import KeptChanges
from torch_ext.weight_sync.model_table import ModelTable
from torch_ext.weight_sync.weight_patch import WeightPatch

_CHANGES, _WHOLE = 0, 1  # tx_delta_kind


class WeightPublisher:
    """Sends the weights of a model in training to the engines that generate with it: what changed since the last time.

        publisher = torch_ext.WeightPublisher(model, optimizer)
        ...                             # any number of steps
        delta = publisher.publish()     # this rank's part: send it to each engine, a WeightSubscriber

    The optimizer's step notes which weights it changes: 9/64 byte for each parameter and no copy of the weights; 1/128
    of each for checksums, which is all where nobody trains it. A step that has no publisher pays nothing.

    model: whose parameters are published, by their names, all of them: also those that nobody trains. Buffers are not.
        Contiguous, in bfloat16, float16 or float32.
    optimizer: torch_ext.AdamW, Adam, AdamW8bit or Muon, of the model, under any strategy and FSDP2, with states on
        the device or the host.
    exact: also notes how far each 16-bit weight went, up to 7 steps of its dtype, in half a byte for each parameter,
        for smaller deltas after many steps.
    sliceable: deltas are coded so that engines can hold slices of parameters (`WeightSlice`), in about a tenth more.
    process_group: the ranks that train the model, where it is not the default group; that of `parallelize`.

    Made on all of these ranks at the same time: they agree on the name of the chain of versions, which is all that they
    ever send each other. The weights at that time are version 0. A publisher that is made anew, after a restart say,
    begins a new chain: its deltas are refused by who follows another one, until he takes `full()`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        exact: bool = False,
        *,
        sliceable: bool = False,
        process_group: Any = None,
    ) -> None:
        inner = innermost(optimizer)
        if not isinstance(inner, OptimizerBase):
            raise ValueError(
                f"optimizer is {type(inner).__module__}.{type(inner).__name__}; torch_ext.AdamW, Adam, AdamW8bit and "
                "Muon note what their steps change"
            )
        self._optimizer, self._sliceable = inner, sliceable
        self._model = ModelTable(model)
        self._ranks = trainer_ranks.ranks_of(model, self._model.params.values(), process_group)
        self._refuse_between("WeightPublisher()")
        self._kept = KeptChanges(inner, self._model, self._ranks.part, self._ranks.parts, exact)
        self._chain = self._new_chain()
        with torch.no_grad(), self._kept.silent_writes_marked():
            self._kept.renew()

    def _new_chain(self) -> delta_library.DeltaChain:
        words = (ctypes.c_uint64 * 2)(*self._ranks.new_chain(self._model.device))
        chain = delta_library.DeltaChain(ctypes.sizeof(delta_library.DeltaChain))
        table = self._model.table
        delta_library.call("chain_begin", len(table), table, words, self._ranks.part, self._ranks.parts, chain)
        return chain

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a WeightPublisher cannot be copied or pickled: it notes what the steps of its optimizer change. Make "
            "another one from the other model and optimizer, which begins a new chain of versions with full()"
        )

    @property
    def version(self) -> int:
        """Of what was published last; 0: nothing was, the weights are those that the publisher was made with."""
        return int(self._chain.version)

    def publish(self) -> bytes:
        """This rank's part of the next version: what changed since the last one, in no step, one or many.

        Between steps; local, no message to other ranks: call it after the same step on all of them, which is checked
        where parts are applied. What somebody wrote to weights outside the optimizer is in it: whole blocks of 128 or
        1024 weights.

        RuntimeError while a CUDA graph is captured, during a backward, between a backward that stepped and step(),
        within `master_weights()` and `ema_weights()`, while something is offloaded, and where another publisher was
        made of the optimizer, or the model was cut anew;
        ValueError, naming it, where the model has other parameters than when the publisher was made. Nothing is
        published then.
        """
        self._refuse_now("publish()")
        with torch.no_grad(), self._kept.silent_writes_marked():
            return self._encode(_CHANGES)

    def full(self) -> bytes:
        """This rank's part of all weights, as of `version`, for engines that join: directly after `publish`.

        Errors as of publish; and RuntimeError where weights changed since: publish first.
        """
        self._refuse_now("full()")
        with torch.no_grad():
            return self._encode(_WHOLE)

    def publish_patches(self) -> list[WeightPatch]:
        """In the place of `publish`: the next version as positions and values, for engines of others.

        One patch for each parameter of the model, in its order; without positions where nothing changed in this rank's
        part. Next to changed weights it may have some that did not change. Errors as of publish.
        """
        self._refuse_now("publish_patches()")
        with torch.no_grad(), self._kept.silent_writes_marked():
            patches = self._kept.patches()
            self._kept.renew()
        self._chain.version += 1  # a subscriber that has not seen this version shall say so
        return patches

    def _encode(self, kind: int) -> bytes:
        message = delta_library.DeltaMessage()
        with self._kept.on_host() as runs:
            table = self._model.table
            args = delta_library.DeltaEncodeArguments(ctypes.sizeof(delta_library.DeltaEncodeArguments))
            args.n_params, args.params = len(table), table
            args.n_runs, args.runs = len(runs), runs
            args.steps = int(self._kept.is_one_step)
            args.kind, args.sliceable = kind, int(self._sliceable)
            delta_library.call("encode", args, self._chain, threads(), message)
        return delta_library.taken(message)

    def _refuse_now(self, doing: str) -> None:
        """RuntimeError or ValueError where this rank cannot publish now."""
        self._refuse_between(doing)
        self._model.refuse_changed(doing)
        offload_guard.refuse_states(self._optimizer, doing)
        self._kept.refuse_changed(doing)

    def _refuse_between(self, doing: str) -> None:
        """RuntimeError where weights are not those between two steps."""
        self._refuse_capture(doing)
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{doing} during a backward, which may step: call it between steps")
        self._optimizer._refuse_open(doing)
        self._optimizer.refuse_between(doing)

    def _refuse_capture(self, doing: str) -> None:
        if graph_capture.is_capturing(self._model.device):
            raise RuntimeError(
                f"{doing} while a CUDA graph is captured: it waits for the device; call it between replays"
            )
