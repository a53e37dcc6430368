"""Trainers of random histories (tests/feature_programs.py): a model whose gradients are chosen, and the acts."""

import copy
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torch_ext

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES: list[tuple[int, ...]] = [(3, 5), (2600,), (129,), (16, 130), (1,)]
LATE, FROZEN = (40, 9), (1500,)


class Layers(nn.Module):
    """A model whose gradients are the tensors passed to `forward`. `late` and `frozen` do not train at first."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        names = {**{f"p{i}": shape for i, shape in enumerate(SHAPES)}, "late": LATE, "frozen": FROZEN}
        for name, shape in names.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        self.late.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, name) * grad).sum().float() for name, grad in grads.items()]).sum()


class Config(NamedTuple):
    """The configuration of both trainers; `features` is used by the first one only."""

    dtype: torch.dtype
    kind: type
    settings: dict[str, Any]
    """Settings of the policy."""
    options: dict[str, Any]
    features: dict[str, Any]
    exact: bool
    sliceable: bool

    @property
    def masters(self) -> bool:
        """Whether weights have separate masters. Without them a write may go unnoticed."""
        return self.dtype != FP32 and not self.settings

    @classmethod
    def of(cls, draw: random.Random, strategy: str | None) -> "Config":
        dtype = draw.choice([BF16, BF16, BF16, BF16, FP32, FP16])
        options: dict[str, Any] = {"lr": 10.0 ** draw.randint(-5, -2), "skip_nonfinite": draw.random() < 0.5}
        of_16_bits = ["bf16_remainder", "8bit"] if dtype == BF16 else []
        options["states"] = draw.choice(["bf16", "fp32", *of_16_bits])
        settings: dict[str, Any] = {}
        if dtype != FP32 and draw.random() < 0.1:
            options["states"], settings = None, {"main_params_dtype": None}
        elif dtype != FP32 and options["states"] not in of_16_bits and draw.random() < 0.15:
            options["on_external_write"] = "ignore"
        features: dict[str, Any] = {}
        if draw.random() < 0.7 and not settings:
            features = {"ema_decay": draw.choice([0.5, 0.9]), "ema_every": draw.choice([1, 1, 3])}
            features["ema_dtype"] = draw.choice([BF16, "24bit", FP32])
        kind = torch_ext.Muon if draw.random() < 0.25 and strategy != "ddp" else torch_ext.AdamW
        if kind is torch_ext.Muon:
            options |= {"ns_dtype": FP32}
        elif draw.random() < 0.3 and strategy in (None, "optim", "optim_grads") and dtype != FP16:
            options["skip_nonfinite"], features["step_in_backward"] = False, True
            if strategy is not None:
                features["offload_fraction"] = draw.choice([0.0, 0.0, 0.5])
        else:
            features["offload_fraction"] = draw.choice([0.0, 0.0, 0.4, 1.0])
        return cls(dtype, kind, settings, options, features, draw.random() < 0.3, draw.random() < 0.4)


def local(p: Any) -> Tensor:
    return (p.detach().to_local() if hasattr(p, "to_local") else p).detach()


def whole(p: Any) -> Tensor:
    """Returns a whole copy of a tensor. Collective if it is a DTensor."""
    value: Any = p.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(-1).view(kind), b.contiguous().view(-1).view(kind))


def gathered(mine: Any) -> list[Any]:
    """Returns the values `mine` of all ranks. Collective."""
    if not torch.distributed.is_initialized():
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


def _parallel(model: nn.Module, policy: Any, strategy: str | None) -> nn.Module:
    if strategy == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
        torch_ext.register_comm_hook(wrapped, policy)
        return wrapped
    if strategy is not None:
        torch_ext.parallelize(model, policy, strategy=strategy)
    return model


class Trained:
    """A model and its optimizer."""

    def __init__(self, config: Config, with_features: bool, strategy: str | None) -> None:
        self.config, self.with_features, self.strategy = config, with_features, strategy
        self.late = self.steps = 0
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.fraction: float | None = None
        self.make()

    def make(self) -> None:
        c = self.config
        self.plain = Layers(c.dtype)
        options = c.options | (c.features if self.with_features else {})
        ddp: dict[str, Any] = {} if self.strategy is None else {"bucket_size": 1000}
        if self.strategy is not None and options.pop("step_in_backward", False):
            ddp["step_in_backward"] = True
        policy = torch_ext.load_policy(c.dtype, override_optimizer_config=c.settings, override_ddp_config=ddp)
        self.model = _parallel(self.plain, policy, self.strategy)
        if self.with_features and self.fraction is not None and "offload_fraction" in options:
            options["offload_fraction"] = self.fraction
        self.on_host = bool(options.get("offload_fraction"))
        named = [(name, p) for name, p in self.plain.named_parameters() if p.requires_grad]
        self.optimizer: Any = c.kind(named, policy=policy, **options)

    def add_late(self) -> None:
        self.plain.late.requires_grad_(True)
        group = {"params": [("late", self.plain.late)], "lr": 1e-3}
        if self.config.kind is torch_ext.Muon:
            group["algorithm"] = "adamw"
        self.optimizer.add_param_group(group)

    def params(self) -> dict[str, Any]:
        return dict(self.plain.named_parameters())

    def optimized(self) -> list[tuple[str, Any]]:
        """The optimizer's parameters, in the order of their indices in a state_dict."""
        names = {id(p): name for name, p in self.params().items()}
        return [(names[id(p)], p) for group in self.optimizer.param_groups for p in group["params"]]

    def trained(self) -> dict[str, Any]:
        return {name: p for name, p in self.params().items() if p.requires_grad}

    def grads(self, seed: int, factor: float = 1.0) -> dict[str, Tensor]:
        draw = random.Random(seed)
        common, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 * seed + self.rank + 1)
        size = draw.choice([0.1, 1.0, 10.0])
        found = {}
        for name, p in self.trained().items():
            grad = (torch.randn(p.shape, generator=common) + torch.randn(p.shape, generator=own)) * size * factor
            found[name] = grad.to(self.config.dtype)
        return found

    def backward(self, grads: dict[str, Tensor]) -> None:
        self.model(grads).backward()

    def end_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def in_backward(self) -> bool:
        """Whether the last backward stepped. Under a strategy the first one does not, nor one that measures health."""
        return self.with_features and bool(self.optimizer.stepped_in_backward())


class Stepping(Trained):
    """The acts that take steps, or change what steps do."""

    def step(self, seed: int) -> None:
        self.backward(self.grads(seed))
        self.end_step()

    def step_of_some(self, seed: int) -> None:
        draw = random.Random(seed)
        self.backward({name: g for name, g in self.grads(seed).items() if draw.random() < 0.6 or name == "p1"})
        self.end_step()

    def accumulate(self, seed: int) -> None:
        self.backward(self.grads(seed))
        self.backward(self.grads(seed + 1))
        self.end_step()

    def clip(self, seed: int) -> None:
        self.backward(self.grads(seed))
        torch_ext.clip_grad_norm_(self.optimizer, 0.5)
        self.end_step()

    def clip_by_torch(self, seed: int) -> None:
        self.backward(self.grads(seed))
        torch.nn.utils.clip_grad_norm_(list(self.trained().values()), 0.5)
        self.end_step()

    def scaled(self, seed: int) -> None:
        self.backward(self.grads(seed, 4.0))
        self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        self.end_step()
        del self.optimizer.grad_scale, self.optimizer.found_inf

    def skip(self, seed: int) -> None:
        grads = self.grads(seed)
        grads["p1"].view(-1)[7] = torch.inf
        self.backward(grads)
        self.end_step()

    def drop(self, seed: int) -> None:
        """Drops the gradients after a backward that stepped: what it stepped is kept."""
        self.backward(self.grads(seed))
        if self.in_backward and not self.on_host:  # parameters on the host are stepped by step() only
            self.optimizer.zero_grad()
        else:
            self.end_step()

    def refused(self, seed: int) -> None:
        """Makes calls that raise between a backward that stepped and step()."""
        self.backward(self.grads(seed))
        if self.in_backward:
            for name in ("measure_health", "master_weights", "ema_weights"):
                if name != "ema_weights" or "ema_decay" in self.config.features:
                    self._refused(getattr(self.optimizer, name), name)
        self.end_step()

    def _refused(self, call: Any, name: str) -> None:
        try:
            with call():
                pass
        except RuntimeError as error:
            assert "after a backward that stepped some weights already: call step() first" in str(error), error
        else:
            raise AssertionError(f"{name} was not refused")

    def freeze(self, seed: int) -> None:
        draw = random.Random(seed)
        name = draw.choice(["p0", "p2", "p3"])
        p = self.params()[name]
        p.requires_grad_(not p.requires_grad)

    def group(self, seed: int) -> None:
        if not self.late:
            self.late = 1
            self.add_late()

    def lr(self, seed: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 10.0 ** random.Random(seed).uniform(-5, -2)


class Trainer(Stepping):
    """The acts that write to weights and states."""

    def write(self, seed: int) -> None:
        """Writes in place, so that torch counts a new version of the tensor."""
        draw = random.Random(seed)
        with torch.no_grad():
            self.params()[draw.choice(sorted(self.params()))].mul_(draw.choice([0.5, 1.0, 1.25]))

    def write_all_silently(self, seed: int) -> None:
        draw = random.Random(seed)
        if self.config.masters:
            local(self.params()[draw.choice(sorted(self.params()))].data).mul_(1.25)

    def write_one_and_resync(self, seed: int) -> None:
        draw = random.Random(seed)
        p = local(self.params()[draw.choice(sorted(self.params()))].data)
        if p.numel() and self.config.masters:
            p.view(-1)[draw.randrange(p.numel())] = draw.uniform(-2, 2)
        self.optimizer.resync_masters(force=draw.random() < 0.3)

    def seed_masters(self, seed: int) -> None:
        """Sets weights and masters from a state dict of higher precision."""
        generator = torch.Generator().manual_seed(seed)
        wide = {name: torch.randn(p.shape, generator=generator) for name, p in self.params().items()}
        with torch.no_grad():
            for name, p in self.params().items():
                value: Any = wide[name].to(p.dtype)
                p.copy_(value if not hasattr(p, "to_local") else _like(value, p))
        self.optimizer.resync_masters(state_dict=wide)

    def clamp(self, seed: int) -> None:
        with self.optimizer.master_weights() as masters:
            for master in masters.values():
                master.clamp_(-1.5, 1.5)

    def average_masters(self, seed: int) -> None:
        with self.optimizer.master_weights():
            for p in self.trained().values():
                local(p).mul_(0.75)

    def move(self, seed: int) -> None:
        """Moves the weights of the trainer with features to other addresses."""
        if self.with_features and self.strategy in (None, "ddp"):
            for p in self.trained().values():
                p.data = p.data.clone()

    def save(self, seed: int) -> None:
        state = self.optimizer.state_dict()
        self.saved = copy.deepcopy((self.late, self.model.state_dict(), state))

    def load(self, seed: int) -> None:
        """Loads what was saved into the same optimizer, with or without the weights."""
        saved = getattr(self, "saved", None)
        if saved is None or saved[0] != self.late:
            return
        _, weights, state = copy.deepcopy(saved)
        how = random.Random(seed).randrange(4)
        if how == 3:
            self.load_in_place(weights, state)
            return
        if how == 0:
            self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        if how == 1:
            self.model.load_state_dict(weights)

    def load_in_place(self, weights: Any, state: Any) -> None:
        """Loads in place, as torch.distributed.checkpoint.load does."""
        own = self.optimizer.state_dict()
        if own["state"].keys() != state["state"].keys():
            self.optimizer.load_state_dict(state)
            return
        with torch.no_grad():
            for index, entry in own["state"].items():
                for key, value in entry.items():
                    value.copy_(state["state"][index][key])
            for name, value in self.model.state_dict().items():
                value.copy_(weights[name])


def _like(value: Tensor, p: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
