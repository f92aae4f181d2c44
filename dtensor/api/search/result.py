"""The result of a search: the best strategies, as a table and as Python code.

    found = search(model, loss_fn, 8, tokens, targets)
    print(found)             # the five best, the space, and the points that were refused, with why
    print(found.best.text)   # Python code: mesh, placements, stages, options
    found.best.plan          # its plan; also .seconds, .memory, .mesh, .options

Every number comes from a plan. Prices err by about a tenth, so a strategy within a tenth of the
best is marked as a tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from dtensor.sharding.plan.cost.memory import Memory
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import seconds_text, size_text
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from dtensor.showing import html_text, screen, table

Objective = Literal["time", "memory", "tokens"]
MAX_ROWS = 5
"""Strategies in a result."""
TIE = 0.1
"""The error of prices, as a fraction of the best figure."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FoundStrategy:
    """A strategy that a search found.

    ``options``: keywords of `parallelize` and `train_step` (or `generator`); ``text``: the strategy
    as Python code; ``memory``: bytes of the fullest rank; ``bytes_sent``: bytes that a rank sends
    in a step. For generation, ``plan``, ``seconds`` and ``bytes_sent`` are for decode, ``prefill``
    is the plan of a prompt, and ``memory`` is the larger of both programs.
    """

    name: str
    mesh: Mesh
    placements: Mapping[str, Any]
    options: Mapping[str, Any]
    plan: Plan
    seconds: float
    memory: Memory
    bubble: float
    bytes_sent: int
    text: str
    prefill: Plan | None = None
    prefill_seconds: float | None = None
    tokens_per_second: float | None = None

    def __repr__(self) -> str:
        return f"<strategy {self.name}: {self.figure_words}>"

    @property
    def figure_words(self) -> str:
        """The tokens per second, or the seconds of a step, as text."""
        if self.tokens_per_second is None:
            return seconds_text(self.seconds)
        return f"{tokens_text(self.tokens_per_second)} tokens/s"

    def figure(self, objective: Objective) -> float:
        """Return the number that the search minimizes."""
        match objective:
            case "time":
                return self.seconds
            case "memory":
                return float(self.memory.total)
            case "tokens":
                assert self.tokens_per_second is not None
                return 1 / self.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult:
    """The result of `search`: its str is a table; iteration gives the rows, best first.

    memory_bytes: the limit of a rank. space: a description of the space, with its version.
    num_points: points of the space. num_estimated: points whose lower bound did not exclude them.
    num_bases: plans that the estimates are based on. num_planned: points that were planned.
    over_memory: estimated or planned points that do not fit. refused: by reason, the number of
    points that the planner refused. optimizer: its class, or for generation a description of the
    traffic.
    """

    name: str
    optimizer: str
    objective: Objective
    num_ranks: int
    hardware: str
    memory_bytes: float
    space: str
    rows: tuple[FoundStrategy, ...]
    num_points: int
    num_planned: int
    num_estimated: int
    num_bases: int
    over_memory: int
    refused: Mapping[str, int]

    @property
    def best(self) -> FoundStrategy:
        """The first row."""
        return self.rows[0]

    @property
    def ties(self) -> tuple[FoundStrategy, ...]:
        """The other rows whose figure is within the error of prices of the best figure."""
        best = self.best.figure(self.objective)
        return tuple(r for r in self.rows[1:] if r.figure(self.objective) <= (1 + TIE) * best)

    def __iter__(self) -> Iterator[FoundStrategy]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> FoundStrategy:
        return self.rows[at]

    def __repr__(self) -> str:
        best = f"{self.best.name}, {self.best.figure_words}"
        return screen(f"<search of {self.name} on {self.num_ranks} ranks, best: {best}>")

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


_WHAT = {
    "time": "seconds of a step",
    "memory": "memory of a rank",
    "tokens": "tokens a second",
}


def tokens_text(per_second: float) -> str:
    """Return ``12,345``, or ``0.42`` for a number below 100."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _lines(result: SearchResult) -> Iterator[str]:
    by = f"by {_WHAT[result.objective]}"
    yield f"search {result.name}    {result.optimizer}    {result.num_ranks} ranks    {by}"
    yield ""
    generates = result.objective == "tokens"
    head = ["tokens/s", "a token", "a prompt"] if generates else ["step", "bubble"]
    rows = [["", "strategy", *head, "sent", "memory", ""]]
    for number, row in enumerate(result.rows, 1):
        memory = size_text(row.memory.total)
        figures = [seconds_text(row.seconds), f"{row.bubble:.0%}"]
        if row.prefill_seconds is not None and row.tokens_per_second is not None:
            both = (row.seconds, row.prefill_seconds)
            figures = [tokens_text(row.tokens_per_second), *map(seconds_text, both)]
        marks = ["best"] if number == 1 else ["tie"] if row in result.ties else []
        marks += ["host-bound"] if row.plan.cost.host_bound else []
        sent = size_text(row.bytes_sent)
        rows.append([str(number), row.name, *figures, sent, memory, ", ".join(marks)])
    yield from table(rows, "<<" + ">" * (len(rows[0]) - 3) + "<")
    yield ""
    if result.ties:
        yield f"tie: within {TIE:.0%} of the best, the error of prices"
    yield result.space
    how = f"{result.num_estimated:,} estimated from {result.num_bases} plans, "
    yield (
        f"{result.num_points:,} points: {how if result.num_bases else ''}"
        f"{result.num_planned:,} planned; {result.over_memory:,} are above the "
        f"{size_text(int(result.memory_bytes))} of a rank"
    )
    for reason, count in result.refused.items():
        yield f"refused {count:,}: {reason}"
    yield f"priced for {result.hardware}"


# -- Python code -----------------------------------------------------------------------------------


def keyword_lines(options: Mapping[str, Any]) -> list[str]:
    """Return a line such as ``    zero={"dp": 1},`` for each option, and a line per stage."""
    lines: list[str] = []
    for name, value in options.items():
        if name == "stages":
            ((axis, stages),) = value.items()
            inside = [f"            {python_text(stage)}," for stage in stages]
            lines += ["    stages={", f'        "{axis}": [', *inside, "        ]", "    },"]
        else:
            lines.append(f"    {name}={python_text(value)},")
    return lines


def python_text(value: Any) -> str:
    """Return the Python expression of a value, with names from ``import dtensor as dt``."""
    match value:
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case dict():
            items = (f"{python_text(k)}: {python_text(v)}" for k, v in value.items())
            return "{" + ", ".join(items) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(python_text, value)) + "]"
        case bool() | int() | float() | None:
            return repr(value)
        case Topology():
            named = ((f.name, getattr(value, f.name), f.default) for f in fields(Topology))
            stated = ((n, now) for n, now, usual in named if n != "named" and now != usual)
            return f"dt.Topology({', '.join(f'{n}={python_text(now)}' for n, now in stated)})"
        case Shard() if value == Shard(0):
            return "dt.Row()"
        case _:
            return f"dt.{value!r}"
