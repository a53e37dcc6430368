"""torch_ext: mixed-precision training whose dtypes follow the model.

    policy = torch_ext.load_policy(model)                                   # the model's dtype decides the others
    torch_ext.parallelize(model, policy)                                    # gradient buckets; optional
    opt    = torch_ext.AdamW(model.parameters(), lr=3e-4, policy=policy)    # torch.optim.AdamW's signature
    ...
    loss.backward(); torch_ext.clip_grad_norm_(opt, 1.0); opt.step(); opt.zero_grad()

Importing it registers the operators under torch.ops.torch_ext (csrc/torch/operators.def).
"""

from typing import TYPE_CHECKING, Any

from torch_ext import _ops as _ops  # registers the operators
from torch_ext._clip import clip_grad_norm_
from torch_ext._comm_hook import register_comm_hook
from torch_ext._dtypes import coerce_dtypes
from torch_ext._files import load, save
from torch_ext._layout import plan_buckets
from torch_ext._library import library_path
from torch_ext._offload import offload, onload
from torch_ext._optimizer import Adam, AdamW
from torch_ext._parallel import parallelize, sync_parameters
from torch_ext._policy import Policy, load_policy
from torch_ext._scaler import GradScaler
from torch_ext._torch_adam import pass_over_masters

if TYPE_CHECKING:
    from torch_ext._dcp import CheckpointReader, CheckpointWriter

__all__ = [
    "Adam",
    "AdamW",
    "CheckpointReader",
    "CheckpointWriter",
    "GradScaler",
    "Policy",
    "clip_grad_norm_",
    "coerce_dtypes",
    "library_path",
    "load",
    "load_policy",
    "offload",
    "onload",
    "parallelize",
    "plan_buckets",
    "register_comm_hook",
    "save",
    "sync_parameters",
]

pass_over_masters()


def __getattr__(name: str) -> Any:
    if name in ("CheckpointReader", "CheckpointWriter"):  # torch.distributed.checkpoint is not for everybody
        from torch_ext import _dcp

        return getattr(_dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
