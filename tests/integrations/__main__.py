"""Training loops of other libraries with parallelized models: `make integrations`.

    python -m tests.integrations                       # writes benchmarks/results/integrations.md
    python -m tests.integrations --only trainer        # printed; nothing is written

Each script runs in its own process, because accelerate's state is global. Exit status 1 if a case
ended otherwise than it states, or its packages are missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "integrations.md"
SCRIPTS = {
    "trainer": "transformers",
    "sft_trainer": "trl",
    "accelerate_loop": "accelerate",
    "lightning_loop": "lightning",
    "lm_eval_harness": "lm_eval",
}
"""Each with its package."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integrations", description=__doc__)
    parser.add_argument("--only", choices=SCRIPTS)
    parser.add_argument("--rows", choices=SCRIPTS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rows:
        print("\n" + json.dumps(rows(options.rows)))
        return 0
    found: dict[str, list[dict[str, Any]]] = {}
    for name in [options.only] if options.only else SCRIPTS:
        command = [sys.executable, "-m", "tests.integrations", "--rows", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{name} did not run: see above")
            return 1
        found[name] = json.loads(done.stdout.splitlines()[-1])
    text = table(found)
    print(text)
    if not options.only:
        TABLE.write_text(text)
    return int(any(row["wrong"] for cases in found.values() for row in cases))


def rows(name: str) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    script = importlib.import_module(f"tests.integrations.{name}")
    found = []
    for case in script.CASES:
        begun, outcome, wrong = time.perf_counter(), None, ""
        try:
            outcome = case.run()
            outcome.check()
        except Exception as error:
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        found.append(
            dict(
                case=case.name,
                raised=outcome.raised if outcome else "",
                where=outcome.where if outcome else "",
                losses=outcome.losses if outcome else 0.0,
                weights=outcome.weights if outcome else 0.0,
                wrong=wrong,
                seconds=time.perf_counter() - begun,
            )
        )
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "# Loops of others",
        "",
        "Written by `make integrations` (`python -m tests.integrations`).",
        "",
        f"torch {version('torch')}, Ray {version('ray')}, two ranks on the CPU, in-process unless",
        "a row says Ray; a Llama of 2 layers, 32 wide, made of a configuration. A difference is",
        "the largest from the same loop with the same seeds on plain torch: of losses (and norms",
        "of gradients and learning rates where the loop logs them; log-likelihoods), and of",
        "weights after six steps of AdamW. Seconds are of the case, with both loops and captures.",
        "What to write is in [other trainers](../../docs/howto/other_trainers.md).",
        "",
        "| loop | version | case | result | losses differ by | weights differ by | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cases in found.items():
        package = SCRIPTS[name]
        for row in cases:
            numbers = [f"{row['losses']:.1e}", f"{row['weights']:.1e}"]
            if row["wrong"]:
                result = f"WRONG: {row['wrong']}"
            elif row["raised"]:
                result, numbers = "does not work: " + row["raised"], ["", ""]
            else:
                result = "right, on the " + row["where"]
            cells = [package, version(package), row["case"], result.replace("|", "\\|"), *numbers]
            lines.append(f"| {' | '.join(cells)} | {row['seconds']:.1f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
