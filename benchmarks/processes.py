"""Processes for a peer's ranks, which wait for requests between two of ours.

    with Processes(2, work, width) as peers:          # each runs work(rank, width, directory, pipe)
        peers.ask("steps", 10)                        # what each of them answers, by rank

``work`` ends with `answer`, often in a `gloo` group. An idle process blocks on its pipe, and takes
no time from the others. The directory is one for all of them, and is removed at the end.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist


class Processes:
    def __init__(self, num: int, work: Callable[..., None], *given: object) -> None:
        self._stack = ExitStack()
        context = multiprocessing.get_context("spawn")
        directory = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._pipes: list[Connection] = []
        for rank in range(num):
            here, there = context.Pipe()
            args = (rank, *given, directory, there)
            process = context.Process(target=work, args=args, daemon=True)
            process.start()
            self._stack.callback(process.join, 10)
            self._pipes.append(here)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        self._stack.close()

    def ask(self, *request: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(request)
        return [pipe.recv() for pipe in self._pipes]

    def ask_one(self, *request: object) -> Any:
        """Return the answer, which all of them must give alike."""
        first, *others = self.ask(*request)
        assert all(other == first for other in others), (first, others)
        return first


@contextmanager
def gloo(rank: int, num: int, directory: str) -> Iterator[None]:
    """A process group of all the processes; each computes in one thread."""
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num)
    yield
    dist.destroy_process_group()


def answer(pipe: Connection, calls: Mapping[str, Callable[..., object]]) -> None:
    """Do what is asked, by name, until there is no more."""
    while (request := pipe.recv()) is not None:
        name, *arguments = request
        pipe.send(calls[name](*arguments))
