"""Lightning: one line changes, in configure_optimizers. Clipping, checkpoints and accumulation stay the Trainer's.

With 16-mixed, pass this library's loss scale (a minimum, hysteresis, the same on all ranks) as a plugin:

    scaler = torch_ext.load_policy(torch.float16).grad_scaler("cuda")
    Trainer(plugins=[MixedPrecision("16-mixed", "cuda", scaler=scaler)])

    python -m pip install -r tests/requirements.txt
    python examples/frameworks/lightning_module.py
"""

import pathlib
import sys
import tempfile

import pytorch_lightning as lightning
import torch
from torch import nn

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[2])
)  # the repository's root; not needed when installed
import torch_ext

EPOCHS = 4


class Sum(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0])[:, 0].float(), batch[0].float().abs().sum(1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch_ext.AdamW(self.named_parameters(), lr=2e-3)  # was: torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(folder: str, resume_from: str | None = None) -> Sum:
    module = Sum()
    x = torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-true",  # a bf16 model, for which the optimizer keeps fp32 master weights
        gradient_clip_val=10.0,
        max_epochs=EPOCHS,
        callbacks=[lightning.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=resume_from)
    return module


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = train(folder)
        resumed = train(folder, resume_from=f"{folder}/epoch=1.ckpt")
    print(f"loss {whole.losses[0]:.3f} -> {whole.losses[-1]:.3f}")
    assert whole.losses[-1] < 0.2 * whole.losses[0]
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), "a resumed run no longer has the bits of the other"


if __name__ == "__main__":
    main()
