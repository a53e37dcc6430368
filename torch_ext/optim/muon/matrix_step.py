"""The step of Muon's matrices: checks that raise before anything is written, and the division of work over ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.grads import stats as grads_stats
from torch_ext.optim.muon import hyper, product_rate, sharing
from torch_ext.optim.muon.matrix_exchange import Exchange
from torch_ext.optim.muon.matrix_member import MatrixMember, StepScalars
from torch_ext.optim.muon.owners import CMatrix, Owners, agreed_smallest
from torch_ext.optim.muon.products import Products, products_on
from torch_ext.optim.muon.sharded_matrices import ShardedStep
from torch_ext.optim.muon.whole_matrices import Replicated, ReplicatedRun, step_alone
from torch_ext.optim.state import masters
from torch_ext.optim.state.param_state import ParamState, refuse_grad
from torch_ext.optim.state.write_check import FixedMemory
from torch_ext.optim.step_progress import NotStepped
from torch_ext.tensors import dense

if TYPE_CHECKING:
    from torch_ext.optim.optimizer_states import Settings


class _GroupPlan(NamedTuple):
    """The division of work for the matrices that the ranks of one process group share."""

    owners: Owners
    first: dict[MatrixMember, int]  # parameter -> index of its first matrix in `owners`
    exchange: Exchange | None  # for sharded matrices; None if there are none


def _run_all(runs: Sequence[Callable[[], None]]) -> None:
    """Calls every function, even if one raises NotStepped; raises the first NotStepped at the end."""
    first: NotStepped | None = None
    for run in runs:
        try:
            run()
        except NotStepped as failure:
            first = first or failure
    if first is not None:
        raise first


class MatrixStep:
    """The step of all matrices of an optimizer. Kept from step to step, as a `StepPlan` is."""

    def __init__(self, members: Sequence[ParamState], optimizer: "Settings") -> None:
        """Raises RuntimeError, naming the parameter, if Muon cannot update one of the members."""
        groups = optimizer.param_groups
        forms = {p: form for group in groups for p, form in zip(group["params"], group["matrices"], strict=True)}
        for m in members:
            sharing.refuse(m, forms[m.param])
        self._members = [
            MatrixMember(
                m,
                groups[m.group],
                forms[m.param],
                optimizer.policy.row(m.param.dtype).grad_comm_dtype,
                sharing.sharing_of(m),
            )
            for m in members
        ]
        self._checked: dict[int, list[Any]] = {}  # group -> hyper-parameters that were found legal
        self.memory = FixedMemory([m.memory_owner for m in members])
        self._groups = list(dict.fromkeys(m.sharing.group for m in self._members if m.sharing is not None))
        self._plans: dict[Any, _GroupPlan] = {}  # process group -> plan; created by the first step
        self._agreed: dict[Any, Owners] = vars(optimizer).setdefault("_owners_agreed", {})
        self._products = products_on(self._members[0].device)
        self._averaging = optimizer.averaging.decay, optimizer.averaging.every

    def check_gradients(self, grads: Sequence[Tensor], found_inf: Tensor) -> None:
        """Raises RuntimeError for illegal gradients. If `found_inf` is empty, also for non-finite ones, on every rank;
        that is collective if matrices are sharded. Called once per step, before anything is written."""
        for m, grad in zip(self._members, grads, strict=True):
            refuse_grad(m.state, grad)
        if found_inf.numel():
            return
        stats, first_bad = grads_stats.of(self._in_order(grads), grads[0].device)
        first = int(first_bad) if int(stats[grads_stats.NONFINITE]) else grads_stats.NO_POSITION
        for group in dict.fromkeys(m.sharing.group for m in self._members if m.sharing and m.sharing.runs is not None):
            first = agreed_smallest(first, group, "whether gradients are finite", self._members[0].device)
        if first != grads_stats.NO_POSITION:
            raise RuntimeError(
                f"the gradient of {self._members[first].name} is not finite: one such element makes all of a "
                "matrix's update non-finite. Nothing was stepped. skip_nonfinite=True skips such steps and counts "
                "them"
            )

    def _in_order(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return [dense.in_order_of(m.state.weight, g).view(-1) for m, g in zip(self._members, grads, strict=True)]

    def begin(
        self,
        grads: Sequence[Tensor],
        shared: tuple[int, int, int],
        scalars: Sequence[Tensor],
        on_external_write: str,
    ) -> "MatrixRun":
        """Makes all remaining checks and returns the run. Raises RuntimeError or MemoryError, naming the parameter,
        before anything is written. The first call is collective. shared: seed, moment_rounding, weight_rounding.
        scalars: grad_scale, clip_coef, found_inf."""
        grad_scale, clip_coef, found_inf = scalars
        skipped = found_inf.numel() > 0 and float(found_inf) != 0
        if on_external_write == "error":
            masters.refuse_modified([m.state for m in self._members if m.state.kinds.master])
        self._check_groups()
        self._products.reserve(self._members)
        self._make_plans()
        by_member = dict(zip(self._members, self._in_order(grads), strict=True))
        external = masters.EXTERNAL_MODES[on_external_write]
        options = StepScalars(*shared, grad_scale, clip_coef, external, found_inf, self._averaging)
        return MatrixRun(self._plans, self._products, by_member, options, skipped)

    def _check_groups(self) -> None:
        """Raises ValueError or TypeError if a group's hyper-parameters were changed to illegal values. Replaces an
        `ns_dtype` of None by the measured one, which is collective."""
        for index, group in {m.state.group: m.group for m in self._members}.items():
            if group["ns_dtype"] is None:
                group["ns_dtype"] = self._faster_dtype()
            values = [float(group[key]) if key == "lr" else group[key] for key in hyper.OF_MATRICES]
            if self._checked.get(index) != values:
                hyper.refuse(group, f"group {index}: ")
                self._checked[index] = values

    def _faster_dtype(self) -> str:
        """Returns the name of the dtype in which products are faster, the same on all ranks. Collective."""
        distributed = torch.distributed
        alone = not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1
        if not self._groups and not alone:
            raise ValueError(
                "ns_dtype=None chooses the dtype by measured speed, and ranks that this optimizer does not know of "
                "may choose another: ns_dtype=torch.float32 or torch.bfloat16 is legal here"
            )
        device = self._members[0].device
        if device.type != "cpu":
            return "bfloat16"  # every GPU that our kernels support multiplies bf16 several times as fast as fp32
        code = list(hyper.NS_DTYPES).index(product_rate.faster_dtype(device))
        for group in self._groups:
            code = agreed_smallest(code, group, "the dtype of Muon's products", device)
        return list(hyper.NS_DTYPES)[code]

    def _make_plans(self) -> None:
        """Creates the plan of each process group. The first call is collective; later ones do nothing."""
        for group in self._groups if not self._plans else ():
            members = [m for m in self._members if m.sharing is not None and m.sharing.group is group]
            owners, first = self._owners_for(members, group), dict[MatrixMember, int]()
            for m in members:
                first[m] = sum(len(before.matrices) for before in first)
            sharded = [m for m in members if m.sharing and m.sharing.runs is not None]
            owner_of = [owners.of[first[m] : first[m] + len(m.matrices)] for m in sharded]
            self._plans[group] = _GroupPlan(owners, first, Exchange(sharded, owner_of, owners) if sharded else None)

    def _owners_for(self, members: Sequence[MatrixMember], group: Any) -> Owners:
        """Returns the owners of these matrices. Collective only once per set of matrices: a rank that rebuilds its
        MatrixStep, when the others do not, must not wait for them."""
        sizes = [size for m in members for size in m.operations()]
        ids = [m.state.id for m in members for _ in m.matrices]
        key = (group, *sizes, *ids)
        if key not in self._agreed:
            matrices = [
                CMatrix.of(i, one, m.transfer_dtype, m.ns_dtype) for i, m in enumerate(members) for one in m.matrices
            ]
            self._agreed[key] = Owners(sizes, matrices, ids, group, members[0].device)
        return self._agreed[key]


class MatrixRun:
    """One step of all matrices, after all checks have passed."""

    def __init__(
        self,
        plans: dict[Any, _GroupPlan],
        products: Products,
        grads: dict[MatrixMember, Tensor],
        scalars: StepScalars,
        skipped: bool,
    ) -> None:
        self._plans, self._products, self._grads = plans, products, grads
        self._scalars, self._skipped = scalars, skipped

    def run(self, counts: Tensor, counted: bool) -> None:
        """Runs the step. counts: `OptimizerStates.counts`. counted: a skipped step was already counted there. Raises
        NotStepped, naming the first parameter that was not updated."""
        if self._skipped:
            counts[0, 0] += int(not counted)
            return
        scalars = self._scalars._replace(resynced=counts[1, 1:])
        replicated = ReplicatedRun(self._products, scalars)
        replicated.start(
            [
                Replicated(member, grad, plan.owners, plan.first[member])
                for member, grad in self._grads.items()
                if member.sharing is not None and member.sharing.runs is None
                for plan in (self._plans[member.sharing.group],)
            ]
        )
        runs: list[Callable[[], None]] = []
        for group, plan in self._plans.items():
            sharded = {
                m: g for m, g in self._grads.items() if m.sharing and m.sharing.group is group and m.sharing.runs
            }
            if plan.exchange is not None:
                runs.append(ShardedStep(plan.exchange, self._products, sharded, scalars).run)
        alone = {m: g for m, g in self._grads.items() if m.sharing is None}
        _run_all([*runs, replicated.finish, partial(step_alone, alone, self._products, scalars)])
