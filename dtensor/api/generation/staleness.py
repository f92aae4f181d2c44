"""Choosing the finished requests of the next batch, so that no request gets too stale.

    ledger = Ledger(batch_size=4, staleness=1)
    while ledger.room(synced=0): ledger.submit(synced=0)      # 8 requests: numbers 0 to 7
    ledger.complete(5), ledger.complete(2), ...
    ledger.take()                                             # (0, 1, 2, 5), once they are complete

With B requests in a batch, staleness k, and s syncs so far, at most (s + k + 1) B requests are
submitted, and a request submitted then is in one of the batches s ... s + k. So no token is more
than k versions older than the weights that train on it. `Ledger.take` has the rule and its proof.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    """The requests of a loop, numbered in order of submission, and the batches taken so far.
    ``synced``, an argument of methods: how often the weights were synced since the start."""

    batch_size: int
    staleness: int
    num_submitted: int = 0
    num_batches: int = 0
    # by number of an open request, which was not taken yet, the syncs when it was submitted:
    _submitted_at: dict[int, int] = field(default_factory=dict[int, int])
    _completed: dict[int, None] = field(default_factory=dict[int, None])  # in order of completion

    def room(self, synced: int) -> int:
        """Return how many more requests the staleness bound admits now."""
        limit = (self._num_syncs(synced) + self.staleness + 1) * self.batch_size
        return max(0, limit - self.num_submitted)

    def submit(self, synced: int) -> int:
        """Add a request, and return its number."""
        assert self.room(synced), "there is room"
        number = self.num_submitted
        self.num_submitted += 1
        self._submitted_at[number] = self._num_syncs(synced)
        return number

    def complete(self, number: int) -> None:
        """Mark an open request as complete."""
        assert number in self._submitted_at and number not in self._completed, "completed once"
        self._completed[number] = None

    def take(self, *, ended: bool = False) -> tuple[int, ...] | None:
        """Return the numbers of the next batch in ascending order, or None if its requests are not
        complete yet. ``ended``: no more requests will be submitted, so the batch may be smaller.

        For d = 0 ... k, batch j takes completed requests until the open requests whose last batch
        is j + d or earlier fit into d more batches. It never needs more than B requests for this:
        for d = k at most (j + k + 1) B were submitted, and for smaller d the choice of batch j - 1
        has left at most (d + 1) B. With k = 0, batch j is the requests j B ... (j + 1) B - 1.
        """
        size = min(self.batch_size, len(self._submitted_at)) if ended else self.batch_size
        if not size or len(self._completed) < size:
            return None
        chosen: dict[int, None] = {}
        for later in range(self.staleness + 1):  # d: the number of further batches
            last = self.num_batches + later - self.staleness
            number_open = sum(submitted_at <= last for submitted_at in self._submitted_at.values())
            num_chosen = sum(self._submitted_at[number] <= last for number in chosen)
            needed = number_open - later * self.batch_size - num_chosen
            done = (n for n in self._completed if n not in chosen and self._submitted_at[n] <= last)
            additional = list(itertools.islice(done, max(0, needed)))
            if len(additional) < needed:
                return None
            chosen.update(dict.fromkeys(additional))
        remaining = (number for number in self._completed if number not in chosen)
        chosen.update(dict.fromkeys(itertools.islice(remaining, size - len(chosen))))
        for number in chosen:
            del self._submitted_at[number], self._completed[number]
        self.num_batches += 1
        return tuple(sorted(chosen))

    @property
    def num_open(self) -> int:
        """The number of requests that were submitted and not taken."""
        return len(self._submitted_at)

    def needs_sync(self, synced: int) -> bool:
        """Return whether no batch can be filled before the next sync."""
        return self._num_syncs(synced) < self.num_batches - self.staleness

    def _num_syncs(self, synced: int) -> int:
        """Return the number of syncs, counting several syncs between two batches once."""
        return min(synced, self.num_batches)
