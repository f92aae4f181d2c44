"""`dtensor compare`: a training step under several strategies, in one table.

    $ dtensor compare llama --mesh tp=8 --mesh dp=8 --mesh dp=4,tp=2 --zero none --zero dp=3

The step is captured once. Each mesh is combined with each --zero that names an axis of the mesh,
and with each --schedule if the mesh has stages or --microbatches is given. Exit status 1 if no
strategy fits into the memory of a device, 2 if no strategy has a plan.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dtensor.commands.options import (
    HARDWARE,
    MODEL_EPILOG,
    SEVERAL_STAGES,
    STRATEGY,
    add_json,
    add_workload,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine

REPEATABLE = ("mesh", "schedule", "zero")
"""The options that may be repeated: the strategies are their combinations."""


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "compare",
        "compares a training step on several meshes, in one table",
        "Plans a training step under each --mesh (with each --zero and --schedule that applies) "
        "and shows seconds, bytes and memory side by side. The step is captured once.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    STRATEGY.add_to(parser, repeatable=REPEATABLE)
    HARDWARE.add_to(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def strategies(options: argparse.Namespace) -> list[tuple[Any, Any, Any]]:
    """Return (mesh, zero, schedule) of each strategy, in the stated order, without duplicates."""
    combinations: list[tuple[Any, Any, Any]] = []
    for mesh in options.mesh:
        zeros = [z for z in options.zero or [{}] if all(mesh.shape.get(a, 1) > 1 for a in z)]
        schedules = options.schedule or []
        if mesh.shape.get("pp", 1) == 1:
            one_stage = [name for name in schedules if name not in SEVERAL_STAGES]
            schedules = one_stage if options.microbatches is not None else []
        for zero in zeros or [{}]:
            for schedule in schedules or [None]:
                if (mesh, zero, schedule) not in combinations:
                    combinations.append((mesh, zero, schedule))
    return combinations


def run(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from dtensor.api.search.comparison import compare_captured
    from dtensor.commands.json_data import print_json, row_data
    from dtensor.commands.placed_workload import (
        PlacedWorkload,
        check_strategy_options,
        strategy_name,
    )
    from dtensor.commands.workload import Workload

    check_strategy_options(options, options.mesh, options.zero or [])
    with ProgressLine() as progress:
        with progress.doing(f"makes {options.model}"):
            work = Workload.of(options, meta=True)
            placed = PlacedWorkload(work, options)
        with progress.doing(f"captures a step of {work.name}"):
            graph = work.graph
        rows: list[Any] = []
        table: Any = None
        for mesh, zero, schedule in progress.each("plans", strategies(options)):
            name = strategy_name(mesh, zero, placed.schedule(mesh, schedule))
            table = compare_captured(
                graph,
                work.model,
                work.loss_fn,
                {name: placed.strategy(mesh, zero, schedule)},
                *work.batch,
                topology=None,
                optimizer=placed.optimizer,
            )
            rows += table.rows
        table = replace(table, rows=tuple(rows))
    planned = [row for row in rows if row.error is None]
    if options.json:
        print_json({"model": work.title, "strategies": [row_data(row) for row in rows]})
    elif planned:
        print(f"{work.title}\n\n{table}")
    if not planned:
        print(rows[0].error, file=sys.stderr)
        return 2
    return int(not any(row.fits for row in planned))
