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
    Trained,
    compared,
    folder,
    on_two,
    texts,
    tiny,
    words,
)
from tests.integrations.trainer import STATED, ParallelTrainer, left_by


# begin
class ParallelSFTTrainer(ParallelTrainer, SFTTrainer):
    pass


# end


def arguments() -> SFTConfig:
    given = dict(output_dir=str(folder("sft_trainer")), bf16=False, activation_checkpointing=False)
    return SFTConfig(**{**STATED, **given})


def given() -> dict[str, Any]:
    """Prompts and completions, of which the latter alone have labels."""
    rows = [row["input_ids"].tolist() for row in texts()]
    found = [dict(input_ids=r, completion_mask=[0] * 4 + [1] * (len(r) - 4)) for r in rows]
    return dict(train_dataset=datasets.Dataset.from_list(found), processing_class=words(WORDS))


def by_torch() -> Trained:
    trainer = SFTTrainer(tiny(), arguments(), **given())
    trainer.train()
    return left_by(trainer)


def by_ranks() -> Trained:
    model = on_two(tiny())
    trainer = ParallelSFTTrainer(model, arguments(), **given())
    with dt.launch(model.mesh):
        trainer.train()
        assert trainer.step.last is not None, "no step ran on ranks"
    return left_by(trainer)


CASES = (Case("subclass, tp=2", lambda: compared(by_torch(), by_ranks())),)
