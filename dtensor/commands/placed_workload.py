"""A workload under what the options state: strategies as `dt.compare` takes them, and steps.

    placed = PlacedWorkload(work, options)
    placed.strategy(mesh, zero={"dp": 3}, schedule="1f1b")     # (mesh, placements, {options})
    step, plan = placed.step(mesh)                             # planned with the one capture

The names of axes say what they are for: dp splits the batch, tp the weights, pp holds stages. Other
names are fine where placements are stated. Not here: how the options are read (options.py).
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
    SEVERAL_STAGES,
    TWO_STAGES,
    check_axes,
    optimizer_class,
    schedule_of,
    topology_of,
)
from dtensor.commands.user_function import called, is_named, named_value
from dtensor.commands.workload import Workload
from dtensor.errors import PlanningError, shown
from dtensor.runtime.schedule import Schedule
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh

AXES = ("dp", "tp", "pp")
_PER_RANK = 4
"""Microbatches for each stage's rank where none are stated, if the batch has as many."""


class PlacedWorkload:
    """A workload under what the options state. ``optimizer``: over the workload's model."""

    def __init__(self, work: Workload, options: argparse.Namespace) -> None:
        self.work: Workload = work
        self.options: argparse.Namespace = options
        self.optimizer = _optimizer(work, options)
        self._tp: dict[int, Mapping[str, Any]] = {}  # by size, what is derived
        self._stated_placements = self._placements_stated()
        if self._stated_placements is None:
            check_meshes(options.mesh if isinstance(options.mesh, list) else [options.mesh])

    # -- what is stated, by mesh -------------------------------------------------------------------

    def topology(self, mesh: Mesh) -> Topology:
        options = self.options
        return topology_of(options.topology, options.across, options.memory, mesh)

    def strategy(
        self, mesh: Mesh, zero: Mapping[str, int] | None, schedule: str | None
    ) -> tuple[Mesh, Mapping[str, Any], dict[str, Any]]:
        """As `dt.compare` takes it."""
        options = self.options
        given: dict[str, Any] = dict(
            stages=self._stages(mesh, schedule),
            zero={a: n for a, n in (zero or {}).items() if a in mesh.axes} or None,
            inputs=self._inputs(mesh),
            schedule=self.schedule(mesh, schedule),
            recompute=options.recompute,
            topology=self.topology(mesh),
            clip_grad_norm=options.clip_grad_norm,
            master_weights=options.master_weights,
        )
        return mesh, self.placements(mesh), {k: v for k, v in given.items() if v is not None}

    def step(
        self, mesh: Mesh, zero: Mapping[str, int] | None = None, schedule: str | None = None
    ) -> TrainStep:
        """A step of the workload that nothing has been planned of."""
        mesh, placements, given = self.strategy(mesh, zero, schedule)
        keywords = ("stages", "zero", "recompute")
        model = dt.parallelize(
            self.work.model, mesh, placements, **{k: given.pop(k) for k in keywords if k in given}
        )
        return dt.train_step(model, self.work.loss_fn, self.optimizer, **given)

    def plan(self, step: TrainStep) -> Plan:
        return step.plan_of(self.work.graph, *self.work.batch)

    def placements(self, mesh: Mesh) -> Mapping[str, Any]:
        stated = self._stated_placements
        if callable(stated):
            stated = called(stated, self.options.placements or self.options.model, mesh)
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
        if size not in self._tp:
            self._tp[size] = placements_of.of_step(self.work.graph, self.work.model, "tp", size)
        return self._tp[size]

    def words(self, mesh: Mesh) -> str:
        """What was chosen where nothing was stated, in one line; "" for nothing."""
        words: list[str] = []
        if mesh.shape.get("tp", 1) > 1 and self._stated_placements is None:
            num = len(self.placements(mesh))
            words.append(f"placements over tp derived ({num} patterns)" if num else _NOTHING)
        schedule = self.schedule(mesh, self._one("schedule"))
        if schedule is not None and self.options.microbatches is None:
            kind = type(schedule).__name__
            words.append(f"{kind} of {schedule.microbatches} microbatches")
        return "; ".join(words)

    # -- parts -------------------------------------------------------------------------------------

    def _one(self, name: str) -> Any:
        value = getattr(self.options, name)
        return value[0] if isinstance(value, list) else value

    def _placements_stated(self) -> Any:
        which = self.options.placements
        if which == "none":
            return {}
        if which is None:
            return self.work.stated.get("placements")
        if which == "auto":
            return None
        if is_named(which):
            return named_value(which, "a dict of placements, or a function of the mesh")
        return _placements_word(which)

    def _inputs(self, mesh: Mesh) -> Any:
        stated = self.work.stated.get("inputs")
        if stated is not None:
            return called(stated, self.options.model, mesh) if callable(stated) else stated
        return {"dp": dt.Row()} if mesh.shape.get("dp", 1) > 1 else None

    def _stages(self, mesh: Mesh, schedule: str | None) -> Any:
        ranks = mesh.shape.get("pp", 1)
        if ranks == 1:
            return None
        which, stated = self.options.stages, self.work.stated.get("stages")
        if which is None and stated is not None:
            return stated
        if which in (None, "auto"):
            return {"pp": dt.Auto(num_stages=2 * ranks) if schedule in SEVERAL_STAGES else "auto"}
        if which.isdecimal() and int(which) > 0:
            return {"pp": dt.Auto(num_stages=int(which))}
        raise PlanningError(
            f"--stages {which} is neither auto nor a number of stages.\n"
            f"fix: --stages {2 * ranks}, or stages= in the result of module.py:function"
        )

    def schedule(self, mesh: Mesh, name: str | None) -> Schedule | None:
        """Return the schedule; None for one stage of which no option states microbatches."""
        stated, ranks = self.options.microbatches, mesh.shape.get("pp", 1)
        if ranks == 1 and name is None and stated is None:
            return None
        if ranks == 1 and name in TWO_STAGES:
            mesh_text = ",".join(f"{a}={n}" for a, n in {**mesh.shape, "pp": 2}.items())
            raise PlanningError(
                f"--schedule {name} holds two stages per rank, and the mesh has no axis pp of at "
                f"least 2.\nfix: --mesh {mesh_text}, or --schedule 1f1b"
            )
        rows = max(1, self.work.num_rows // mesh.shape.get("dp", 1))
        most = min(rows, _PER_RANK * ranks)
        microbatches = stated or max(n for n in range(1, most + 1) if rows % n == 0)
        return schedule_of(name or "1f1b", microbatches)


def _placements_word(which: str | None) -> None:
    """PlanningError for none of those that there are."""
    if which in (None, "auto", "none") or is_named(which):
        return
    near = nearest(which, ("auto", "none"))
    raise PlanningError(
        f"--placements {which} is none of auto, none and file.py:NAME.\n"
        f"fix: {near[0] if near else 'auto'}"
    )


_NOTHING = "over tp nothing is split: no weights pair"


def check_stated(
    options: argparse.Namespace, meshes: Sequence[Mesh], zeros: Sequence[Mapping[str, int]]
) -> None:
    """PlanningError for what is wrong whatever the model is, before there is one."""
    if options.placements == "auto" or (options.placements is None and not is_named(options.model)):
        check_meshes(meshes)
    for zero in zeros:
        check_axes(list(zero), meshes, f"--zero {_zero_text(zero)}")
    between = options.across.replace(",", " ").split()
    check_axes(between, meshes, f"--across {options.across}")
    topology_of(options.topology, options.across, options.memory, meshes[0])
    _placements_word(options.placements)
    optimizer_class(options.optimizer or "AdamW")


def check_meshes(meshes: Sequence[Mesh]) -> None:
    """PlanningError for an axis that means nothing where nothing says what is split over it."""
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


def _zero_text(zero: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={level}" for axis, level in zero.items()) or "none"


def strategy_name(mesh: Mesh, zero: Mapping[str, int] | None, schedule: Schedule | None) -> str:
    """``pp2 dp2 tp4 zero3 OneFOneB(8)``, as `dt.search` names strategies."""
    parts = [f"{axis}{size}" for axis, size in mesh.shape.items()]
    parts += [f"zero{level}" for level in (zero or {}).values()]
    return " ".join([*parts, *([schedule_text(schedule)] if schedule else [])])


def _optimizer(work: Workload, options: argparse.Namespace) -> Any:
    stated = work.stated.get("optimizer")
    if options.optimizer is None and stated is not None:
        if isinstance(stated, Optimizer):
            return stated
        return called(stated, options.model, work.model.parameters())
    kind = optimizer_class(options.optimizer or "AdamW")
    rate = getattr(options, "lr", None)
    given = {} if rate is None else {"lr": rate}
    return called(kind, f"--optimizer {kind.__name__}", work.model.parameters(), **given)
