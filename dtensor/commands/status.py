"""`python -m dtensor status`: who hangs, asked from another terminal.

    $ python -m dtensor status
    Launch of process 4242: 4 ranks on ray; run 17 of 'step' for 12.4 s (usually 0.31 s)
    rank  does              since   cpu  instruction  at
    ...
    Rank 2 is stopped; ranks 0, 1 and 3 wait for it.

Invariants: it reads files and /proc, and touches nothing of the launches: that they hang does not
matter. Exit status 0: nobody hangs; 1: somebody does; 2: there is no such launch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from dtensor.commands.parser import add_command
from dtensor.daft.ray.bootstrap.launch_folder import LaunchSeen, launches
from dtensor.daft.ray.bootstrap.user_folder import own_directory

EPILOG = """\
exit status: 0, nobody hangs; 1, somebody does; 2, there is no such launch.
Launches on Ray are listed: where all ranks are in one process, only that process can say.
"""


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "status",
        "the state of the ranks of your launches on this machine, and the rank that hangs",
        "The state of each rank of your launches on this machine: its instruction, the ranks it "
        "waits for, since when, your line, and the one rank that others wait for.",
        EPILOG,
    )
    parser.add_argument(
        "launch",
        nargs="?",
        default="",
        help="process id of its controller; by default all launches",
    )
    parser.add_argument(
        "--json", action="store_true", help="a JSON list, an object for each launch"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=0.3,
        help="for how long to look whether ranks move and use the CPU (default: 0.3)",
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
        print(_none(options.launch, running), file=sys.stderr)
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


def _none(asked: str, running: list[LaunchSeen]) -> str:
    if asked and running:
        there = ", ".join(str(each.pid) for each in running)
        return f"No launch of yours on this machine is of process {asked}: those are of {there}."
    return (
        f"No launch of yours runs on Ray on this machine: there is none in {own_directory()}.\n"
        f"  Fix: look as the user, on the machine and with the TMPDIR of the process that launched."
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 60 seconds")
    return value
