"""GRPO on a counting task: a tiny GPT learns to count on, from rewards alone.

    python examples/rl/counting.py --fast                # three numbers on, a minute
    python examples/rl/counting.py                       # six numbers on, all in this process
    python examples/rl/counting.py --backend ray         # four actors, and one that scores
    python examples/rl/counting.py --picture rl.svg      # and a timeline

What is where. The model (model.py) is written once. The trainer has it on two ranks, split by
ZeRO-3; the generator on two others, split by heads; a `daft` actor scores what is generated, in
plain Python.

What happens. For each of 16 prompts, two numbers in a row, the generator draws 8 texts. A text's
reward is the share of its numbers that count on; its advantage is how much better it is than the
others of its prompt. The policy takes a step on them while the generator draws the next ones, with
weights that are at most `--staleness` versions old, and is then copied to the generator.

What to see. The mean reward of a batch begins where guessing is, at 1 in 12 (with --fast 1 in 6),
and goes up to nearly 1. "apart" is how far the log-probabilities of the trainer are from those with
which texts were drawn, by another program under other placements: of the same weights, about 1e-7.

Group relative policy optimisation is Shao et al. 2024 (DeepSeekMath), here with the clipped ratio
of PPO and without a reference model.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from model import GPT
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft

PROMPTS, SAMPLES = 16, 8
CLIP = 0.2
DRAWN = 3

TRAIN, PLAY = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
HEADS = {
    "*.qkv.weight": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "*.up.weight": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Count on by ``new`` numbers; after the last of ``numbers`` comes 0."""

    numbers: int = 12
    new: int = 6
    steps: int = 250


FAST = Task(numbers=6, new=3, steps=60)


class Judge:
    """Scores a text in plain Python: the share of its numbers that count on from the prompt's."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers

    def score(self, prompt: list[int], tokens: list[int]) -> float:
        right = [(prompt[-1] + 1 + i) % self.numbers for i in range(len(tokens))]
        return sum(a == b for a, b in zip(right, tokens)) / len(tokens)


def loss_fn(
    model: nn.Module, tokens: Tensor, generated: Tensor, logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """tokens, generated and logprobs (when drawn): [b, t]; advantages: [b, 1]."""
    new = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    mask, old = generated[:, 1:], logprobs[:, 1:]
    ratio = torch.where(mask, new - old, 0.0).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    count = mask.sum()
    loss = -torch.where(mask, gain, 0.0).sum() / count
    apart = torch.where(mask, (new - old).abs(), 0.0).sum() / count
    return loss, {"apart": apart}


def advantages_of(rewards: Tensor) -> Tensor:
    """Each text against the others of its prompt: [b] -> [b, 1]."""
    of = rewards.view(-1, SAMPLES)
    centred = of - of.mean(1, keepdim=True)
    return (centred / (of.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def prompts(numbers: int, seed: int) -> Iterator[list[int]]:
    """Two numbers in a row, for ever."""
    rng = random.Random(seed)
    while True:
        n = rng.randrange(numbers)
        yield [n, (n + 1) % numbers]


def train(
    task: Task,
    staleness: int,
    backend: Literal["inprocess", "ray"],
    picture: Path | None = None,
) -> list[float]:
    """The mean reward of each batch; ``picture``: of the last `DRAWN` of them."""
    torch.manual_seed(0)
    net = GPT(vocab=task.numbers, context=16, width=64, heads=4, layers=2)
    policy = dt.parallelize(net, TRAIN, {}, zero={"dp": 3})
    actor = dt.replica(policy, PLAY, HEADS)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1.5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps, eta_min=1e-4)
    step = dt.train_step(policy, loss_fn, optimizer, inputs=dict(dp=dt.Row()))
    rewards: list[float] = []
    with dt.launch(TRAIN, PLAY, backend=backend):
        judge = daft.spawn(Judge, task.numbers)
        dt.sync(policy, actor)
        batches = dt.rollouts(
            actor,
            prompts(task.numbers, seed=0),
            judge.score,
            batch_size=PROMPTS * SAMPLES,
            samples=SAMPLES,
            staleness=staleness,
            max_new_tokens=task.new,
            length=16,
        )

        def some(number: int) -> None:
            for batch in itertools.islice(batches, number):
                advantages = advantages_of(batch.rewards)
                loss = step(batch.tokens, batch.generated, batch.logprobs, advantages)
                scheduler.step()
                dt.sync(policy, actor)
                rewards.append(float(batch.rewards.mean()))
                if len(rewards) % 10 == 1:
                    print(
                        f"step {len(rewards) - 1}: reward {rewards[-1]:.3f}, at most "
                        f"{batch.staleness} versions old, log-probabilities "
                        f"{loss.metrics['apart']:.1e} apart"
                    )

        if picture is None:
            some(task.steps)
        else:
            some(task.steps - DRAWN)
            with dt.trace() as recording:
                some(DRAWN)
            timeline = recording.timeline()
            picture.write_text(timeline._repr_svg_())
            print(timeline)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="an easier task, in a minute")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--backend", choices=["inprocess", "ray"], default="inprocess")
    parser.add_argument("--picture", type=Path, help="an SVG of what ran when, at the end")
    args = parser.parse_args()
    task = FAST if args.fast else Task()
    task = replace(task, steps=args.steps or task.steps)
    found = train(task, args.staleness, args.backend, args.picture)
    print(f"mean reward of the last ten batches: {sum(found[-10:]) / len(found[-10:]):.3f}")
