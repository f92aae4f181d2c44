"""Programs of some ranks: they, and nobody else, are called, waited for, and held up."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.daft import (
    ActorLost,
    Buffer,
    Call,
    Cluster,
    Collective,
    Commit,
    Free,
    Future,
    Instruction,
    Program,
    Recv,
    Send,
    Stored,
    TaskError,
    Vote,
    Wait,
    launch_cluster,
)
from dtensor.daft.cluster.counted_runs import CountedRuns
from dtensor.daft.cluster.subcluster import SubCluster
from dtensor.daft.errors import HostError
from dtensor.daft.ray.cluster import RayCluster
from dtensor.daft.run.worker import Counted
from tests.chaos.actors import wait_for_file
from tests.daft.pairs import HANGS
from tests.daft.programs import function, program
from tests.daft.sequences import Drawn, exhaustive, spoilt, wrong
from tests.daft.test_ray_deadlines import clock_of
from tests.daft.test_undo import CHECKED, NOTED, WORD

SIZE = 4
SUM = Buffer((1,), torch.float32)
WAITS = function(
    "waits",
    "def forward(x, path):\n    wait_for_file(path)\n    return (x + 1,)",
    wait_for_file=wait_for_file,
)
SPINS = function(
    "spins",
    "def forward(x, path):\n    while not exists(path):\n        pass\n    return (x + 1,)",
    exists=os.path.exists,
)
NEXT = function("next", "def forward(x, path):\n    return (x + 1,)")


def among(ranks: Sequence[int], by: str = "next") -> Program:
    """These ranks add 1 to what they are fed, the last of them by another function, and sum up; one
    alone adds 1 again."""
    group = tuple(ranks)
    add = Collective("all_reduce", group, ("y",), ("s",), (SUM,), (SUM,), "sum", f"{by} {group}")
    lists: list[list[Instruction]] = [[] for _ in range(SIZE)]
    for rank in ranks:
        fn = by if rank == ranks[-1] else "next"
        lists[rank] = [Call(fn, ("x", "path"), ("y",), source=f"net.py:{rank}: {fn}(x)")]
        if len(ranks) > 1:
            lists[rank] += [add, Wait(("s",))]
        else:
            lists[rank] += [Call("next", ("y", "path"), ("s",))]
    names = [("x", "path") if own else () for own in lists]
    outputs = [("y", "s") if own else () for own in lists]
    made = program(*lists, functions=[WAITS, SPINS, NEXT], inputs=names, outputs=outputs)
    return replace(made, name=f"{by} on {list(ranks)}")


def run(cluster: Cluster, handle: Any, path: Path | str = "", **options: Any) -> Future:
    fed: list[dict[str, object]] = [
        {"x": torch.ones(1), "path": str(path)} if own.inputs else {}
        for own in handle.program.ranks
    ]
    return cluster.run(handle, fed, **options)


# -- who takes part --------------------------------------------------------------------------------


def test_ranks_outside_give_nothing_and_are_not_called() -> None:
    with launch_cluster(SIZE) as cluster:
        handle = cluster.load(among((1, 3)))
        for mode in ("compiled", "interpreted", "timed"):
            before = cluster.calls
            made = run(cluster, handle, mode=mode, keep={"y": "kept"}).get()
            assert made[0] == made[2] == {} and made[1]["s"].item() == made[3]["s"].item() == 4
            if mode != "interpreted":
                assert cluster.calls - before == 2
        before = cluster.calls
        assert cluster.get([(), ("kept",), (), None]).get() == [(), (torch.tensor([2.0]),), (), ()]
        assert cluster.calls - before == 1
        cluster.delete([(), ("kept",), (), ("kept",)])
        cluster.put([{}, {}, {"w": 1}, {}])
        cluster.unload(handle)
        assert cluster.calls - before == 1 + 2 + 1 + 2
        assert cluster.get([()] * SIZE).get() == [()] * SIZE  # all are waited for
        assert cluster.calls - before == 6 + SIZE
        part = SubCluster(cluster, (2, 3), "part: ", "mesh(tp=2)")
        before = cluster.calls
        assert part.get([()] * 2).get() == [()] * 2
        assert cluster.calls - before == 2


def test_a_part_receives_into_its_own_state() -> None:
    gives = [Send("w", 1, "w", SUM), Wait(("w",))]
    takes = [Recv("w", 0, "w", SUM), Wait(("w",))]
    made = program(gives, takes)
    made = replace(made, ranks=tuple(replace(own, state=("w",)) for own in made.ranks))
    with launch_cluster(SIZE) as cluster:
        cluster.put([{"w": torch.zeros(1)}] * SIZE)
        part = SubCluster(cluster, (2, 3), "part: ", "mesh(tp=2)")
        part.put([{"w": torch.ones(1)}, {"w": torch.zeros(1)}])
        part.run(part.load(made), [{}, {}]).get()
        assert part.get([("w",), ("w",)]).get() == [(torch.ones(1),)] * 2
        assert cluster.get([("w",)] * SIZE).get() == [(torch.zeros(1),)] * SIZE


def test_members() -> None:
    made = among((0, 2))
    assert made.members == (0, 2)
    ranks = list(made.ranks)
    ranks[1] = replace(ranks[1], state=("w",))
    assert replace(made, ranks=tuple(ranks)).members == (0, 1, 2)


# -- runs that are counted -------------------------------------------------------------------------


def test_who_has_to_be_asked_what_was_undone() -> None:
    counting = CountedRuns()
    assert counting.to_ask("k", (0,)) == ()
    counting.add("k", 3, (0, 1), told=True)
    assert counting.to_ask("k", (0,)) == counting.to_ask("k", (0, 1)) == ()
    assert counting.to_ask("other", (2,)) == ()
    assert counting.to_ask("k", (1, 2)) == (0, 1)
    counting.settle("k", 5, {3})
    assert counting.to_ask("k", (1, 2)) == ()
    assert counting.told(Counted("k", 0, "n")) == Counted("k", -1, "n", since=5)
    assert counting.told(Counted("k", 1, "n")) == Counted("k", 0, "n", since=5)
    counting.add("k", 6, (0, 1), told=False)  # whoever failed knows it alone
    assert counting.to_ask("k", (0,)) == (0, 1)
    counting.add("k", 7, (2,), told=True)
    assert counting.to_ask("k", (2,)) == (0, 1, 2)
    counting.settle("k", 7, {3, 6})  # asked before run 7 was submitted
    assert counting.told(Counted("k", 2, "n")) == Counted("k", 0, "n", since=7)
    assert counting.to_ask("k", (2,)) == (0, 1, 2)
    counting.settle("k", 8, set())
    assert counting.to_ask("k", (0, 1, 2, 3)) == ()


def numbered(ranks: Sequence[int], size: int) -> Program:
    """These ranks note the number of the run, unless one of them is fed 0."""
    group = tuple(ranks)
    agree: list[Instruction] = [Vote("v"), Commit("v"), Free(("v",))]
    if len(ranks) > 1:
        words = ("v",), ("s",), (WORD,), (WORD,)
        total = Collective("all_reduce", group, *words, "sum", f"agree {group}")
        agree = [Vote("v"), total, Wait(("s",)), Commit("s"), Free(("v", "s"))]
    lists: list[list[Instruction]] = [[] for _ in range(size)]
    for rank in ranks:
        note = Call("noted", ("w", "n"), (), ("w",))
        lists[rank] = [Call("checked", ("x",), ("y",)), *agree, note]
    return program(
        *lists,
        functions=[CHECKED, NOTED],
        inputs=[("x", "n") if own else () for own in lists],
        outputs=[("y",) if own else () for own in lists],
        state=[("w",) if own else () for own in lists],
    )


def number_of_runs(cluster: Cluster) -> None:
    """Ranks that took no part in a run that was undone have its number, as the others."""
    size = cluster.size
    cluster.put([{"w": torch.zeros(())}] * size)
    groups = [(0, 1), (1, 2), (2,), (0, 1, 2), (0, 2)]
    handles = {group: cluster.load(numbered(group, size)) for group in groups}
    submitted, undone = 0, 0

    def step(group: tuple[int, ...], x: float, *, takes: bool = True) -> None:
        nonlocal submitted, undone
        fed: list[dict[str, object]] = [
            {"x": x, "n": submitted} if rank in group else {} for rank in range(size)
        ]
        keep = {"y": "made"}
        cluster.run(handles[group], fed, keep=keep, counted=Counted("steps", 0, "n", takes))
        undone += takes and not x
        if x:
            expected[group] = submitted - undone
            found = cluster.get([("w",) if rank in group else () for rank in range(size)]).get()
            assert {w.item() for own in found for w in own} == {expected[group]}
        submitted += takes

    expected: dict[tuple[int, ...], int] = {}
    for group, x in [((0, 1), 1.0), ((0, 1), 0.0), ((1, 2), 1.0), ((2,), 0.0), ((0, 1), 1.0),
                     ((0, 1, 2), 0.0), ((0, 2), 0.0), ((2,), 1.0), ((0, 1, 2), 1.0)]:  # fmt: skip
        step(group, x)
    step((0, 1), 1.0, takes=False)
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        cluster.check_undone()


def test_numbers_of_runs_on_other_ranks() -> None:
    with launch_cluster(3) as cluster:
        number_of_runs(cluster)


# -- on Ray ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(ray_session: None) -> Iterator[RayCluster]:
    with launch_cluster(SIZE, backend="ray", deadline_s=120.0) as cluster:
        assert isinstance(cluster, RayCluster)
        yield cluster


@pytest.mark.ray
def test_a_pair_goes_on_while_another_is_busy(four: RayCluster, tmp_path: Path) -> None:
    """It is loaded, fed, run, read, deleted and unloaded; and a failed put is its actor's alone."""
    go = tmp_path / "go"
    busy = four.load(among((0, 1), "waits"))
    held = run(four, busy, go)
    for _ in range(2):
        handle = four.load(among((2, 3)))
        four.put([{}, {}, {"w": torch.ones(2)}, {}])
        future = run(four, handle, keep={"y": "kept"})
        assert future.get(timeout=600.0)[2]["s"].item() == 4
        assert four.get([(), (), ("w", "kept"), ("kept",)]).get(600.0)[3] == (torch.tensor([2.0]),)
        four.delete([(), (), ("w", "kept"), ("kept",)])
        four.unload(handle)
    four.put([{"w": Unreadable()}, {}, {}, {}])
    interpreted = run(four, four.load(among((2, 3))), mode="interpreted")
    assert interpreted.get(timeout=600.0)[3]["s"].item() == 4
    assert not held.done()
    go.touch()
    with pytest.raises(HostError, match="rank 0: ZeroDivisionError: not here"):
        four.get([("w",), (), (), ()]).get()
    assert held.get()[1]["s"].item() == 4
    four.unload(busy)


@pytest.mark.ray
def test_a_failed_put_is_not_lost_with_a_run_that_nobody_reads(four: RayCluster) -> None:
    handle = four.load(among((0,)))
    for _ in range(2):
        four.put([{"w": Unreadable(), "x": 1}, {}, {}, {}])
        run(four, handle)
        run(four, handle)
        assert four.get([None, (), (), ()]).get() == [()] * SIZE
        with pytest.raises(HostError, match="rank 0: ZeroDivisionError: not here"):
            four.get([(), None, None, None]).get()
        assert four.get([()] * SIZE).get() == [()] * SIZE


class Unreadable:
    """Does not unpickle."""

    def __reduce__(self) -> Any:
        return _unreadable, ()


def _unreadable() -> None:
    raise ZeroDivisionError("not here")


@pytest.mark.ray
def test_numbers_of_runs_on_other_ranks_on_ray(four: RayCluster) -> None:
    number_of_runs(four)


@pytest.mark.ray
def test_pairs_that_overlap_give_what_one_after_the_other_gives(four: RayCluster) -> None:
    """Values go on from pair to pair in the ranks' tables; nothing is read before the end."""
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)]
    draw = torch.Generator().manual_seed(3)
    for cluster in (four, None):
        with launch_cluster(SIZE) if cluster is None else _kept(cluster) as each:
            handles = {pair: each.load(among(pair)) for pair in pairs}
            each.put([{"x": torch.tensor([float(r)])} for r in range(SIZE)])
            draw.manual_seed(3)
            for number in range(60):
                pair = pairs[int(torch.randint(len(pairs), (), generator=draw))]
                fed = [{"x": Stored("x"), "path": ""} if r in pair else {} for r in range(SIZE)]
                each.run(handles[pair], fed, keep={"s" if number % 3 else "y": "x"})
            found = each.get([("x",)] * SIZE).get()
        if cluster is not None:
            first = found
    assert [x.tolist() for (x,) in first] == [x.tolist() for (x,) in found]


class _kept:
    """A cluster that stays open."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __enter__(self) -> Cluster:
        return self.cluster

    def __exit__(self, *raised: object) -> None:
        pass


def await_places(cluster: RayCluster, places: dict[int, int]) -> None:
    """Return when these hosts are at these positions of their lists, where they stay."""
    while any(cluster.membership.host(h).counter.read().position != at for h, at in places.items()):
        time.sleep(0.01)


@pytest.mark.ray
@pytest.mark.parametrize("how", ["blocked", "stopped"])
def test_a_pair_that_goes_on_hides_no_hang_of_another(
    ray_session: None, tmp_path: Path, how: str
) -> None:
    """Rank 1 is blocked in a call, or stopped, and rank 3 makes steps all the while."""
    with launch_cluster(SIZE, backend="ray", deadline_s=120.0) as cluster:
        assert isinstance(cluster, RayCluster)
        fine, never, steps = cluster.load(among((3,))), tmp_path / "never", 0
        hangs = run(cluster, cluster.load(among((0, 1), "waits")), never)
        # it waits for rank 0, which waits in a run that rank 2 has no part in
        behind = run(cluster, cluster.load(among((0, 2))))
        run(cluster, fine).get()
        await_places(cluster, {0: 2, 1: 0, 2: 2})
        if how == "stopped":
            os.kill(cluster._home.processes[1].counter.pid, signal.SIGSTOP)
        with pytest.raises(ActorLost) as lost:
            while True:
                cluster.watch.deadline_s = 120.0  # a step of rank 3 takes what it takes
                steps += int(run(cluster, fine).get()[3]["y"].item()) - 1
                cluster.watch.deadline_s = 3.0
                with pytest.raises(TimeoutError):
                    behind.get(timeout=0.3)
        assert lost.value.failure.rank == 1
        words = "no progress for more than 3 s" if how == "blocked" else "has stopped"
        assert words in str(lost.value)
        assert steps > 0
        with pytest.raises(ActorLost):
            hangs.get()


@pytest.mark.ray
def test_a_pair_that_stands_still_is_no_hang_of_another(ray_session: None, tmp_path: Path) -> None:
    """Pair (0, 1) computes for longer than the deadline, pair (2, 3) waits for somebody outside all
    that time, and nobody waits for it."""
    go, free = tmp_path / "go", tmp_path / "free"
    with launch_cluster(SIZE, backend="ray", deadline_s=120.0) as cluster, clock_of(cluster, 1):
        assert isinstance(cluster, RayCluster)
        stands = run(cluster, cluster.load(among((2, 3), "waits")), free)
        busy = run(cluster, cluster.load(among((0, 1), "spins")), go)
        await_places(cluster, {0: 2, 1: 0, 2: 2, 3: 0})
        cluster.watch.deadline_s = 1.5
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while not caught:  # then both pairs have stood still for longer than the deadline
                with pytest.raises(TimeoutError):
                    busy.get(timeout=0.3)
        with pytest.raises(TimeoutError):
            busy.get(timeout=2.0)
        assert "has computed for more than 1.5 s" in str(caught[0].message)
        assert str(caught[0].message).startswith("rank 1")
        cluster.watch.deadline_s = 120.0
        go.touch()
        assert busy.get()[0]["s"].item() == 4
        free.touch()
        assert stands.get()[2]["s"].item() == 4


# -- against brute force: `python -m tests.daft.explore --sequences` tries all of them -------------


@pytest.mark.slow
def test_every_sequence_of_runs_of_a_sample() -> None:
    count, draw = Counter[object](), random.Random(0)
    for runs in (*exhaustive(2, 3, every=3), *exhaustive(3, 3, every=97)):
        assert wrong(runs) is None, runs
        if (found := spoilt(runs, draw)) is not None:
            count.update(zip(("order", "lost"), found, strict=True))
    # and nothing helps where a rank has another order, or a run is half submitted
    assert count["lost", HANGS] == count["order", HANGS] + count["order", "other values"] > 20
    assert count.total() == 2 * count["lost", HANGS]


@pytest.mark.slow
def test_random_sequences_of_runs() -> None:
    drawn = Drawn(random.Random(0), programs=40)
    for _ in range(40):
        runs = drawn.sequence()
        assert wrong(runs) is None, runs


# -- as users see it -------------------------------------------------------------------------------


@pytest.mark.ray
def test_compiled_functions_on_disjoint_ranks(ray_session: None, tmp_path: Path) -> None:
    """While one rank is in a call, a function on the other is captured, loaded, run and read."""
    go, begun = tmp_path / "go", tmp_path / "begun"
    one, other = dt.Mesh(tp=1, name="one"), dt.Mesh(tp=1, name="other")
    x = torch.randn(4, 4)
    with dt.launch(one, other, backend="ray") as session:
        cluster = session.launch.cluster
        slow = dt.distribute(x, one)
        hold = cluster.load(held_up(begun, go))
        held = cluster.run(hold, [{"x": torch.ones(1)}, {}])
        wait_for_file(str(begun))
        late = dt.compile(lambda x: x @ x, one)(slow)
        fast = dt.compile(lambda x: (x @ x).relu(), other)
        for _ in range(3):
            y = fast(dt.distribute(x, other))
            torch.testing.assert_close(y.full_tensor(), (x @ x).relu())
            torch.testing.assert_close((y + 1).sum().item(), (x @ x).relu().add(1).sum().item())
        assert not held.done()
        go.touch()
        torch.testing.assert_close(late.full_tensor(), x @ x)
        moved = dt.transfer(late, other)
        torch.testing.assert_close(moved.full_tensor(), x @ x)


def held_up(begun: Path, go: Path) -> Program:
    """Rank 0 of two says that it has begun, and waits for a file."""
    source = "def forward(x):\n    begun.touch()\n    wait_for_file(go)\n    return (x,)"
    hold = function("hold", source, wait_for_file=wait_for_file, begun=begun, go=str(go))
    calls: list[list[Instruction]] = [[Call("hold", ("x",), ("y",))], []]
    return program(*calls, functions=[hold], inputs=[("x",), ()], outputs=[("y",), ()])
