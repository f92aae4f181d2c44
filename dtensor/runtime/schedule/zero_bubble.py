"""Schedules that split backwards into halves, or that bend the pipeline into a V.

There are p ranks and m microbatches; F, I and W of a stage take f, i and w; B takes i + w.

ZBH1 and ZBH2 have one stage per rank. ZBV and DualPipeV have two stages per rank, as a V: stages s
and 2p-1-s are on rank s, so rank 0 has the first and the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.errors import PlanningError
from dtensor.runtime.schedule.grid import Action, Grid, Kind, place
from dtensor.runtime.schedule.published import OfMicrobatches, check_one_stage_each


@dataclass(frozen=True, slots=True)
class ZBH1(OfMicrobatches):
    """1F1B with delayed W, which fill the idle time at the end (Qi et al. 2023, arXiv:2401.10241,
    section 2.1).

    Stage s runs the W of microbatch j after the I of j + s. Every stage holds the activations of at
    most min(p, m) microbatches, as many as the first stage of 1F1B. For m >= p and w <= i the idle
    time of a rank is (p-1)(f+i-w); for f = i = w this is a third of the idle time of 1F1B.
    """

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        return _with_weights_late("ZB-H1", self.microbatches, num_stages, num_ranks, lag=1)


@dataclass(frozen=True, slots=True)
class ZBH2(OfMicrobatches):
    """ZB-H1 with twice the memory and no bubble (Qi et al. 2023, arXiv:2401.10241, section 2.2).

    Stage s runs 2(p-s-1) forwards ahead, and the W of microbatch j after the I of j + 2s. It holds
    at most min(2p-1, m) microbatches. For f = i = w and m >= 2p-1 no rank idles between its own
    first and last action. Each rank begins and ends f after the rank before it. A step in which all
    ranks end together, for example with a global gradient norm, idles for (p-1) f.
    """

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        return _with_weights_late("ZB-H2", self.microbatches, num_stages, num_ranks, lag=2)


def _with_weights_late(
    name: str, microbatches: int, num_stages: int, num_ranks: int, lag: int
) -> Grid:
    """Return 1F1B in which stage s first runs ``lag`` (p-s-1) forwards, and runs each W ``lag`` s
    microbatches after its I."""
    check_one_stage_each(name, num_stages, num_ranks, "ZBV, with two")
    orders: list[list[Action]] = []
    for stage in range(num_stages):
        forwards = [Action("F", m, stage) for m in range(microbatches)]
        weights = [Action("W", m, stage) for m in range(microbatches)]
        ahead, late = lag * (num_stages - stage - 1), lag * stage
        order = forwards[:ahead]
        for m in range(microbatches):
            order += [*forwards[ahead + m : ahead + m + 1], Action("I", m, stage)]
            order += weights[m - late : m - late + 1] if m >= late else []
        orders.append(order + weights[max(microbatches - late, 0) :])
    return place(orders)


class _VRank:
    """Collects the actions of one rank of a V. ``which`` of its two stages: 0, in the branch that
    goes from the first rank to the last, or 1, in the branch that comes back."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.order: list[Action] = []
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.waiting: list[tuple[int, int]] = []  # (stage, microbatch) of I without W

    def forward(self, which: int) -> None:
        self._add("F", which, self.forwards)

    def full(self, which: int) -> None:
        self._add("B", which, self.backwards)

    def input(self, which: int) -> None:
        self.waiting.append((self.stages[which], self.backwards[which]))
        self._add("I", which, self.backwards)

    def weight(self, which: int | None = None) -> None:
        """Add the oldest W that has not run, of one stage or (None) of either, if there is one."""
        for stage, microbatch in self.waiting:
            if which is None or stage == self.stages[which]:
                self.waiting.remove((stage, microbatch))
                self.order.append(Action("W", microbatch, stage))
                return

    def weights(self, which: int | None = None) -> None:
        while any(which is None or stage == self.stages[which] for stage, _ in self.waiting):
            self.weight(which)

    def _add(self, kind: Kind, which: int, counts: list[int]) -> None:
        self.order.append(Action(kind, counts[which], self.stages[which]))
        counts[which] += 1


@dataclass(frozen=True, slots=True)
class ZBV(OfMicrobatches):
    """Zero bubble with the memory of 1F1B and two stages per rank (Qi et al. 2024,
    arXiv:2401.10241, section 6).

    For f = i = w and microbatches m >= 2p-1 no rank idles between its own first and last action.
    Each rank holds the activations of at most 2p of its half-sized stages.
    """

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        _check_v("ZBV", num_stages, num_ranks)
        # the pattern is for a full pipeline; microbatches that do not exist are left out
        m = max(self.microbatches, 2 * num_ranks - 1)
        orders = [_zbv(rank, num_ranks, m) for rank in range(num_ranks)]
        return place([[a for a in o if a.microbatch < self.microbatches] for o in orders])


def _zbv(rank: int, num_ranks: int, microbatches: int) -> list[Action]:
    v = _VRank(rank, num_ranks)
    for _ in range(2 * (num_ranks - rank) - 1):
        v.forward(0)
    for _ in range(rank):
        v.forward(1)
        v.forward(0)
    for _ in range(num_ranks - rank):
        v.forward(1)
        v.input(1)
        v.weight(1)
    while v.forwards[1] < max(v.forwards[0], microbatches):
        if v.forwards[0] < microbatches:
            v.forward(0)
        v.input(0)
        v.weight(0)
        v.forward(1)
        v.input(1)
        v.weight(1)
    for _ in range(rank):
        v.input(0)
        v.input(1)
    for _ in range(num_ranks - rank):
        v.input(0)
        v.weight(0)
    v.weights(1)
    v.weights(0)
    return v.order


@dataclass(frozen=True, slots=True)
class DualPipeV(OfMicrobatches):
    """DeepSeek's DualPipe cut in half (DeepSeek-AI 2024, arXiv:2412.19437; "DualPipeV" of its
    published code): two microbatches pass a rank in opposite directions, so that the
    communication of one hides behind the compute of the other.

    m must be at least 2p. Its authors give an idle time of (p-1)(FB + B - 3w) for a rank, where FB
    is a forward and a backward that run as one kernel. Here they run one after the other, and an
    action that waits for the forward need not wait for both: for f = i = w a rank idles (p-1) f.
    """

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        _check_v("DualPipeV", num_stages, num_ranks)
        if self.microbatches < 2 * num_ranks:
            raise PlanningError(
                f"DualPipeV runs at least two microbatches for each rank, and there are "
                f"{self.microbatches} for {num_ranks} ranks.\n"
                f"fix: microbatches={2 * num_ranks}, or ZBV(microbatches={self.microbatches})"
            )
        return place([_dualpipe(rank, num_ranks, self.microbatches) for rank in range(num_ranks)])


def _dualpipe(rank: int, num_ranks: int, microbatches: int) -> list[Action]:
    v = _VRank(rank, num_ranks)
    below = num_ranks - rank - 1
    for _ in range(2 * below):
        v.forward(0)
    for _ in range(rank + 1):
        v.forward(0)
        v.forward(1)
    for _ in range(below):
        v.input(1)
        v.weight()
        v.forward(1)
    for _ in range(microbatches - 2 * num_ranks + rank + 1):
        v.forward(0)
        v.full(1)
        v.forward(1)
        v.full(0)
    for _ in range(below):
        v.full(1)
        v.forward(1)
        v.full(0)
    # the second half of the last backwards is split, from stage 1 on odd ranks, 0 on even ranks
    halves = False
    for number in range(rank + 1):
        for which in (1, 0):
            if number == (rank + 1) // 2 and which == (1 if rank % 2 else 0):
                halves = True
            (v.input if halves else v.full)(which)
    for _ in range(below):
        v.weight()
        (v.input if halves else v.full)(0)
    v.weights()
    return v.order


def _check_v(name: str, num_stages: int, num_ranks: int) -> None:
    if num_ranks < 1 or num_stages != 2 * num_ranks:
        fix = f'stages={{"pp": dt.Auto(num_stages={2 * max(num_ranks, 2)})}}'
        if num_ranks < 2:
            there_are = "the mesh has no axis of stages"
            fix += " with dt.Mesh(pp=2), or dt.OneFOneB, which needs no stages"
        else:
            there_are = f"there are {num_stages} stages for {num_ranks} ranks"
        raise PlanningError(f"{name} holds two stages per rank, and {there_are}.\nfix: {fix}")
