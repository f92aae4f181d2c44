"""Tests transfers between meshes, of one value and of many at once, for random placements, ranks
and dtypes: pieces, messages, bytes, text, and the values that arrive.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.daft import TaskError, launch_cluster
from dtensor.errors import PlanningError
from dtensor.runtime.transfer.between_meshes import sync_program, transfer_program
from dtensor.sharding.redistribute.between_meshes import (
    TransferPlan,
    box_of,
    holders_of,
    holds_identity,
    plan_transfer,
)
from dtensor.sharding.redistribute.sync_plan import SyncPlan, plan_sync
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.parse import parse
from dtensor.sharding.spec.placements import REPLICATE, Partial, Shard
from dtensor.sharding.spec.shards import Where, assemble, shard_of
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.testing import strategies

CPU, F32 = torch.device("cpu"), torch.float32
MESHES = (Mesh(), Mesh(a=2), Mesh(b=3), Mesh(c=2, d=2), Mesh(x=2, y=3))
DTYPES = (F32, torch.bfloat16, torch.float64, torch.int8, torch.bool)
SHAPES = ((7, 6), (5,), (), (3, 0))
Values = dict[str, tuple[StoredTensor, StoredTensor]]


def planned(
    source: TensorSpec,
    target: TensorSpec,
    source_ranks: Sequence[int] = range(9),
    target_ranks: Sequence[int] = range(9),
    **given: Any,
) -> TransferPlan:
    """Plan a transfer between ranks of a launch; by default rank i is rank i on both sides."""
    here = StoredTensor.of("x", source, holders_of(source), source_ranks)
    there = StoredTensor.of("y", target, holders_of(target), target_ranks)
    return plan_transfer(here, there, **given)


def elements(where: Where) -> set[tuple[int, ...]]:
    return set(
        itertools.product(*([i for lo, hi in each for i in range(lo, hi)] for each in where))
    )


def content(label: str, spec: TensorSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, label)))
    return torch.randint(0, 99, spec.shape, generator=generator).to(spec.dtype)


# -- one value -------------------------------------------------------------------------------------


@st.composite
def ends(draw: st.DrawFn) -> tuple[TensorSpec, TensorSpec]:
    """Draw any two placements of one value; the target may be partial."""
    first, second = (draw(st.sampled_from(MESHES[1:])) for _ in range(2))
    given = dict(shape=(7, 6), dtype=torch.float64)
    target = strategies.specs(mesh=second, pending=True, **given)
    one_op = target.filter(lambda s: len({p.op for p in s.placements if hasattr(p, "op")}) < 2)
    return draw(strategies.specs(mesh=first, **given)), draw(one_op)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(ends())
def test_transfer_sends_each_rank_only_missing_elements_and_exact_values(
    both: tuple[TensorSpec, TensorSpec],
) -> None:
    source, target = both
    plan = planned(source, target)
    size = max(source.mesh.size, target.mesh.size)
    for rank in range(target.mesh.size):
        lacking: set[tuple[int, ...]] = set()
        if not holds_identity(target, rank):
            lacking = elements(box_of(target, rank))
            if rank in plan.here.ranks:
                lacking -= elements(plan.here.where(rank))
        received = sum(p.bytes_sent for p in plan.pieces if p.target_rank == rank)
        assert received == len(lacking) * 8, f"{plan}"
    x = content("x", source)
    fed: list[dict[str, object]] = [{} for _ in range(size)]
    for rank in range(source.mesh.size):
        fed[rank] = {"x": shard_of(x, source, source.mesh.coordinates(rank))}
    with launch_cluster(size) as cluster:
        handle = cluster.load(transfer_program(plan, size, CPU))
        out = cluster.run(handle, fed).get()
    shards = [out[rank]["y"] for rank in range(target.mesh.size)]
    assert all("y" not in out[rank] for rank in range(target.mesh.size, size))
    assert torch.equal(assemble(shards, target), x), str(plan)
    if not any(isinstance(p, Partial) for p in target.placements):
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, shard_of(x, target, target.mesh.coordinates(rank))), str(plan)


def test_transfer_text_lists_pieces_and_bytes() -> None:
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


def test_transfer_price_is_that_of_busiest_rank() -> None:
    plan = planned(parse("f32[8@tp,4]", Mesh(tp=2)), parse("f32[8@x,4]", Mesh(x=4)))
    assert plan.seconds(Topology(latency=1.0, bandwidth=32.0)) == 2 * (1.0 + 1.0)
    slow = Topology(latency={"tp": 1.0, "x": 3.0}, bandwidth={"tp": 32.0, "x": 64.0})
    assert plan.seconds(slow) == 2 * (3.0 + 1.0)
    assert planned(plan.source, plan.source).seconds(Topology()) == 0


def test_transfer_from_submesh_sends_only_from_its_ranks() -> None:
    source = parse("f32[8@tp] on pp=1", Mesh(pp=2, tp=2))
    pieces = planned(source, parse("f32[8]", Mesh(x=1))).pieces
    assert [(p.source_rank, p.ranges, p.bytes_sent) for p in pieces] == [
        (2, (((0, 4),),), 16),
        (3, (((4, 8),),), 16),
    ]
    scalar = parse("f32[]", Mesh(a=2))
    assert planned(scalar, parse("f32[]", Mesh(b=3))).bytes_by_pair == {(0, 2): 4}


def test_transfer_of_partial_mismatched_or_duplicate_targets_is_refused() -> None:
    a, b = Mesh(a=2), Mesh(b=2)
    with pytest.raises(PlanningError, match=r"pending over a.*redistribute\(a=dt.Replicate\(\)\)"):
        planned(parse("f32[8]{sum@a}", a), parse("f32[8]", b))
    with pytest.raises(PlanningError, match="not two placements of one value"):
        planned(parse("f32[8]", a), parse("f64[8]", b))
    with pytest.raises(PlanningError, match="state 2 different ranks"):
        planned(parse("f32[8]", a), parse("f32[8]", b), target_ranks=(1, 1))


# -- many values -----------------------------------------------------------------------------------


@st.composite
def syncs(draw: st.DrawFn) -> tuple[Values, int, int]:
    """Draw values with parts on some ranks of each side, the size of the cluster, and the bytes
    of a message."""
    meshes = draw(st.sampled_from(MESHES[:4])), draw(st.sampled_from(MESHES[:4]))
    size = draw(st.integers(max(mesh.size for mesh in meshes), 6))
    numbers = [tuple(draw(st.permutations(range(size)))[: mesh.size]) for mesh in meshes]
    values: Values = {}
    for number in range(draw(st.integers(1, 5))):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        sides: list[StoredTensor] = []
        for mesh, own in zip(meshes, numbers, strict=True):
            spec = draw(strategies.specs(mesh=mesh, shape=shape, dtype=dtype))
            ranks = tuple(range(mesh.size))
            if mesh.axes and draw(st.booleans()):  # one stage, along the first axis
                axis = mesh.axes[0]
                spec = spec.with_placements(**{axis: REPLICATE})
                stage = draw(st.integers(0, mesh.axis_size(axis) - 1))
                ranks = tuple(r for r in ranks if mesh.coordinates(r)[axis] == stage)
            sides.append(StoredTensor.of("", spec, ranks, own))
        values[f"value {number}"] = sides[0], sides[1]
    return values, size, draw(st.sampled_from((1, 16, 100, 1 << 20)))


def check_sent(plan: SyncPlan, values: Values) -> None:
    """Check that each target rank receives each missing element once, from a rank that has it."""
    wanted: Counter[tuple[int, str, tuple[int, ...]]] = Counter()
    nbytes = 0
    for label, (here, there) in values.items():
        has = {number: elements(here.where(r)) for r, number in here.numbers.items()}
        for rank, number in there.numbers.items():
            lacking = elements(there.where(rank)) - has.get(number, set())
            wanted.update((number, label, index) for index in lacking)
            nbytes += len(lacking) * here.spec.dtype.itemsize
        for message in plan.messages:
            for block in message.blocks:
                if block.label == label:
                    assert elements(block.ranges) <= has[message.source_rank]
    sent = Counter(
        (message.target_rank, block.label, index)
        for message in plan.messages
        for block in message.blocks
        for index in elements(block.ranges)
    )
    assert sent == wanted
    assert plan.bytes_sent == nbytes == sum(plan.bytes_by_pair.values())
    assert plan.bytes_sent == sum(t.bytes_sent for t in plan.transfers.values())


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(syncs())
def test_sync_of_random_values_between_random_placements_is_exact(
    case: tuple[Values, int, int],
) -> None:
    values, size, most = case
    plan = plan_sync("any", values, bucket_bytes=most)
    check_sent(plan, values)
    width = max(here.spec.dtype.itemsize for here, _ in values.values())
    assert all(message.bytes_sent <= max(most, width) for message in plan.messages)
    str(plan)
    state: list[dict[str, object]] = [{} for _ in range(size)]
    for label, (here, there) in values.items():
        for number in there.ranks:
            state[number][f"actor {label}"] = torch.zeros(0)
        for r, number in here.numbers.items():
            shard = shard_of(content(label, here.spec), here.spec, here.spec.mesh.coordinates(r))
            state[number][f"old {label}"] = shard
    names = {label: (f"old {label}", f"actor {label}") for label in values}
    with launch_cluster(size) as cluster:
        cluster.put(state)
        handle = cluster.load(sync_program(plan, size, CPU, names))
        cluster.run(handle, [{} for _ in range(size)]).check()
        found = cluster.get([list(own) for own in state]).get()
    for own, now in zip(state, found, strict=True):
        own.update(zip(own, now, strict=True))
    for label, (here, there) in values.items():
        x = content(label, here.spec)
        for side, name in ((here, f"old {label}"), (there, f"actor {label}")):
            for r, number in side.numbers.items():
                shard = state[number][name]
                assert isinstance(shard, torch.Tensor)
                assert torch.equal(shard, shard_of(x, side.spec, side.spec.mesh.coordinates(r)))


def whole(shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh, *numbers: int) -> StoredTensor:
    ranks = tuple(range(len(numbers)))
    return StoredTensor("", make_spec(shape, dtype, mesh, {}), ranks, numbers)


def test_sync_balances_values_between_replicas() -> None:
    """Each of two replicas sends half to the one target."""
    two, one = Mesh(a=2), Mesh(b=1)
    values = {
        f"v{n}": (whole((n,), F32, two, 0, 1), whole((n,), F32, one, 2)) for n in (40, 11, 10, 19)
    }
    assert plan_sync("v", values).bytes_by_pair == {(0, 2): 160, (1, 2): 160}


def test_sync_packs_values_into_few_messages_of_limited_size() -> None:
    here, there = Mesh(a=1), Mesh(b=1)
    sizes = {"large": (100, F32), "half": (3, torch.bfloat16)}
    sizes |= {f"small {i}": (1, F32) for i in range(3)}
    values = {
        label: (whole((rows, 16), dtype, here, 0), whole((rows, 16), dtype, there, 1))
        for label, (rows, dtype) in sizes.items()
    }
    plan = plan_sync("v", values, bucket_bytes=1024, topology=Topology(latency=1, bandwidth=64))
    # 16 rows of 64 bytes at a time; the rest of the large value goes with the small ones
    assert [m.bytes_sent for m in plan.messages] == [1024] * 6 + [4 * 64 + 3 * 64 + 3 * 32]
    assert [b.label for b in plan.messages[-1].blocks] == [
        *("large", "small 0", "small 1", "small 2", "half")
    ]
    assert plan.bytes_sent == 103 * 64 + 3 * 32
    assert plan.seconds == 7 + plan.bytes_sent / 64


def test_failed_sync_leaves_all_values_unchanged() -> None:
    mesh, other = Mesh(a=2), Mesh(b=2)
    side = StoredTensor("", make_spec((4,), F32, mesh, {"a": Shard(0)}), (0, 1), (0, 1))
    target = whole((4,), F32, other, 1, 2)
    plan = plan_sync("v", {"x": (side, target), "y": (side, target)})
    names = {label: (f"old {label}", f"actor {label}") for label in "xy"}
    ones, wrong = torch.ones(2), torch.ones(1)
    with launch_cluster(3) as cluster:
        new = {"actor x": torch.zeros(4), "actor y": torch.zeros(4)}
        cluster.put([{"old x": ones, "old y": ones}, {"old x": ones, "old y": wrong} | new, new])
        handle = cluster.load(sync_program(plan, 3, CPU, names))
        with pytest.raises(TaskError, match="sync"):
            cluster.run(handle, [{}, {}, {}]).check()
        asked = [[], list(new), list(new)]
        assert not any(x.any() for own in cluster.get(asked).get() for x in own)
        cluster.put([{}, {"old y": ones}, {}])
        cluster.run(handle, [{}, {}, {}]).check()
        assert all(x.all() for own in cluster.get(asked).get() for x in own)
