"""Lightning and Fabric with this library's optimizer: closures, precisions, clipping, checkpoints, averages of
weights."""

import pathlib
import pickle
import warnings
from typing import Any

import frameworks
import pytest
import torch
from training import POLICIES, everything, params_of, set_grads

import torch_ext

lightning = frameworks.module("pytorch_lightning")
lightning_fabric = frameworks.module("lightning_fabric")
pytestmark = [
    frameworks.needs("pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*treespec.*", "ignore:.*exists and is not empty.*|.*no `val_dataloader`.*"),
]

BATCHES, EPOCHS, MAX_NORM = 3, 2, 0.05


def module_of(dtype: torch.dtype, manual: bool = False, **options: Any) -> Any:
    """Returns a LightningModule; its `norms` are the gradient norms at each clip."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)).to(dtype)
            self.automatic_optimization = not manual
            self.norms: list[float] = []

        def configure_optimizers(self) -> Any:
            optimizer = torch_ext.AdamW(self.named_parameters(), lr=1e-2, **options)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES * EPOCHS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return (self.net(x)[:, 0].float() - x.float().abs().sum(1)).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            assert torch.isfinite(self.loss(batch[0]))

        def training_step(self, batch: Any, index: int) -> Any:
            (x,) = batch
            loss = self.loss(x)
            if manual:
                optimizer = self.optimizers()
                self.manual_backward(loss / 2)  # this backward's gradients are clipped and then dropped
                torch_ext.clip_grad_norm_(optimizer, MAX_NORM)
                optimizer.zero_grad(set_to_none=index == 0)
                self.manual_backward(self.loss(x))
                self.norms.append(float(torch_ext.clip_grad_norm_(optimizer, MAX_NORM)))
                optimizer.step()
                self.lr_schedulers().step()
            return loss

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            self.norms.append(float(torch_ext.clip_grad_norm_(optimizer, float("inf"))))
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    return Module()


def fit(
    folder: pathlib.Path,
    module: Any,
    epochs: int,
    resume: bool = False,
    callbacks: Any = (),
    validate: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns the Trainer and its optimizer after `epochs`. resume: it started from the checkpoint that an earlier run
    left in the folder."""
    dtype = next(module.parameters()).dtype
    x = torch.randn(4 * BATCHES, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = lightning.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    clip = {} if not module.automatic_optimization else {"gradient_clip_val": MAX_NORM}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[saving, *callbacks], **quiet, **(clip | options)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*torch_ext.*|.*lr_scheduler.*|.*optimizer.*")
        trainer.fit(
            module, loader, loader if validate else None, ckpt_path=str(folder / "epoch=0.ckpt") if resume else None
        )
    return trainer, trainer.optimizers[0]


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning_clips_as_a_plain_loop_does(tmp_path: pathlib.Path, manual: bool) -> None:
    module = module_of(torch.bfloat16, manual=manual)
    _, optimizer = fit(tmp_path, module, EPOCHS)
    plain = module_of(torch.bfloat16)
    reference = plain.configure_optimizers()
    x = torch.randn(4 * BATCHES, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    for batch in (*x.split(4), *x.split(4)):
        plain.loss(batch).backward()
        if manual:
            torch_ext.clip_grad_norm_(reference["optimizer"], MAX_NORM)
        else:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        reference["optimizer"].step()
        reference["lr_scheduler"]["scheduler"].step()
        reference["optimizer"].zero_grad()
    assert everything(optimizer) == everything(reference["optimizer"])


def mixed_16(settings: Any = None) -> dict[str, Any]:
    """Returns the Trainer options for 16-mixed. On a CPU Lightning needs to be given a scaler for it."""
    chosen = {"initial_loss_scale": 64.0, "loss_scale_window": 2} | (settings or {})
    scaler = torch_ext.load_policy(torch.float16, override_optimizer_config=chosen).grad_scaler()
    return {"plugins": [lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


FP32, BF16 = torch.float32, torch.bfloat16
# case -> dtype of the module, options of the module, options of the Trainer
CASES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "32-true": (FP32, {}, {}),
    "bf16 model": (BF16, {}, {}),
    "bf16-true": (FP32, {}, {"precision": "bf16-true"}),
    "bf16-mixed": (FP32, {}, {"precision": "bf16-mixed"}),
    "16-mixed, our scaler": (FP32, {}, {"scaled": True}),
    "accumulation": (BF16, {}, {"accumulate_grad_batches": 3}),
    "manual optimization": (BF16, {"manual": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_D4_lightning_resumes_bit_for_bit(tmp_path: pathlib.Path, case: str) -> None:
    dtype, of_module, of_trainer = CASES[case]

    def options() -> dict[str, Any]:
        rest = {key: value for key, value in of_trainer.items() if key != "scaled"}
        return rest | (mixed_16() if of_trainer.get("scaled") else {})

    module = module_of(dtype, **of_module)
    whole, optimizer = fit(tmp_path, module, EPOCHS, **options())
    resumed, later = fit(tmp_path, module_of(dtype, **of_module), EPOCHS, resume=True, **options())
    assert isinstance(optimizer, torch_ext.AdamW)
    assert everything(optimizer) == everything(later)
    assert min(module.norms) > MAX_NORM, "every step is clipped"
    parts = of_trainer.get("accumulate_grad_batches", 1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {float(EPOCHS * BATCHES // parts)}
    if of_trainer.get("scaled"):
        assert whole.scaler.state_dict() == resumed.scaler.state_dict()
        assert whole.scaler.get_scale() == 64.0 * 2 ** (EPOCHS * BATCHES // 2)


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_remainder", "8bit"])
def test_D4_average_that_is_swapped_in_validated_and_saved_leaves_the_masters(
    tmp_path: pathlib.Path, name: str
) -> None:
    """Lightning's EMA callback writes through `.data` around each validation and saves the average as the model.
    Masters must not follow it."""
    dtype, config = POLICIES[name]
    policy = torch_ext.load_policy(dtype, override_optimizer_config=config)

    def average() -> list[Any]:
        return [lightning.callbacks.EMAWeightAveraging(decay=0.5)]

    def states(optimizer: Any) -> list[dict[str, bytes]]:
        return [{key: value for key, value in entry.items() if key != "param"} for entry in everything(optimizer)]

    _, alone = fit(tmp_path / "alone", module_of(dtype, policy=policy), EPOCHS)
    module = module_of(dtype, policy=policy)
    _, optimizer = fit(tmp_path, module, EPOCHS, callbacks=average(), validate=True)
    assert states(optimizer) == states(alone)
    _, later = fit(tmp_path, module_of(dtype, policy=policy), EPOCHS, True, average(), validate=True)
    assert everything(later) == everything(optimizer), "the averaged weights included, which end in the model"
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    pairs = zip(saved["state_dict"].values(), saved["current_model_state"].values(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs), "the average was saved, and the model beside it"


def test_the_average_of_the_optimizer_is_validated_and_saved_and_ends_in_the_module(tmp_path: pathlib.Path) -> None:
    options = {"ema_decay": 0.5, "ema_dtype": torch.float32}
    validated: list[list[torch.Tensor]] = []

    class Watch(lightning.Callback):
        def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                validated.append([p.detach().clone() for p in module.parameters()])

    def run(name: str, callbacks: Any, resume: bool = False) -> tuple[Any, Any, Any]:
        module = module_of(torch.bfloat16, **options)
        return module, *fit(tmp_path / name, module, EPOCHS, resume, callbacks, validate=True)

    _, _, alone = run("alone", [Watch()])
    assert len(validated) == BATCHES * EPOCHS
    callback = pickle.loads(pickle.dumps(torch_ext.lightning_ema_callback()))
    module, trainer, optimizer = run("ours", [callback, Watch()])
    averages = [average.bfloat16() for average in alone.ema_state_dict().values()]
    for weights in (list(module.parameters()), validated[-1]):
        assert all(torch.equal(*pair) for pair in zip(weights, averages, strict=True))
    saved = [torch.load(tmp_path / name / f"epoch={EPOCHS - 1}.ckpt", weights_only=True) for name in ("alone", "ours")]
    assert saved[1]["current_model_state"].keys() == saved[0]["state_dict"].keys()
    for key, weight in saved[0]["state_dict"].items():
        assert torch.equal(saved[1]["current_model_state"][key], weight)
    for average, found in zip(averages, saved[1]["state_dict"].values(), strict=True):
        assert torch.equal(found, average)
    _, _, later = run("ours", [torch_ext.lightning_ema_callback()], resume=True)
    assert everything(later) == everything(optimizer)


def test_the_callback_gives_the_weights_back_and_refuses_an_optimizer_without_an_average(
    tmp_path: pathlib.Path,
) -> None:
    module = module_of(torch.bfloat16)
    with pytest.raises(ValueError, match="lightning_ema_callback: the optimizer, torch_ext.*AdamW, keeps no average"):
        fit(tmp_path, module, 1, callbacks=[torch_ext.lightning_ema_callback()])

    class Broken(lightning.Callback):
        def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                raise KeyError("of the user")

    module = module_of(torch.bfloat16, ema_decay=0.5)
    with pytest.raises(KeyError, match="of the user"):
        fit(tmp_path, module, 1, callbacks=[torch_ext.lightning_ema_callback(), Broken()], validate=True)
    (optimizer,) = [module.trainer.optimizers[0]]
    for name, master in optimizer.master_state_dict().items():  # master_state_dict raises within ema_weights()
        assert torch.equal(module.get_parameter(str(name)).detach(), master.bfloat16())


class Overflow:
    """A callback that makes a gradient Inf in the given step."""

    def __new__(cls, step: int) -> Any:
        class Callback(lightning.Callback):
            def on_after_backward(self, trainer: Any, module: Any) -> None:
                if trainer.global_step == step:
                    module.net[0].weight.grad[0, 0] = float("inf")

        return Callback()


def test_G3_lightning_skips_an_overflow(tmp_path: pathlib.Path) -> None:
    module = module_of(FP32)
    trainer, optimizer = fit(
        tmp_path, module, 1, callbacks=[Overflow(1)], **mixed_16({"hysteresis": 1, "loss_scale_window": 1000})
    )
    assert optimizer.skipped_steps() == 1
    assert {float(state["step"]) for state in optimizer.state.values()} == {float(BATCHES - 1)}
    assert trainer.scaler.get_scale() == 32.0


def test_G3_lightning_refuses_to_clip_where_the_step_unscales(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(tmp_path, module_of(FP32, fused=True), 1, **mixed_16())


def test_two_optimizers_that_are_toggled(tmp_path: pathlib.Path) -> None:
    """toggle_optimizer freezes the other optimizer's parameters temporarily: neither they nor their state may
    change."""

    class Two(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.nets = torch.nn.ModuleList(torch.nn.Linear(16, 16).bfloat16() for _ in range(2))
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch_ext.AdamW(net.named_parameters(), lr=1e-2) for net in self.nets]

        def training_step(self, batch: Any, index: int) -> None:
            for i, optimizer in enumerate(self.optimizers()):
                other = everything(self.optimizers()[1 - i].optimizer)
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.nets[1](self.nets[0](batch[0])).float().square().mean())
                torch_ext.clip_grad_norm_(optimizer, MAX_NORM)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                assert everything(self.optimizers()[1 - i].optimizer) == other

    trainer, _ = fit(tmp_path, Two(), 1)
    for optimizer in trainer.optimizers:
        assert {float(state["step"]) for state in optimizer.state.values()} == {float(BATCHES)}


@pytest.mark.parametrize("ours", [False, True], ids=["fabric.clip_gradients", "torch_ext.clip_grad_norm_"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_D4_fabric_resumes_bit_for_bit(tmp_path: pathlib.Path, precision: str, ours: bool) -> None:
    """Under bf16-true Fabric converts the weights to bf16 after the optimizer was created; the optimizer must
    follow."""

    def made() -> tuple[Any, Any, Any]:
        fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, precision=precision)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        return fabric, *fabric.setup(model, torch_ext.AdamW(model.named_parameters(), lr=1e-2))

    def run(fabric: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
        norms = []
        for step in steps:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            fabric.backward((model(x)[:, 0].float() - x.abs().sum(1)).square().mean())
            clip = torch_ext.clip_grad_norm_(optimizer, MAX_NORM) if ours else None
            norms.append(float(clip if ours else fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    whole = made()
    run(*whole, range(2))
    whole[0].save(tmp_path / "checkpoint", {"model": whole[1], "optimizer": whole[2]})
    norms = run(*whole, range(2, 4))
    resumed = made()
    resumed[0].load(tmp_path / "checkpoint", {"model": resumed[1], "optimizer": resumed[2]})
    assert run(*resumed, range(2, 4)) == norms and min(norms) > MAX_NORM
    assert everything(whole[2].optimizer) == everything(resumed[2].optimizer)
    assert ("master_param" in next(iter(whole[2].optimizer.state.values()))) == (precision == "bf16-true")


WRAPPERS = {
    "Lightning": lambda optimizer: lightning.core.optimizer.LightningOptimizer(optimizer),
    "Fabric": lambda optimizer: lightning_fabric.wrappers._FabricOptimizer(optimizer, None),
    "none": lambda optimizer: optimizer,
}


@pytest.mark.parametrize("wrapper", ["Lightning", "Fabric"])
@pytest.mark.parametrize("dropped", [False, True], ids=["clip", "clip, zero_grad"])
def test_what_is_done_to_a_wrapper_is_done_to_the_optimizer(wrapper: str, dropped: bool) -> None:
    """Wrappers have our methods but attributes of their own: what a method set on the wrapper would never reach the
    step."""
    runs = []
    for name in (wrapper, "none"):
        params = params_of("bf16")
        optimizer = torch_ext.AdamW(params, lr=1e-2)
        wrapped = WRAPPERS[name](optimizer)
        for step in range(3):
            grads = [p.grad for p in params]
            set_grads(params, step)
            # Like a backward that accumulates into the memory that zero_grad kept.
            for p, grad in zip(params, grads, strict=True):
                if grad is not None:
                    p.grad = grad.copy_(p.grad)
            torch_ext.clip_grad_norm_(wrapped, 0.01)
            if dropped:
                wrapped.zero_grad(set_to_none=False)
                for p in params:
                    p.grad.fill_(1.0)
            optimizer.step()
        runs.append(everything(optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("wrapper", ["Lightning", "Fabric"])
def test_state_and_masters_are_reached_through_a_wrapper(wrapper: str) -> None:
    trained = torch_ext.AdamW(params_of("bf16"), lr=1e-2)
    for step in range(2):
        set_grads(trained.param_groups[0]["params"], step)
        trained.step()
    params = params_of("bf16")
    optimizer = torch_ext.AdamW(params, lr=1e-2)
    wrapped = WRAPPERS[wrapper](optimizer)
    wrapped.load_state_dict(trained.state_dict())
    assert [state["step"] for state in optimizer.state.values()] == [2.0] * len(params)
    for p in params:
        p.data.fill_(2.0)
    assert wrapped.resync_masters(force=True) > 0
    with wrapped.master_weights() as masters:
        assert all((master == 2.0).all() for master in masters.values())
        for master in masters.values():
            master.fill_(3.0)
    set_grads(params, 2)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all((p == 3.0).all() for p in params)
    assert all((t == 3.0).all() for t in wrapped.master_state_dict().values())
