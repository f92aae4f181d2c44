"""Classes of actors that only the tests of daft spawn, on both backends."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtensor import daft
from tests.chaos.actors import wait_for_file
from tests.daft.programs import same_bits


@dataclass
class Batch:
    """A user-defined class that holds tensors and metadata."""

    tokens: Tensor
    lengths: list[int]
    note: str


class Model:
    """A layer with an SGD step, so that results depend on the order of tasks."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        self.weight = torch.nn.Parameter(
            torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
        )
        self.kept: Tensor | None = None

    def execute(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def train(self, x: Tensor) -> float:
        loss = (x @ self.weight).square().mean()
        loss.backward()
        with torch.no_grad():
            assert self.weight.grad is not None
            self.weight -= 0.1 * self.weight.grad
            self.weight.grad = None
        return loss.item()

    def weights(self) -> dict[str, Any]:
        return {"weight": self.weight, "tied": self.weight, "version": 3}

    def load(self, weights: dict[str, Any]) -> bool:
        assert weights["weight"] is weights["tied"]
        self.weight = torch.nn.Parameter(weights["weight"])
        return True

    def grow(self, x: Tensor, times: int) -> Batch:
        return Batch(torch.cat([x] * times), [len(x)] * times, f"{times} times")

    def total(self, batch: Batch) -> tuple[float, int, str]:
        return batch.tokens.sum().item(), sum(batch.lengths), batch.note

    def add(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).sum(0) + self.weight[0]

    def keep(self, x: Tensor) -> None:
        self.kept = x

    def get_kept(self) -> Tensor | None:
        return self.kept

    def overwrite(self, x: Tensor) -> Tensor:
        return x.fill_(7.0)

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2

    @daft.returns(daft.Buffer((2, 4), torch.float32))
    def declared(self, x: Tensor) -> Tensor:
        return x * 2

    def fail(self, x: object) -> Tensor:
        raise ValueError(f"no good: {type(x).__name__}")

    def lock(self) -> object:
        return threading.Lock()

    def meet_in(self, folder: str) -> None:
        """Set the folder in which `mark` and `await_mark` of several actors keep their files."""
        self.folder = Path(folder)

    def mark(self, number: float) -> float:
        (self.folder / f"{number:g}").touch()
        return number + 1

    def await_mark(self, number: float) -> float:
        wait_for_file(str(self.folder / f"{number:g}"))
        return number

    def process(self) -> int:
        return os.getpid()

    def die(self, x: object) -> None:
        os._exit(3)


class Unborn:
    def __init__(self) -> None:
        raise RuntimeError("no weights on this disk")

    def execute(self, x: Tensor) -> Tensor:
        return x

    def items(self) -> Iterator[int]:
        yield 1


def same(u: Any, v: Any) -> bool:
    """Return whether two nested values are equal, tensors bitwise."""
    if isinstance(u, Tensor):
        return isinstance(v, Tensor) and same_bits(u, v)
    if isinstance(u, dict):
        return u.keys() == v.keys() and all(same(u[key], v[key]) for key in u)
    if isinstance(u, list | tuple):
        return len(u) == len(v) and all(map(same, u, v))
    return bool(u == v)


class Feeder:
    """An actor with async methods, generators and a property, which users of other systems try
    first."""

    def __init__(self) -> None:
        self.turn = 0

    @property
    def size(self) -> int:
        return 3

    async def slowly(self, x: Any) -> Any:
        self.turn += 1
        await asyncio.sleep(0)
        return x, self.turn

    async def fail_slowly(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("not in time")

    async def meet(self, first: bool) -> list[str]:
        """Return an object bound to the event loop, which must survive between calls."""
        if first:
            self.queue: asyncio.Queue[str] = asyncio.Queue()
            self.task = asyncio.create_task(self.queue.get())
            await asyncio.sleep(0)
            return []
        await self.queue.put("kept")
        return [await self.task]

    def batches(self, x: Tensor, number: int) -> Iterator[Tensor]:
        for i in range(number):
            self.turn = i
            yield x + i
        if number > 2:
            raise ValueError("no more than two")

    async def later(self, number: int) -> AsyncIterator[int]:
        for i in range(number):
            await asyncio.sleep(0)
            yield i

    def lazily(self) -> Iterator[int]:
        return (i for i in range(3))

    def call(self, function: Callable[[Any], Any], x: Any) -> Any:
        return function(x)

    def last(self) -> int:
        return self.turn
