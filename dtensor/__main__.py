"""The command line: `dtensor COMMAND`, or `python -m dtensor COMMAND`.

    dtensor plan gpt2 --mesh tp=2       # the messages and the memory of a training step
    dtensor status                      # the state of the ranks of your launches on this machine
    dtensor --help

Each command is a file in `commands/`. It adds a parser, and a function from the parsed options to
the exit status: 0, done; 1, something wrong was found; 2, an invalid request, explained on stderr;
130, interrupted. A reader may close our output early (`| head`).
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
from dtensor.commands.launch_errors import RunFailed
from dtensor.commands.parser import CommandParser, Help
from dtensor.errors import PlanningError

COMMANDS = (plan, compare, simulate, explore, search, run, calibrate, doctor, status)
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status. Raises SystemExit(2) for an unknown command or option."""
    try:
        try:
            return _run(_parse(argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Otherwise Python flushes stdout again when it exits, and reports the failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    is_script = os.path.basename(sys.argv[0]) == "dtensor"
    parser = CommandParser(
        prog="dtensor" if is_script else "python -m dtensor",
        description="dtensor: write a model once, for one device, and place it anywhere.",
        epilog="exit status: 0, done; 1, found something wrong; 2, an invalid request; "
        "130, interrupted. `COMMAND --help` says more.",
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


if __name__ == "__main__":
    sys.exit(main())
