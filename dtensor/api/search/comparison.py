"""`compare`: print what a training step costs under several strategies.

    found = compare(model, loss_fn, {
        "tp4": (Mesh(tp=4), MEGATRON),
        "dp4": (Mesh(dp=4), {}, dict(inputs=dict(dp=Row()), zero={"dp": 3})),
    }, tokens, targets, topology=Topology(bandwidth={"tp": 400e9, "dp": 50e9}))
    print(found)       # the seconds of a step, bytes sent by axis and phase, and memory
    found["tp4"].seconds, found["tp4"].memory.total, found["tp4"].plan

The program is captured once and planned for each strategy; nothing is launched. The row of a
strategy that the planner refuses gives the reason. Numbers are for the rank with the largest value.
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
from dtensor.api.step.bound_call import BoundCall, for_capture
from dtensor.api.step.train_step import train_step
from dtensor.api.step.wrapped_optimizers import Optimizers, checked_optimizers, kinds_text
from dtensor.errors import PlanningError, check_callable, check_kind
from dtensor.frontend.graph import Graph
from dtensor.gc_pause import collector_paused
from dtensor.private_torch import pytree
from dtensor.runtime.schedule import Schedule
from dtensor.sharding.plan.cost.memory import Memory
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import seconds_text, size_text
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.showing import html_text, screen, table

Strategy = tuple[Any, ...] | Mapping[str, Any]
"""(mesh, placements), (mesh, placements, options), or a dict with "mesh", "placements" and options.
Options are keywords of `parallelize` and `train_step`."""
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A strategy with its plan, or with the PlanningError that the planner raised.

    ``schedule``: the stated schedule; None if the step has no microbatches.
    """

    name: str
    mesh: Mesh
    found: Plan | PlanningError
    schedule: Schedule | None = None

    @property
    def error(self) -> PlanningError | None:
        """The reason why the strategy has no plan; None if it has a plan."""
        return self.found if isinstance(self.found, PlanningError) else None

    @property
    def plan(self) -> Plan:
        """The plan. Raises the planner's PlanningError if there is no plan."""
        if isinstance(self.found, PlanningError):
            raise self.found
        return self.found

    @property
    def bytes(self) -> dict[tuple[str, str], int]:
        """By (axis, phase), the bytes that a rank of the stage that sends most sends in a step."""
        sent = self.plan.totals.max_sent_by(lambda key: (key[0], str(key[1])))
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
    """The result of `compare`: its str is a table; ``comparison["tp4"]`` is a row."""

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
    optimizer: MakeOptimizer | Optimizers = torch.optim.AdamW,
    **kwargs: Any,
) -> Comparison:
    """Return the cost of a step of ``loss_fn(model, *batch, **kwargs)`` under each strategy.

    Args:
        strategies: by name, (mesh, placements), (mesh, placements, options), or a dict with
            "mesh", "placements" and options; options are keywords of `parallelize` and
            `train_step` (``stages``, ``zero``, ``inputs``, ``schedule``, ``topology``, ...).
        batch: tensors (meta too), `spec`s, or a torch.Size, which stands for a float32 tensor;
            shapes are global.
        topology: the hardware that the prices are for, with the memory of a rank; a strategy may
            state another topology.
        optimizer: a class, or a function of the parameters, or an optimizer over them, or a list.

    Raises PlanningError if the program cannot be captured or a strategy is invalid. A valid
    strategy that the planner refuses is a row with the error.
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
    stated = [_parse_strategy(name, strategy) for name, strategy in strategies.items()]
    return _compare(CapturedStep.of(model, loss_fn, batch, kwargs, optimizer), stated, topology)


def compare_captured(
    graph: Graph,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    strategies: Mapping[str, Strategy],
    *batch: Any,
    topology: Topology | None,
    optimizer: Optimizers,
) -> Comparison:
    """Return the comparison of a step that is already captured, as `compare` does."""
    stated = [_parse_strategy(name, strategy) for name, strategy in strategies.items()]
    optimizers = checked_optimizers(optimizer, least=1)
    step = CapturedStep(
        model=model, loss_fn=loss_fn, optimizers=optimizers, graph=graph, args=batch, kwargs={}
    )
    return _compare(step, stated, topology)


def _compare(
    step: CapturedStep, stated: Sequence[_StrategyOptions], topology: Topology | None
) -> Comparison:
    return Comparison(
        name=step.name,
        optimizer=kinds_text(step.optimizers),
        rows=tuple(_plan_row(step, strategy, topology or Topology()) for strategy in stated),
    )


def check_model(who: str, model: object, fix: str) -> None:
    """Raise PlanningError unless ``model`` is an nn.Module that is not parallelized."""
    if isinstance(model, ParallelModule):
        raise PlanningError(
            f"{who} places the model for each strategy, but this model is already parallelized.\n"
            "fix: pass the original module, model.module"
        )
    check_kind(f"the first argument of {who}", model, nn.Module, "an nn.Module", fix)


# -- the captured step ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A captured training step, which can be planned under any strategy."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizers: tuple[torch.optim.Optimizer, ...]
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
        optimizer: MakeOptimizer | Optimizers,
    ) -> CapturedStep:
        """Capture a step. Raises PlanningError if it cannot be captured or has no optimizer."""
        made, fix = optimizer, "torch.optim.AdamW, or an optimizer"
        if not isinstance(made, torch.optim.Optimizer | Sequence):
            check_callable("optimizer", made, fix)
            made = made(model.parameters())
        optimizers = checked_optimizers(made, fix, least=1)
        args, named = pytree.tree_map(_argument, (batch, dict(kwargs)))
        return CapturedStep(
            model=model,
            loss_fn=loss_fn,
            optimizers=optimizers,
            graph=BoundCall.of(loss_fn, (model, *args), named).graph("loss"),
            args=args,
            kwargs=named,
        )

    @property
    def name(self) -> str:
        return getattr(self.loss_fn, "__name__", "step").strip("<>")

    def planned(self, name: str, strategy: Strategy, topology: Topology) -> Compared:
        """Return the step's row under a strategy. Raises PlanningError if it is invalid."""
        return _plan_row(self, _parse_strategy(name, strategy), topology)


# -- strategies ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _StrategyOptions:
    """A strategy whose options are sorted by the function that takes them."""

    name: str
    mesh: Mesh
    placements: Any
    parallelize: Mapping[str, Any]
    train_step: Mapping[str, Any]


def _keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _parse_strategy(name: str, strategy: object) -> _StrategyOptions:
    """Return the parsed strategy. Raises PlanningError for another form or an unknown option."""
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
            f'the strategy "{name}" is {strategy!r}, which has no mesh.\n'
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
                f'the strategy "{name}" states {key!r}, which is not an option of parallelize or '
                f"train_step.\n"
                f"  options: {', '.join(every)}\n"
                f"fix: {near[0] if near else every[0]}="
            )
    return _StrategyOptions(
        name=name,
        mesh=mesh,
        placements=placements,
        # A plan does not depend on initial values, and recording them takes time.
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


def _plan_row(program: CapturedStep, stated: _StrategyOptions, topology: Topology) -> Compared:
    """Return the row of a strategy, with its plan or the planner's error."""
    try:
        parallel = parallelize(program.model, stated.mesh, stated.placements, **stated.parallelize)
        options = {"topology": topology, **stated.train_step}
        step = train_step(parallel, program.loss_fn, program.optimizers, **options)
        found: Plan | PlanningError = step.plan_of(program.graph, *program.args, **program.kwargs)
    except PlanningError as error:
        found = error
    schedule = stated.train_step.get("schedule")
    return Compared(name=stated.name, mesh=stated.mesh, found=found, schedule=schedule)


# -- the table -------------------------------------------------------------------------------------

_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table: its title, the number of a row, and the text of a number."""

    title: str
    number: Callable[[Compared], float]
    text: Callable[[float], str]


def _table_of(comparison: Comparison) -> str:
    """Return the table: deciding figures, then bytes by axis and phase, then memory.

    ``*`` marks the least number of a column, in the first block among the strategies that fit;
    ``!`` marks memory above the limit of a device. A column of equal numbers has no mark.
    """
    planned = [row for row in comparison.rows if row.error is None]
    lines = [f"compare {comparison.name}    {comparison.optimizer}", ""]
    blocks = [_deciding_block(comparison.rows, planned)]
    if planned:
        blocks.append(_sent_block(planned))
        rare = ("masters", "not at once")
        columns = [c for c in _MEMORY if c.title not in rare or any(map(c.number, planned))]
        blocks.append(_block("memory of the fullest rank", columns, planned, planned))
    first = max(len(row[0]) for block in blocks for row in block)
    for block in blocks:
        num_left = 1 + sum(title in ("mesh", "schedule", "axis") for title in block[0])
        lines += [*table(block, "<" * num_left + ">", first_width=first), ""]
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


def _deciding_block(rows: Sequence[Compared], planned: Sequence[Compared]) -> list[list[str]]:
    """Return a line for each strategy; a strategy without a plan gives the reason."""
    block = _block("strategy", _DECIDING, planned, [r for r in planned if r.fits] or planned)
    texts = {row.name: cells for row, cells in zip(planned, block[1:], strict=True)}
    schedules = {row.name: schedule_text(row.schedule) for row in planned}
    show_schedules = any(text not in name for name, text in schedules.items())
    lines = [[block[0][0], "mesh", *["schedule"][:show_schedules], *block[0][1:]]]
    for row in rows:
        if row.error is None:
            shown = [schedules[row.name]][:show_schedules]
            lines.append([row.name, str(row.mesh), *shown, *texts[row.name][1:]])
        else:
            lines.append([row.name, f"no plan: {str(row.error).splitlines()[0]}"])
    return lines


def schedule_text(schedule: Schedule | None) -> str:
    """Return a schedule as ``OneFOneB(8)``, its class and microbatches; "" for None."""
    return "" if schedule is None else f"{type(schedule).__name__}({schedule.microbatches})"


def _sent_block(planned: Sequence[Compared]) -> list[list[str]]:
    """Return a line for each strategy and axis, without marks: axes are not alternatives."""
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
    """Return titles, then the cells of each row; the least number of ``candidates`` is marked."""
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


def _legend(blocks: Sequence[list[list[str]]], planned: Sequence[Compared]) -> list[str]:
    """Return the lines that explain the marks of the table and name host-bound strategies."""
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
