"""Tests that status names the hanging rank: the verifier's lists run with one rank held at an
instruction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.daft import Buffer, Call, Collective, Label, Program, Wait
from dtensor.daft.diagnosis.diagnosis import FIRST_S, LEAST_S, ObservedLaunch, diagnose, limit_s
from dtensor.daft.diagnosis.observation import Observation, Progress, ThreadSeen
from dtensor.daft.diagnosis.program_lines import ProgramLines
from dtensor.daft.ir.instructions import Recv, Send
from dtensor.daft.status import Status
from dtensor.daft.verification.verifier import verify
from tests.daft.programs import function, program
from tests.who_hangs.trials import Blocks, squares

ONE = Buffer((1,), torch.float32)
RUN = 7
NEVER = 1 << 30


@pytest.fixture(scope="module")
def training() -> Program:
    """The program of a step at tp=2, pp=2."""
    mesh = dt.Mesh(pp=2, tp=2)
    pins = {"*.up.weight": dict(tp=dt.Row()), "*.down.weight": dict(tp=dt.Column())}
    model = dt.parallelize(Blocks(), mesh, pins, stages={"pp": [["first*"], ["second*"]]})
    step = dt.train_step(
        model,
        squares,
        torch.optim.SGD(model.parameters(), lr=0.1),
        schedule=dt.OneFOneB(microbatches=4),
        clip_grad_norm=1.0,
    )
    with dt.launch(mesh) as session:
        float(step(torch.randn(8, 16)))
        return session.launch.cluster._handles[0].program  # type: ignore[attr-defined]


def chain(size: int) -> Program:
    """Return a program in which each rank calls a function, then all reduce their values."""
    group = tuple(range(size))
    sums = Collective(
        "all_reduce", group, ("y",), ("s",), (ONE,), (ONE,), "sum", "c", label=Label("add")
    )
    call = Call("f", ("x",), ("y",), source="net.py:3: y = f(x)")
    return program(
        *[[call, replace(sums, source="net.py:4: y.sum()"), Wait(("s",))]] * size,
        functions=[function("f", "def forward(x):\n    return (x,)")],
        inputs=[("x",)] * size,
        outputs=[("s", "y")] * size,
    )


def stuck(
    lines: ProgramLines, ends: Sequence[int], held: dict[int, int], unheard: dict[int, int]
) -> Any:
    """Return where all hosts end up if host h stops at position `held[h]` and its starts from
    `unheard[h]` on reach nobody."""
    at = [0] * len(ends)
    moved = True
    while moved:
        moved = False
        for h in range(len(ends)):
            while at[h] < ends[h] and at[h] != held.get(h, NEVER):
                line = lines.at(h, at[h])
                assert line is not None
                if not all(
                    at[other] > where and where < unheard.get(other, NEVER)
                    for _, other, where in line.partners
                ):
                    break
                at[h] += 1
                moved = True
    return at


def seen(host: int, position: int, end: int, **what: Any) -> Observation:
    state, cpu_s = what.pop("state", "S"), what.pop("cpu_s", 0.0)
    at = Progress(position if position < end else -1, 0, RUN, 0.1, 100 + host, 100 + host)
    at = replace(at, **(dict(running_s=1.0, standing_s=0.9, asked=RUN) | what))
    return Observation(host, at, ThreadSeen(state, cpu_s), 10.0)


def status_of(
    lines: ProgramLines, hosts: Any, found: Sequence[Observation], before: Any = None
) -> Status:
    earlier = [replace(s, moment=9.7, thread=replace(s.thread, cpu_s=0.0)) for s in found]
    launched = ObservedLaunch(
        title="Launch", pid=1, hosts=hosts, lines=lambda program: lines if program == 0 else None
    )
    return diagnose(launched, before or earlier, found)


@pytest.mark.default("hosts0")
@pytest.mark.parametrize("hosts", [((0,), (1,), (2,), (3,)), ((0, 1), (2, 3))])
def test_status_names_host_held_at_any_call(training: Program, hosts: Any) -> None:
    """Tried at every call of every host, in the lists of a training step."""
    lists = verify(training, hosts).lists
    lines, ends = ProgramLines.of(training, lists), [len(own) for own in lists]
    cases = 0
    for host, own in enumerate(lists):
        for position in range(len(own)):
            line = lines.at(host, position)
            assert line is not None
            if line.kind != "call":
                continue
            at = stuck(lines, ends, {host: position}, {})
            if at[host] != position:
                continue
            status = status_of(
                lines, hosts, [seen(h, *each) for h, each in enumerate(zip(at, ends))]
            )
            assert status.waited_for == line.rank == status.chain[-1]
            assert not status.hangs and "sleeps in a call" in status.reason
            waiting = {rank for h, ranks in enumerate(hosts) if at[h] < ends[h] for rank in ranks}
            for rank in waiting - set(hosts[host]):
                assert str(rank) in status.reason
            cases += 1
    assert cases > 80


def test_status_names_host_that_holds_back_message(training: Program) -> None:
    hosts = ((0,), (1,), (2,), (3,))
    lists = verify(training, hosts).lists
    lines, ends = ProgramLines.of(training, lists), [len(own) for own in lists]
    cases = 0
    for host, own in enumerate(lists):
        for position in range(0, len(own), 3):
            at = stuck(lines, ends, {}, {host: position})
            found = [seen(h, *each) for h, each in enumerate(zip(at, ends))]
            status = status_of(lines, hosts, found)
            if at == ends:
                assert status.waited_for is None
                continue
            assert status.waited_for == host and "is held back" in status.reason
            assert status.link is not None and status.link[0] == host
            assert str(status.link[1]) in status.reason
            cases += 1
    assert cases > 60


def test_program_lines_round_trip_through_json(training: Program) -> None:
    lists = verify(training).lists
    lines = ProgramLines.of(training, lists)
    again = ProgramLines.read(json.loads(json.dumps(lines.data())))
    assert again.program == training.name and again.at(0, len(lists[0])) is None
    kinds = set()
    for host, own in enumerate(lists):
        for position in range(len(own)):
            line = again.at(host, position)
            assert line is not None and line == lines.at(host, position)
            assert (line.rank, line.index) == own[position]
            kinds.add(line.kind)
            if line.kind == "wait":
                assert line.source or line.label.startswith("optimizer: all_reduce")
    assert kinds == {"call", "start", "wait", "other"}


ALL = chain(3)
HOSTS = ((0,), (1,), (2,))
LINES = ProgramLines.of(ALL, verify(ALL).lists)
"""Positions: 0 the call, 1 the start, 2 the wait, 3 the end."""


def at(*positions: int, **of_two: Any) -> Status:
    """Return the status of ranks 0, 1 and 2 at these positions; keywords describe rank 2."""
    found = [seen(h, p, 3, **(of_two if h == 2 else {})) for h, p in enumerate(positions)]
    return status_of(LINES, HOSTS, found)


def test_status_describes_what_each_rank_does() -> None:
    status = at(2, 2, 0, state="T")
    assert [each.text for each in status.ranks] == ["waits for rank 2"] * 2 + ["is stopped"]
    assert status.reason == "Rank 2 is stopped; ranks 0 and 1 wait for it."
    assert status.hangs and status.chain in ((0, 2), (1, 2))
    waiting, last = status.ranks[0], status.ranks[2]
    assert (waiting.does, waiting.peers, waiting.index) == ("waits", (2,), 2)
    assert (waiting.instruction, waiting.label, waiting.line) == (
        "wait s",
        "add",
        "net.py:4: y.sum()",
    )
    assert (last.instruction, last.line) == ("y = call f(x)", "net.py:3: y = f(x)")
    assert (last.run, last.program, last.since_s) == (RUN, "test", 0.9)
    assert at(2, 2, 0, state="").reason == "Rank 2 is lost; ranks 0 and 1 wait for it."
    busy = at(2, 2, 0, cpu_s=0.29)
    assert busy.reason == "Rank 2 computes in a call; ranks 0 and 1 wait for it."
    assert busy.ranks[2].cpu == pytest.approx(0.29 / 0.3) and busy.ranks[0].cpu == 0.0
    starved = at(2, 2, 0, cpu_s=0.004, state="R")
    assert starved.ranks[2].does == "computes"
    assert at(2, 2, 0).reason == "Rank 2 sleeps in a call; ranks 0 and 1 wait for it."
    frozen = at(2, 2, 0, beat_s=8.0)
    assert frozen.ranks[2].text == "is stopped: no heartbeat for 8.0 s" and frozen.hangs
    assert at(2, 0, 0, state="T").waited_for == 2  # rank 1 sleeps in its call, too


def test_status_names_rank_that_controller_has_not_called() -> None:
    """The other ranks are in run 7; this rank has ended run 6."""
    status = at(2, 2, 3, run=RUN - 1, asked=RUN - 1)
    assert status.waited_for == 2
    assert status.reason == (
        "Rank 2 is idle: the controller has not called it; ranks 0 and 1 wait for it."
    )
    status = at(2, 2, 3, run=RUN - 1)
    assert status.reason == "Rank 2 sleeps before run 7; ranks 0 and 1 wait for it."
    assert at(2, 2, 3, run=RUN - 1, standing_s=FIRST_S + 1).hangs and not status.hangs
    earlier = at(2, 2, 2, run=RUN - 1, program=3)  # in another program, whose lines are missing
    assert (earlier.waited_for, earlier.ranks[2].does) == (None, "sleeps")
    assert earlier.reason == (
        "Rank 2 sleeps, and its waits are not known: the lines of its program are "
        "missing; ranks 0 and 1 wait for it."
    )


def test_status_names_member_whose_message_is_missing() -> None:
    """All ranks have started the all_reduce; the waits name the member that is missing."""
    found = [seen(h, 2, 3, peer=1 if h != 1 else None) for h in range(3)]
    found[1] = seen(1, 3, 3)
    status = status_of(LINES, HOSTS, found)
    assert (status.waited_for, status.ranks[0].peers) == (1, (1,))
    assert status.link in ((1, 0), (1, 2)) and "ranks 0 and 2 wait for it" in status.reason
    unknown = status_of(LINES, HOSTS, [seen(0, 2, 3), seen(1, 3, 3), seen(2, 3, 3)])
    assert unknown.ranks[0].text == "waits for a message of ranks 1 and 2"
    stopped = status_of(LINES, HOSTS, [seen(0, 2, 3), seen(1, 3, 3), seen(2, 3, 3, state="T")])
    assert (stopped.waited_for, stopped.link) == (2, None)
    taking = status_of(LINES, HOSTS, [seen(h, 2, 3, cpu_s=0.2) for h in range(3)])
    assert {each.does for each in taking.ranks} == {"computes"}  # the ranks copy received data


def test_moving_rank_is_not_reported_as_hanging() -> None:
    found = [seen(0, 2, 3, running_s=99.0), seen(1, 2, 3), seen(2, 0, 3)]
    before = [replace(s, moment=9.7) for s in found]
    before[2] = replace(before[2], progress=replace(before[2].progress, run=RUN - 1))
    status = status_of(LINES, HOSTS, found, before)
    assert (status.waited_for, status.ranks[2].does, status.hangs) == (2, "moves on", False)


def test_run_is_hanging_after_several_times_its_usual_duration() -> None:
    assert not at(2, 2, 0, running_s=FIRST_S - 1).hangs
    assert at(2, 2, 0, running_s=FIRST_S + 1).hangs
    assert not at(2, 2, 0, running_s=FIRST_S + 1, cpu_s=0.3).hangs  # it may compile
    assert at(2, 2, 0, running_s=LEAST_S + 1, usual_s=0.01).hangs
    assert not at(2, 2, 0, running_s=11.0, usual_s=3.0).hangs
    usual = Progress(0, 0, 0, 0.0, usual_s=3.0)
    assert limit_s(usual) == 15.0


def test_status_handles_concurrent_runs_on_different_ranks() -> None:
    """Rank 2 computes in its own run; rank 0 waits for rank 1, which was not called."""

    def status(**of_two: Any) -> Status:
        alone = Progress(0, 0, 9, 0.1, 1, 1, running_s=1.0, standing_s=8.0, asked=9)
        far = Observation(2, replace(alone, **of_two), ThreadSeen("S", 0.2), 10.0)
        idle = seen(1, 3, 3, run=RUN - 1, asked=RUN - 1)
        return status_of(LINES, HOSTS, [seen(0, 2, 3), idle, far])

    assert (status().waited_for, status().hangs) == (1, False)
    late = status(running_s=60.0, usual_s=0.5)
    assert (late.waited_for, late.hangs) == (2, True)
    assert late.reason == "Rank 2 computes in a call; no other rank waits for it."


def test_status_reports_stopped_controller() -> None:
    found = [seen(h, 3, 3) for h in range(3)]
    launched = ObservedLaunch(
        title="Launch",
        pid=1,
        hosts=HOSTS,
        lines=lambda program: LINES,
        controller=(ThreadSeen("T", 1.0), ThreadSeen("T", 1.0)),
    )
    status = diagnose(launched, found, found)
    assert (status.waited_for, status.hangs, status.controller) == (None, True, "is stopped")
    assert status.reason.endswith("since run 7 has ended; the controller is stopped.")


def test_status_without_run_in_flight_says_so() -> None:
    status = at(3, 3, 3)
    assert (status.waited_for, status.chain, status.hangs) == (None, (), False)
    assert status.reason == (
        "No run is in flight: the controller has called no rank since run 7 has ended."
    )
    stopped = at(3, 3, 3, state="T")
    assert stopped.reason == "Rank 2 is stopped; no rank waits for it yet." and stopped.hangs
    new = [Observation(h, Progress(-1, -1, -1, None), ThreadSeen("", 0.0), 10.0) for h in range(3)]
    assert status_of(LINES, HOSTS, new).reason == "Ranks 0, 1 and 2 are starting."


def test_status_does_not_judge_rank_on_other_machine() -> None:
    far = Observation(2, Progress(-1, -1, -1, None, asked=RUN), ThreadSeen("", 0.0), 10.0)
    status = status_of(LINES, HOSTS, [seen(0, 2, 3), seen(1, 2, 3), far])
    assert status.waited_for is None
    assert status.reason == (
        "Ranks 0 and 1 wait for rank 2, or for a message of it: it is on another machine, and not "
        "seen from here."
    )
    near = status_of(LINES, HOSTS, [seen(0, 2, 3), seen(1, 0, 3), far])
    assert near.waited_for == 1


def test_status_prints_table_html_and_json() -> None:
    status = at(2, 2, 0, state="T", running_s=12.4, usual_s=0.0046)
    assert str(status) == (
        "Launch; run 7 of 'test' for 12.4 s (usually 4.6 ms)\n"
        "rank  does               since  cpu  instruction      at\n"
        "0     waits for rank 2  0.90 s   0%  2 wait s [add]   net.py:4: y.sum()\n"
        "1     waits for rank 2  0.90 s   0%  2 wait s [add]   net.py:4: y.sum()\n"
        "2     is stopped        0.90 s   0%  0 y = call f(x)  net.py:3: y = f(x)\n"
        "Rank 2 is stopped; ranks 0 and 1 wait for it."
    )
    html = status._repr_html_()
    assert html.count("<tr>") == 4 and "<script" not in html
    assert json.loads(json.dumps(status.data()))["waited_for"] == 2


def test_status_names_waiting_rank_among_ranks_of_one_process() -> None:
    """Ranks 0 and 1 share a process; rank 2 waits for a message that rank 1 has not sent."""
    sends = program(
        [Call("f", ("x",), ("y",)), Call("f", ("y",), ("z",))],
        [Call("f", ("x",), ("y",)), Send("y", 2, "c", ONE), Wait(("y",))],
        [Recv("y", 1, "c", ONE), Wait(("y",))],
        functions=[function("f", "def forward(x):\n    return (x,)")],
        inputs=[("x",), ("x",), ()],
        outputs=[("y", "z"), ("y",), ("y",)],
    )
    hosts = ((0, 1), (2,))
    lists = verify(sends, hosts).lists
    lines = ProgramLines.of(sends, lists)
    of_one = lists[0].index((1, 0))
    status = status_of(lines, hosts, [seen(0, of_one, 9), seen(1, 1, 9)])
    assert (status.waited_for, status.ranks[0].text) == (1, "shares the process of rank 1")
    assert status.reason == "Rank 1 sleeps in a call; rank 2 waits for it."
    assert status.ranks[2].peers == (1,)
