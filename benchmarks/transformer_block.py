"""A training step of one transformer block: on two ranks at tp=2 and at dp=2, and on one rank.

    OMP_NUM_THREADS=1 python -m benchmarks.transformer_block [--widths 64 256] [--write]
    python -m benchmarks.transformer_block --device cuda --ranks 2      # a GPU for each rank

The block is Megatron's (LayerNorm, fused qkv, causal attention, projection, MLP with GELU, residual
connections, float32), a step is forward, mse loss, backward and AdamW. All sides begin with the
same weights and are given the same batch, one thread a rank.

Two ranks: dtensor on Ray at tp=2, beside transformer_block_peer.py on two processes: by hand on
gloo with torch's AdamW as it comes ("hand", a for-loop over parameters on a CPU) and with
`fused=True`, by hand over dtensor's own transport, and PyTorch's DTensor on gloo. With ``--zero3``
also dtensor at dp=2 with ZeRO-3, beside FSDP2 on the same processes. One rank: dtensor
on `dt.Mesh()` in this process, beside plain eager torch, with both AdamW.

Before timing each side's gradients are compared with plain torch's, and all losses of all steps are
compared with each other. One run, all sides warm. In a round dtensor and each peer are timed one
right after the other, the order alternating; ratios are taken pair by pair, so that what else the
machine does falls on both alike. A timing is a few steps in a row as in a training loop, with the
losses read at the end. What does not run blocks on a socket.

Not here: large models, pipelines (pipelining.py), planning (plan_time.py). dtensor's actors keep
the memory that they free (daft/ray/channel/host.py); the peers' processes are as torch leaves them.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from torch import Tensor
from torch.nn import functional as F

import dtensor as dt
from benchmarks.pipelining import check_gradients, interval
from benchmarks.smallest import parsed
from benchmarks.transformer_block_peer import LR, NUM_RANKS, SHAPES, Peers, Shape, kinds

Run = Callable[[int], list[float]]
"""Takes that many training steps; their losses."""

LOSS_RTOL = 1e-4

MEGATRON: Mapping[str, Mapping[str, dt.Placement]] = {
    "qkv.weight": dict(tp=dt.Row(blocks=3)),
    "proj.weight": dict(tp=dt.Column()),
    "up.weight": dict(tp=dt.Row()),
    "down.weight": dict(tp=dt.Column()),
}


# -- the sides -------------------------------------------------------------------------------------


def our_step(shape: Shape, mesh: dt.Mesh) -> dt.TrainStep:
    pins, zero = MEGATRON if "tp" in mesh.axes else {}, {"dp": 3} if "dp" in mesh.axes else {}
    model = dt.parallelize(shape.model(), mesh, pins, zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return dt.train_step(model, lambda model, x, y: F.mse_loss(model(x), y), optimizer)


def ours(step: dt.TrainStep, batch: Sequence[Tensor | dt.DTensor]) -> Run:
    def run(count: int) -> list[float]:
        return [float(loss) for loss in [step(*batch) for _ in range(count)]]

    return run


def eager(shape: Shape, fused: bool | None) -> Run:
    """Plain torch in this process."""
    model, (x, y) = shape.model(), shape.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)

    def run(count: int) -> list[float]:
        losses: list[Tensor] = []
        for _ in range(count):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    return run


def plain_gradients(shape: Shape) -> dict[str, Tensor]:
    model, (x, y) = shape.model(), shape.batch()
    F.mse_loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def peer(peers: Peers, kind: str, shape: Shape) -> Run:
    return lambda count: peers.steps(kind, shape, count)


# -- timing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """dtensor beside one peer: seconds of a step, one item a round."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]


def measure(
    ours: Run, peers: Mapping[str, Run], rounds: int, steps: int, *, same_losses: bool = True
) -> dict[str, Beside]:
    """The first round warms up. ``same_losses``: compare the losses of all sides."""
    found = {name: Beside(ours=[], theirs=[]) for name in peers}
    losses: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    for number in range(rounds + 1):
        for name, run in peers.items():
            beside = found[name]
            pair = [("ours", ours, beside.ours), (name, run, beside.theirs)]
            for side, go, times in pair if number % 2 else pair[::-1]:
                begin = time.perf_counter()
                losses[side] += go(steps)
                times.append((time.perf_counter() - begin) / steps)
    for beside in found.values():
        del beside.ours[0], beside.theirs[0]
    if same_losses:
        check_losses(losses)
    return found


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Each side's k-th step gives the same loss; dtensor takes more steps than each peer."""
    reference = losses["ours"]
    for name, found in losses.items():
        for number, (loss, wanted) in enumerate(zip(found, reference, strict=False)):
            assert abs(loss - wanted) < LOSS_RTOL * wanted, (name, number, loss, wanted)


def one_rank(shape: Shape, rounds: int) -> dict[str, Beside]:
    step, batch = our_step(shape, dt.Mesh()), shape.batch()
    check_gradients(step.gradients(*batch), plain_gradients(shape))
    peers = {"eager": eager(shape, None), "eager, fused AdamW": eager(shape, True)}
    return measure(ours(step, batch), peers, rounds, shape.steps)


def two_ranks(
    shape: Shape, rounds: int, mesh: dt.Mesh, peers: Peers, device: str
) -> dict[str, Beside]:
    """Inside a launch of ``mesh``."""
    step = our_step(shape, mesh)
    split: dict[str, dt.Placement] = {"dp": dt.Row()} if "dp" in mesh.axes else {}
    batch = [dt.distribute(x, mesh, **split) for x in shape.batch()]
    wanted, names = plain_gradients(shape), kinds(device, fsdp="dp" in mesh.axes)
    check_gradients(step.gradients(*batch), wanted)
    for kind in names:
        check_gradients(peers.gradients(kind, shape), wanted)
    runs = {kind: peer(peers, kind, shape) for kind in names}
    return measure(ours(step, batch), runs, rounds, shape.steps)


# -- the table -------------------------------------------------------------------------------------


def table(title: str, found: Mapping[int, Mapping[str, Beside]], size: str = "d") -> list[str]:
    """A line for each size and peer: the medians, and the median of the ratios of pairs."""
    lines = [
        f"## {title}",
        "",
        f"| {size} | beside | its ms | dtensor ms | dtensor over it | 95% interval |",
        "|---|---|---|---|---|---|",
    ]
    for number, by_name in found.items():
        for name, beside in by_name.items():
            theirs, mine = (statistics.median(t) * 1e3 for t in (beside.theirs, beside.ours))
            low, high = interval(beside.ratios)
            ratio = statistics.median(beside.ratios)
            lines.append(
                f"| {number} | {name} | {theirs:.2f} | {mine:.2f} | {ratio:.3f} "
                f"| {low:.3f} to {high:.3f} |"
            )
    return [*lines, ""]


def machine(gpus: str = "no GPU") -> str:
    """The machine, its load at this moment, and versions, as the heads of results say them."""
    load = " ".join(f"{x:.2f}" for x in os.getloadavg())
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {gpus}, load before {load}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, ray {ray.__version__}"
    )


def header(rounds: int, device: str) -> list[str]:
    gpus = "no GPU" if device == "cpu" else f"{NUM_RANKS} x {torch.cuda.get_device_name()}"
    return [
        "# A training step of one transformer block",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.transformer_block {' '.join(sys.argv[1:])}`",
        "",
        f"{machine(gpus)}. {rounds} rounds; medians, and medians of the ratios of pairs, with "
        "their 95% interval. What the sides are, and how they are timed: "
        "benchmarks/transformer_block.py.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1], choices=[1, NUM_RANKS])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--zero3", action="store_true", help="also dp=2 with ZeRO-3")
    parser.add_argument("--write", action="store_true", help="benchmarks/results")
    given = parsed(parser, widths=[min(SHAPES)], rounds=2, ranks=[1])
    if given.device == "cuda" and given.ranks != [NUM_RANKS]:
        parser.error("on GPUs two ranks alone are timed here: --ranks 2; one: benchmarks.gpu_step")
    torch.set_num_threads(1)
    shapes = [SHAPES[width] for width in given.widths]
    lines = header(given.rounds, given.device)
    for shape in shapes:
        lines.append(f"- d={shape.width}: {shape}")
    lines.append("")
    if 1 in given.ranks:
        alone = {shape.width: one_rank(shape, given.rounds) for shape in shapes}
        lines += table("One rank, in this process", alone)
    if NUM_RANKS in given.ranks:
        where = dict(backend="ray", device=given.device)
        halved = [shape for shape in shapes if shape.rows >= NUM_RANKS]
        with Peers(shapes, given.device) as peers:
            for title, mesh, cut in (
                ("Two ranks, tp=2", dt.Mesh(tp=NUM_RANKS), shapes),
                ("Two ranks, dp=2, ZeRO-3", dt.Mesh(dp=NUM_RANKS), halved * given.zero3),
            ):
                if cut:
                    with dt.launch(mesh, **where):
                        args = given.rounds, mesh, peers, given.device
                        found = {shape.width: two_ranks(shape, *args) for shape in cut}
                    lines += table(title, found)
    print("\n".join(lines))
    if given.write:
        name = "transformer_block.md" if given.device == "cpu" else "transformer_block_gpus.md"
        path = Path(__file__).parent / "results" / name
        path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
