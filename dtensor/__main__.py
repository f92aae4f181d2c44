"""The command line: `dtensor COMMAND`, or `python -m dtensor COMMAND`; each in a file of its own in
`commands/`.

    dtensor plan gpt2 --mesh tp=2       # what a training step would send and hold
    dtensor status                      # what the ranks of your launches on this machine do
    dtensor --help

A command adds its parser, and a function that takes the parsed options and gives the exit status:
0, done; 1, it found something wrong; 2, it was asked for something that is not, which a sentence on
stderr says; 130, interrupted. Who closes our output early (`| head`) has read enough.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dtensor.commands import (
    calibrate,
    compare,
    doctor,
    explore,
    plan,
    run,
    search,
    simulate,
    status,
)
from dtensor.commands.launched import RunFailed
from dtensor.commands.parser import CommandParser, Help
from dtensor.errors import PlanningError

COMMANDS = (plan, compare, simulate, explore, search, run, calibrate, doctor, status)
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; SystemExit with 2 for what is no command or option."""
    try:
        try:
            return _run(_parsed(argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python would flush once more at its end, and say that it could not.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog=_prog(),
        description="dtensor: write a model once, for one device, and place it anywhere.",
        epilog="exit status: 0, done; 1, found something wrong; 2, asked for something that is "
        "not; 130, interrupted. `COMMAND --help` says more.",
        formatter_class=Help,
    )
    parsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(parsers)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        options.parser.error(options.parser.unknown_arguments(unknown))
    return options


def _run(options: argparse.Namespace) -> int:
    try:
        return options.run(options)
    except PlanningError as error:
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return 1


def _prog() -> str:
    own = os.path.basename(sys.argv[0]) == "dtensor"
    return "dtensor" if own else "python -m dtensor"


if __name__ == "__main__":
    sys.exit(main())
