"""Pre-train a small GPT on Python's manual under any placement: the model (gpt.py) is written once.

    python examples/train_gpt.py --placements tp2pp2 --backend ray --compare
    python examples/train_gpt.py --placements tp2 --steps 1000 --save runs/manual --every 100
    python examples/train_gpt.py --placements dp2 --steps 1000 --save runs/manual --resume

`PLACEMENTS` is all that is parallel here. The run starts its actors, measures what they do in a
second, prints its plan with the time that this predicts, trains on nine tenths of the manual, shows
the loss on the last tenth, writes checkpoints beside its steps, goes on from the last one under
another placement, samples a text, and, with --compare, shows how far its losses are from those of
plain PyTorch on one device with the same seed. A run that was ended goes on with --resume.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from gpt import GPT, Config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from text import batches, load, windows
from tokenizers import Tokenizer
from torch import Tensor, nn

import dtensor as dt

# -- what is parallel -----------------------------------------------------------------------------

# nn.Linear's weight is (out, in): a split of its rows splits the layer's outputs.
MEGATRON = {
    "*.attn.qkv.weight": dict(tp=dt.Row(blocks=3)),
    "*.attn.proj.weight": dict(tp=dt.Column()),
    "*.mlp.up.weight": dict(tp=dt.Row()),
    "*.mlp.down.weight": dict(tp=dt.Column()),
}
STAGES = {"pp": [["embed*", "pos*", "blocks.[0-1].*"], ["blocks.[2-3].*", "norm*", "head*"]]}
SPLIT_BATCH = dict(dp=dt.Row())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    mesh: dict[str, int] = field(default_factory=dict[str, int])
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    stages: dict[str, list[list[str]]] | None = None
    inputs: dict[str, Any] | None = None
    schedule: dt.Schedule | None = None


PLACEMENTS = {
    "single": Parallel(),
    "dp2": Parallel(mesh=dict(dp=2), inputs=SPLIT_BATCH),
    "tp2": Parallel(mesh=dict(tp=2), parameters=MEGATRON),
    "pp2": Parallel(mesh=dict(pp=2), stages=STAGES, schedule=dt.OneFOneB(microbatches=4)),
    "dp2tp2": Parallel(mesh=dict(dp=2, tp=2), parameters=MEGATRON, inputs=SPLIT_BATCH),
    "tp2pp2": Parallel(
        mesh=dict(pp=2, tp=2),
        parameters=MEGATRON,
        stages=STAGES,
        schedule=dt.OneFOneB(microbatches=4),
    ),
}

# -- training -------------------------------------------------------------------------------------

console = Console(soft_wrap=True)


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Data:
    """The tokenizer, and the tokens (n,) to train on and those held out."""

    tokenizer: Tokenizer
    train: Tensor
    validation: Tensor


def build(
    args: argparse.Namespace,
) -> tuple[GPT, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """The same parameters, optimizer and learning rates whenever it is called with one seed."""
    torch.manual_seed(args.seed)
    model = GPT(Config(vocab=args.vocab, context=args.context, tied=args.tied))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.steps + args.more_steps

    def rate(step: int) -> float:
        """A warm-up of ten steps, then half a cosine down to a tenth."""
        return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    return model, opt, torch.optim.lr_scheduler.LambdaLR(opt, rate)


def train(
    args: argparse.Namespace,
    name: str,
    backend: Literal["inprocess", "ray"],
    until: int,
    data: Data,
    folder: Path,
) -> list[float]:
    """Train under the placement `name` from the folder's newest checkpoint to step `until`."""
    place = PLACEMENTS[name]
    mesh = dt.Mesh(**place.mesh)
    gpt, opt, scheduler = build(args)
    model = dt.parallelize(gpt, mesh, place.parameters, stages=place.stages)
    next_logits = dt.compile(lambda model, tokens: model(tokens)[:, -1], mesh)
    held_out_loss = dt.compile(loss_fn, mesh)
    held_out = windows(data.validation, args.batch, args.context, 4)

    # of a Ray that spans machines, if there is one; the placements that follow are in-process
    address = args.address if backend == "ray" else None
    with dt.launch(mesh, backend=backend, device=args.device, address=address) as run:
        if address is not None:
            console.print(run, highlight=False)
        found = dt.resume(folder, model, opt)  # each rank reads its own part, however it was saved
        first = found.step if found and found.step else 0
        if found:
            scheduler.load_state_dict(found.extra["scheduler"])
        console.rule(f"{name} on {backend}: steps {first} to {until - 1}")
        todo = batches(data.train, args.batch, args.context, range(first, until), args.seed)
        todo = list(todo)

        step = dt.train_step(
            model,
            loss_fn,
            opt,
            inputs=place.inputs,
            schedule=place.schedule,
            clip_grad_norm=1.0,
            topology=dt.calibrate(),  # of these ranks; by default a plan is an H100's
        )
        print(step.plan(*todo[0]), flush=True)
        predicted = predict(step, *todo[0], in_turns=backend == "inprocess")

        def logits(window: Tensor) -> Tensor:
            return next_logits(model, window).full_tensor()

        def evaluate() -> float:
            losses = [held_out_loss(model, *batch) for batch in held_out]
            return statistics.fmean(float(loss.full_tensor()) for loss in losses)

        prompt = data.train[: args.context]
        if not found:
            show("before", generate(logits, data.tokenizer, prompt))
        with progress(len(todo), args.batch * args.context, first) as report:
            losses = []
            for i, batch in enumerate(todo, start=first + 1):
                losses.append(step(*batch))
                scheduler.step()
                if len(losses) > 1:  # read one step late: this step runs meanwhile
                    report(float(losses[-2]))
                if i % args.every == 0 or i == until:  # written while the next steps run
                    extra = {"scheduler": scheduler.state_dict()}
                    dt.save(folder / f"{i}", model, opt, step=i, extra=extra, keep=2)
                    report.held_out(i, evaluate())
            losses = [float(loss) for loss in losses]
            report(losses[-1])
        compare_times(predicted, report.seconds, name, backend)
        show("after", generate(logits, data.tokenizer, prompt))
    return losses


def train_on_one_device(args: argparse.Namespace, steps: range, tokens: Tensor) -> list[float]:
    """The reference: the same training in plain PyTorch."""
    model, opt, scheduler = build(args)
    losses: list[float] = []
    for batch in batches(tokens, args.batch, args.context, steps, args.seed):
        loss = loss_fn(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


# -- what one sees --------------------------------------------------------------------------------


def generate(
    logits: Callable[[Tensor], Tensor], tokenizer: Tokenizer, prompt: Tensor, length: int = 48
) -> str:
    """`length` tokens after the prompt, each sampled from the ten most likely.

    `logits` maps the last tokens (1, context) to the next token's logits (1, vocab).
    """
    generator = torch.Generator().manual_seed(0)
    window = prompt[None]
    new: list[int] = []
    for _ in range(length):
        top = logits(window)[0].topk(10)
        choice = torch.multinomial(top.values.softmax(-1), 1, generator=generator)
        new.append(int(top.indices[choice]))
        window = torch.cat([window[:, 1:], top.indices[choice][None]], 1)
    return tokenizer.decode(new)


def show(when: str, text: str) -> None:
    console.print(f"\ntext {when} training:", style="bold")
    console.print(text.strip(), markup=False, highlight=False, end="\n\n")


def predict(step: dt.TrainStep, *batch: Tensor, in_turns: bool) -> float:
    """Seconds of a simulated step. Of ranks `in_turns`, which share a thread, times add up."""
    trace = dt.simulate(step, *batch)
    if not in_turns:
        return trace.seconds
    return trace.alike * sum(trace.spent(rank, "compute") for rank in trace.ranks)


def compare_times(predicted: float, measured: list[float], name: str, backend: str) -> None:
    """The prediction beside the median of the steps after the first few, which warm up."""
    if len(measured) < 5:
        return
    median = statistics.median(measured[3:])
    ranks = dt.Mesh(**PLACEMENTS[name].mesh).size
    how = "one after the other in this process" if backend == "inprocess" else "side by side"
    console.print(
        f"a step takes {1e3 * median:.1f} ms, {1e3 * predicted:.1f} ms were predicted for {ranks} "
        f"ranks {how} on {os.cpu_count()} cores: {median / predicted:.2f} times",
        highlight=False,
    )


class Report:
    """Call it after each step with its loss; ``seconds``: what each step took."""

    def __init__(self, bar: Progress, task: TaskID, tokens_per_step: int, first: int) -> None:
        self.bar, self.task, self.tokens_per_step = bar, task, tokens_per_step
        self.first = first
        self.seconds: list[float] = []
        self.last = time.perf_counter()

    def __call__(self, loss: float) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last, done = now, len(self.seconds)
        speed = done * self.tokens_per_step / sum(self.seconds)
        text = f"loss {loss:.4f}   {speed:,.0f} tokens/s"
        self.bar.update(self.task, advance=1, description=text)
        if done % 20 == 0 or done == 1:
            self.bar.console.print(f"step {self.first + done:4d}   {text}", highlight=False)

    def held_out(self, step: int, loss: float) -> None:
        """The loss on the text that was held out, whose time is none of a step's."""
        text = f"step {step:4d}   on the text held out: loss {loss:.4f}, "
        text += f"perplexity {math.exp(loss):,.1f}"
        self.bar.console.print(text, style="bold", highlight=False)
        self.last = time.perf_counter()


@contextmanager
def progress(num_steps: int, tokens_per_step: int, first: int) -> Iterator[Report]:
    """A bar with the loss and the tokens per second."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        yield Report(bar, bar.add_task("", total=num_steps), tokens_per_step, first)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description="Train a small GPT under any placement.")
    options.add_argument("--placements", choices=PLACEMENTS, default="tp2pp2")
    options.add_argument("--backend", choices=["ray", "inprocess"], default="inprocess")
    options.add_argument("--address", help="of a Ray to join; by default one is started")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--steps", type=int, default=100, help="under these placements, in all")
    options.add_argument("--more-steps", type=int, default=10, help="after the change of placement")
    options.add_argument("--then", choices=PLACEMENTS, default="dp2", help="that placement")
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--vocab", type=int, default=512)
    options.add_argument("--lr", type=float, default=1e-3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--tied", action=argparse.BooleanOptionalAction, default=False)
    options.add_argument("--compare", action="store_true", help="with plain PyTorch on one device")
    options.add_argument("--save", metavar="FOLDER", type=Path, help="of checkpoints")
    options.add_argument("--every", type=int, default=50, help="so many steps, and at the end")
    options.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return options


def main() -> None:
    args = parser().parse_args()
    if args.save:
        run(args, args.save)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> list[float]:
    """The losses of all steps that were not done before."""
    there = dt.resume(folder)
    first = there.step if there and there.step else 0
    if there and not args.resume:
        raise SystemExit(f"{folder} has checkpoints, to step {first}: --resume, or another folder")
    data = Data(*load(args.vocab))
    last = args.steps + args.more_steps
    if first >= last:
        raise SystemExit(f"{folder} has step {first} of {last}: --steps says how far to go")

    losses: list[float] = []
    if first < args.steps:
        losses += train(args, args.placements, args.backend, args.steps, data, folder)
    if args.more_steps:
        # The same checkpoint under another placement: nothing in it tells where it came from.
        before = len(losses)
        losses += train(args, args.then, "inprocess", last, data, folder)
        if before:
            console.print(
                f"loss {losses[before - 1]:.4f} at the last step under {args.placements}, "
                f"{losses[before]:.4f} at the next, under {args.then}"
            )
    if args.compare:
        reference = train_on_one_device(args, range(last), data.train)[first:]
        worst = max(abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True))
        console.print(
            f"largest difference to the losses of plain PyTorch on one device: {worst:.2e} "
            f"over {len(losses)} steps (last loss {losses[-1]:.6f}, there {reference[-1]:.6f})"
        )
    return losses


if __name__ == "__main__":
    main()
