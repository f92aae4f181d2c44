"""transformers' Trainer: `training_step` is a step on the ranks, `prediction_step` a program.

trainer = ParallelTrainer(model, args, train_dataset=rows)     # model: of dt.parallelize
with dt.launch(model.mesh):
    trainer.train()
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

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
def loss_fn(model, batch, num_items):
    return model(**batch, num_items_in_batch=num_items).loss


def predict(model, batch):
    out = model(**batch)
    return out.loss, out.logits


class ParallelTrainer(Trainer):
    def __init__(self, model, *args, **kwargs):
        super().__init__(model.module, *args, **kwargs)
        self.parallel = model
        self.predict = dt.compile(predict, model.mesh)
        self.options = {}  # of dt.train_step: inputs=, schedule=, master_weights=
        self.stepped = None  # the optimizer of self.step

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.stepped is not self.optimizer:
            self.stepped = self.optimizer
            norm = self.args.max_grad_norm or None
            self.step = dt.train_step(
                self.parallel, loss_fn, self.optimizer, clip_grad_norm=norm, **self.options
            )
        model.train()
        self.loss = self.step(self._prepare_inputs(inputs), num_items_in_batch)
        return self.loss.tensor()

    def _get_grad_norm(self, model, grad_norm=None):
        return self.loss.grad_norm

    _clip_grad_norm = _get_grad_norm

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits = self.predict(self.parallel, self._prepare_inputs(inputs))
        if prediction_loss_only:
            return loss.full_tensor(), None, None
        return loss.full_tensor(), logits.full_tensor(), inputs["labels"]


# end


STATED: dict[str, Any] = dict(
    per_device_train_batch_size=4,
    max_steps=6,
    learning_rate=1e-2,
    adam_epsilon=1e-4,  # so that rounding of tiny gradients does not turn updates round
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
    log_level="error",
)


def arguments(**options: Any) -> TrainingArguments:
    return TrainingArguments(**{**STATED, "output_dir": str(folder("trainer")), **options})


def left_by(trainer: Trainer) -> Trained:
    """With the norms of gradients behind the losses, and the learning rates."""
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    kept = ("loss", "grad_norm", "learning_rate")
    return Trained([float(entry[key]) for key in kept for entry in log], weights(trainer.model))


def by_torch(**options: Any) -> Trained:
    trainer = Trainer(tiny(), arguments(**options), train_dataset=texts())
    trainer.train()
    return left_by(trainer)


def by_ranks(*args: Any, **options: Any) -> Trained:
    return left_by(on_ranks(*args, **options))


def on_ranks(
    axis: str = "tp", backend: str = "inprocess", step: dict[str, Any] | None = None, **options: Any
) -> ParallelTrainer:
    model = on_two(tiny(), axis)
    trainer = ParallelTrainer(model, arguments(**options), train_dataset=texts())
    trainer.options = dict(step or {})
    with dt.launch(model.mesh, backend=backend):
        trainer.train()
        assert trainer.step.last is not None, "no step ran on ranks"
    saves = options.get("save_strategy", "no") != "no"  # which sets fields of the configuration
    assert len(trainer.step.plans) == 1 + saves, "captured once"
    return trainer


def bytes_sent(trainer: ParallelTrainer) -> int:
    """What a rank sends over tp in a step's forward."""
    plan = trainer.step.plans.latest.plan
    return sum(c.bytes_sent for c in plan.collectives if c.phase == "forward")


def bfloat16() -> Outcome:
    """Within twice of what bfloat16 itself changes; ranks send fewer bytes than in float32."""
    plain = by_torch(bf16=True)
    apart = compared(by_torch(), plain)
    allowed = 2 * max(apart.losses, apart.weights)
    ours, float32 = on_ranks(bf16=True), on_ranks()
    assert bytes_sent(ours) < bytes_sent(float32)
    return compared(plain, left_by(ours), allowed=allowed)


def accumulated() -> Outcome:
    """Four batches of 2 in plain torch; here one of 8, in four microbatches."""
    plain = by_torch(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=3)
    schedule = dict(schedule=dt.GPipe(microbatches=4))
    ours = by_ranks(step=schedule, per_device_train_batch_size=8, max_steps=3)
    return compared(plain, ours)


def evaluated() -> Outcome:
    def accuracy(found: Any) -> dict[str, float]:
        best = torch.from_numpy(found.predictions).argmax(-1)
        return {"accuracy": float((best == torch.from_numpy(found.label_ids)).float().mean())}

    given: Any = dict(eval_dataset=texts(8), compute_metrics=accuracy)
    keys = "eval_loss", "eval_accuracy"
    plain = Trainer(tiny(), arguments(), **given).evaluate()
    model = on_two(tiny())
    trainer = ParallelTrainer(model, arguments(), **given)
    with dt.launch(model.mesh):
        ours = trainer.evaluate()
    return compared(Trained([plain[k] for k in keys]), Trained([ours[k] for k in keys]))


def resumed() -> Outcome:
    """Three steps, a checkpoint of Trainer's, and three more of another trainer."""
    plain = by_torch()
    path = folder("resumed")
    saved = dict(output_dir=str(path), save_strategy="steps", save_steps=3)
    by_ranks(**saved)
    model = on_two(tiny())
    trainer = ParallelTrainer(model, arguments(output_dir=str(path)), train_dataset=texts())
    with dt.launch(model.mesh):
        trainer.train(resume_from_checkpoint=str(path / "checkpoint-3"))
    return compared(plain, left_by(trainer))


def on_the_controller() -> Outcome:
    net = tiny()
    model = on_two(net)
    trainer = Trainer(net, arguments(), train_dataset=texts())
    with dt.launch(model.mesh):
        trainer.train()
    return compared(by_torch(), left_by(trainer), "controller")


def given_parallelized() -> Outcome:
    return raises(
        lambda: Trainer(on_two(tiny()), arguments(), train_dataset=texts()),
        AttributeError,
        "forward",
    )


def accumulating() -> Outcome:
    return raises(
        lambda: by_ranks(gradient_accumulation_steps=4),
        dt.PlanningError,
        "accumulat.*\n.*gradient_accumulation_steps=1",
    )


CASES = (
    Case("`Trainer(model)` of a parallelized model", given_parallelized),
    Case("`Trainer(model.module)`, no subclass", on_the_controller, slow=True),
    Case("subclass, tp=2", lambda: compared(by_torch(), by_ranks())),
    Case(
        "subclass, dp=2",
        lambda: compared(by_torch(), by_ranks("dp", step=dict(inputs=dict(dp=dt.Row())))),
        slow=True,
    ),
    Case("subclass, tp=2 on Ray", lambda: compared(by_torch(), by_ranks(backend="ray")), slow=True),
    Case("subclass, `bf16=True`", bfloat16, slow=True),
    Case("subclass, `gradient_accumulation_steps=4`", accumulating),
    Case("the same batch, `schedule=dt.GPipe(microbatches=4)`", accumulated, slow=True),
    Case("subclass, `evaluate()` with metrics", evaluated, slow=True),
    Case("subclass, a checkpoint, `resume_from_checkpoint`", resumed, slow=True),
)
