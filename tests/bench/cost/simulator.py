"""The simulator of a step's cost (tests/core/cycle_cost.h) from Python: what is asked, and its answers."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torch_ext.native import dtypes
from torch_ext.parallel.cycle import DDP_HOOK, NO_SHARD, OPTIM, OPTIM_GRADS, UNITS
from torch_ext.parallel.fsdp import fsdp_units
from torch_ext.policy.policy import Policy

KINDS = {
    "no_shard": NO_SHARD,
    "optim": OPTIM,
    "optim_grads": OPTIM_GRADS,
    "optim_grads_params": UNITS,
    "DDP hook": DDP_HOOK,
}
"""Strategy -> its tx_cycle_kind."""

EXCHANGES = ("all-to-all", "two-level", "ring")
"""As cycle_cost::How."""

_ROOT = Path(__file__).absolute().parents[3]
_PROGRAM = "tests/core/predict_cost"


class Link(NamedTuple):
    """One rank's way into a network, each direction."""

    latency: float  # seconds
    bytes_per_second: float
    message_seconds: float = 0.0  # that it takes for each message, besides its bytes


class Cluster(NamedTuple):
    """Machines and their links."""

    ranks_per_node: int
    within: Link
    between: Link
    node_bytes_per_second: float = 0.0  # to other nodes, and from them, for all ranks of a node; 0: no further limit
    post_seconds: float = 0.0  # of a rank's processor, for each message that it sends
    sum_bytes_per_second: float = 0.0  # of received chunks that are added up; 0: that takes no time


class Param(NamedTuple):
    numel: int
    rows: int  # its first dimension
    unit: int  # of FSDP2; 0: the root's
    bucket: int  # of DistributedDataParallel


class Model(NamedTuple):
    """A model as its exchange sees it."""

    params: list[Param]
    policy: Policy
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    step_seconds: float = 0.0  # of the optimizer, on what a rank steps

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @classmethod
    def of(cls, module: nn.Module, policy: Policy, *, bucket_cap_mb: float | None = None) -> "Model":
        """All of a module's parameters; it may be on the meta device. bucket_cap_mb: as DistributedDataParallel's."""
        params = [p for p in module.parameters() if p.requires_grad]
        units, buckets = _units(module, policy), _ddp_buckets(params, bucket_cap_mb)
        rows = (int(p.shape[0]) if p.dim() else 1 for p in params)
        return cls(
            [Param(p.numel(), r, units[id(p)], b) for p, r, b in zip(params, rows, buckets, strict=True)], policy
        )


def _units(module: nn.Module, policy: Policy) -> dict[int, int]:
    """Parameter -> its unit, as parallelize makes them."""
    *inner, root = fsdp_units.units_of(module, policy.bucket_size)
    found: dict[int, int] = {}
    for number, unit in [*enumerate(inner, 1), (0, root)]:
        for part in unit.modules:
            for p in part.parameters():
                found.setdefault(id(p), number)
    return found


def _ddp_buckets(params: Sequence[torch.Tensor], cap_mb: float | None) -> list[int]:
    """Of each parameter, after DistributedDataParallel's first backward, whose gradients come in reverse order."""
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20] if cap_mb is None else [int(cap_mb * 1024 * 1024)]
    order = list(reversed(range(len(params))))
    tensors = [params[i] for i in order]
    members, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors), order)
    members.sort(key=lambda bucket: order.index(bucket[0]))
    found = [0] * len(params)
    for number, bucket in enumerate(members):
        for i in bucket:
            found[i] = number
    return found


class Case(NamedTuple):
    cluster: Cluster
    model: Model
    strategy: str
    world_size: int
    exchange: str = "all-to-all"


class Cost(NamedTuple):
    """Of a step; bytes and messages are those that rank 0 sends."""

    seconds: float
    compute_seconds: float
    gradient_bytes: int
    weight_bytes: int
    report_bytes: int
    node_bytes: int  # that its node sends to others
    messages: int
    buckets: int
    largest_message: int  # bytes of one rank's part of the largest bucket
    in_flight_bytes: int
    planned_bytes: int

    @property
    def bytes(self) -> int:
        return self.gradient_bytes + self.weight_bytes + self.report_bytes


def predict(cases: Sequence[Case]) -> list[Cost]:
    """RuntimeError where the program is not built, or refuses a case."""
    text = "".join(map(_lines, cases))
    run = subprocess.run([program()], input=text, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{_PROGRAM}: {run.stderr.strip()}")
    return [Cost(**json.loads(line)) for line in run.stdout.splitlines()]


def program() -> Path:
    """Where Bazel put it: beside this file's checkout, or among what a test was given."""
    places = [_ROOT / _PROGRAM, _ROOT / "bazel-bin" / _PROGRAM]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise RuntimeError(f"{_PROGRAM} is not built: bazel build //{_PROGRAM.replace('/predict', ':predict')}")
    return found


def _lines(case: Case) -> str:
    cluster, model = case.cluster, case.model
    policy = model.policy
    main = policy.main_grads_dtype or policy.param_dtype
    if case.strategy in ("optim_grads_params", "DDP hook"):
        main = policy.param_dtype  # torch hands gradients over as backward made them
    wire = policy.grad_comm_dtype or main
    gather = policy.grad_gather_dtype
    codes = [*map(dtypes.code_of, (policy.param_dtype, main, wire)), 0 if gather is None else dtypes.code_of(gather)]
    of_cluster = [cluster.ranks_per_node, *cluster.within, *cluster.between, *cluster[3:]]
    cap = 0 if policy.bucket_size is None else policy.bucket_size
    of_case = [
        KINDS[case.strategy],
        EXCHANGES.index(case.exchange),
        case.world_size,
        cap,
        int(policy.check_for_nan_in_grad),
    ]
    lines = [
        ("cluster", *of_cluster),
        ("model", *codes, model.forward_seconds, model.backward_seconds, model.step_seconds),
        *(("param", *param) for param in model.params),
        ("case", *of_case),
    ]
    return "".join(" ".join(map(str, line)) + "\n" for line in lines)
