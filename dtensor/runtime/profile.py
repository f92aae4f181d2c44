"""The profile of a step: the parts of its time on each rank, measured and predicted.

    profile = step.profile(20, tokens, targets)
    profile.seconds                        # of a step, by the clock
    profile.ranks[0].kernels["mm"].seconds, .predicted, .times
    profile.ranks[0].waiting[1,]           # time in `Wait` for rank 1
    profile.ranks[0].overhead["channel"]
    print(profile)                         # a table for each rank

Invariants: the parts of a rank do not overlap, and their sum plus `remainder` is ``seconds``.
breakdown.py divides a step into parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dtensor.sharding.plan.text.words import seconds_text
from dtensor.showing import html_text, screen, table

SHOWN_OPS = 12
SHOWN_RANKS = 8
LAYERS: Mapping[str, str] = {
    "controller": "Python before the run and after it",
    "channel": "to the ranks and back",
    "engine": "between instructions",
    "starts": "of messages",
    "dispatch": "of ops",
}
"""The kinds of overhead, from the outermost to the innermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A part of a step's time, in seconds. ``predicted``: predicted seconds, None if there is no
    prediction; ``times``: occurrences in a step, 0 if they are not counted."""

    seconds: float
    predicted: float | None = None
    times: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """The parts of a step's time on one rank, longest first.

    ``kernels``: by op. ``waiting``: by the ranks that are waited for. ``overhead``: by kind.
    ``other_ranks``: turns of other ranks on the same thread. ``idle``: before the first instruction
    and after the last.
    """

    rank: int
    kernels: Mapping[str, Spent]
    waiting: Mapping[tuple[int, ...], Spent]
    overhead: Mapping[str, Spent]
    other_ranks: Spent
    idle: Spent

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return sum(spent.seconds for spent in self._all())

    def _all(self) -> Iterator[Spent]:
        for part in (self.kernels, self.waiting, self.overhead):
            yield from part.values()
        yield from (self.other_ranks, self.idle)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """The result of ``step.profile``; its str is a table for each rank.

    ``seconds``: of a step without time stamps, by the controller's clock. ``predicted``: predicted
    seconds on ``hardware``. ``instrumentation``: the extra seconds of steps with time stamps, which
    no figure includes. ``num_steps``: the number of measured steps with and without stamps.
    """

    name: str
    seconds: float
    predicted: float
    hardware: str
    instrumentation: float
    num_steps: int
    ranks: tuple[RankProfile, ...]

    def remainder(self, rank: int) -> float:
        """Return ``seconds`` minus all parts of a rank. It is not 0 because medians do not add up;
        on a GPU concurrent work makes it negative."""
        return self.seconds - self.ranks[rank].seconds

    def __repr__(self) -> str:
        step_seconds = f"{seconds_text(self.seconds)} a step, ranks: {len(self.ranks):,}"
        return f"<profile {self.name}: {step_seconds}>"

    def _repr_html_(self) -> str:
        return html_text(screen(str(self)))

    def __str__(self) -> str:
        steps = f"median of {self.num_steps} steps"
        side = "less" if self.instrumentation < 0 else "more"
        lines = [
            f"profile {self.name}    {seconds_text(self.seconds)} a step, "
            f"{seconds_text(self.predicted)} predicted for {self.hardware}; {steps}",
            f"with stamps {seconds_text(abs(self.instrumentation))} {side}, not in the table",
        ]
        for rank_profile in self.ranks[:SHOWN_RANKS]:
            lines += ["", *table([*self._rows(rank_profile)])]
        if len(self.ranks) > SHOWN_RANKS:
            lines += ["", f"and {len(self.ranks) - SHOWN_RANKS} ranks more: profile.ranks"]
        return "\n".join(lines)

    def _rows(self, rank_profile: RankProfile) -> Iterator[tuple[str, ...]]:
        def row(what: str, spent: Spent) -> tuple[str, ...]:
            share = f"{100 * spent.seconds / self.seconds:.1f}%" if self.seconds else ""
            predicted = "" if spent.predicted is None else seconds_text(spent.predicted)
            times = f"{spent.times:,}" if spent.times else ""
            return what, _signed(spent.seconds), share, predicted, times

        yield f"rank {rank_profile.rank}", "measured", "share", "predicted", "times"
        yield row("kernels", _sum(rank_profile.kernels.values()))
        ops = list(rank_profile.kernels.items())
        shown = ops if len(ops) <= SHOWN_OPS + 1 else ops[:SHOWN_OPS]
        for op, spent in shown:
            yield row(f"  {op}", spent)
        if omitted := ops[len(shown) :]:
            yield row(f"  {len(omitted)} others", _sum([spent for _, spent in omitted]))
        yield row("waiting", _sum(rank_profile.waiting.values()))
        for peers, spent in rank_profile.waiting.items():
            ranks_text = ", ".join(map(str, peers))
            yield row(f"  for rank{'s' * (len(peers) > 1)} {ranks_text}", spent)
        yield row("overhead", _sum(rank_profile.overhead.values()))
        for layer, spent in rank_profile.overhead.items():
            yield row(f"  {layer}: {LAYERS[layer]}", spent)
        if rank_profile.other_ranks.seconds:
            yield row("turns of other ranks in this process", rank_profile.other_ranks)
        yield row("idle", rank_profile.idle)
        yield row("remainder", Spent(seconds=self.seconds - rank_profile.seconds))
        yield row("step", Spent(seconds=self.seconds, predicted=self.predicted))


def _sum(parts: Iterable[Spent]) -> Spent:
    """Return the sum of several parts; its prediction is the sum of those that have a
    prediction."""
    parts_list = list(parts)
    predictions = [spent.predicted for spent in parts_list if spent.predicted is not None]
    return Spent(
        seconds=sum(spent.seconds for spent in parts_list),
        predicted=sum(predictions) if predictions else None,
        times=sum(spent.times for spent in parts_list),
    )


def _signed(seconds: float) -> str:
    return f"-{seconds_text(-seconds)}" if seconds < 0 else seconds_text(seconds)
