"""Tests several programs on the same actors: what they share, whether their runs may overlap, and
what their order changes.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

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
from dtensor.daft.cluster.counted_runs import CountedRuns
from dtensor.daft.ray.bootstrap.rendezvous import SignedStore
from dtensor.daft.ray.transports.connect import Rendezvous, connect_cpu, lost_key, meet
from dtensor.daft.run.worker import Counted
from tests.daft import sequences
from tests.daft.actor_classes import Model
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
from tests.daft.programs import F32, function, program

X = torch.arange(8.0).reshape(2, 4) / 10
ADD = function("add", "def forward(w, x):\n    w += x\n    return ()")
MUL = function("mul", "def forward(w, x):\n    return (w * x,)")


def move(
    shape: tuple[int, ...], dtype: torch.dtype, name: str, size: int = 2, state: str = "w"
) -> Program:
    """Return a program in which rank 0 sends `x` to rank 1, which adds it to its state; all ranks
    then sum their `y`."""
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
    """Return a program in which rank 1 returns its state times its input; others do nothing."""
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


def test_interference_names_shared_channels_and_conflicts() -> None:
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


def test_interference_counts_kept_and_stored_values_as_state() -> None:
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
    with launch_cluster(1) as cluster:  # as predicted, the order matters
        handle = cluster.load(square)
        cluster.put([{"h": torch.tensor(3.0)}])
        for expected in (9.0, 81.0):
            cluster.run(handle, [{"x": Stored("h")}], keep={"y": "h"})
            assert cluster.get([("h",)]).get() == [(torch.tensor(expected),)]


def test_interference_of_compiled_functions_names_shared_actors() -> None:
    with daft.launch():
        a, b, c = (daft.spawn(Model, i, name=n) for i, n in enumerate("abc"))
        f = daft.compile(lambda x: b.execute(a.execute(x))).program(X)
        g = daft.compile(lambda x: c.execute(b.execute(x))).program(X)
        h = daft.compile(lambda x: c.execute(x)).program(X)
        found = interference(f, g)
        assert found.actors == ("b",) and not found.channels  # separate connections
        (conflict,) = found.conflicts
        assert (conflict.actor, conflict.kind) == ("b", "write-write")
        assert conflict.second.source is not None and "b.execute(x)" in conflict.second.source
        assert interference(f, h).independent and interference(f, h).commutes
        assert "none in both" in str(interference(f, h))
        with pytest.raises(TypeError, match="no actor in common: LoweredTasks, Program"):
            interference(f, scale())  # type: ignore[arg-type]


def test_programs_with_conflicting_state_sizes_are_refused() -> None:
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
        cluster.load(scale())  # scale() declares no size
        cluster.unload(handle)
        cluster.load(large)
    with pytest.raises(ProgramError, match="clusters of 2 and 1 ranks"):
        interference(small, program([]))


# -- against brute force: `python -m tests.daft.explore --pairs` tries all of them ----------------


def test_sampled_program_pairs_with_state_match_brute_force() -> None:
    count = Counter[object]()
    for first, second in pairs(with_state(), every=193):
        assert wrong(first, second) is None, (first, second)
        count[interference(built(first), built(second)).commutes] += 1
        count[spoilt(first, second)] += 1
    # Ranks that do not agree on the order give wrong results whatever the verdict.
    assert count == {False: 271, True: 41, HANGS: 245, "other values": 67}


def test_sampled_program_pairs_with_two_transfers_match_brute_force() -> None:
    for first, second in pairs(without_state(), every=397):
        assert wrong(first, second) is None, (first, second)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_random_program_pairs_match_brute_force(seed: int) -> None:
    assert wrong(*drawn_pair(random.Random(seed))) is None


# -- that they run ---------------------------------------------------------------------------------


def test_temporaries_of_run_do_not_clash_with_state_of_other_program() -> None:
    """State of one program and values kept by a run have the same names as temporaries of another
    program."""
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


def test_process_may_join_program_late_unless_it_is_lost() -> None:
    """The process may be busy in a method of another program for hours."""
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


# -- programs of some ranks: `python -m tests.daft.explore --sequences` tries all of them --------


def test_program_members_are_ranks_with_instructions_or_state() -> None:
    call = [Call("mul", ("x", "x"), ("y",)), Free(("y",))]
    for state, members in (((), (0, 2)), (("w",), (0, 1, 2))):
        inputs, states = [("x",), (), ("x",)], [(), state, ()]
        made = program(call, [], call, functions=[MUL], inputs=inputs, state=states)
        assert made.members == members


def test_counted_runs_names_hosts_that_know_which_runs_were_undone() -> None:
    counting = CountedRuns()
    assert counting.hosts_to_ask("k", (0,)) == ()
    counting.add("k", 3, (0, 1), know_outcome=True)
    assert counting.hosts_to_ask("k", (0,)) == counting.hosts_to_ask("k", (0, 1)) == ()
    assert counting.hosts_to_ask("other", (2,)) == ()
    assert counting.hosts_to_ask("k", (1, 2)) == (0, 1)
    counting.settle("k", 5, {3})
    assert counting.hosts_to_ask("k", (1, 2)) == ()
    assert counting.with_known_undone(Counted("k", 0, "n")) == Counted("k", -1, "n", since=5)
    assert counting.with_known_undone(Counted("k", 1, "n")) == Counted("k", 0, "n", since=5)
    counting.add("k", 6, (0, 1), know_outcome=False)  # only the failed host knows the outcome
    assert counting.hosts_to_ask("k", (0,)) == (0, 1)
    counting.add("k", 7, (2,), know_outcome=True)
    assert counting.hosts_to_ask("k", (2,)) == (0, 1, 2)
    counting.settle("k", 7, {3, 6})  # asked before run 7 was submitted
    assert counting.with_known_undone(Counted("k", 2, "n")) == Counted("k", 0, "n", since=7)
    assert counting.hosts_to_ask("k", (2,)) == (0, 1, 2)
    counting.settle("k", 8, set())
    assert counting.hosts_to_ask("k", (0, 1, 2, 3)) == ()


def test_sampled_run_sequences_match_brute_force() -> None:
    count, draw = Counter[object](), random.Random(0)
    for runs in (*sequences.exhaustive(2, 3, every=3), *sequences.exhaustive(3, 3, every=97)):
        assert sequences.wrong(runs) is None, runs
        if (found := sequences.spoilt(runs, draw)) is not None:
            count.update(zip(("order", "lost"), found, strict=True))
    # a different order on one rank, or a half-submitted run, always fails
    assert count["lost", HANGS] == count["order", HANGS] + count["order", "other values"] > 20
    assert count.total() == 2 * count["lost", HANGS]


def test_random_run_sequences_match_brute_force() -> None:
    drawn = sequences.Drawn(random.Random(0), programs=40)
    for _ in range(40):
        runs = drawn.sequence()
        assert sequences.wrong(runs) is None, runs
