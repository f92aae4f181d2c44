"""`dtensor explore`: plans as one page for a browser, several side by side.

    $ dtensor explore llama --mesh tp=8 --mesh dp=2,tp=4 -o plans.html

The strategies are those of `compare` with the same options, of one capture. One that has no plan is
left out, and said. Not here: the page (dtensor/explorer).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dtensor.commands.compare import strategies
from dtensor.commands.options import MODEL_EPILOG, add_hardware, add_strategy, add_workload
from dtensor.commands.parser import add_command
from dtensor.commands.plan import REAL
from dtensor.commands.progress import ProgressLine
from dtensor.commands.simulate import write
from dtensor.errors import PlanningError


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "explore",
        "plans as a page for a browser, several side by side",
        "Writes an HTML file that opens from disk: modules, steps, each collective with why it is "
        "there, shards by rank, memory and timeline. Several strategies are compared.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    add_strategy(parser, several=True)
    add_hardware(parser)
    parser.add_argument(
        "-o", "--output", default="plan.html", metavar="FILE.html", help="(default: plan.html)"
    )
    parser.add_argument("--real", action="store_true", help=REAL)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dtensor.commands.placed_workload import PlacedWorkload, check_stated, strategy_name
    from dtensor.commands.workload import Workload
    from dtensor.explorer import save_pages
    from dtensor.explorer.page import checked_path

    checked_path(options.output)
    check_stated(options, options.mesh, options.zero or [])
    plans: dict[str, Any] = {}
    refused: PlanningError | None = None
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
                refused = refused or error
        if not plans and refused is not None:
            raise refused
        with progress.doing("writes the page"):
            write(options.output, lambda path: save_pages(path, plans))
    return 0
