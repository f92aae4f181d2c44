"""Which finished requests make the next batch, so that none is too stale and none waits for ever.

    ledger = Ledger(batch_size=4, staleness=1)
    while ledger.room(synced=0): ledger.submit(synced=0)      # 8 requests: numbers 0 to 7
    ledger.complete(5), ledger.complete(2), ...
    ledger.take()                                             # (0, 1, 2, 5), once all of these are

Requests are numbered in the order of their submission, batches in the order in which they are
taken; `synced` is how often the weights were synced since the first request, once after each batch
as a rule. With B requests a batch and staleness k:

    submitted when synced s times      at most (s + k + 1) B requests in all
    a request submitted at s           is in one of the batches s ... s + k
    batch j takes, of the open ones    so many that those whose last batch is j + d or before
    that are completed first           fit into d more batches, for d = 0 ... k

So its tokens are of versions at most k older than the weights that are trained with them, and none
starves. That batch j can be chosen so: of requests whose last batch is j + d or before, at most
(j + d + 1) B were submitted for d = k, and for lower d, by the choice of batch j - 1, at most
(d + 1) B are open; those that batch j must take, for some d, are at most B. What is submitted later
has a later last batch. With k = 0 batch j is the requests j B ... (j + 1) B - 1.

Invariants: a batch has B requests, but for the last one of a source that has ended, and they stand
in order of their numbers. Not here: who generates, who scores.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    batch_size: int
    staleness: int
    num_submitted: int = 0
    num_batches: int = 0
    _when: dict[int, int] = field(default_factory=dict[int, int])  # of those that were not taken
    _completed: dict[int, None] = field(default_factory=dict[int, None])  # in that order

    def room(self, synced: int) -> int:
        """How many more requests may be submitted."""
        limit = (self._time(synced) + self.staleness + 1) * self.batch_size
        return max(0, limit - self.num_submitted)

    def submit(self, synced: int) -> int:
        """The number of a new request."""
        assert self.room(synced), "there is room"
        number = self.num_submitted
        self.num_submitted += 1
        self._when[number] = self._time(synced)
        return number

    def complete(self, number: int) -> None:
        assert number in self._when and number not in self._completed, "once, before it is taken"
        self._completed[number] = None

    def take(self, *, ended: bool = False) -> tuple[int, ...] | None:
        """The next batch; None if it is not complete. ``ended``: nothing more is submitted."""
        size = min(self.batch_size, len(self._when)) if ended else self.batch_size
        if not size or len(self._completed) < size:
            return None
        chosen: dict[int, None] = {}
        for later in range(self.staleness + 1):  # batches that are left after this one
            last = self.num_batches + later - self.staleness
            number_open = sum(when <= last for when in self._when.values())
            taken = sum(self._when[number] <= last for number in chosen)
            needed = number_open - later * self.batch_size - taken
            done = (n for n in self._completed if n not in chosen and self._when[n] <= last)
            fresh = list(itertools.islice(done, max(0, needed)))
            if len(fresh) < needed:
                return None
            chosen.update(dict.fromkeys(fresh))
        others = (number for number in self._completed if number not in chosen)
        chosen.update(dict.fromkeys(itertools.islice(others, size - len(chosen))))
        for number in chosen:
            del self._when[number], self._completed[number]
        self.num_batches += 1
        return tuple(sorted(chosen))

    @property
    def num_open(self) -> int:
        """Requests that were submitted and not taken."""
        return len(self._when)

    def starves(self, synced: int) -> bool:
        """Whether no batch can be filled before the next sync."""
        return self._time(synced) < self.num_batches - self.staleness

    def _time(self, synced: int) -> int:
        """Syncs that were made without a batch between them count once."""
        return min(synced, self.num_batches)
