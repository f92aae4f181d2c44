"""The option --smallest of every benchmark: a size that shows in seconds that it runs.

    given = parsed(parser, argv, rounds=1, width=64)    # with --smallest: these instead

Its numbers mean nothing, so no file of results is written. tests/test_benchmarks.py runs them all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **smallest: Any
) -> argparse.Namespace:
    """Return the parsed arguments. With --smallest, the values in ``smallest`` replace them."""
    parser.add_argument("--smallest", action="store_true", help="only show that it runs")
    given = parser.parse_args(argv)
    if given.smallest:
        vars(given).update(smallest, write=False)
    return given
