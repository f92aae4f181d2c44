"""Rollouts: what a late score costs, how stale texts get, and whose log-probabilities they have.

    OMP_NUM_THREADS=1 python -m benchmarks.rollouts overlap --write      # on Ray, some minutes
    python -m benchmarks.rollouts bound        # 1,000 batches with random delays, in this process
    python -m benchmarks.rollouts pairs        # rollout against trainer, six pairs of placements

overlap: a trainer (dp2, ZeRO-3), a generator (tp2) and an actor that sleeps over each text, so
long that a batch takes it 0.8, 1 and 1.25 times what generating and training take. Staleness 1
beside 0, in turns: with 0 it is the loop that generates, scores, trains and syncs in turn, which
scores texts that have ended while others are generated, already.

What is to be shown: staleness 1 takes at most 0.65 times as long; the bound is never exceeded;
log-probabilities within 1e-5 in float32, reported in bf16.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
from benchmarks.smallest import parsed
from dtensor import daft
from examples.rl.model import GPT

RESULTS = Path(__file__).parent / "results" / "rollouts.md"
TRAIN, PLAY = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
HEADS = {
    "*.qkv.weight": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "*.up.weight": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}
VOCAB, LENGTH = 12, 32
BATCH, NEW = 16, 24
FACTORS = (0.8, 1.0, 1.25)


def stages(first: int, last: int) -> dict[str, list[list[str]]]:
    before = [f"blocks.{n}.*" for n in range(first)]
    after = [f"blocks.{n}.*" for n in range(first, last)]
    return {"pp": [["embed*", "pos*", *before], [*after, "norm*", "head*"]]}


def loss_fn(
    model: nn.Module, tokens: Tensor, generated: Tensor, logprobs: Tensor, rewards: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """And how far the log-probabilities of the rollout are from the trainer's, at most."""
    logits = model(tokens[:, :-1]).float()
    new = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    mask = generated[:, 1:]
    apart = torch.where(mask, new - logprobs[:, 1:], 0.0)
    gain = (apart.exp() * rewards[:, None] * mask).sum() / mask.sum()
    return -gain, {"apart": apart.abs().amax()}


def prompts(seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(VOCAB) for _ in range(rng.randint(2, 6))]


def made(
    width: int,
    layers: int,
    dtype: torch.dtype = torch.float32,
    train: dt.Mesh = TRAIN,
    play: dt.Mesh = PLAY,
    *,
    policy: dict[str, Any] | None = None,
    actor: dict[str, Any] | None = None,
) -> tuple[dt.ParallelModule, dt.ParallelModule, dt.TrainStep]:
    torch.manual_seed(0)
    net = GPT(vocab=VOCAB, context=LENGTH, width=width, heads=4, layers=layers).to(dtype)
    trained = dt.parallelize(net, train, **(policy or dict(placements={}, zero={"dp": 3})))
    replica = dt.replica(trained, play, **(actor or dict(placements=HEADS)))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    inputs = dict(dp=dt.Row()) if "dp" in train.shape else None
    return trained, replica, dt.train_step(trained, loss_fn, optimizer, inputs=inputs)


# -- overlap ---------------------------------------------------------------------------------------


class Sleeper:
    """Takes its time over each text."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def set(self, seconds: float) -> None:
        self.seconds = seconds

    def score(self, prompt: list[int], tokens: list[int]) -> float:
        time.sleep(self.seconds)
        return sum(token % 2 for token in tokens) / NEW


def overlap(steps: int, rounds: int) -> list[str]:
    policy, actor, step = made(128, 4)
    lines = [
        "| scoring / (generating + training) | staleness 0, s a batch | staleness 1 | ratio |",
        "|---|---|---|---|",
    ]
    with dt.launch(TRAIN, PLAY, backend="ray"):
        judge = daft.spawn(Sleeper)
        dt.sync(policy, actor)
        gen = dt.generator(actor, slots=BATCH, length=LENGTH)

        def loop(staleness: int, seed: int) -> float:
            """Seconds a batch, of those after the first two."""
            found = dt.rollouts(
                gen,
                prompts(seed),
                judge.score,
                batch_size=BATCH,
                staleness=staleness,
                max_new_tokens=NEW,
                eos=None,
            )
            times: list[float] = []
            for batch in itertools.islice(found, steps + 2):
                times.append(time.perf_counter())
                assert batch.staleness <= staleness
                step(batch.tokens, batch.generated, batch.logprobs, batch.rewards)
                dt.sync(policy, actor)
            found.close()  # type: ignore[attr-defined]
            return (times[-1] - times[1]) / steps

        judge.set(0.0).get()
        loop(0, 0)
        alone = median(loop(0, seed) for seed in range(1, 4))
        for factor in FACTORS:
            judge.set(factor * alone / BATCH).get()
            pairs = [(loop(0, seed), loop(1, seed)) for seed in range(rounds)]
            each = [f"{min(own):.2f} / {median(own):.2f}" for own in zip(*pairs, strict=True)]
            ratio = median(b / a for a, b in pairs)
            lines.append(f"| {factor} | {' | '.join(each)} | **{ratio:.2f}** |")
    return [f"Generating and training a batch of {BATCH} texts takes {alone:.2f} s.", "", *lines]


# -- bound -----------------------------------------------------------------------------------------


class Delays:
    """A reward of random scores, that come after random times."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def score(self, prompt: list[int], tokens: list[int]) -> daft.Future:
        return Late(self.rng.random(), int(self.rng.expovariate(0.05)))


class Late(daft.Future):
    """A score that is there when it has been asked for so often."""

    def __init__(self, value: float, asks: int) -> None:
        self.value, self.asks = value, asks

    def get(self, timeout: float | None = None) -> Any:
        return self.value

    def done(self) -> bool:
        self.asks -= 1
        return self.asks < 0


def bound(batches: int) -> list[str]:
    lines = [
        "| staleness stated | batches | texts of each staleness | exceeded |",
        "|---|---|---|---|",
    ]
    for staleness in (0, 1, 3):
        policy, actor, step = made(16, 1)
        count = [0] * (staleness + 2)
        with dt.launch(TRAIN, PLAY):
            dt.sync(policy, actor)
            found = dt.rollouts(
                actor,
                prompts(0),
                Delays(staleness).score,
                batch_size=4,
                samples=2,
                staleness=staleness,
                max_new_tokens=4,
                length=LENGTH,
                slots=4,
            )
            for batch in itertools.islice(found, batches):
                for versions in batch.versions:
                    oldest = int(versions[versions >= 0].min())
                    count[min(batch.version - oldest, staleness + 1)] += 1
                step(batch.tokens, batch.generated, batch.logprobs, batch.rewards)
                dt.sync(policy, actor)
        lines.append(
            f"| {staleness} | {batches:,} | {', '.join(map(str, count[:-1]))} | {count[-1]} |"
        )
    return lines


# -- pairs -----------------------------------------------------------------------------------------

Pair = tuple[dt.Mesh, dict[str, Any], dt.Mesh, dict[str, Any]]


def placed(**axes: int) -> dt.Mesh:
    return dt.Mesh(**axes, name="play")


PAIRS: dict[str, Pair] = {
    "single, single": (dt.Mesh(), dict(placements={}), placed(), dict(placements={})),
    "dp2 ZeRO-3, tp2": (
        dt.Mesh(dp=2),
        dict(placements={}, zero={"dp": 3}),
        placed(tp=2),
        dict(placements=HEADS),
    ),
    "tp2, single": (dt.Mesh(tp=2), dict(placements=HEADS), placed(), dict(placements={})),
    "pp2, tp2": (
        dt.Mesh(pp=2),
        dict(placements={}, stages=stages(1, 2)),
        placed(tp=2),
        dict(placements=HEADS),
    ),
    "tp2, pp2": (
        dt.Mesh(tp=2),
        dict(placements=HEADS),
        placed(pp=2),
        dict(placements={}, stages=stages(1, 2)),
    ),
    "dp2 x tp2, dp2": (
        dt.Mesh(dp=2, tp=2),
        dict(placements=HEADS),
        placed(dp=2),
        dict(placements={}),
    ),
}


def pairs(batches: int) -> list[str]:
    lines = ["| trainer, generator | float32 | bf16 |", "|---|---|---|"]
    for name, (train, policy, play, actor) in PAIRS.items():
        cells: list[str] = []
        for dtype in (torch.float32, torch.bfloat16):
            trained, replica, step = made(64, 2, dtype, train, play, policy=policy, actor=actor)
            worst = 0.0
            with dt.launch(train, play):
                dt.sync(trained, replica)
                found = dt.rollouts(
                    replica,
                    prompts(0),
                    lambda prompt, tokens: sum(token % 2 for token in tokens) / NEW,
                    batch_size=8,
                    max_new_tokens=NEW,
                    length=LENGTH,
                )
                for batch in itertools.islice(found, batches):
                    loss = step(batch.tokens, batch.generated, batch.logprobs, batch.rewards)
                    worst = max(worst, float(loss.metrics["apart"]))
                    dt.sync(trained, replica)
            cells.append(f"{worst:.1e}")
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
        print(lines[-1], flush=True)
    return lines


# -- the command -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=["overlap", "bound", "pairs", []])
    parser.add_argument("--steps", type=int, default=6, help="batches a loop of overlap")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=1000, help="of bound")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parsed(parser, what=["bound"], batches=10)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    lines = [
        "# Rollouts",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.rollouts`: {os.cpu_count()} cores, load "
        f"{load:.1f} before, torch {torch.__version__}. Seconds are least / median of "
        f"{given.rounds} interleaved rounds of {given.steps} batches, ratios round by round.",
    ]
    what = given.what or ["overlap", "bound", "pairs"]
    if "overlap" in what:
        lines += ["", "## A score that comes late", "", *overlap(given.steps, given.rounds)]
    if "bound" in what:
        lines += ["", "## Staleness", "", *bound(given.batches)]
    if "pairs" in what:
        lines += [
            "",
            "## Log-probabilities of a rollout against the trainer's, the largest difference",
            "",
            *pairs(3),
        ]
    print("\n".join(lines))
    if given.write:
        RESULTS.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
