"""A training step of one layer of experts, split over 2 or 4 ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.experts [--widths 64 256] [--ranks 2 4] [--write]

The tokens and the experts are split over ``ep``: dtensor on Ray dispatches rows to their experts.
"by hand" is benchmarks/experts_peer.py on gloo. "sorted in torch" is dtensor too, for the model
that sorts rows in plain torch, where every rank has all rows and zero-filled results are summed.
All sides begin with the same weights and get the same batch; a step is forward, loss, backward
and AdamW, in float32 with one thread a rank. Losses of all steps are compared.

Timed as in benchmarks/transformer_block.py: in a round dtensor and each peer one right after the
other, ratios pair by pair. The table begins with the bytes that a rank sends in one step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

import dtensor as dt
from benchmarks.experts_peer import LR, SHAPES, MoE, Peers, Shape, Sorted
from benchmarks.smallest import parsed
from benchmarks.transformer_block import Beside, Run, machine, measure, ours, table

EXPERTS = {"up": dict(ep=dt.Shard(0)), "down": dict(ep=dt.Shard(0))}


def step_of(shape: Shape, mesh: dt.Mesh, kind: Callable[[Shape], MoE] = MoE) -> dt.TrainStep:
    torch.manual_seed(0)
    model = dt.parallelize(kind(shape), mesh, EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return dt.train_step(
        model, lambda m, x, y: F.mse_loss(m(x), y), optimizer, inputs=dict(ep=dt.Row())
    )


def sent(step: dt.TrainStep, shape: Shape) -> dict[str, int]:
    """The bytes that a rank sends in the forward and in the backward, by the plan."""
    plan = step.plan(*shape.batch())
    found = {"forward": 0, "backward": 0}
    for each in plan.collectives:
        if each.phase in found:
            found[each.phase] += each.bytes_sent * each.times
    return found


def compare(shape: Shape, mesh: dt.Mesh, peers: Peers, rounds: int) -> dict[str, Beside]:
    batch = [dt.distribute(x, mesh, ep=dt.Row()) for x in shape.batch()]
    step, old = step_of(shape, mesh), step_of(shape, mesh, Sorted)
    runs: dict[str, Run] = {
        "by hand": lambda count: peers.steps(shape, count),
        "sorted in torch": ours(old, batch),
    }
    return measure(ours(step, batch), runs, rounds, shape.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--write", action="store_true", help="benchmarks/results")
    given = parsed(parser, widths=[min(SHAPES)], rounds=2, ranks=[2])
    torch.set_num_threads(1)
    shapes = [SHAPES[width] for width in given.widths]
    lines = [
        "# A training step of one layer of experts",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.experts {' '.join(sys.argv[1:])}`",
        "",
        f"{machine()}. {given.rounds} rounds; medians, and medians of the ratios of pairs, with "
        "their 95% interval. What the sides are: benchmarks/experts.py.",
        "",
        *(f"- d={shape.width}: {shape}" for shape in shapes),
        "",
        "## Bytes that a rank sends, by the plan, if the experts have equally many rows",
        "",
        "| d | ranks | forward | backward | sorted in torch, forward | backward |",
        "|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        for num in given.ranks:
            mesh = dt.Mesh(ep=num)
            new, old = (sent(step_of(shape, mesh, kind), shape) for kind in (MoE, Sorted))
            cells = [*new.values(), *old.values()]
            lines.append(f"| {shape.width} | {num} | {' | '.join(f'{n:,}' for n in cells)} |")
    lines.append("")
    for num in given.ranks:
        mesh = dt.Mesh(ep=num)
        with Peers(num, shapes) as peers, dt.launch(mesh, backend="ray"):
            found = {s.width: compare(s, mesh, peers, given.rounds) for s in shapes}
        lines += table(f"{num} ranks", found)
    print("\n".join(lines))
    if given.write:
        (Path(__file__).parent / "results" / "experts.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
