"""A training step with delayed gradients (`delay=1`) beside the same step without a delay.

    OMP_NUM_THREADS=1 python -m benchmarks.delay [--widths 64 256 512] [--write]
    OMP_NUM_THREADS=1 python -m benchmarks.delay --simulate [--write]

Measured: the transformer block of benchmarks/transformer_block.py with AdamW at dp=2 on Ray, at the
levels of ZeRO, one thread a rank, timed as there. The two sides have losses of their own; the
losses with a delay are compared with the same program on one rank.

``--simulate`` plans layers of Llama-3-8B in bf16 on 8 H100s with 25 GB/s a direction between them,
2048 tokens a GPU: the predicted seconds of a step, the exposed communication and the memory of a
rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import dtensor as dt
from benchmarks.context_parallel import llama, llama_loss
from benchmarks.smallest import parsed
from benchmarks.transformer_block import Beside, machine, measure, ours, table
from benchmarks.transformer_block_peer import LR, SHAPES, Shape

RESULTS = Path(__file__).parent / "results"


def step_of(shape: Shape, mesh: dt.Mesh, level: int, delay: int) -> dt.TrainStep:
    axes = dict(zero={"dp": level}) if mesh.shape else {}
    model = dt.parallelize(shape.model(), mesh, {}, **axes)
    return dt.train_step(
        model,
        lambda model, x, y: F.mse_loss(model(x), y),
        torch.optim.AdamW(model.parameters(), lr=LR),
        inputs=dict(dp=dt.Row()) if mesh.shape else None,
        delay=delay,
    )


def compare(
    shape: Shape, mesh: dt.Mesh, level: int, rounds: int, reference: Sequence[float]
) -> Beside:
    """Inside a launch of ``mesh``. ``reference``: the first losses on one rank."""
    batch = [dt.distribute(x, mesh, dp=dt.Row()) for x in shape.batch()]
    delayed, present = (ours(step_of(shape, mesh, level, delay), batch) for delay in (1, 0))
    for a, b in zip(delayed(len(reference)), reference, strict=True):
        assert abs(a - b) < 1e-5 * abs(b), (a, b)
    (found,) = measure(delayed, {"": present}, rounds, shape.steps, same_losses=False).values()
    return found


def measured(given: argparse.Namespace) -> list[str]:
    lines = [
        "# A training step with delayed gradients",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.delay {' '.join(sys.argv[1:])}`",
        "",
        f"{machine()}. dp=2 on Ray; medians, and medians of the ratios of pairs, with their 95% "
        "interval. The columns of dtensor are with `delay=1`. What the sides are: "
        "benchmarks/delay.py.",
        "",
        *(f"- d={width}: {SHAPES[width]}" for width in given.widths),
        "",
    ]
    mesh = dt.Mesh(dp=2)
    shapes = [SHAPES[width] for width in given.widths]
    losses = {shape: ours(step_of(shape, dt.Mesh(), 0, 1), shape.batch())(4) for shape in shapes}
    with dt.launch(mesh, backend="ray"):
        found = {
            shape.width: {
                f"delay=0, level {level}": compare(shape, mesh, level, given.rounds, losses[shape])
                for level in given.levels
            }
            for shape in shapes
        }
    return lines + table("Two ranks, dp=2", found)


def simulated(given: argparse.Namespace) -> list[str]:
    lines = [
        "# Delayed gradients on 8 GPUs, predicted",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.delay {' '.join(sys.argv[1:])}`",
        "",
        f"{given.layers} layers of Llama-3-8B with the embedding and the head, bf16, AdamW, dp=8 "
        f"over 25 GB/s a direction, one sequence of {given.tokens} tokens a GPU.",
        "",
        "| ZeRO | delay | step | communication in it | compute | memory of a rank | over delay=0 |",
        "|---|---|---|---|---|---|---|",
    ]
    for level in given.levels:
        before = 0.0
        for delay in (0, 1):
            plan = llama_plan(level, delay, given)
            cost, memory = plan.cost, plan.totals.memory.total / 2**30
            before = before or cost.seconds
            parts = cost.seconds, cost.communication_seconds, cost.compute_seconds
            cells = [str(level), str(delay), *(f"{part * 1e3:.1f} ms" for part in parts)]
            cells += [f"{memory:.1f} GiB", f"{cost.seconds / before:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return [*lines, ""]


def llama_plan(level: int, delay: int, given: argparse.Namespace) -> dt.Plan:
    sizes: dict[str, Any] = dict(hidden_size=128, vocab_size=256, intermediate_size=256)
    module = llama(given.layers, **(sizes if given.smallest else {}))
    ids = torch.zeros(8, given.tokens, dtype=torch.long, device="meta")
    model = dt.parallelize(module, dt.Mesh(dp=8), {}, zero={"dp": level})
    step = dt.train_step(
        model,
        llama_loss,
        torch.optim.AdamW(module.parameters(), lr=1e-4),
        inputs=dict(dp=dt.Row()),
        topology=dt.topologies.h100(infiniband=("dp",)),
        delay=delay,
    )
    return step.plan(ids, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512], choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--simulate", action="store_true", help="plan Llama-3-8B instead")
    parser.add_argument("--layers", type=int, default=8, help="of Llama-3-8B")
    parser.add_argument("--write", action="store_true", help="benchmarks/results")
    parser.set_defaults(tokens=2048)
    given = parsed(parser, widths=[64], rounds=2, levels=[1], layers=1, tokens=64)
    torch.set_num_threads(1)
    for simulate in [True, False] if given.smallest else [given.simulate]:
        text = "\n".join(simulated(given) if simulate else measured(given))
        print(text, flush=True)
        if given.write:
            name = "delay_simulated.md" if simulate else "delay.md"
            (RESULTS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
