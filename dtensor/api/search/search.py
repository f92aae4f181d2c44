"""`search`: find the strategies under which a training step is predicted to be best.

    found = search(model, loss_fn, 64, tokens, targets, topology=dt.topologies.h100())
    print(found)               # the five best, as a table
    print(found.best.text)     # the best one as a program

The step is captured once; nothing is launched or computed. The search visits the points of the
space (space.py) in the order of a lower bound of their cost. It estimates the cost of promising
points from a few plans (strategy_family.py), and plans the points with the lowest estimates, until
every other point costs more than the fifth best plan by more than the observed estimation error.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast, get_args

import torch
from torch import nn

from dtensor.api.search.comparison import CapturedStep, Compared, MakeOptimizer, check_model
from dtensor.api.search.generation_search import GenerationSearch, Traffic
from dtensor.api.search.program import SearchedProgram
from dtensor.api.search.result import (
    MAX_ROWS,
    FoundStrategy,
    Objective,
    SearchResult,
    keyword_lines,
    python_text,
)
from dtensor.api.search.space import SearchPoint, points_of, space_text
from dtensor.api.search.strategy_family import Estimate, StrategyFamily
from dtensor.api.step.wrapped_optimizers import Optimizers, kinds_text
from dtensor.errors import PlanningError, check_callable, check_number, check_word
from dtensor.sharding.plan.text.words import size_text
from dtensor.sharding.redistribute.topology import Topology, check_topology

Progress = Callable[[int, int, str], object]
"""Called with (number done, approximate total, a description)."""

_MIN_ERROR: dict[str, float] = {"time": 0.01, "memory": 0.15}
"""The least assumed error of an estimate, as a fraction, by objective."""


def search(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    num_ranks: int,
    *batch: Any,
    topology: Topology | None = None,
    memory: float | None = None,
    objective: str = "time",
    optimizer: MakeOptimizer | Optimizers = torch.optim.AdamW,
    progress: Progress | None = None,
    slots: int | None = None,
    length: int | None = None,
    prompt: int | None = None,
    **kwargs: Any,
) -> SearchResult:
    """Return the best strategies for ``loss_fn(model, *batch, **kwargs)`` on ``num_ranks`` ranks.

    Args:
        batch: tensors (meta too), `spec`s, or a torch.Size, as for `compare`; global shapes.
        topology: the hardware that the prices are for.
        memory: the bytes that a rank may hold; the default is ``topology.memory_bytes``.
        objective: "time" of a step, "memory" of the fullest rank, or "tokens": the tokens per
            second of `generator` with the model, with ``loss_fn=None`` and no batch.
        optimizer: a class, or a function of the parameters, or an optimizer over them, or a list.
        progress: called with the number done, the approximate total, and a description.
        slots, length, prompt: only for "tokens": the number of texts at once, the positions of a
            text, and the positions of its prompt. A slot makes ``n = length - prompt`` tokens per
            request and waits during each prefill, so there are
            ``slots * n / (n * decode + slots * prefill)`` tokens per second, where ``decode`` and
            ``prefill`` are the seconds of one run of each program.

    Raises PlanningError if the program cannot be captured, or if no point has a plan that fits in
    memory; the error names the plan that needs the least memory.
    """
    check_model("search", model, "dt.search(GPT(config), loss_fn, 8, *batch)")
    check_number("num_ranks", num_ranks, least=1, whole=True, fix="dt.search(model, loss_fn, 8)")
    check_topology(topology)
    check_word("objective", objective, get_args(Objective))
    if memory is not None:
        check_number("memory", memory, above=0, fix="memory=80 * 2**30, in bytes")
    if progress is not None:
        check_callable("progress", progress, "lambda done, total, words: ...")
    priced = _with_memory(topology or Topology(), memory)
    report = progress or _ignore_progress
    stated = topology is not None or memory is not None
    generation = dict(slots=slots, length=length, prompt=prompt)
    if objective == "tokens":
        _check_no_step(loss_fn, batch, kwargs, optimizer)
        return GenerationSearch(
            model=model,
            num_ranks=num_ranks,
            traffic=Traffic.of(**generation),
            topology=priced,
            stated=stated,
            report=report,
        ).run()
    for name, value in generation.items():
        if value is not None:
            raise PlanningError(
                f'{name}={value!r} belongs to objective="tokens", and this is "{objective}".\n'
                f"fix: leave {name}= out; bind arguments of loss_fn with a lambda"
            )
    check_callable("loss_fn", loss_fn, "lambda model, x, y: ...")
    assert loss_fn is not None
    report(0, 1, "captures the step")
    step = CapturedStep.of(model, loss_fn, batch, kwargs, optimizer)
    program = SearchedProgram.of(step, num_ranks, priced)
    return _Training(
        program=program,
        objective=cast(Objective, objective),
        optimizer=optimizer,
        stated=stated,
        report=report,
    ).run()


def _check_no_step(
    loss_fn: object, batch: tuple[Any, ...], kwargs: Mapping[str, Any], optimizer: object
) -> None:
    """Raise PlanningError if a search of generation is given arguments of a training step."""
    given = ["loss_fn"] * (loss_fn is not None) + ["a batch"] * bool(batch) + [*kwargs]
    given += ["optimizer"] * (optimizer is not torch.optim.AdamW)
    if given:
        raise PlanningError(
            f'objective="tokens" trains nothing, but is given {", ".join(given)}.\n'
            f'fix: dt.search(model, None, 8, objective="tokens", slots=8, length=256, prompt=64)'
        )


def _ignore_progress(done: int, total: int, words: str) -> None:
    pass


def _with_memory(topology: Topology, memory: float | None) -> Topology:
    """Return the topology with this memory per rank, which `stages="auto"` respects."""
    if memory is None:
        return topology
    figures = {f.name: getattr(topology, f.name) for f in fields(Topology) if f.name != "named"}
    return Topology(**{**figures, "memory_bytes": float(memory)})


@dataclass(slots=True, kw_only=True)
class _Training:
    """The state of a search for a training step.

    ``stated``: whether the user gave a topology or memory; ``over``: points above the memory limit.
    """

    program: SearchedProgram
    objective: Objective
    optimizer: MakeOptimizer | Optimizers
    stated: bool
    report: Progress
    families: dict[tuple[int, int], StrategyFamily | PlanningError] = field(
        default_factory=dict[tuple[int, int], StrategyFamily | PlanningError]
    )
    estimates: dict[SearchPoint, Estimate] = field(default_factory=dict[SearchPoint, Estimate])
    refused: Counter[str] = field(default_factory=Counter[str])
    over: int = 0
    planned: int = 0
    slack: float = 0.0

    def run(self) -> SearchResult:
        """Estimate points in the order of their lower bound, and plan the best estimates."""
        points = points_of(self.program.facts)
        if not points:
            raise _no_mesh_error(self.program)
        limit = self.program.topology.memory_bytes
        self.slack = _MIN_ERROR[self.objective]
        queue = [(self._floor(point), False, point) for point in points]
        heapq.heapify(queue)
        best: list[tuple[float, SearchPoint, Compared]] = []
        while queue:
            figure, is_estimate, point = heapq.heappop(queue)
            worst = best[-1][0] if len(best) == MAX_ROWS else math.inf
            if figure * (1 - self.slack) >= worst:
                break
            if not is_estimate:
                estimate = self._estimate(point)
                if estimate is None:
                    continue
                if estimate.least_bytes > limit:
                    self.over += 1
                else:
                    heapq.heappush(queue, (self._figure(estimate), True, point))
                continue
            self.report(self.planned, self.planned + 1, f"plans {point.name}")
            row = self._plan(point)
            if row is None:
                continue
            if not row.fits:
                self.over += 1
                continue
            exact = row.seconds if self.objective == "time" else float(row.memory.total)
            self.slack = max(self.slack, 1.5 * (figure / exact - 1))
            best = sorted([*best, (exact, point, row)], key=lambda item: item[:2])[:MAX_ROWS]
        if not best:
            raise self._no_fit_error()
        facts, step = self.program.facts, self.program.step
        return SearchResult(
            name=step.name,
            optimizer=kinds_text(step.optimizers),
            objective=self.objective,
            num_ranks=facts.num_ranks,
            hardware=self.program.topology.title,
            memory_bytes=limit,
            space=space_text(facts),
            rows=tuple(self._result_row(point, row) for _, point, row in best),
            num_points=len(points),
            num_planned=self.planned,
            num_estimated=len(self.estimates),
            num_bases=len(self.families),
            over_memory=self.over,
            refused=dict(self.refused),
        )

    # -- estimates, plans ----------------------------------------------------------------------

    def _family(self, tp: int, zero: int) -> StrategyFamily | PlanningError:
        """Return the family of a tp size and ZeRO level, or the planner's error; planned once."""
        if (tp, zero) not in self.families:
            self.report(len(self.families), len(self.families) + 1, f"prices tp={tp}, zero {zero}")
            try:
                self.families[tp, zero] = StrategyFamily.of(self.program, tp, zero)
            except PlanningError as error:
                self.families[tp, zero] = error
        return self.families[tp, zero]

    def _floor(self, point: SearchPoint) -> float:
        """Return a lower bound of the point's figure; 0 if memory is the objective."""
        family = self._family(point.tp, 0)
        if isinstance(family, PlanningError) or self.objective == "memory":
            return 0.0
        return family.floor(point)

    def _estimate(self, point: SearchPoint) -> Estimate | None:
        """Return the point's estimate, or None if the planner refuses the point."""
        family = self._family(point.tp, point.zero)
        if isinstance(family, PlanningError):
            self._refuse(family)
            return None
        try:
            estimate = family.estimate(point)
        except PlanningError as error:  # the schedule cannot run this number of microbatches
            self._refuse(error)
            return None
        if not estimate.cut:
            self.refused["the program cannot be cut into so many stages."] += 1
            return None
        self.estimates[point] = estimate
        return estimate

    def _figure(self, estimate: Estimate) -> float:
        return estimate.seconds if self.objective == "time" else estimate.memory_bytes

    def _plan(self, point: SearchPoint) -> Compared | None:
        """Return the point's row, or None if the planner refuses the point."""
        self.planned += 1
        row = self.program.planned(point)
        if row.error is not None:
            self._refuse(row.error)
            return None
        return row

    def _refuse(self, error: PlanningError) -> None:
        self.refused[str(error).splitlines()[0]] += 1

    # -- results -------------------------------------------------------------------------------

    def _result_row(self, point: SearchPoint, row: Compared) -> FoundStrategy:
        options = self.program.strategy(point)
        mesh, placements = options.pop("mesh"), options.pop("placements", {})
        if point.pp > 1:
            options["stages"] = row.plan.stages
        return FoundStrategy(
            name=point.name,
            mesh=mesh,
            placements=placements,
            options=options,
            plan=row.plan,
            seconds=row.seconds,
            memory=row.memory,
            bubble=row.bubble,
            bytes_sent=row.bytes_sent,
            text=self._text(point, options),
        )

    def _text(self, point: SearchPoint, options: Mapping[str, Any]) -> str:
        """Return the strategy as Python code that uses ``model`` and ``loss_fn``."""
        parallelize_options = {k: options[k] for k in ("stages", "zero") if k in options}
        step_options = {k: v for k, v in options.items() if k not in parallelize_options}
        lines = [f"mesh = {python_text(point.mesh)}"]
        lines.append(f"placements = {self.program.placements if point.tp > 1 else '{}'}")
        lines.append("parallel = dt.parallelize(")
        lines += ["    model,", "    mesh,", "    placements,"]
        lines += [*keyword_lines(parallelize_options), ")"]
        lines += _optimizer_lines(self.optimizer)
        lines += ["step = dt.train_step(", "    parallel,", "    loss_fn,", "    optimizer,"]
        lines += keyword_lines(step_options)
        if self.stated:
            lines.append(f"    topology={python_text(self.program.topology)},")
        return "\n".join([*lines, ")"])

    def _no_fit_error(self) -> PlanningError:
        """Return the error for a search without a plan that fits; it names the smallest plan."""
        limit, estimates = self.program.topology.memory_bytes, self.estimates
        nearest = sorted(estimates, key=lambda p: (estimates[p].memory_bytes, p))
        rows = [(row.memory.total, p.name) for p in nearest[:MAX_ROWS] if (row := self._plan(p))]
        reasons = [f"  refused {count}: {why}" for why, count in self.refused.items()]
        if not rows:
            return PlanningError("\n".join(["no point of the space has a plan.", *reasons]))
        least, name = min(rows)
        facts = self.program.facts
        lines = [
            f"nothing fits: of {len(estimates)} points on {facts.num_ranks} ranks none is within "
            f"{size_text(int(limit))} a rank.",
            f"  the nearest, {name}, has {size_text(least)}, {size_text(least - int(limit))} more",
            *reasons,
            f"fix: more ranks, a smaller batch, or memory={least}",
        ]
        return PlanningError("\n".join(lines))


def _optimizer_lines(optimizer: MakeOptimizer | Optimizers) -> list[str]:
    """Return the lines of code that make the optimizer; none if the user passed an optimizer."""
    if isinstance(optimizer, torch.optim.Optimizer | list | tuple):
        return []
    name = getattr(optimizer, "__name__", "")
    if isinstance(optimizer, type) and optimizer.__module__.startswith("torch.optim"):
        return [f"optimizer = torch.optim.{name}(model.parameters())"]
    constructor = name if name.isidentifier() else "make_optimizer"
    return [f"optimizer = {constructor}(model.parameters())"]


def _no_mesh_error(program: SearchedProgram) -> PlanningError:
    facts = program.facts
    sizes = ", ".join(map(str, facts.tp_sizes))
    return PlanningError(
        f"no mesh of {facts.num_ranks} ranks is in the space.\n"
        f"  rows of the batch: {facts.rows}; repeated layers: {facts.layers}; tp of {sizes}\n"
        f"fix: a number of ranks that divides the batch, or a larger batch"
    )
