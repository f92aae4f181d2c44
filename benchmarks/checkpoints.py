"""A save beside training, ours and torch's: what it costs the loop, and how long until it is there.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoints [--width 512] [--blocks 4] [--rounds 7]
        [--write]

A stack of linear layers with AdamW, all of its state split over two ranks, one thread a process, in
one run and interleaved; ratios are taken round by round. The sides:

    ours    dt.save on Ray, dp=2 with ZeRO-3
    DCP     torch.distributed.checkpoint.async_save on two gloo ranks, FSDP2 (`fully_shard`), of a
            state dict that is made before and holds the tensors themselves

Each writes the same elements: parameters and AdamW's two moments, each once. Both sync each file
(DCP as it does by default); ours writes checksums, a manifest and a rename besides.

    stall   the time of a window of steps that begins with a save, less that of one without
    total   from the call until the save says that all is on the disk, with no steps meanwhile
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import dtensor as dt
from benchmarks.processes import Processes, answer
from benchmarks.smallest import parsed

RANKS = 2
ROWS = 32


def network(width: int, blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))


def loss_fn(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch(width: int) -> Tensor:
    return torch.randn(RANKS * ROWS, width, generator=torch.Generator().manual_seed(1))


# -- torch's side, in processes of its own ---------------------------------------------------------


def work(rank: int, width: int, blocks: int, directory: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    net = network(width, blocks)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    x = batch(width).chunk(RANKS)[rank]

    def steps(num: int) -> None:
        for _ in range(num):
            loss_fn(net, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()

    steps(1)
    names = {id(p): name for name, p in net.named_parameters()}
    moments = {names[id(p)]: own for p, own in optimizer.state.items()}
    state = {"model": net.state_dict(), "optimizer": {"state": moments}}
    own_group = dist.new_group(backend="gloo")  # its messages are none of the steps'
    saving: list[Any] = []

    def save(path: str) -> None:
        saving[:] = [dcp.async_save(state, checkpoint_id=path, process_group=own_group)]
        dist.barrier()

    def wait() -> None:
        saving[0].result()
        dist.barrier()

    answer(pipe, {"steps": steps, "save": save, "wait": wait})
    dist.destroy_process_group()


# -- the run ---------------------------------------------------------------------------------------


class Side:
    """How a side steps, begins a save, and waits for its end."""

    def __init__(
        self,
        steps: Callable[[int], None],
        save: Callable[[str], None],
        wait: Callable[[], None],
        folder: Path,
    ) -> None:
        self.steps, self.save, self.wait, self.folder = steps, save, wait, folder
        self.number = 0

    def path(self) -> str:
        self.number += 1
        return str(self.folder / str(self.number))

    def window(self, num: int, *, saves: bool) -> float:
        """Seconds of so many steps, behind a save that is submitted if it ``saves``."""
        path = self.path()
        begin = time.perf_counter()
        if saves:
            self.save(path)
        self.steps(num)
        seconds = time.perf_counter() - begin
        if saves:
            self.wait()
            shutil.rmtree(path)
        return seconds

    def total(self) -> float:
        path = self.path()
        begin = time.perf_counter()
        self.save(path)
        self.wait()
        seconds = time.perf_counter() - begin
        shutil.rmtree(path)
        return seconds


def measure(width: int, blocks: int, window: int, rounds: int, folder: Path) -> list[str]:
    mesh = dt.Mesh(dp=RANKS)
    net = network(width, blocks)
    model = dt.parallelize(net, mesh, zero={"dp": 3})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    step = dt.train_step(model, loss_fn, optimizer, inputs=dict(dp=dt.Row()))
    x, saved = batch(width), list[dt.Saved]()

    def steps(num: int) -> None:
        for _ in range(num):
            loss = step(x)
        float(loss)

    def wait(future: dt.Saved) -> None:
        future.get()

    nbytes = 3 * sum(p.nbytes for p in net.parameters())
    with dt.launch(mesh, backend="ray"), Processes(RANKS, work, width, blocks) as peers:
        sides = {
            "ours": Side(
                steps,
                lambda path: saved.append(dt.save(path, model, optimizer)),
                lambda: wait(saved.pop()),
                folder / "ours",
            ),
            "DCP": Side(
                lambda num: peers.ask("steps", num),
                lambda path: peers.ask("save", path),
                lambda: peers.ask("wait"),
                folder / "dcp",
            ),
        }
        for side in sides.values():  # warm: connections, programs, files
            side.steps(window)
            side.window(window, saves=True)
        stalls: dict[str, list[float]] = {name: [] for name in sides}
        plain: dict[str, list[float]] = {name: [] for name in sides}
        totals: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                before = side.window(window, saves=False)
                during = side.window(window, saves=True)
                after = side.window(window, saves=False)
                plain[name].append(min(before, after))
                stalls[name].append(during - min(before, after))
                totals[name].append(side.total())
    lines = [
        f"state: {nbytes / 1e6:,.0f} MB on {RANKS} ranks; a window is {window} steps; "
        f"{rounds} rounds",
        "",
        "| | ours | DCP | ours / DCP, round by round |",
        "|---|---|---|---|",
    ]
    for what, found in (("stall, ms", stalls), ("total, ms", totals), ("window, ms", plain)):
        ours, theirs = found["ours"], found["DCP"]
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        lines.append(
            f"| {what} | {1e3 * statistics.median(ours):,.0f} (min {1e3 * min(ours):,.0f}) | "
            f"{1e3 * statistics.median(theirs):,.0f} (min {1e3 * min(theirs):,.0f}) | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--window", type=int, default=8, help="steps")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="on whose disk; by default beside this file")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parsed(parser, argv, width=64, blocks=1, window=2, rounds=1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder or Path(__file__).parent) as folder:
        body = measure(given.width, given.blocks, given.window, given.rounds, Path(folder))
    lines = [
        "# A save beside training, ours and DCP's async_save",
        "",
        "`python -m benchmarks.checkpoints --write`, which says what is compared.",
        "",
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, "
        f"one thread a process",
        "",
        *body,
        "",
    ]
    print("\n".join(lines))
    if given.write:
        path = Path(__file__).parent / "results" / "checkpoints.md"
        path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
