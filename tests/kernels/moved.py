"""Counts the bytes that kernels move in Triton's interpreter, and compares them with
launches.py.

    python -m tests.kernels.moved [--full]       # rc 1 where one differs; in every dtype, a minute

For each launch of the cases (cases.py), each element loaded or stored counts once. An access
outside all operands of its launch raises AssertionError before it is made. Launches that receive
one tensor twice are skipped and counted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from dtensor.kernels.launches import LAUNCHES
from tests.kernels.cases import cases


@dataclass(kw_only=True)
class Watched:
    """A launch: its kernel, its arguments by name, and the (addresses, bytes) that it accessed."""

    kernel: str
    arguments: Mapping[str, Any]
    loaded: list[tuple[Any, int]] = field(default_factory=list)
    stored: list[tuple[Any, int]] = field(default_factory=list)

    def touch(self, kind: str, ptrs: Any, mask: Any) -> None:
        addresses = ptrs.data[mask.data]
        itemsize = ptrs.get_element_ty().primitive_bitwidth // 8 or 1
        inside = np.zeros(addresses.shape, bool)
        for x in self.arguments.values():
            if isinstance(x, Tensor) and x.numel() > 0:
                last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
                low = x.data_ptr()
                high = low + last * x.element_size()
                inside |= (addresses >= np.uint64(low)) & (addresses <= np.uint64(high))
        assert inside.all(), f"{self.kernel} {kind} outside all of its operands"
        getattr(self, kind).append((addresses, itemsize))

    @property
    def moved(self) -> tuple[int, int]:
        """Return the bytes read and written."""
        return _distinct(self.loaded), _distinct(self.stored)

    @property
    def shares(self) -> bool:
        """Return whether two operands that it reads, or two that it writes, are the same tensor."""
        rule = LAUNCHES[self.kernel]
        for operands in (rule.reads, rule.writes):
            parts = [operand.partition(" if ") for operand in operands]
            names = [
                n.partition("[")[0] for n, _, flag in parts if not flag or self.arguments[flag]
            ]
            places = [self.arguments[name].data_ptr() for name in names]
            if len(set(places)) < len(places):
                return True
        return False


def _distinct(touched: Sequence[tuple[Any, int]]) -> int:
    sizes = {size for _, size in touched}
    return sum(
        size * len(np.unique(np.concatenate([a for a, s in touched if s == size])))
        for size in sizes
    )


@contextmanager
def watched() -> Iterator[list[Watched]]:
    """Record the launches inside the block."""
    found: list[Watched] = []
    executor: Any = interpreter.GridExecutor
    builder: Any = interpreter.InterpreterBuilder
    launch, load, store = (
        executor.__call__,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(self.arg_names, args))
        named |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        found.append(Watched(kernel=self.fn.__name__, arguments=named))
        launch(self, *args, **kwargs)

    def loads(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        found[-1].touch("loaded", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def stores(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found[-1].touch("stored", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    with (
        patch.object(executor, "__call__", launched),
        patch.object(builder, "create_masked_load", loads),
        patch.object(builder, "create_masked_store", stores),
    ):
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every dtype, more shapes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted: Counter[str] = Counter()
    left_out = failed = 0
    for case in cases(torch.device("cpu"), full=options.full):
        with watched() as launches:
            case.call()
        for launch in launches:
            if launch.shares:
                left_out += 1
                continue
            counted[launch.kernel] += 1
            stated = LAUNCHES[launch.kernel].moved(launch.arguments)
            if stated != launch.moved:
                print(f"FAILED {launch.kernel}, {case.label}: {launch.moved}, and not {stated}")
                failed += 1
    for kernel, count in sorted(counted.items()):
        print(f"{kernel}: launches {count}")
    print(f"left out: {left_out}, failed: {failed}")
    missed = sorted(set(LAUNCHES) - set(counted))
    if missed:
        print(f"not launched: {', '.join(missed)}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
