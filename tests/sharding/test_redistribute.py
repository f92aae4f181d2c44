"""Tests redistribution between all kinds of placements: exact values, closed forms of bytes,
cheapest paths.

`make sweep` tries many more pairs and all prices.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.errors import PlanningError
from dtensor.sharding.redistribute.moves import bytes_sent_together, moves, seconds
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.spec.placements import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.testing import strategies
from tests.sharding.redistribution_search import (
    FAMILIES,
    SMALL,
    Family,
    Search,
    check_price,
    check_values,
)

TOPOLOGY = Topology()


def pairs(family: Family, count: int) -> list[tuple[TensorSpec, TensorSpec]]:
    specs = family.specs()
    if len(specs) ** 2 <= count:
        return list(itertools.product(specs, specs))
    rng = random.Random(0)
    return [(rng.choice(specs), rng.choice(specs)) for _ in range(count)]


@pytest.mark.default("0-40")
@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("number", range(len(FAMILIES)))
def test_redistribution_keeps_exact_values(number: int, count: int) -> None:
    rng = torch.Generator().manual_seed(0)
    for src, dst in pairs(FAMILIES[number], count):
        if seconds(src, dst, TOPOLOGY) < float("inf"):
            check_values(src, dst, rng)


@settings(deadline=None, max_examples=30, database=None, derandomize=True)
@given(st.data())
def test_redistribution_between_random_specs_keeps_exact_values(data: st.DataObject) -> None:
    """Covers blocks with units, axes of size 1, scalars, and up to three axes."""
    mesh = data.draw(strategies.meshes(max_size=8))
    shape = data.draw(strategies.shapes(max_dims=2))
    both = strategies.specs(mesh=mesh, shape=shape, dtype=torch.int64, pending=True)
    src, dst = data.draw(both), data.draw(both)
    ops = {p.op for p in (*src.placements, *dst.placements) if isinstance(p, Partial)}
    if len(ops) < 2 and seconds(src, dst, TOPOLOGY) < float("inf"):
        check_values(src, dst, torch.Generator().manual_seed(0))


SWEPT = [pytest.param(number, 1000, marks=pytest.mark.sweep) for number in range(len(FAMILIES))]


@pytest.mark.parametrize(
    ("number", "sources"), [*((number, 4) for number in (0, 1, 2, 3, 7, *range(11, 17))), *SWEPT]
)
def test_redistribution_path_is_cheapest_by_brute_force(number: int, sources: int) -> None:
    specs = FAMILIES[number].specs()
    for topology in (SMALL, TOPOLOGY):
        search = Search(specs, topology)
        for src in random.Random(number).sample(specs, min(len(specs), sources)):
            best = search.from_(src)
            for dst in specs:
                check_price(src, dst, best, topology)


@pytest.mark.parametrize("n", [2, 4])
def test_redistribution_bytes_match_closed_forms(n: int) -> None:
    """For an f64[12n, 4n] tensor of V bytes: the bytes that one rank sends."""
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
    # one nth of what an all_gather sends
    assert sent(Shard(0), Shard(1)) == ("all_to_all", volume * (n - 1) // n**2)
    assert sent(REPLICATE, Shard(0)) == ("slice", 0)
    assert sent(REPLICATE, PARTIAL) == ("fill", 0)


def test_bytes_of_one_message_are_those_of_its_busiest_rank() -> None:
    """Each rank owns one of two matrices, so it sends its part of the other one, and then its own.
    A path of one matrix is priced for its owner, or for the ranks that are not its owner."""
    mesh, shape = Mesh(dp=2), (4096, 1024)
    owned = [dict(dp=Shard(0, sizes=sizes)) for sizes in ((4096, 0), (0, 4096))]
    for stated, kind in ((PARTIAL, "reduce_scatter"), (REPLICATE, "all_gather")):
        ends = make_spec(shape, torch.float32, mesh, dict(dp=stated))
        both = [make_spec(shape, torch.float32, mesh, placement) for placement in owned]
        pairs = [(ends, spec) if stated == PARTIAL else (spec, ends) for spec in both]
        path = [move for src, dst in pairs for move in moves(src, dst, TOPOLOGY)]
        assert [move.kind for move in path] == [kind] * 2
        assert [move.bytes_sent for move in path] == [2**24] * 2
        assert sum(bytes_sent_together(path)) == 2**24
        assert sum(bytes_sent_together(path[:1] * 2)) == 2**25


def test_uneven_collective_bytes_are_those_of_busiest_rank() -> None:
    mesh = Mesh(a=3)
    rows = make_spec((7, 2), torch.float32, mesh, dict(a=Shard(0)))  # 3, 3, 1 rows
    whole = make_spec((7, 2), torch.float32, mesh)
    (gather,) = moves(rows, whole, TOPOLOGY)
    assert gather.bytes_sent == 3 * 2 * 4 * 2
    summed = make_spec((7, 2), torch.float32, mesh, dict(a=PARTIAL))
    (scatter,) = moves(summed, rows, TOPOLOGY)
    assert scatter.bytes_sent == 6 * 2 * 4  # the last rank keeps one row
    # rank 0 keeps 1 of its 2 rows, rank 1 none: [0,1] -> [0]+[4], [2,3] -> [1]+[5]
    mesh = Mesh(a=4)
    ends = [make_spec((8,), torch.float32, mesh, dict(a=Shard(0, blocks=n))) for n in (1, 2)]
    (exchange,) = moves(ends[0], ends[1], TOPOLOGY)
    assert exchange.bytes_sent == 2 * 4


def test_gathering_minor_axis_leaves_major_axis_in_place() -> None:
    """8@(a,b) -> 8@a: the rows of a stay where they are."""
    mesh = Mesh(a=2, b=2)
    src = make_spec((8, 4), torch.float32, mesh, dict(a=Shard(0), b=Shard(0)))
    dst = make_spec((8, 4), torch.float32, mesh, dict(a=Shard(0)))
    (move,) = moves(src, dst, TOPOLOGY)
    assert (move.kind, move.axis, move.bytes_sent) == ("all_gather", "b", 2 * 4 * 4)


def test_large_sum_over_two_axes_uses_hierarchical_all_reduce() -> None:
    """Scatters over a, reduces half of the tensor over b, gathers over a; a small tensor is
    reduced in one piece."""
    mesh = Mesh(a=2, b=2)
    src = make_spec((4096, 2048), torch.float32, mesh, dict(a=PARTIAL, b=PARTIAL))
    dst = make_spec((4096, 2048), torch.float32, mesh)
    path = moves(src, dst, TOPOLOGY)
    assert [m.kind for m in path] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert [m.bytes_sent for m in path] == [2**24] * 3
    plain = moves(src, dst, TOPOLOGY, whole=True)
    assert [m.kind for m in plain] == ["all_reduce", "all_reduce"]
    assert [m.bytes_sent for m in plain] == [2 * 2**24] * 2
    # if only latency counts, two collectives are better than three
    small = [make_spec((8, 4), torch.float32, mesh, s.sharding) for s in (src, dst)]
    assert [m.kind for m in moves(*small, TOPOLOGY)] == ["all_reduce", "all_reduce"]


def test_microbatch_axis_is_never_scattered() -> None:
    mesh = Mesh(a=2).extended(MICROBATCH_AXIS, 2)
    both = {"a": PARTIAL, MICROBATCH_AXIS: PARTIAL}
    src = make_spec((1024, 512), torch.float32, mesh, both)
    path = moves(src, make_spec((1024, 512), torch.float32, mesh), TOPOLOGY)
    assert all(not isinstance(m.dst.placement(MICROBATCH_AXIS), Shard) for m in path)


def test_rows_of_a_microbatch_are_not_gathered_from_the_others() -> None:
    """The copy that is already gathered over a would need only this."""
    mesh = Mesh(a=2).extended(MICROBATCH_AXIS, 2)
    of_one = make_spec((8, 6), torch.float32, mesh, {MICROBATCH_AXIS: Shard(0)})
    of_all = make_spec((8, 6), torch.float32, mesh)
    assert seconds(of_one, of_all, TOPOLOGY) == float("inf")
    assert [m.kind for m in moves(of_all, of_one, TOPOLOGY)] == ["slice"]


def test_redistribution_from_sum_to_max_is_refused() -> None:
    mesh = Mesh(a=2)
    src = make_spec((4,), torch.float32, mesh, dict(a=Partial("sum")))
    dst = make_spec((4,), torch.float32, mesh, dict(a=Partial("max")))
    with pytest.raises(PlanningError, match="cannot be redistributed"):
        moves(src, dst, TOPOLOGY)
    assert isinstance(make_spec((4,), torch.float32, mesh).placement("a"), Replicate)
