"""torch_ext: mixed-precision training whose dtypes follow the model.

    policy = torch_ext.load_policy(model)                                   # the model's dtype decides the others
    torch_ext.parallelize(model, policy)                                    # gradient buckets; optional
    opt    = torch_ext.AdamW(model.parameters(), lr=3e-4, policy=policy)    # torch.optim.AdamW's signature
    ...
    loss.backward(); torch_ext.clip_grad_norm_(opt, 1.0); opt.step(); opt.zero_grad()

Importing it registers the operators under torch.ops.torch_ext (csrc/torch/operators.def).
"""

from typing import TYPE_CHECKING, Any

from torch_ext.amp.grad_scaler import GradScaler
from torch_ext.checkpoint.files import load, save
from torch_ext.diagnosis.diagnose import diagnose
from torch_ext.diagnosis.findings import DiagnosisError, Finding, Report
from torch_ext.native import ops as ops  # registers the operators
from torch_ext.native.dtypes import coerce_dtypes
from torch_ext.native.library import library_path
from torch_ext.offloading.offload import offload, onload
from torch_ext.optim.adamw import Adam, AdamW
from torch_ext.optim.clip_grad import clip_grad_norm_
from torch_ext.optim.state.torch_adam import drop_masters
from torch_ext.parallel.bucket_plan import plan_buckets
from torch_ext.parallel.ddp_comm_hook import register_comm_hook
from torch_ext.parallel.parallel_module import sync_parameters
from torch_ext.parallel.parallelize import parallelize
from torch_ext.policy.loader import load_policy
from torch_ext.policy.policy import Policy

if TYPE_CHECKING:
    from torch_ext.checkpoint.dcp import CheckpointReader, CheckpointWriter

__all__ = [
    "Adam",
    "AdamW",
    "CheckpointReader",
    "CheckpointWriter",
    "DiagnosisError",
    "Finding",
    "GradScaler",
    "Policy",
    "Report",
    "clip_grad_norm_",
    "coerce_dtypes",
    "diagnose",
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

drop_masters()

# Policy.grad_scaler() makes one; the package `policy` is below `amp` and does not import it.
Policy._make_grad_scaler = GradScaler


def __getattr__(name: str) -> Any:
    if name in ("CheckpointReader", "CheckpointWriter"):  # torch.distributed.checkpoint is not for everybody
        from torch_ext.checkpoint import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
