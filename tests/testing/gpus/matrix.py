"""Runs every case on simulated GPUs under many seeds, and compares it with ranks on the CPU.

    python -m tests.testing.gpus.matrix                     # all cases, 20 seeds: `make gpus`
    python -m tests.testing.gpus.matrix --seeds 3 zero      # those whose names begin so
    python -m tests.testing.gpus.matrix --graphs            # all cases as CUDA graphs

Each case runs in this process on CPU tensors, and under each seed with one or more ranks on each
simulated GPU. A seed decides the order of kernels, and whether some run early. One line per case
reports seeds, kernels, races, early frees, the largest difference, and host waits. Triton's
built-in kernels are left out, because the interpreter takes a second for each; only the cases
whose names start with "kernels" run them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

import dtensor as dt
from dtensor.kernels import built_in, registry
from tests.testing.gpus.cases import Case, cases
from tests.testing.gpus.page import PAGE, Table

HEAD = ("case", "seeds", "kernels", "races", "early frees", "off by", "waits")


@dataclass(slots=True)
class Seen:
    seeds: int = 0
    races: int = 0
    early_frees: int = 0
    most: float = 0.0
    kernels: int = 0
    waits: dict[str, int] = field(default_factory=dict[str, int])


@contextmanager
def without_kernels() -> Iterator[None]:
    cached: Any = registry._built_in
    with patch.object(built_in, "TRITON", {}):
        cached.cache_clear()
        try:
            yield
        finally:
            cached.cache_clear()


@contextmanager
def with_graphs() -> Iterator[None]:
    """A context in which launches on GPUs run programs as CUDA graphs."""
    launch: Any = dt.launch

    def launched(*args: Any, device: str = "cpu", **given: Any) -> Any:
        if device.startswith("cuda"):
            given.setdefault("graphs", True)
        return launch(*args, device=device, **given)

    with patch.object(dt, "launch", launched):
        yield


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference of numbers and tensors by name."""
    most = 0.0
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, right in expected.items():
        a, b = (torch.as_tensor(x).double() for x in (found[name], right))
        assert a.shape == b.shape, name
        error = (a - b).abs().max().item() if a.numel() else 0.0
        assert error == error, f"{name} is NaN"
        most = max(most, error)
    return most


def check(case: Case, seeds: Sequence[int], *, graphs: bool = False) -> Seen:
    """Run a case under the seeds, as CUDA graphs if ``graphs``. Raises AssertionError if a number
    is wrong, and any error of a run."""
    seen = Seen()
    expected = case.body("cpu")
    for seed in seeds:
        early = (0.0, 0.3, 0.0, 0.9)[seed % 4]
        with (
            dt.testing.simulated_gpus(case.num, seed, early=early) as gpus,
            with_graphs() if graphs else nullcontext(),
        ):
            found = case.body("cuda")
            report = gpus.report()
        off = difference(found, expected)
        assert off <= case.tolerance, f"{case.name}, seed {seed}: {off}"
        seen.seeds += 1
        seen.races += len(report.races)
        seen.early_frees += len(report.early_frees)
        seen.most = max(seen.most, off)
        seen.kernels += report.kernels
        seen.waits = {str(wait): times for wait, times in report.host_waits.items()}
    return seen


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="how names of cases begin")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--graphs", action="store_true", help="run programs as CUDA graphs")
    parser.add_argument("--waits", action="store_true", help="list waits of the host, by line")
    parser.add_argument("--write", action="store_true", help=f"rows of the table in {PAGE.name}")
    options = parser.parse_args(given)
    bad, every = 0, list(cases())
    for case in every:
        if options.names and not case.name.startswith(tuple(options.names)):
            continue
        began = time.process_time()
        try:
            if case.has_kernels:
                seen = check(case, range(min(2, options.seeds)), graphs=options.graphs)
            else:
                with without_kernels():
                    seen = check(case, range(options.seeds), graphs=options.graphs)
        except Exception as error:
            bad += 1
            print(f"{case.name:<32} {type(error).__name__}: {error}", flush=True)
            continue
        bad += seen.races > 0 or seen.early_frees > 0
        took = time.process_time() - began
        print(
            f"{case.name:<32} seeds {seen.seeds:>2}  kernels {seen.kernels:>7}  "
            f"races {seen.races}  early frees {seen.early_frees}  off by {seen.most:.1e}  "
            f"host waits {sum(seen.waits.values())}  {took:.0f} s",
            flush=True,
        )
        if options.write and not options.graphs:
            table = Table("cases", HEAD)
            numbers = seen.seeds, seen.kernels, seen.races, seen.early_frees
            waits = sum(seen.waits.values())
            table.put(case.name, *map(str, numbers), f"{seen.most:.1e}", str(waits))
            table.keep([each.name for each in every])
            table.write()
        if options.waits:
            for what, times in seen.waits.items():
                print(f"    {times:>4} x {what}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
