"""docs/recipes/trainer.md: its code, run with transformers' own Trainer."""

import pathlib
import warnings
from typing import Any

import frameworks
import pytest
import recipes
import torch
from training import bits, everything

import torch_ext

transformers = frameworks.module("transformers")
pytestmark = frameworks.needs("transformers", "accelerate")

STEPS, HALF = 4, 2


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).bfloat16()


def _trained(folder: pathlib.Path, block: int, resume: bool = False, **options: Any) -> Any:
    """Runs the page's block and returns its Trainer after the last step. resume: train() continues from the checkpoint
    at HALF."""
    settings: dict[str, Any] = {"learning_rate": 5e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 1}
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=HALF,
        logging_steps=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **settings | options,
    )
    names: dict[str, Any] = {"model": _model(), "arguments": arguments, "data": Tokens()}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*torch_ext.*")
        if resume:
            theirs = transformers.Trainer.train
            patch.setattr(transformers.Trainer, "train", lambda self: theirs(self, str(folder / f"checkpoint-{HALF}")))
        recipes.run("trainer", block, names)
    return names["trainer"]


@pytest.mark.parametrize("block", [0, 1], ids=["optimizer_cls_and_kwargs", "optimizers"])
def test_the_lines_train_clip_and_resume_bit_for_bit(tmp_path: pathlib.Path, block: int) -> None:
    whole = _trained(tmp_path, block)
    optimizer = whole.optimizer.optimizer
    assert isinstance(optimizer, torch_ext.Adam)
    assert all("master_remainder" in state for state in optimizer.state.values())
    logged = [entry for entry in whole.state.log_history if "grad_norm" in entry]
    assert len(logged) == STEPS and all(float(entry["grad_norm"]) > 0.5 for entry in logged), "every step is clipped"
    resumed = _trained(tmp_path, block, resume=True)
    assert resumed.state.log_history[-1]["step"] == STEPS
    assert everything(optimizer) == everything(resumed.optimizer.optimizer)


def test_the_lines_of_an_average_end_with_it_in_the_model(tmp_path: pathlib.Path) -> None:
    trainer = _trained(tmp_path, 2)
    averages = trainer.optimizer.optimizer.ema_state_dict()
    assert [bits(p) for p in trainer.model.parameters()] == [bits(one.bfloat16()) for one in averages.values()]
    assert (tmp_path / f"checkpoint-{HALF}" / "ema" / "model.safetensors").is_file()


def test_what_the_trainer_hands_over_and_what_not(tmp_path: pathlib.Path) -> None:
    """What the Trainer passes to the optimizer and what it does not, as the page says."""
    trainer = _trained(tmp_path, 0, adam_beta2=0.95, adam_epsilon=1e-6)
    decayed, others = trainer.optimizer.optimizer.param_groups
    assert [group["weight_decay"] for group in (decayed, others)] == [0.1, 0.0]
    assert decayed["initial_lr"] == 5e-3
    assert (decayed["betas"], decayed["eps"]) == ((0.9, 0.999), 1e-8), "torch's defaults, not the arguments'"
    trainer = _trained(tmp_path, 1)
    (group,) = trainer.optimizer.optimizer.param_groups
    assert group["weight_decay"] == 0.01 and "model.norm.weight" in group["param_names"]


def test_checkpoint_keys(tmp_path: pathlib.Path) -> None:
    """The keys are those that the page lists; states load both ways between ours and adamw_torch."""
    _trained(tmp_path, 0)
    saved = torch.load(tmp_path / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)
    for entry in saved["state"].values():
        assert sorted(entry) == ["exp_avg", "exp_avg_sq", "master_param", "step"]
        assert entry["master_param"].dtype == torch.float32
    model = _model()
    groups = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]]
    theirs = torch.optim.AdamW([{"params": group} for group in groups])
    ours = torch_ext.AdamW([{"params": group} for group in groups], states="bf16_remainder")
    theirs.load_state_dict(saved)
    assert all(sorted(entry) == ["exp_avg", "exp_avg_sq", "step"] for entry in theirs.state.values())
    with pytest.warns(UserWarning, match="no master_param of.*the weight is its master"):
        ours.load_state_dict(theirs.state_dict())
    masters = ours.master_state_dict().values()
    assert [bits(m.clone()) for m in masters] == [bits(p.float()) for group in groups for p in group]
