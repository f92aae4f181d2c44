"""Accelerate's accumulation of gradients, in which an optimizer that it wraps does not step.

    with accelerator.accumulate(net):      # gradient_accumulation_steps=4
        step(x, y)                         # PlanningError: it would update at each micro-step

transformers' Trainer states it the same way. Not here: the wrapper (wrapped_optimizers.py).
"""

from __future__ import annotations

from typing import Any

from dtensor.errors import PlanningError


def refuse_accumulation(wrapper: Any) -> None:
    """PlanningError where the wrapper's own step would do nothing but wait for more gradients."""
    if not wrapper.gradient_state.sync_gradients:
        raise PlanningError(
            "accelerate is accumulating gradients, and a step updates each time that it is "
            "called: this would be an update at each micro-step.\n"
            "fix: gradient_accumulation_steps=1, batches as many times as large, and "
            "dt.train_step(..., schedule=dt.GPipe(microbatches=4))"
        )
