"""`dtensor calibrate`: what the ranks here compute and send in a second, to plan and simulate with.

    $ dtensor calibrate --mesh tp=2 --backend ray --save here.json
    $ dtensor plan gpt2 --mesh tp=2 --topology here.json

It runs small programs of its own, for a second or two. Not here: what it measures
(runtime/simulate/calibration.py).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from dtensor.commands.options import (
    add_backend,
    add_json,
    add_mesh,
    dtype_option,
    topology_data,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine
from dtensor.commands.simulate import write

EPILOG = """\
In one process ranks take turns: each is measured alone. On Ray all are measured at once.

exit status: 0, done; 1, a rank failed; 2, an invalid request."""


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "calibrate",
        "measures the hardware here, for --topology of the other commands",
        "Measures FLOP and bytes per second of ranks and of each axis; takes about a second "
        "besides the start of the ranks.",
        EPILOG,
    )
    add_mesh(parser)
    add_backend(parser)
    parser.add_argument(
        "--dtype", type=dtype_option, default=torch.float32, metavar="DTYPE", help="(default: f32)"
    )
    parser.add_argument("--save", metavar="FILE.json", help="write it, for --topology FILE.json")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import dtensor as dt
    from dtensor.commands.launch_errors import launching, too_few_are_users

    names = "backend", "device", "address", "ranks_per_actor"
    where = {name: getattr(options, name) for name in names}
    with (
        ProgressLine() as progress,
        progress.doing(f"measures {options.mesh}"),
        launching(options),
        too_few_are_users(),
    ):
        topology = dt.calibrate(options.mesh, dtype=options.dtype, **where)
    data = topology_data(topology)
    if options.save:
        write(options.save, lambda path: path.write_text(json.dumps(data, indent=2) + "\n"))
    if options.json:
        print(json.dumps(data, indent=2))
    else:
        print("dt.Topology(")
        for name, value in data.items():
            print(f"    {name}={value!r},")
        print(")")
    return 0
