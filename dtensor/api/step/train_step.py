"""`train_step`: check its arguments, and make the `TrainStep`.

    step = train_step(model, loss_fn, opt, inputs=dict(dp=Row()), schedule=GPipe(microbatches=8))

Checks that need a batch are made at the first plan or call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor.api.model.parallel import ParallelModule, check_parallel
from dtensor.api.model.statements import Options
from dtensor.api.model.stating.recomputed import checked_recompute
from dtensor.api.step import loss_scale
from dtensor.api.step.plan_call import checked_capture
from dtensor.api.step.training import StepOptions, TrainStep
from dtensor.api.step.wrapped_optimizers import Optimizers, checked_optimizers
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
    optimizer: Optimizers,
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
    aux_loss: str = "whole_batch",
    capacity: float | None = None,
    elementwise: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
    delay: int = 0,
    accumulate: str = "float32",
) -> TrainStep:
    """Return a training step, whose forward, backward and update are one planned program.

        >>> model = dt.parallelize(torch.nn.Linear(8, 2), dt.Mesh(dp=2))
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = dt.train_step(model, lambda m, x: m(x).square().mean(), opt,
        ...                      inputs=dict(dp=dt.Row()))
        >>> [(c.kind, c.axis) for c in step.plan(torch.empty(4, 8)).collectives]
        [('all_reduce', 'dp'), ('all_reduce', 'dp')]
        >>> 0 < float(step(torch.ones(4, 8)))
        True

    Args:
        loss_fn: ``loss_fn(model, *batch)`` returns a scalar, or (scalar, {name: scalar}).
        optimizer: an optimizer over the model's parameters, or a list of several that share no
            parameter, such as one for matrices and one for the other parameters. A step updates
            with each optimizer of the list, after one gradient norm; each optimizer keeps its own
            groups, state and schedulers. Classes other than torch's elementwise ones are tested on
            small parameters before the first step: an optimizer that updates each element from its
            own gradient and state runs on shards, and an optimizer that updates each parameter from
            its own gradient and state runs on one rank per parameter. Others are refused. Adam,
            AdamW, SGD and Adagrad use torch's fused kernels unless a group has another setting:
            ``foreach=False`` is torch's default on the CPU, whose float32 results differ in the
            last bits.
        inputs: the placements of each argument with the batch dim, or argument name -> placements.
        schedule: a schedule with its number of microbatches, such as OneFOneB; default one
            microbatch. The batch is cut as by torch.chunk: 30 rows in 8 microbatches are 7 of 4
            rows and one of 2; 9 rows in 4 are 3 of 3.
        clip_grad_norm: the largest global norm of the gradients of all optimizers' parameters. The
            gradients are divided by max(1, (norm + 1e-6) / clip_grad_norm). The norm is float32,
            or float64 if a gradient is.
        topology: the hardware figures for the planner's prices; by default the figures of an H100.
        keep_gradients: keep the gradients of each step on the ranks for ``step.gradients()``.
        search: "predictable" splits only values that pins reach; "free" lifts that limit.
        recompute: globs over names of modules whose activations are not stored for the backward but
            computed again. `parallelize` has this argument too.
        master_weights: the optimizer updates float32 copies of 16-bit parameters, which are then
            rounded. The copies are sharded and saved like the optimizer's state.
        detect_nan: each rank checks each op of the forward and backward. The first NaN, or Inf
            without an Inf operand, fails the step with the op, rank, line and operands. "nan"
            checks for NaN only, for programs that use Inf. The checks read every value once more.
        capture: "once": loss_fn's Python runs once, and again when Python state that it read has
            changed, or for new shapes; the last 16 captures are kept. The second length of a dim is
            captured for all lengths if that is certain to be right; otherwise a warning tells why.
            "each call": it runs at each call, so it may use Python's or numpy's random numbers and
            change attributes. That costs a capture per call, and planning if the ops differ.
        batch_norm: the statistics of batch norm with microbatches. "whole_batch" raises, because
            each microbatch would wait for all others. "per_microbatch" computes what torch's loop
            over the microbatches does, each over the rows of all ranks: running statistics are
            updated once per microbatch, in order. Other buffers depend on the whole batch; other
            ops that mix rows raise.
        aux_loss: load-balancing losses (`load_balancing_loss`, and the function of this kind that
            transformers' models call) with microbatches. "whole_batch" raises, because such a loss
            is a product of means over the batch. "per_microbatch" computes what torch's loop over
            the microbatches does: the mean of the microbatches' losses, each over the rows of all
            ranks. Microbatches have one size.
        capacity: the rows of experts that a rank may receive in one exchange, or hold if it has all
            tokens, over the rows if experts had equally many (at least 1). The plan prints the
            memory at this budget. If a rank would receive more, no rank sends rows: the step is
            undone, with an error that names the rank, its fullest expert and the capacity that the
            exchange needs. No token is dropped. By default no step fails for its routing. Without
            rows that are split by expert it has no effect.
        elementwise: True asserts that each optimizer updates each element of a parameter from that
            element's gradient and state alone; an optimizer that does not is refused. Without it
            the test decides. ``step.elementwise`` is the report of the test (for a list of
            optimizers, a tuple of reports). The step may change options of its groups and its own
            attributes, as in torch.
        grad_scaler: for float16: ``torch.amp.GradScaler("cpu")``, also on GPUs. The loss is
            multiplied by its scale, and the gradients are divided by it before they are clipped. If
            a gradient is not finite, the step changes nothing, ``loss.skipped`` is True, and the
            scaler backs off. A step updates the scaler when it ends, so the next call waits for it.
            A disabled scaler has no effect.
        delay: 1: each step computes the gradient at the present weights, and updates with the
            gradient of the step before, whose reductions overlap with the whole step. The first
            step updates nothing. Clipping, ``loss.grad_norm`` and ``keep_gradients`` use the
            gradient of the step before. The gradient that waits is saved with the optimizer's
            state, under "delayed_gradient".
        accumulate: the dtype in which sums of gradients over microbatches are kept. "float32": sums
            of 16-bit gradients are kept in float32, sums of float32 and float64 as they are. "bf16"
            rounds the sum of each gradient after each addition, whatever the gradient's dtype up to
            32 bits: half the memory, and at ZeRO levels 0 and 1 half the bytes sent. Sums over
            ranks are float32 either way.

    Raises PlanningError, here and at the first `plan` or call.
    """
    if not (isinstance(model, ParallelModule) and callable(loss_fn)):
        check_order("train_step", _KINDS, model, loss_fn, optimizer)
    check_parallel("train_step", model)
    if model.source is not None:
        raise PlanningError(
            f"{model!r} is a replica: its values are the policy's, and the next dt.sync would "
            f"overwrite what a step has trained.\n"
            f"fix: dt.train_step(policy, loss_fn, optimizer)"
        )
    fix = "dt.train_step(model, lambda model, x, y: ..., optimizer)"
    check_callable("loss_fn", loss_fn, fix)
    check_kind("elementwise", elementwise, bool, "True or False", "elementwise=True")
    fix = "torch.optim.AdamW(model.parameters()), or a list of optimizers"
    optimizers = checked_optimizers(optimizer, fix, least=1)
    is_single = isinstance(optimizer, torch.optim.Optimizer)
    wrappers = [optimizer] if is_single else optimizer
    for each in optimizers if elementwise else ():
        state_elementwise(each)
    is_schedule = isinstance(schedule, Schedule) and not isinstance(schedule, type)
    if schedule is not None and not is_schedule:
        raise PlanningError(
            f"schedule={schedule!r} is not a schedule; fix: dt.OneFOneB(microbatches=4), "
            f"dt.GPipe(microbatches=4) or dt.Custom(...)"
        )
    scaler = None if grad_scaler is None else loss_scale.checked_scaler(grad_scaler)
    if scaler is not None and detect_nan:
        raise PlanningError(
            "detect_nan fails a step whose gradients are not finite, and grad_scaler skips it.\n"
            "fix: leave one of them out"
        )
    if clip_grad_norm is not None:
        fix = "clip_grad_norm=1.0, or leave it out for no clipping"
        check_number("clip_grad_norm", clip_grad_norm, above=0, fix=fix)
    if delay not in (0, 1) or isinstance(delay, bool):
        raise PlanningError(
            f"delay={delay!r} is not a delay of gradients in steps.\n"
            f"fix: delay=1, or leave it out for the gradients of the same step"
        )
    if delay and scaler is not None:
        raise PlanningError(
            "delay=1 updates with gradients of the step before, which have its loss scale, and "
            "grad_scaler changes the scale between steps.\n"
            "fix: leave one of them out"
        )
    check_topology(topology)
    check_kind("keep_gradients", keep_gradients, bool, "True or False", "keep_gradients=True")
    check_kind("master_weights", master_weights, bool, "True or False", "master_weights=True")
    for each in optimizers:
        if master_weights:
            check_masters(each)
        rule_of(each, master_weights)
    check_word("batch_norm", batch_norm, ("whole_batch", "per_microbatch"))
    check_word("accumulate", accumulate, ("float32", "bf16"))
    check_word("aux_loss", aux_loss, ("whole_batch", "per_microbatch"))
    if capacity is not None:
        check_number(
            "capacity", capacity, least=1, fix="capacity=1.5, or leave it out for no limit"
        )
    recomputed = () if recompute is None else checked_recompute(recompute, model.module)
    check_recompute(model, recomputed)
    planning = Options(
        inputs=inputs,
        topology=topology,
        search=checked_search(search),
        recompute=recomputed,
        each_call=checked_capture(capture),
        per_microbatch=batch_norm == "per_microbatch",
        aux_per_microbatch=aux_loss == "per_microbatch",
        capacity=None if capacity in (None, math.inf) else float(capacity),
    )
    options = StepOptions(
        planning=planning,
        schedule=schedule or GPipe(microbatches=1),
        clip_grad_norm=None if clip_grad_norm is None else float(clip_grad_norm),
        keep_gradients=keep_gradients,
        master_weights=master_weights,
        detect_nan=checked_detect(detect_nan) if detect_nan else False,
        grad_scaler=scaler,
        delay=delay,
        accumulate=accumulate,
    )
    step = TrainStep(model, loss_fn, optimizers[0] if is_single else list(optimizers), options)
    step.accelerated = tuple(w for w, o in zip(wrappers, optimizers, strict=True) if w is not o)
    model.claim_homes(step.grid.home())
    return step


def check_recompute(model: ParallelModule, recompute: tuple[str, ...]) -> None:
    """Raise PlanningError if both `parallelize` and `train_step` state ``recompute=``."""
    if recompute and model.recompute:
        raise PlanningError(
            f"recompute is stated twice.\n"
            f"  parallelize: {list(model.recompute)}, train_step: {list(recompute)}\n"
            f"fix: leave it out of one of them"
        )
