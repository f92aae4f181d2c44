"""Tests the part of a program that one host receives: its own instructions, facts about the
whole, and its size.
"""

from __future__ import annotations

import re

import pytest
import torch

from dtensor.daft import Buffer, Call, Commit, Recv, Send, TaskError, Wait
from dtensor.daft.ir.host_program import HostProgram, host_programs
from dtensor.daft.ir.instructions import Instruction
from dtensor.daft.ray.ranks.ranks import packed
from dtensor.daft.remote_exceptions import reason_of
from dtensor.daft.run.engine import Engine
from dtensor.daft.run.transport import LocalTransport
from dtensor.daft.run.worker import Counted, HostRun, Stored
from dtensor.daft.undo.failed_run import UndoneRun
from dtensor.daft.undo.rollback import TableChange
from dtensor.daft.verification.pairing import merge_sites
from tests.daft.programs import function, parts_of, program

NOOP = function("noop", "def forward(x):\n    return (x + 1,)")
WRITE = function("write", "def forward(x):\n    x += 1\n    return ()")


def own_of(*lists: list[Instruction], state: list[tuple[str, ...]]) -> list[HostProgram]:
    made = program(*lists, functions=[NOOP, WRITE], state=state)
    hosts = tuple((rank,) for rank in range(made.size))
    return list(host_programs(made, hosts, merge_sites(made, hosts)))


def test_host_program_has_only_its_lists_and_their_functions() -> None:
    call: list[Instruction] = [Call("noop", ("w",), ("v",))]
    first, second, third = own_of(
        call, [Call("write", ("w",), (), ("w",))], [], state=[("w",), ("w",), ("w",)]
    )
    assert list(first.ranks) == [0] and first.size == 3
    assert [name for name, _ in first.functions] == ["noop"]
    assert [name for name, _ in second.functions] == ["write"]
    assert third.ranks[2].state == ("w",) and not third.functions and not third.sites


def test_instructions_of_other_ranks_decide_whether_run_can_be_undone() -> None:
    """Rank 0 makes the same calls in all cases."""
    call: list[Instruction] = [Call("noop", ("w",), ("v",))]
    write: list[Instruction] = [Call("write", ("w",), (), ("w",))]
    alone, _ = own_of(call, [], state=[("w",), ("w",)])
    reading, _ = own_of(call, list(call), state=[("w",), ("w",)])
    writing, _ = own_of(call, write, state=[("w",), ("w",)])
    assert (alone.alone, reading.alone, writing.alone) == (True, False, False)
    assert (alone.undoable, reading.undoable, writing.undoable) == (True, True, False)
    voting, _ = own_of(call, [Commit("w")], state=[("w",), ("w",)])
    assert voting.commits and not writing.commits
    buffer = Buffer((2,), torch.float32)
    sends: list[Instruction] = [Send("w", 2, "c", buffer), Wait(("w",))]
    receives: list[Instruction] = [Recv("x", 1, "c", buffer), Wait(("x",))]
    sending, *_ = own_of(call, sends, receives, state=[("w",)] * 3)
    assert sending.communicates and not writing.communicates


@pytest.mark.parametrize(("writes", "undone"), [(False, True), (True, False)])
def test_failed_run_is_undone_unless_other_rank_may_have_written(
    writes: bool, undone: bool
) -> None:
    """Rank 0 raises. If rank 1 may have written by then, the run cannot be undone."""
    fails = function("noop", "def forward(x):\n    return (x.nothing,)")
    other = Call("write", ("w",), (), ("w",)) if writes else Call("noop", ("w",), ("v",))
    made = program(
        [Call("noop", ("w",), ("v",))], [other], functions=[fails, WRITE], state=[("w",)] * 2
    )
    hosts = ((0,), (1,))
    own = next(host_programs(made, hosts, merge_sites(made, hosts)))
    engine = Engine(own, {(0, "w"): torch.zeros(2)}, LocalTransport())
    if undone:
        assert isinstance(engine.run({0: {}}), UndoneRun)
    else:
        with pytest.raises(TaskError, match="nothing"):
            engine.run({0: {}})


class Stream:
    """A fake CUDA stream: reports whether its work is done, or raises the error that ended the
    context."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return False


ASSERTED = torch.AcceleratorError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    ("raised", "device", "answer", "is_lost"),
    [
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), "cuda:1", ASSERTED, True),
        (RuntimeError("Triton Error [CUDA]"), "cuda:1", RuntimeError("CUDA error"), True),
        (ValueError("bad data"), "cuda:1", ASSERTED, True),
        (RuntimeError("shapes differ"), "cuda:1", None, False),
        (torch.OutOfMemoryError("out of memory"), "cuda:1", None, False),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), "cpu", ASSERTED, False),
        (ASSERTED, "cpu", None, True),
    ],
)
def test_lost_gpu_is_reported_and_run_is_not_undone(
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    device: str,
    answer: Exception | None,
    is_lost: bool,
) -> None:
    """Libraries raise their own errors for a CUDA failure, so CUDA itself is queried."""
    asked: list[torch.device] = []

    def current_stream(device: torch.device) -> Stream:
        asked.append(device)
        return Stream(answer)

    def fail(x: object) -> None:
        raise raised

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    call = Call("noop", ("w",), ("v",))
    fails = function("noop", "def forward(x):\n    return (fail(x),)", fail=fail)
    made = program([call], functions=[fails], state=[("w",)])
    (own,) = host_programs(made, ((0,),), merge_sites(made, ((0,),)))
    there = torch.device(device)
    engine = Engine(own, {(0, "w"): torch.zeros(2)}, LocalTransport(), there)
    if not is_lost:
        assert isinstance(engine.run({0: {}}), UndoneRun)
    else:
        with pytest.raises(TaskError, match=re.escape(str(raised))) as caught:
            engine.run({0: {}})
        assert caught.value.__cause__ is raised
        said = f"This process can use cuda:1 no more: {reason_of(answer)}" if answer else ""
        assert said in str(caught.value)
    assert asked == ([there] if there.type == "cuda" else [])


def test_bytes_of_host_programs_grow_linearly_with_ranks() -> None:
    """Each rank has the same work, so twice as many ranks need twice as many bytes."""

    def sent(size: int) -> int:
        step: list[Instruction] = []
        for n in range(50):
            step.append(Call("noop", ("w" if not n else f"v{n - 1}",), (f"v{n}",)))
        made = program(*[list(step) for _ in range(size)], functions=[NOOP], state=[("w",)] * size)
        parts = packed(parts_of(made, [(rank,) for rank in range(size)]))
        return sum(len(own.data) + len(functions.data) for own, functions in parts)

    assert sent(8) <= 2.1 * sent(4)
    assert sent(64) <= 2.1 * sent(32)


def test_host_run_round_trips_as_plain_values() -> None:
    run = HostRun(
        7,
        3,
        {0: {"x": Stored("w")}},
        {"y": "z"},
        Counted("steps", -1, "n", takes=False, since=2),
        timed=True,
        returned=("y",),
        drop={0: ("old",)},
        change=TableChange(12, committed=11, taken=False),
    )
    plain = run.plain()
    assert HostRun.of(plain) == run
    assert {type(each) for each in plain} <= {int, bool, dict, tuple}
    assert {type(each) for each in plain[4]} <= {int, bool, str}
    assert HostRun.of(HostRun(1, 0, {}).plain()) == HostRun(1, 0, {}, keep={}, drop={})
