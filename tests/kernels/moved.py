"""The bytes that kernels move, counted in Triton's interpreter, beside those of launches.py.

    python -m tests.kernels.moved [--full]       # rc 1 where one differs; in every dtype, a minute

Each launch of the cases (cases.py) is watched: the elements that it loads and stores, each once.
Launches that are given one tensor twice are left out, and counted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dtensor.kernels.launches import LAUNCHES
from tests.kernels.cases import cases
from tests.kernels.watched import Watched, watched


def _shares(launch: Watched) -> bool:
    """Whether two operands that it reads, or two that it writes, are one."""
    rule = LAUNCHES[launch.kernel]
    for operands in (rule.reads, rule.writes):
        parts = [operand.partition(" if ") for operand in operands]
        names = [n.partition("[")[0] for n, _, flag in parts if not flag or launch.arguments[flag]]
        places = [launch.arguments[name].data_ptr() for name in names]
        if len(set(places)) < len(places):
            return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every dtype, more shapes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted: Counter[str] = Counter()
    left_out = failed = 0
    for case in cases(torch.device("cpu"), full=options.full):
        with watched() as launches:
            case.call()
        for launch in launches:
            if _shares(launch):
                left_out += 1
                continue
            counted[launch.kernel] += 1
            stated = LAUNCHES[launch.kernel].moved(launch.arguments)
            if stated != (launch.read, launch.written):
                found = f"{launch.read} and {launch.written} bytes"
                print(f"FAILED {launch.kernel}, {case.label}: {found}, and not {stated}")
                failed += 1
    for kernel, count in sorted(counted.items()):
        print(f"{kernel}: launches {count}")
    print(f"left out: {left_out}, failed: {failed}")
    missed = sorted(set(LAUNCHES) - set(counted))
    if missed:
        print(f"not launched: {', '.join(missed)}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
