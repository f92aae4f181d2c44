"""Tests the controller's log of calls that may have to be repeated, with random sequences."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from dtensor.daft.cluster.call_log import CallLog, SentCall
from dtensor.daft.cluster.recovery_line import ChangeLog


@dataclass(slots=True)
class Answer:
    there: bool = False


def came(call: SentCall) -> bool:
    return call.awaited is not None and call.awaited.there


def sent(host: int, change: int | None, run: int | None, *, asked: bool = True) -> SentCall:
    answer = Answer() if asked else None
    return SentCall(host=host, change=change, run=run, number=0, awaited=answer, nbytes=10)


def test_call_log_drops_run_only_after_runs_it_depends_on_ended() -> None:
    """Run 0 is on hosts 0 and 1, run 1 on hosts 1 and 2, run 2 on host 3. A call of host 2 waits
    for run 1 and, through host 1, for run 0. The run of host 3 delays no other."""
    log = CallLog(came, came)
    for run, hosts in enumerate(((0, 1), (1, 2), (3,))):
        for host in hosts:
            log.add(sent(host, None, run))
    assert log.due([2], before=3) == {0: 0, 1: 1, 2: 1}
    assert log.due([2], before=1) == {} and log.due([3], before=3) == {3: 2}
    for call in log.calls[:3]:
        call.awaited.there = True  # run 0 has returned, and run 1 on host 1
    assert log.due([2], before=3) == {2: 1} and log.due([1], before=3) == {}
    log.drop()
    assert [(call.host, call.run) for call in log.calls] == [(2, 1), (3, 2)]
    assert [set(log.hosts_of(run) or ()) for run in range(3)] == [{0, 1}, {1, 2}, {3}]
    assert log.hosts_of(3) is None


def test_call_log_drops_finished_calls_and_stays_short() -> None:
    log, drops = CallLog(lambda call: call.number < last, came), 0
    for run in range(1000):
        last = run - 3
        log.add(SentCall(host=run % 4, change=None, run=run, number=run))
        if log.is_long:
            log.drop()
            drops += 1
        assert len(log.calls) < 16
    assert drops < 500


def test_call_log_repeats_call_whose_answer_was_lost() -> None:
    log, changes = CallLog(came, came), ChangeLog(2)
    for run in range(2):
        number, _, _ = changes.add((0, 1), commits=True)
        for host in range(2):
            log.add(sent(host, number, run))
    for call in log.calls[:3]:
        assert call.awaited is not None
        call.awaited.there = True  # all answers but host 1's to run 1
    ended = log.ended([2, 2])
    assert ended == [2, 1]
    assert changes.recovery_line(ended) == {0: 1, 1: 1}
    again = log.calls_to_repeat(changes.recovery_line(ended))
    assert [(call.host, call.run) for call in again] == [(0, 1), (1, 1)]


def test_call_log_repeats_read_at_its_position_between_changes() -> None:
    log, changes = CallLog(came, came), ChangeLog(2)
    first, _, _ = changes.add((0, 1), together=False)
    log.add(sent(0, first, None, asked=False))
    log.add(sent(0, None, None))
    second, _, _ = changes.add((0,), together=False)
    log.add(sent(0, second, None, asked=False))
    # both puts have ended, and the read between them is lost: the second put is repeated
    ended = log.ended([second, first])
    assert ended[0] == first
    again = log.calls_to_repeat(changes.recovery_line(ended))
    assert [call.change for call in again] == [None, second]


@pytest.mark.parametrize("seed", range(200))
def test_call_log_repeats_exactly_calls_after_recovery_line(seed: int) -> None:
    """Whichever hosts are lost: each host does all its changes once and in order; all hosts of a
    run repeat it, or none; a dropped call is never after the recovery line."""
    draw = random.Random(seed)
    num = draw.randint(1, 3)
    log, changes = CallLog(came, came), ChangeLog(num, draw.choice((1, 1, 3)))
    lists: list[list[SentCall]] = [[] for _ in range(num)]
    for run in range(draw.randint(1, 12)):
        kind = draw.choice(("run", "run", "put", "get"))
        some = [h for h in range(num) if draw.random() < 0.6] or [0]
        hosts = list(range(num)) if kind == "run" and draw.random() < 0.6 else some
        number = None
        if kind != "get":
            number, _, _ = changes.add(hosts, together=kind == "run")
        for host in hosts:
            call = sent(host, number, run if kind == "run" else None, asked=kind != "put")
            lists[host].append(call)
            log.add(call)
        if draw.random() < 0.3:  # some answers arrive and report their hosts' progress
            for host, own in enumerate(lists):
                for call in own[: draw.randint(0, len(own))]:
                    if call.awaited is not None:
                        call.awaited.there = True
                    if call.change is not None:
                        changes.heard(host, call.change)
            log.drop(changes.base)
    done = [0] * num
    for host, own in enumerate(lists):  # a prefix has ended, a shorter prefix was answered
        heard = max((i for i, c in enumerate(own) if c.awaited and c.awaited.there), default=-1)
        end = draw.randint(heard + 1, len(own))
        least = changes.ended[host]
        for call in own[:end]:
            done[host] = max(done[host], call.change or 0)
        done[host] = max(done[host], least)
    cut = changes.recovery_line(log.ended(done))
    again = log.calls_to_repeat(cut)
    for host, own in enumerate(lists):
        assert cut[host] >= changes.base[host]
        wanted = [c for c in own if c.change is not None and c.change > cut[host]]
        found = [c for c in again if c.host == host and c.change is not None]
        assert [c.change for c in found] == [c.change for c in wanted]
        unanswered = [c for c in own if c.change is None and not came(c)]
        assert [c for c in again if c.host == host and c.change is None] == unanswered
    for run in {c.run for c in again if c.run is not None}:
        assert {c.host for c in again if c.run == run} == {
            host for host, own in enumerate(lists) for c in own if c.run == run
        }
