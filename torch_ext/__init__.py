"""torch_ext: mixed-precision training whose dtypes follow the model.

    policy = torch_ext.load_policy(model)                                   # the model's dtype decides the others
    torch_ext.parallelize(model, policy)                                    # gradient buckets; optional
    opt    = torch_ext.AdamW(model.parameters(), lr=3e-4, policy=policy)    # torch.optim.AdamW's signature
    ...
    loss.backward(); torch_ext.clip_grad_norm_(opt, 1.0); opt.step(); opt.zero_grad()

Importing it registers the operators under torch.ops.torch_ext (csrc/torch/operators.def).
"""

from torch_ext import _ops as _ops  # registers the operators
from torch_ext._clip import clip_grad_norm_
from torch_ext._comm_hook import register_comm_hook
from torch_ext._dtypes import coerce_dtypes
from torch_ext._layout import plan_buckets
from torch_ext._library import library_path
from torch_ext._offload import offload, onload
from torch_ext._optimizer import Adam, AdamW
from torch_ext._parallel import parallelize, sync_parameters
from torch_ext._policy import Policy, load_policy
from torch_ext._scaler import GradScaler

__all__ = [
    "Adam",
    "AdamW",
    "GradScaler",
    "Policy",
    "clip_grad_norm_",
    "coerce_dtypes",
    "library_path",
    "load_policy",
    "offload",
    "onload",
    "parallelize",
    "plan_buckets",
    "register_comm_hook",
    "sync_parameters",
]
