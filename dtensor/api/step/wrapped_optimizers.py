"""The argument ``optimizer`` of steps and checkpoints: an optimizer, or a list of optimizers.

    checked_optimizers(adamw)                    # (adamw,)
    checked_optimizers([muon, adamw])            # (muon, adamw)
    checked_optimizers(accelerator.prepare(adamw))       # (adamw,)
    with accelerator.accumulate(net):            # gradient_accumulation_steps=4
        step(x, y)                               # PlanningError: an update at each micro-step

Only a wrapper of exactly Hugging Face Accelerate's class is removed; another class may do more in
its step. The wrapper's step does nothing while Accelerate accumulates gradients, which a
`TrainStep` cannot do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from dtensor.errors import PlanningError, check_kind

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""An optimizer, or a list of optimizers."""


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer in Accelerate's wrapper, or the argument itself if it is not wrapped."""
    accelerate = sys.modules.get("accelerate.optimizer")
    if accelerate is not None and type(optimizer) is accelerate.AcceleratedOptimizer:
        return optimizer.optimizer
    return optimizer


def checked_optimizers(
    optimizers: Any, fix: str = "pass the optimizer itself, or leave it out", *, least: int = 0
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the unwrapped optimizers; none for None if ``least`` is 0. Raises PlanningError for an
    empty list, an optimizer that is listed twice, and another object."""
    wanted = "a torch.optim optimizer or a list of them"
    if optimizers is None and not least:
        return ()
    check_kind("the optimizer", optimizers, torch.optim.Optimizer | list | tuple, wanted, fix)
    if isinstance(optimizers, torch.optim.Optimizer):
        return (unwrapped_optimizer(optimizers),)
    if not optimizers:
        raise PlanningError(f"the list of optimizers is empty.\nfix: {fix}")
    for number, optimizer in enumerate(optimizers):
        what = f"optimizer {number} of the list"
        check_kind(what, optimizer, torch.optim.Optimizer, "a torch.optim optimizer", fix)
    unwrapped = tuple(map(unwrapped_optimizer, optimizers))
    if len(set(map(id, unwrapped))) < len(unwrapped):
        raise PlanningError(
            f"an optimizer is in the list twice: {kinds_text(unwrapped)}.\n"
            f"fix: pass each optimizer once"
        )
    return unwrapped


def kinds_text(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return the names of the optimizers' classes, as messages and tables print them."""
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)


def refuse_accumulation(wrapper: Any) -> None:
    """Raise PlanningError while Accelerate accumulates gradients."""
    if not wrapper.gradient_state.sync_gradients:
        raise PlanningError(
            "accelerate is accumulating gradients, and a step updates each time that it is "
            "called: this would be an update at each micro-step.\n"
            "fix: gradient_accumulation_steps=1, batches as many times as large, and "
            "dt.train_step(..., schedule=dt.GPipe(microbatches=4))"
        )
