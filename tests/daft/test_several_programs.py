"""Several programs on the same actors: what they share, that runs may overlap, what order does."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import PrefixStore

from dtensor import daft
from dtensor.daft import (
    Bound,
    Buffer,
    Call,
    Cluster,
    Collective,
    Free,
    Instruction,
    Program,
    ProgramError,
    Recv,
    Send,
    Stored,
    Wait,
    interference,
    launch_cluster,
)
from dtensor.daft.ray.bootstrap.rendezvous import SignedStore
from dtensor.daft.ray.transports.connect import Rendezvous, connect_cpu, lost_key, meet
from tests.daft.actor_classes import Model, same
from tests.daft.pairs import (
    HANGS,
    built,
    drawn_pair,
    pairs,
    spoilt,
    with_state,
    without_state,
    wrong,
)
from tests.daft.programs import F32, function, program, same_bits

X = torch.arange(8.0).reshape(2, 4) / 10
ADD = function("add", "def forward(w, x):\n    w += x\n    return ()")
MUL = function("mul", "def forward(w, x):\n    return (w * x,)")


def move(
    shape: tuple[int, ...], dtype: torch.dtype, name: str, size: int = 2, state: str = "w"
) -> Program:
    """Rank 0 sends `x` to rank 1, which adds it to its state; all ranks then sum up their `y`."""
    b, r = Buffer(shape, dtype), Buffer((2, *shape), dtype)
    group = tuple(range(size))
    total = Collective("all_reduce", group, ("y",), ("s",), (r,), (r,), "sum", "c")
    lists: list[list[Instruction]] = [
        [Send("x", 1, "c", b), total, Wait(("x", "s"))],
        [
            Recv("x", 0, "c", b),
            total,
            Wait(("x",)),
            Call("add", (state, "x"), (), (state,), source=f"{name}.py:7: w += x"),
            Wait(("s",)),
            Free(("x",)),
        ],
        *[[total, Wait(("s",))]] * (size - 2),
    ]
    made = program(
        *lists,
        functions=[ADD],
        inputs=[("x", "y"), *[("y",)] * (size - 1)],
        outputs=[("s",)] * size,
        state=[(), (state,), *[()] * (size - 2)],
    )
    return replace(made, name=name)


def scale(name: str = "scale", size: int = 2, state: str = "w") -> Program:
    """Rank 1 gives its state times what it is fed; on other ranks there is nothing to do."""
    call = Call("mul", (state, "x"), ("y",), source="scale.py:3: return w * x")
    more: list[tuple[()]] = [()] * (size - 2)
    made = program(
        [],
        [call],
        *more,
        functions=[MUL],
        inputs=[(), ("x",), *more],
        outputs=[(), ("y",), *more],
        state=[(), (state,), *more],
    )
    return replace(made, name=name)


# -- the verdict -----------------------------------------------------------------------------------


def test_what_they_share_and_what_follows() -> None:
    found = interference(move((2,), F32, "move"), scale())
    assert not found.independent and not found.commutes
    assert_expected_inline(
        str(found),
        """\
interference of move and scale
  may overlap    yes, submitted in one order
  timing         changes no result
  order          decides the results: 1 conflict in state
  actors         rank 1
  channels       none in both
  conflicts in state
    w of rank 1, read-write
      move writes it at (rank 1, instr 3 call add(w, x) writes w)  move.py:7: w += x
      scale reads it at (rank 1, instr 0 y = call mul(w, x))  scale.py:3: return w * x""",
    )
    found = interference(scale("one"), scale("other"))
    assert found.commutes and not found.independent and found.actors == ("rank 1",)
    found = interference(move((2,), F32, "move"), move((3, 1), torch.int64, "count"))
    assert [key[1:] for key in found.channels] == [("c", "collective"), ("c", "transfer")]
    (conflict,) = found.conflicts
    assert (conflict.kind, conflict.actor, conflict.value) == ("write-write", "rank 1", "w")


def test_what_runs_are_bound_to_is_state_too() -> None:
    square = program([Call("mul", ("x", "x"), ("y",))], functions=[MUL], inputs=[("x",)],
                     outputs=[("y",)])  # fmt: skip
    bare = replace(square, name="bare")
    made, used = Bound(square, keep={"y": "h"}), Bound(bare, stored={"x": "h"})
    assert interference(square, bare).commutes
    assert interference(used, used).commutes  # both only read it
    (conflict,) = interference(made, used).conflicts
    assert str(conflict) == (
        "h of rank 0, read-write\n"
        "      test writes it at as its runs are bound\n"
        "      bare reads it at (rank 0, instr 0 y = call mul(x, x))"
    )
    with launch_cluster(1) as cluster:  # as it is said: the order counts
        handle = cluster.load(square)
        cluster.put([{"h": torch.tensor(3.0)}])
        for expected in (9.0, 81.0):
            cluster.run(handle, [{"x": Stored("h")}], keep={"y": "h"})
            assert cluster.get([("h",)]).get() == [(torch.tensor(expected),)]


def test_compiled_functions() -> None:
    with daft.launch():
        a, b, c = (daft.spawn(Model, i, name=n) for i, n in enumerate("abc"))
        f = daft.compile(lambda x: b.execute(a.execute(x))).program(X)
        g = daft.compile(lambda x: c.execute(b.execute(x))).program(X)
        h = daft.compile(lambda x: c.execute(x)).program(X)
        found = interference(f, g)
        assert found.actors == ("b",) and not found.channels  # connections of their own
        (conflict,) = found.conflicts
        assert (conflict.actor, conflict.kind) == ("b", "write-write")
        assert conflict.second.source is not None and "b.execute(x)" in conflict.second.source
        assert interference(f, h).independent and interference(f, h).commutes
        assert "none in both" in str(interference(f, h))
        with pytest.raises(TypeError, match="no actor in common: LoweredTasks, Program"):
            interference(f, scale())  # type: ignore[arg-type]


def test_what_no_cluster_loads_together() -> None:
    small = move((2,), F32, "small")
    sized = [replace(own, nbytes=(("w", 8),) if own.state else ()) for own in small.ranks]
    small = replace(small, ranks=tuple(sized))
    rank = replace(scale().ranks[1], nbytes=(("w", 16),))
    large = replace(scale("large"), ranks=(scale().ranks[0], rank))
    message = "'w' of rank 1 has 16 bytes in program 'large', and 8 in 'small'"
    with pytest.raises(ProgramError, match=message):
        interference(small, large)
    with launch_cluster(2) as cluster:
        handle = cluster.load(small)
        with pytest.raises(ProgramError, match=message):
            cluster.load(large)
        cluster.load(scale())  # it declares no size
        cluster.unload(handle)
        cluster.load(large)
    with pytest.raises(ProgramError, match="clusters of 2 and 1 ranks"):
        interference(small, program([]))


# -- against brute force: `python -m tests.daft.explore --pairs` tries all of them ----------------


@pytest.mark.slow
def test_pairs_of_programs_with_state() -> None:
    count = Counter[object]()
    for first, second in pairs(with_state(), every=193):
        assert wrong(first, second) is None, (first, second)
        count[interference(built(first), built(second)).commutes] += 1
        count[spoilt(first, second)] += 1
    # And no verdict helps where the ranks do not agree on the order.
    assert count == {False: 167, True: 33, HANGS: 193, "other values": 7}


@pytest.mark.slow
def test_pairs_of_programs_with_two_transfers() -> None:
    for first, second in pairs(without_state(), every=397):
        assert wrong(first, second) is None, (first, second)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_random_pairs(seed: int) -> None:
    assert wrong(*drawn_pair(random.Random(seed))) is None


# -- that they run ---------------------------------------------------------------------------------


def test_values_of_a_run_are_its_own() -> None:
    """One program's state and values kept by a run have names that are another's temporaries."""
    two = function("two", "def forward():\n    return (full((1,), 2.0),)", full=torch.full)
    other = program([Call("two", (), ("w",)), Free(("w",)), Call("two", (), ("h",))],
                    functions=[two], outputs=[("h",)])  # fmt: skip
    square = program([Call("mul", ("w", "w"), ("y",))], functions=[MUL], state=[("w",)],
                     outputs=[("y",)])  # fmt: skip
    with launch_cluster(1) as cluster:
        cluster.put([{"w": torch.tensor([3.0]), "h": torch.tensor([5.0])}])
        assert interference(other, square).commutes
        first, second = cluster.load(other), cluster.load(square)
        for _ in range(2):
            assert cluster.run(first, [{}]).get()[0]["h"].item() == 2
            assert cluster.run(second, [{}]).get()[0]["y"].item() == 9
        assert cluster.get([("h",)]).get() == [(torch.tensor([5.0]),)]


SHAPES = (((2,), F32), ((3, 1), torch.int64), ((40_000,), F32), ((0,), F32))


def run_alternately(cluster: Cluster, rounds: int = 3) -> None:
    """Programs of other shapes and dtypes on one channel and group, and between them one on rank 1
    alone, which reads state of another's; nothing is read before all runs are submitted."""
    size = cluster.size
    programs = [move(*each, f"move{i}", size, f"w{i}") for i, each in enumerate(SHAPES)]
    for one, other in itertools.combinations(programs, 2):
        found = interference(one, other)
        assert found.commutes and len(found.channels) == 2
    handles = [cluster.load(each) for each in programs]
    read = cluster.load(scale("read", size, "w0"))
    assert not interference(programs[0], read.program).commutes
    state = {f"w{i}": torch.zeros(shape, dtype=dtype) for i, (shape, dtype) in enumerate(SHAPES)}
    cluster.put([state if rank == 1 else {} for rank in range(size)])
    futures: list[tuple[daft.Future, torch.Tensor, daft.Future, int]] = []
    for k in range(rounds):
        for handle, (shape, dtype) in zip(handles, SHAPES, strict=True):
            ys = [(torch.randn(2, *shape) * 9).to(dtype) for _ in range(size)]
            fed: list[dict[str, object]] = [{"y": y} for y in ys]
            fed[0]["x"] = torch.full(shape, k + 1, dtype=dtype)
            total = ys[0]
            for y in ys[1:]:
                total = total + y
            future = cluster.run(handle, fed)
            factor = [{"x": torch.tensor(2.0)} if r == 1 else {} for r in range(size)]
            futures.append((future, total, cluster.run(read, factor), k + 1))
    for future, total, scaled, k in futures:
        assert all(same_bits(found["s"], total) for found in future.get())
        assert scaled.get()[1]["y"].tolist() == [k * (k + 1.0)] * 2  # 2 (1 + 2 + ... + k)
    for handle in (*handles, read):
        cluster.unload(handle)
    cluster.delete([tuple(state) if rank == 1 else () for rank in range(size)])


def test_a_channel_of_programs_with_other_shapes_and_dtypes() -> None:
    with launch_cluster(3, seed=3) as cluster:
        run_alternately(cluster)


def test_threads_submit_in_one_order() -> None:
    with launch_cluster(2) as cluster:
        submit_from_threads(cluster)


def submit_from_threads(cluster: Cluster, rounds: int = 6) -> None:
    """Two programs on all ranks, each from a thread of its own: actors that saw them in different
    orders would wait for each other."""
    b, size = Buffer((), F32), cluster.size
    results: list[list[float]] = []
    failures: list[BaseException] = []

    def submit(channel: str, value: float) -> None:
        try:
            total = Collective(
                "all_reduce", tuple(range(size)), ("x",), ("s",), (b,), (b,), "sum", channel
            )
            names = [("x",)] * size, [("s",)] * size
            made = program(*[[total, Wait(("s",))]] * size, inputs=names[0], outputs=names[1])
            handle = cluster.load(made)
            fed = [{"x": torch.tensor(value + rank)} for rank in range(size)]
            futures = [cluster.run(handle, fed) for _ in range(rounds)]
            results.append([future.get()[0]["s"].item() for future in futures])
            cluster.unload(handle)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=submit, args=(c, v)) for c, v in (("c", 10.0), ("d", 20.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    whole = sum(range(size))
    assert sorted(results) == [[size * v + whole] * rounds for v in (10.0, 20.0)]


def alternate(backend: daft.Backend, compiled: bool) -> list[Any]:
    """Three functions over overlapping actors, submitted in turns; what they make is read last."""
    with daft.launch(backend):
        a, b, c = (daft.spawn(Model, i) for i in range(3))
        d = daft.spawn(Model, 3, host=b)

        def f(x: Any) -> Any:
            y = a.execute(x)
            return {"loss": b.train(y), "y": d.execute(b.execute(y))}

        def g(x: Any) -> Any:
            z = b.execute(x)
            return {"loss": c.train(z), "z": c.execute(z), "loaded": c.load(b.weights())}

        def h(x: Any) -> Any:
            return {"y": a.add([c.execute(x), d.execute(x)]), "loss": a.train(x)}

        steps = [daft.compile(fn) if compiled else fn for fn in (f, g, h)]
        made: list[dict[str, Any]] = [step(X + k) for k, step in enumerate(steps * 2)]
        made.append(g(made[3]["y"]))  # one interpreted, among them
        made += [step(made[4]["z"]) for step in steps]  # of what others have made
        return [{key: value.get() for key, value in each.items()} for each in made]


def test_compiled_functions_alternate() -> None:
    assert same(alternate("inprocess", True), alternate("inprocess", False))


@pytest.mark.slow
def test_a_process_may_join_a_program_late_unless_it_is_lost() -> None:
    """It is in a method of another program, perhaps for hours."""
    store = SignedStore.open("127.0.0.1", b"secret")

    def join(prefix: str) -> None:
        own = SignedStore.join("127.0.0.1", store.port, b"secret", timedelta(seconds=600))
        both = Rendezvous(
            address="",
            port=0,
            secret=b"",
            prefix=prefix,
            hosts=(3, 7),
            host_of=(0, 1),
            tags={},
            connect=connect_cpu,
        )
        meet(own, PrefixStore(prefix, own), both, 0)

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(join, "program0")
        with pytest.raises(TimeoutError):
            late.result(0.5)
        PrefixStore("program0", store).set("here1", "")
        late.result(600)
        lost = pool.submit(join, "program1")
        store.set(lost_key(7), "")
        with pytest.raises(RuntimeError, match="process 7 was lost before it joined"):
            lost.result(600)


# -- on Ray ----------------------------------------------------------------------------------------


@pytest.mark.ray
def test_compiled_functions_alternate_on_ray(ray_session: None) -> None:
    assert same(alternate("ray", True), alternate("inprocess", False))


@pytest.mark.ray
def test_a_half_submitted_step(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that has it would wait for the other's part, and all behind it with it."""
    from dtensor.daft.ray.actors.session import RaySession

    with daft.launch("ray", deadline_s=120.0):
        a, b = daft.spawn(Model, 1, name="a"), daft.spawn(Model, 2, name="b")
        step = daft.compile(lambda x: a.add([x, b.execute(a.execute(x))]))
        step(X).get()
        number, asked = RaySession._number, list[str]()

        def interrupted(self: RaySession, title: str, *args: Any) -> int:
            asked.append(title)
            if len(asked) == 2:
                raise KeyboardInterrupt
            return number(self, title, *args)

        with monkeypatch.context() as patch:
            patch.setattr(RaySession, "_number", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(X)
        with pytest.raises(daft.ActorLost, match="actor 'a'.*a step was half submitted"):
            step(X)
        assert same(b.execute(X).get(), X @ Model(2).weight.detach())
