"""Which changes of the hosts' tables there were, and which of them are committed.

    changes = Changes(2)
    changes.add((0, 1), commits=True)      # (1, [0, 0]): change 1, of both; nothing is sure yet
    changes.add((0, 1), commits=True)      # (2, [1, 1]): who passes its commit point knows that the
    changes.heard(0, 2)                    #   other one has ended change 1
    changes.heard(1, 1)
    changes.cut()                          # {0: 1, 1: 1}: both go back to what was after change 1

A put or a delete is a change of each of its hosts by itself, a run one of all of them together.
A change is committed if all its hosts have ended it and none of them is behind one that is not. The
cut is, for each host, the last change whose state it can have again so that all changes are on the
same side of it everywhere: those before it are committed, those behind it are submitted again.

``every=k``: of the runs on all hosts only each k-th is *taken*, that is, hosts keep the state after
it. The cut then is among those that were taken.

Invariants: numbers rise by one with each call, over all hosts. What a host is told with a change is
never more than what the cut would be once it has ended that: it may lag behind. The log holds what
is not known to be committed. Pure: who has ended what, the backend says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtensor.daft.undo.rollback import TableChange


@dataclass(frozen=True, slots=True)
class Logged:
    """`hosts` make it together: none of them without the others."""

    number: int
    hosts: tuple[int, ...]
    taken: bool = True


class Changes:
    """`alone`: neither another host's end nor an answer is waited for."""

    def __init__(self, num_hosts: int, every: int = 1, *, alone: bool = False) -> None:
        self.number: int = 0
        self.alone = alone
        self.every = every
        self.log: deque[Logged] = deque()
        self.ended: list[int] = [0] * num_hosts  # by host, the last one that is known to have
        self.base: list[int] = [0] * num_hosts  # by host, the cut that is known
        self._runs = 0  # on all hosts
        self._awaited: deque[tuple[int, Any, int]] = deque()  # host, call, number of the change

    def told(
        self,
        hosts: Sequence[int],
        ended: Callable[[Any], bool],
        *,
        together: bool,
        commits: bool,
    ) -> list[TableChange]:
        """One more change: what each of its hosts is told of it. ``ended``: whether a call has come
        back, and raised nothing."""
        while self._awaited and ended(self._awaited[0][1]):
            host, _, number = self._awaited.popleft()
            self.heard(host, number)
        number, sure, taken = self.add(hosts, together=together, commits=commits)
        return [TableChange(number, committed, taken) for committed in sure]

    def awaits(self, hosts: Sequence[int], asked: Sequence[Any]) -> None:
        """When these calls have come back, their hosts have ended the last change."""
        own = zip(hosts, asked, strict=True)
        self._awaited.extend((host, each, self.number) for host, each in own)

    def grow(self, num_hosts: int) -> None:
        """There are so many hosts now; new ones have nothing, as at the beginning."""
        new = [0] * (num_hosts - len(self.ended))
        self.ended, self.base = [*self.ended, *new], [*self.base, *new]

    def add(
        self,
        hosts: Sequence[int],
        *,
        together: bool = True,
        commits: bool = False,
    ) -> tuple[int, list[int], bool]:
        """One more change: its number; for each of its hosts, what is committed for sure once that
        host has ended it; whether it is taken. ``commits``: it has a commit point."""
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
            sure = self._sure(hosts, known)
        else:
            sure = [self.base[host] for host in hosts]
        self.log.extend(Logged(self.number, group, taken) for group in groups)
        if self.alone and taken:
            sure = [self.number]
        return self.number, sure, taken

    def _sure(self, hosts: Sequence[int], known: Mapping[int, int]) -> list[int]:
        # of the others what is committed, and not what they have ended: that may be undone yet, and
        # the message be sent again
        ended = [max(last, known.get(host, 0)) for host, last in enumerate(self.base)]
        found = cut(self.log, ended, self.base)
        return [found[host] for host in hosts]

    def heard(self, host: int, number: int) -> None:
        """A host has ended this change, and all its own before."""
        if number <= self.ended[host]:
            return
        self.ended[host] = number
        if self.log and all(self.ended[h] >= self.log[0].number for h in self.log[0].hosts):
            found = self.cut()
            self.base = [found[h] for h in range(len(self.base))]
            while self.log and all(self.base[h] >= self.log[0].number for h in self.log[0].hosts):
                self.log.popleft()

    def cut(self, ended: Sequence[int] | None = None) -> dict[int, int]:
        """By host, the change right after which all can be again. ``ended``: by host, the last that
        it has ended, where more is known than was heard."""
        return cut(self.log, self.ended if ended is None else ended, self.base)

    def rolled_back(self, to: Mapping[int, int]) -> None:
        """The hosts are as they were right after these changes; what is behind them in the log is
        made again, in its order and with its numbers."""
        self.ended = [to[host] for host in range(len(self.ended))]


def cut(log: Iterable[Logged], ended: Sequence[int], base: Sequence[int]) -> dict[int, int]:
    """See `Changes.cut`; ``base``: what can be had in any case."""
    changes = tuple(log)
    states = [[first] for first in base]  # of each host, those it can be in again
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
    return {host: own[-1] for host, own in enumerate(states)}
