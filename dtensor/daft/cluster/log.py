"""What a controller has asked of its hosts and may have to ask again, if one of them is lost.

    log = Log()
    log.add(SentCall(host=0, change=8, run=3, ...))
    log.add(SentCall(host=1, change=8, run=3, ...))
    log.drop([8, 8], came)                     # change 8 is committed on both: it is dropped
    log.ended([9, 9], came)                    # [9, 8]: an answer of host 1's to change 9 is lost
    log.again({0: 8, 1: 8}, came)              # the calls to make again, in order

A *change* is a call that changes a host's table (`changes.py` says which of them are committed); to
others an answer is all that matters. A host may have ended a change whose answer died with it: then
the change does not count as ended, as nobody else has what it gave.

Invariants: pure. Calls keep their order. An answer that is here is not asked for again, unless what
it was an answer to is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dtensor.daft.errors import Failure


@dataclass(slots=True, kw_only=True)
class SentCall:
    """A call of one host. `change`: its number, None where it changes nothing; `run`: of the run
    that it is of. `asked`: what stands for its answer, None where it has none. `message`: what to
    send again, of `nbytes`; `number`: of the call among those of its host. `gave`: it was answered,
    and not by an error, before it was sent again. `undone`: it is not done again, but its run
    gives a failure."""

    host: int
    change: int | None
    run: int | None
    asked: Any | None
    message: Any
    number: int
    nbytes: int
    gave: bool = False
    undone: bool = False
    serial: int = 0  # in the order of the log


Came: TypeAlias = Callable[[SentCall], bool]
"""Whether the answer to a call is here; asked of those alone that have one."""


@dataclass(slots=True)
class Log:
    calls: list[SentCall] = field(default_factory=list[SentCall])
    nbytes: int = 0
    added: int = 0  # calls, ever

    def add(self, call: SentCall) -> None:
        call.serial, self.added = self.added, self.added + 1
        self.calls.append(call)
        self.nbytes += call.nbytes

    def drop(self, base: Sequence[int], came: Came) -> None:
        """Changes up to `base` of their host are not made again, and answers that are here stay."""
        self.calls = self.again(dict(enumerate(base)), came)
        self.nbytes = sum(call.nbytes for call in self.calls)

    def ended(self, ended: Sequence[int], came: Came) -> list[int]:
        """By host, the last change that it has ended and whose answers, and those before, are here;
        of what it has ended itself."""
        found, open_ = list(ended), set[int]()
        for call in self.calls:
            if call.asked is not None and not came(call):
                open_.add(call.host)
            if call.host in open_ and call.change is not None:
                found[call.host] = min(found[call.host], call.change - 1)
        return found

    def again(self, cut: Mapping[int, int], came: Came) -> list[SentCall]:
        """The calls to make again where each host is as it was right after its change in `cut`."""

        def missing(call: SentCall) -> bool:
            if call.change is not None:
                return call.change > cut[call.host]
            return call.asked is not None and not came(call)

        return list(filter(missing, self.calls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What was lost once, and what became of it. `failures`: of each lost process, what it was
    doing, or what broke where none was lost; `by`: what took its place, nothing where the processes
    that are there connected anew; `ranks`: those it hosted; `runs`: how many runs were done again;
    `begun`: when it was seen, by the monotonic clock."""

    failures: tuple[Failure, ...]
    ranks: tuple[int, ...]
    by: tuple[str, ...]
    runs: int
    begun: float
    seconds: float

    def __str__(self) -> str:
        again = f"{self.runs} run{'' if self.runs == 1 else 's'} done again"
        how = f"replaced by {' and '.join(self.by)}" if self.by else "connected anew"
        head = f"recovered in {self.seconds:.2f} s: {how}, {again}"
        return "\n".join((head, *map(str, self.failures)))
