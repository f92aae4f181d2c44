"""Lightning, with manual optimization: `training_step` is a step on the ranks.

with dt.launch(model.mesh):
    L.Trainer(max_epochs=1, accelerator="cpu").fit(Tuned(model), loader)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

import dtensor as dt
from tests.integrations.cases import (
    Case,
    Outcome,
    Trained,
    compared,
    folder,
    on_two,
    raises,
    texts,
    tiny,
    weights,
)


# begin
def loss_fn(model, batch):
    return model(**batch).loss


class Tuned(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.automatic_optimization = False
        self.net = model.module  # so that Lightning saves and loads its weights
        self.parallel = model
        self.evaluate = dt.compile(loss_fn, model.mesh)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=1e-4)

    def on_train_start(self):
        opt = self.optimizers(use_pl_optimizer=False)
        self.step = dt.train_step(self.parallel, loss_fn, opt, clip_grad_norm=1.0)

    def training_step(self, batch, batch_idx):
        self.log("loss", self.step(batch).tensor())
        self.optimizers().step()  # no gradients, so it updates nothing: Lightning counts its steps

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.evaluate(self.parallel, batch).full_tensor())


# end


class Plain(L.LightningModule):
    """The same on plain torch, by Lightning's own optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=1e-4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loss_fn(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_fn(self.net, batch))


class Losses(L.Callback):
    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.all.append(float(trainer.callback_metrics["loss"]))


def loader(rows: int = 24) -> Any:
    return DataLoader(texts(rows), batch_size=4)  # type: ignore[arg-type]


def fitted(module: L.LightningModule, resume: str | None = None, **options: Any) -> Trained:
    """Losses of the steps and the validation, and the weights."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    losses = Losses()
    stated: dict[str, Any] = dict(
        max_steps=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder("lightning")),
        callbacks=[losses],
    )
    stated |= options
    stated["callbacks"] = [losses, *(options.get("callbacks") or ())]
    trainer = L.Trainer(**stated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(), loader(8), ckpt_path=resume)
    assert trainer.global_step == stated["max_steps"]
    last = [float(trainer.callback_metrics["val_loss"])] if trainer.global_step == 6 else []
    return Trained([*losses.all, *last], weights(module.net))  # type: ignore[arg-type]


def by_torch() -> Trained:
    return fitted(Plain(), gradient_clip_val=1.0)


def by_ranks(**options: Any) -> Trained:
    model = on_two(tiny())
    with dt.launch(model.mesh):
        return fitted(Tuned(model), **options)


def resumed() -> Outcome:
    """Lightning's checkpoint after three steps, and three more of another module; the loader begins
    anew, in both."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def twice(name: str, run: Callable[..., Trained]) -> Trained:
        path = folder(name)
        saves = ModelCheckpoint(dirpath=path, filename="{step}", every_n_train_steps=3)
        before = run(max_steps=3, enable_checkpointing=True, callbacks=[saves])
        after = run(resume=str(path / "step=3.ckpt"))
        return Trained([*before.losses[:3], *after.losses], after.weights)

    def plain(**options: Any) -> Trained:
        return fitted(Plain(), gradient_clip_val=1.0, **options)

    return compared(twice("plain_checkpoints", plain), twice("checkpoints", by_ranks))


def accumulating() -> Outcome:
    kind = L.fabric.utilities.exceptions.MisconfigurationException
    return raises(lambda: by_ranks(accumulate_grad_batches=4), kind, "accumulat")


def called() -> Outcome:
    """The parallelized model as a part of the module, called as torch's."""

    class Calls(Tuned):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.parallel(**batch).loss

    def run() -> None:
        model = on_two(tiny())
        with dt.launch(model.mesh):
            fitted(Calls(model))

    return raises(run, TypeError, "dt.compile")


CASES = (
    Case("`self.model(**batch)` of a parallelized model", called),
    Case("manual optimization, validation, tp=2", lambda: compared(by_torch(), by_ranks())),
    Case("`ModelCheckpoint`, `ckpt_path=`", resumed, slow=True),
    Case("`accumulate_grad_batches=4`", accumulating, slow=True),
)
