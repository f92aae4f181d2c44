"""A streaming pipeline: one actor yields batches, one transforms them, one learns from them.

Between processes with bounded queues, a stage that raises leaves those before it waiting in `put`
and those behind it in `get`. Here a stage that fails gives a failure, as a value: what depends on
it says so, with its root cause, and everybody goes on. The controller bounds what is under way.

    python -m examples.daft.run streaming --backend ray
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dtensor import daft


class Loader:
    def batches(self, number: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(number):
            yield torch.randn(16, 8, generator=generator)


class Scaler:
    def scale(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / x.std()


class Learner:
    def mean(self, x: Tensor) -> float:
        return x.square().mean().item()


def run() -> list[float]:
    loader, scaler, learner = map(daft.spawn, (Loader, Scaler, Learner))
    seen = [learner.mean(scaler.scale(batch)) for batch in loader.batches(20)]
    return [each.get() for each in seen]
