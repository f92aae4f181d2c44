"""The seed and the counts of steps and calls, from which programs draw random numbers.

    dt.manual_seed(7)          # every counter starts again from 0
    step(tokens, targets)      # random ops draw with (key of 7, step 0)
    step(tokens, targets)      # ... step 1

A random number is a function of (seed, purpose, step, op, global element), so a run repeats under
any placement, mesh and number of microbatches. The purpose is training, the name of a compiled
function, or the name of a parameter. A checkpoint has the seed and all counts. If a step is undone,
the next one gets its number: the controller takes the number back when it learns of the failure;
the ranks, which know earlier, subtract it until then (`Counted`).
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
class _SeedState:
    seed: int = 0
    epoch: int = 0  # how often the seed was set


_state = _SeedState()


def manual_seed(seed: int) -> None:
    """Set the seed of all random numbers, and start every count of steps and calls from 0. Raises
    PlanningError if the seed is not an integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise PlanningError(f"manual_seed({seed!r}): a seed is an integer; fix: dt.manual_seed(0)")
    _state.seed = seed
    _state.epoch += 1
    _resumed.clear()


def initial_seed() -> int:
    """Return the seed that `manual_seed` set last, by default 0."""
    return _state.seed


@lru_cache(maxsize=1024)
def key_of(seed: int, *purpose: str) -> int:
    """Return a 63-bit hash of the seed and the purpose of the random numbers."""
    text = "\x00".join((str(seed), *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(slots=True, eq=False, weakref_slot=True)
class Counter:
    """Counts steps or calls from 0, and from 0 again after `manual_seed`.

    purpose: of the random numbers; "" if `counts` leaves the counter out. epoch: the number of the
    seed under which it counts. resets: how often the count was set.
    """

    purpose: str = ""
    count: int = 0
    epoch: int = -1
    resets: int = 0

    def __post_init__(self) -> None:
        if self.purpose:
            _counters.setdefault(self.purpose, WeakValueDictionary())[next(_serial)] = self
            self._resume()

    def _resume(self) -> None:
        """Continue with the next saved count of this purpose, if there is one."""
        if saved := _resumed.get(self.purpose):
            self.restore(saved[0])
            saved.rotate(-1)

    def present(self) -> int:
        """Return the number of the next step or call."""
        if self.epoch != _state.epoch:
            self.restore(0)
        return self.count

    def advance(self) -> int:
        """Return the number of this step, and count it."""
        number = self.present()
        self.count = number + 1
        return number

    def restore(self, count: int) -> None:
        """Set the count, so that numbers of steps before are no longer taken back."""
        self.epoch, self.count = _state.epoch, count
        self.resets += 1

    def give_back(self, resets: int) -> None:
        """Take back the number of an undone step, unless the count was set since the step, when
        ``resets`` was the number of resets."""
        self.present()
        if resets == self.resets:
            self.count -= 1


_counters: dict[str, WeakValueDictionary[int, Counter]] = {}  # by purpose and serial number
_serial = itertools.count()
_resumed: dict[str, deque[int]] = {}  # purpose -> start values of counters that are made later


def counts() -> dict[str, list[int]]:
    """Return the counts by purpose, in the order in which the counters were made. Counts of a
    resumed run whose counters were not made again follow."""
    saved_counts: dict[str, list[int]] = {}
    for purpose in sorted(_counters.keys() | _resumed.keys()):
        numbers = [counter.present() for counter in _existing_counters(purpose)]
        saved = _resumed.get(purpose, ())
        saved_counts[purpose] = [*numbers, *list(saved)[: max(0, len(saved) - len(numbers))]]
    return {purpose: numbers for purpose, numbers in saved_counts.items() if any(numbers)}


def restore_counts(seed: int, saved: Mapping[str, Sequence[int]]) -> None:
    """Continue with a seed and a result of `counts`. Counters of one purpose get its counts in the
    order in which they were or will be made. Counters of other purposes are unchanged."""
    _state.seed = seed
    _resumed.clear()
    _resumed.update((purpose, deque(numbers)) for purpose, numbers in saved.items())
    for purpose in saved:
        for counter in _existing_counters(purpose):
            counter._resume()


def _existing_counters(purpose: str) -> list[Counter]:
    return [counter for _, counter in sorted(_counters.get(purpose, {}).items())]


def random_inputs(step: int, *purpose: str) -> dict[str, object]:
    """Return the inputs of a program's random ops: the key of the purpose, and the step."""
    return {SEED: key_of(_state.seed, *purpose), STEP: step}
