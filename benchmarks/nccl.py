"""An all_reduce between the GPUs of one machine: dtensor's transport beside torch.distributed.

    python -m benchmarks.nccl [--rounds 20] [--write]       # needs two GPUs or more

f32 sums over all GPUs, one process for each, in one run and interleaved. A timing is a few
all_reduces in a row, by CUDA events of rank 0, after all have met. The bandwidth is 2 (n - 1) / n
of the bytes over the time. The sides: dtensor's transport with NCCL's collective, the same with
sums in rank order (`deterministic=True`), and `torch.distributed.all_reduce` of a copy, since
dtensor makes a new tensor too. All are right before they are timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes import Processes, answer
from benchmarks.same_host import summing
from benchmarks.smallest import parsed
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.nccl import join_nccl
from tests.daft.programs import parts_of

SIZES = {1 << 16: 50, 1 << 20: 20, 1 << 26: 5}
"""Bytes, and how many all_reduces a timing has."""
OURS = {"dtensor": False, "dtensor, in order": True}
"""Sides of dtensor, and whether sums are in rank order."""
PEER = "torch.distributed"
PATIENCE_S = 600.0


def work(rank: int, size: int, directory: str, pipe: Connection) -> None:
    """Time what is asked, on the GPU of this rank."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    store = dist.FileStore(f"{directory}/store", size)
    transports = {
        name: ExchangeTransport(
            join_nccl(dist.PrefixStore(name, store), (rank,), size, PATIENCE_S, in_order),
            range(size),
        )
        for name, in_order in OURS.items()
    }
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    answer(pipe, {"times": lambda rounds: times_of(rank, size, transports, rounds)})
    dist.destroy_process_group()


def times_of(
    rank: int, size: int, transports: Mapping[str, ExchangeTransport], rounds: int
) -> dict[int, dict[str, list[float]]]:
    """Return, by bytes and side, the seconds of one all_reduce in each round."""
    found: dict[int, dict[str, list[float]]] = {}
    hosts = [(other,) for other in range(size)]
    for number, (nbytes, count) in enumerate(SIZES.items()):
        x = torch.randn(nbytes // 4, device="cuda")
        runs: dict[str, Callable[[], Tensor]] = {PEER: lambda x=x: by_torch(x)}
        for name, transport in transports.items():
            transport.open({(tuple(range(size)), f"{nbytes}", "collective"): 0})
            part = parts_of(summing(size, nbytes), hosts)[rank]
            begin = transport.prepare(part, number).begins[rank, 0]
            runs[name] = lambda begin=begin, x=x: begin([x]).wait()[0]
        for name in OURS:
            torch.testing.assert_close(runs[name](), runs[PEER]())
        own = found[nbytes] = {name: [] for name in runs}
        for turn in range(rounds + 3):
            names = list(runs) if turn % 2 else list(runs)[::-1]
            for name in names:
                dist.barrier()
                seconds = timed(runs[name], count)
                if turn >= 3:
                    own[name].append(seconds)
    return found


def by_torch(x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def timed(run: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def table(size: int, times: Mapping[int, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    yield "| bytes | side | us | GB/s | bandwidth over torch.distributed |"
    yield "|---|---|---|---|---|"
    for nbytes, own in times.items():
        for name, seconds in own.items():
            middle = statistics.median(seconds)
            moved = 2 * (size - 1) / size * nbytes
            ratio = statistics.median(a / b for a, b in zip(own[PEER], seconds))
            cells = f"{middle * 1e6:.0f} | {moved / middle / 1e9:.1f} | {ratio:.3f}"
            yield f"| {nbytes:,} | {name} | {cells} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    given = parsed(parser, argv)
    if given.smallest:
        times = {nbytes: {side: [1e-3] for side in (PEER, *OURS)} for nbytes in SIZES}
        print(*table(2, times), sep="\n")
        return 0
    size = torch.cuda.device_count()
    if size < 2:
        print(f"It needs two GPUs or more, and there are {size}.", file=sys.stderr)
        return 1
    with Processes(size, work, size) as processes:
        times = processes.ask("times", given.rounds)[0]
    lines = [
        "# An all_reduce between GPUs of one machine",
        "",
        "`python -m benchmarks.nccl`",
        "",
        f"{size} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL "
        f"{'.'.join(map(str, torch.cuda.nccl.version()))}. {given.rounds} rounds, medians.",
        "",
        *table(size, times),
    ]
    print("\n".join(lines))
    if given.write:
        (Path(__file__).parent / "results" / "nccl.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
