"""Accelerate's wrapper of an optimizer.

    torchs_own(accelerator.prepare(adamw))       # adamw
    with accelerator.accumulate(net):            # gradient_accumulation_steps=4
        step(x, y)                               # PlanningError: an update at each micro-step

A wrapper of the exact class is taken off: its step steps the optimizer that it has, and that trains
here. Any other wrapper may do more in its step. A wrapper does not step while accelerate
accumulates gradients, as transformers' Trainer has it do, too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dtensor.errors import PlanningError, check_kind

_OPTIMIZER = torch.optim.Optimizer | None


def torchs_own(optimizer: Any) -> Any:
    """The optimizer in accelerate's wrapper; anything else as it is."""
    accelerate = sys.modules.get("accelerate.optimizer")
    if accelerate is not None and type(optimizer) is accelerate.AcceleratedOptimizer:
        return optimizer.optimizer
    return optimizer


def checked_optional(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer, or None. PlanningError unless it is one."""
    fix = "pass the optimizer itself, or leave it out"
    check_kind("the optimizer", optimizer, _OPTIMIZER, "a torch.optim optimizer or None", fix)
    return torchs_own(optimizer)


def refuse_accumulation(wrapper: Any) -> None:
    """PlanningError where the wrapper's own step would do nothing but wait for more gradients."""
    if not wrapper.gradient_state.sync_gradients:
        raise PlanningError(
            "accelerate is accumulating gradients, and a step updates each time that it is "
            "called: this would be an update at each micro-step.\n"
            "fix: gradient_accumulation_steps=1, batches as many times as large, and "
            "dt.train_step(..., schedule=dt.GPipe(microbatches=4))"
        )
