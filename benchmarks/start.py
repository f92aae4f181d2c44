"""How long it takes until the first step of a launch on Ray has ended: README's MLP, by AdamW.

    python -m benchmarks.start [--runs 5] [--against ../before] [--write]

Each run is a process of its own, with three launches one after the other. Seconds by the clock from
the `with` line to the loss of the first step; and of `import dtensor`, beyond torch. ``--against``
is another checkout, whose runs alternate with this one's: before a change, for one. Medians, and
from the least to the most. ``--write`` puts the table into results/start.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.smallest import parsed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results") / "start.md"
SIZES = (2, 4)
LAUNCHES = ("first launch", "second launch", "third launch")


def child(size: int) -> None:
    """Prints seconds: of the import, then of each launch."""
    import torch
    from torch import nn

    began = time.perf_counter()
    import dtensor as dt

    seconds = [time.perf_counter() - began]
    mesh = dt.Mesh(tp=size)

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 256)
            self.down = nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x)))

    placements = {
        "up.weight": {"tp": dt.Column()},
        "up.bias": {"tp": dt.Shard(0)},
        "down.weight": {"tp": dt.Row()},
    }
    for _ in LAUNCHES:
        began = time.perf_counter()
        with dt.launch(mesh, "ray"):
            model = dt.parallelize(MLP(), mesh, placements)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            step = dt.train_step(model, lambda model, x, y: ((model(x) - y) ** 2).mean(), optimizer)
            float(step(torch.randn(8, 64), torch.randn(8, 64)))
            seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


def run(tree: Path, size: int) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--child", str(size)]
    done = subprocess.run(
        command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.set_defaults(sizes=SIZES)
    options = parsed(parser, runs=1, sizes=SIZES[:1])
    if options.child:
        child(options.child)
        return
    trees = [*([options.against.resolve()] if options.against else []), ROOT]
    load = os.getloadavg()[0]
    heads = ["before", "now"][-len(trees) :]
    lines = [
        f"| seconds to the first step | {' | '.join(heads)} |"
        + (" now/before |" * (len(trees) > 1)),
        "|---" * (1 + len(trees) + (len(trees) > 1)) + "|",
    ]
    imports: list[list[float]] = [[] for _ in trees]
    for size in options.sizes:
        runs: list[list[list[float]]] = [[] for _ in trees]
        for _ in range(options.runs):
            for own, tree in zip(runs, trees, strict=True):
                own.append(run(tree, size))
                print(size, tree, [f"{each:.2f}" for each in own[-1]], flush=True)
        for own, each in zip(imports, runs, strict=True):
            own += [seconds[0] for seconds in each]
        for number, name in enumerate(LAUNCHES, 1):
            columns = [[seconds[number] for seconds in own] for own in runs]
            lines.append(row(f"{size} ranks, {name}", columns))
    lines.append(row("import dtensor, beyond torch", imports))
    print("\n".join(lines))
    if options.write:
        text = (
            "# Time to the first step on Ray\n\n"
            f"`python -m benchmarks.start --runs {options.runs}`, median (least to most) of runs "
            f"that alternate; {os.cpu_count()} cores, load {load:.1f} before. Before: the state "
            "before public names were imported at first use, and before Ray had a process of its "
            "own.\n\n"
        )
        RESULTS.write_text(text + "\n".join(lines) + "\n")


def row(name: str, columns: Sequence[Sequence[float]]) -> str:
    cells = [name, *map(shown, columns)]
    if len(columns) > 1:
        cells.append(f"{statistics.median(columns[1]) / statistics.median(columns[0]):.2f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
