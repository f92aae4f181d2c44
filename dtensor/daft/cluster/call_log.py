"""The log of a controller's calls to its hosts, in one order: calls in flight, and calls that it
may have to repeat if a host is lost.

    log = CallLog(came, answered)
    log.add(SentCall(host=0, change=8, run=3, ...))
    log.add(SentCall(host=1, change=8, run=3, ...))
    log.due([1], before=4)                     # {0: 3, 1: 3}: both must still end run 3
    log.drop([8, 8])                           # change 8 is committed on both: it is dropped
    log.ended([9, 9])                          # [9, 8]: host 1's answer to change 9 is lost
    log.again({0: 8, 1: 8})                    # the calls to repeat, in order

A *change* is a call that changes a host's table (`recovery_line.py` knows which are committed); for
other calls only the answer matters. A host may have ended a change whose answer died with it: then
the change does not count as ended, as no other place has its result.

Invariants: pure. Calls keep their order. A received answer is not requested again, unless its call
is repeated. A run is in flight until all its hosts have come back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dtensor.daft.errors import Failure

MOST_RECENT = 10_000
"""Number of runs whose hosts are remembered, to ask them why one was undone."""


@dataclass(slots=True, kw_only=True)
class SentCall:
    """A call of one host. `change`: its number, None if it changes nothing; `run`: the call's run;
    `number`: of the call among those of its host.

    If it may be repeated, `message` is the message to send, of `nbytes`, and `asked` is the
    reference to its answer, None if it has none. `gave`: it was answered, and not by an error,
    before it was sent again. `undone`: it is not repeated, but its run returns a failure.
    """

    host: int
    change: int | None
    run: int | None
    number: int
    asked: Any = None
    message: Any = None
    nbytes: int = 0
    gave: bool = False
    undone: bool = False
    serial: int = 0  # in the order of the log


Came: TypeAlias = Callable[[SentCall], bool]


class CallLog:
    """`came`: whether a call of a run has come back, or never will. `answered`: whether its answer
    is here; called only for calls that have one."""

    def __init__(self, came: Came, answered: Came) -> None:
        self.calls: list[SentCall] = []
        self.nbytes: int = 0
        self.added: int = 0  # number of calls, ever
        self._came = came
        self._answered = answered
        self._hosts: dict[int, dict[int, None]] = {}  # by the number of a recent run
        self._look_at = 1

    def add(self, call: SentCall) -> None:
        call.serial, self.added = self.added, self.added + 1
        self.calls.append(call)
        self.nbytes += call.nbytes
        if call.run is not None:
            self._hosts.setdefault(call.run, {})[call.host] = None
            if len(self._hosts) > MOST_RECENT:
                del self._hosts[next(iter(self._hosts))]

    @property
    def is_long(self) -> bool:
        """Whether there are so many calls that dropping some is worthwhile."""
        return len(self.calls) >= self._look_at

    def drop(self, base: Sequence[int] = ()) -> None:
        """Drop changes up to `base` of their host, which are not repeated; received answers
        stay."""
        sure = dict(enumerate(base))
        self.calls = [c for c in self.calls if self._is_open(c) or self._is_missing(c, sure)]
        self.nbytes = sum([call.nbytes for call in self.calls])  # a list is faster here
        self._look_at = 2 * len(self.calls) + 1

    def hosts_of(self, run: int) -> Collection[int] | None:
        """The hosts of a run; None if it was long ago."""
        return self._hosts.get(run)

    def due(self, hosts: Collection[int], before: int) -> dict[int, int]:
        """By host, the last run that it must end before calls to these hosts from before run
        `before` can come back: among those, and all earlier runs that share with one of them a host
        where they have not ended."""
        hosts_by_run: dict[int, list[int]] = {}
        for call in list(self.calls):  # other threads add to it
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
        """By host, the last change that it has ended and whose answer, and all earlier ones, are
        here; `ended`: the last change that each host has ended."""
        changes, open_ = list(ended), set[int]()
        for call in self.calls:
            if call.asked is not None and not self._answered(call):
                open_.add(call.host)
            if call.host in open_ and call.change is not None:
                changes[call.host] = min(changes[call.host], call.change - 1)
        return changes

    def again(self, cut: Mapping[int, int]) -> list[SentCall]:
        """The calls to repeat if each host is in the state right after its change in `cut`."""
        return [call for call in self.calls if self._is_missing(call, cut)]

    def _is_open(self, call: SentCall) -> bool:
        return call.run is not None and not self._came(call)

    def _is_missing(self, call: SentCall, cut: Mapping[int, int]) -> bool:
        if call.change is not None:
            return call.change > cut[call.host]
        return call.asked is not None and not self._answered(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One loss and its recovery. `failures`: for each lost process, its last activity, or the
    broken connection if none was lost; `by`: the replacements, empty if the living processes
    connected anew; `ranks`: those of the lost processes; `runs`: how many runs were repeated;
    `begun`: when it was seen, by the monotonic clock."""

    failures: tuple[Failure, ...]
    ranks: tuple[int, ...]
    by: tuple[str, ...]
    runs: int
    begun: float
    seconds: float

    def __str__(self) -> str:
        again = f"{self.runs} run{'' if self.runs == 1 else 's'} done again"
        how = f"replaced by {' and '.join(self.by)}" if self.by else "connected anew"
        head = f"recovered in {self.seconds:.2f} s: {how}, {again}"
        return "\n".join((head, *map(str, self.failures)))
