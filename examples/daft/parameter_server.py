"""A parameter server: workers differentiate, the server adds up and hands out.

Over MPI, two that both send a large message first and receive then wait for each other for ever.
Here the controller says who gets what: a task depends on tasks before it alone, and no send waits.

    python -m examples.daft.run parameter_server --backend ray
"""

import torch
from torch import Tensor

from dtensor import daft


class Server:
    def __init__(self) -> None:
        self.weight = torch.zeros(4)

    def update(self, *gradients: Tensor) -> Tensor:
        self.weight -= 0.1 * sum(gradients, torch.zeros(4)) / len(gradients)
        return self.weight


class Worker:
    def __init__(self, rank: int) -> None:
        self.x = torch.randn(32, 4, generator=torch.Generator().manual_seed(rank))
        self.y = self.x @ torch.tensor([1.0, -2.0, 3.0, 0.5])

    def gradient(self, weight: Tensor) -> Tensor:
        return 2 * self.x.T @ (self.x @ weight - self.y) / len(self.x)


def run() -> list[float]:
    server, workers = daft.spawn(Server), daft.WorkerGroup(Worker, 3, daft.Scatter(range(3)))
    weight = server.update(torch.zeros(4))
    for _ in range(60):  # none is waited for
        weight = server.update(*workers.gradient(weight))
    return weight.get().tolist()
