"""Tests failed runs and the commit point: what the verifier refuses, and what engines do."""

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
    Free,
    Instruction,
    Label,
    Mode,
    Program,
    ProgramError,
    TaskError,
    Vote,
    Wait,
    launch_cluster,
    parse_instructions,
    verify,
)
from tests.daft.programs import function, program
from tests.daft.undo import (
    AGAIN,
    AGREE,
    BOTH,
    COMMIT,
    FAMILIES,
    NOTED,
    VOTE,
    WRITE,
    Small,
    accepted,
    built,
    disagreement,
    exhaustive,
    random_program,
    torn,
)

SUM = ("start", 0), ("wait", 0)
SOUND = Small((BOTH,), ((("call", 0), VOTE, *SUM, COMMIT, WRITE),) * 2)


def test_vote_and_commit_text_parses_back() -> None:
    items = (
        Vote("a b", label=Label("x")),
        Commit("v.tp", source="net.py:1"),
        Vote("v"),
        Commit("v"),
        Vote("v", ("faults.0", "faults.1")),
        Commit("v", "rank.skip"),
    )
    assert parse_instructions("\n".join(map(_text, items))) == items
    assert _text(items[2]) == "v = vote" and _text(items[3]) == "commit v"
    assert _text(items[4]) == "v = vote on faults.0, faults.1"
    assert _text(items[5]) == "rank.skip = commit v"


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
def test_verifier_refuses_unsound_votes_and_commits(
    steps: tuple[tuple[str, int], ...], said: str
) -> None:
    verify(built(SOUND))
    with pytest.raises(ProgramError, match=said):
        verify(built(moved(1, *steps)))


def test_verifier_refuses_vote_sent_in_another_dtype() -> None:
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


@pytest.mark.default("a sum")
@pytest.mark.parametrize("family", ["a sum", "a sum, no vote of a rank"])
def test_verifier_agrees_with_brute_force_on_all_orders_of_small_program(family: str) -> None:
    found = list(exhaustive(*FAMILIES[family]))
    assert len(found) == {"a sum": 900, "a sum, no vote of a rank": 360}[family]
    assert sum(map(accepted, found)) == (family == "a sum")
    assert [small for small in found if disagreement(small)] == []


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32))
def test_verifier_agrees_with_brute_force_on_random_failing_programs(seed: int) -> None:
    assert disagreement(random_program(random.Random(seed))) is None


def test_explorer_reports_torn_writes() -> None:
    """Writes are torn if some ranks have written and others have not, or if a rank has written
    although a call failed."""
    assert torn(SOUND) is None
    assert torn(moved(0, WRITE, VOTE, *SUM, COMMIT)) is not None
    assert torn(moved(0, VOTE, AGAIN, *SUM, COMMIT, WRITE)) == {(0, 1)}


# -- clusters --------------------------------------------------------------------------------------


MODES: list[Mode] = ["compiled", "interpreted", "timed"]


def failing(alive: weakref.WeakSet[torch.Tensor], *, in_a_users: bool) -> Program:
    """Return a program whose call makes a tensor, records it and raises, in generated code or in a
    user's function that holds the tensor."""
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
def test_stored_error_keeps_no_values_of_its_run_alive(mode: Mode) -> None:
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
def test_host_releases_values_of_failed_run(mode: Mode) -> None:
    """The exception holds frames of a user's function with its values; the host holds neither."""
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
