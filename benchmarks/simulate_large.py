"""Seconds and memory to simulate a training step on 4,096 ranks, from the model on.

    OMP_NUM_THREADS=1 python -m benchmarks.simulate_large

A GPT of 32 layers of width 4096 on the meta device, pp=16 x dp=32 x tp=8 with Megatron's
placements, 1F1B of 64 microbatches, 2,048 sequences of 2,048 tokens, AdamW. Prints the seconds to
plan and to simulate, the peak of the process's memory, and what is predicted.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

import dtensor as dt
from benchmarks.plan_large import gpt, gpt_loss
from benchmarks.predicted_time import MEGATRON
from benchmarks.smallest import parsed

LAYERS, STAGES = 32, 16
PLACEMENTS = {**MEGATRON, "embed.weight": dict(tp=dt.Row()), "head.weight": dict(tp=dt.Row())}


def stages(layers: int, num_stages: int) -> list[list[str]]:
    each = layers // num_stages
    lists = [[f"blocks.{{{n * each}..{(n + 1) * each - 1}}}.*"] for n in range(num_stages)]
    lists[0] += ["embed*", "positions*"]
    lists[-1] += ["norm*", "head*"]
    return lists


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.set_defaults(layers=LAYERS, stages=STAGES, microbatches=64)
    given = parsed(parser, layers=2, stages=2, microbatches=2)
    torch.set_num_threads(1)
    with torch.device("meta"):
        module = gpt(given.layers)
        ids = torch.zeros(2048, 2048, dtype=torch.long)
    mesh = dt.Mesh(pp=given.stages, dp=32, tp=8)
    model = dt.parallelize(
        module, mesh, PLACEMENTS, stages={"pp": stages(given.layers, given.stages)}
    )
    step = dt.train_step(
        model,
        gpt_loss,
        torch.optim.AdamW(module.parameters(), lr=1e-4),
        inputs=dict(dp=dt.Row()),
        schedule=dt.OneFOneB(given.microbatches),
    )
    start = time.perf_counter()
    step.plan(ids, ids)
    planned = time.perf_counter()
    trace = dt.simulate(step)
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{mesh}: {mesh.size} ranks, {len(trace.spans)} spans of {len(trace.ranks)} ranks")
    print(f"plan {planned - start:.1f} s, simulate {ended - planned:.1f} s, peak {peak:.2f} GiB")
    print(f"predicted {trace.seconds:.2f} s a step, bubble {trace.bubble:.1%}")


if __name__ == "__main__":
    main()
