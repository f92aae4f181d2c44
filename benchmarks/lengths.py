"""CPU seconds of a plan for a new length, as a ratio to those of a capture, and of its parts.

    python -m benchmarks.lengths [--layers 4 16] [--model llama|hugging-face] [--profile]

A training step of a Llama (width 256, 4 heads) on Mesh(tp=2) is planned for lengths of 128, 192,
256, ... tokens. Nothing is computed, and nothing launched: a plan is all that a new length costs
on the controller before the program is loaded. A capture is what a new length costs without this:
a step of its own for each length, of the same model, planned in turn with the others.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
from benchmarks.smallest import parsed
from dtensor.api.step import plan_call
from dtensor.api.step.lengths import Lengths
from dtensor.frontend.capture import capture as capturing
from dtensor.frontend.capture import lengths as exporting
from tests.models import Llama, loss_fn

VOCAB, WIDTH, HEADS = 1024, 256, 4
LENGTHS = (128, 192, 256, 320)
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("export with symbols", exporting, "_export"),
    ("export", capturing, "export_call"),
    ("cut down", exporting._StaticCopy, "copy"),
    ("canonicalise", capturing, "canonicalise"),
    ("differentiate", capturing, "_differentiate"),
    ("reads", exporting.Guards, "__init__"),
    ("reads compared", exporting.Guards, "difference"),
    ("plan", plan_call, "plan"),
)


def model_of(kind: str, layers: int) -> tuple[nn.Module, Callable[..., Any]]:
    if kind == "llama":
        return Llama(VOCAB, WIDTH, HEADS, layers=layers), loss_fn
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), lambda model, x, y: model(input_ids=x, labels=y).loss


def step_of(kind: str, layers: int) -> dt.TrainStep:
    model, loss = model_of(kind, layers)
    parallel = dt.parallelize(model, dt.Mesh(tp=2))
    return dt.train_step(parallel, loss, torch.optim.AdamW(model.parameters(), lr=1e-3))


def batch(length: int) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(2, length, dtype=torch.long)
    return ids, ids


@contextmanager
def split() -> Iterator[dict[str, float]]:
    """CPU seconds of each part, within."""
    seconds: dict[str, float] = {name: 0.0 for name, _, _ in PARTS}
    plain = [(owner, name, getattr(owner, name)) for _, owner, name in PARTS]

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.process_time() - began

        return run

    try:
        for (part, owner, name), (_, _, function) in zip(PARTS, plain, strict=True):
            setattr(owner, name, timed(part, function))
        yield seconds
    finally:
        for owner, name, function in plain:
            setattr(owner, name, function)


def planned(step: dt.TrainStep, length: int) -> tuple[float, dict[str, float]]:
    with split() as parts:
        began = time.process_time()
        step.plan(*batch(length))
        return time.process_time() - began, parts


def refused() -> list[str]:
    """Why a length is captured, from here on."""
    found: list[str] = []
    plain: Any = Lengths._exported_graph

    def graph(*args: Any) -> Any:
        try:
            return plain(*args)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            raise

    Lengths._exported_graph = graph  # type: ignore[method-assign]
    return found


def measure(kind: str, layers: int) -> None:
    why = refused()
    planned(step_of(kind, 2), 64)  # what the process does once
    step = step_of(kind, layers)
    captures: list[tuple[float, dict[str, float]]] = []
    lengths: list[tuple[float, dict[str, float]]] = []
    for length in LENGTHS:
        alone = step_of(kind, layers)
        captures.append(planned(alone, length))
        lengths.append(planned(step, length))
    capture = statistics.median(one[0] for one in captures)
    later = statistics.median(one[0] for one in lengths[2:])
    print(f"\n{kind}, {layers} layers: capture {capture:.2f} s")
    print(f"  the second length  {lengths[1][0]:.2f} s, {lengths[1][0] / capture:.2f} captures")
    print(f"  each later length  {later:.2f} s, {later / capture:.2f} captures")
    print(f"  captured, not written: {why or 'none'}")
    for name in captures[0][1]:
        row = [statistics.median(one[1][name] for one in captures), lengths[1][1][name]]
        row.append(statistics.median(one[1][name] for one in lengths[2:]))
        print(f"  {name:<20} " + " ".join(f"{x:8.2f}" for x in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--model", default="llama", choices=("llama", "hugging-face"))
    parser.add_argument("--profile", action="store_true", help="of a later length")
    args = parsed(parser, layers=[1])
    print("CPU seconds, medians: a capture, the second length, each later one")
    for layers in args.layers:
        measure(args.model, layers)
        if args.profile:
            step = step_of(args.model, layers)
            for length in LENGTHS[:2]:
                step.plan(*batch(length))
            with cProfile.Profile() as profiler:
                step.plan(*batch(LENGTHS[2]))
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()
