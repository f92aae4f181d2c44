"""Losses of a small GPT with and without a delay of gradients, by AdamW and by Muon with AdamW.

    OMP_NUM_THREADS=1 python -m benchmarks.delay_losses [--write]

The GPT, the text and the batches are the tutorial's (docs/tutorial.md), on one rank: placements
change no number. Each run has 500 steps. Muon updates the matrices of the blocks, AdamW the rest.
The losses are means over the training batches since the row before, and over held-out text. The
best of three learning rates by the held-out loss without a delay is used for both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from benchmarks.smallest import parsed
from examples.gpt import GPT, Config
from examples.text import batches, load, windows

BATCH, CONTEXT, VOCAB, SEED, EVERY = 16, 32, 512, 0, 100
RATES = {"AdamW": (1e-3, 3e-3, 1e-2), "Muon": (1e-2, 2e-2, 5e-2)}
RESULTS = Path(__file__).parent / "results"


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizers(gpt: nn.Module, name: str, rate: float) -> list[torch.optim.Optimizer]:
    if name == "AdamW":
        return [torch.optim.AdamW(gpt.parameters(), lr=rate)]
    matrices = [p for n, p in gpt.named_parameters() if "blocks" in n and p.ndim == 2]
    rest = [p for n, p in gpt.named_parameters() if not ("blocks" in n and p.ndim == 2)]
    return [torch.optim.Muon(matrices, lr=rate), torch.optim.AdamW(rest, lr=3e-3)]


def losses(name: str, rate: float, delay: int, steps: int) -> list[tuple[float, float]]:
    """Return (training loss, held-out loss) of each `EVERY` steps."""
    _, tokens, held_out = load(vocab=VOCAB)
    torch.manual_seed(SEED)
    gpt = GPT(Config(vocab=VOCAB, context=CONTEXT, width=64, heads=4, layers=2))
    mesh = dt.Mesh()
    model = dt.parallelize(gpt, mesh, {})
    step = dt.train_step(model, loss_fn, optimizers(gpt, name, rate), delay=delay)
    evaluate = dt.compile(loss_fn, mesh)
    (unseen,) = windows(held_out, 256, CONTEXT, 1)
    found: list[tuple[float, float]] = []
    with dt.launch(mesh):
        seen: list[float] = []
        for number, batch in enumerate(batches(tokens, BATCH, CONTEXT, range(steps), SEED), 1):
            seen.append(float(step(*batch)))
            if number % EVERY == 0 or number == steps:
                found.append((sum(seen) / len(seen), float(evaluate(model, *unseen))))
                seen = []
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.set_defaults(steps=500, rates=3)
    given = parsed(parser, argv, steps=4, rates=1)
    torch.set_num_threads(1)
    runs: dict[str, list[tuple[float, float]]] = {}
    for name, rates in RATES.items():
        tried = {rate: losses(name, rate, 0, given.steps) for rate in rates[: given.rates]}
        best = min(tried, key=lambda rate: tried[rate][-1][1])
        print(name, {rate: f"{found[-1][1]:.3f}" for rate, found in tried.items()}, flush=True)
        runs[f"{name}, lr {best:g}"] = tried[best]
        runs[f"{name}, lr {best:g}, delay 1"] = losses(name, best, 1, given.steps)
    marks = [min(given.steps, EVERY * (i + 1)) for i in range(len(next(iter(runs.values()))))]
    lines = [f"| step | {' | '.join(map(str, marks))} |", "|---" * (1 + len(marks)) + "|"]
    for name, found in runs.items():
        lines.append(f"| {name} | {' | '.join(f'{a:.3f}, {b:.3f}' for a, b in found)} |")
    print("\n".join(lines))
    if given.write:
        head = "`python -m benchmarks.delay_losses --write`: training loss, held-out loss."
        text = "\n".join(["# Losses with delayed gradients", "", head, "", *lines, ""])
        (RESULTS / "delay_losses.md").write_text(text)


if __name__ == "__main__":
    main()
