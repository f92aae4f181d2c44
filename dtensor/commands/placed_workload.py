"""A workload with the placements and other options of the command line.

    placed = PlacedWorkload(work, options)
    placed.strategy(mesh, zero={"dp": 3}, schedule="1f1b")     # as `dt.compare` takes it
    step = placed.step(mesh)
    plan = placed.plan(step)                                   # all plans share one capture

Axes have a use by their name: dp splits the batch, tp the weights, pp has the stages. If placements
are stated, axes may have other names.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

import dtensor as dt
from dtensor.api.model.stating.patterns import nearest
from dtensor.api.search import placements as placements_of
from dtensor.api.search.comparison import schedule_text
from dtensor.api.step.training import TrainStep
from dtensor.commands.options import (
    HARDWARE,
    SEVERAL_STAGES,
    TWO_STAGES,
    check_axes,
    optimizer_class,
    schedule_of,
    topology_of,
)
from dtensor.commands.user_function import call_user_function, import_value, is_value_path
from dtensor.commands.workload import Workload
from dtensor.errors import PlanningError, shown
from dtensor.runtime.schedule import Schedule
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.mesh import Mesh

AXES = ("dp", "tp", "pp")
_MICROBATCHES_PER_RANK = 4
"""The default number of microbatches per rank of pp, if the batch has as many rows."""


class PlacedWorkload:
    """A workload with the options for its placement. ``optimizer``: an optimizer of the model."""

    def __init__(self, work: Workload, options: argparse.Namespace) -> None:
        self.work: Workload = work
        self.options: argparse.Namespace = options
        self.optimizer = _optimizer(work, options)
        self._derived: dict[int, Mapping[str, Any]] = {}  # placements by the size of tp
        self._stated_placements = self._read_placements()
        if self._stated_placements is None:
            check_meshes(options.mesh if isinstance(options.mesh, list) else [options.mesh])

    def strategy(
        self, mesh: Mesh, zero: Mapping[str, int | str] | None, schedule: str | None
    ) -> tuple[Mesh, Mapping[str, Any], dict[str, Any]]:
        """Return a strategy as `dt.compare` takes it: mesh, placements and keywords."""
        options = self.options
        keywords: dict[str, Any] = dict(
            stages=self._stages(mesh, schedule),
            zero={a: n for a, n in (zero or {}).items() if a in mesh.axes} or None,
            inputs=self._inputs(mesh),
            attention=self.work.stated.get("attention"),
            schedule=self.schedule(mesh, schedule),
            recompute=options.recompute,
            topology=topology_of(**HARDWARE.values(options), mesh=mesh),
            clip_grad_norm=options.clip_grad_norm,
            master_weights=options.master_weights,
        )
        return mesh, self.placements(mesh), {k: v for k, v in keywords.items() if v is not None}

    def step(
        self, mesh: Mesh, zero: Mapping[str, int | str] | None = None, schedule: str | None = None
    ) -> TrainStep:
        """Return a training step that is not planned yet."""
        mesh, placements, keywords = self.strategy(mesh, zero, schedule)
        names = ("stages", "zero", "recompute", "attention")
        of_parallelize = {name: keywords.pop(name) for name in names if name in keywords}
        model = dt.parallelize(self.work.model, mesh, placements, **of_parallelize)
        return dt.train_step(model, self.work.loss_fn, self.optimizer, **keywords)

    def plan(self, step: TrainStep) -> Plan:
        return step.plan_of(self.work.graph, *self.work.batch)

    def placements(self, mesh: Mesh) -> Mapping[str, Any]:
        """Return the stated placements, or placements over tp that are derived from the graph."""
        stated = self._stated_placements
        if callable(stated):
            path = self.options.placements or self.options.model
            stated = call_user_function(stated, path, mesh)
        if stated is not None:
            if not isinstance(stated, Mapping):
                raise PlanningError(
                    f"placements are {shown(stated)}, not a dict.\n"
                    f'fix: {{"*.up.weight": dict(tp=dt.Row())}}'
                )
            return stated
        size = mesh.shape.get("tp", 1)
        if size == 1:
            return {}
        if size not in self._derived:
            derived = placements_of.of_step(self.work.graph, self.work.model, "tp", size)
            self._derived[size] = derived
        return self._derived[size]

    def defaults_text(self, mesh: Mesh) -> str:
        """Return one line about placements and schedule that no option states; "" if all are
        stated."""
        parts: list[str] = []
        if mesh.shape.get("tp", 1) > 1 and self._stated_placements is None:
            num = len(self.placements(mesh))
            parts.append(
                f"placements over tp derived ({num} patterns)"
                if num
                else "over tp nothing is split: no weights pair"
            )
        schedule = self.schedule(mesh, self.options.schedule)
        if schedule is not None and self.options.microbatches is None:
            kind = type(schedule).__name__
            parts.append(f"{kind} of {schedule.microbatches} microbatches")
        return "; ".join(parts)

    def _read_placements(self) -> Any:
        """Return the placements that the option or the workload states, a dict or a function of the
        mesh; None if they are to be derived."""
        option = self.options.placements
        if option == "none":
            return {}
        if option is None:
            return self.work.stated.get("placements")
        if option == "auto":
            return None
        if is_value_path(option):
            return import_value(option, "a dict of placements, or a function of the mesh")
        return _check_placements_option(option)

    def _inputs(self, mesh: Mesh) -> Any:
        stated = self.work.stated.get("inputs")
        if stated is not None:
            if callable(stated):
                return call_user_function(stated, self.options.model, mesh)
            return stated
        return {"dp": dt.Row()} if mesh.shape.get("dp", 1) > 1 else None

    def _stages(self, mesh: Mesh, schedule: str | None) -> Any:
        ranks = mesh.shape.get("pp", 1)
        if ranks == 1:
            return None
        option, stated = self.options.stages, self.work.stated.get("stages")
        if option is None and stated is not None:
            return stated
        if option in (None, "auto"):
            return {"pp": dt.Auto(num_stages=2 * ranks) if schedule in SEVERAL_STAGES else "auto"}
        if option.isdecimal() and int(option) > 0:
            return {"pp": dt.Auto(num_stages=int(option))}
        raise PlanningError(
            f"--stages {option} is neither auto nor a number of stages.\n"
            f"fix: --stages {2 * ranks}, or stages= in the result of module.py:function"
        )

    def schedule(self, mesh: Mesh, name: str | None) -> Schedule | None:
        """Return the schedule, or None for a mesh without pp if no option states a schedule or
        microbatches."""
        microbatches, ranks = self.options.microbatches, mesh.shape.get("pp", 1)
        if ranks == 1 and name is None and microbatches is None:
            return None
        if ranks == 1 and name in TWO_STAGES:
            mesh_text = ",".join(f"{a}={n}" for a, n in {**mesh.shape, "pp": 2}.items())
            raise PlanningError(
                f"--schedule {name} holds two stages per rank, and the mesh has no axis pp of at "
                f"least 2.\nfix: --mesh {mesh_text}, or --schedule 1f1b"
            )
        if microbatches is None:  # as many as divide the rows of a dp rank
            rows = max(1, self.work.num_rows // mesh.shape.get("dp", 1))
            max_number = min(rows, _MICROBATCHES_PER_RANK * ranks)
            microbatches = max(n for n in range(1, max_number + 1) if rows % n == 0)
        return schedule_of(name or "1f1b", microbatches)


def _check_placements_option(option: str | None) -> None:
    if option in (None, "auto", "none") or is_value_path(option):
        return
    near = nearest(option, ("auto", "none"))
    raise PlanningError(
        f"--placements {option} is none of auto, none and file.py:NAME.\n"
        f"fix: {near[0] if near else 'auto'}"
    )


def check_strategy_options(
    options: argparse.Namespace, meshes: Sequence[Mesh], zeros: Sequence[Mapping[str, int]]
) -> None:
    """Raise PlanningError for options that are wrong for each model, before the model is made."""
    placements, model = options.placements, options.model
    if placements == "auto" or (placements is None and not is_value_path(model)):
        check_meshes(meshes)
    for zero in zeros:
        zero_text = ",".join(f"{axis}={level}" for axis, level in zero.items())
        check_axes(list(zero), meshes, f"--zero {zero_text}")
    between_hosts = options.across.replace(",", " ").split()
    check_axes(between_hosts, meshes, f"--across {options.across}")
    topology_of(**HARDWARE.values(options), mesh=meshes[0])
    _check_placements_option(placements)
    optimizer_class(options.optimizer or "AdamW")


def check_meshes(meshes: Sequence[Mesh]) -> None:
    """Raise PlanningError for an axis whose name has no use, for commands without placements."""
    for mesh in meshes:
        for axis, size in mesh.shape.items():
            if axis in AXES or size == 1:
                continue
            near = nearest(axis, AXES)
            raise PlanningError(
                f"--mesh: the axis {axis!r} has no known use: dp splits the batch, tp the "
                f"weights, pp the layers.\n"
                f"fix: {near[0] if near else 'tp'}={size}, or --placements file.py:NAME, which may "
                f"name any axis"
            )


def strategy_name(
    mesh: Mesh, zero: Mapping[str, int | str] | None, schedule: Schedule | None
) -> str:
    """Return a name in the style of `dt.search`, as ``pp2 dp2 tp4 zero3 OneFOneB(8)``."""
    parts = [f"{axis}{size}" for axis, size in mesh.shape.items()]
    if zero:
        over = f"({','.join(zero)})" if len(zero) > 1 else ""
        parts.append(f"zero{','.join(map(str, dict.fromkeys(zero.values())))}{over}")
    return " ".join([*parts, *([schedule_text(schedule)] if schedule else [])])


def _optimizer(work: Workload, options: argparse.Namespace) -> Any:
    stated = work.stated.get("optimizer")
    if options.optimizer is None and stated is not None:
        if isinstance(stated, Optimizer | list | tuple):
            return stated
        return call_user_function(stated, options.model, work.model.parameters())
    cls = optimizer_class(options.optimizer or "AdamW")
    lr = getattr(options, "lr", None)  # only `run` has --lr
    keywords = {} if lr is None else {"lr": lr}
    source = f"--optimizer {cls.__name__}"
    return call_user_function(cls, source, work.model.parameters(), **keywords)
