"""The number of undone runs among those that are counted, by key, as far as the controller knows.

    counting.add("steps", 3, (0, 1), told=True)      # run 3 takes a number, on hosts 0 and 1
    counting.to_ask("steps", (0,))                   # (): host 0 knows whether it was undone
    counting.to_ask("steps", (0, 2))                 # (0, 1): host 2 does not; ask these, then
    counting.settle("steps", 4, {3})                 # run 3 was undone
    counting.told(Counted("steps", 0, "n"))          # Counted("steps", -1, "n", since=4)

A host that took part in a run knows whether it was undone, if its program tells all of them
(`Handle.told`); other hosts do not. The message of a run therefore has the number of undone runs of
`key` before `since`, and the host counts later ones, which it knows (`Worker`). Runs from `since`
on are those whose outcome the controller does not know: a run of the key is sent only to hosts that
know all of them; else the others are asked first.

Invariants: pure; the cluster's lock is held. As long as the runs of a key are on the same hosts,
and these know the outcomes, no host is ever asked.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from dtensor.daft.run.worker import Counted


@dataclass(slots=True)
class _Key:
    """`undone` runs before `since` were undone. Of the runs from `since` on, `last` is the last
    one, `took` are their hosts, `know` the hosts that know all of them; None if there are no such
    runs."""

    since: int = 0
    undone: int = 0
    last: int = -1
    took: frozenset[int] = frozenset()
    know: frozenset[int] | None = None


class CountedRuns:
    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

    def add(self, key: str, run: int, hosts: Sequence[int], *, told: bool) -> None:
        """A run that takes a number is sent to these hosts."""
        count = self._keys.setdefault(key, _Key())
        known = frozenset(hosts) if told else frozenset[int]()
        count.last = run
        count.took |= frozenset(hosts)
        count.know = known if count.know is None else count.know & known

    def to_ask(self, key: str, hosts: Sequence[int]) -> tuple[int, ...]:
        """The hosts to ask before a run of the key on these hosts, by `Worker.undone_since`."""
        count = self._keys.get(key)
        if count is None or count.know is None or count.know.issuperset(hosts):
            return ()
        return tuple(sorted(count.took))

    def since(self, key: str) -> int:
        return self._keys[key].since

    def settle(self, key: str, before: int, undone: Set[int]) -> None:
        """Note the undone runs that the asked hosts have reported; run `before` was the next one
        then."""
        count = self._keys[key]
        count.undone += sum(count.since <= run < before for run in undone)
        count.since = max(count.since, before)
        if count.last < before:
            count.took, count.know = frozenset(), None

    def told(self, counted: Counted) -> Counted:
        """The `Counted` of a run's message."""
        count = self._keys.get(counted.key)
        if count is None or not count.since:
            return counted
        return replace(counted, known=counted.known - count.undone, since=count.since)
