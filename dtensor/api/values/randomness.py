"""The seed, the numbers of steps and calls, and the random numbers' inputs of programs.

    dt.manual_seed(7)          # every counter starts again from 0
    step(tokens, targets)      # random ops draw with (key of 7, step 0)
    step(tokens, targets)      # ... step 1

A random number is a function of (seed, step, op, global element), so a run repeats under any
placement, mesh and number of microbatches, and a step can be repeated alone. The seed is mixed with
the purpose of the numbers (training, a compiled function by its name, a parameter by its name), so
that no two purposes share numbers.

If a step or call fails and is undone, the next one gets its number: the controller returns it when
it learns of the failure, and the ranks, which know earlier, subtract it meanwhile (`Counted`).

A checkpoint has the seed and every count (`counts`), and a resumed run continues with them
(`restore_counts`), also in counters that are made later. Counters of one purpose are distinguished
by the order in which they were made; surplus ones begin at 0.

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
    """The seed of all random numbers: 0, or the last one of `manual_seed`."""
    return _present.seed


@lru_cache(maxsize=1024)
def key_of(seed: int, *purpose: str) -> int:
    """A 63-bit key: the seed mixed with the purpose of the numbers."""
    text = "\x00".join((str(seed), *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(slots=True, eq=False, weakref_slot=True)
class Counter:
    """Counts steps or calls from 0, from 0 again after `manual_seed`. ``resets``: how often it was
    set to another number; ``purpose``: its purpose, if `counts` must include it."""

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
        """The number of this step; the next step gets one more."""
        number = self.present()
        self.count = number + 1
        return number

    def restore(self, count: int) -> None:
        self.epoch, self.count = _present.epoch, count
        self.resets += 1

    def give_back(self, resets: int) -> None:
        """Return the number of an undone step, which advanced it after ``resets`` resets."""
        self.present()
        if resets == self.resets:
            self.count -= 1


_counters: dict[str, WeakValueDictionary[int, Counter]] = {}  # by number, in this order
_serial = itertools.count()
_resumed: dict[str, deque[int]] = {}  # start values of counters that are made later


def counts() -> dict[str, list[int]]:
    """By purpose, the counts of all existing counters, in the order in which they were made; then
    counts of a resumed run whose counters were not made again."""
    saved_counts: dict[str, list[int]] = {}
    for purpose in sorted(_counters.keys() | _resumed.keys()):
        numbers = [counter.present() for counter in _living(purpose)]
        saved = _resumed.get(purpose, ())
        saved_counts[purpose] = [*numbers, *list(saved)[: max(0, len(saved) - len(numbers))]]
    return {purpose: numbers for purpose, numbers in saved_counts.items() if any(numbers)}


def restore_counts(seed: int, saved: Mapping[str, Sequence[int]]) -> None:
    """Continue with a seed and a result of `counts`; other counters are unchanged."""
    _present.seed = seed
    _resumed.clear()
    _resumed.update((purpose, deque(numbers)) for purpose, numbers in saved.items())
    for purpose in saved:
        for counter in _living(purpose):
            counter._resume()


def _living(purpose: str) -> list[Counter]:
    return [counter for _, counter in sorted(_counters.get(purpose, {}).items())]


def numbers_fed(step: int, *purpose: str) -> dict[str, object]:
    """The inputs of a program with random ops, by the names of its Slots."""
    return {SEED: key_of(_present.seed, *purpose), STEP: step}
