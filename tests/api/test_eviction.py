"""Plans and loaded programs of many shapes: the most recently used ones are kept, and evicted ones
can be used again."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.api.step import plan_cache
from dtensor.api.store.program_cache import ClusterProgram, ProgramCache
from dtensor.api.store.store import Owner
from dtensor.daft import Backend, Future, Program, RankProgram, TaskError
from dtensor.sharding.spec.spec import make_spec
from tests.api.test_recovery import lose

MESH = dt.Mesh(dp=2)


def loss_fn(model: Any, x: Tensor) -> Tensor:
    return model(x).tanh().square().mean()


def trained(mesh: dt.Mesh = MESH) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model = dt.parallelize(net, mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    return dt.train_step(model, loss_fn, opt, inputs=dict(dp=dt.Row()))


def rows(number: int) -> Tensor:
    return torch.arange(number * 3.0).reshape(number, 3).sin()


def handles(run: Any) -> set[int]:
    return set(run.launch.cluster._handles)


def on_hosts(run: Any) -> list[int]:
    """Return how many programs each host has loaded."""
    cluster = run.launch.cluster
    if cluster.immediate:
        return [len(cluster._worker.engines)]
    return cluster._wait_long(
        [cluster.ask(host, _num_programs) for host in range(len(cluster.hosts))]
    )


def _num_programs(ranks: Any) -> int:
    assert set(ranks._programs) == set(ranks._worker.engines)
    assert {key[0] for key in ranks._plain} <= set(ranks._programs)
    return len(ranks._programs)


PLACES = ["inprocess", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the number of kept plans to a small value, and return it."""
    from dtensor.api.step import loaded_program

    for module in (plan_cache, loaded_program):
        monkeypatch.setattr(module, "MAX_PLANS", 3)
    return 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", PLACES)
def test_step_with_evictions_over_twenty_lengths_is_bitwise_unchanged(
    backend: Backend, few: int, request: Any
) -> None:
    """Results are bitwise equal to those of a launch without eviction."""
    if backend == "ray":
        request.getfixturevalue("ray_session")
    lengths = [*range(2, 22), 2, 3, 21, 2]
    step = trained()
    with dt.launch(MESH, backend) as run:
        found = []
        for number, length in enumerate(lengths):
            found.append(step(rows(length)).tensor())
            assert len(handles(run)) <= few and len(step.plans) <= few
            if number % 8 == 7:
                assert on_hosts(run) == [len(handles(run))] * len(on_hosts(run))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("step.plan_cache", "step.loaded_program"):
            patch.setattr(f"dtensor.api.{module}.MAX_PLANS", 1000)
        step = trained()
        with dt.launch(MESH):
            want = [step(rows(length)).tensor() for length in lengths]
    assert len(step.plans) == 20
    assert all(map(torch.equal, found, want))


def test_most_recently_used_programs_stay_loaded(few: int) -> None:
    f = dt.compile(lambda x: x * 2, MESH)
    with dt.launch(MESH) as run:
        for length in (2, 3, 4):
            f(rows(length))
        kept = handles(run)
        f(rows(2))
        f(rows(5))  # 3 was used longest ago
        assert len(handles(run) & kept) == 2
        before = handles(run)
        for length in (4, 2, 5):
            f(rows(length))
        assert handles(run) == before
        f(rows(3))
        assert handles(run) != before and len(handles(run)) == few


def test_programs_of_deleted_function_are_unloaded() -> None:
    with dt.launch(MESH) as run:
        for number in range(5):
            f = dt.compile(lambda x, number=number: x * number, MESH)
            f(rows(2))
            del f
            gc.collect()
            assert len(handles(run)) == 1


def test_captured_constants_are_dropped_with_their_program(few: int) -> None:
    caught = torch.arange(3.0)
    f = dt.compile(lambda x: x + caught, MESH)
    with dt.launch(MESH) as run:
        for length in range(2, 9):
            assert torch.equal(f(rows(length)).full_tensor(), rows(length) + caught)
        run.drop()
        cluster: Any = run.launch.cluster
        held = [name for _, name in cluster._worker._table if "constant" in name]
        assert len(held) == few * MESH.size


def test_step_and_gradients_programs_of_one_shape_both_stay_loaded(few: int) -> None:
    step = trained()
    with dt.launch(MESH) as run:
        for length in range(2, 8):
            step(rows(length)).tensor()
            step.gradients(rows(length))
            assert len(handles(run)) <= 2 * few
        before = handles(run)
        step(rows(7)).tensor()
        step.gradients(rows(7))
        assert handles(run) == before


def test_pending_run_keeps_its_program_loaded(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtensor.daft.cluster.cluster import _CallFuture

    f = dt.compile(lambda x: x * 2, MESH)
    with dt.launch(MESH) as run:
        with monkeypatch.context() as patch:
            patch.setattr(_CallFuture, "done", lambda self: False)
            under_way = [f(rows(length)) for length in range(2, 8)]
            assert len(handles(run)) == len(under_way) == 6
        f(rows(9))
        assert len(handles(run)) == few


def of_ops(_: Any, length: int) -> object:
    return torch.exp(dt.distribute(rows(length), MESH, dp=dt.Row()))


def join_transfers(_: Any, length: int) -> object:
    return dt.transfer(dt.distribute(rows(length), MESH, dp=dt.Row()), OTHER)


def of_saves(run: Any, length: int) -> object:
    """Save values whose homes differ, each under its own key."""
    store, owner = run.launch.store, Owner[str]()
    home = run.stored(f"value {length}", make_spec((length, 3), torch.float32, MESH))
    store.put(owner, {"x": (rows(length), home)})
    rank = RankProgram(instructions=(), inputs=("step",))
    program = Program(name="save", ranks=(rank,) * 2, functions=(), stage_of=(0, 0))
    return store.save(length, {("x",): home}, lambda size: program, {"step": 1})


OTHER = dt.Mesh(tp=2, name="other")


@pytest.mark.parametrize("use", [of_ops, join_transfers, of_saves])
def test_programs_in_flight_are_not_unloaded(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completed programs are unloaded when another program is loaded, except the most recently used
    ones."""
    from dtensor.daft.cluster.cluster import _CallFuture

    monkeypatch.setattr("dtensor.api.store.store.MAX_LOADED", 3)
    monkeypatch.setattr("dtensor.api.eager.execute_op.MAX_PROGRAMS", 3)
    with dt.launch(MESH, OTHER) as run:
        with monkeypatch.context() as patch:
            patch.setattr(_CallFuture, "done", lambda self: False)
            for cluster in (run.cluster, run.launch.cluster):  # as on Ray
                patch.setattr(cluster, "immediate", False)
            for length in range(2, 8):
                use(run, length)
                gc.collect()
            assert len(handles(run)) == 6
        use(run, 8)
        assert len(handles(run)) == 3
        before = handles(run)
        for length in (8, 7, 6):
            use(run, length)
        assert handles(run) == before


def test_program_of_sync_stays_loaded_while_it_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dtensor.daft.cluster.cluster import _CallFuture

    monkeypatch.setattr("dtensor.api.store.store.MAX_LOADED", 1)
    torch.manual_seed(0)
    models = [dt.parallelize(torch.nn.Linear(3, 4), MESH) for _ in range(3)]
    replicas = [dt.replica(model, OTHER, {}) for model in models]
    with dt.launch(MESH, OTHER) as run:
        with monkeypatch.context() as patch:
            patch.setattr(_CallFuture, "done", lambda self: False)
            for model, replica in zip(models, replicas, strict=True):
                dt.sync(model, replica)
            assert len(handles(run)) == 3
        dt.transfer(dt.distribute(rows(2), MESH), OTHER)
        assert len(handles(run)) == 1


class LoadedOnce:
    """A cached program that records whether it is running and whether it was unloaded."""

    def __init__(self) -> None:
        self.is_running = False
        self.is_loaded = True

    def unload(self) -> None:
        assert self.is_loaded
        self.is_loaded = False


def test_cache_loads_a_key_again_if_it_is_for_another_object() -> None:
    cache = ProgramCache[LoadedOnce](2)
    first = cache.load("key", LoadedOnce, made_for=[1])
    assert cache.get("key", [1]) is first
    assert cache.get("key", [2]) is None and not first.is_loaded
    assert cache.get("key", [1]) is None and len(cache) == 0


def test_cache_unloads_least_recently_used_program_that_is_not_running() -> None:
    cache = ProgramCache[LoadedOnce](2)
    a, b = cache.load("a", LoadedOnce), cache.load("b", LoadedOnce)
    assert cache.get("a") is a
    cache.load("c", LoadedOnce)
    assert a.is_loaded and not b.is_loaded and cache.keys() == ["a", "c"]
    a.is_running = True
    cache.load("d", LoadedOnce)
    assert a.is_loaded and len(cache) == 3
    a.is_running = False
    cache.evict()
    assert not a.is_loaded and cache.keys() == ["c", "d"]
    cache.unload(lambda program: program is cache.get("d"))
    assert cache.keys() == ["c"]


def test_run_with_results_counts_as_running_only_while_its_future_exists() -> None:
    program = ClusterProgram(None, None)  # type: ignore[arg-type]
    program.last_run = ref(Pending())
    gc.collect()
    assert not program.is_running
    run = Pending()
    program.last_run = ref(run)
    assert program.is_running
    run.ended = True
    assert not program.is_running
    program.last_run = Pending()
    assert program.is_running


class Pending(Future):
    ended = False

    def get(self, timeout: float | None = None) -> list[Any]:
        raise AssertionError("it is not read")

    def done(self) -> bool:
        return self.ended


def test_failure_can_be_read_after_its_program_was_evicted(few: int) -> None:
    def look_up(x: Tensor, at: Tensor) -> Tensor:
        return x[at]

    f = dt.compile(look_up, MESH)
    cluster: Any
    with dt.launch(MESH, mode="compiled") as run:
        cluster = run.launch.cluster
        cluster.immediate = False  # as on Ray: nobody reads it at once
        failed = f(rows(2), torch.tensor([7]))
        for length in range(3, 9):
            f(rows(length), torch.tensor([0]))
        assert len(handles(run)) == few
        with pytest.raises(TaskError, match="rank 0.*x\\[at\\]|index 7"):
            failed.full_tensor()
        cluster.immediate = True


def test_transfers_of_many_shapes_evict_programs_and_stay_correct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dtensor.api.store.store.MAX_LOADED", 3)
    other = dt.Mesh(tp=2, name="other")
    with dt.launch(MESH, other) as run:
        for length in [*range(2, 9), 2]:
            x = dt.distribute(rows(length), MESH, dp=dt.Row())
            y = dt.transfer(x, other, tp=dt.Column())
            assert torch.equal(y.full_tensor(), rows(length))
            assert len(handles(run)) <= 3


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:recovered")
def test_rank_replaced_after_evictions_gives_same_bits(ray_session: None, few: int) -> None:
    """Programs that recovery may run again are not evicted, and evicted programs run on the
    replacement."""
    lengths = [*range(2, 12), 2, 3, 4, 2]
    step = trained()
    with dt.launch(MESH, "ray", spares=1, snapshot_every=4) as run:
        cluster: Any = run.launch.cluster
        found = []
        for number, length in enumerate(lengths):
            found.append(step(rows(length)).tensor())
            logged = {c.message.program for c in cluster.log.calls}
            assert logged - {None} <= set(cluster.loaded.programs)
            if number in (6, 11):
                lose(run, number % 2)
        assert len(run.recoveries) == 2 and run.recoveries[0].runs > 1
        for _ in range(6):  # past what is kept to run it again
            step(rows(2)).tensor()
        cluster._recovery._wait_for_some()
        assert set(cluster.loaded.programs) == handles(run)
        assert on_hosts(run) == [few, few]
        state = dt.gather_state_dict(step.model, step.optimizer)
    step = trained()
    with dt.launch(MESH):
        want = [step(rows(length)).tensor() for length in [*lengths, *[2] * 6]]
        same = dt.gather_state_dict(step.model, step.optimizer)
    assert all(map(torch.equal, found, want))
    for name, value in state["model"].items():
        assert torch.equal(value, same["model"][name])
