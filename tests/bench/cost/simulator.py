"""Calls the simulator of a step's cost (tests/core/cycle_cost.h), which is a C++ program, from Python."""

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
"""The values of cycle_cost::How, in its order."""

_ROOT = Path(__file__).absolute().parents[3]
_PROGRAM = "tests/core/predict_cost"


class Link(NamedTuple):
    """One rank's link into a network; the numbers hold for each direction."""

    latency: float  # seconds
    bytes_per_second: float
    message_seconds: float = 0.0  # additional time for each message, whatever its size


class Cluster(NamedTuple):
    """Nodes and their links."""

    ranks_per_node: int
    within: Link
    between: Link
    node_bytes_per_second: float = 0.0  # of all ranks of a node together, in each direction; 0: no such limit
    post_seconds: float = 0.0  # time of a rank's processor for each message that it sends
    sum_bytes_per_second: float = 0.0  # rate at which received chunks are added up; 0: that takes no time


class Param(NamedTuple):
    """A parameter as the simulator sees it."""

    numel: int
    rows: int  # its first dimension
    unit: int  # its FSDP2 unit; 0: the root
    bucket: int  # its bucket in DistributedDataParallel


class Model(NamedTuple):
    """A model as its exchange sees it."""

    params: list[Param]
    policy: Policy
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    step_seconds: float = 0.0  # of the optimizer's step, for the part that one rank steps

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @classmethod
    def of(cls, module: nn.Module, policy: Policy, *, bucket_cap_mb: float | None = None) -> "Model":
        """Returns the model of a module's trained parameters. The module may be on the meta device. bucket_cap_mb: as
        in DistributedDataParallel."""
        params = [p for p in module.parameters() if p.requires_grad]
        units, buckets = _units(module, policy), _ddp_buckets(params, bucket_cap_mb)
        rows = (int(p.shape[0]) if p.dim() else 1 for p in params)
        return cls(
            [Param(p.numel(), r, units[id(p)], b) for p, r, b in zip(params, rows, buckets, strict=True)], policy
        )


def _units(module: nn.Module, policy: Policy) -> dict[int, int]:
    """Returns id of a parameter -> its FSDP2 unit, with units as parallelize creates them."""
    *inner, root = fsdp_units.units_of(module, policy.bucket_size)
    found: dict[int, int] = {}
    for number, unit in [*enumerate(inner, 1), (0, root)]:
        for part in unit.modules:
            for p in part.parameters():
                found.setdefault(id(p), number)
    return found


def _ddp_buckets(params: Sequence[torch.Tensor], cap_mb: float | None) -> list[int]:
    """Returns the bucket of each parameter. They are those that DistributedDataParallel rebuilds after its first
    backward, if gradients are ready in reverse order."""
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
    """One question to the simulator."""

    cluster: Cluster
    model: Model
    strategy: str
    world_size: int
    exchange: str = "all-to-all"


class Cost(NamedTuple):
    """The cost of a step. Bytes and messages are those that rank 0 sends."""

    seconds: float
    compute_seconds: float
    gradient_bytes: int
    weight_bytes: int
    report_bytes: int
    node_bytes: int  # bytes that rank 0's node sends to other nodes
    messages: int
    buckets: int
    largest_message: int  # bytes of one rank's part of the largest bucket
    in_flight_bytes: int
    planned_bytes: int

    @property
    def bytes(self) -> int:
        return self.gradient_bytes + self.weight_bytes + self.report_bytes


def predict(cases: Sequence[Case]) -> list[Cost]:
    """Simulates the cases. Raises RuntimeError if the program is not built or rejects a case."""
    text = "".join(map(_lines, cases))
    run = subprocess.run([program()], input=text, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{_PROGRAM}: {run.stderr.strip()}")
    return [Cost(**json.loads(line)) for line in run.stdout.splitlines()]


def program() -> Path:
    """Returns the path of the simulator: among the files of a Bazel test, or in bazel-bin of this checkout."""
    places = [_ROOT / _PROGRAM, _ROOT / "bazel-bin" / _PROGRAM]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise RuntimeError(f"{_PROGRAM} is not built: bazel build //{_PROGRAM.replace('/predict', ':predict')}")
    return found


def _lines(case: Case) -> str:
    """Returns a case as the simulator's input."""
    cluster, model = case.cluster, case.model
    policy = model.policy
    main = policy.main_grads_dtype or policy.param_dtype
    if case.strategy in ("optim_grads_params", "DDP hook"):
        main = policy.param_dtype  # here gradients have the dtype in which backward computed them
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
