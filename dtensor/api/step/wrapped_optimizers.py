"""Support for an optimizer that Hugging Face Accelerate has wrapped.

    torchs_own(accelerator.prepare(adamw))       # adamw
    with accelerator.accumulate(net):            # gradient_accumulation_steps=4
        step(x, y)                               # PlanningError: an update at each micro-step

Only a wrapper of exactly Accelerate's class is removed; another class may do more in its step. The
wrapper's step does nothing while Accelerate accumulates gradients, which a `TrainStep` cannot do.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dtensor.errors import PlanningError, check_kind

_OPTIMIZER = torch.optim.Optimizer | None


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer in Accelerate's wrapper, or the argument itself if it is not wrapped."""
    accelerate = sys.modules.get("accelerate.optimizer")
    if accelerate is not None and type(optimizer) is accelerate.AcceleratedOptimizer:
        return optimizer.optimizer
    return optimizer


def checked_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the unwrapped optimizer, or None. Raises PlanningError for another object."""
    fix = "pass the optimizer itself, or leave it out"
    check_kind("the optimizer", optimizer, _OPTIMIZER, "a torch.optim optimizer or None", fix)
    return unwrapped_optimizer(optimizer)


def refuse_accumulation(wrapper: Any) -> None:
    """Raise PlanningError while Accelerate accumulates gradients."""
    if not wrapper.gradient_state.sync_gradients:
        raise PlanningError(
            "accelerate is accumulating gradients, and a step updates each time that it is "
            "called: this would be an update at each micro-step.\n"
            "fix: gradient_accumulation_steps=1, batches as many times as large, and "
            "dt.train_step(..., schedule=dt.GPipe(microbatches=4))"
        )
