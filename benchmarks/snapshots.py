"""What snapshots cost: a transformer block's steps with and without, two ranks copying at once.

    OMP_NUM_THREADS=1 python -m benchmarks.snapshots [--rounds 20] [--d 512] [--write]

A causal block of width d, AdamW, batches of 4 x 512 positions at tp=2. Two launches of a backend in
one process, one of which keeps snapshots (`snapshot_every=1`), and a step of each in turn. On Ray
each rank is a process, both copy what their step wrote at the same time, into files; in-process the
ranks take turns, and values are copied before they are written. In milliseconds, least / median;
the ratio is the median of those round by round.

`copying` is the copy alone: as many bytes as a rank of the step writes, by two processes at once,
that do nothing else; first into pages that nobody has touched, then as every later step does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import dtensor as dt
from benchmarks.smallest import parsed
from dtensor.api.store import session
from dtensor.daft import Call, Cluster, launch_cluster
from dtensor.daft.cluster.cluster import Backend
from dtensor.daft.undo.snapshot_file import SnapshotFile
from dtensor.daft.undo.snapshots import Key, Snapshots

RESULTS = Path(__file__).parent / "results" / "snapshots.md"
MESH = dt.Mesh(tp=2)


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.heads = d // 64
        self.before, self.after = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d = x.shape
        h = self.before(x)
        q, k, v = (
            part(h).view(batch, length, self.heads, d // self.heads).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, d))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


PLACEMENTS = {
    "[qkv].*": dict(tp=dt.Column()),
    "o.weight": dict(tp=dt.Row()),
    "up.*": dict(tp=dt.Column()),
    "down.weight": dict(tp=dt.Row()),
}


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


class Side:
    """A launch with a block that it trains."""

    def __init__(self, backend: Backend, every: int | None, d: int) -> None:
        self.cluster: Cluster = launch_cluster(2, backend=backend, snapshot_every=every)
        self.running = session.Launch(self.cluster, "compiled")
        self.running.add(MESH)
        torch.manual_seed(0)
        module = Block(d)
        model = dt.parallelize(module, MESH, PLACEMENTS)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.train = dt.train_step(model, _loss, optimizer)
        self.batch = tuple(torch.randn(2, 4, 512, d))

    @contextmanager
    def current(self) -> Iterator[None]:
        session.launches.append(self.running)
        try:
            yield
        finally:
            session.launches.remove(self.running)

    def seconds(self) -> float:
        with self.current():
            begin = time.perf_counter()
            float(self.train(*self.batch))
            return time.perf_counter() - begin

    def written(self) -> list[int]:
        """Bytes that a step writes, by rank."""
        handle = next(iter(self.cluster._handles.values()))  # type: ignore[attr-defined]
        found: list[int] = []
        for own in handle.program.ranks:
            calls = [i for i in own.instructions if isinstance(i, Call)]
            sizes, made = dict(own.nbytes), {name for call in calls for name in call.writes}
            found.append(sum(sizes.get(name, 0) for name in own.state if name in made))
        return found

    def close(self) -> None:
        with self.current():
            self.running.close(bring_home=False)


def steps(backend: Backend, d: int, rounds: int) -> tuple[list[float], list[float], list[int]]:
    """Seconds without and with snapshots, in turn; bytes that a step writes, by rank."""
    with ExitStack() as ending:
        sides: list[Side] = []
        for every in (None, 1):
            sides.append(Side(backend, every, d))
            ending.callback(sides[-1].close)
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 3):
            order = (0, 1) if number % 2 else (1, 0)
            for at in order:
                seconds = sides[at].seconds()
                if number >= 3:
                    found[at].append(seconds)
        return *found, sides[0].written()


def _copies(folder: str, nbytes: int, rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sizes = [nbytes // 4 // 40] * 40
    table: dict[Key, object] = {(0, f"w{i}"): torch.ones(size) for i, size in enumerate(sizes)}
    keys = tuple(table)
    name = os.getpid()
    snapshots = Snapshots(table, SnapshotFile.create(Path(folder), (name,)))
    times: list[float] = []
    for number in range(1, rounds + 3):
        pipe.send(None)
        pipe.recv()
        begin = time.perf_counter()
        snapshots.begin(keys)
        snapshots.end(number, written=keys, committed=number - 1)
        times.append(time.perf_counter() - begin)
    pipe.send(times)


def copying(nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of two processes that copy so many bytes at the same time: first two times, later."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pipes = [context.Pipe() for _ in range(2)]
        given = [(folder, nbytes, rounds, there) for _, there in pipes]
        processes = [context.Process(target=_copies, args=own) for own in given]
        for process in processes:
            process.start()
        for _ in range(rounds + 2):
            for here, _ in pipes:
                here.recv()
            for here, _ in pipes:
                here.send(None)
        times = [here.recv() for here, _ in pipes]
        for process in processes:
            process.join()
    return [t for own in times for t in own[:2]], [t for own in times for t in own[2:]]


def _cell(seconds: list[float]) -> str:
    return f"{1e3 * min(seconds):.2f} / {1e3 * median(seconds):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parsed(parser, rounds=1, d=64)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows: list[str] = []
    nbytes = 0
    for backend in ("ray", "inprocess"):
        without, with_, written = steps(backend, given.d, given.rounds)
        nbytes = max(written)
        ratio = median(b / a for a, b in zip(without, with_, strict=True))
        rows.append(f"| a step, {backend} | {_cell(without)} | {_cell(with_)} | **{ratio:.3f}** |")
    fresh, later = copying(nbytes, given.rounds)
    lines = [
        "# What snapshots cost",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.snapshots --rounds {given.rounds} "
        f"--d {given.d}`: ms, least / median of {given.rounds} interleaved rounds; ratios round "
        f"by round, their median. {os.cpu_count()} cores, load {load:.1f} before, torch "
        f"{torch.__version__}.",
        "",
        "| | without | with snapshots | ratio |",
        "|---|---|---|---|",
        *rows,
        "",
        f"A rank's step writes {nbytes:,} B (parameters and AdamW's state). Copying so many by two "
        f"processes at once: {_cell(later)} ms, {nbytes / median(later) / 1e9:.1f} GB/s each; the "
        f"first two times, into new pages: {_cell(fresh)} ms.",
        "",
    ]
    print("\n".join(lines))
    if given.write:
        RESULTS.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
