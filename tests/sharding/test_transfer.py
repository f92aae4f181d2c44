"""Transfers between meshes: the pieces, their bytes, the text, and the values they carry."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dtensor.daft import launch_cluster
from dtensor.errors import PlanningError
from dtensor.runtime.transfer.between_meshes import transfer_program
from dtensor.sharding.redistribute.between_meshes import (
    TransferPlan,
    box_of,
    holders_of,
    is_neutral,
    plan_transfer,
)
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Partial,
    Placement,
    Shard,
    intersect,
    length,
)
from dtensor.sharding.spec.shards import assemble, shape_of, shard_of
from dtensor.sharding.spec.spec import TensorSpec, make_spec, parse
from dtensor.sharding.spec.stored import StoredTensor

SHAPE = (7, 6)
KINDS: tuple[Placement, ...] = (
    REPLICATE,
    Shard(0),
    Shard(1),
    Shard(1, blocks=3),
    Shard(0, blocks=(5, 2)),
    Shard(1, unit=2),
)
MESHES = (Mesh(a=2), Mesh(b=3), Mesh(c=2, d=2), Mesh(a=4), Mesh(x=2, y=3))


def specs(mesh: Mesh, kinds: tuple[Placement, ...]) -> list[TensorSpec]:
    found: dict[TensorSpec, None] = {}
    for placements in itertools.product(kinds, repeat=len(mesh.axes)):
        stated = dict(zip(mesh.axes, placements, strict=True))
        for order in itertools.permutations(mesh.axes):
            try:
                spec = make_spec(SHAPE, torch.float64, mesh, {a: stated[a] for a in order})
            except PlanningError:  # the unit or the blocks do not fit the major axis's pieces
                continue
            found[spec] = None
    return list(found)


def pairs(count: int) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    rng = random.Random(0)
    pending = (*KINDS, Partial("sum"), Partial("max"))
    for first, second in itertools.product(MESHES, MESHES):
        sources, targets = specs(first, KINDS), specs(second, pending)
        for _ in range(count):
            yield rng.choice(sources), rng.choice(targets)


def planned(
    source: TensorSpec,
    target: TensorSpec,
    source_ranks: Sequence[int] = range(9),
    target_ranks: Sequence[int] = range(9),
    **given: Any,
) -> TransferPlan:
    """Between ranks of a launch: rank i is rank i on both sides, if nothing else is said."""
    here = StoredTensor.of("x", source, holders_of(source), source_ranks)
    there = StoredTensor.of("y", target, holders_of(target), target_ranks)
    return plan_transfer(here, there, **given)


def lacking(plan: TransferPlan, index: int) -> int:
    """Elements that a target's rank wants and does not hold as a rank of the source."""
    wanted = box_of(plan.target, index)
    total = 1
    for n in shape_of(wanted):
        total *= n
    rank = plan.there.numbers[index]
    if is_neutral(plan.target, index):
        return 0
    if plan.distinct or rank not in plan.here.ranks:
        return total
    held = plan.here.where(plan.here.ranks.index(rank))
    common = 1
    for a, b in zip(wanted, held, strict=True):
        common *= length(intersect(a, b))
    return total - common


@pytest.mark.slow
def test_each_rank_receives_only_what_it_lacks_and_values_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    for source, target in pairs(8):
        plan = planned(source, target)
        size = max(source.mesh.size, target.mesh.size)
        for index in range(target.mesh.size):
            received = sum(p.bytes_sent for p in plan.pieces if p.target_rank == index)
            assert received == lacking(plan, index) * 8, f"{plan}"
        x = torch.randint(-99, 99, SHAPE, generator=generator).double()
        fed = [
            {"x": shard_of(x, source, source.mesh.coordinates(r))} if r < source.mesh.size else {}
            for r in range(size)
        ]
        with launch_cluster(size) as cluster:
            handle = cluster.load(transfer_program(plan, size, torch.device("cpu")))
            out = cluster.run(handle, fed).get()
        shards = [out[rank]["y"] for rank in range(target.mesh.size)]
        assert all("y" not in out[rank] for rank in range(target.mesh.size, size))
        assert torch.equal(assemble(shards, target), x), str(plan)
        for rank, shard in enumerate(shards):
            if not any(isinstance(p, Partial) for p in target.placements):
                expected = shard_of(x, target, target.mesh.coordinates(rank))
                assert torch.equal(shard, expected), str(plan)


def test_other_ranks_of_the_cluster() -> None:
    source, target = parse("f64[7@a,6]", Mesh(a=2)), parse("f64[7,6@b]", Mesh(b=3))
    plan = planned(source, target, (3, 1), (4, 3, 0))
    x = torch.randn(7, 6, dtype=torch.float64)
    fed: list[dict[str, object]] = [{} for _ in range(5)]
    for index, rank in enumerate((3, 1)):
        fed[rank] = {"x": shard_of(x, source, {"a": index})}
    with launch_cluster(5) as cluster:
        handle = cluster.load(transfer_program(plan, 5, torch.device("cpu")))
        out = cluster.run(handle, fed).get()
    assert torch.equal(assemble([out[rank]["y"] for rank in (4, 3, 0)], target), x)
    assert not out[1] and not out[2]
    # only rank 3 is of both meshes: it keeps 4 rows of its 2 columns
    assert plan.bytes_sent == 7 * 6 * 8 - 4 * 2 * 8


def test_the_text() -> None:
    plan = planned(parse("f32[8@tp,4]", Mesh(tp=2)), parse("f32[8@x,4]", Mesh(x=4)))
    assert (
        str(plan)
        == """\
transfer f32[8@tp,4] on mesh(tp=2) -> f32[8@x,4] on mesh(x=4)
  rank 0 keeps   [0:2,:]
* rank 0 -> 1    [2:4,:]   32 bytes
* rank 1 -> 2    [4:6,:]   32 bytes
* rank 1 -> 3    [6:8,:]   32 bytes
  96 bytes sent, at most 64 by one rank"""
    )
    assert plan.bytes_by_pair == {(0, 1): 32, (1, 2): 32, (1, 3): 32}


def test_replicas_share_the_work() -> None:
    plan = planned(parse("f32[8]", Mesh(a=2)), parse("f32[8@b]", Mesh(b=4)), distinct=True)
    assert sorted(plan.bytes_by_pair) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert plan.bytes_sent == 32


def test_the_price_is_the_busiest_ranks() -> None:
    plan = planned(parse("f32[8@tp,4]", Mesh(tp=2)), parse("f32[8@x,4]", Mesh(x=4)))
    assert plan.seconds(Topology(latency=1.0, bandwidth=32.0)) == 2 * (1.0 + 1.0)
    slow = Topology(latency={"tp": 1.0, "x": 3.0}, bandwidth={"tp": 32.0, "x": 64.0})
    assert plan.seconds(slow) == 2 * (3.0 + 1.0)
    assert planned(plan.source, plan.source).seconds(Topology()) == 0


def test_only_the_part_that_holds_the_value_sends() -> None:
    mesh = Mesh(pp=2, tp=2)
    source = parse("f32[8@tp] on pp=1", mesh)
    pieces = planned(source, parse("f32[8]", Mesh(x=1))).pieces
    assert [(p.source_rank, p.ranges, p.bytes_sent) for p in pieces] == [
        (2, (((0, 4),),), 16),
        (3, (((4, 8),),), 16),
    ]


def test_scalars_and_empty_tensors() -> None:
    scalar = parse("f32[]", Mesh(a=2))
    assert planned(scalar, parse("f32[]", Mesh(b=3))).bytes_by_pair == {(0, 2): 4}
    empty = parse("f32[0@a,4]", Mesh(a=2))
    assert planned(empty, parse("f32[0,4]", Mesh(b=3))).pieces == ()


def test_what_is_refused() -> None:
    a, b = Mesh(a=2), Mesh(b=2)
    with pytest.raises(PlanningError, match=r"pending over a.*redistribute\(a=dt.Replicate\(\)\)"):
        planned(parse("f32[8]{sum@a}", a), parse("f32[8]", b))
    with pytest.raises(PlanningError, match="not two placements of one value"):
        planned(parse("f32[8]", a), parse("f64[8]", b))
    with pytest.raises(PlanningError, match="state 2 different ranks"):
        planned(parse("f32[8]", a), parse("f32[8]", b), target_ranks=(1, 1))
