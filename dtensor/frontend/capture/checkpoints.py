"""`torch.utils.checkpoint` in the user's code: what it runs is captured, under a number.

    x = checkpoint(self.block, x, use_reentrant=False)      # meta["custom"][CHECKPOINT] == 0

A capture sees the ops of a checkpointed function once; that they are to run again in the backward
is lost unless it is marked. Each outermost call gets a number, which torch carries from the traced
op to the joint graph; `names` puts it into our meta, and the planner makes a region of it.

With use_reentrant=True torch differentiates inside its own backward and makes no gradients at all
where no argument requires grad; what would be lost so is refused. `context_fn`, which says op by op
what is saved, has no counterpart in a plan and is refused too. `preserve_rng_state` needs nothing:
random numbers are counted. Invariants: outside a capture nothing changes.
Not here: what a region saves (sharding/plan/passes/recompute.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpoints
from torch.fx import traceback
from torch.utils._pytree import tree_leaves

from dtensor.frontend.capture.refusals import planning_error
from dtensor.frontend.marks import is_capturing
from dtensor.frontend.source import source_here

CHECKPOINT = "dtensor_checkpoint"
"""The key of torch's node annotations under which the number of a checkpoint stands."""


@contextmanager
def recording_checkpoints() -> Iterator[None]:
    """Within a capture: ops that a checkpoint runs are annotated with its number."""
    plain: Any = checkpoints._checkpoint_without_reentrant_generator
    apply: Any = torch.autograd.Function.__dict__.get("apply")
    numbers = itertools.count()

    def outermost() -> Any:
        if CHECKPOINT in traceback.current_meta.get("custom", {}):
            return nullcontext()
        return traceback.annotate({CHECKPOINT: next(numbers)})

    def generator(function: Any, preserve: bool, context_fn: Any, *args: Any, **kw: Any) -> Any:
        """Torch runs the function where the generator stands still."""
        if not is_capturing():
            yield from plain(function, preserve, context_fn, *args, **kw)
            return
        if context_fn is not checkpoints.noop_context_fn:
            raise planning_error(
                "torch.utils.checkpoint with context_fn= cannot be captured: a plan saves what "
                "comes into a region, and not op by op.",
                f"context_fn={context_fn!r}",
                source=source_here(),
                fix="leave context_fn out, or checkpoint smaller parts",
            )
        with outermost():
            yield

    def checked_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is not checkpoints.CheckpointFunction or not is_capturing():
            return apply.__get__(None, cls)(*args, **kwargs)
        function, _, *given = args
        with outermost():
            made = function(*given)
        _check_reentrant(given, made)
        return made

    with (
        mock.patch.object(checkpoints, "_checkpoint_without_reentrant_generator", generator),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(checked_apply)),
        traceback.preserve_node_meta(),
    ):
        yield


def _check_reentrant(given: list[Any], made: Any) -> None:
    """Raises where torch would leave out gradients that this capture would make."""
    lost = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(made))
    if lost and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
        raise planning_error(
            "torch.utils.checkpoint makes no gradients here: no argument of it requires grad.",
            source=source_here(),
            fix="use_reentrant=False",
        )
