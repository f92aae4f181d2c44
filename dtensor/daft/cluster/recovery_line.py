"""Number the changes of the hosts' tables, and compute the recovery line to return to after a loss.

    changes = ChangeLog(2)
    changes.add((0, 1), commits=True)      # (1, [0, 0], True): change 1; nothing is committed yet
    changes.add((0, 1), commits=True)      # (2, [1, 1], True): at its commit point a host knows
    changes.heard(0, 2)                    #   that the other host has ended change 1
    changes.heard(1, 1)
    changes.recovery_line()                # {0: 1, 1: 1}: both return to the state after change 1

A run is one change of all its hosts together; a put or delete is a separate change of each host.
The recovery line is the last restorable state of each host such that every change is on the same
side of it on all hosts. Changes before it are committed; later ones are submitted again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtensor.daft.undo.rollback import TableChange


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """A change that `hosts` make together: all of them or none. `taken`: hosts keep the state after
    it, so that it can be restored."""

    number: int
    hosts: tuple[int, ...]
    taken: bool = True


class ChangeLog:
    """The changes that are not known to be committed.

    `every`: of the runs on all hosts only each `every`-th is taken, and can be in the recovery
    line. `alone`: there is one host, in this process, whose changes are committed at once.
    """

    def __init__(self, num_hosts: int, every: int = 1, *, alone: bool = False) -> None:
        self.number: int = 0
        self.alone = alone
        self.every = every
        self.log: deque[LoggedChange] = deque()
        self.ended: list[int] = [0] * num_hosts  # by host, the last change known to have ended
        self.base: list[int] = [0] * num_hosts  # by host, the last known recovery line
        self._num_full_runs = 0  # runs on all hosts
        self._pending_calls: deque[tuple[int, Any, int]] = deque()  # (host, call, change)

    def number_change(
        self,
        hosts: Sequence[int],
        ended: Callable[[Any], bool],
        *,
        together: bool,
        commits: bool,
    ) -> list[TableChange]:
        """Add a change; return the `TableChange` for each of its hosts. ``ended``: a function that
        says whether a call has returned without an error. ``together``, ``commits``: see `add`."""
        while self._pending_calls and ended(self._pending_calls[0][1]):
            host, _, number = self._pending_calls.popleft()
            self.heard(host, number)
        number, committed_by_host, taken = self.add(hosts, together=together, commits=commits)
        return [TableChange(number, committed, taken) for committed in committed_by_host]

    def awaits(self, hosts: Sequence[int], calls: Sequence[Any]) -> None:
        """Record that hosts have ended the last change once these calls have returned."""
        pairs = zip(hosts, calls, strict=True)
        self._pending_calls.extend((host, call, self.number) for host, call in pairs)

    def grow(self, num_hosts: int) -> None:
        """Grow to ``num_hosts`` hosts. New hosts have no changes."""
        new = [0] * (num_hosts - len(self.ended))
        self.ended, self.base = [*self.ended, *new], [*self.base, *new]

    def add(
        self,
        hosts: Sequence[int],
        *,
        together: bool = True,
        commits: bool = False,
    ) -> tuple[int, list[int], bool]:
        """Add a change. Return its number; for each of its hosts, the last change that is certainly
        committed once the host has ended this one; and whether the change is taken.

        ``together``: the hosts make one change together. ``commits``: it has a commit point.
        """
        self.number += 1
        everyone = len(hosts) == len(self.ended)
        taken = True
        if together and len(hosts) > 1 and everyone:
            self._num_full_runs += 1
            taken = self._num_full_runs % self.every == 0
        previous = self.number - 1
        groups = [tuple(hosts)] if together else [(host,) for host in hosts]
        if everyone and together and commits and self.every == 1 and len(hosts) > 1:
            committed = [previous] * len(hosts)
        elif together and commits:
            certain = {host: previous for host in hosts}
            committed = self._known_line(hosts, certain)
        else:
            committed = [self.base[host] for host in hosts]
        self.log.extend(LoggedChange(self.number, group, taken) for group in groups)
        if self.alone and taken:
            committed = [self.number]
        return self.number, committed, taken

    def _known_line(self, hosts: Sequence[int], certain: Mapping[int, int]) -> list[int]:
        """Return, for each of ``hosts``, the change up to which everything is committed.
        ``certain``: by host, a change that is committed for certain, although no answer says so
        yet."""
        # of other hosts only committed changes count, because ended ones may still be undone
        ended = [max(last, certain.get(host, 0)) for host, last in enumerate(self.base)]
        line = recovery_line(self.log, ended, self.base)
        return [line[host] for host in hosts]

    def heard(self, host: int, number: int) -> None:
        """Record that a host has ended this change and all its earlier ones."""
        if number <= self.ended[host]:
            return
        self.ended[host] = number
        if self.log and all(self.ended[h] >= self.log[0].number for h in self.log[0].hosts):
            line = self.recovery_line()
            self.base = [line[h] for h in range(len(self.base))]
            while self.log and all(self.base[h] >= self.log[0].number for h in self.log[0].hosts):
                self.log.popleft()

    def recovery_line(self, ended: Sequence[int] | None = None) -> dict[int, int]:
        """Return, by host, the change to whose state it returns. ``ended``: the last change that
        each host has ended, if more is known than `heard` has recorded."""
        return recovery_line(self.log, self.ended if ended is None else ended, self.base)

    def rolled_back(self, to: Mapping[int, int]) -> None:
        """Record that the hosts have returned to the states after these changes. Later changes in
        the log are repeated with the same numbers."""
        self.ended = [to[host] for host in range(len(self.ended))]


def recovery_line(
    log: Iterable[LoggedChange], ended: Sequence[int], base: Sequence[int]
) -> dict[int, int]:
    """Return, by host, its latest restorable state, such that each change is in the states of all
    its hosts or of none. ``ended``: the last change that each host has ended; ``base``: an earlier
    recovery line, which stays possible."""
    changes = tuple(log)
    states = [[first] for first in base]  # restorable states of each host
    for change in changes:
        for host in change.hosts:
            if change.taken and base[host] < change.number <= ended[host]:
                states[host].append(change.number)
    changed = True
    while changed:
        changed = False
        for change in changes:
            if any(states[host][-1] < change.number for host in change.hosts):
                for host in change.hosts:
                    while states[host][-1] >= change.number:
                        states[host].pop()
                        changed = True
    return {host: stable[-1] for host, stable in enumerate(states)}
