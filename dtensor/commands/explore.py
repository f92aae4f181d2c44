"""`dtensor explore`: writes one or several plans as an HTML page.

    $ dtensor explore llama --mesh tp=8 --mesh dp=2,tp=4 -o plans.html

The options give the same strategies as in `compare`. The step is captured once. A strategy without
a plan is reported on stderr and is not in the page. `dtensor/explorer` makes the page.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dtensor.commands.compare import REPEATABLE, strategies
from dtensor.commands.options import HARDWARE, MODEL_EPILOG, STRATEGY, add_workload
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine
from dtensor.commands.simulate import write
from dtensor.errors import PlanningError


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "explore",
        "writes plans as an HTML page, several side by side",
        "Writes an HTML file that opens from disk. It shows modules, steps, each collective and "
        "its reason, the shards of each rank, memory and a timeline. Several strategies are "
        "compared.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    STRATEGY.add_to(parser, repeatable=REPEATABLE)
    HARDWARE.add_to(parser)
    parser.add_argument(
        "-o",
        "--output",
        default="plan.html",
        metavar="FILE.html",
        help="file of the page (default: plan.html)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dtensor.commands.placed_workload import (
        PlacedWorkload,
        check_strategy_options,
        strategy_name,
    )
    from dtensor.commands.workload import Workload
    from dtensor.explorer import save_pages
    from dtensor.explorer.page import checked_path

    checked_path(options.output)
    check_strategy_options(options, options.mesh, options.zero or [])
    plans: dict[str, Any] = {}
    first_error: PlanningError | None = None
    with ProgressLine() as progress:
        with progress.doing(f"makes {options.model}"):
            work = Workload.of(options, meta=True)
            placed = PlacedWorkload(work, options)
        with progress.doing(f"captures a step of {work.name}"):
            _ = work.graph
        for mesh, zero, schedule in progress.each("plans", strategies(options)):
            name = strategy_name(mesh, zero, placed.schedule(mesh, schedule))
            try:
                plans[name] = placed.plan(placed.step(mesh, zero, schedule))
            except PlanningError as error:
                print(f"{name} has no plan: {str(error).splitlines()[0]}", file=sys.stderr)
                first_error = first_error or error
        if not plans and first_error is not None:
            raise first_error
        with progress.doing("writes the page"):
            write(options.output, lambda path: save_pages(path, plans))
    return 0
