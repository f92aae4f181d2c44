"""Gradient scaling for float16: `train_step(..., grad_scaler=torch.amp.GradScaler("cpu"))`.

    loss_fn(model, x)  ->  (loss * scale, {..., "loss before its scale": loss})

The scale is an argument of the program; the ranks divide the gradients by it before they clip them
(shard_optimizer.py). If a gradient is not finite, the step is undone as if it had raised, but
instead of an error the scaler backs off. A step reads the state of the user's scaler and updates it
when it has ended, so the next step waits for it.

The scale changes as in `GradScaler.update`, in float32. A step that fails for another reason does
not change it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from dtensor.daft import DaftError, TaskError
from dtensor.errors import PlanningError, check_kind
from dtensor.runtime.optimizer.gradient_norm import GradientOverflow

ARGUMENT = "loss_scale"
UNSCALED = "loss before its scale"


def checked_scaler(scaler: object) -> torch.amp.GradScaler | None:
    """Return the scaler, or None if the user has disabled it. Raises PlanningError for another
    object, and for a CUDA scaler that torch has disabled because it sees no GPU."""
    kind = torch.amp.GradScaler
    fix = 'grad_scaler=torch.amp.GradScaler("cpu")'
    check_kind("grad_scaler", scaler, kind | None, "a torch.amp.GradScaler", fix)
    if scaler is None or (isinstance(scaler, kind) and scaler.is_enabled()):
        return scaler
    if scaler._device == "cuda" and not torch.cuda.is_available():  # pyright: ignore
        raise PlanningError(
            f"grad_scaler is switched off: torch does so with one for CUDA where it sees no GPU.\n"
            f"fix: {fix}: it has the same numbers, on GPUs too"
        )
    return None


def scaled(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``loss_fn`` with one more argument, by which the loss is multiplied. If the result is
    not a loss, it is returned as is, and the capture refuses it."""

    @functools.wraps(loss_fn)
    def of_scaled_loss(*args: Any, loss_scale: torch.Tensor, **kwargs: Any) -> Any:
        """Return the scaled loss, and the metrics with the unscaled loss among them."""
        out = loss_fn(*args, **kwargs)
        loss, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
        if not isinstance(loss, torch.Tensor) or not isinstance(metrics, dict):
            return out
        return loss * loss_scale, {**metrics, UNSCALED: loss}

    return of_scaled_loss


def scale_of(scaler: torch.amp.GradScaler) -> float:
    return float(scaler.state_dict()["scale"])


def update(scaler: torch.amp.GradScaler, *, skipped: bool) -> None:
    """Update the scale after a step, as `GradScaler.update` does."""
    state = scaler.state_dict()
    scale, streak = state["scale"], 0
    if skipped:
        scale = _float32(scale * state["backoff_factor"])
    else:
        streak = state["_growth_tracker"] + 1
        if streak == state["growth_interval"]:
            streak, larger = 0, _float32(scale * state["growth_factor"])
            scale = larger if math.isfinite(larger) else scale
    scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": streak})


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def is_overflow(error: DaftError) -> bool:
    """Return whether a step failed because a gradient is not finite."""
    raised = error.failure.raised if isinstance(error, TaskError) else None
    return raised is not None and isinstance(raised.error, GradientOverflow)
