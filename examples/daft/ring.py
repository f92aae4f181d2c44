"""A ring of messages: each actor adds to what it gets and passes it on, several times around.

Where each member blocks in `recv` before it sends, a ring stands still; where all send first, it
does once messages outgrow the buffers. Here nobody calls a neighbour: each hop is a task that runs
when its message is there, and compiled, all hops of a round are one message to each actor.

    python -m examples.daft.run ring --backend ray
"""

from typing import Any

import torch
from torch import Tensor

from dtensor import daft


class Member:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def add(self, x: Tensor) -> Tensor:
        return x + self.rank


def run() -> list[float]:
    ring = [daft.spawn(Member, rank) for rank in range(4)]

    @daft.compile
    def around(x: Any) -> Any:
        for member in ring:
            x = member.add(x)
        return x

    tokens: list[Any] = [torch.full((3,), float(i)) for i in range(4)]
    for _ in range(5):  # four tokens at once, none of them waited for
        tokens = [around(token) for token in tokens]
    return [token.get().sum().item() for token in tokens]
