"""Finds why the host of a GPU must wait for a value in a step, for the plan's lines.

    host_waits(plan)      # ("waits 2 times, for the counts of rows of experts",)
    run_ahead(plan)       # ("launches a step after the step before has ended: ...",)

A program for GPUs is deferred if the host reads no value of the GPU before the step has ended
(runtime/lower/deferred.py). The program of a plan with one of the `host_waits` is not: its host
reads the votes, as on CPUs. An op of the user's that reads a value waits where it is called, and
its program is deferred all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeAlias

from dtensor.sharding.local.grouped_matmul import has_kernel, widths_of
from dtensor.sharding.plan.choose.routes import ROUTE
from dtensor.sharding.plan.cost.seconds import step_times
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Compute, Redistribute, Step, norm_of, updates_of
from dtensor.sharding.spec.spec import TensorSpec

Shapes: TypeAlias = Sequence[tuple[int, ...]]

_PRODUCTS: Mapping[str, Callable[[Shapes], Sequence[int]]] = {
    "dt.expert_mm.default": lambda shapes: shapes[1][1:],
    "dt.expert_outer.default": lambda shapes: (shapes[0][1], shapes[1][1]),
    "dt.expert_sum.default": lambda shapes: shapes[0][1:],
    "aten._grouped_mm.default": lambda shapes: widths_of(*shapes[:2]),
    "transformers.grouped_mm_fallback.default": lambda shapes: widths_of(*shapes[:2]),
    "transformers.grouped_mm_fallback_backward.default": lambda shapes: widths_of(*shapes[:2]),
}
"""Products by group, each with the function from the shapes of its operands to its widths; see
`has_kernel`."""
_NUMBERS_AT = {"dt.expert_sum.default": 1}  # the position of the counts or offsets, if not 2


def host_waits(plan: PlanRecord) -> tuple[str, ...]:
    """Return the values for which the host of a GPU waits within a step; () for most plans."""
    return (*_reads(plan), *_updates(plan))


def run_ahead(plan: PlanRecord) -> tuple[str, ...]:
    """Return why the host does not launch a step before the step before has ended; () if it does.
    The step itself may be deferred."""
    norm = norm_of(plan.steps)
    if norm is None or not norm.scaled:
        return ()
    return ("launches a step after the step before has ended: the loss scale depends on it",)


def _reads(plan: PlanRecord) -> Iterator[str]:
    """Yield the waits for numbers of rows, on the stage with the most. Each value is read once."""
    computes = [step for step in plan.steps if isinstance(step, Compute)]
    routes = {step.results[0] for step in computes if step.op.call.name == ROUTE}
    times: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for step in plan.steps:
        if (read := _number_read(step, routes)) is not None:
            what, value = read
            times[what, step.stage][value] = step_times(plan, step)
    for what in dict.fromkeys(what for what, _ in times):
        waits = max(sum(by_value.values()) for (of, _), by_value in times.items() if of == what)
        yield f"waits {'once' if waits == 1 else f'{waits} times'}, for {what}"


def _number_read(step: Step, routes: Container[str | None]) -> tuple[str, str] | None:
    """Return the numbers that the host reads in a step, with the name of their value; None if it
    reads nothing. ``routes``: the counts that `dt.route` returns."""
    counts, offsets = "the counts of rows of experts", "the offsets of grouped products"
    if isinstance(step, Redistribute):
        return (counts, step.results[0]) if step.moves[0].gathers_counts else None
    if not isinstance(step, Compute):
        return None
    name, specs = step.op.call.name, step.operand_specs
    if name == ROUTE:  # the sizes of the results are data if the rank holds some experts only
        is_by_expert = any(spec is not None and spec.is_by_expert for spec in step.result_specs)
        return (counts, step.gives[0]) if is_by_expert else None
    if name not in _PRODUCTS or len(specs) <= (at := _NUMBERS_AT.get(name, 2)):
        return None
    value, is_known = step.operands[at], _has_kernel(name, specs)
    if name.startswith("dt."):
        is_known = specs[0].is_by_expert or (is_known and value in routes)
    return None if is_known else (counts if name.startswith("dt.") else offsets, value)


@cache
def _has_kernel(name: str, specs: tuple[TensorSpec, ...]) -> bool:
    """Return whether a kernel multiplies the groups on all ranks; see `has_kernel`."""
    mesh = specs[0].mesh
    shapes = {
        tuple(spec.local_shape(mesh.coordinates(rank)) for spec in specs)
        for rank in range(mesh.size)
    }
    return all(has_kernel(specs[0].dtype, _PRODUCTS[name](each)) for each in shapes)


def _updates(plan: PlanRecord) -> Iterator[str]:
    """Yield the waits of optimizers that may read values."""
    reasons = dict.fromkeys(u.host_reads for u in updates_of(plan.steps) if u.host_reads)
    if reasons:
        yield f"waits for the votes, because {', and '.join(reasons)}"
