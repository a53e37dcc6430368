"""Random training programs of one process: steps, changing hyperparameters, missing gradients, errors, writes to
weights, checkpoints. torch.optim.AdamW trains a shadow of each parameter in fp32; both must stay close."""

import pathlib
import random
from dataclasses import dataclass
from typing import Any

import torch

import torch_ext

SHAPES = [(3, 5), (130,), (), (40, 7), (1,), (2, 2, 3, 8)]
_OPERATIONS = 25
# By form: the parameters' dtype, and overrides of the policy. Moments are fp32, like those of torch's optimizer.
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16 remainders": (torch.bfloat16, {"store_param_remainders": True}),
    "fp16": (torch.float16, {}),
}


@dataclass(frozen=True)
class Case:
    """What one program trains; drawn from its number."""

    number: int
    form: str
    offload_fraction: float
    decoupled: bool
    """AdamW; False: Adam."""
    maximize: bool

    @classmethod
    def of(cls, number: int) -> "Case":
        draw = random.Random(f"step program {number}")
        return cls(
            number,
            draw.choice(list(FORMS)),
            draw.choice([0.0, 0.0, 0.5, 1.0]),
            draw.random() < 0.7,
            draw.random() < 0.2,
        )


class Program:
    """One case: parameters with our optimizer, their shadows with torch's, and the operations on both."""

    def __init__(self, case: Case, folder: pathlib.Path) -> None:
        self.case, self.folder = case, folder
        self.draw = random.Random(f"operations {case.number}")
        dtype, self.config = FORMS[case.form]
        self.dtype, self.log = dtype, list[str]()
        self._pending: dict[int, torch.Tensor] = {}  # weights written since the last step, by parameter
        start = [self._noise(shape).to(dtype) for shape in SHAPES]
        self.params = [torch.nn.Parameter(value) for value in start]
        self.shadows = [torch.nn.Parameter(value.float().clone()) for value in start]
        self.optimizer = self._ours()
        theirs = torch.optim.AdamW if case.decoupled else torch.optim.Adam
        self.reference = theirs(self._groups(self.shadows), maximize=case.maximize)

    def _noise(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.draw.randrange(1 << 30)))

    def _groups(self, params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        first = {"params": params[:4], "lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-6}
        return [first, {"params": params[4:], "lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.0, "eps": 1e-6}]

    def _ours(self) -> Any:
        """Returns a new optimizer of ours for the parameters."""
        moments = {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "use_precision_aware_optimizer": True}
        policy = torch_ext.load_policy(self.dtype, override_optimizer_config={**moments, **self.config})
        ours = torch_ext.AdamW if self.case.decoupled else torch_ext.Adam
        return ours(
            self._groups(self.params),
            maximize=self.case.maximize,
            policy=policy,
            offload_fraction=self.case.offload_fraction,
        )

    def run(self) -> str:
        """Does the operations. Returns what is wrong, and after which operations; "" if nothing is."""
        chosen = [self._step, self._hyper, self._refused, self._written, self._checkpoint, self._zero]
        for _ in range(_OPERATIONS):
            operation: Any = self.draw.choices(chosen, [10, 2, 2, 2, 2, 1])[0]
            try:
                operation()
            except Exception as error:
                raise AssertionError(f"{error} in {'; '.join(self.log)}") from error
            if wrong := self._differs():
                return f"{wrong} after {'; '.join(self.log)}"
        return ""

    # -- operations

    def _gradients(self) -> list[int]:
        """Sets gradients, and drops those of some parameters. Returns the positions of those that have one."""
        there = [i for i in range(len(SHAPES)) if self.draw.random() < 0.85]
        for i, (p, shadow) in enumerate(zip(self.params, self.shadows, strict=True)):
            p.grad = shadow.grad = None
            if i in there:
                grad = self._noise(SHAPES[i]).to(self.dtype)
                p.grad, shadow.grad = grad, grad.float().clone()
        return there

    def _step(self) -> None:
        self._notice()
        self.log.append(f"step of {self._gradients()}")
        if self.draw.random() < 0.3:
            norm = self.draw.choice([0.5, 5.0, 1e6])
            self.log[-1] += f", clipped to {norm}"
            torch_ext.clip_grad_norm_(self.optimizer, norm)
            torch.nn.utils.clip_grad_norm_([p for p in self.shadows if p.grad is not None], norm)
        self.optimizer.step()
        self.reference.step()

    def _hyper(self) -> None:
        index, key = self.draw.randrange(2), self.draw.choice(["lr", "weight_decay", "betas"])
        value: Any = self.draw.choice([(0.9, 0.95), (0.0, 0.99)]) if key == "betas" else self.draw.random() * 0.02
        self.log.append(f"group {index}'s {key} = {value}")
        for optimizer in (self.optimizer, self.reference):
            optimizer.param_groups[index][key] = value

    def _refused(self) -> None:
        """Takes a step with an illegal option, which must change no bit, and raise if a parameter has a gradient."""
        self._gradients()
        self.log.append("step with eps = -1")
        before = [p.detach().clone() for p in self.params]
        group = self.optimizer.param_groups[self.draw.randrange(2)]
        was, group["eps"] = group["eps"], -1.0
        try:
            self.optimizer.step()
        except ValueError:
            pass
        else:
            assert not any(p.grad is not None for p in self.params), "eps = -1 was not refused"
        group["eps"] = was
        assert all(torch.equal(p, b) for p, b in zip(self.params, before, strict=True)), "a refused step wrote"

    def _written(self) -> None:
        """Writes to a weight in one of several ways. It becomes the master where the master rounds to another value."""
        i = self.draw.randrange(len(SHAPES))
        value = self._noise(SHAPES[i]).to(self.dtype)
        how = self.draw.choice(["copy_", "data", "data.copy_", "numpy"])
        self.log.append(f"weight {i} written by {how}")
        with torch.no_grad():
            if how == "copy_":
                self.params[i].copy_(value)
            elif how == "data":
                self.params[i].data = value.clone()
            elif how == "data.copy_":
                self.params[i].data.copy_(value)
            else:
                self.params[i].detach().view(-1).view(torch.uint8).numpy()[:] = value.view(-1).view(torch.uint8).numpy()
        self._pending[i] = value

    @torch.no_grad()
    def _notice(self) -> None:
        """Gives the shadows the values that were written, as the next step or load gives them to the masters.

        Masters stored as remainders are resynced in blocks. These tensors are smaller than a block: all or nothing."""
        for i, value in self._pending.items():
            shadow = self.shadows[i]
            same = shadow.to(self.dtype) == value
            if "remainders" in self.case.form:
                same = same.all()
            shadow.copy_(torch.where(same, shadow, value.float()))
        self._pending.clear()

    def _checkpoint(self) -> None:
        """Goes on with new parameters and a new optimizer that loads the state, through a file or in memory."""
        self._notice()
        through = self.draw.choice(["memory", "a file"])
        self.log.append(f"checkpoint through {through}")
        saved = {"model": dict(enumerate(self.params)), "optimizer": self.optimizer.state_dict()}
        if through == "a file":
            torch_ext.save(saved, self.folder / "checkpoint.pt")
            saved = torch_ext.load(self.folder / "checkpoint.pt")
        self.params = [torch.nn.Parameter(p.detach().clone()) for p in saved["model"].values()]
        self.optimizer = self._ours()
        self.optimizer.load_state_dict(saved["optimizer"])

    def _zero(self) -> None:
        set_to_none = self.draw.random() < 0.5
        self.log.append(f"zero_grad({set_to_none})")
        self.optimizer.zero_grad(set_to_none=set_to_none)

    # -- the check

    def _differs(self) -> str:
        """Returns how a weight differs from its shadow; "" if none does."""
        for i, (p, shadow) in enumerate(zip(self.params, self.shadows, strict=True)):
            if i in self._pending:
                continue
            # Half an ulp of the weight, plus the difference between fp32 formulas that round in another order.
            half = torch.finfo(self.dtype).eps * 0.5 if self.dtype != torch.float32 else 0.0
            close = torch.isclose(p.float(), shadow.detach(), rtol=half + 2e-5, atol=3e-5)
            if not close.all():
                at = int((~close).flatten().nonzero()[0])
                mine, theirs = p.detach().flatten()[at].item(), shadow.detach().flatten()[at].item()
                return f"weight {i} is {mine!r} at {at}, not {theirs!r}; {int((~close).sum())} of {p.numel()} differ"
        return ""


def run(_rank: int, _size: int, _group: Any, _line: Any, case: Case, folder: pathlib.Path) -> str:
    """Runs the case. Returns what is wrong; "" if nothing is."""
    return Program(case, folder).run()
