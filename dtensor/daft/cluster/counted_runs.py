"""Count the undone runs of each key of `Counted`, as far as the controller knows them.

    counted_runs.add("steps", 3, (0, 1), know_outcome=True)    # run 3 on hosts 0 and 1
    counted_runs.hosts_to_ask("steps", (0,))                   # (): host 0 knows its outcome
    counted_runs.hosts_to_ask("steps", (0, 2))                 # (0, 1): host 2 does not know it
    counted_runs.settle("steps", 4, {3})                       # they say that run 3 was undone
    counted_runs.with_known_undone(Counted("steps", 0, "n"))   # Counted("steps", -1, "n", since=4)

The message of a run has the number of undone runs before `since`; the host itself counts undone
runs from `since` on. A run is therefore sent only to hosts that know the outcomes of all these
runs; otherwise the hosts that know them are asked first. The cluster's lock must be held.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from dtensor.daft.run.worker import Counted


@dataclass(slots=True)
class _Count:
    """The runs of one key.

    `undone`: how many runs before `since` were undone. About the runs from `since` on, whose
    outcomes the controller does not know: `last` is the last one, `used_hosts` have run any of them
    and `informed` hosts know the outcomes of all (None if there is no such run).
    """

    since: int = 0
    undone: int = 0
    last: int = -1
    used_hosts: frozenset[int] = frozenset()
    informed: frozenset[int] | None = None


class CountedRuns:
    """The counts of all keys of a cluster."""

    def __init__(self) -> None:
        self._keys: dict[str, _Count] = {}

    def add(self, key: str, run: int, hosts: Sequence[int], *, know_outcome: bool) -> None:
        """Record a run that takes a number. ``know_outcome``: see `Handle.hosts_know_outcome`."""
        count = self._keys.setdefault(key, _Count())
        knowing_hosts = frozenset(hosts) if know_outcome else frozenset[int]()
        count.last = run
        count.used_hosts |= frozenset(hosts)
        count.informed = knowing_hosts if count.informed is None else count.informed & knowing_hosts

    def hosts_to_ask(self, key: str, hosts: Sequence[int]) -> tuple[int, ...]:
        """Return the hosts to ask (`Worker.undone_since`) before a run of the key on ``hosts``."""
        count = self._keys.get(key)
        if count is None or count.informed is None or count.informed.issuperset(hosts):
            return ()
        return tuple(sorted(count.used_hosts))

    def since(self, key: str) -> int:
        return self._keys[key].since

    def settle(self, key: str, before: int, undone: Set[int]) -> None:
        """Record the undone runs that hosts have reported. `before`: the number of the next run
        when the hosts were asked."""
        count = self._keys[key]
        count.undone += sum(count.since <= run < before for run in undone)
        count.since = max(count.since, before)
        if count.last < before:
            count.used_hosts, count.informed = frozenset(), None

    def with_known_undone(self, counted: Counted) -> Counted:
        """Return the `Counted` for a run's message, without the undone runs that are known."""
        count = self._keys.get(counted.key)
        if count is None or not count.since:
            return counted
        return replace(counted, known=counted.known - count.undone, since=count.since)
