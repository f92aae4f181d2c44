"""Trainers, generators and a reward, on actors: policy gradients for a tiny language model.

Each step, the generators sample, the reward scores what they wrote, the trainers differentiate and
reduce their gradients, and the generators get the new weights. The controller moves no tensor: it
says who does what. The language to be learned counts: each token is the one before plus 1.

    python -m examples.daft.train_and_generate --backend ray
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor import daft

VOCABULARY, LENGTH, SAMPLES = 8, 12, 32


class Policy(nn.Module):
    """Logits of the next token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


class Generator:
    def __init__(self, rank: int) -> None:
        self.policy = Policy()
        self.random = torch.Generator().manual_seed(rank)

    @torch.no_grad()
    def generate(self) -> Tensor:
        """Sampled tokens, (SAMPLES, LENGTH)."""
        tokens = torch.randint(VOCABULARY, (SAMPLES, 1), generator=self.random)
        for _ in range(LENGTH - 1):
            chances = self.policy(tokens[:, -1]).softmax(-1)
            following = torch.multinomial(chances, 1, generator=self.random)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens

    def load(self, weights: dict[str, Tensor]) -> None:
        self.policy.load_state_dict(weights)


class Reward:
    """Plain Python on the CPU: lists in, lists out."""

    def score(self, tokens: Tensor) -> list[list[float]]:
        """1 for each token that follows the one before."""
        return [
            [float(b == (a + 1) % VOCABULARY) for a, b in pairwise(line)]
            for line in tokens.tolist()
        ]

    def mean(self, scores: list[list[list[float]]]) -> float:
        return torch.tensor(scores).mean().item()


class Trainer:
    def __init__(self) -> None:
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)

    def gradients(self, tokens: Tensor, scores: list[list[float]]) -> dict[str, Tensor]:
        """Of REINFORCE with the batch's mean as the baseline."""
        logits = self.policy(tokens[:, :-1]).transpose(1, 2)
        advantage = torch.tensor(scores)
        advantage = advantage - advantage.mean()
        loss = (F.cross_entropy(logits, tokens[:, 1:], reduction="none") * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        return {name: p.grad for name, p in self.policy.named_parameters() if p.grad is not None}

    def apply(self, gradients: dict[str, Tensor]) -> None:
        for name, parameter in self.policy.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return self.policy.state_dict()


def main(
    backend: daft.Backend = "inprocess", steps: int = 40, workers: int = 2, compiled: bool = True
) -> list[float]:
    """The mean reward of each step; 1/8 by chance, 1 at best."""
    with daft.launch(backend):
        trainers = daft.WorkerGroup(Trainer, workers, name="trainer")
        ranks = daft.Scatter(range(workers))
        generators = daft.WorkerGroup(Generator, workers, ranks, name="generator")
        reward = daft.spawn(Reward, name="reward")

        def step() -> daft.TaskFuture:
            tokens = generators.generate()
            scores = [reward.score(own) for own in tokens]
            gradients = trainers.gradients(tokens, daft.Scatter(scores))
            trainers.apply(daft.all_reduce(gradients))
            generators.load(trainers[0].weights())
            return reward.mean(scores)

        run = daft.compile(step) if compiled else step
        futures = [run() for _ in range(steps)]  # all under way before the first is read
        rewards = [future.get() for future in futures]
    print(f"mean reward {rewards[0]:.2f} -> {rewards[-1]:.2f} in {steps} steps on {backend}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("inprocess", "ray"), default="inprocess")
    parser.add_argument("--interpreted", action="store_true")
    args = parser.parse_args()
    main(args.backend, compiled=not args.interpreted)
