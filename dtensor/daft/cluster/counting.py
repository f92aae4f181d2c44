"""How many of the runs that are counted were undone, as the controller knows it by key.

    counting.add("steps", 3, (0, 1), told=True)      # run 3 takes a number, on hosts 0 and 1
    counting.to_ask("steps", (0,))                   # (): host 0 knows what became of it
    counting.to_ask("steps", (0, 2))                 # (0, 1): host 2 does not; ask these, then
    counting.settle("steps", 4, {3})                 # run 3 was undone
    counting.told(Counted("steps", 0, "n"))          # Counted("steps", -1, "n", since=4)

A host that took part in a run knows whether it was undone, where its program says so to all
(`Handle.told`); others do not. What a host is told with a run is therefore how many of `key` were
undone before `since`, and it counts those behind that, of which it knows (`Worker`). Runs behind
`since` are those that the controller has not heard of: no run of the key goes to a host that may
not know of one of them, but those are asked for first.

Invariants: pure; the cluster's lock is held. As long as the runs of a key are on the same hosts,
and these are told, nobody is ever asked.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from dtensor.daft.run.worker import Counted


@dataclass(slots=True)
class _Key:
    """Of the runs before `since`, `undone` were. Of those from it on the `last` is the last one,
    `took` are their hosts, `know` those that know of all of them; None where there is none."""

    since: int = 0
    undone: int = 0
    last: int = -1
    took: frozenset[int] = frozenset()
    know: frozenset[int] | None = None


class Counting:
    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

    def add(self, key: str, run: int, hosts: Sequence[int], *, told: bool) -> None:
        """A run that takes a number goes to these hosts."""
        own = self._keys.setdefault(key, _Key())
        known = frozenset(hosts) if told else frozenset[int]()
        own.last = run
        own.took |= frozenset(hosts)
        own.know = known if own.know is None else own.know & known

    def to_ask(self, key: str, hosts: Sequence[int]) -> tuple[int, ...]:
        """Whom to ask before a run of the key on these hosts: `Worker.undone_since`."""
        own = self._keys.get(key)
        if own is None or own.know is None or own.know.issuperset(hosts):
            return ()
        return tuple(sorted(own.took))

    def since(self, key: str) -> int:
        return self._keys[key].since

    def settle(self, key: str, before: int, undone: Set[int]) -> None:
        """Those asked have said which runs were undone; run `before` was the next one then."""
        own = self._keys[key]
        own.undone += sum(own.since <= run < before for run in undone)
        own.since = max(own.since, before)
        if own.last < before:
            own.took, own.know = frozenset(), None

    def told(self, counted: Counted) -> Counted:
        """What goes with a run."""
        own = self._keys.get(counted.key)
        if own is None or not own.since:
            return counted
        return replace(counted, known=counted.known - own.undone, since=own.since)
