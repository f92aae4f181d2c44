"""`train_step`: check its arguments, and make the `TrainStep`.

step = train_step(model, loss_fn, opt, inputs=dict(dp=Row()), schedule=OneFOneB(microbatches=8))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.model.statements import Options
from dtensor.api.model.stating.recomputed import recompute_of
from dtensor.api.step import loss_scale
from dtensor.api.step.plan_call import checked_capture
from dtensor.api.step.training import StepOptions, TrainStep
from dtensor.api.step.wrapped_optimizers import torchs_own
from dtensor.errors import (
    PlanningError,
    check_callable,
    check_kind,
    check_number,
    check_order,
    check_word,
    checked_call,
)
from dtensor.runtime.lower.detect_nan import checked_detect
from dtensor.runtime.optimizer.elementwise.optimizer_rule import (
    check_optimizer,
    rule_of,
    state_elementwise,
)
from dtensor.runtime.optimizer.shard_optimizer import check_masters
from dtensor.runtime.schedule import GPipe, Schedule
from dtensor.sharding.plan.request import checked_search
from dtensor.sharding.redistribute.topology import Topology, check_topology

_KINDS = {"model": ParallelModule, "loss_fn": Callable, "optimizer": torch.optim.Optimizer}


@checked_call
def train_step(
    model: ParallelModule,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    *,
    inputs: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
    clip_grad_norm: float | None = None,
    topology: Topology | None = None,
    search: str = "predictable",
    keep_gradients: bool = False,
    recompute: Sequence[str] | None = None,
    master_weights: bool = False,
    detect_nan: bool | str = False,
    capture: str = "once",
    batch_norm: str = "whole_batch",
    elementwise: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> TrainStep:
    """A training step as one planned program.

        >>> model = dt.parallelize(torch.nn.Linear(8, 2), dt.Mesh(dp=2))
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = dt.train_step(model, lambda m, x: m(x).square().mean(), opt,
        ...                      inputs=dict(dp=dt.Row()))
        >>> [(c.kind, c.axis) for c in step.plan(torch.empty(4, 8)).collectives]
        [('all_reduce', 'dp'), ('all_reduce', 'dp')]
        >>> 0 < float(step(torch.ones(4, 8)))
        True

    Args:
        loss_fn: ``loss_fn(model, *batch)`` gives a scalar, or (scalar, {name: scalar}).
        optimizer: an optimizer over the model's parameters that is elementwise: torch's own but
            Adafactor, LBFGS, Muon and SparseAdam, others with ``elementwise``.
            Adam, AdamW, SGD and Adagrad update by torch's fused kernels, unless a group says
            otherwise: ``foreach=False`` is torch's default on the CPU, of which float32 differs in
            the last bits.
        inputs: placements of every argument with the batch dim, or argument name to placements.
        schedule: such as OneFOneB, with its number of microbatches; default one. They cut the batch
            as torch.chunk does: 30 rows in 8 are 7 of 4 and one of 2, 9 in 4 are 3 of 3.
        clip_grad_norm: the global norm that gradients are scaled down to: they are divided by
            max(1, (norm + 1e-6) / clip_grad_norm). It is that of the parameters which the
            optimizer has: no others have a gradient. Computed in float32, or in float64 where a
            gradient is.
        topology: what the planner prices with; by default an H100's figures.
        keep_gradients: keep each step's gradients on the actors, for ``step.gradients()``.
        search: "predictable" splits only what pins reach; "free" lifts that.
        recompute: globs over names of modules whose activations are not kept for the backward but
            computed again; `parallelize` takes it too.
        master_weights: the optimizer updates float32 copies of 16-bit parameters, which become
            these rounded; the copies are split as its state is, and saved with it.
        detect_nan: each op of forward and backward is checked on each rank: the first NaN, or Inf
            that no operand holds, fails the step with the op, the rank, the line and the operands;
            "nan": NaN alone, for programs with a wanted Inf. It reads every value once more.
        capture: "once": loss_fn's Python runs once, and again where what it reads has changed,
            and for other shapes, of which the last 16 are known. The second length of a dim is
            captured for all lengths, where that is sure to be right; a warning says where not.
            "each call": it runs at each call, so that it may draw from Python's or numpy's random
            numbers and change attributes; that costs the time of a capture, and where the ops
            differ, of planning.
        batch_norm: its statistics where there are microbatches. "whole_batch" is refused, as each
            would wait for all; "per_microbatch" is as torch's loop over the microbatches, each of
            all ranks' rows: running ones move once for each, in their order. Other buffers are
            those of the whole batch, other ops that mix rows are refused.
        elementwise: True states of an optimizer of another class that each element of a parameter
            is updated from its own gradient and state alone. It is tried before the first step, on
            small parameters, in a second at most (``step.elementwise`` says what was seen), and
            refused where numbers differ or an op mixes elements. What its step changes of its
            groups' options and of its attributes is read and written as torch does.
        grad_scaler: for float16: ``torch.amp.GradScaler("cpu")``, on GPUs too. The loss is
            multiplied by its scale, the gradients are divided by it before they are clipped. Where
            one is not finite the step changes nothing, ``loss.skipped`` is True, and the scaler
            backs off. Its state is the object's own, moved when a step has ended: so a call waits
            for the step before. One that is switched off does nothing.

    Raises PlanningError, here and at the first `plan` or call.
    """
    if not (isinstance(model, ParallelModule) and callable(loss_fn)):
        check_order("train_step", _KINDS, model, loss_fn, optimizer)
    check_parallel("train_step", model)
    if model.source is not None:
        raise PlanningError(
            f"{model!r} is a replica: its values are the policy's, and the next dt.sync would put "
            f"these in the place of what a step has trained.\n"
            f"fix: dt.train_step(policy, loss_fn, optimizer)"
        )
    fix = "dt.train_step(model, lambda model, x, y: ..., optimizer)"
    check_callable("loss_fn", loss_fn, fix)
    check_kind("elementwise", elementwise, bool, "True or False", "elementwise=True")
    given, optimizer = optimizer, torchs_own(optimizer)
    if elementwise:
        state_elementwise(optimizer)
    check_optimizer(optimizer)
    is_schedule = isinstance(schedule, Schedule) and not isinstance(schedule, type)
    if schedule is not None and not is_schedule:
        raise PlanningError(
            f"schedule={schedule!r} is not a schedule; fix: dt.OneFOneB(microbatches=4), "
            f"dt.GPipe(microbatches=4) or dt.Custom(...)"
        )
    scaler = None if grad_scaler is None else loss_scale.checked_scaler(grad_scaler)
    if scaler is not None and detect_nan:
        raise PlanningError(
            "detect_nan fails a step for what a grad_scaler skips it for: gradients that are not "
            "finite.\nfix: leave one of them out"
        )
    if clip_grad_norm is not None:
        fix = "clip_grad_norm=1.0, or leave it out for no clipping"
        check_number("clip_grad_norm", clip_grad_norm, above=0, fix=fix)
    check_topology(topology)
    check_kind("keep_gradients", keep_gradients, bool, "True or False", "keep_gradients=True")
    check_kind("master_weights", master_weights, bool, "True or False", "master_weights=True")
    if master_weights:
        check_masters(optimizer)
    rule_of(optimizer, master_weights)
    check_word("batch_norm", batch_norm, ("whole_batch", "per_microbatch"))
    again = () if recompute is None else recompute_of(recompute, model.module)
    check_recompute(model, again)
    planning = Options(
        inputs=inputs,
        topology=topology,
        search=checked_search(search),
        recompute=again,
        each_call=checked_capture(capture),
        per_microbatch=batch_norm == "per_microbatch",
    )
    options = StepOptions(
        planning=planning,
        schedule=schedule or GPipe(microbatches=1),
        clip_grad_norm=None if clip_grad_norm is None else float(clip_grad_norm),
        keep_gradients=keep_gradients,
        master_weights=master_weights,
        detect_nan=checked_detect(detect_nan) if detect_nan else False,
        grad_scaler=scaler,
    )
    step = TrainStep(model, loss_fn, optimizer, options)
    step.accelerated = given if given is not optimizer else None
    model.claim_homes(step.grid.home())
    return step


def check_recompute(model: ParallelModule, again: tuple[str, ...]) -> None:
    """PlanningError where both state what is computed again."""
    if again and model.recompute:
        raise PlanningError(
            f"recompute is stated twice.\n"
            f"  parallelize: {list(model.recompute)}, train_step: {list(again)}\n"
            f"fix: leave it out of one of them"
        )
