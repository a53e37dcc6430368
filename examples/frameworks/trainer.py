"""Hugging Face's Trainer: one more argument. It trains, clips, saves and resumes, bit for bit.

python -m pip install -r tests/requirements.txt
python examples/frameworks/trainer.py
"""

import pathlib
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[2])
)  # the repository's root; not needed when installed
import torch_ext


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards, each from a random number."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + 7 * i) % 64
        return {"input_ids": tokens, "labels": tokens}


def train(folder: str, resume_from: str | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).bfloat16()
    arguments = TrainingArguments(
        folder, max_steps=30, save_steps=15, logging_steps=5, max_grad_norm=1.0, use_cpu=True, report_to=[]
    )
    optimizer = torch_ext.AdamW(model.named_parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Counting(),
        optimizers=(optimizer, None),  # the one line; the schedule stays the Trainer's
    )
    trainer.train(resume_from_checkpoint=resume_from)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]} -> {losses[-1]}")
    assert float(losses[-1]) < 0.8 * float(losses[0])
    return model


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = train(folder)
        resumed = train(folder, resume_from=f"{folder}/checkpoint-15")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), "a resumed run no longer has the bits of the other"


if __name__ == "__main__":
    main()
