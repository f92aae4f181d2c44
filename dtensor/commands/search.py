"""`dtensor search`: the strategies under which a training step is predicted to be best.

    $ dtensor search llama --ranks 8 --memory 80GiB --batch 64 --length 2048
    $ dtensor search gpt2 --ranks 4 --code 1        # the best one as a program

Exit status 2 where no strategy fits: a sentence says which came nearest. Not here: the search
(api/search).
"""

from __future__ import annotations

import argparse
from typing import Any

from dtensor.commands.options import (
    MODEL_EPILOG,
    add_hardware,
    add_json,
    add_workload,
    optimizer_class,
    topology_of,
    whole_option,
)
from dtensor.commands.parser import add_command
from dtensor.commands.plan import REAL
from dtensor.commands.progress import AtWork
from dtensor.commands.simulate import write
from dtensor.errors import PlanningError
from dtensor.sharding.spec.mesh import Mesh

SEARCHED = Mesh(pp=2, dp=2, tp=2)
"""The axes that a search's meshes have."""


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "search",
        "the best meshes, placements, schedules and ZeRO levels for so many ranks",
        "Searches meshes, placements, stages, schedules, ZeRO levels and recomputation for those "
        "under which a training step is predicted to be fastest, or to need least memory.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    group = parser.add_argument_group("what is searched for")
    group.add_argument(
        "--ranks", type=whole_option, required=True, metavar="N", help="of each mesh"
    )
    group.add_argument(
        "--objective",
        choices=("time", "memory"),
        default="time",
        help="seconds of a step (default), or memory of the fullest rank",
    )
    add_hardware(parser)
    group = parser.add_argument_group("what is shown")
    group.add_argument("--code", type=whole_option, metavar="N", help="the Nth one, as a program")
    group.add_argument(
        "-o", "--output", metavar="FILE.html", help="write a page of those found, side by side"
    )
    add_json(parser)
    parser.add_argument("--real", action="store_true", help=REAL)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import dtensor as dt
    from dtensor.commands.as_data import print_json, row_data
    from dtensor.commands.workload import Workload
    from dtensor.explorer import save_pages
    from dtensor.explorer.page import checked_path

    topology = topology_of(options.topology, options.across, options.memory, SEARCHED)
    optimizer: Any = optimizer_class(options.optimizer or "AdamW")
    if options.output:
        checked_path(options.output)
    with AtWork() as progress:
        with progress.doing(f"makes {options.model}"):
            work = Workload.of(options, meta=True)
        stated = work.stated.get("optimizer")
        if options.optimizer is None and stated is not None:
            optimizer = stated
        with progress.counted("searches") as told:
            found = dt.search(
                work.model,
                work.loss_fn,
                options.ranks,
                *work.batch,
                topology=topology,
                objective=options.objective,
                optimizer=optimizer,
                progress=told,
            )
    if options.code is not None and options.code > len(found):
        raise PlanningError(
            f"--code {options.code}: {len(found)} strategies were found; fix: --code {len(found)}"
        )
    if options.output:
        write(options.output, lambda path: save_pages(path, {row.name: row.plan for row in found}))
    if options.json:
        from dtensor.api.comparison import Compared

        rows = [
            {
                **row_data(Compared(name=row.name, mesh=row.mesh, found=row.plan)),
                "tie": row in found.ties,
                "code": row.text,
            }
            for row in found
        ]
        print_json({"model": work.title, "objective": found.objective, "strategies": rows})
    elif options.code is not None:
        print(found[options.code - 1].text)
    else:
        print(f"{work.title}\n\n{found}")
    return 0
