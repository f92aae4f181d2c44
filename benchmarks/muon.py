"""A training step by Muon, where each matrix is updated on one of 2 or 4 ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.muon [--widths 256 512] [--ranks 2 4] [--write]

The model has 8 square matrices. A step is forward, mse loss, backward and `torch.optim.Muon`, in
float32 with one thread a rank, at tp and at dp with ZeRO-1. dtensor on Ray is beside Muon by hand
on gloo (benchmarks/muon_peer.py): "owners" does what dtensor does, "all" updates every matrix on
every rank. All sides begin with the same weights and get the same batch. Losses are compared.

Timed as in benchmarks/transformer_block.py: in a round dtensor and each peer one right after the
other, ratios pair by pair. The table begins with what the plan prints about the updates.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import dtensor as dt
from benchmarks.muon_peer import KINDS, LR, SHAPES, Peers, Shape
from benchmarks.smallest import parsed
from benchmarks.transformer_block import Beside, machine, measure, ours, table

PINS = {"ups.*.weight": dict(tp=dt.Row()), "downs.*.weight": dict(tp=dt.Column())}


def step_of(shape: Shape, mesh: dt.Mesh) -> dt.TrainStep:
    placed: dict[str, Any] = dict(placements=PINS)
    if "dp" in mesh.axes:
        placed = dict(placements={}, zero={"dp": 1})
    model = dt.parallelize(shape.model(), mesh, **placed)
    optimizer = torch.optim.Muon(model.parameters(), lr=LR)
    inputs = dict(dp=dt.Row()) if "dp" in mesh.axes else None
    return dt.train_step(model, lambda m, x, y: F.mse_loss(m(x), y), optimizer, inputs=inputs)


def compare(shape: Shape, mesh: dt.Mesh, peers: Peers, rounds: int) -> dict[str, Beside]:
    """Inside a launch of ``mesh``."""
    (axis,) = mesh.axes
    step = step_of(shape, mesh)
    inputs = dict(dp=dt.Row()) if axis == "dp" else {}
    batch = [dt.distribute(x, mesh, **inputs) for x in shape.batch()]
    beside = {f"{kind}": partial(peers.steps, f"{axis}, {kind}", shape) for kind in KINDS}
    return measure(ours(step, batch), beside, rounds, shape.steps)


def updates(shape: Shape, mesh: dt.Mesh) -> list[str]:
    """Return the lines of the plan about the updates."""
    text = str(step_of(shape, mesh).plan(*shape.batch())).splitlines()
    begin = next(i for i, line in enumerate(text) if line.strip().startswith("* gradients"))
    return text[begin:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512], choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--write", action="store_true", help="benchmarks/results")
    given = parsed(parser, widths=[min(SHAPES)], rounds=2, ranks=[2])
    torch.set_num_threads(1)
    shapes = [SHAPES[width] for width in given.widths]
    lines = [
        "# A training step by Muon",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.muon {' '.join(sys.argv[1:])}`",
        "",
        f"{machine()}. {given.rounds} rounds; medians, and medians of the ratios of pairs, with "
        "their 95% interval. What the sides are: benchmarks/muon.py.",
        "",
        *(f"- d={shape.width}: {shape}" for shape in shapes),
        "",
    ]
    for num in given.ranks:
        for axis in ("tp", "dp"):
            mesh = dt.Mesh(**{axis: num})
            with Peers(num, shapes) as peers, dt.launch(mesh, backend="ray"):
                found = {s.width: compare(s, mesh, peers, given.rounds) for s in shapes}
            lines += table(f"{num} ranks, {'tp' if axis == 'tp' else 'ZeRO-1'}", found)
            print("\n".join(lines[-len(shapes) * 2 - 6 :]), file=sys.stderr, flush=True)
    lines += ["## The plan of the updates, tp=2 and the largest width", "", "```text"]
    lines += [*updates(shapes[-1], dt.Mesh(tp=2)), "```", ""]
    print("\n".join(lines))
    if given.write:
        (Path(__file__).parent / "results" / "muon.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
