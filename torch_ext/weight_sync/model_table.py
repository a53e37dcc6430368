"""The table of a model's parameters that a publisher and its engines share: names, sizes and dtypes."""

import torch
from torch import Tensor

from torch_ext.params.param_groups import logical_name
from torch_ext.tensors import dense, offload_guard
from torch_ext.weight_sync import delta_library
from torch_ext.weight_sync.weight_slice import table_key


class ModelTable:
    """The model's parameters at the creation of its publisher."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Raises ValueError, naming the parameter, if one cannot be published."""
        self._model = model
        self.params = _params(model)
        """Parameters by name, in the model's order; tied weights once."""
        if not self.params:
            raise ValueError("the model has no parameters: there is nothing to publish")
        for name, p in self.params.items():
            if p.dtype not in dense.TRAINED or p.is_meta:
                raise ValueError(f"{name!r} is in {p.dtype} on {p.device}; float32, bfloat16 and float16 are legal")
        self._forms = {name: (tuple(p.shape), p.dtype) for name, p in self.params.items()}
        keys = {name: table_key(name, p.shape) for name, p in self.params.items()}
        self.order = {name: i for i, name in enumerate(sorted(keys, key=lambda n: delta_library.in_order(keys[n])))}
        """Name -> index in the table."""
        rows = [(keys[name], self.params[name].numel(), self.params[name].dtype) for name in self.order]
        self.table = delta_library.table(rows)
        self.device = next(iter(self.params.values())).device

    def refuse_changed(self, doing: str) -> None:
        """Raises ValueError, with the name, if a parameter was added, removed, or changed its shape or dtype. Raises
        RuntimeError if one is offloaded. doing: begins the message."""
        now = {name: (tuple(p.shape), p.dtype) for name, p in _params(self._model).items()}
        for name in now.keys() | self._forms.keys() if now != self._forms else ():
            what = _difference(now.get(name), self._forms.get(name))
            if what:
                raise ValueError(f"{doing}: {name!r} {what} since the WeightPublisher was made; make a new one")
        offload_guard.refuse_params(self.params.values(), doing)


def _params(model: torch.nn.Module) -> dict[str, Tensor]:
    return {logical_name(name): p for name, p in model.named_parameters()}


def _difference(now: object, then: object) -> str:
    """Returns text for a message: how a parameter's (shape, dtype) changed; "" if it did not. None: not there."""
    if now == then:
        return ""
    return "was added" if then is None else "has gone" if now is None else f"became {now}"
