"""An all_reduce simulated in one process, beside torch's own simulator, LocalTensorMode.

    OMP_NUM_THREADS=1 python -m benchmarks.inprocess_collectives [--ranks 4] [--numel 16]

Both reduce a small f32 tensor over all ranks, on one thread. Ours runs as programs run: inside a
loaded program of many all_reduces, each started, waited for and freed by every rank; and, dearer,
as a program of one all_reduce that the controller calls each time. torch's is called in a loop in
its two forms: functional, which makes a new tensor as ours does and is what DTensor calls, and in
place (`dist.all_reduce`), which makes none.

One run, interleaved: each round times all of them once, and the ratio is taken round by round, so
that what else the machine does falls on all alike. Prints medians and the range of the ratio.
Before timing, all results are checked against the sum.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from benchmarks.smallest import parsed
from dtensor.daft import (
    Buffer,
    Cluster,
    Collective,
    Free,
    Instruction,
    Program,
    RankProgram,
    Wait,
    launch_cluster,
)

COUNT = 200


def program(size: int, numel: int, count: int) -> Program:
    """``count`` all_reduces of the input, one after the other; the last one is the result."""
    buffer = Buffer((numel,), torch.float32)
    group = tuple(range(size))
    items: list[Instruction] = []
    for i in range(count):
        name = f"s{i}"
        items.append(
            Collective("all_reduce", group, ("x",), (name,), (buffer,), (buffer,), "sum", "c")
        )
        items.append(Wait((name,)))
        if i + 1 < count:
            items.append(Free((name,)))
    rank = RankProgram(instructions=tuple(items), state=("x",), outputs=(f"s{count - 1}",))
    return Program(name="reduce", ranks=(rank,) * size, functions=(), stage_of=(0,) * size)


def seconds(run: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / count


def ours(cluster: Cluster, values: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    size, numel = len(values), values[0].numel()
    cluster.put([{"x": x} for x in values])
    many = cluster.load(program(size, numel, COUNT))
    one = cluster.load(program(size, numel, 1))
    fed: list[dict[str, object]] = [{}] * size
    total = torch.stack(values).sum(0)
    for handle, name in ((many, f"s{COUNT - 1}"), (one, "s0")):
        assert all(torch.equal(r[name], total) for r in cluster.run(handle, fed).get())

    def single() -> None:
        for _ in range(COUNT):
            cluster.run(one, fed).get()

    return {
        "dtensor: inside a program": lambda: cluster.run(many, fed).get(),
        "dtensor: a program of one, called each time": single,
    }


def theirs(
    values: list[torch.Tensor],
) -> tuple[dict[str, Callable[[], object]], AbstractContextManager[object]]:
    size = len(values)
    dist.init_process_group("fake", rank=0, world_size=size)
    mode = LocalTensorMode(size)
    with mode:
        x = LocalTensor(dict(enumerate(values)))
        # in place the values would grow from call to call: it reduces zeros when timed
        zeros = LocalTensor({i: torch.zeros_like(v) for i, v in enumerate(values)})
        found = functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
        total = torch.stack(values).sum(0)
        assert isinstance(found, LocalTensor)
        assert all(torch.equal(v, total) for v in found._local_tensors.values())
        again = LocalTensor({i: v.clone() for i, v in enumerate(values)})
        dist.all_reduce(again)
        assert all(torch.equal(v, total) for v in again._local_tensors.values())

    def in_place() -> None:
        for _ in range(COUNT):
            dist.all_reduce(zeros)

    def out_of_place() -> None:
        for _ in range(COUNT):
            functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))

    return {
        "LocalTensorMode: dist.all_reduce, in place": in_place,
        "LocalTensorMode: functional all_reduce": out_of_place,
    }, mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--numel", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parsed(parser, ranks=2, rounds=1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # whole numbers, so that any order of summation gives the same bits
    values = [torch.randint(-9, 9, (arguments.numel,)).float() + i for i in range(arguments.ranks)]
    with launch_cluster(arguments.ranks) as cluster, torch.no_grad():
        own = ours(cluster, values)
        peers, mode = theirs(values)
        found: dict[str, list[float]] = {name: [] for name in (*own, *peers)}
        for number in range(arguments.rounds + 1):
            for name, run in own.items():
                found[name].append(seconds(run, COUNT))
            with mode:
                for name, run in peers.items():
                    found[name].append(seconds(run, COUNT))
            if number == 0:  # the first round warms up
                for times in found.values():
                    times.clear()
    dist.destroy_process_group()
    print(f"all_reduce of f32[{arguments.numel}] over {arguments.ranks} ranks in one process")
    for name, times in found.items():
        print(f"  {name:<46} {statistics.median(times) * 1e6:8.1f} us")
    for name, peer in itertools.product(own, peers):
        ratios = [mine / his for mine, his in zip(found[name], found[peer], strict=True)]
        print(
            f"{name} / {peer}:\n  median 1/{1 / statistics.median(ratios):.1f}, "
            f"from 1/{1 / min(ratios):.1f} to 1/{1 / max(ratios):.1f} in {len(ratios)} rounds"
        )


if __name__ == "__main__":
    main()
