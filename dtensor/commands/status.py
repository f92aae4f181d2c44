"""`python -m dtensor status`: shows which rank of a launch hangs, from another terminal.

    $ python -m dtensor status
    Launch of process 4242: 4 ranks on ray; run 17 of 'step' for 12.4 s (usually 0.31 s)
    rank  does              since   cpu  instruction  at
    ...
    Rank 2 is stopped; ranks 0, 1 and 3 wait for it.

The command only reads files and /proc, so it works while the processes of the launch hang. Exit
status 0: no rank hangs; 1: a rank hangs; 2: there is no such launch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from dtensor.commands.options import add_json
from dtensor.commands.parser import add_command
from dtensor.daft.ray.bootstrap.launch_folder import RunningLaunch, launches
from dtensor.daft.ray.bootstrap.user_folder import own_directory

EPILOG = """\
exit status: 0, no rank hangs; 1, a rank hangs; 2, there is no such launch.
Only launches on Ray are listed. If all ranks are in one process, call dt.status() there.
"""


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "status",
        "shows the state of the ranks of your launches on this machine, and the rank that hangs",
        "Shows each rank of your launches on this machine: its instruction, the ranks that it "
        "waits for and how long, your line, and the rank that all others wait for.",
        EPILOG,
    )
    parser.add_argument(
        "launch",
        nargs="?",
        default="",
        help="process id of the controller of one launch (default: all launches)",
    )
    add_json(parser, "print a JSON list with an object for each launch")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=0.3,
        help="how long to observe whether ranks progress and use the CPU (default: 0.3)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        running = launches()
    except PermissionError as error:
        print(error, file=sys.stderr)
        return 2
    wanted = [each for each in running if options.launch in ("", str(each.pid), each.path.name)]
    if not wanted:
        print(_no_launch_text(options.launch, running), file=sys.stderr)
        return 2
    first = [(each, each.look(), each.controller()) for each in wanted]
    time.sleep(options.seconds)
    statuses = [
        each.between(before, each.look(), (controller, each.controller()))
        for each, before, controller in first
    ]
    if options.json:
        print(json.dumps([status.data() for status in statuses], indent=2))
    else:
        texts = (
            f"{status}\n({each.command})" for status, each in zip(statuses, wanted, strict=True)
        )
        print("\n\n".join(texts))
    return int(any(status.hangs for status in statuses))


def _no_launch_text(launch: str, running: list[RunningLaunch]) -> str:
    if launch and running:
        pids = ", ".join(str(each.pid) for each in running)
        return f"No launch of yours on this machine is of process {launch}: those are of {pids}."
    return (
        f"No launch of yours runs on Ray on this machine: there is none in {own_directory()}.\n"
        f"  Fix: look as the user, on the machine and with the TMPDIR of the process that launched."
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 60 seconds")
    return value
