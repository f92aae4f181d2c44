"""Log a controller's calls to its hosts: calls in flight, and calls to repeat if a host is lost.

    log = CallLog(is_settled, has_answer)
    log.add(SentCall(host=0, change=8, run=3, ...))
    log.add(SentCall(host=1, change=8, run=3, ...))
    log.due([1], before=4)                     # {0: 3, 1: 3}: both hosts must still end run 3
    log.drop([8, 8])                           # change 8 is committed on both hosts: drop its calls
    log.ended([9, 9])                          # [9, 8]: host 1's answer to change 9 is lost
    log.calls_to_repeat({0: 8, 1: 8})          # the calls to repeat, in order

A change is a call that changes a host's table. It has ended once its answer is received. Other
calls are repeated only if their answer is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dtensor.daft.errors import Failure

MAX_RECENT_RUNS = 10_000
"""Number of recent runs whose hosts are remembered, to ask them why a run was undone."""


@dataclass(slots=True, kw_only=True)
class SentCall:
    """A call that was sent to one host.

    `change`: the number of its change, or None. `run`: the number of its run, or None. `number`: of
    the call among those to its host. `awaited`: the reference to its answer, or None if it has
    none. `message`, `nbytes`: the message to send if the call is repeated. `succeeded`: it was
    answered without an error before it was repeated. `undone`: the call is not repeated; its run
    returns a failure instead."""

    host: int
    change: int | None
    run: int | None
    number: int
    awaited: Any = None
    message: Any = None
    nbytes: int = 0
    succeeded: bool = False
    undone: bool = False
    serial: int = 0  # position in the log


CallPredicate: TypeAlias = Callable[[SentCall], bool]


class CallLog:
    """The calls in the order in which they were sent. `is_settled`: whether a call of a run has
    returned, or never will. `has_answer`: whether the answer of a call has been received."""

    def __init__(self, is_settled: CallPredicate, has_answer: CallPredicate) -> None:
        self.calls: list[SentCall] = []
        self.nbytes: int = 0
        self.added: int = 0  # number of all calls so far
        self._is_settled = is_settled
        self._has_answer = has_answer
        self._hosts_of_run: dict[int, dict[int, None]] = {}  # by the number of a recent run
        self._long_length = 1

    def add(self, call: SentCall) -> None:
        """Append a call that is about to be sent."""
        call.serial, self.added = self.added, self.added + 1
        self.calls.append(call)
        self.nbytes += call.nbytes
        if call.run is not None:
            self._hosts_of_run.setdefault(call.run, {})[call.host] = None
            if len(self._hosts_of_run) > MAX_RECENT_RUNS:
                del self._hosts_of_run[next(iter(self._hosts_of_run))]

    @property
    def is_long(self) -> bool:
        """Whether the log has doubled since the last `drop`."""
        return len(self.calls) >= self._long_length

    def drop(self, base: Sequence[int] = ()) -> None:
        """Drop the calls that need not be repeated and are not in flight: changes up to `base` of
        their host, and other calls with answers."""
        base_by_host = dict(enumerate(base))
        self.calls = [
            c for c in self.calls if self._is_open(c) or self._must_repeat(c, base_by_host)
        ]
        self.nbytes = sum([call.nbytes for call in self.calls])  # a list is faster here
        self._long_length = 2 * len(self.calls) + 1

    def hosts_of(self, run: int) -> Collection[int] | None:
        """Return the hosts of a run; None if the run is not remembered any more."""
        return self._hosts_of_run.get(run)

    def due(self, hosts: Collection[int], before: int) -> dict[int, int]:
        """Return, by host, the last run that it must end before runs up to `before` on ``hosts``
        can end. This includes runs on other hosts that share an unfinished host with such a run."""
        hosts_by_run: dict[int, list[int]] = {}
        for call in list(self.calls):  # a copy, since other threads add calls
            if call.run is not None and call.run < before and self._is_open(call):
                hosts_by_run.setdefault(call.run, []).append(call.host)
        due, past = dict[int, int](), set(hosts)
        for run in sorted(hosts_by_run, reverse=True):
            if not past.isdisjoint(hosts_by_run[run]):
                past.update(hosts_by_run[run])
                for host in hosts_by_run[run]:
                    due.setdefault(host, run)
        return due

    def ended(self, ended: Sequence[int]) -> list[int]:
        """Return, by host, the last change up to which all answers have been received. `ended`: the
        last change that each host has ended."""
        changes, unanswered = list(ended), set[int]()
        for call in self.calls:
            if call.awaited is not None and not self._has_answer(call):
                unanswered.add(call.host)
            if call.host in unanswered and call.change is not None:
                changes[call.host] = min(changes[call.host], call.change - 1)
        return changes

    def calls_to_repeat(self, recovery_line: Mapping[int, int]) -> list[SentCall]:
        """Return the calls to repeat if each host is in the state after its change in
        ``recovery_line``, in order."""
        return [call for call in self.calls if self._must_repeat(call, recovery_line)]

    def _is_open(self, call: SentCall) -> bool:
        return call.run is not None and not self._is_settled(call)

    def _must_repeat(self, call: SentCall, recovery_line: Mapping[int, int]) -> bool:
        """Return whether a host in the state of ``recovery_line`` lacks the call's change, or the
        call's answer."""
        if call.change is not None:
            return call.change > recovery_line[call.host]
        return call.awaited is not None and not self._has_answer(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One loss of processes and its recovery.

    `failures`: for each lost process, its last activity; or the broken connection. `ranks`: the
    ranks of the lost processes. `by`: their replacements, () if only connections were lost. `runs`:
    how many runs were repeated. `begun`: when the loss was seen, in seconds of the monotonic clock.
    """

    failures: tuple[Failure, ...]
    ranks: tuple[int, ...]
    by: tuple[str, ...]
    runs: int
    begun: float
    seconds: float

    def __str__(self) -> str:
        repeated = f"{self.runs} run{'' if self.runs == 1 else 's'} done again"
        method = f"replaced by {' and '.join(self.by)}" if self.by else "connected anew"
        head = f"recovered in {self.seconds:.2f} s: {method}, {repeated}"
        return "\n".join((head, *map(str, self.failures)))
