"""Two models on two actors: interpreted, then compiled, the same bits.

python -m examples.daft.two_models --backend ray
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from dtensor import daft


class Model:
    def __init__(self, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def execute(self, x: Tensor) -> Tensor:
        return self.net(x)


def main(backend: daft.Backend = "inprocess", steps: int = 4) -> list[Tensor]:
    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(steps)]
    with daft.launch(backend):
        a, b = daft.spawn(Model, 16, seed=0), daft.spawn(Model, 16, seed=1)

        def fn(x: Tensor) -> daft.TaskFuture:
            return b.execute(a.execute(x))

        interpreted = [fn(x) for x in batches]  # two calls each; nothing waits
        step = daft.compile(fn)
        print(step.program(batches[0]))
        compiled = [step(x) for x in batches]  # one call to each actor
        results = [future.get() for future in compiled]
        for one, other in zip(interpreted, results):
            assert torch.equal(one.get(), other)
    print(f"{steps} steps, the same bits interpreted and compiled on {backend}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("inprocess", "ray"), default="inprocess")
    args = parser.parse_args()
    main(args.backend)
