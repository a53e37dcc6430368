"""`WeightPublisher`, the trainer's side of weight sync: encodes what changed in the weights since the last version."""

import ctypes
from typing import Any

import torch

from torch_ext.native import graph_capture
from torch_ext.optim.cpu_offload.staged_args import threads
from torch_ext.optim.optimizer_base import OptimizerBase
from torch_ext.optim.writing_calls import writes
from torch_ext.params.param_groups import innermost
from torch_ext.tensors import offload_guard
from torch_ext.weight_sync import delta_library, trainer_ranks
from torch_ext.weight_sync.kept_changes import KeptChanges
from torch_ext.weight_sync.model_table import ModelTable
from torch_ext.weight_sync.weight_patch import WeightPatch

_CHANGES, _WHOLE = 0, 1  # tx_delta_kind


class WeightPublisher:
    """Encodes the weights of a model in training for inference engines, as deltas: what changed since the last version.

        publisher = torch_ext.WeightPublisher(model, optimizer)
        ...                             # any number of steps
        delta = publisher.publish()     # this rank's part: send it to each engine, a WeightSubscriber

    The optimizer's step records which weights it changes, in 9/64 byte per parameter; there is no copy of the weights.
    Checksums take another 1/128 byte per parameter. A frozen parameter has checksums only. Without a publisher, a step
    has no extra cost.

    model: all of its parameters are published by name, including frozen ones, but not its buffers. Parameters must be
        contiguous, in bfloat16, float16 or float32.
    optimizer: the model's torch_ext.AdamW, Adam, AdamW8bit or Muon, under any strategy or FSDP2, with states on the
        device or the host.
    exact: also records how far each 16-bit weight moved, up to 7 steps of its dtype, in half a byte per parameter.
        Deltas after many steps get smaller.
    sliceable: encodes deltas so that engines can hold slices of parameters (`WeightSlice`); about a tenth larger.
    process_group: the ranks that train the model, as given to `parallelize`, if that is not the default group.

    Create it on all of these ranks at the same time: they agree on a name for the chain of versions, which is their
    only communication. The weights at that time are version 0. A new publisher, after a restart for example, begins a
    new chain: engines that follow the old chain reject its deltas until they apply a `full()` of the new one.
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
        self.writing_calls = inner.writing_calls
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
        """The last published version. 0, the weights at the publisher's creation, if nothing was published yet."""
        return int(self._chain.version)

    @writes("publish()")
    def publish(self) -> bytes:
        """Returns this rank's part of the next version: what changed since the last one, after any number of steps.

        Call it between steps, after the same step on all ranks. It communicates with no other rank; `apply` checks
        that the parts belong together. Weights that were written outside the optimizer are included, as whole blocks
        of 128 or 1024 weights.

        Raises RuntimeError while a CUDA graph is captured, during a backward, between a backward that stepped and
        step(), within `master_weights()` and `ema_weights()`, while something is offloaded, and if the optimizer has a
        newer publisher or the model is sharded differently now. Raises ValueError, with a parameter's name, if the
        model's parameters are not those at the publisher's creation. After an error nothing has been published.
        """
        self._refuse_now("publish()")
        with torch.no_grad(), self._kept.silent_writes_marked():
            return self._encode(_CHANGES)

    @writes("full()")
    def full(self) -> bytes:
        """Returns this rank's part of all weights at `version`, for engines that join. Call it directly after
        `publish`.

        Raises the errors of publish, and RuntimeError if weights have changed since publish.
        """
        self._refuse_now("full()")
        with torch.no_grad():
            return self._encode(_WHOLE)

    @writes("publish_patches()")
    def publish_patches(self) -> list[WeightPatch]:
        """Returns the next version as positions and values, for engines of other projects. Call it instead of
        `publish`.

        There is a patch for each parameter, in the model's order; several for one of more than 2**20 elements that no
        step changes. If nothing changed in this rank's part of a parameter, its patch has no positions. A patch may
        also contain weights that did not change. Raises the errors of publish.
        """
        self._refuse_now("publish_patches()")
        with torch.no_grad(), self._kept.silent_writes_marked():
            patches = self._kept.patches()
            self._kept.renew()
        self._chain.version += 1  # so that a subscriber, which cannot get this version, rejects the next delta
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
        return delta_library.take_bytes(message)

    def _refuse_now(self, doing: str) -> None:
        """Raises RuntimeError or ValueError if this rank cannot publish now. doing: begins the message."""
        self._refuse_between(doing)
        self._model.refuse_changed(doing)
        offload_guard.refuse_states(self._optimizer, doing)
        self._kept.refuse_changed(doing)

    def _refuse_between(self, doing: str) -> None:
        """Raises RuntimeError if the optimizer is not between two steps. doing: begins the message."""
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
