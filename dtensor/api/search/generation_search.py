"""`search` by tokens per second: find the meshes on which a model generates fastest.

    found = search(model, None, 8, objective="tokens", slots=8, length=256, prompt=64)
    print(found.best.text)     # Python code: mesh, placements, gen = dt.generator(...)

A point is a mesh pp x dp x tp. Points are few, so both programs of a generator (decode, prefill)
are planned for each point, and nothing is estimated. A program is captured once for all meshes on
which its caches have equal numbers of rows. Pipeline stages run one after the other, because the
next token depends on the last stage's result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtensor.api.generation.forwards import evaluating, forward_of
from dtensor.api.generation.generator import generator
from dtensor.api.model.parallel import parallelize
from dtensor.api.search.comparison import Compared
from dtensor.api.search.placements import Placements, for_model
from dtensor.api.search.program import divides, priced_axes, repeated_modules
from dtensor.api.search.result import (
    MAX_ROWS,
    FoundStrategy,
    SearchResult,
    keyword_lines,
    python_text,
)
from dtensor.api.search.space import SpaceFacts, generation_space_text, meshes_of
from dtensor.errors import PlanningError, check_number
from dtensor.frontend.graph import Graph
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import collapse, size_text
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh, mesh_of

EXAMPLE = 16
"""Tokens of the example text from which placements are derived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The load of a generator: ``slots`` texts at once, each of ``length`` positions, of which the
    first ``prompt`` are the prompt."""

    slots: int
    length: int
    prompt: int

    def __str__(self) -> str:
        return f"{self.slots} slots of {self.length}, prompts of {self.prompt}"

    @staticmethod
    def of(slots: Any, length: Any, prompt: Any) -> Traffic:
        """Return the checked traffic. Raises PlanningError for a missing or invalid number."""
        fix = 'dt.search(model, None, 8, objective="tokens", slots=8, length=256, prompt=64)'
        stated = dict(slots=slots, length=length, prompt=prompt)
        for name, value in stated.items():
            if value is None:
                raise PlanningError(f'objective="tokens" needs {name}=.\nfix: {fix}')
            least = 2 if name == "length" else 1
            check_number(name, value, least=least, whole=True, fix=fix)
        if prompt >= length:
            raise PlanningError(
                f"prompts of {prompt} tokens leave no room for new tokens in slots of {length}.\n"
                f"fix: length={prompt + 1} or more"
            )
        return Traffic(slots=slots, length=length, prompt=prompt)

    def tokens_per_second(self, decode: float, prefill: float) -> float:
        """Return the rate if every slot is busy; ``decode``, ``prefill``: seconds of one run.

        A slot makes n = length - prompt tokens per request, and no slot decodes during a prefill.
        """
        new = self.length - self.prompt
        return self.slots * new / (new * decode + self.slots * prefill)


@dataclass(frozen=True, slots=True, order=True)
class _Point:
    pp: int
    dp: int
    tp: int

    @property
    def mesh(self) -> Mesh:
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        return mesh_of(tuple((axis, size) for axis, size in sizes.items() if size > 1))

    @property
    def name(self) -> str:
        """``pp2 tp4``."""
        return " ".join(f"{a}{n}" for a, n in self.mesh.shape.items()) or "one rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """The plans of decode and prefill at a point."""

    decode: Compared
    prefill: Compared

    @property
    def plans(self) -> tuple[Plan, Plan]:
        return self.decode.plan, self.prefill.plan

    @property
    def fuller(self) -> Compared:
        return max(self.decode, self.prefill, key=lambda row: row.memory.total)


@dataclass(slots=True, kw_only=True)
class GenerationSearch:
    """The state of a search by tokens per second.

    ``topology``: the hardware and the memory limit; ``stated``: whether the user gave them, so that
    the code of a strategy repeats them; ``report``: called with the progress.
    """

    model: nn.Module
    num_ranks: int
    traffic: Traffic
    topology: Topology
    stated: bool
    report: Callable[[int, int, str], object]
    placements: Placements = field(default_factory=lambda: Placements({}, {}))
    layers: tuple[str, ...] = ()
    graphs: dict[object, Graph] = field(default_factory=dict[object, Graph])

    def run(self) -> SearchResult:
        """Run the search. Raises PlanningError if the model cannot generate or no plan fits."""
        with evaluating(self.model):
            forward_of(self.model, self.traffic.length)
            if self.num_ranks > 1:
                self.report(0, 1, "derives placements")
                self.placements = _derived_placements(self.model)
        self.layers = repeated_modules(self.model)
        facts = self._facts()
        points = [_Point(*sizes) for sizes in meshes_of(facts)]
        if not points:
            raise _no_mesh_error(facts)
        refused: Counter[str] = Counter()
        planned_points: list[tuple[float, _Point, _Planned]] = []
        for number, point in enumerate(points):
            self.report(number, len(points), f"plans {point.name}")
            try:
                planned = self._plan(point)
            except PlanningError as error:
                refused[str(error).splitlines()[0]] += 1
                continue
            rate = self.traffic.tokens_per_second(*(plan.cost.seconds for plan in planned.plans))
            planned_points.append((-rate, point, planned))
        fitting = sorted((m for m in planned_points if m[2].fuller.fits), key=lambda m: m[:2])
        if not fitting:
            raise self._no_fit_error(planned_points, refused)
        return SearchResult(
            name=type(self.model).__name__,
            optimizer=str(self.traffic),
            objective="tokens",
            num_ranks=self.num_ranks,
            hardware=self.topology.title,
            memory_bytes=self.topology.memory_bytes,
            space=generation_space_text(facts),
            rows=tuple(
                self._result_row(-rate, point, row) for rate, point, row in fitting[:MAX_ROWS]
            ),
            num_points=len(points),
            num_planned=len(planned_points),
            num_estimated=0,
            num_bases=0,
            over_memory=len(planned_points) - len(fitting),
            refused=dict(refused),
        )

    def _facts(self) -> SpaceFacts:
        divisors = (n for n in range(1, self.num_ranks + 1) if self.num_ranks % n == 0)
        return SpaceFacts(
            num_ranks=self.num_ranks,
            rows=self.traffic.slots,
            layers=len(self.layers),
            tp_sizes=tuple(n for n in divisors if divides(self.placements, self.model, n)),
            axes=priced_axes(self.topology),
        )

    def _parallelize_options(self, point: _Point) -> dict[str, Any]:
        if point.pp == 1:
            return {}
        return {"stages": {"pp": stages_of(self.model, self.layers, point.pp)}}

    def _plan(self, point: _Point) -> _Planned:
        """Return the plans of decode and prefill at a point. Raises PlanningError if one is
        refused."""
        placements = dict(self.placements) if point.tp > 1 else {}
        options = self._parallelize_options(point)
        parallel = parallelize(self.model, point.mesh, placements, **options)
        slots, length = self.traffic.slots, self.traffic.length
        gen = generator(parallel, slots=slots, length=length, topology=self.topology)
        bucket = next(size for size in gen.buckets if size >= self.traffic.prompt)
        decode, prefill = gen.plans(bucket, self.graphs)
        return _Planned(decode=_row(point, decode), prefill=_row(point, prefill))

    def _result_row(self, rate: float, point: _Point, planned: _Planned) -> FoundStrategy:
        parallelize_options = self._parallelize_options(point)
        generator_options = dict(slots=self.traffic.slots, length=self.traffic.length)
        row = planned.decode
        return FoundStrategy(
            name=point.name,
            mesh=point.mesh,
            placements=dict(self.placements) if point.tp > 1 else {},
            options={**parallelize_options, **generator_options},
            plan=row.plan,
            seconds=row.seconds,
            memory=planned.fuller.memory,
            bubble=row.bubble,
            bytes_sent=row.bytes_sent,
            text=self._text(point, parallelize_options, generator_options),
            prefill=planned.prefill.plan,
            prefill_seconds=planned.prefill.seconds,
            tokens_per_second=rate,
        )

    def _text(
        self, point: _Point, parallelize_options: dict[str, Any], generator_options: dict[str, Any]
    ) -> str:
        """Return the strategy as Python code that uses ``model``."""
        topology = {"topology": self.topology} if self.stated else {}
        return "\n".join(
            [
                f"mesh = {python_text(point.mesh)}",
                f"placements = {self.placements if point.tp > 1 else '{}'}",
                "parallel = dt.parallelize(",
                *("    model,", "    mesh,", "    placements,"),
                *keyword_lines(parallelize_options),
                ")",
                "gen = dt.generator(",
                "    parallel,",
                *keyword_lines({**generator_options, **topology}),
                ")",
            ]
        )

    def _no_fit_error(
        self, planned_points: list[tuple[float, _Point, _Planned]], refused: Counter[str]
    ) -> PlanningError:
        """Return the error for a search without a plan that fits; it names the smallest plan."""
        reasons = [f"  refused {count}: {why}" for why, count in refused.items()]
        if not planned_points:
            return PlanningError("\n".join(["no point of the space has plans.", *reasons]))
        limit = int(self.topology.memory_bytes)
        least, name = min((planned.fuller.memory.total, p.name) for _, p, planned in planned_points)
        lines = [
            f"nothing fits: of {len(planned_points)} meshes of {self.num_ranks} ranks none is "
            f"within {size_text(limit)} a rank.",
            f"  the nearest, {name}, has {size_text(least)}, {size_text(least - limit)} more",
            *reasons,
            f"fix: more ranks, fewer or shorter slots, or memory={least}",
        ]
        return PlanningError("\n".join(lines))


def stages_of(model: nn.Module, layers: tuple[str, ...], num: int) -> list[list[str]]:
    """Return the patterns of each of ``num`` stages. Repeated layers are spread evenly; parameters
    before the first repeated layer go to the first stage, all others to the last stage."""
    stages: list[dict[str, None]] = [{} for _ in range(num)]
    home = {name: i * num // len(layers) for i, name in enumerate(layers)}
    layers_started = False
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
        layers_started = layers_started or layer is not None
        stage = home[layer] if layer is not None else num - 1 if layers_started else 0
        stages[stage][name if layer is None else f"{layer}.*"] = None
    return [list(collapse(patterns)) for patterns in stages]


def _derived_placements(model: nn.Module) -> Placements:
    """Return placements derived from a forward call without a cache."""
    tokens = torch.empty(1, EXAMPLE, dtype=torch.int64, device="meta")
    if hasattr(model, "generation_config"):  # of transformers
        return for_model(model, (), dict(input_ids=tokens, use_cache=False))
    return for_model(model, (tokens,))


def _row(point: _Point, plan: Plan) -> Compared:
    return Compared(name=point.name, mesh=point.mesh, found=plan)


def _no_mesh_error(facts: SpaceFacts) -> PlanningError:
    sizes = ", ".join(map(str, facts.tp_sizes))
    return PlanningError(
        f"no mesh of {facts.num_ranks} ranks is in the space.\n"
        f"  slots: {facts.rows}; repeated layers: {facts.layers}; tp of {sizes}\n"
        f"fix: slots={facts.num_ranks}, or a number of ranks that divides the slots"
    )
