"""AdamW on the parameters of one transformer block, as torch does it and as a rank does.

    OMP_NUM_THREADS=1 python -m benchmarks.optimizer [--rounds 200] [--write]

Twelve parameters of width d (qkv, proj, up, down with biases, two norms), one thread, gradients in
tensors of their own as a backward leaves them. In milliseconds, least / median:

loop     torch.optim.AdamW(foreach=False), torch's default on the CPU
list     torch.optim.AdamW(fused=True)
ours     `ShardOptimizer.step`: small parameters in one buffer, large ones where they are
tensor   torch.optim.AdamW(fused=True) on one flat parameter with a flat gradient: a bound that no
         program reaches, for its backward would have to write there
clipped  ours and list with gradients divided by a number: list by `torch._foreach_div_` before

One run, in rounds: each way once in turn. The gradients are written anew before each call, which is
not timed and brings them into the cache alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.smallest import parsed
from dtensor.runtime.optimizer.shard_optimizer import (
    ShardOptimizer,
    Updated,
    absent,
    hyperparameters,
    keys_of,
)

AdamW = torch.optim.AdamW
WIDTHS = (64, 256, 512, 1024)


def shapes(d: int) -> list[tuple[int, ...]]:
    weights = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)]
    return [*weights, (3 * d,), (d,), (4 * d,), (d,), (d,), (d,), (d,), (d,)]


class Way:
    """Parameters and gradients of its own, and what is timed on them."""

    def __init__(self, d: int, *, flat: bool = False) -> None:
        sizes = shapes(d)
        if flat:
            sizes = [(sum(torch.Size(shape).numel() for shape in sizes),)]
        self.values = [torch.randn(shape) for shape in sizes]
        self.first = [torch.randn(shape) for shape in sizes]
        self.gradients = [gradient.clone() for gradient in self.first]
        self.run: Callable[[], object] = lambda: None

    def seconds(self) -> float:
        for gradient, first in zip(self.gradients, self.first, strict=True):
            gradient.copy_(first)
        begin = time.perf_counter()
        self.run()
        return time.perf_counter() - begin


def of_torch(d: int, *, clip: Tensor | None = None, flat: bool = False, fused: bool = True) -> Way:
    way = Way(d, flat=flat)
    parameters = [torch.nn.Parameter(value) for value in way.values]
    for parameter, gradient in zip(parameters, way.gradients, strict=True):
        parameter.grad = gradient
    optimizer = AdamW(parameters, fused=True) if fused else AdamW(parameters, foreach=False)

    def run() -> None:
        if clip is not None:
            torch._foreach_div_(way.gradients, clip)
        optimizer.step()

    way.run = run
    return way


def of_ours(d: int, clip: Tensor | None = None) -> Way:
    way = Way(d)
    names = [f"p{i}" for i in range(len(way.values))]
    optimizer = ShardOptimizer(AdamW)
    state = tuple((name, key) for name in names for key in keys_of(AdamW, {}))
    what, values = (
        Updated((tuple(names),), tuple(names), state),
        tuple(absent("cpu") for _ in state),
    )
    options = hyperparameters(AdamW([torch.zeros(1)]))
    shards = dict(zip(names, way.values, strict=True))
    gradients = dict(zip(names, way.gradients, strict=True))
    way.run = lambda: optimizer.step(what, shards, options, gradients, values, clip, writable=names)
    return way


def measured(d: int, rounds: int) -> str:
    clip = torch.tensor(1.5)
    ways = {
        "loop": of_torch(d, fused=False),
        "list": of_torch(d),
        "ours": of_ours(d),
        "tensor": of_torch(d, flat=True),
        "list clipped": of_torch(d, clip=clip),
        "ours clipped": of_ours(d, clip),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(3 + rounds):
            for name, way in ways.items():
                found[name].append(way.seconds() * 1e3)
    times = {name: values[3:] for name, values in found.items()}
    cells = [f"{min(t):7.3f} / {statistics.median(t):7.3f}" for t in times.values()]
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["loop"], strict=True))
    return f"{d:>5}  " + "  ".join(cells) + f"  {ratio:9.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="at d=64; fewer where it is wide")
    parser.add_argument("--write", action="store_true", help="add to benchmarks/results")
    parser.set_defaults(widths=WIDTHS)
    given = parsed(parser, rounds=1, widths=WIDTHS[:1])
    torch.set_num_threads(1)
    load = " ".join(f"{x:.2f}" for x in os.getloadavg())
    head = ("loop", "list", "ours", "tensor", "list clipped", "ours clipped")
    lines = [f"{os.cpu_count()} shared cores, torch {torch.__version__}, load before {load}"]
    lines.append("    d  " + "  ".join(f"{name:>17}" for name in head) + "  ours/loop")
    for d in given.widths:
        lines.append(measured(d, max(10, given.rounds * 64 // d)))
        print(lines[-1] if d != given.widths[0] else "\n".join(lines), flush=True)
    if given.write:
        path = Path(__file__).parent / "results" / "optimizer.txt"
        with path.open("a") as file:
            file.write("OMP_NUM_THREADS=1 python -m benchmarks.optimizer\n\n")
            file.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
