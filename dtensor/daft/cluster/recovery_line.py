"""The changes of the hosts' tables, and which of them are committed: the recovery line.

    changes = ChangeLog(2)
    changes.add((0, 1), commits=True)      # (1, [0, 0]): change 1, of both; nothing is stable yet
    changes.add((0, 1), commits=True)      # (2, [1, 1]): a host that passes its commit point knows
    changes.heard(0, 2)                    #   that the other one has ended change 1
    changes.heard(1, 1)
    changes.recovery_line()                  # {0: 1, 1: 1}: both return to the state after change 1

A put or a delete is a separate change of each of its hosts, a run one change of all of them
together. A change is committed if all its hosts have ended it and no earlier change of theirs is
uncommitted. The cut (recovery line) is, for each host, the last change whose state it can restore
such that all changes are on the same side of it everywhere: those before it are committed, those
after it are submitted again.

``every=k``: of the runs on all hosts only each k-th is *taken*, that is, hosts keep the state after
it. The cut then is among those that were taken.

Invariants: numbers rise by one with each call, over all hosts. The committed number that a host
gets with a change never exceeds the cut once it has ended that change: it may lag behind. The log
holds changes that are not known to be committed. Pure: the backend reports the ends of changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtensor.daft.undo.rollback import TableChange


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """`hosts` make the change together: either all of them or none."""

    number: int
    hosts: tuple[int, ...]
    taken: bool = True


class ChangeLog:
    """`alone`: it waits neither for another host's end nor for an answer."""

    def __init__(self, num_hosts: int, every: int = 1, *, alone: bool = False) -> None:
        self.number: int = 0
        self.alone = alone
        self.every = every
        self.log: deque[LoggedChange] = deque()
        self.ended: list[int] = [0] * num_hosts  # by host, the last change known to have ended
        self.base: list[int] = [0] * num_hosts  # by host, the known cut
        self._runs = 0  # runs on all hosts
        self._awaited: deque[tuple[int, Any, int]] = deque()  # host, call, number of the change

    def told(
        self,
        hosts: Sequence[int],
        ended: Callable[[Any], bool],
        *,
        together: bool,
        commits: bool,
    ) -> list[TableChange]:
        """Add a change; returns the `TableChange` for each of its hosts. ``ended``: whether a call
        has come back, and raised nothing."""
        while self._awaited and ended(self._awaited[0][1]):
            host, _, number = self._awaited.popleft()
            self.heard(host, number)
        number, sure, taken = self.add(hosts, together=together, commits=commits)
        return [TableChange(number, committed, taken) for committed in sure]

    def awaits(self, hosts: Sequence[int], asked: Sequence[Any]) -> None:
        """When these calls have come back, their hosts have ended the last change."""
        pairs = zip(hosts, asked, strict=True)
        self._awaited.extend((host, each, self.number) for host, each in pairs)

    def grow(self, num_hosts: int) -> None:
        """Grow to ``num_hosts`` hosts; new ones have no changes, as at the beginning."""
        new = [0] * (num_hosts - len(self.ended))
        self.ended, self.base = [*self.ended, *new], [*self.base, *new]

    def add(
        self,
        hosts: Sequence[int],
        *,
        together: bool = True,
        commits: bool = False,
    ) -> tuple[int, list[int], bool]:
        """Add a change; returns its number; for each of its hosts, the last change that is
        committed for certain once that host has ended it; whether it is taken. ``commits``: it has
        a commit point."""
        self.number += 1
        everyone = len(hosts) == len(self.ended)
        taken = True
        if together and len(hosts) > 1 and everyone:
            self._runs += 1
            taken = self._runs % self.every == 0
        before = self.number - 1
        groups = [tuple(hosts)] if together else [(host,) for host in hosts]
        if everyone and together and commits and self.every == 1 and len(hosts) > 1:
            sure = [before] * len(hosts)
        elif together and commits:
            known = {host: before for host in hosts}
            sure = self._stable(hosts, known)
        else:
            sure = [self.base[host] for host in hosts]
        self.log.extend(LoggedChange(self.number, group, taken) for group in groups)
        if self.alone and taken:
            sure = [self.number]
        return self.number, sure, taken

    def _stable(self, hosts: Sequence[int], known: Mapping[int, int]) -> list[int]:
        # for other hosts only committed changes count, not ended ones: those may be undone, and the
        # message sent again
        ended = [max(last, known.get(host, 0)) for host, last in enumerate(self.base)]
        line = recovery_line(self.log, ended, self.base)
        return [line[host] for host in hosts]

    def heard(self, host: int, number: int) -> None:
        """A host has ended this change, and all its own before."""
        if number <= self.ended[host]:
            return
        self.ended[host] = number
        if self.log and all(self.ended[h] >= self.log[0].number for h in self.log[0].hosts):
            line = self.recovery_line()
            self.base = [line[h] for h in range(len(self.base))]
            while self.log and all(self.base[h] >= self.log[0].number for h in self.log[0].hosts):
                self.log.popleft()

    def recovery_line(self, ended: Sequence[int] | None = None) -> dict[int, int]:
        """By host, the change to whose state all can return. ``ended``: by host, the last that it
        has ended, if more is known than was reported."""
        return recovery_line(self.log, self.ended if ended is None else ended, self.base)

    def rolled_back(self, to: Mapping[int, int]) -> None:
        """The hosts have returned to the states right after these changes; later changes in the log
        are repeated, in their order and with their numbers."""
        self.ended = [to[host] for host in range(len(self.ended))]


def recovery_line(
    log: Iterable[LoggedChange], ended: Sequence[int], base: Sequence[int]
) -> dict[int, int]:
    """See `ChangeLog.recovery_line`; ``base``: a cut that is possible in any case."""
    changes = tuple(log)
    states = [[first] for first in base]  # by host, the states that it can restore
    for change in changes:
        for host in change.hosts:
            if change.taken and base[host] < change.number <= ended[host]:
                states[host].append(change.number)
    moved = True
    while moved:
        moved = False
        for change in changes:
            if any(states[host][-1] < change.number for host in change.hosts):
                for host in change.hosts:
                    while states[host][-1] >= change.number:
                        states[host].pop()
                        moved = True
    return {host: stable[-1] for host, stable in enumerate(states)}
