"""Training steps of this tree beside the same steps of an older revision.

    OMP_NUM_THREADS=1 python -m benchmarks.revisions a310e2b1 [--rounds 20] [--write NAME]

Each side is a process with its own launch, which waits on a pipe while the other side runs. A step
is forward, backward and AdamW: the block of benchmarks/transformer_block.py, and the GPT
of examples/gpt.py with cross entropy, each on one rank and on two ranks on Ray, in float32 with one
thread a rank. Both sides begin with the same weights and get the same batch; their losses must have
the same bits. In a round the sides run one right after the other, the order alternating. The ratios
are taken pair by pair.

The older side runs this file too, with the older revision's package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES: Mapping[str, tuple[str, dict[str, int], int]] = {  # model, mesh, steps in one timing
    "block, one rank": ("block", {}, 5),
    "block, tp=2": ("block", dict(tp=2), 5),
    "GPT, one rank": ("gpt", {}, 5),
    "GPT, dp=2, ZeRO-1": ("gpt", dict(dp=2), 5),
}


# -- one side --------------------------------------------------------------------------------------


def serve() -> None:
    """Answer lines with a case: launch it, and take the stated number of steps for each line."""
    import torch

    import dtensor as dt

    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr
    name = json.loads(sys.stdin.readline())
    model, axes, _ = CASES[name]
    mesh = dt.Mesh(**axes)
    step, batch = block(mesh) if model == "block" else gpt(mesh)
    with dt.launch(mesh, backend="ray") if axes else nullcontext():
        for line in sys.stdin:
            begin = time.perf_counter()
            losses = [float(loss) for loss in [step(*batch) for _ in range(int(line))]]
            seconds = time.perf_counter() - begin
            print(json.dumps((seconds, losses)), file=out, flush=True)


def block(mesh: Any) -> tuple[Any, Any]:
    from benchmarks.transformer_block import SHAPES, our_step

    return our_step(SHAPES[256], mesh), SHAPES[256].batch()


def gpt(mesh: Any) -> tuple[Any, Any]:
    import torch
    import torch.nn.functional as F

    import dtensor as dt
    from examples.gpt import GPT, Config

    torch.manual_seed(0)
    whole = GPT(Config(vocab=512, context=32, width=64, heads=4, layers=2))
    parallel = dict(zero={"dp": 1}) if mesh.shape else {}
    model = dt.parallelize(whole, mesh, {}, **parallel)
    step = dt.train_step(
        model,
        lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        inputs=dict(dp=dt.Row()) if mesh.shape else None,
    )
    tokens = torch.randint(512, (16, 33), generator=torch.Generator().manual_seed(1))
    return step, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


# -- the controller --------------------------------------------------------------------------------


class Side:
    """A process that runs the steps of one revision."""

    def __init__(self, tree: Path, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tell(name)

    def tell(self, message: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def steps(self, count: int) -> tuple[float, list[float]]:
        assert self.process.stdout is not None
        self.tell(count)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def compare(name: str, older: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of a step of this tree and of the older one, one item a round."""
    count = CASES[name][2]
    sides = [Side(ROOT, name), Side(older, name)]
    times: tuple[list[float], list[float]] = ([], [])
    try:
        for number in range(rounds + 2):
            found: dict[int, list[float]] = {}
            for at in (0, 1) if number % 2 else (1, 0):
                seconds, found[at] = sides[at].steps(count)
                times[at].append(seconds / count)
            assert found[0] == found[1], (name, number, found)
    finally:
        for side in sides:
            side.close()
    return times[0][2:], times[1][2:]  # the first rounds warm up


def main() -> None:
    from benchmarks.context_parallel import machine
    from benchmarks.pipelining import interval
    from benchmarks.smallest import parsed

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD", help="the older revision")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--write", metavar="NAME", help="benchmarks/results/NAME.md")
    given = parsed(parser, rounds=2, cases=["GPT, one rank"])
    lines = [
        f"# Training steps beside {given.revision}",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.revisions {' '.join(sys.argv[1:])}`",
        "",
        f"{machine()}. {given.rounds} rounds; medians, and medians of the ratios of pairs, with "
        "their 95% interval. What the steps are: benchmarks/revisions.py.",
        "",
        "| step | before ms | now ms | now over before | 95% interval |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "archive", given.revision]
        tar = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=tar, check=True)
        for name in given.cases:
            now, before = compare(name, Path(folder), given.rounds)
            ratios = [a / b for a, b in zip(now, before, strict=True)]
            low, high = interval(ratios)
            times = [f"{statistics.median(each) * 1e3:.2f}" for each in (before, now)]
            ratio = f"{statistics.median(ratios):.3f}"
            lines.append(f"| {name} | {' | '.join(times)} | {ratio} | {low:.3f} to {high:.3f} |")
            print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join([*lines, ""]))
    if given.write:
        (ROOT / "benchmarks" / "results" / f"{given.write}.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve()
    else:
        main()
