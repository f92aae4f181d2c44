"""Lists the lines at which a host waits for its GPU, in one step or token of a running program.

    python -m tests.testing.gpus.waits              # a table: line, what, for each rank
    python -m tests.testing.gpus.waits --write      # into benchmarks/results/simulated_gpus.md

Each program is called twice before its third call is counted, whose result is read. First uses,
connections and parameters sent to their ranks are therefore not counted.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch

import dtensor as dt
from dtensor import daft
from dtensor.testing.gpus.host import HostWait
from tests.testing.gpus import cases
from tests.testing.gpus.matrix import without_kernels
from tests.testing.gpus.page import PAGE, Table
from tests.training import Run, batches

HEAD = ("program", "each rank", "waits", "for what", "line")
Program: TypeAlias = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Within, what it gives takes one step, and reads its result."""


@contextmanager
def training(placed: str, **stored: Any) -> Generator[Callable[[], object]]:
    run, data = Run.of(placed, **stored), batches(1)
    with dt.launch(run.mesh, "ray", device="cuda"):
        yield lambda: run.losses(data)


@contextmanager
def token() -> Generator[Callable[[], object]]:
    """Generate greedy tokens of two texts in the slots of a generator with two layers."""
    model = cases.writer_on({"tp": 2})
    gen = dt.generator(model, slots=2, length=24, buckets=(8,))
    with dt.launch(model.mesh, "ray", device="cuda"):
        for prompt in ([5, 17, 3], [9, 8]):
            gen.submit(prompt, max_new_tokens=12)
        for _ in range(3):  # prefills
            gen.step()
        yield gen.step


@contextmanager
def product(**placed: dt.Placement) -> Generator[Callable[[], object]]:
    mesh = dt.Mesh(tp=2)
    drawn = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(16, 8, generator=drawn), torch.randn(4, 8, 16, generator=drawn)
    ends = torch.tensor([3, 3, 9, 16], dtype=torch.int32)
    fn = dt.compile(cases.experts, mesh)
    with dt.launch(mesh, "ray", device="cuda"):
        given = [dt.distribute(rows, mesh), dt.distribute(weight, mesh, **placed)]
        given.append(dt.distribute(ends, mesh))
        yield lambda: fn(*given).full_tensor()


@contextmanager
def expert_layers(**given: Any) -> Generator[Callable[[], object]]:
    step = cases.experts_step(**given)
    dtype = given.get("dtype", torch.float32)
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    with dt.launch(step.model.mesh, "ray", device="cuda"):
        yield lambda: float(step(x))


@contextmanager
def routed() -> Generator[Callable[[], object]]:
    with daft.launch_cluster(RANKS, backend="ray", device="cuda") as cluster:
        handle = cluster.load(cases.routed(RANKS))
        yield lambda: cluster.run(handle, cases.rows_to_ranks(RANKS)).get()


PROGRAMS: Mapping[str, Program] = {
    "training step, tp2": lambda: training("tp2"),
    "training step, dp2, ZeRO-3": lambda: training("dp2", zero={"dp": 3}),
    "training step, pp2": lambda: training("pp2"),
    "training step, one rank": lambda: training("single"),
    "a token, tp2": token,
    "grouped product, experts whole": product,
    "grouped product, by expert": lambda: product(tp=dt.Shard(0)),
    "two layers of experts, tokens split": lambda: expert_layers(
        is_split=True, inputs=dict(ep=dt.Row())
    ),
    "two layers of experts, tokens whole": lambda: expert_layers(is_split=True, inputs={}),
    "two layers of experts, experts whole": lambda: expert_layers(
        is_split=False, inputs=dict(ep=dt.Row())
    ),
    "two layers of experts, experts whole, bfloat16": lambda: expert_layers(
        is_split=False, inputs=dict(ep=dt.Row()), dtype=torch.bfloat16
    ),
    "rows to ranks and back": routed,
}
RANKS = 2


def waits_of(program: Program, seed: int = 0) -> Counter[HostWait]:
    """Return the waits of all ranks in the third call."""
    with dt.testing.simulated_gpus(RANKS, seed) as gpus, program() as step:
        step()
        step()
        before = Counter(gpus.report().host_waits)
        step()
        return Counter(gpus.report().host_waits) - before


def rows(name: str, waits: Mapping[HostWait, int]) -> Iterable[tuple[str, ...]]:
    """Return the rows of the table, the sum first."""
    yield name, f"{sum(waits.values()) / RANKS:g}", str(sum(waits.values())), "all", ""
    for n, (wait, times) in enumerate(sorted(waits.items(), key=lambda each: -each[1]), 1):
        what = re.sub(r"^aten\._local_scalar_dense\.default$", "item()", wait.what)
        yield f"{name}, {n}", f"{times / RANKS:g}", str(times), what, f"`{wait.line}`"


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"the table in {PAGE.name}")
    options = parser.parse_args(given)
    table = Table("waits", HEAD)
    table.keep([])
    for name, program in PROGRAMS.items():
        with without_kernels():
            waits = waits_of(program)
        for row in rows(name, waits):
            print(*row, sep="   ", flush=True)
            table.put(*row)
    if options.write:
        table.write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
