"""Makes ranks hang on purpose and counts how often `dt.status()` names the right one.

    python -m tests.who_hangs            # 20 of each of four ways, on one launch, and their table
    python -m tests.who_hangs --each 3 --seed 1

Exit status 1 unless all are right, each within `MOST_S` of asking. `actors.py` has the ways of
hanging and `trials.py` the trials.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.who_hangs.trials import HOW, Trial, training

MOST_S = 2.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.who_hangs", description=__doc__)
    parser.add_argument("--each", type=int, default=20, help="trials of each way (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-v", action="store_true", help="print what each status says")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    rng = random.Random(options.seed)
    found: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="who-") as folder, training(Path(folder)) as trials:
        for number in range(options.each * len(HOW)):
            trial = trials.hang(HOW[number % len(HOW)], rng.randrange(4), rng.randrange(12))
            found.append(trial)
            if options.v or not trial.right:
                print(f"{trial.how} on rank {trial.rank}:\n{trial.status}\n", flush=True)
    print(table(found))
    return int(not all(trial.right and trial.seconds <= MOST_S for trial in found))


def table(found: Sequence[Trial]) -> str:
    lines = [f"{'how':8} {'trials':>6} {'right rank':>10} {'median s':>9} {'worst s':>8}"]
    for how in HOW:
        own = [trial for trial in found if trial.how == how]
        seconds = sorted(trial.seconds for trial in own)
        right = sum(trial.right for trial in own)
        median, worst = seconds[len(seconds) // 2], seconds[-1]
        lines.append(f"{how:8} {len(own):6} {right:10} {median:9.2f} {worst:8.2f}")
    right = sum(trial.right for trial in found)
    lines.append(f"{right} of {len(found)} right")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
