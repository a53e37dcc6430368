"""torch_ext: mixed-precision training whose dtypes follow the model.

    policy = torch_ext.load_policy(model)                                   # the model's dtype decides the others
    torch_ext.parallelize(model, policy)                                    # gradient buckets; optional
    opt    = torch_ext.AdamW(model.parameters(), lr=3e-4, policy=policy)    # torch.optim.AdamW's signature
    ...
    loss.backward(); torch_ext.clip_grad_norm_(opt, 1.0); opt.step(); opt.zero_grad()

Importing it registers the operators under torch.ops.torch_ext (csrc/torch/operators.def).
"""

import os
from typing import Any

from torch_ext.native import ops as _ops  # noqa: F401  # registers the operators
from torch_ext.native import public_names as _public_names
from torch_ext.native.library import version as _version
from torch_ext.optim.state.torch_adam import drop_masters as _drop_masters
from torch_ext.policy.policy import Policy as _Policy

__version__ = _version()

_MODULES = _public_names.table(os.path.join(os.path.dirname(__file__), "__init__.pyi"))
__all__ = list(_MODULES)
__getattr__ = _public_names.importer(_MODULES, globals())


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _make_grad_scaler(*arguments: Any, **options: Any) -> Any:
    from torch_ext.amp.grad_scaler import GradScaler

    return GradScaler(*arguments, **options)


# Policy.grad_scaler() calls this, since the package `policy` must not import `amp`, which is above it.
_Policy._make_grad_scaler = staticmethod(_make_grad_scaler)

_drop_masters()
