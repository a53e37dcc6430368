"""Hugging Face's Trainer with this library's optimizer: it trains, clips, saves, and resumes bit for bit."""

import pathlib
import warnings
from typing import Any

import frameworks
import pytest
import torch
from training import POLICIES, bits, everything

import torch_ext

transformers = frameworks.module("transformers")
pytestmark = frameworks.needs("transformers", "accelerate")

STEPS, HALF = 6, 3


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def llama(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    return transformers.LlamaForCausalLM(config).to(dtype)


def arguments(folder: pathlib.Path, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "save_steps": HALF,
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
    }
    return transformers.TrainingArguments(output_dir=str(folder), **settings | options)


def trained(folder: pathlib.Path, name: str, way: str, resume: bool = False, **options: Any) -> Any:
    """Returns a Trainer after its last step. resume: it started from the checkpoint at HALF."""
    dtype, config = POLICIES[name]
    model = llama(dtype)
    policy = torch_ext.load_policy(model, override_optimizer_config=config)
    chosen: dict[str, Any] = {"optimizer_cls_and_kwargs": (torch_ext.AdamW, {"lr": 1e-2, "policy": policy})}
    if way == "optimizers":
        chosen = {"optimizers": (torch_ext.AdamW(model.named_parameters(), lr=1e-2, policy=policy), None)}
    trainer = transformers.Trainer(
        model=model, args=arguments(folder, **options), train_dataset=Tokens(), processing_class=None, **chosen
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*torch_ext.*|.*lr_scheduler.*|.*optimizer.*")
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}") if resume else None)
    return trainer


# case -> how the Trainer gets the optimizer, policy, further training arguments
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp32": ("optimizers", "fp32", {}),
    "bf16, masters": ("optimizers", "bf16", {}),
    "bf16, made by the Trainer": ("optimizer_cls_and_kwargs", "bf16", {}),
    "bf16, remainders": ("optimizers", "bf16_remainder", {}),
    "8-bit moments": ("optimizers", "8bit", {}),
    "fp32, bf16 autocast": ("optimizers", "fp32", {"bf16": True}),
    "bf16, compiled": ("optimizers", "bf16", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "bf16, checkpointed activations": ("optimizers", "bf16", {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_D4_trainer_resumes_bit_for_bit(tmp_path: pathlib.Path, case: str) -> None:
    way, name, options = CASES[case]
    whole = trained(tmp_path, name, way, **options)
    resumed = trained(tmp_path, name, way, resume=True, **options)
    assert isinstance(whole.optimizer.optimizer, torch_ext.AdamW)
    assert everything(whole.optimizer.optimizer) == everything(resumed.optimizer.optimizer)
    logged = [entry for entry in whole.state.log_history if "grad_norm" in entry]
    assert len(logged) == STEPS
    assert all(float(entry["grad_norm"]) > 0.5 for entry in logged), "every step is clipped"
    assert logged[HALF:] == [entry for entry in resumed.state.log_history if "grad_norm" in entry][HALF:]
    assert {float(state["step"]) for state in whole.optimizer.state.values()} == {float(STEPS)}


def test_trainer_clips_and_accumulates_as_a_plain_loop_does(tmp_path: pathlib.Path) -> None:
    trainer = trained(tmp_path, "bf16", "optimizers", gradient_accumulation_steps=2)
    plain = llama(torch.bfloat16)
    optimizer = torch_ext.AdamW(plain.named_parameters(), lr=1e-2)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    # The Trainer's order of the data set, and its loss: a mean over the tokens of all micro-batches.
    for batches in orders(trainer):
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        for batch in batches:
            plain(**batch, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert [bits(p) for p in plain.parameters()] == [bits(p) for p in trainer.model.parameters()]


def orders(trainer: Any) -> list[list[dict[str, torch.Tensor]]]:
    """Returns the micro-batches of each step, in the Trainer's order."""
    transformers.set_seed(trainer.args.seed)
    loader = trainer.get_train_dataloader()
    batches = [batch for _ in range(2) for batch in loader]
    return [batches[2 * i : 2 * i + 2] for i in range(STEPS)]


def test_model_of_a_checkpoint_alone_seeds_the_masters(tmp_path: pathlib.Path) -> None:
    """save_only_model: there is no optimizer state to resume from, so masters start as the loaded weights (D2)."""
    trained(tmp_path, "bf16", "optimizers", save_only_model=True)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"checkpoint-{HALF}", dtype=torch.bfloat16)
    model = llama(torch.bfloat16)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=0.0, weight_decay=0.0)
    model.load_state_dict(loaded.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, q in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["master_param"], q.float())


# -- the average that the optimizer keeps


def averaging(folder: pathlib.Path, resume: bool = False, callback: bool = True, **options: Any) -> Any:
    """Returns a Trainer after its last step, for a bf16 model whose optimizer keeps an average. callback: with
    torch_ext.trainer_ema_callback."""
    model = llama(torch.bfloat16)
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2, ema_decay=0.5, ema_dtype=torch.float32)
    settings = {"eval_strategy": "steps", "eval_steps": HALF, "save_strategy": "steps"} | options
    trainer = transformers.Trainer(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=Tokens(),
        eval_dataset={"first": Tokens(), "second": Tokens()},
        optimizers=(optimizer, None),
    )
    if callback:
        trainer.add_callback(torch_ext.trainer_ema_callback(trainer))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}") if resume else None)
    return trainer


def weights(model: torch.nn.Module) -> list[bytes]:
    return [bits(p) for p in model.parameters()]


def of_checkpoint(folder: pathlib.Path, name: str) -> Any:
    """Loads a checkpoint's model."""
    return transformers.LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16)


def test_averages_are_evaluated_and_saved_and_what_is_resumed_is_the_training(tmp_path: pathlib.Path) -> None:
    alone = averaging(tmp_path / "alone", callback=False)
    trainer = averaging(tmp_path / "ours")
    optimizer = trainer.optimizer.optimizer
    averages = [average.bfloat16() for average in optimizer.ema_state_dict().values()]
    assert weights(trainer.model) == [bits(average) for average in averages], "they end in the model"
    history = list(trainer.state.log_history)
    for step in (HALF, STEPS):
        trained_weights = weights(of_checkpoint(tmp_path / "alone", f"checkpoint-{step}"))
        assert weights(of_checkpoint(tmp_path / "ours", f"checkpoint-{step}")) == trained_weights
        trainer.model.load_state_dict(of_checkpoint(tmp_path / "ours", f"checkpoint-{step}/ema").state_dict())
        assert weights(trainer.model) != trained_weights
        losses = {key: value for key, value in trainer.evaluate().items() if key.endswith("_loss")}
        assert len(losses) == 2
        logged = {key: value for entry in history if entry["step"] == step for key, value in entry.items()}
        assert losses.items() <= logged.items()
    resumed = averaging(tmp_path / "ours", resume=True)
    assert weights(resumed.model) == [bits(average) for average in averages]
    trained_states, later = (
        [state | {"param": b""} for state in everything(one.optimizer)] for one in (alone, resumed)
    )
    assert trained_states == later


def test_the_best_model_at_the_end_is_the_average_of_the_best_checkpoint(tmp_path: pathlib.Path) -> None:
    settings = {"load_best_model_at_end": True, "metric_for_best_model": "eval_first_loss", "greater_is_better": True}
    # With greater_is_better, the checkpoint with the largest loss is the best: the first one.
    trainer = averaging(tmp_path, **settings)
    best = pathlib.Path(trainer.state.best_model_checkpoint)
    assert best.name == f"checkpoint-{HALF}"
    assert weights(trainer.model) == weights(of_checkpoint(best, "ema"))


def test_the_callback_refuses_an_optimizer_without_an_average(tmp_path: pathlib.Path) -> None:
    model = llama(torch.bfloat16)
    trainer = transformers.Trainer(model=model, args=arguments(tmp_path, max_steps=1), train_dataset=Tokens())
    trainer.add_callback(torch_ext.trainer_ema_callback(trainer))
    with pytest.raises(ValueError, match=r"trainer_ema_callback: the optimizer, torch.optim.*AdamW, keeps no average"):
        trainer.train()
