"""Random programs that change buffers and read them; in-place writes must not be visible.

    statements = drawn(random.Random(3))    # ["m.a[:, :, 1:3] = x[:, :, :2]", "out.append(m.b)"]
    program(statements)                     # f(m, x, i, at) -> list of tensors

Values are whole numbers, so the order of a sum cannot change it. `declared` checks in the engine
that results of a call share storage only with what the program declares.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from dtensor.daft.ir.instructions import Call
from dtensor.daft.run.engine import Engine

SHAPE = (4, 2, 6)

WRITES = (
    "m.{a}.index_copy_(2, i, {x}[:, :, :2])",
    "m.{a}.index_copy_(0, at[:2], {x}[:2])",
    "m.{a}[:, :, :4].index_copy_(0, at[1:2], {x}[:1, :, :4])",
    "m.{a}.scatter_(2, at[:, None, None].expand(4, 2, 1), {x}[:, :, :1])",
    "m.{a}[:, :, 1:3] = {x}[:, :, :2]",
    "m.{a}[:, :, ::2] = {x}[:, :, :3]",
    "m.{a}[:, 1] = {x}[:, 0]",
    "m.{a}[1:3, :, 2:5] = 7.0",
    "m.{a}.transpose(0, 1)[:, 2] = {x}[0]",
    "m.{a}.view(8, 6)[3:5] = {x}[0]",
    "m.{a}[at, :, at] = {x}[:, :, 0]",
    "m.{a}[at] = {x}",
    "m.{a}.copy_({x})",
    "m.{a}.copy_(torch.where({x} > 0, {x}, m.{a}))",
    "m.{a}.copy_(torch.where({x} > 0, m.{a}, {x}))",
    "m.{a}.masked_fill_({x} > 1, 3.0)",
    "m.{a}[{x} > 1] = 2.0",
    "m.{a}.add_({x})",
    "m.{a}.mul_(2.0)",
    "m.{a}[:, :, 2:4].add_({x}[:, :, :2])",
    "m.{a}.index_add_(2, i, {x}[:, :, :2])",
    "m.{a}.zero_()",
    "m.{a}[:, :, :3] = m.{a}[:, :, 3:]",
    "m.{a}.copy_(m.{b})",
    "m.{a}[:, :, 1:] = m.{b}[:, :, :-1]",
    "m.{a}.index_copy_(2, m.n[:2], {x}[:, :, :2])",
    "m.n.copy_(m.n.flip(0))",
    "m.n.add_(0)",
)
READS = (
    "out.append(m.{a} * {x})",
    "out.append(m.{a}[:, :, 1:4])",
    "out.append(m.{a}.sum((1, 2)))",
    "out.append(m.{a})",
    "out.append(m.{a}[:, :, None].expand(4, 2, 3, 6).reshape(4, 6, 6) + 1)",
    "out.append(m.{a}.transpose(0, 1) - m.{b}.transpose(0, 1))",
    "x = x + m.{a}",
    "y = m.{a}[:, :, 2:4]",
    "out.append(y * 2)",
    "out.append(m.n * 2)",
)


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(48.0).reshape(SHAPE))
        self.register_buffer("b", -torch.arange(48.0).reshape(SHAPE))
        self.register_buffer("n", torch.tensor([5, 0, 3]))


def drawn(random: random.Random) -> list[str]:
    """Return one to six statements, at least one of them a write."""
    found: list[str] = []
    for _ in range(random.randint(1, 6)):
        text = random.choice(WRITES if random.random() < 0.6 else READS)
        a, b = random.choice((("a", "b"), ("b", "a")))
        found.append(text.format(a=a, b=b, x=random.choice(("x", "x", "(x + 1)"))))
    return [*found, random.choice(WRITES).format(a="a", b="b", x="x")]


def program(statements: list[str]) -> Callable[..., list[torch.Tensor]]:
    lines = ["def f(m, x, i, at):", "  out = [x * 2]", "  y = x[:, :, 2:4]"]
    space: dict[str, Any] = {"torch": torch}
    exec("\n".join([*lines, *(f"  {s}" for s in statements), "  return out"]), space)
    return space["f"]


def arguments(random: random.Random) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    x = torch.randint(-5, 6, SHAPE, generator=generator).float()
    i = torch.randperm(6, generator=generator)[:2]
    return x, i, torch.randperm(4, generator=generator)


@contextmanager
def declared() -> Iterator[list[int]]:
    """Check the results of each call within the block; yields the count of checked results."""
    prepare, looked = Engine._prepare_call, [0]

    def watched(engine: Engine, site: tuple[int, int], call: Call, fn: Any) -> Any:
        run, (rank, _) = prepare(engine, site, call, fn), site
        own = engine.program.ranks[rank]
        lasting = (*own.state, *own.inputs)

        def look() -> None:
            run()
            held = {name: _value(engine, rank, name) for name in lasting}
            for value in call.outputs:
                made = _value(engine, rank, value)
                for name, other in held.items():
                    if _share(made, other) and value != name:
                        assert (value, name) in own.shares, f"{value} is (a view of) {name}"
                looked[0] += 1

        return look

    with mock.patch.object(Engine, "_prepare_call", watched):
        yield looked


def _value(engine: Engine, rank: int, name: str) -> Any:
    table, key = engine._place(rank, name)
    return table.get(key)


def _share(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.numel() > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata
