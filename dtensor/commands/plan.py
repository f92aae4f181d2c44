"""`dtensor plan`: prints the plan of a training step: its placements, messages, memory and seconds.

    $ dtensor plan llama --mesh tp=2,pp=2 --summary
    $ dtensor plan train.py:make --mesh dp=4 --zero dp=3 --explain h

Nothing is launched, and the model is on the meta device. Exit status 1 if a device has less memory
than the plan needs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dtensor.commands.options import (
    HARDWARE,
    MODEL_EPILOG,
    STRATEGY,
    add_json,
    add_workload,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "plan",
        "prints each placement and collective of a training step, with bytes, memory and seconds",
        "Plans a training step on a mesh that need not exist, and predicts its messages, its "
        "memory and its time on some hardware.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    STRATEGY.add_to(parser)
    HARDWARE.add_to(parser)
    group = parser.add_argument_group("output")
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--full", action="store_true", help="print every layer (default: equal layers once)"
    )
    form.add_argument("--summary", action="store_true", help="print a summary of 25 lines")
    form.add_argument(
        "--explain", metavar="NAME", help="explain the placement of a value or parameter"
    )
    form.add_argument(
        "--show-placements",
        action="store_true",
        help="print the placements of parameters as Python, with reasons",
    )
    add_json(form)
    group.add_argument(
        "--hints",
        action="store_true",
        help="list stated placements whose opposite would be cheaper; takes longer",
    )
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="the device that the program sees as x.device; autocast depends on it (default: cpu)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dtensor.api.store.session import planning_for
    from dtensor.commands.json_data import plan_data, print_json
    from dtensor.commands.placed_workload import PlacedWorkload, check_strategy_options
    from dtensor.commands.workload import Workload
    from dtensor.sharding.plan.text.render import hint_lines
    from dtensor.sharding.plan.text.words import size_text

    mesh, zero = options.mesh, options.zero or {}
    check_strategy_options(options, [mesh], [zero])
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
            head = [work.title, placed.defaults_text(mesh)]
            plan_text = plan.summary() if options.summary else plan.text(full=options.full)
            text = "\n".join([*filter(None, head), "", plan_text])
            if options.summary and plan.hints:
                text = "\n".join([text, "", *hint_lines(plan)])
    if options.json:
        print_json({"model": work.title, **plan_data(plan)})
    else:
        print(text)
    if plan.totals.fits:
        return 0
    needed, available = map(size_text, (plan.totals.memory.total, int(plan.topology.memory_bytes)))
    print(
        f"It does not fit: the fullest rank needs {needed}, and a device has {available}.",
        file=sys.stderr,
    )
    return 1
