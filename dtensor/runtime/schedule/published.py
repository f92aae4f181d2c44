"""Schedules whose backward is one action: GPipe, breadth-first, 1F1B, interleaved 1F1B.

There are p ranks, v stages per rank and m microbatches; stage s is on rank s mod p. Backwards run
in ascending order of microbatches, even if a paper's figure shows descending order. So gradients
are added in the same order under every schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dtensor.errors import PlanningError
from dtensor.runtime.schedule.grid import Action, Grid, place


@dataclass(frozen=True, slots=True)
class OfMicrobatches(ABC):
    """A schedule whose only parameter is the number of microbatches, at least one."""

    microbatches: int

    def __post_init__(self) -> None:
        check_microbatches(self.microbatches)

    @abstractmethod
    def grid(self, num_stages: int, num_ranks: int) -> Grid: ...


@dataclass(frozen=True, slots=True)
class GPipe(OfMicrobatches):
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    The bubble is (p-1)/(m+p-1) of the time, and every stage holds the activations of all m
    microbatches. With several stages per rank it is `LoopedBFS`.
    """

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        return _breadth_first("GPipe", self.microbatches, num_stages, num_ranks)


@dataclass(frozen=True, slots=True)
class LoopedBFS(OfMicrobatches):
    """Each rank runs one stage on all microbatches, then its next stage (breadth-first:
    Lamy-Poirier 2023, arXiv:2211.05953).

    For m >= p the bubble is (p-1)/(v m + p-1) of the time, v times smaller than GPipe's; every
    stage holds the activations of all m microbatches.
    """

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        return _breadth_first("LoopedBFS", self.microbatches, num_stages, num_ranks)


def _breadth_first(name: str, microbatches: int, num_stages: int, num_ranks: int) -> Grid:
    check_equal_stages(name, num_stages, num_ranks)
    forwards = num_stages // num_ranks * microbatches  # on each rank
    return _alternate([range(microbatches)], num_stages, num_ranks, [forwards] * num_ranks)


@dataclass(frozen=True, slots=True)
class OneFOneB(OfMicrobatches):
    """One forward, one backward (PipeDream-flush: Narayanan et al. 2021, arXiv:2006.09503).

    There is one stage per rank. The bubble is (p-1)/(m+p-1) of the time, as for GPipe, but stage s
    holds the activations of at most min(p-s, m) microbatches.
    """

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        check_one_stage_each(
            "1F1B", num_stages, num_ranks, f"Interleaved1F1B(microbatches={self.microbatches})"
        )
        # before its first backward, a stage runs a forward for each later stage
        ahead = [num_stages - stage - 1 for stage in range(num_stages)]
        return _alternate([range(self.microbatches)], num_stages, num_ranks, ahead)


@dataclass(frozen=True, slots=True)
class Interleaved1F1B(OfMicrobatches):
    """1F1B over v stages per rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    A rank runs p microbatches through one of its stages, the same p through its next, and so on.
    For m a multiple of p the bubble is (p-1)/(v m + p-1) of the time. Any other m must be a
    multiple of max(1, m // p), the number of rounds; all rounds have equally many microbatches.
    """

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        check_equal_stages("Interleaved1F1B", num_stages, num_ranks)
        rounds = max(1, self.microbatches // num_ranks)
        if self.microbatches % rounds:
            raise PlanningError(
                f"Interleaved1F1B runs {self.microbatches} microbatches over {num_ranks} ranks in "
                f"{rounds} rounds, which do not divide them.\n"
                f"fix: microbatches={self.microbatches // num_ranks * num_ranks}, a multiple of "
                f"the ranks, or LoopedBFS(microbatches={self.microbatches})"
            )
        size = self.microbatches // rounds
        groups = [range(size * n, size * (n + 1)) for n in range(rounds)]
        v = num_stages // num_ranks
        # Forwards before the first backward: all stages but the last on the first round, and two
        # for each later rank, for the forward and the backward that pass through that rank.
        below = [(2 if v > 1 else 1) * (num_ranks - 1 - rank) for rank in range(num_ranks)]
        return _alternate(groups, num_stages, num_ranks, [(v - 1) * size + n for n in below])


def _alternate(
    groups: Sequence[Sequence[int]], num_stages: int, num_ranks: int, ahead: Sequence[int]
) -> Grid:
    """Return the grid in which rank r runs ``ahead[r]`` forwards, then one forward and one backward
    in turn, then the remaining backwards. A group of microbatches runs through all stages of a rank
    before the next group."""
    orders: list[list[Action]] = []
    for rank in range(num_ranks):
        mine = range(rank, num_stages, num_ranks)
        forwards = [Action("F", m, s) for group in groups for s in mine for m in group]
        backwards = [Action("B", m, s) for group in groups for s in mine[::-1] for m in group]
        order = forwards[: ahead[rank]]
        for forward, backward in zip_longest(forwards[ahead[rank] :], backwards):
            order += [backward] if forward is None else [forward, backward]
        orders.append(order)
    return place(orders)


# -- checks of a schedule's parameters -------------------------------------------------------------


def check_microbatches(microbatches: int) -> None:
    if type(microbatches) is not int or microbatches < 1:
        raise PlanningError(
            f"A schedule has at least one microbatch, and this one has {microbatches!r}.\n"
            f"fix: microbatches=4"
        )


def check_equal_stages(name: str, num_stages: int, num_ranks: int) -> None:
    if num_ranks < 1 or num_stages < 1 or num_stages % num_ranks:
        raise PlanningError(
            f"{name} deals stages out to ranks in turn, and {num_stages} stages do not divide "
            f"over {num_ranks} ranks. Use a multiple of {num_ranks} stages."
        )


def check_one_stage_each(name: str, num_stages: int, num_ranks: int, other: str) -> None:
    if num_ranks < 1 or num_stages != num_ranks:
        raise PlanningError(
            f"{name} holds one stage per rank, and there are {num_stages} stages for {num_ranks} "
            f"ranks. State {max(num_ranks, 1)} stages, or use {other}, which takes several stages "
            f"per rank."
        )
