"""Redistribution between all kinds of placements: exact values, closed forms of bytes, cheap paths.

The values are moved by the real lowering: a program without ops whose input is pinned one way and
whose result is wanted another, run on ranks in this process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from dtensor.daft import launch_cluster
from dtensor.errors import PlanningError
from dtensor.runtime.lower import lower
from dtensor.sharding.call import Meta
from dtensor.sharding.cost import Topology
from dtensor.sharding.dataflow import Dataflow, Input, Output
from dtensor.sharding.local import assemble, shard_of
from dtensor.sharding.mesh import Mesh
from dtensor.sharding.placements import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from dtensor.sharding.planner import Request, plan
from dtensor.sharding.redistribute import Move, covers, moves, seconds
from dtensor.sharding.spec import TensorSpec, make_spec
from dtensor.sharding.steps import Convert

TOPOLOGY = Topology()
SHAPE = (12, 5)
KINDS: tuple[Placement, ...] = (
    REPLICATE,
    PARTIAL,
    Shard(0),
    Shard(1),
    Shard(0, blocks=3),
    Shard(0, blocks=(8, 4)),
    Shard(0, unit=2),
)


def specs(mesh: Mesh) -> list[TensorSpec]:
    """All combinations, with two axes on a dim in both orders; what fits the shape."""
    found: dict[TensorSpec, None] = {}
    for placements in itertools.product(KINDS, repeat=len(mesh.axes)):
        stated = dict(zip(mesh.axes, placements, strict=True))
        for order in itertools.permutations(mesh.axes):
            try:
                spec = make_spec(SHAPE, torch.float64, mesh, {a: stated[a] for a in order})
            except PlanningError:  # the unit does not fit the pieces of the major axis
                continue
            found[spec] = None
    return list(found)


def pairs(mesh: Mesh, count: int) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    every = specs(mesh)
    rng = random.Random(0)
    both = (
        list(itertools.product(every, every))
        if len(every) ** 2 <= count
        else [(rng.choice(every), rng.choice(every)) for _ in range(count)]
    )
    return iter(both)


def shards(x: torch.Tensor, spec: TensorSpec, rng: torch.Generator) -> list[torch.Tensor]:
    """Shards of ``x``; a pending value is a sum of parts that are nowhere zero."""
    mesh = spec.mesh
    parts = {rank: x for rank in range(mesh.size)}
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial):
            for rank in range(mesh.size):
                if mesh.coordinates(rank)[axis] == 0:
                    group = mesh.group(rank, axis)
                    given = [
                        torch.randint(-9, 9, x.shape, generator=rng).double() for _ in group[1:]
                    ]
                    rest = [parts[r] for r in group]
                    assert all(torch.equal(r, rest[0]) for r in rest)
                    values = [rest[0] - sum(given), *given]
                    for r, value in zip(group, values, strict=True):
                        parts[r] = value
            # the ranks that differ on later axes hold the same parts
            for rank in range(mesh.size):
                here = mesh.coordinates(rank)
                later = mesh.axes[mesh.index(axis) + 1 :]
                parts[rank] = parts[mesh.rank({**here, **dict.fromkeys(later, 0)})]
    whole = TensorSpec(
        spec.shape,
        spec.dtype,
        mesh,
        tuple(REPLICATE if isinstance(p, Partial) else p for p in spec.placements),
    )
    return [shard_of(parts[r], whole, mesh.coordinates(r)) for r in range(mesh.size)]


def run(src: TensorSpec, dst: TensorSpec, local: list[torch.Tensor]) -> list[torch.Tensor]:
    """The shards under ``dst``, moved by the lowered program of an empty dataflow."""
    meta = Meta(src.shape, src.dtype)
    flow = Dataflow(
        inputs=(Input(name="x", meta=meta, kind="argument", label="x"),),
        ops=(),
        outputs=(Output("x", "result", 0),),
    )
    # as majors come first in specs, pins by axis would refine again: state the finished spec
    request = Request(
        name="move",
        flow=flow,
        mesh=src.mesh,
        pins={"x": _stated(src)},
        results={0: dict(dst.sharding)},
    )
    found = plan(request)
    assert next(i.spec for i in found.inputs) == src
    emitted = [s.move for s in found.steps if isinstance(s, Convert)]
    assert _kinds(emitted) == _kinds(moves(src, dst, TOPOLOGY))
    lowered = lower(found, None)
    with launch_cluster(src.mesh.size) as cluster:
        handle = cluster.load(lowered.program)
        results = cluster.run(handle, [{"x": shard} for shard in local]).get()
    return [result["result 0"] for result in results]


def _kinds(path: Sequence[Move]) -> list[tuple[str, str]]:
    """A move that changes names alone may be left out."""
    return [(m.kind, m.axis) for m in path if m.kind != "relabel"]


def _stated(spec: TensorSpec) -> dict[str, Placement]:
    """Placements in an order of axes from which make_spec gives ``spec`` again."""
    for order in itertools.permutations(spec.mesh.axes):
        for kinds in itertools.product((None, 1), repeat=len(order)):
            stated: dict[str, Placement] = {}
            for axis, blocks in zip(order, kinds, strict=True):
                placement = spec.placement(axis)
                if isinstance(placement, Shard) and blocks is not None:
                    placement = Shard(placement.dim, 1, placement.unit)
                stated[axis] = placement
            try:
                if make_spec(spec.shape, spec.dtype, spec.mesh, stated) == spec:
                    return stated
            except PlanningError:
                continue
    raise AssertionError(f"{spec} comes from no order of axes")


@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        (Mesh(a=2), 99),
        (Mesh(a=3), 99),
        (Mesh(a=2, b=2), 150),
        (Mesh(a=2, b=3), 60),
        (Mesh(a=2, b=2, c=2), 50),
    ],
    ids=str,
)
def test_values_are_exact(mesh: Mesh, count: int) -> None:
    rng = torch.Generator().manual_seed(0)
    for src, dst in pairs(mesh, count):
        x = torch.randint(-99, 99, SHAPE, generator=rng).double()
        found = run(src, dst, shards(x, src, rng))
        assert torch.equal(assemble(found, dst), x), f"{src} -> {dst}"
        if not any(isinstance(p, Partial) for p in dst.placements):
            for rank, shard in enumerate(found):
                expected = shard_of(x, dst, mesh.coordinates(rank))
                assert torch.equal(shard, expected), f"{src} -> {dst}, rank {rank}"


@pytest.mark.parametrize("mesh", [Mesh(a=3), Mesh(a=2, b=2), Mesh(a=2, b=2, c=2)], ids=str)
def test_paths_are_sound_and_never_dearer_than_gather_then_slice(mesh: Mesh) -> None:
    whole = make_spec(SHAPE, torch.float64, mesh)
    for src, dst in pairs(mesh, 600):
        path = moves(src, dst, TOPOLOGY)
        ends = [src, *(m.dst for m in path)]
        assert [m.src for m in path] == ends[:-1]
        assert ends[-1] == dst
        assert all(covers(spec) for spec in ends)
        for move in path:
            changed = [a for a in mesh.axes if move.src.placement(a) != move.dst.placement(a)]
            assert changed == [move.axis]
        through = seconds(src, whole, TOPOLOGY) + seconds(whole, dst, TOPOLOGY)
        assert seconds(src, dst, TOPOLOGY) <= through + 1e-15
        assert seconds(src, dst, TOPOLOGY) == pytest.approx(sum(m.seconds(TOPOLOGY) for m in path))


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_sent_are_the_closed_forms(n: int) -> None:
    """Of an f64[12n, 4n], V bytes: what one rank sends."""
    mesh = Mesh(a=n)
    volume = 12 * n * 4 * n * 8

    def sent(src: Placement, dst: Placement) -> tuple[str, int]:
        shape = (12 * n, 4 * n)
        ends = [make_spec(shape, torch.float64, mesh, dict(a=p)) for p in (src, dst)]
        (move,) = moves(ends[0], ends[1], TOPOLOGY)
        return move.kind, move.bytes_sent

    assert sent(Shard(0), REPLICATE) == ("all_gather", volume * (n - 1) // n)
    assert sent(PARTIAL, REPLICATE) == ("all_reduce", 2 * volume * (n - 1) // n)
    assert sent(PARTIAL, Shard(1)) == ("reduce_scatter", volume * (n - 1) // n)
    assert sent(Shard(0), Shard(1)) == ("all_to_all", volume * (n - 1) // n**2)
    assert sent(REPLICATE, Shard(0)) == ("slice", 0)
    assert sent(REPLICATE, PARTIAL) == ("zero_fill", 0)


def test_a_uneven_gather_sends_the_largest_shard() -> None:
    mesh = Mesh(a=3)
    src = make_spec((7, 2), torch.float32, mesh, dict(a=Shard(0)))  # 3, 3, 1 rows
    (move,) = moves(src, make_spec((7, 2), torch.float32, mesh), TOPOLOGY)
    assert move.bytes_sent == 3 * 2 * 4 * 2


def test_the_same_indices_by_another_name_cost_nothing() -> None:
    mesh = Mesh(a=2)
    ends = [make_spec((8,), torch.float32, mesh, dict(a=p)) for p in (Shard(0), Shard(0, unit=2))]
    (move,) = moves(ends[0], ends[1], TOPOLOGY)
    assert (move.kind, move.bytes_sent) == ("relabel", 0)


def test_a_minor_axis_is_gathered_alone() -> None:
    """8@(a,b) -> 8@a: the rows of a stay where they are."""
    mesh = Mesh(a=2, b=2)
    src = make_spec((8, 4), torch.float32, mesh, dict(a=Shard(0), b=Shard(0)))
    dst = make_spec((8, 4), torch.float32, mesh, dict(a=Shard(0)))
    (move,) = moves(src, dst, TOPOLOGY)
    assert (move.kind, move.axis, move.bytes_sent) == ("all_gather", "b", 2 * 4 * 4)


def test_no_path_to_another_reduction() -> None:
    mesh = Mesh(a=2)
    src = make_spec((4,), torch.float32, mesh, dict(a=Partial("sum")))
    dst = make_spec((4,), torch.float32, mesh, dict(a=Partial("max")))
    with pytest.raises(PlanningError, match="cannot be redistributed"):
        moves(src, dst, TOPOLOGY)
    assert isinstance(make_spec((4,), torch.float32, mesh).placement("a"), Replicate)
