"""Where the time of a step goes: `step.profile` of a GPT of two blocks on two Ray actors, tp=2.

    OMP_NUM_THREADS=1 python -m benchmarks.where_time_goes [--width 256] [--backend inprocess]

The table of docs/performance.md. Predictions are of a topology that is calibrated right before.
"""

from __future__ import annotations

import argparse

import torch

import dtensor as dt
from benchmarks.smallest import parsed
from tests.models import GPT, batch, loss_fn
from tests.training import MEGATRON


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--backend", default="ray")
    parser.add_argument("--steps", type=int, default=20)
    given = parsed(parser, width=64, backend="inprocess", steps=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(GPT(vocab=512, width=given.width, positions=128), mesh, MEGATRON)
    optimizer = torch.optim.AdamW(model.parameters())
    with dt.launch(mesh, backend=given.backend):
        step = dt.train_step(model, loss_fn, optimizer, topology=dt.calibrate())
        print(step.profile(given.steps, *batch(size=8, length=128, vocab=512)))


if __name__ == "__main__":
    main()
