"""Accelerate, Trainer and Lightning on several ranks: in their DistributedDataParallel, and with models that were
parallelized before. Resumed runs must go on bit for bit."""

import os
import pathlib
import socket
import warnings
from typing import Any

import frameworks
import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import bits
from torch.distributed.tensor import DTensor

import torch_ext

WORLD, STEPS, HALF, MAX_NORM = 2, 4, 2, 0.05
BF16 = torch.bfloat16


def _environment(rank: int, world: int) -> None:
    """Sets the variables that a launcher sets for a framework; the process group exists already."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = str(port)


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 1)).to(BF16)


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(WORLD * step + dist.get_rank())).to(BF16)


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x)[:, 0].float() - x.float().abs().sum(1)).square().mean()


def _whole(model: Any) -> list[bytes]:
    """Returns the bits of the whole weights."""
    return bits([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])


# -- Accelerate -------------------------------------------------------------------------------------------------------


def _accelerated(accelerator: Any, way: str) -> tuple[Any, Any]:
    """Returns the model and its optimizer, prepared by Accelerate.

    way: "DDP", the same with our exchange ("DDP, register_comm_hook"), or a strategy of `parallelize`."""
    model = _net()
    policy = torch_ext.load_policy(model)
    if way in ("DDP", "DDP, register_comm_hook"):
        model, optimizer = accelerator.prepare(model, torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy))
        if way != "DDP":
            torch_ext.register_comm_hook(model, policy)
        return model, optimizer
    model = accelerator.prepare_model(model, evaluation_mode=True)  # does not wrap it
    torch_ext.parallelize(model, policy, strategy=way)
    optimizer = accelerator.prepare(torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy))
    accelerator.register_save_state_pre_hook(lambda *_: optimizer.optimizer.consolidate_state_dict())
    return model, optimizer


def _run(accelerator: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
    """Trains these steps with accumulation and clipping; returns the norms."""
    norms = []
    for step in range(2 * steps.start, 2 * steps.stop):
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, _batch(step)))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def _accelerate(rank: int, world: int, ways: list[str], folder: str) -> dict[str, Any]:
    """Trains each way twice, the second time resumed from halfway. Returns norms, weights, whether both agree."""
    from accelerate import Accelerator

    _environment(rank, world)
    answers = {}
    for way in ways:
        runs: list[Any] = []
        for resumed in (False, True):
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            accelerator.free_memory()
            model, optimizer = _accelerated(accelerator, way)
            if resumed:
                accelerator.load_state(f"{folder}/{way}")
                norms = runs[0][0][:HALF]
            else:
                norms = _run(accelerator, model, optimizer, range(HALF))
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    accelerator.save_state(f"{folder}/{way}")
                accelerator.wait_for_everyone()
            norms = norms + _run(accelerator, model, optimizer, range(HALF, STEPS))
            parts = [t.clone() for state in optimizer.optimizer.state.values() for t in state.values()]
            runs.append((norms, _whole(model), bits(parts)))
        first, second = runs
        answers[way] = first[0], first[1], first == second
    return answers


@frameworks.needs("accelerate")
def test_D4_accelerate_on_two_ranks_resumes_bit_for_bit(tmp_path: pathlib.Path) -> None:
    ways = ["DDP", "DDP, register_comm_hook", "no_shard", "optim", "optim_grads"]
    zero, one = ranks.run(WORLD, _accelerate, ways, str(tmp_path), limit=100)
    for way in ways:
        norms, weights, resumed = zero[way]
        assert (norms, weights) == one[way][:2], f"{way}: norms and weights are equal on both ranks"
        assert resumed and one[way][2], way
        assert min(norms) > MAX_NORM, "every step is clipped"
        # The ways round gradients to bf16 in different places. So only the first norm is compared, before weights
        # differ.
        assert norms[0] == pytest.approx(zero["DDP"][0][0], rel=0.02), way


@frameworks.needs("accelerate")
def test_accelerate_saves_every_weight_of_flat_buffers(tmp_path: pathlib.Path) -> None:
    """Accelerate takes tensors of one storage for tied weights, and would save only one of them."""
    ranks.run(WORLD, _saves, str(tmp_path))


def _saves(rank: int, world: int, folder: str) -> None:
    """Saves with Accelerate and with safetensors: both files must have every weight, and load."""
    from accelerate import Accelerator
    from safetensors.torch import load_file, load_model, save_model

    _environment(rank, world)
    for strategy in ("optim", "optim_grads"):
        model = torch_ext.parallelize(_net(), torch_ext.load_policy(BF16), strategy=strategy)
        there = f"{folder}/{strategy}-{rank}"
        Accelerator(cpu=True).save(model.state_dict(), there + ".accelerate", safe_serialization=True)
        save_model(model, there + ".safetensors")
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        for file in (there + ".accelerate", there + ".safetensors"):
            if os.path.exists(file):  # Accelerate saves on the main process only
                saved = load_file(file)
                assert sorted(saved) == sorted(kept)
                assert all(torch.equal(saved[key], kept[key]) for key in kept)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load_model(model, there + ".safetensors")
        assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


def _refused(rank: int, world: int) -> str:
    from accelerate import Accelerator

    _environment(rank, world)
    model = torch_ext.parallelize(_net(), torch_ext.load_policy(BF16), strategy="optim")
    with pytest.raises(RuntimeError, match="prepare_model"):
        Accelerator(cpu=True).prepare(model)
    return type(model).__name__


@frameworks.needs("accelerate")
def test_accelerate_around_a_parallelized_model_says_what_to_do() -> None:
    assert ranks.run(WORLD, _refused) == ["Sequential"] * WORLD


# -- Trainer ----------------------------------------------------------------------------------------------------------


# Trains with Trainer, whole and resumed, with and without our exchange. A parallelized model must be rejected.
def _trainer(rank: int, world: int, folder: str) -> dict[str, Any]:
    import transformers

    _environment(rank, world)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": _loss(self.net, x)}

    class Batches(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"x": torch.randn(16, generator=torch.Generator().manual_seed(i)).to(BF16)}

    def train(way: str, resumed: bool) -> Any:
        model = Net()
        policy = torch_ext.load_policy(model)
        optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy)
        arguments = transformers.TrainingArguments(
            f"{folder}/{way}",
            max_steps=STEPS,
            save_steps=HALF,
            logging_steps=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=MAX_NORM,
            ddp_backend="gloo",
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        )

        class Exchange(transformers.TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                if way != "DDP":
                    torch_ext.register_comm_hook(trainer.model_wrapped, policy)

        trainer: Any = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=Batches(),
            optimizers=(optimizer, None),
            callbacks=[Exchange()],
        )
        if way == "parallelize":
            torch_ext.parallelize(model, policy, strategy="optim")
        trainer.train(resume_from_checkpoint=f"{folder}/{way}/checkpoint-{HALF}" if resumed else None)
        assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
        return norms, _whole(model), bits([t for state in optimizer.state.values() for t in state.values()])

    answers = {way: (train(way, False), train(way, True)) for way in ("DDP", "DDP, register_comm_hook")}
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        train("parallelize", False)
    return answers


@frameworks.needs("transformers", "accelerate")
@pytest.mark.skipif(
    frameworks.older("transformers", "5.20"),
    reason="this transformers has ranks on CPUs load to cpu:0, which torch refuses: they cannot resume",
)
def test_D4_trainer_on_two_ranks_resumes_bit_for_bit(tmp_path: pathlib.Path) -> None:
    zero, one = ranks.run(WORLD, _trainer, str(tmp_path), limit=100)
    for way, (first, second) in zero.items():
        assert first == second == one[way][0] == one[way][1], way
        assert len(first[0]) == STEPS and min(first[0]) > MAX_NORM, "every step is clipped"


# -- Lightning --------------------------------------------------------------------------------------------------------


# Trains with Lightning each way, whole and resumed.
def _lightning(rank: int, world: int, folder: str) -> dict[str, Any]:
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import DDPStrategy

    _environment(rank, world)

    class Parallel(DDPStrategy):
        """DDP's processes and saving, with `parallelize` instead of its wrapper."""

        def __init__(self, policy: Any, way: str) -> None:
            super().__init__(process_group_backend="gloo")
            self.policy, self.way = policy, way

        def configure_ddp(self) -> None:
            torch_ext.parallelize(self.model, self.policy, strategy=self.way)

    class Module(lightning.LightningModule):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.net, self.norms, self.dtype_of_batches = _net().to(dtype), [], dtype

        def configure_optimizers(self) -> Any:
            return torch_ext.AdamW(self.named_parameters(), lr=1e-2)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return _loss(self.net, batch[0].to(self.dtype_of_batches))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norms.append(float(torch_ext.clip_grad_norm_(optimizer, float("inf"))))

        def on_train_start(self) -> None:
            if self.trainer.strategy.__class__ is DDPStrategy and self.exchange is not None:
                torch_ext.register_comm_hook(self.trainer.model, self.exchange)

        exchange: Any = None

    def train(way: str, resumed: bool) -> Any:
        strategy, _, precision = way.partition(", ")
        mixed = precision == "bf16-mixed"
        module = Module(torch.float32 if mixed else BF16)
        policy = torch_ext.load_policy(module)
        module.exchange = policy if way == "DDP, register_comm_hook" else None
        own = strategy != "DDP"
        x = torch.randn(48, 16, generator=torch.Generator().manual_seed(0)).to(BF16)
        saving = lightning.callbacks.ModelCheckpoint(f"{folder}/{way}", "{epoch}", save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            precision="bf16-mixed" if mixed else None,
            strategy=Parallel(policy, strategy) if own else DDPStrategy(process_group_backend="gloo"),
            max_epochs=2,
            gradient_clip_val=MAX_NORM,
            accumulate_grad_batches=2,
            callbacks=[saving],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
        trainer.fit(module, loader, ckpt_path=f"{folder}/{way}/epoch=0.ckpt" if resumed else None)
        states = [t for state in trainer.optimizers[0].state.values() for t in state.values()]
        return module.norms[-3:], _whole(module), bits(states)

    ways = ("DDP", "DDP, register_comm_hook", "no_shard", "optim", "optim_grads", "optim_grads, bf16-mixed")
    return {way: (train(way, False), train(way, True)) for way in ways}


@frameworks.needs("pytorch_lightning")
def test_D4_lightning_on_two_ranks_resumes_bit_for_bit(tmp_path: pathlib.Path) -> None:
    zero, one = ranks.run(WORLD, _lightning, str(tmp_path), limit=100)
    for way, (first, second) in zero.items():
        assert first == second, way
        assert one[way][0] == one[way][1], way
        assert first[:2] == one[way][0][:2], f"{way}: norms and weights are equal on both ranks"
        assert min(first[0]) > MAX_NORM, "every step is clipped"
