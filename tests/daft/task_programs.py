"""Compares random programs of tasks: the same values and errors interpreted and compiled,
in-process and on Ray.

    python -m tests.daft.explore --tasks --random 200

A program is a few method calls on earlier values: methods keep their argument, write into it,
fail, raise `SystemExit`, wait, and pass on values from a few bytes to a megabyte, which use
different transports. Each program runs in all four ways on the same actors, which first forget
their state.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from dtensor import daft
from tests.daft.actor_classes import same

ACTORS = 4
ROWS = (2, 300, 40_000)
"""Of f32[rows, 4]: what goes along with messages, over a connection, and through shared memory."""
PATIENCE_S = 600.0


class Player:
    def __init__(self, number: int) -> None:
        self.number = number
        self.start()

    def start(self) -> None:
        self.kept: Any = None
        self.calls = 0

    def more(self, x: Any) -> Any:
        self.calls += 1
        return x + self.number + self.calls

    def write(self, x: Any) -> Any:
        x[...] = self.number
        return x

    def both(self, xs: Sequence[Any]) -> Any:
        rows = min(len(x) for x in xs)
        return sum(x[:rows] for x in xs)

    def keep(self, x: Any) -> None:
        self.kept = x

    def get(self) -> Any:
        return self.kept

    def array(self, x: Any) -> Any:
        """Convert between a tensor and a numpy array."""
        return x.numpy() if isinstance(x, Tensor) else torch.from_numpy(numpy.ascontiguousarray(x))

    async def later(self, x: Any) -> Any:
        return x, [x, self.calls]

    def first(self, pair: Any) -> Any:
        return pair[0]

    def fail(self, x: Any) -> Any:
        raise ValueError(f"on purpose, with {len(x)} rows")

    def leave(self, x: Any) -> Any:
        sys.exit(3)


def calls(seed: int, actors: Sequence[daft.ActorHandle], x: Any) -> list[daft.TaskFuture]:
    """Make the calls of a program and return some of their results."""
    rng = random.Random(seed)
    values: list[Any] = [x]
    for _ in range(rng.randrange(3, 25)):
        actor, given = rng.choice(actors), rng.choice(values[-6:])
        match rng.randrange(12):
            case 0 | 1:
                values.append(actor.write(given))
            case 2 | 3:
                values.append(actor.both([rng.choice(values) for _ in range(rng.randrange(1, 4))]))
            case 4:
                actor.keep(given)
                values.append(actor.get())
            case 5:
                values.append(actor.first(actor.later(given)))
            case 6 if rng.random() < 0.15:
                values.append(actor.fail(given))
            case 7 if rng.random() < 0.1:
                values.append(actor.leave(given))
            case _:
                values.append(actor.more(given))
    return rng.sample(values[1:], rng.randrange(1, min(5, len(values))))


def argument(seed: int) -> Any:
    rng = random.Random(seed)
    x = torch.arange(4.0 * rng.choice(ROWS)).reshape(-1, 4)
    return x.numpy() if rng.random() < 0.5 else x


def outcome(future: daft.TaskFuture) -> Any:
    try:
        found = future.get(timeout=PATIENCE_S)
    except daft.TaskError as error:
        return error.failure.actor, error.failure.text, error.failure.reason
    return ("array", torch.from_numpy(found)) if isinstance(found, numpy.ndarray) else found


def in_ways(seed: int, actors: Sequence[daft.ActorHandle]) -> list[list[Any]]:
    """Return the results of a program, interpreted and compiled."""
    program, found = functools.partial(calls, seed, actors), list[list[Any]]()
    for run in (program, daft.compile(program)):
        for actor in actors:
            actor.start()
        found.append([outcome(future) for future in run(argument(seed))])
    return found


def players() -> list[daft.ActorHandle]:
    """Return the actors; the last shares a process with the first."""
    made = [daft.spawn(Player, number) for number in range(ACTORS - 1)]
    return [*made, daft.spawn(Player, ACTORS - 1, host=made[0])]


def compared(seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """Return how many programs gave the same in the four ways, and the results of the others."""
    found: dict[str, list[list[list[Any]]]] = {}
    for backend in ("inprocess", "ray"):
        session = daft.launch(backend, deadline_s=120.0)  # type: ignore[arg-type]
        actors = players()
        found[backend] = [in_ways(seed, actors) for seed in seeds]
        session.close(quiet=True)
    count, wrong = Counter[str](), list[str]()
    for seed, here, there in zip(seeds, found["inprocess"], found["ray"], strict=True):
        expected, *others = (*here, *there)
        failed = any(isinstance(each, tuple) and each[0] != "array" for each in expected)
        count["with a failure" if failed else "without"] += 1
        if not all(same(expected, other) for other in others):
            wrong.append(f"program {seed} gives {expected}, and {others}")
    return count, wrong


def report(number: int, seed: int) -> int:
    begin = time.monotonic()
    count, wrong = compared(range(seed, seed + number))
    print(*wrong, sep="\n")
    print(
        f"{count.total()} programs of tasks, {dict(count)}, in four ways: {len(wrong)} differ "
        f"({time.monotonic() - begin:.0f} s)"
    )
    return int(bool(wrong))
