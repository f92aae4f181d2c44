"""Runs that fail, and the commit point: what the verifier refuses, and what engines make of it."""

from __future__ import annotations

import gc
import random
import traceback
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.daft import (
    Call,
    Collective,
    Commit,
    CommunicationError,
    DaftError,
    Free,
    Function,
    Instruction,
    Label,
    Mode,
    Program,
    ProgramError,
    Recv,
    Send,
    Stored,
    TaskError,
    Vote,
    Wait,
    launch_cluster,
    parse_instructions,
    verify,
)
from dtensor.daft.ir.instructions import WORD
from dtensor.daft.run.worker import Counted
from tests.daft.programs import function, program
from tests.daft.undo import (
    AGAIN,
    BOTH,
    COMMIT,
    FAMILIES,
    VOTE,
    WRITE,
    Small,
    accepted,
    disagreement,
    exhaustive,
    played_wrong,
    random_program,
    torn,
)

SUM = ("start", 0), ("wait", 0)
SOUND = Small((BOTH,), ((("call", 0), VOTE, *SUM, COMMIT, WRITE),) * 2)


def test_the_text_of_votes() -> None:
    items = (
        Vote("a b", label=Label("x")),
        Commit("v.tp", source="net.py:1"),
        Vote("v"),
        Commit("v"),
    )
    assert parse_instructions("\n".join(map(_text, items))) == items
    assert _text(items[2]) == "v = vote" and _text(items[3]) == "commit v"


def _text(item: Instruction) -> str:
    from dtensor.daft.ir.text import format_instruction

    return format_instruction(item)


def moved(rank: int, *steps: tuple[str, int]) -> Small:
    lists = list(SOUND.lists)
    lists[rank] = (("call", 0), *steps)
    return Small(SOUND.transfers, tuple(lists))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((WRITE, VOTE, *SUM, COMMIT), r"writes state 's' before the rank's commit point"),
        ((VOTE, *SUM, WRITE, COMMIT), r"writes state 's' before the rank's commit point"),
        ((VOTE, AGAIN, *SUM, COMMIT, WRITE), r"between the rank's vote and its commit point"),
        ((*SUM, VOTE, COMMIT, WRITE), r"those of ranks \[1\] are not in it"),
        ((*SUM, COMMIT, WRITE), r"the rank has not voted"),
        ((VOTE, *SUM), r"ends without a commit point"),
        ((VOTE, *SUM, COMMIT, COMMIT), r"the rank commits twice"),
        ((VOTE, VOTE, *SUM, COMMIT), r"defined twice"),
    ],
)
def test_what_the_verifier_refuses(steps: tuple[tuple[str, int], ...], said: str) -> None:
    verify_small(SOUND)
    with pytest.raises(ProgramError, match=said):
        verify_small(moved(1, *steps))


def verify_small(small: Small) -> None:
    from tests.daft.undo import built

    verify(built(small))


def test_a_vote_is_sent_as_it_is() -> None:
    from dtensor.daft import Buffer

    wide = Buffer((), torch.float64)
    items = [
        Vote("v"),
        Collective("all_reduce", (0, 1), ("v",), ("s",), (wide,), (wide,), "sum", "c"),
        Wait(("s",)),
        Commit("s"),
        Free(("v", "s")),
    ]
    with pytest.raises(ProgramError, match=r"a vote is sent as f64\[\]"):
        verify(program(items, items))


# -- against brute force: `python -m tests.daft.explore --undo` tries more -------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["a sum", "a sum, no vote of a rank"])
def test_every_order_of_a_small_program(family: str) -> None:
    found = list(exhaustive(*FAMILIES[family]))
    assert len(found) == {"a sum": 900, "a sum, no vote of a rank": 360}[family]
    assert sum(map(accepted, found)) == (family == "a sum")
    assert [small for small in found if disagreement(small)] == []


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32))
def test_random_programs_that_fail(seed: int) -> None:
    draw = random.Random(seed)
    small = random_program(draw)
    assert disagreement(small) is None
    if accepted(small):
        assert played_wrong([small] * 3, draw) is None


def test_the_explorer_finds_what_is_torn() -> None:
    assert torn(SOUND) is None
    assert torn(moved(0, WRITE, VOTE, *SUM, COMMIT)) is not None
    assert torn(moved(0, VOTE, AGAIN, *SUM, COMMIT, WRITE)) == {(0, 1)}


# -- clusters --------------------------------------------------------------------------------------

CHECKED = Function(
    name="checked",
    source="def forward(x):\n    1 / x\n    return (x + 1,)",
    lines=(None, "net.py:2: 1 / x", None),
)
ADD = function("add", "def forward(w, y):\n    w.add_(y)\n    return ()")
NOTED = function("noted", "def forward(w, n):\n    w.fill_(n)\n    return ()")
AGREE = [
    Vote("v"),
    Collective("all_reduce", (0, 1), ("v",), ("s",), (WORD,), (WORD,), "sum", "agree"),
    Wait(("s",)),
    Commit("s"),
    Free(("v", "s")),
]


def update() -> Program:
    """Both ranks add to `w` what rank 0 makes of its number, which must not be 0."""
    lists = (
        [Call("checked", ("x",), ("y",), label=Label("F0")), Send("y", 1, "c", WORD), Wait(("y",))],
        [Recv("y", 0, "c", WORD), Wait(("y",))],
    )
    end = [*AGREE, Call("add", ("w", "y"), (), ("w",))]
    return program(
        *([*items, *end] for items in lists),
        functions=[CHECKED, ADD],
        inputs=[("x",), ()],
        outputs=[("y",)] * 2,
        state=[("w",)] * 2,
    )


def feed(x: object) -> list[dict[str, object]]:
    return [{"x": x}, {}]


MODES: list[Mode] = ["compiled", "interpreted", "timed"]


@pytest.mark.parametrize("mode", MODES)
def test_no_rank_writes(mode: Mode) -> None:
    with launch_cluster(2) as cluster:
        cluster.put([{"w": torch.zeros(())}] * 2)
        handle = cluster.load(update())
        futures = [cluster.run(handle, feed(x), mode=mode) for x in (torch.tensor(4.0), 0, 1.0)]
        with pytest.raises(TaskError, match=r"(?s)run 1: ZeroDivisionError.*at net.py:2") as caught:
            futures[1].get()
        assert caught.value.failure.rank == 0
        with pytest.raises(CommunicationError, match="'y' is a float; declared: f32"):
            futures[2].get()
        assert futures[0].get()[1]["y"].item() == 5
        assert cluster.failure is None
        cluster.run(handle, feed(torch.tensor(2.0)), mode=mode).get()
        assert [w.item() for (w,) in cluster.get([("w",)] * 2).get()] == [8, 8]


def test_what_a_failed_run_was_to_keep() -> None:
    """It is poisoned, and so is what is made of it; what was there before stays."""
    with launch_cluster(2) as cluster:
        cluster.put([{"w": torch.zeros(()), "old": torch.ones(())}] * 2)
        handle = cluster.load(update())
        for name in ("new", "old"):
            cluster.run(handle, feed(0), keep={"y": name})
        assert cluster.get([("old",)] * 2).get() == [(torch.ones(()),)] * 2
        for names in ([("new",), ()], [(), ("new",)]):  # rank 1 only heard of it
            with pytest.raises(TaskError, match=r"rank 0 .* run 0: ZeroDivisionError"):
                cluster.get(names).get()
        later = cluster.run(handle, feed(Stored("new")), keep={"y": "newer"})
        with pytest.raises(TaskError, match="run 0: ZeroDivisionError"):
            later.get()
        with pytest.raises(TaskError, match="run 0: ZeroDivisionError"):
            cluster.get([(), ("newer",)]).get()
        with pytest.raises(TaskError, match="run 1: ZeroDivisionError"):
            cluster.check_undone()  # nobody has read that
        cluster.check_undone()
        cluster.delete([("new", "newer")] * 2)
        assert cluster.failure is None


def failing(alive: weakref.WeakSet[torch.Tensor], *, in_a_users: bool) -> Program:
    """Its call makes a tensor, notes it and raises, in the generated code or in a user's function
    that has the tensor."""
    source = "def forward(x):\n    y = x + 1\n    note(y)\n    [][3]\n    return (y,)"

    def note(y: torch.Tensor) -> None:
        alive.add(y)
        if in_a_users:
            raise IndexError("a user's")

    items = [Call("failing", ("x",), ("y",)), *AGREE, Call("noted", ("w", "n"), (), ("w",))]
    return program(
        items,
        items,
        functions=[function("failing", source, note=note), NOTED],
        inputs=[("x", "n")] * 2,
        outputs=[("y",)] * 2,
        state=[("w",)] * 2,
    )


@pytest.mark.parametrize("mode", MODES)
def test_errors_that_are_kept_keep_no_values_of_their_runs(mode: Mode) -> None:
    x, alive = torch.ones(3), weakref.WeakSet[torch.Tensor]()
    with launch_cluster(2) as cluster:
        cluster.put([{"w": torch.zeros(())}] * 2)
        handle = cluster.load(failing(alive, in_a_users=False))
        kept: list[TaskError] = []
        for _ in range(3):
            with pytest.raises(TaskError, match="IndexError") as caught:
                cluster.run(handle, [{"x": x, "n": 0}] * 2, mode=mode, keep={"y": "new"}).get()
            kept.append(caught.value)
            del caught
        gc.collect()
        assert not alive
        for error in kept:  # the lines are there
            cause = error.__cause__
            assert cause is not None
            (frame,) = traceback.extract_tb(cause.__traceback__)
            assert (frame.filename, frame.lineno) == ("<dtensor failing>", 4)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_failed_run_computed_is_let_go(mode: Mode) -> None:
    """The exception keeps frames of a user's function, with its values; the host keeps neither."""
    x, alive = torch.ones(3), weakref.WeakSet[torch.Tensor]()
    with launch_cluster(2) as cluster:
        cluster.put([{"w": torch.zeros(())}] * 2)
        handle = cluster.load(failing(alive, in_a_users=True))
        for _ in range(3):
            with pytest.raises(TaskError, match="a user's") as caught:
                cluster.run(handle, [{"x": x, "n": 0}] * 2, mode=mode, keep={"y": "new"}).get()
            assert caught.value.__cause__ is not None
            frames = [f for f, _ in traceback.walk_tb(caught.value.__cause__.__traceback__)]
            assert [f.f_code.co_name for f in frames] == ["forward", "note"]
            assert any(frames[1].f_locals["y"] is y for y in alive)
            del caught, frames
        cluster.put([{"w": torch.zeros(())}] * 2)
        with pytest.raises(TaskError):  # the next run lets go of what was before
            cluster.run(handle, [{"x": "no tensor", "n": 0}] * 2, mode=mode).get()
        assert not alive


def test_the_number_of_a_run_that_failed_is_the_next_ones() -> None:
    items = [
        Call("checked", ("x",), ("y",)),
        *AGREE,
        Call("noted", ("w", "n"), (), ("w",)),
        Free(("y",)),
    ]
    made = program(
        items,
        items,
        functions=[CHECKED, NOTED],
        inputs=[("x", "n")] * 2,
        state=[("w",)] * 2,
    )
    with launch_cluster(2) as cluster:
        cluster.put([{"w": torch.zeros(())}] * 2)
        handle = cluster.load(made)

        def number(submitted: int, known: int, x: float, *, takes: bool = True) -> float:
            fed = [{"x": x, "n": submitted - known}] * 2
            cluster.run(handle, fed, counted=Counted("steps", known, "n", takes))
            return cluster.get([("w",), ()]).get()[0][0].item()

        assert number(5, 0, 1.0) == 5
        assert number(6, 0, 0.0) == 5  # fails
        assert number(7, 0, 1.0) == 6  # and the controller does not know
        assert number(8, 1, 1.0) == 7
        assert number(9, 1, 0.0, takes=False) == 7  # fails, and has no number of its own
        assert number(9, 1, 1.0) == 8


def test_a_failure_after_the_commit_point_loses_the_state() -> None:
    with launch_cluster(2) as cluster:
        cluster.put([{"w": torch.zeros(3)}, {"w": torch.zeros(())}])
        handle = cluster.load(update())
        bad = cluster.run(handle, feed(torch.tensor(1.0)))
        bad.get()
        cluster.put([{"w": "no tensor"}, {}])
        with pytest.raises(TaskError, match="instruction 8 .*add.*AttributeError") as caught:
            cluster.run(handle, feed(torch.tensor(1.0))).get()
        assert cluster.failure is caught.value
        with pytest.raises(TaskError):
            cluster.put([{}, {}])


def test_without_a_commit_point_a_program_that_writes_cannot_be_undone() -> None:
    items = [Call("add", ("w", "x"), (), ("w",)), Call("checked", ("x",), ("y",)), Free(("y",))]
    made = program(items, functions=[CHECKED, ADD], inputs=[("x",)], state=[("w",)])
    with launch_cluster(1) as cluster:
        cluster.put([{"w": torch.zeros(())}])
        with pytest.raises(TaskError):
            cluster.run(cluster.load(made), [{"x": 0}]).get()
        assert isinstance(cluster.failure, DaftError)


def test_without_a_commit_point_others_keep_nothing_that_is_wrong() -> None:
    items = (
        [Call("checked", ("x",), ("y",)), Send("y", 1, "c", WORD), Wait(("y",))],
        [Recv("y", 0, "c", WORD), Wait(("y",))],
    )
    made = program(*items, functions=[CHECKED], inputs=[("x",), ()], outputs=[("y",)] * 2)
    with launch_cluster(2) as cluster:
        handle = cluster.load(made)
        with pytest.raises(TaskError):
            cluster.run(handle, feed(0)).get()
        assert cluster.failure is None  # what came back is not used
        with pytest.raises(TaskError):
            cluster.run(handle, feed(0), keep={"y": "kept"}).get()
        assert cluster.failure is not None  # rank 1 has a zero for it
