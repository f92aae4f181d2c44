"""The reference for redistribution: exact values, and the lowest price of any path.

The price comes from a breadth-first search over *all* shardings of a tensor (all combinations of
the placements that occur on the axes), changing one axis at a time, in at most `STEPS` steps,
and leaving axes alone on which both ends agree. Bytes are counted on sets of elements. The
search shares with the library the meaning of placements and the formula of seconds, but neither
its search nor its counting.

`run` moves values by the real lowering: a program without ops whose input and result are pinned
to different placements, on ranks in this process.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

from dtensor.daft import launch_cluster
from dtensor.errors import PlanningError
from dtensor.runtime.lower.program import lower
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.dataflow import Dataflow, Input, Output
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.steps import Redistribute
from dtensor.sharding.redistribute.moves import MIN_SAVING, Move, moves, seconds
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    Zigzag,
    index_sets,
    same,
)
from dtensor.sharding.spec.shards import assemble, shard_of
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.testing.oracle import cut

STEPS = 6
SMALL = Topology(latency=0.0, bandwidth=1e6)
"""Bytes alone count, so that small tensors show which path sends fewest."""
SUM, MAX, MIN, SOFTMAX = Partial("sum"), Partial("max"), Partial("min"), Partial("softmax")


@dataclass(frozen=True, slots=True)
class Family:
    """A mesh, a shape, and the placements that are combined on it."""

    mesh: Mesh
    shape: tuple[int, ...]
    kinds: tuple[Placement, ...]
    dtype: torch.dtype = torch.int64

    def specs(self) -> list[TensorSpec]:
        """Return all combinations that fit the shape, with two axes on one dim in both orders."""
        found: dict[TensorSpec, None] = {}
        for placements in itertools.product(self.kinds, repeat=len(self.mesh.axes)):
            stated = dict(zip(self.mesh.axes, placements, strict=True))
            for order in itertools.permutations(self.mesh.axes):
                try:
                    pins = {axis: stated[axis] for axis in order}
                    spec = make_spec(self.shape, self.dtype, self.mesh, pins)
                except PlanningError:  # the units do not fit, or the last dim must be whole
                    continue
                found[spec] = None
        return list(found)


SHARDS = (Shard(0), Shard(1), Shard(0, blocks=3), Shard(0, blocks=(8, 4)), Shard(0, unit=2))
KINDS: tuple[Placement, ...] = (REPLICATE, SUM, *SHARDS, Shard(0, blocks=3, unit=2))
UNEVEN: tuple[Placement, ...] = (REPLICATE, SUM, Shard(0), Shard(1), Shard(0, blocks=(4, 3)))
FEW: tuple[Placement, ...] = (REPLICATE, SUM, Shard(0), Shard(1))

ZIGZAG = (REPLICATE, SUM, Shard(0), Zigzag(0), Shard(0, shift=1), Shard(0, zigzag=True, shift=1))
SIZED = (REPLICATE, SUM, Shard(0), Shard(1), *(Shard(0, sizes=s) for s in ((5, 2), (0, 7))))
TRIPLES: tuple[Placement, ...] = (REPLICATE, SOFTMAX, Shard(0), Shard(1))

FAMILIES = (
    Family(Mesh(a=2), (12, 5), (*KINDS, MAX, MIN)),
    Family(Mesh(a=3), (12, 5), (*KINDS, MAX, MIN)),
    Family(Mesh(a=4), (7, 6), (*UNEVEN, MAX, MIN)),  # one rank holds nothing
    Family(Mesh(a=3), (2, 4), FEW),
    Family(Mesh(a=2, b=2), (12, 5), KINDS),
    Family(Mesh(a=2, b=2), (12, 5), (REPLICATE, MAX, Shard(0), Shard(1))),
    Family(Mesh(a=2, b=3), (12, 5), KINDS),
    Family(Mesh(a=2, b=2), (7, 6), UNEVEN),
    Family(Mesh(a=3, b=2), (2, 3), FEW),  # most ranks hold nothing
    Family(Mesh(a=2, b=2, c=2), (8, 6), FEW),
    Family(Mesh(a=2, b=2, c=2), (7, 5), FEW),
    Family(Mesh(a=3), (7, 3), TRIPLES, torch.float64),
    Family(Mesh(a=2, b=2), (5, 3), TRIPLES, torch.float64),
    Family(Mesh(a=3), (13, 2), (*ZIGZAG, *(Shard(0, sizes=(0, 9, 4), shift=n) for n in (0, 2)))),
    Family(Mesh(a=2, b=2), (9, 2), (*FEW, Zigzag(0))),
    Family(Mesh(a=3), (7, 3), (*FEW, Shard(0, sizes=(0, 7, 0)), Shard(0, sizes=(4, 1, 2)))),
    Family(Mesh(a=2, b=2), (7, 3), SIZED),
)


# -- values ----------------------------------------------------------------------------------------


def run(src: TensorSpec, dst: TensorSpec, local: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the shards under ``dst``, moved by the lowered program of an empty dataflow."""
    meta = Meta(src.shape, src.dtype)
    flow = Dataflow(
        inputs=(Input(name="x", meta=meta, kind="argument", label="x"),),
        ops=(),
        outputs=(Output("x", "result", 0),),
    )
    # specs list major axes first, so pins by axis would refine again: state the final spec
    request = Request(
        name="move",
        flow=flow,
        mesh=src.mesh,
        pins={"x": stated(src)},
        results={0: dict(dst.sharding)},
    )
    found = plan(request)
    assert next(i.spec for i in found.inputs) == src
    emitted = [s.moves[0] for s in found.steps if isinstance(s, Redistribute)]
    assert _kinds(emitted) == _kinds(moves(src, dst, Topology()))
    lowered = lower(found, None)
    with launch_cluster(src.mesh.size) as cluster:
        handle = cluster.load(lowered)
        results = cluster.run(handle, [{"x": shard} for shard in local]).get()
    return [result["result 0"] for result in results]


def check_values(src: TensorSpec, dst: TensorSpec, rng: torch.Generator) -> None:
    """Check that values stay exact. Partial inputs are random nonzero parts; integers make sums
    exact."""
    x = torch.randint(-99, 99, src.shape, generator=rng).to(src.dtype)
    same_values = torch.equal if src.dtype == torch.int64 else torch.allclose
    found = run(src, dst, cut(x, src, rng))
    assert same_values(assemble(found, dst), x), f"{src} -> {dst}"
    if not any(isinstance(p, Partial) for p in dst.placements):
        for rank, shard in enumerate(found):
            expected = shard_of(x, dst, src.mesh.coordinates(rank))
            assert same_values(shard, expected), f"{src} -> {dst}, rank {rank}"


def stated(spec: TensorSpec) -> dict[str, Placement]:
    """Return placements in an order of axes from which make_spec gives ``spec`` again."""
    for order in itertools.permutations(spec.mesh.axes):
        for kinds in itertools.product((None, 1), repeat=len(order)):
            found: dict[str, Placement] = {}
            for axis, blocks in zip(order, kinds, strict=True):
                placement = spec.placement(axis)
                if isinstance(placement, Shard) and blocks is not None:
                    placement = Shard(placement.dim, 1, placement.unit)
                found[axis] = placement
            try:
                if make_spec(spec.shape, spec.dtype, spec.mesh, found) == spec:
                    return found
            except PlanningError:
                continue
    raise AssertionError(f"{spec} comes from no order of axes")


def _kinds(path: Sequence[Move]) -> list[tuple[str, str]]:
    """Return the kinds of the path's moves, without moves that only rename."""
    return [(m.kind, m.axis) for m in path if m.kind != "relabel"]


# -- the least price -------------------------------------------------------------------------------


Best: TypeAlias = dict[tuple[Placement, ...], float]


class Search:
    """All shardings that mix the placements of a family, with the price of each change of one
    axis."""

    def __init__(self, specs: Sequence[TensorSpec], topology: Topology) -> None:
        self.topology = topology
        mesh = specs[0].mesh
        occurring = [
            list(dict.fromkeys(s.placements[k] for s in specs)) for k in range(len(mesh.axes))
        ]
        self.every: list[TensorSpec] = []
        for placements in itertools.product(*occurring):
            if len({p.op for p in placements if isinstance(p, Partial)}) > 1:
                continue
            split = {p.dim for p in placements if isinstance(p, Shard)}
            if SOFTMAX in placements and 1 in split:
                continue
            self.every.append(TensorSpec(specs[0].shape, specs[0].dtype, mesh, tuple(placements)))
        self.index = {spec.placements: i for i, spec in enumerate(self.every)}
        self.edges: list[list[tuple[int, float, int]]] = [[] for _ in self.every]
        for k, axis in enumerate(mesh.axes):
            lines: defaultdict[object, list[int]] = defaultdict(list)
            for i, spec in enumerate(self.every):
                lines[spec.placements[:k] + spec.placements[k + 1 :]].append(i)
            for line in lines.values():
                for i, j in itertools.permutations(line, 2):
                    price = _step_seconds(self.every[i], self.every[j], axis, topology)
                    if price is not None:
                        self.edges[i].append((j, price, k))

    def from_(self, src: TensorSpec) -> Best:
        """Return the lowest price to every sharding along paths that change only the axes on
        which both ends differ."""
        best: Best = {}
        num = len(src.placements)
        for moving in itertools.product((False, True), repeat=num):
            for placements, price in self._moving(src, moving).items():
                differs = tuple(p != q for p, q in zip(src.placements, placements, strict=True))
                if differs == moving:
                    best[placements] = price
        return best

    def _moving(self, src: TensorSpec, moving: tuple[bool, ...]) -> Best:
        """Return the lowest price to every sharding within `STEPS` steps that change only the
        axes ``moving``."""
        start = self.index[src.placements]
        best = {start: 0.0}
        frontier = {start}
        for _ in range(STEPS):
            found: dict[int, float] = {}
            for i in frontier:
                for j, price, axis in self.edges[i]:
                    total = best[i] + price if moving[axis] else float("inf")
                    if total < best.get(j, float("inf")) and total < found.get(j, float("inf")):
                        found[j] = total
            best.update(found)
            frontier = set(found)
        return {self.every[i].placements: price for i, price in best.items()}


def _step_seconds(src: TensorSpec, dst: TensorSpec, axis: str, topology: Topology) -> float | None:
    """Return the price of changing only ``axis``; None if no collective does that."""
    before, after = src.placement(axis), dst.placement(axis)
    num = src.mesh.axis_size(axis)
    item = src.dtype.itemsize
    copied = topology.compute_seconds(flops=0, bytes_moved=max(map(len, held(dst))) * item)
    match before, after:
        case (Replicate(), Shard()) | (Replicate(), Partial("sum" | "softmax")):
            return copied
        case Partial("softmax"), Shard(1):  # of two dims, the last
            return None
        case Shard(), Shard() if same(before, after, src.shape, num):
            return 0.0
        case Shard(), Shard():
            kind = "all_to_all"
            sent = max(len(a - b) for a, b in zip(held(src), held(dst), strict=True))
        case Partial(), Shard():
            kind = "reduce_scatter"
            sent = max(len(a - b) for a, b in zip(held(src), held(dst), strict=True))
        case Shard(), Replicate():
            kind = "all_gather"
            sent = max(map(len, held(src))) * (num - 1)
        case Partial(), Replicate():
            kind = "all_reduce"
            nbytes = -(-2 * max(map(len, held(src))) * item * (num - 1) // num)
            return topology.collective_seconds(kind, axis, num=num, bytes_sent=nbytes)
        case _:
            return None
    return topology.collective_seconds(kind, axis, num=num, bytes_sent=sent * item)


@cache
def held(spec: TensorSpec) -> tuple[frozenset[int], ...]:
    """Return, per rank, the numbers of its elements."""
    grid = torch.arange(math.prod(spec.shape)).view(spec.shape)
    found: list[frozenset[int]] = []
    for rank in range(spec.mesh.size):
        here = spec.mesh.coordinates(rank)
        own = set(grid.flatten().tolist())
        for axis, placement in spec.sharding.items():
            if isinstance(placement, Shard):
                size = spec.shape[placement.dim]
                sets = index_sets(placement, size, spec.mesh.axis_size(axis))[here[axis]]
                indices = torch.tensor([i for lo, hi in sets for i in range(lo, hi)]).long()
                own &= set(grid.index_select(placement.dim, indices).flatten().tolist())
        found.append(frozenset(own))
    return tuple(found)


def check_price(src: TensorSpec, dst: TensorSpec, best: Best, topology: Topology) -> None:
    """Check that the price is the lowest, or within 1% of it if that saves a collective."""
    price = seconds(src, dst, topology)
    least = best.get(dst.placements, math.inf)
    if math.isinf(least):
        assert price == least, f"{src} -> {dst}: a path where there is none"
        return
    whole = TensorSpec(src.shape, src.dtype, src.mesh, (REPLICATE,) * len(src.mesh.axes))
    if not any(isinstance(p, Partial) and p.op in ("max", "min") for p in dst.placements):
        through = seconds(src, whole, topology, whole=True)
        through += seconds(whole, dst, topology, whole=True)
        assert price <= through * (1 + 1e-9), f"{src} -> {dst}: dearer than gather, then slice"
    # if only bytes count: through blocks that neither end has, or beyond MAX_EXPANDED; a
    # small all_reduce sends n / 2 times the bytes of its two halves
    by_bytes = 1.25 if len(src.mesh.axes) < 3 else 2.0
    if any(isinstance(p, Partial) for p in src.placements):
        by_bytes *= max(src.mesh.shape.values()) / 2
    bound = by_bytes if topology == SMALL else 1 / (1 - MIN_SAVING)
    assert price <= bound * least * (1 + 1e-9), f"{src} -> {dst}: {price}, least {least}"
