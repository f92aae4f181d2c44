"""The command line: `python -m dtensor COMMAND`, each in a file of its own in `commands/`.

    python -m dtensor status            # what the ranks of your launches on this machine do
    python -m dtensor --help

A command adds its parser, and a function that takes the parsed options and gives the exit status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dtensor.commands import status

COMMANDS = (status,)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; argparse exits with 2 for what is no command."""
    parser = argparse.ArgumentParser(
        prog="python -m dtensor",
        description="dtensor: write a model once, for one device, and place it anywhere.",
    )
    parsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(parsers)
    options = parser.parse_args(argv)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
