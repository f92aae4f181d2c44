"""The seed, the numbers of steps and calls, and what a program is fed of them.

    dt.manual_seed(7)          # every counter starts again from 0
    step(tokens, targets)      # random ops draw with (key of 7, step 0)
    step(tokens, targets)      # ... step 1

A random number is a function of (seed, step, op, global element), so a run repeats under any
placement, mesh and number of microbatches, and a step can be repeated alone. The seed is mixed with
what the numbers are for (training, a compiled function by its name, a parameter by its name), so
that none of these shares numbers with another.

The number of a step or call that failed, and was undone, is the next one's: the controller gives it
back when it hears of that, and the ranks, who know before, take it off meanwhile (`Counted`).

A checkpoint has the seed and every count (`counts`), and whoever resumes from one goes on with them
(`restore_counts`), also in counters that are made later. Those of one purpose are told apart by the
order in which they were made; where there are more than were saved, it begins again.

Invariants: torch's own generators are neither read nor advanced; the default seed is 0. A counter
that was made under an earlier seed starts from 0 under the present one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakValueDictionary

from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import SEED, STEP


@dataclass(slots=True)
class _Present:
    seed: int = 0
    epoch: int = 0  # how often the seed was set


_present = _Present()


def manual_seed(seed: int) -> None:
    """Set the seed of all random numbers, and start every count of steps and calls from 0.
    PlanningError for a seed that is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise PlanningError(f"manual_seed({seed!r}): a seed is an integer; fix: dt.manual_seed(0)")
    _present.seed = seed
    _present.epoch += 1
    _resumed.clear()


def initial_seed() -> int:
    """The seed of all random numbers: 0, or what `manual_seed` set."""
    return _present.seed


@lru_cache(maxsize=1024)
def key_of(seed: int, *purpose: str) -> int:
    """A 63-bit key: the seed mixed with what the numbers are for."""
    text = "\x00".join((str(seed), *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(slots=True, eq=False, weakref_slot=True)
class Counter:
    """Counts steps or calls from 0, from 0 again after `manual_seed`. ``resets``: how often it was
    set to another number; ``purpose``: what it counts, where `counts` is to have it."""

    purpose: str = ""
    count: int = 0
    epoch: int = -1
    resets: int = 0

    def __post_init__(self) -> None:
        if self.purpose:
            _counters.setdefault(self.purpose, WeakValueDictionary())[next(_serial)] = self
            self._resume()

    def _resume(self) -> None:
        if saved := _resumed.get(self.purpose):
            self.restore(saved[0])
            saved.rotate(-1)

    def present(self) -> int:
        if self.epoch != _present.epoch:
            self.restore(0)
        return self.count

    def advance(self) -> int:
        """The number of this step; the next one's is one more."""
        number = self.present()
        self.count = number + 1
        return number

    def restore(self, count: int) -> None:
        self.epoch, self.count = _present.epoch, count
        self.resets += 1

    def give_back(self, resets: int) -> None:
        """A step was undone that advanced it after so many resets."""
        self.present()
        if resets == self.resets:
            self.count -= 1


_counters: dict[str, WeakValueDictionary[int, Counter]] = {}  # by number, in this order
_serial = itertools.count()
_resumed: dict[str, deque[int]] = {}  # what counters that are made later go on with


def counts() -> dict[str, list[int]]:
    """By purpose, the counts of all counters that there are, in the order in which they were made;
    then those of a resumed run's that it has not made again."""
    found: dict[str, list[int]] = {}
    for purpose in sorted(_counters.keys() | _resumed.keys()):
        numbers = [counter.present() for counter in _living(purpose)]
        saved = _resumed.get(purpose, ())
        found[purpose] = [*numbers, *list(saved)[: max(0, len(saved) - len(numbers))]]
    return {purpose: numbers for purpose, numbers in found.items() if any(numbers)}


def restore_counts(seed: int, saved: Mapping[str, Sequence[int]]) -> None:
    """Go on with a seed and what `counts` gave; other counters stay as they are."""
    _present.seed = seed
    _resumed.clear()
    _resumed.update((purpose, deque(numbers)) for purpose, numbers in saved.items())
    for purpose in saved:
        for counter in _living(purpose):
            counter._resume()


def _living(purpose: str) -> list[Counter]:
    return [counter for _, counter in sorted(_counters.get(purpose, {}).items())]


def numbers_fed(step: int, *purpose: str) -> dict[str, object]:
    """What a program with random ops is fed, by the names of its Slots."""
    return {SEED: key_of(_present.seed, *purpose), STEP: step}
