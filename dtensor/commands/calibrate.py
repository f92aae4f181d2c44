"""`dtensor calibrate`: measures FLOP and bytes per second of this hardware, for other commands.

    $ dtensor calibrate --mesh tp=2 --backend ray --save here.json
    $ dtensor plan gpt2 --mesh tp=2 --topology here.json

The measured programs are in `runtime/simulate/calibration.py`. They take a second or two.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from dtensor.commands.options import (
    LAUNCH,
    OptionGroup,
    add_json,
    dtype_option,
    mesh_option,
    topology_data,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine
from dtensor.commands.simulate import write
from dtensor.sharding.spec.mesh import Mesh

CALIBRATION = OptionGroup(
    "what is measured",
    {
        "mesh": dict(
            type=mesh_option,
            default=Mesh(),
            metavar="AXIS=N,...",
            help="the mesh, as tp=2 (default: one rank)",
        ),
        "dtype": dict(
            type=dtype_option,
            default=torch.float32,
            metavar="DTYPE",
            help="dtype of the computations (default: f32)",
        ),
    },
)
"""The options of `dt.calibrate` that `LAUNCH` has not."""

EPILOG = """\
In one process the ranks take turns, so each is measured alone. On Ray all are measured at once.

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
    CALIBRATION.add_to(parser)
    LAUNCH.add_to(parser)
    parser.add_argument(
        "--save", metavar="FILE.json", help="write the measured figures, for --topology FILE.json"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import dtensor as dt
    from dtensor.commands.launch_errors import launch_errors, start_errors

    with (
        ProgressLine() as progress,
        progress.doing(f"measures {options.mesh}"),
        launch_errors(),
        start_errors(),
    ):
        topology = dt.calibrate(**CALIBRATION.values(options), **LAUNCH.values(options))
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
