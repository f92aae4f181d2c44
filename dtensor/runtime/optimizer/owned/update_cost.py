"""Predict what one update of a whole parameter costs.

    update_cost(kind, options, {}, (4096, 1024), torch.float32)
    # UpdateCost(flops=51539607552, state_bytes=16777216) of Muon

torch's flop counter counts the steps of an optimizer over a meta tensor of the parameter's shape,
which computes nothing. FLOP are the average of `STEPS` steps after the first, since some optimizers
do more in every tenth. The counter counts products of matrices only, and no decompositions.

A step that reads numbers (LAMB, Adafactor) does not run on meta tensors. Then it runs on a small
tensor: a dim of the state that is as long as one of the small tensor's is taken to be as long as
the parameter's, and FLOP are scaled with the number of elements and the smallest dim. If this
raises too, the cost is 0 FLOP and a state of the parameter's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from dtensor.runtime.optimizer.optimizer_kind import OptimizerKind, copy_plain, step_without_hooks
from dtensor.sharding.plan.request import UpdateCost

STEPS = 10
_SMALL_SIZES = (17, 19, 23, 29, 31)
"""Sizes of the dims of the small tensor: primes, which the code of an optimizer rarely has."""


def update_cost(
    kind: OptimizerKind,
    options: Mapping[str, Any],
    attributes: Mapping[str, Any],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> UpdateCost:
    """Return the cost of one update. ``options``, ``attributes``: before the first step."""
    small = [min(*pair) for pair in zip(shape, _SMALL_SIZES, strict=False)]
    for device, trial in (("meta", [*shape]), ("cpu", small)):
        if len(trial) != len(shape) or not math.prod(shape):
            continue
        try:
            flops, tensors = _run_steps(kind, options, attributes, trial, dtype, device)
        except Exception:  # it reads numbers, or takes no tensor of this shape
            continue
        growth = math.prod(shape) / math.prod(trial)
        if len(shape) > 1:
            growth *= min(shape) / min(trial)
        sizes = dict(zip(trial, shape, strict=True))
        of_tensors = (math.prod(sizes.get(n, n) for n in t.shape) * t.itemsize for t in tensors)
        return UpdateCost(int(flops * growth), sum(of_tensors))
    return UpdateCost(0, math.prod(shape) * dtype.itemsize)


def _run_steps(
    kind: OptimizerKind,
    options: Mapping[str, Any],
    attributes: Mapping[str, Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> tuple[float, list[torch.Tensor]]:
    """Return the FLOP of a step, and the tensors of the state after the steps."""
    from torch.utils.flop_counter import FlopCounterMode

    parameter = Parameter(torch.full(tuple(shape), 0.5, dtype=dtype, device=device))
    options, attributes = copy_plain((dict(options), dict(attributes)))
    optimizer = kind.make([{**options, "params": [parameter]}], attributes)
    parameter.grad = torch.full_like(parameter, 1e-3)
    with torch.enable_grad():
        step_without_hooks(optimizer)
        with FlopCounterMode(display=False) as counter:
            for _ in range(STEPS):
                parameter.grad = torch.full_like(parameter, 1e-3)
                step_without_hooks(optimizer)
    tensors = {id(t): t for t in tensors_of(dict(optimizer.state.get(parameter, {})))}
    return counter.get_total_flops() / STEPS, [*tensors.values()]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers and in the attributes of objects."""
    match value:
        case torch.Tensor():
            yield value
        case Mapping():
            for part in value.values():
                yield from tensors_of(part)
        case list() | tuple() | set() | frozenset():
            for part in value:
                yield from tensors_of(part)
        case _ if not isinstance(value, type) and hasattr(value, "__dict__"):
            yield from tensors_of(vars(value))
        case _:
            return
