"""The plans of one function, and when each may be used again.

    plans = PlanCache("loss")
    planned = plans.get(call, others, make)    # calls make(None), which captures and plans
    planned = plans.get(call, others, make)    # the same plan, after some tens of microseconds
    BETA = 0.2                                 # a global that the function reads
    planned = plans.get(call, others, make)    # calls make(None); BETA = 0.1 finds the first again

A plan is valid for a call if the call has the same key, if the Python state that the capture read
is unchanged (frontend/guards), and if no other program has since fixed a default placement of the
models differently (`Models.agrees`). So a key may have several plans, for different Python state.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dtensor.api.step.bound_call import BoundCall, Grads
from dtensor.api.step.lengths import Lengths
from dtensor.api.step.plan_call import Planned
from dtensor.api.store.session import MeshSession
from dtensor.frontend.graph import Const, Graph
from dtensor.frontend.guards.guards import Guards, custom_ops
from dtensor.frontend.source import caller_level
from dtensor.provider import Provider
from dtensor.runtime.profile import Profile

MAX_PLANS = 16
"""The number of plans of a function that are cached, and whose programs stay loaded on a session:
the plans that were used last."""
MAX_RECAPTURES = 3
"""The number of captures because of one changing value after which a warning is given."""


@dataclass(slots=True, eq=False)
class _CachedPlan:
    """``settlement``: `Models.settlement` when the plan last agreed with its models."""

    planned: Planned
    settlement: int
    last_used: int = 0  # a count of uses, not a time

    @staticmethod
    def of(planned: Planned) -> _CachedPlan:
        return _CachedPlan(planned, planned.models.settlement)

    @property
    def is_switched(self) -> bool:
        """Whether `run.switch` has placed a model of the plan differently since."""
        return self.planned.switches != self.planned.models.switches

    def agrees(self) -> bool:
        """Return whether the plan has the default placements that its models have now."""
        models = self.planned.models
        settlement = models.settlement
        if self.settlement != settlement:
            if self.is_switched or not models.agrees(self.planned.plan, self.planned.stages):
                return False
            self.settlement = settlement
        return True


class PlanCache:
    """The plans of a function; ``grads`` are the gradients that its captures include.

    The `MAX_PLANS` plans that were used last are kept.
    """

    def __init__(self, grads: Grads) -> None:
        self.latest: Planned | None = None  # the plan that was returned last
        self._plans: dict[object, list[_CachedPlan]] = {}  # by key, the last used first
        self._num_uses = 0
        self._latest_key: object = None  # the key of the latest call
        self._recaptures: dict[str, list[float]] = {}  # changed value -> seconds of each capture
        self._lengths = Lengths(grads)

    def __len__(self) -> int:
        return sum(map(len, self._plans.values()))

    def get(
        self,
        call: BoundCall,
        planning_key: object,
        make: Callable[[Graph | None], Planned],
        *,
        captures: bool = True,
    ) -> Planned:
        """Return a valid plan for the call, making it if there is none.

        Args:
            planning_key: a hashable of all that the plan depends on besides the call.
            make: plans a graph or, for None, captures the call and plans its graph.
            captures: whether `make(None)` captures; False if it has a graph already.
        """
        call_key = call.key()
        key = (call_key, planning_key)
        cached = self._plans.get(key, [])
        if cached and cached[0].planned.is_unchanged() and cached[0].agrees():
            self._latest_key = call_key
            return self._use(cached[0])
        entry, difference = _find_valid(cached)
        if entry is None:
            entry = self._make_plan(call, key, cached, difference, make, captures)
            cached = [plan for plan in cached if plan.agrees()]
        self._latest_key = call_key
        return self._store(key, [entry, *(plan for plan in cached if plan is not entry)])

    def get_for_graph(
        self, graph: Graph, planning_key: object, make: Callable[[Graph], Planned]
    ) -> Planned:
        """Return the plan for a graph that was captured for one call, and give it the constants of
        this call. Graphs that differ only in the values of constants share a plan."""
        constants = [(c.name, c.value) for c in graph.inputs if isinstance(c, Const)]
        ops = custom_ops(graph.fx)
        key = (str(graph), str(graph.out_tree), tuple(ops.items()), planning_key)
        cached = next((plan for plan in self._plans.get(key, ()) if plan.agrees()), None)
        if cached is None:
            planned = make(replace(graph, reads=Guards((), None, constants, ops)))
            self._store(key, [_CachedPlan.of(planned)])
        else:
            planned = self._use(cached)
        reads = planned.graph.reads
        assert reads is not None
        reads.hold(constants)
        return planned

    def put(self, planned: Planned, before: Planned) -> None:
        """Store a plan for the calls of the plan ``before``, whose models were switched."""
        for key, plans in list(self._plans.items()):
            if any(plan.planned is before for plan in plans):
                other_plans = (plan for plan in plans if not plan.is_switched)
                self._store(key, [_CachedPlan.of(planned), *other_plans])

    def _use(self, plan: _CachedPlan) -> Planned:
        """Mark the plan as used last, and return it."""
        self._num_uses += 1
        plan.last_used = self._num_uses
        self.latest = plan.planned
        return plan.planned

    def _store(self, key: object, plans: list[_CachedPlan]) -> Planned:
        """Set the plans of a key, use the first, and evict plans beyond `MAX_PLANS`."""
        self._plans[key] = plans
        planned = self._use(plans[0])
        while len(self) > MAX_PLANS:
            pairs = [(k, plan) for k, plans in self._plans.items() for plan in plans]
            oldest_key, oldest = min(pairs, key=lambda pair: pair[1].last_used)
            self._plans[oldest_key].remove(oldest)
            if not self._plans[oldest_key]:
                del self._plans[oldest_key]
        return planned

    def _make_plan(
        self,
        call: BoundCall,
        key: tuple[object, object],
        cached: Sequence[_CachedPlan],
        difference: str | None,
        make: Callable[[Graph | None], Planned],
        captures: bool,
    ) -> _CachedPlan:
        """Return a new plan: from the graph of a plan that only a switch has outdated, from an
        export with symbolic sizes, or else from a capture. Warns of repeated captures."""
        same_graph = (p.planned.graph for p in cached if p.is_switched and p.planned.is_unchanged())
        graph = next(same_graph, None)  # a switch changes placements, not the program
        reason = difference or _changed_number(self._latest_key, key[0], call)
        new_shapes = captures and graph is None and reason is None and not cached
        if new_shapes and (exported := self._lengths.graph(call, key)) is not None:
            with suppress(Exception):  # an error of the user's program recurs in the capture below
                return _CachedPlan.of(make(exported))
        start = time.perf_counter()
        try:
            cached_plan = _CachedPlan.of(make(graph))
        except Exception as error:
            from dtensor.frontend.capture.failures import without_ours  # seldom needed

            raise without_ours(error)  # noqa: B904 - it is the same error
        seconds = time.perf_counter() - start
        if reason is not None:
            self._count_recapture(reason, seconds)
        elif new_shapes:
            self._lengths.was_captured(call, key, cached_plan.planned.graph, seconds)
        return cached_plan

    def _count_recapture(self, reason: str, seconds: float) -> None:
        """Warn if one value, the part of ``reason`` before ": ", differs from call to call."""
        seconds_of_captures = self._recaptures.setdefault(reason.partition(": ")[0], [])
        seconds_of_captures.append(seconds)
        if len(seconds_of_captures) == MAX_RECAPTURES:
            warnings.warn(
                f"{reason}. A step was captured for each of its last "
                f"{len(seconds_of_captures) + 1} values, "
                f"{sum(seconds_of_captures):.1f} s in all, and will be for the next.\n"
                f"fix: pass torch.tensor(...) of it as an argument of the step, and read that",
                stacklevel=caller_level(),
            )


def _find_valid(plans: Sequence[_CachedPlan]) -> tuple[_CachedPlan | None, str | None]:
    """Return a valid plan or None, and the first difference from the state that a plan read."""
    for plan in plans:  # a comparison by identity is fast, and never misses a change
        if plan.planned.is_unchanged() and plan.agrees():
            return plan, None
    first_difference: str | None = None
    for plan in plans:  # a comparison by value
        difference = plan.planned.difference()
        if difference is None and plan.agrees():
            return plan, None
        first_difference = first_difference or difference
    return None, first_difference


def _changed_number(before: Any, now: Any, call: BoundCall) -> str | None:
    """Return "the argument n: 3 -> 4" if the keys of two calls differ only in numbers of one
    argument; else None."""
    if before is None or before[0] != now[0]:
        return None
    pairs = list(zip(before[1], now[1], strict=True))
    differing = [i for i, (old, new) in enumerate(pairs) if old != new]
    if not differing or any(type(call.leaves[i]) not in (int, float) for i in differing):
        return None
    names = call.leaf_names()
    name, *other_names = {names[i].partition(".")[0] for i in differing}
    if other_names:
        return None
    old, new = (key[1] if isinstance(key, tuple) else key for key in pairs[differing[0]])
    return f"the argument {name}: {old} -> {new}"


Profiler = Callable[
    [int, MeshSession, Callable[[], object], Callable[[object], None], PlanCache], Profile
]
PROFILER = Provider[Profiler]("profile_step")
"""`profiled` (which imports this file). Its arguments: n, session, take_step, wait_for_result,
plans."""
