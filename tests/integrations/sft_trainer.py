"""TRL's SFTTrainer, with the methods that transformers' Trainer needs.

    trainer = ParallelSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    with dt.launch(model.mesh):
        trainer.train()

Its metrics (entropy, mean_token_accuracy) are of its own compute_loss, which does not run.
"""

from __future__ import annotations

from typing import Any

import datasets
from trl import SFTConfig, SFTTrainer

import dtensor as dt
from tests.integrations.cases import (
    WORDS,
    Case,
    Outcome,
    Trained,
    compared,
    folder,
    on_two,
    raises,
    texts,
    tiny,
    words,
)
from tests.integrations.trainer import ParallelTrainer, left_by


# begin
class ParallelSFTTrainer(ParallelTrainer, SFTTrainer):
    pass


# end


def arguments(**options: Any) -> SFTConfig:
    stated: dict[str, Any] = dict(
        output_dir=str(folder("sft_trainer")),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        log_level="error",
    )
    return SFTConfig(**{**stated, **options})


def given() -> dict[str, Any]:
    """Prompts and completions, of which the latter alone have labels."""
    rows = [row["input_ids"].tolist() for row in texts()]
    found = [dict(input_ids=r, completion_mask=[0] * 4 + [1] * (len(r) - 4)) for r in rows]
    return dict(train_dataset=datasets.Dataset.from_list(found), processing_class=words(WORDS))


def by_torch(**options: Any) -> Trained:
    trainer = SFTTrainer(tiny(), arguments(**options), **given())
    trainer.train()
    return left_by(trainer)


def by_ranks(**options: Any) -> Trained:
    model = on_two(tiny())
    trainer = ParallelSFTTrainer(model, arguments(**options), **given())
    with dt.launch(model.mesh):
        trainer.train()
        assert trainer.step.last is not None, "no step ran on ranks"
    return left_by(trainer)


def evaluated() -> Outcome:
    """The loss alone: TRL's accuracy is of its own compute_loss."""
    rows = given()
    rows["eval_dataset"] = rows["train_dataset"].select(range(8))
    plain = SFTTrainer(tiny(), arguments(), **rows).evaluate()["eval_loss"]
    model = on_two(tiny())
    trainer = ParallelSFTTrainer(model, arguments(), **rows)
    with dt.launch(model.mesh):
        ours = trainer.evaluate()["eval_loss"]
    return compared(Trained([plain]), Trained([ours]))


def given_parallelized() -> Outcome:
    return raises(
        lambda: SFTTrainer(on_two(tiny()), arguments(), **given()), AttributeError, "forward"
    )


def on_the_controller() -> Outcome:
    net = tiny()
    model = on_two(net)
    trainer = SFTTrainer(net, arguments(), **given())
    with dt.launch(model.mesh):
        trainer.train()
    return compared(by_torch(), left_by(trainer), "controller")


def accumulating() -> Outcome:
    return raises(lambda: by_ranks(gradient_accumulation_steps=4), dt.PlanningError, "accumulating")


CASES = (
    Case("`SFTTrainer(model)` of a parallelized model", given_parallelized),
    Case("`SFTTrainer(model.module)`, no subclass", on_the_controller, slow=True),
    Case("subclass, tp=2", lambda: compared(by_torch(), by_ranks())),
    Case("subclass, `evaluate()`", evaluated, slow=True),
    Case("subclass, `gradient_accumulation_steps=4`", accumulating, slow=True),
)
