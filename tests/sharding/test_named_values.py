"""Many values between two meshes at once: random placements, ranks and dtypes, of values that some
ranks hold; what each target's rank gets, what is sent, and in which messages."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.daft import TaskError, launch_cluster
from dtensor.errors import PlanningError
from dtensor.runtime.transfer.between_meshes import sync_program
from dtensor.sharding.redistribute.sync_plan import SyncPlan, plan_sync
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Placement, Shard
from dtensor.sharding.spec.shards import Where, shard_of
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.sharding.spec.stored import StoredTensor

MESHES = (Mesh(), Mesh(a=2), Mesh(b=3), Mesh(c=2, d=2))
KINDS: tuple[Placement, ...] = (
    *(REPLICATE, Shard(0), Shard(1), Shard(1, blocks=3), Shard(0, blocks=(5, 2)), Shard(1, unit=2)),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool)
SHAPES = ((7, 6), (5,), (), (3, 0))


@st.composite
def specs(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    stated = {axis: draw(st.sampled_from(KINDS)) for axis in draw(st.permutations(mesh.axes))}
    try:
        return make_spec(shape, dtype, mesh, stated)
    except PlanningError:  # it does not fit the shape
        return make_spec(shape, dtype, mesh, {})


@st.composite
def syncs(draw: st.DrawFn) -> tuple[dict[str, tuple[StoredTensor, StoredTensor]], int, int]:
    meshes = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    size = draw(st.integers(max(mesh.size for mesh in meshes), 6))
    numbers = [tuple(draw(st.permutations(range(size)))[: mesh.size]) for mesh in meshes]
    values: dict[str, tuple[StoredTensor, StoredTensor]] = {}
    for number in range(draw(st.integers(1, 5))):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        sides: list[StoredTensor] = []
        for mesh, own in zip(meshes, numbers, strict=True):
            spec, ranks = draw(specs(mesh, shape, dtype)), tuple(range(mesh.size))
            if mesh.axes and draw(st.booleans()):  # one stage, along the first axis
                axis = mesh.axes[0]
                spec = spec.with_placements(**{axis: REPLICATE})
                stage = draw(st.integers(0, mesh.axis_size(axis) - 1))
                ranks = tuple(r for r in ranks if mesh.coordinates(r)[axis] == stage)
            sides.append(StoredTensor.of("", spec, ranks, own))
        values[f"value {number}"] = sides[0], sides[1]
    return values, size, draw(st.sampled_from((1, 16, 100, 1 << 20)))


def elements(where: Where) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {()}
    for intervals in where:
        indices = [i for lo, hi in intervals for i in range(lo, hi)]
        found = {(*before, i) for before in found for i in indices}
    return found


def check_sent(plan: SyncPlan, values: dict[str, tuple[StoredTensor, StoredTensor]]) -> None:
    """Each target's rank is sent each element that it lacks once, by a rank that has it."""
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


def content(label: str, spec: TensorSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, label)))
    return torch.randint(0, 99, spec.shape, generator=generator).to(spec.dtype)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(syncs())
def test_any_values_between_any_placements(
    case: tuple[dict[str, tuple[StoredTensor, StoredTensor]], int, int],
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
        handle = cluster.load(sync_program(plan, size, torch.device("cpu"), names))
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


def test_replicas_share_the_work_of_many_values() -> None:
    """One target: each of two replicas sends half, though a target's number would pick one."""
    two, one = Mesh(a=2), Mesh(b=1)
    sizes = (40, 10, 10, 20)
    values = {
        f"v{i}": (
            StoredTensor("", make_spec((n,), torch.float32, two, {}), (0, 1), (0, 1)),
            StoredTensor("", make_spec((n,), torch.float32, one, {}), (0,), (2,)),
        )
        for i, n in enumerate(sizes)
    }
    assert plan_sync("v", values).bytes_by_pair == {(0, 2): 160, (1, 2): 160}


def test_messages_are_few_and_bounded() -> None:
    here, there = Mesh(a=1), Mesh(b=1)

    def value(rows: int, dtype: torch.dtype) -> tuple[StoredTensor, StoredTensor]:
        shape = (rows, 16)
        return (
            StoredTensor("", make_spec(shape, dtype, here, {}), (0,), (0,)),
            StoredTensor("", make_spec(shape, dtype, there, {}), (0,), (1,)),
        )

    values = {"large": value(100, torch.float32), "half": value(3, torch.bfloat16)}
    values |= {f"small {i}": value(1, torch.float32) for i in range(3)}
    plan = plan_sync("v", values, bucket_bytes=1024, topology=Topology(latency=1, bandwidth=64))
    # 16 rows of 64 bytes at a time; what is left of the large one goes with the small ones
    assert [m.bytes_sent for m in plan.messages] == [1024] * 6 + [4 * 64 + 3 * 64 + 3 * 32]
    assert [b.label for b in plan.messages[-1].blocks] == [
        *("large", "small 0", "small 1", "small 2", "half")
    ]
    assert plan.seconds == 7 + plan.bytes_sent / 64
    assert math.isclose(plan.bytes_sent, 103 * 64 + 3 * 32)


def test_a_run_that_fails_leaves_all_values_as_they_were() -> None:
    mesh, other = Mesh(a=2), Mesh(b=2)
    side = StoredTensor("", make_spec((4,), torch.float32, mesh, {"a": Shard(0)}), (0, 1), (0, 1))
    whole = StoredTensor("", make_spec((4,), torch.float32, other, {}), (0, 1), (1, 2))
    plan = plan_sync("v", {"x": (side, whole), "y": (side, whole)})
    names = {label: (f"old {label}", f"actor {label}") for label in "xy"}
    ones, wrong = torch.ones(2), torch.ones(1)
    with launch_cluster(3) as cluster:
        new = {"actor x": torch.zeros(4), "actor y": torch.zeros(4)}
        cluster.put([{"old x": ones, "old y": ones}, {"old x": ones, "old y": wrong} | new, new])
        handle = cluster.load(sync_program(plan, 3, torch.device("cpu"), names))
        with pytest.raises(TaskError, match="sync"):
            cluster.run(handle, [{}, {}, {}]).check()
        asked = [[], list(new), list(new)]
        assert not any(x.any() for own in cluster.get(asked).get() for x in own)
        cluster.put([{}, {"old y": ones}, {}])
        cluster.run(handle, [{}, {}, {}]).check()
        assert all(x.all() for own in cluster.get(asked).get() for x in own)
