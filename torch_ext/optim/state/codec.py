"""The optimizer's state of one parameter: at rest, as the operators keep it, and logical, as checkpoints hold it.

At rest (`opt.state[p]`)                                   logical (`state_dict()`, torch's keys and one more)
  step              fp32, one element                        step
  exp_avg           policy dtype, shape of p                 exp_avg       fp32 where it is block-scaled, else as it is
  exp_avg_sq        policy dtype, shape of p                 exp_avg_sq    likewise; block-scaled ones hold the root
  scales            uint8, where a moment is fp16 or uint8: a byte per 128 elements of exp_avg, then of exp_avg_sq
  master_param      fp32, shape of p                         master_param  fp32
  master_remainder  int16, shape of p                        master_param  fp32, exactly (weight, remainder)
  checksum           int64, beside a master: checksums of the weights, by which writes of others to them are noticed
At most one of the masters exists. Decoding and encoding again gives the same bytes.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ext.native import constants, ops
from torch_ext.policy.policy import Policy
from torch_ext.tensors import dense

# Of each moment where it is block-scaled.
FORMATS = {"exp_avg": constants.FORMAT_SIGNED, "exp_avg_sq": constants.FORMAT_SQRT}
MASTERS = {"master_param": torch.float32, "master_remainder": torch.int16}  # at rest; at most one of them
CHECKSUMED = {"master_param": constants.SAMPLED, "master_remainder": constants.CHECKSUM}  # weights per checksum
_NO_COUNT = torch.empty(0, dtype=torch.int64)
LOGICAL = ("step", "exp_avg", "exp_avg_sq", "master_param")
GRAIN = CHECKSUMED["master_remainder"]
"""Elements that are encoded together: a part of a state begins at a multiple of it."""


class StateDtypes(NamedTuple):
    """What the state of a parameter is made of."""

    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    master: str | None  # the key of its master: "master_param", "master_remainder"

    def scaled(self, moment: str) -> bool:
        return getattr(self, moment) in (torch.float16, torch.uint8)

    def logical(self) -> dict[str, bool]:
        """What checkpoints hold beside the step, and whether it has to be decoded."""
        found = {moment: self.scaled(moment) for moment in FORMATS}
        return found | ({"master_param": self.master != "master_param"} if self.master else {})


def kinds_of(policy: Policy, dtype: torch.dtype) -> StateDtypes:
    """What a parameter in `dtype` has under the policy. Raises ValueError for settings that the optimizer refuses."""
    row = policy.row(dtype)
    if row.main_params_dtype not in (None, torch.float32):
        raise ValueError(
            f"main_params_dtype is {row.main_params_dtype}: a master must hold more than the weight; torch.float32 "
            f"(or None, "
            "for no master) is legal"
        )
    master = None
    if dtype != torch.float32 and row.main_params_dtype is not None:
        remainder = row.store_param_remainders and dtype == torch.bfloat16
        master = "master_remainder" if remainder else "master_param"
    return StateDtypes(row.exp_avg_dtype, row.exp_avg_sq_dtype, master)


def blocks(p: Tensor) -> int:
    return -(-p.numel() // constants.BLOCK)


def complete(state: Mapping[str, Any], kinds: StateDtypes) -> bool:
    """Whether the state has been made: all of it, or nothing but the step."""
    scaled = kinds.scaled("exp_avg") or kinds.scaled("exp_avg_sq")
    checksum = "checksum" if kinds.master else None
    wanted = ("exp_avg", "exp_avg_sq", "scales" if scaled else None, kinds.master, checksum)
    return all(key is None or key in state for key in wanted)


def settle(p: Tensor, state: dict[str, Any], kinds: StateDtypes, name: str) -> None:
    """Sees to it that complete state at rest is that of p as p is now.

    Where p came to lie differently in memory (channels_last, say), the state follows. Raises ValueError where somebody
    put a state here that p cannot have.
    """
    keys = ["exp_avg", "exp_avg_sq"] + ([kinds.master] if kinds.master else [])
    expected = [kinds.exp_avg, kinds.exp_avg_sq] + ([MASTERS[kinds.master]] if kinds.master else [])
    for key, dtype in zip(keys, expected, strict=True):
        if state[key].dtype != dtype or state[key].shape != p.shape:
            raise ValueError(
                f"{name} is {tuple(p.shape)} in {p.dtype}, so its {key} must be {tuple(p.shape)} in {dtype}; it is "
                f"{tuple(state[key].shape)} in {state[key].dtype}. A model that was converted after its optimizer took "
                "steps needs a new optimizer"
            )
    if kinds.master:
        _fit_checksum(p, state, kinds)
    contiguous = not dense.is_dense(p)
    for key in keys:
        if not (state[key].is_contiguous() if contiguous else dense.same_order(state[key], p)):
            p = p.to(state[key].device)  # the state may lie on the host
            (settled,) = make([(p, kinds)])
            encode(p, decode(p, state, kinds), kinds, {}, settled)
            state.update(settled)
            return


def _parts(p: Tensor, kinds: StateDtypes) -> dict[str, tuple[Tensor, torch.dtype]]:
    """What the state of p has beside the step: the dtype of each, and a tensor of its shape."""
    parts = {"exp_avg": (p, kinds.exp_avg), "exp_avg_sq": (p, kinds.exp_avg_sq)}
    scaled = kinds.scaled("exp_avg") + kinds.scaled("exp_avg_sq")
    if scaled:
        parts["scales"] = (torch.empty(1, device=p.device).expand(scaled * blocks(p)), torch.uint8)
    if kinds.master:
        parts[kinds.master] = (p, MASTERS[kinds.master])
        count = -(-p.numel() // CHECKSUMED[kinds.master])
        parts["checksum"] = (torch.empty(1, device=p.device).expand(count), torch.int64)
    return parts


def nbytes(p: Tensor, kinds: StateDtypes) -> int:
    """Bytes of the state of p, without the step."""
    return sum(shaped.numel() * dtype.itemsize for shaped, dtype in _parts(p, kinds).values())


def make(wanted: Sequence[tuple[Tensor, StateDtypes]]) -> list[dict[str, Tensor]]:
    """Zero moments, and the weight as its own master, without the step: the state of each parameter.

    Those of small parameters share their memory (see `dense`).
    """
    states: list[dict[str, Tensor]] = [{} for _ in wanted]
    parts = [_parts(p, kinds) for p, kinds in wanted]
    # Kind by kind, so that one kind's tensors follow each other in memory: the operator's checks take them as one.
    kept = ("exp_avg", "exp_avg_sq", "scales", *MASTERS, "checksum")
    order = [(i, key) for key in kept for i in range(len(wanted))]
    present = [(i, key) for i, key in order if key in parts[i]]
    for (i, key), made in zip(present, dense.zeros_like([parts[i][key] for i, key in present]), strict=True):
        states[i][key] = made
    for (p, kinds), state in zip(wanted, states, strict=True):
        if kinds.master == "master_param":
            state["master_param"].copy_(p)  # a remainder of 0 is exactly the weight
        if kinds.master:
            renew_checksum(dense.in_order_of(state[kinds.master], p.detach()), state, kinds)
    return states


def _scale_rows(state: Mapping[str, Tensor], kinds: StateDtypes) -> Tensor:
    """`scales` by moment (a view)."""
    return state["scales"].view(kinds.scaled("exp_avg") + kinds.scaled("exp_avg_sq"), blocks(state["exp_avg"]))


def renew_checksum(weight: Tensor, state: Mapping[str, Any], kinds: StateDtypes) -> None:
    """The checksum becomes that of `weight`, which is contiguous in the master's memory order."""
    assert kinds.master is not None
    ops.call(
        "master_checksum_",
        [weight],
        [dense.flat(state[kinds.master])],
        [state["checksum"]],
        _NO_COUNT,
        constants.CHECKSUM_RENEW,
    )


def _fit_checksum(p: Tensor, state: dict[str, Any], kinds: StateDtypes) -> None:
    """Anew where somebody cut the state to another shape of the parameter, as pruning does."""
    count = _parts(p, kinds)["checksum"][0].numel()
    if state["checksum"].shape != (count,):
        state["checksum"] = torch.zeros(count, dtype=torch.int64, device=state["checksum"].device)
        weight = p.detach().to(state["checksum"].device)
        renew_checksum(dense.in_order_of(state[kinds.master or ""], weight), state, kinds)


def _own_remainder(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The remainders that belong to the weight as it is: 0, which makes a weight its own master, in blocks that
    somebody else wrote to (an average that was swapped in, say)."""
    remainder, stale = state["master_remainder"], torch.zeros(1, dtype=torch.int64, device=weight.device)
    masters, checksums = [dense.flat(remainder)], [state["checksum"]]
    ops.look("master_checksum_", [weight], masters, checksums, stale, constants.CHECKSUM_CHECK)
    if not int(stale):
        return remainder
    remainder, checksum = remainder.clone(), state["checksum"].clone()
    ops.call("master_checksum_", [weight], [dense.flat(remainder)], [checksum], _NO_COUNT, constants.CHECKSUM_RESYNC)
    return remainder


def scale_of(state: Mapping[str, Tensor], kinds: StateDtypes, moment: str) -> Tensor:
    """The part of `scales` that belongs to a block-scaled moment (a view)."""
    return _scale_rows(state, kinds)[int(moment == "exp_avg_sq" and kinds.scaled("exp_avg"))]


def part(state: Mapping[str, Any], kinds: StateDtypes, begin: int, end: int) -> dict[str, Tensor]:
    """Views of complete state at rest, without the step: that of elements [begin, end) in memory order, which `decode`
    and `encode` take beside that part of the weight. Both are multiples of GRAIN; end may be that of the parameter."""
    parts = {key: dense.flat(state[key]).view(-1)[begin:end] for key in FORMATS}
    if kinds.master:
        parts[kinds.master] = dense.flat(state[kinds.master]).view(-1)[begin:end]
    if kinds.master == "master_remainder":
        parts["checksum"] = state["checksum"][begin // GRAIN : -(-end // GRAIN)]
    if "scales" in state:
        parts["scales"] = _scale_rows(state, kinds)[:, begin // constants.BLOCK : -(-end // constants.BLOCK)]
    return parts


def decode(
    p: Tensor, state: Mapping[str, Any], kinds: StateDtypes, wanted: Collection[str] = LOGICAL
) -> dict[str, Any]:
    """At rest -> logical: of the wanted keys, those that there are. Tensors that are logical already are handed out as
    they are, not copied."""
    logical: dict[str, Any] = {"step": state["step"]} if "step" in wanted else {}
    for moment, form in FORMATS.items():
        if moment not in wanted:
            continue
        value = state[moment]
        if kinds.scaled(moment):
            decoded = dense.unpooled_like(value, torch.float32)
            source, target = dense.flat(value), dense.flat(decoded)
            ops.call(
                "cast_",
                [source],
                [target],
                [scale_of(state, kinds, moment)],
                [],
                dense.NONE,
                form,
                constants.NEAREST,
                0,
                0,
            )
            value = decoded
        logical[moment] = value
    if "master_param" not in wanted:
        return logical
    if kinds.master == "master_param":
        logical["master_param"] = state["master_param"]
    elif kinds.master == "master_remainder":
        weight = dense.in_order_of(state["master_remainder"], p.detach().to(state["master_remainder"].device))
        remainder = _own_remainder(weight, state)
        master = dense.unpooled_like(remainder, torch.float32)
        ops.call("master_decode_", [weight], [dense.flat(remainder)], [dense.flat(master)])
        logical["master_param"] = master
    return logical


def encode(
    p: Tensor, logical: Mapping[str, Any], kinds: StateDtypes, own: Mapping[str, Any], state: dict[str, Tensor]
) -> None:
    """Logical -> at rest, without the step, into `state` as it was made. What is missing stays as it was made: a master
    is seeded from the weight.

    Copies, except of tensors that are `own` state already: they take their place. Touches neither p nor `own`.
    """
    for moment, form in FORMATS.items():
        if (value := logical.get(moment)) is None:
            continue
        if kinds.scaled(moment):
            wide = dense.in_order_of(state[moment], value.to(device=p.device, dtype=torch.float32))
            target = dense.flat(state[moment])
            ops.call(
                "cast_",
                [wide],
                [target],
                [],
                [scale_of(state, kinds, moment)],
                dense.NONE,
                form,
                constants.NEAREST,
                0,
                0,
            )
        else:
            _install(state, moment, value, own)
    master = logical.get("master_param")
    if master is not None and kinds.master == "master_param":
        _install(state, "master_param", master, own)
    elif master is not None and kinds.master == "master_remainder":
        remainder = state["master_remainder"]
        wide = dense.in_order_of(remainder, master.to(device=p.device, dtype=torch.float32))
        # The operator also writes the weight that the remainder belongs to: not ours, loading moves no weight.
        weight = torch.empty(wide.shape, dtype=p.dtype, device=p.device)
        ops.call("master_encode_", [wide], [weight], [dense.flat(remainder)])
        renew_checksum(weight, state, kinds)


def _install(state: dict[str, Tensor], key: str, value: Tensor, own: Mapping[str, Any]) -> None:
    mine = own.get(key)
    if mine is not None and value is mine and mine.dtype == state[key].dtype and mine.device == state[key].device:
        state[key] = mine
    else:
        state[key].copy_(value)


def refuse(p: Tensor, logical: Mapping[str, Any], where: str) -> None:
    """Raises ValueError or TypeError unless `logical` is the state of a parameter like p."""
    for key in ("step", "exp_avg", "exp_avg_sq"):
        if key not in logical:
            raise ValueError(
                f"{where} has no {key!r}; the state of an Adam has {', '.join(LOGICAL[:3])} (and master_param), this "
                f"one has {', '.join(map(str, logical)) or 'nothing'}"
            )
    for key, value in logical.items():
        if key == "max_exp_avg_sq":
            raise ValueError(
                f"{where} was saved with amsgrad=True, which torch_ext does not have; resume with torch.optim"
            )
        if key not in LOGICAL:
            raise ValueError(f"{where} has {key!r}; the state of an Adam has {', '.join(LOGICAL)}")
        if key == "step":
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            found = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{where}: {key} is {found}; a floating-point tensor (a logical state, decoded) is legal")
        if value.shape != p.shape:
            raise ValueError(
                f"{where}: {key} has shape {tuple(value.shape)} and the parameter has {tuple(p.shape)}; equal "
                "shapes are legal"
            )
    step = float(logical["step"])
    if not 0 <= step < 2**24 or step != int(step):
        raise ValueError(f"{where}: step is {step}; a whole number in [0, 2^24) is legal")
