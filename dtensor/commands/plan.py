"""`dtensor plan`: what a training step would compute, send and hold, before anything runs.

    $ dtensor plan llama --mesh tp=2,pp=2 --summary
    $ dtensor plan train.py:make --mesh dp=4 --zero dp=3 --explain h

Invariants: nothing is launched, and models have no memory. Exit status 1 where a rank's device is
too small for it. Not here: several of them side by side (compare.py, explore.py).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dtensor.commands.options import (
    MODEL_EPILOG,
    add_hardware,
    add_json,
    add_strategy,
    add_workload,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "plan",
        "every placement and collective of a training step, with bytes, memory and seconds",
        "Plans a training step on a mesh that need not exist: splits, messages and memory, and "
        "the time of a step on some hardware.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    add_strategy(parser)
    add_hardware(parser)
    group = parser.add_argument_group("output")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--full", action="store_true", help="each layer, and not alike ones once")
    which.add_argument("--summary", action="store_true", help="a summary in 25 lines")
    which.add_argument("--explain", metavar="NAME", help="why a value or parameter is as it is")
    which.add_argument("--show-placements", action="store_true", help="as Python, with reasons")
    add_json(which)  # pyright: ignore[reportArgumentType] - it adds an argument as a parser does
    group.add_argument(
        "--hints", action="store_true", help="pins whose opposite would be cheaper; takes longer"
    )
    group.add_argument("--real", action="store_true", help=REAL)
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="what x.device is to the program, and so the list of autocast: cpu (default) or cuda",
    )
    parser.set_defaults(run=run)


REAL = "call module.py:function as it is, and not on the meta device"


def run(options: argparse.Namespace) -> int:
    from dtensor.api.store.session import planning_for
    from dtensor.commands.json_data import plan_data, print_json
    from dtensor.commands.placed_workload import PlacedWorkload, check_stated
    from dtensor.commands.workload import Workload
    from dtensor.sharding.plan.text.render import hint_lines
    from dtensor.sharding.plan.text.words import size_text

    mesh, zero = options.mesh, options.zero or {}
    check_stated(options, [mesh], [zero])
    with ProgressLine() as progress, planning_for(options.device):
        with progress.doing(f"makes {options.model}"):
            work = Workload.of(options, meta=True)
            placed = PlacedWorkload(work, options)
        with progress.doing(f"captures a step of {work.name}"):
            _ = work.graph
        with progress.doing(f"plans it on {mesh}"):
            step = placed.step(mesh, zero, options.schedule)
            plan = placed.plan(step)
            if options.hints:
                plan = step.plan(*work.batch, hints=True)
        if options.json:
            text = ""
        elif options.explain:
            text = plan.explain(options.explain)
        elif options.show_placements:
            text = str(placed.placements(mesh))
        else:
            head = [work.title, placed.words(mesh)]
            shown = plan.summary() if options.summary else plan.text(full=options.full)
            text = "\n".join([*filter(None, head), "", shown])
            if options.summary and plan.hints:
                text = "\n".join([text, "", *hint_lines(plan)])
    if options.json:
        print_json({"model": work.title, **plan_data(plan)})
    else:
        print(text)
    if plan.totals.fits:
        return 0
    needs, most = map(size_text, (plan.totals.memory.total, int(plan.topology.memory_bytes)))
    print(
        f"It does not fit: the fullest rank needs {needs}, and a device has {most}.",
        file=sys.stderr,
    )
    return 1
