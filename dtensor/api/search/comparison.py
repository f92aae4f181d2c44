"""`compare`: the cost of a training step under several strategies, before a cluster is rented.

    found = compare(model, loss_fn, {
        "tp4": (Mesh(tp=4), MEGATRON),
        "dp4": (Mesh(dp=4), {}, dict(inputs=dict(dp=Row()), zero={"dp": 3})),
    }, tokens, targets, topology=Topology(bandwidth={"tp": 400e9, "dp": 50e9}))
    print(found)                           # one table
    found["tp4"].seconds, found["tp4"].memory.total, found["tp4"].plan

The program is captured once and planned once for each strategy; nothing is launched or computed,
the model may be on the meta device and stays as it is. A strategy without a plan keeps its row,
with the reason. Numbers are for one rank: if stages differ, for the one with the most.

The table shows the decisive figures first, then bytes by axis and phase, then memory:

    strategy    mesh         step        bubble   collectives   sent       memory
    tp4         mesh(tp=4)   1.21 ms *   0%       24            48.0 MiB   1.2 GiB *
    dp4         no plan: result 0 is neither a sum nor a mean over the rows of the batch.

``*`` marks the least of a column; in the first block the least of the strategies that fit, if any
does. ``!`` marks memory above that of a rank's device. A column of equal values has no mark. Bytes
are binary (MiB). Not here: prices (sharding/plan/cost).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtensor.api.eager.tensor import DTensor
from dtensor.api.model.parallel import ParallelModule, parallelize
from dtensor.api.model.stating.patterns import listing, nearest
from dtensor.api.step.plan_call import BoundCall, for_capture
from dtensor.api.step.training import train_step
from dtensor.api.step.wrapped_optimizers import torchs_own
from dtensor.errors import PlanningError, check_callable, check_kind
from dtensor.frontend.graph import Graph
from dtensor.gc_pause import collector_paused
from dtensor.private_torch import pytree
from dtensor.runtime.optimizer.elementwise.optimizer_rule import check_optimizer
from dtensor.runtime.schedule import Schedule
from dtensor.sharding.plan.cost.memory import Memory
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import seconds_text, size_text
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.showing import html_text, screen

Strategy = tuple[Any, ...] | Mapping[str, Any]
"""(mesh, placements), (mesh, placements, options), or a dict with "mesh", "placements", options:
keywords of `parallelize` and `train_step`."""
MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One strategy and its plan, or the PlanningError that planning raised. ``schedule``: the
    stated schedule; None if the step has no microbatches."""

    name: str
    mesh: Mesh
    found: Plan | PlanningError
    schedule: Schedule | None = None

    @property
    def error(self) -> PlanningError | None:
        """The reason why it has no plan; None if it has one."""
        return self.found if isinstance(self.found, PlanningError) else None

    @property
    def plan(self) -> Plan:
        """The plan. Raises the strategy's PlanningError if it has none."""
        if isinstance(self.found, PlanningError):
            raise self.found
        return self.found

    @property
    def bytes(self) -> dict[tuple[str, str], int]:
        """(axis, phase) to the bytes that a rank sends in a step, for the stage that sends most."""
        sent = self.plan.totals.most_sent(lambda key: (key[0], str(key[1])))
        return {key: most.bytes_sent for key, most in sent.items()}

    @property
    def bytes_sent(self) -> int:
        """Bytes of the rank that sends most in a step, over all axes and phases."""
        return self.plan.totals.bytes_sent

    @property
    def num_collectives(self) -> int:
        """Collectives that a rank starts in a step, transfers included."""
        return self.plan.totals.num_collectives

    @property
    def memory(self) -> Memory:
        """The memory of the fullest rank: the sum of its stages."""
        return self.plan.totals.memory

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory is within ``topology.memory_bytes``."""
        return self.plan.totals.fits

    @property
    def seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.plan.cost.seconds

    @property
    def bubble(self) -> float:
        """The fraction of the time of a pipeline's ranks spent waiting for other stages."""
        return self.plan.cost.bubble


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """The result of `compare`; its str is the table. ``comparison["tp4"]`` is a row."""

    name: str
    optimizer: str
    rows: tuple[Compared, ...]

    def __getitem__(self, name: str) -> Compared:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no strategy {name!r}; there are {listing([r.name for r in self.rows])}")

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        names = [row.name for row in self.rows]
        return screen(f"<comparison of {self.name}: {listing(names)}>")

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __str__(self) -> str:
        return _table_of(self)


def compare(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    strategies: Mapping[str, Strategy],
    *batch: Any,
    topology: Topology | None = None,
    optimizer: MakeOptimizer | torch.optim.Optimizer = torch.optim.AdamW,
    **kwargs: Any,
) -> Comparison:
    """The cost of a step of ``loss_fn(model, *batch, **kwargs)`` under each of ``strategies``.

    Args:
        strategies: name to (mesh, placements), to (mesh, placements, options), or to a dict of
            these; options are keywords of `parallelize` and `train_step` (``stages``, ``zero``,
            ``inputs``, ``schedule``, ``topology``, ...).
        batch: tensors (meta too), `spec`s, or a torch.Size for float32 of it; shapes are global.
        topology: the hardware of the prices, and the memory of a rank; a strategy may state its
            own.
        optimizer: a class, or a function of the parameters, or an optimizer over them.

    Raises PlanningError for a program that cannot be captured, and for an invalid strategy. A valid
    one without a plan is a row with its error.
    """
    fix = "dt.compare(GPT(config), loss_fn, {...}, *batch)"
    check_model("compare", model, fix)
    check_callable("loss_fn", loss_fn, "lambda model, x, y: ...")
    check_topology(topology)
    if not isinstance(strategies, Mapping) or not strategies:
        raise PlanningError(
            f"strategies is {strategies!r}, not a dict of at least one strategy.\n"
            f'fix: {{"tp2": (dt.Mesh(tp=2), placements)}}'
        )
    stated = [_stated(name, strategy) for name, strategy in strategies.items()]
    return _compared(CapturedStep.of(model, loss_fn, batch, kwargs, optimizer), stated, topology)


def compare_captured(
    graph: Graph,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    strategies: Mapping[str, Strategy],
    *batch: Any,
    topology: Topology | None,
    optimizer: torch.optim.Optimizer,
) -> Comparison:
    """`compare` for a captured step."""
    stated = [_stated(name, strategy) for name, strategy in strategies.items()]
    step = CapturedStep(
        model=model, loss_fn=loss_fn, optimizer=optimizer, graph=graph, args=batch, kwargs={}
    )
    return _compared(step, stated, topology)


def _compared(
    step: CapturedStep, stated: Sequence[_Stated], topology: Topology | None
) -> Comparison:
    return Comparison(
        name=step.name,
        optimizer=type(step.optimizer).__name__,
        rows=tuple(_row(step, one, topology or Topology()) for one in stated),
    )


def check_model(who: str, model: object, fix: str) -> None:
    """PlanningError unless it is a module that is not placed yet."""
    if isinstance(model, ParallelModule):
        raise PlanningError(
            f"{who} places the model anew for each strategy, and this one is parallelized.\n"
            "fix: pass the original, model.module"
        )
    check_kind(f"the first argument of {who}", model, nn.Module, "an nn.Module", fix)


# -- the captured step ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A training step, captured once, that is planned under any strategy."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    graph: Graph
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    @collector_paused()
    def of(
        model: nn.Module,
        loss_fn: Callable[..., Any],
        batch: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        optimizer: MakeOptimizer | torch.optim.Optimizer,
    ) -> CapturedStep:
        """Capture a step. PlanningError for a program that cannot be captured, and without an
        optimizer."""
        over = optimizer
        if not isinstance(over, torch.optim.Optimizer):
            check_callable("optimizer", over, "torch.optim.AdamW, or an optimizer")
            over = over(model.parameters())
        over = torchs_own(over)
        check_optimizer(over)
        args, named = pytree.tree_map(_argument, (batch, dict(kwargs)))
        return CapturedStep(
            model=model,
            loss_fn=loss_fn,
            optimizer=over,
            graph=BoundCall.of(loss_fn, (model, *args), named).graph("loss"),
            args=args,
            kwargs=named,
        )

    @property
    def name(self) -> str:
        return getattr(self.loss_fn, "__name__", "step").strip("<>")

    def planned(self, name: str, strategy: Strategy, topology: Topology) -> Compared:
        """The step's row under a strategy. PlanningError for an invalid one."""
        return _row(self, _stated(name, strategy), topology)


# -- strategies ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """A strategy with its options by function."""

    name: str
    mesh: Mesh
    placements: Any
    parallelize: Mapping[str, Any]
    train_step: Mapping[str, Any]


def _keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _stated(name: str, strategy: object) -> _Stated:
    """PlanningError unless it is a mesh, placements and known options."""
    match strategy:
        case Mapping():
            options = dict(strategy)
            mesh, placements = options.pop("mesh", None), options.pop("placements", {})
        case (mesh, placements):
            options = {}
        case (mesh, placements, Mapping() as given):
            options = dict(given)
        case _:
            mesh, placements, options = None, {}, {}
    if not isinstance(mesh, Mesh):
        raise PlanningError(
            f'the strategy "{name}" is {strategy!r}, without a mesh where one is expected.\n'
            f"fix: (dt.Mesh(tp=2), placements), or (dt.Mesh(dp=2), placements, "
            f"dict(inputs=dict(dp=dt.Row())))"
        )
    known = {"parallelize": _keywords(parallelize), "train_step": _keywords(train_step)}
    known["parallelize"].remove("recompute")  # either function takes it, but not both
    for key in options:
        if not any(key in names for names in known.values()):
            every = [option for names in known.values() for option in names]
            near = nearest(str(key), every)
            raise PlanningError(
                f'the strategy "{name}" states {key!r}, which is no option of parallelize or '
                f"train_step.\n"
                f"  options: {', '.join(every)}\n"
                f"fix: {near[0] if near else every[0]}="
            )
    return _Stated(
        name=name,
        mesh=mesh,
        placements=placements,
        # initial values are no part of a plan, and recording them takes time
        parallelize={k: options[k] for k in known["parallelize"] if k in options and k != "init"},
        # an option that both take is stated to one of them
        train_step={
            k: options[k]
            for k in known["train_step"]
            if k in options and k not in known["parallelize"]
        },
    )


def _argument(leaf: Any) -> Any:
    """A batch's leaf in a form for every mesh: an argument without a placement has no mesh."""
    match leaf:
        case torch.Size():
            return torch.empty(leaf, device="meta")
        case DTensor():
            return leaf.spec
        case TensorSpec() if not leaf.on and set(leaf.placements) <= {REPLICATE}:
            return for_capture(leaf)
        case _:
            return leaf


def _row(program: CapturedStep, stated: _Stated, topology: Topology) -> Compared:
    try:
        parallel = parallelize(program.model, stated.mesh, stated.placements, **stated.parallelize)
        options = {"topology": topology, **stated.train_step}
        step = train_step(parallel, program.loss_fn, program.optimizer, **options)
        found: Plan | PlanningError = step.plan_of(program.graph, *program.args, **program.kwargs)
    except PlanningError as error:
        found = error
    schedule = stated.train_step.get("schedule")
    return Compared(name=stated.name, mesh=stated.mesh, found=found, schedule=schedule)


# -- the table -------------------------------------------------------------------------------------

_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class _Column:
    """A title, a row's number (None where it has none), and the number's text."""

    title: str
    number: Callable[[Compared], float]
    text: Callable[[float], str]


def _table_of(comparison: Comparison) -> str:
    """The table; deterministic, without a trailing newline."""
    planned = [row for row in comparison.rows if row.error is None]
    lines = [f"compare {comparison.name}    {comparison.optimizer}", ""]
    blocks = [_decides(comparison.rows, planned)]
    if planned:
        blocks.append(_sent(planned))
        rare = ("masters", "not at once")
        columns = [c for c in _MEMORY if c.title not in rare or any(map(c.number, planned))]
        blocks.append(_block("memory of the fullest rank", columns, planned, planned))
    first = max(len(row[0]) for block in blocks for row in block)
    for block in blocks:
        lines += [*_aligned(block, first), ""]
    return "\n".join([*lines, *_legend(blocks, planned)]).rstrip()


def _size(num: float) -> str:
    return size_text(int(num))


_DECIDING = (
    _Column("step", lambda r: r.seconds, seconds_text),
    _Column("bubble", lambda r: r.bubble, "{:.0%}".format),
    _Column("collectives", lambda r: r.num_collectives, "{:.0f}".format),
    _Column("sent", lambda r: r.bytes_sent, _size),
    _Column("memory", lambda r: r.memory.total, _size),
)
_MEMORY = (
    _Column("parameters", lambda r: r.memory.parameters, _size),
    _Column("gradients", lambda r: r.memory.gradients, _size),
    _Column("optimizer", lambda r: r.memory.optimizer, _size),
    _Column("masters", lambda r: r.memory.masters, _size),
    _Column("activations", lambda r: r.memory.activations, _size),
    _Column("not at once", lambda r: -r.memory.not_at_once, _size),
    _Column("total", lambda r: r.memory.total, _size),
)


def _decides(rows: Sequence[Compared], planned: Sequence[Compared]) -> list[list[str]]:
    """One line for each strategy; for one without a plan, the reason."""
    block = _block("strategy", _DECIDING, planned, [r for r in planned if r.fits] or planned)
    texts = {row.name: cells for row, cells in zip(planned, block[1:], strict=True)}
    schedules = {row.name: schedule_text(row.schedule) for row in planned}
    said = any(text not in name for name, text in schedules.items())  # names may have it already
    lines = [[block[0][0], "mesh", *["schedule"][:said], *block[0][1:]]]
    for row in rows:
        if row.error is None:
            shown = [schedules[row.name]][:said]
            lines.append([row.name, str(row.mesh), *shown, *texts[row.name][1:]])
        else:
            lines.append([row.name, f"no plan: {str(row.error).splitlines()[0]}"])
    return lines


def schedule_text(schedule: Schedule | None) -> str:
    """``OneFOneB(8)``: the class and its microbatches; "" for None."""
    return "" if schedule is None else f"{type(schedule).__name__}({schedule.microbatches})"


def _sent(planned: Sequence[Compared]) -> list[list[str]]:
    """A line for each strategy and axis; axes do not compete, so nothing is marked."""
    lines = [["sent per rank and step", "axis", *(f"{phase}  " for phase in _PHASES)]]
    for row in planned:
        name = row.name
        for axis in (axis for axis, num in row.mesh.shape.items() if num > 1):
            sent = [_size(row.bytes.get((axis, phase), 0)) for phase in _PHASES]
            lines.append([name, axis, *(f"{text}  " for text in sent)])
            name = ""
    return lines


def _block(
    title: str,
    columns: Sequence[_Column],
    rows: Sequence[Compared],
    candidates: Sequence[Compared],
) -> list[list[str]]:
    """The title and the columns' titles; then each row's cells, the least of candidates marked."""
    lines = [[title], *([row.name] for row in rows)]
    for column in columns:
        among = [column.number(row) for row in candidates]
        least = min(among) if len(set(among)) > 1 else None
        lines[0].append(column.title + "  ")
        for cells, row in zip(lines[1:], rows, strict=True):
            number = column.number(row)
            mark = "*" if number == least and row in candidates else " "
            if column.title in ("memory", "total") and not row.fits:
                mark = "!"
            cells.append(f"{column.text(number)} {mark}")
    return lines


def _aligned(rows: Sequence[Sequence[str]], first: int) -> list[str]:
    """Numbers to the right; the last cell of a short row extends to the end."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [first, *(max(len(row[i]) for row in full) for i in range(1, len(rows[0])))]
    left = 1 + sum(title in ("mesh", "schedule", "axis") for title in rows[0])
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]


def _legend(blocks: Sequence[list[list[str]]], planned: Sequence[Compared]) -> list[str]:
    cells = [cell for block in blocks for row in block[1:] for cell in row[1:]]
    lines = ["* the least of its column"] if any(cell.endswith(" *") for cell in cells) else []
    sizes = sorted({row.plan.topology.memory_bytes for row in planned if not row.fits})
    lines += [f"! above the {_size(size)} of a rank's device" for size in sizes]
    if lines and any(not row.fits for row in planned) and any(row.fits for row in planned):
        lines[0] += "; in the first block, of the strategies that fit"
    if bound := [row.name for row in planned if row.plan.cost.host_bound]:
        names = "all" if len(bound) == len(planned) else ", ".join(bound)
        lines.append(f"host-bound, launches take longer than the device: {names}")
    return lines
