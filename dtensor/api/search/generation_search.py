"""`search` by tokens a second: the meshes on which a model is predicted to generate fastest.

    found = search(model, None, 8, objective="tokens", slots=8, length=256, prompt=64)
    print(found.best.text)     # mesh, placements, parallelize, gen = dt.generator(...)

A point is a mesh pp x dp x tp. There are few, so a generator is made for each and both its
programs are planned: nothing is estimated. Programs are captured once for all meshes on which the
caches have as many rows. A slot makes n = length - prompt tokens of a request, and while a prompt
is taken in no slot decodes, so with all slots busy

    tokens a second = slots * n / (n * decode + slots * prefill)

where decode is seconds of one token of every slot, and prefill of one prompt, padded to its bucket.
With stages either lasts as long as all its stages one after the other: the next token begins with
the last one's result.

Invariants: every figure is of plans that were made; the text makes the same plans. Not here: the
space in words (space.py), prompts on another mesh (``prefill=`` of `generator`).
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
from dtensor.api.search.result import FoundStrategy, SearchResult, keyword_lines, python_text
from dtensor.api.search.space import SpaceFacts, generation_space_text, meshes_of
from dtensor.errors import PlanningError, check_number
from dtensor.frontend.graph import Graph
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import collapse, size_text
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh, mesh_of

KEPT = 5
"""How many strategies a result has."""
EXAMPLE = 16
"""Tokens of the text that placements are derived from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is generated: ``slots`` texts at once, each of ``length`` positions, of which the first
    ``prompt`` are given."""

    slots: int
    length: int
    prompt: int

    def __str__(self) -> str:
        return f"{self.slots} slots of {self.length}, prompts of {self.prompt}"

    @staticmethod
    def of(slots: Any, length: Any, prompt: Any) -> Traffic:
        """PlanningError for what is missing or wrong."""
        fix = 'dt.search(model, None, 8, objective="tokens", slots=8, length=256, prompt=64)'
        stated = dict(slots=slots, length=length, prompt=prompt)
        for name, value in stated.items():
            if value is None:
                raise PlanningError(f'objective="tokens" needs {name}=, and has none.\nfix: {fix}')
            least = 2 if name == "length" else 1
            check_number(name, value, least=least, whole=True, fix=fix)
        if prompt >= length:
            raise PlanningError(
                f"prompts of {prompt} tokens leave no room for new ones in a slot of {length}.\n"
                f"fix: length={prompt + 1} or more"
            )
        return Traffic(slots=slots, length=length, prompt=prompt)

    def tokens_per_second(self, decode: float, prefill: float) -> float:
        """With every slot busy; ``decode``, ``prefill``: seconds of a run of each."""
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
    """Both plans of a point."""

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
    """A search by tokens a second while it runs. ``topology``: with the limit of memory;
    ``stated``: it stands in the text; ``told``: the progress."""

    model: nn.Module
    num_ranks: int
    traffic: Traffic
    topology: Topology
    stated: bool
    told: Callable[[int, int, str], object]
    placements: Placements = field(default_factory=lambda: Placements({}, {}))
    layers: tuple[str, ...] = ()
    graphs: dict[object, Graph] = field(default_factory=dict[object, Graph])

    def run(self) -> SearchResult:
        """PlanningError for a model that cannot be generated from, and where nothing fits."""
        with evaluating(self.model):
            forward_of(self.model, self.traffic.length)
            if self.num_ranks > 1:
                self.told(0, 1, "derives placements")
                self.placements = _derived(self.model)
        self.layers = repeated_modules(self.model)
        facts = self._facts()
        points = [_Point(*sizes) for sizes in meshes_of(facts)]
        if not points:
            raise _empty(facts)
        refused: Counter[str] = Counter()
        tried: list[tuple[float, _Point, _Planned]] = []
        for number, point in enumerate(points):
            self.told(number, len(points), f"plans {point.name}")
            try:
                planned = self._plan(point)
            except PlanningError as error:
                refused[str(error).splitlines()[0]] += 1
                continue
            rate = self.traffic.tokens_per_second(*(plan.cost.seconds for plan in planned.plans))
            tried.append((-rate, point, planned))
        fitting = sorted((m for m in tried if m[2].fuller.fits), key=lambda m: m[:2])
        if not fitting:
            raise self._nothing(tried, refused)
        return SearchResult(
            name=type(self.model).__name__,
            optimizer=str(self.traffic),
            objective="tokens",
            num_ranks=self.num_ranks,
            hardware=self.topology.title,
            memory_bytes=self.topology.memory_bytes,
            space=generation_space_text(facts),
            rows=tuple(self._found(-rate, point, row) for rate, point, row in fitting[:KEPT]),
            num_points=len(points),
            num_planned=len(tried),
            num_estimated=0,
            num_bases=0,
            over_memory=len(tried) - len(fitting),
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

    def _of_parallelize(self, point: _Point) -> dict[str, Any]:
        if point.pp == 1:
            return {}
        return {"stages": {"pp": stages_of(self.model, self.layers, point.pp)}}

    def _plan(self, point: _Point) -> _Planned:
        placements = dict(self.placements) if point.tp > 1 else {}
        options = self._of_parallelize(point)
        parallel = parallelize(self.model, point.mesh, placements, **options)
        slots, length = self.traffic.slots, self.traffic.length
        gen = generator(parallel, slots=slots, length=length, topology=self.topology)
        bucket = next(size for size in gen.buckets if size >= self.traffic.prompt)
        decode, prefill = gen.plans(bucket, self.graphs)
        return _Planned(decode=_row(point, decode), prefill=_row(point, prefill))

    def _found(self, rate: float, point: _Point, planned: _Planned) -> FoundStrategy:
        of_parallelize = self._of_parallelize(point)
        of_generator = dict(slots=self.traffic.slots, length=self.traffic.length)
        row = planned.decode
        return FoundStrategy(
            name=point.name,
            mesh=point.mesh,
            placements=dict(self.placements) if point.tp > 1 else {},
            options={**of_parallelize, **of_generator},
            plan=row.plan,
            seconds=row.seconds,
            memory=planned.fuller.memory,
            bubble=row.bubble,
            bytes_sent=row.bytes_sent,
            text=self._text(point, of_parallelize, of_generator),
            prefill=planned.prefill.plan,
            prefill_seconds=planned.prefill.seconds,
            tokens_per_second=rate,
        )

    def _text(
        self, point: _Point, of_parallelize: dict[str, Any], of_generator: dict[str, Any]
    ) -> str:
        """The strategy as a program, from ``model`` on."""
        topology = {"topology": self.topology} if self.stated else {}
        return "\n".join(
            [
                f"mesh = {python_text(point.mesh)}",
                f"placements = {self.placements if point.tp > 1 else '{}'}",
                "parallel = dt.parallelize(",
                *("    model,", "    mesh,", "    placements,"),
                *keyword_lines(of_parallelize),
                ")",
                "gen = dt.generator(",
                "    parallel,",
                *keyword_lines({**of_generator, **topology}),
                ")",
            ]
        )

    def _nothing(
        self, tried: list[tuple[float, _Point, _Planned]], refused: Counter[str]
    ) -> PlanningError:
        reasons = [f"  refused {count}: {why}" for why, count in refused.items()]
        if not tried:
            return PlanningError("\n".join(["no point of the space has plans.", *reasons]))
        limit = int(self.topology.memory_bytes)
        least, name = min((planned.fuller.memory.total, p.name) for _, p, planned in tried)
        lines = [
            f"nothing fits: of {len(tried)} meshes of {self.num_ranks} ranks none is within "
            f"{size_text(limit)} a rank.",
            f"  the nearest, {name}, has {size_text(least)}, {size_text(least - limit)} more",
            *reasons,
            f"fix: more ranks, fewer or shorter slots, or memory={least}",
        ]
        return PlanningError("\n".join(lines))


def stages_of(model: nn.Module, layers: tuple[str, ...], num: int) -> list[list[str]]:
    """Repeated layers dealt evenly; what is registered before the first of them is on the first
    stage, all else on the last one."""
    stages: list[dict[str, None]] = [{} for _ in range(num)]
    home = {name: i * num // len(layers) for i, name in enumerate(layers)}
    begun = False
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer = next((one for one in layers if name.startswith(f"{one}.")), None)
        begun = begun or layer is not None
        at = home[layer] if layer is not None else num - 1 if begun else 0
        stages[at][name if layer is None else f"{layer}.*"] = None
    return [list(collapse(patterns)) for patterns in stages]


def _derived(model: nn.Module) -> Placements:
    """From a call without a cache."""
    tokens = torch.empty(1, EXAMPLE, dtype=torch.int64, device="meta")
    if hasattr(model, "generation_config"):  # of transformers
        return for_model(model, (), dict(input_ids=tokens, use_cache=False))
    return for_model(model, (tokens,))


def _row(point: _Point, plan: Plan) -> Compared:
    return Compared(name=point.name, mesh=point.mesh, found=plan)


def _empty(facts: SpaceFacts) -> PlanningError:
    sizes = ", ".join(map(str, facts.tp_sizes))
    return PlanningError(
        f"no mesh of {facts.num_ranks} ranks is in the space.\n"
        f"  slots: {facts.rows}; repeated layers: {facts.layers}; tp of {sizes}\n"
        f"fix: slots={facts.num_ranks}, or a number of ranks that divides the slots"
    )
