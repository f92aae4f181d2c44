"""Seconds and memory to plan a training step of Llama-7B's shape, by phase, at several depths.

    python -m benchmarks.plan_large [--models llama gpt] [--depths 2 8 32]

Hugging Face's LlamaForCausalLM as it comes (hidden 4096, intermediate 11008, 32 heads, vocabulary
32000) on the meta device, 64 sequences of 2048 tokens, Mesh(dp=8, tp=8), AdamW; placements from
`dt.placements.for_model`, which runs first. The project's own GPT at the same width and depth is
beside it. Each depth is measured in a process of its own, by the CPU seconds of its one thread;
memory is the growth of the peak of its resident set. Prints a table for each model, a column for
each depth; two minutes, and under a GB. Not here: lowering and running (plan_time.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

import dtensor as dt
from benchmarks.smallest import parsed

PHASES: dict[str, tuple[str, str]] = {
    "export of the forward": ("dtensor.frontend.capture.capture", "export_call"),
    "differentiation": ("dtensor.frontend.capture.capture", "_differentiate"),
    "rewrites and names": ("dtensor.frontend.capture.to_graph", "to_graph"),
    "dataflow": ("dtensor.api.model.statements", "dataflow"),
    "choice of placements": ("dtensor.sharding.plan.planner", "choose_axis"),
    "steps laid down": ("dtensor.sharding.plan.planner", "emit"),
}
"""What is timed: a function, where it is looked up."""


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_hidden_layers=layers,
        vocab_size=32000,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels).loss


def gpt(layers: int) -> nn.Module:
    from tests.models import GPT

    return GPT(32000, 4096, 32, layers, 2048, tied=False)


def gpt_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[..., torch.Tensor]]] = {
    "llama": (llama, llama_loss),
    "gpt": (gpt, gpt_loss),
}


@contextlib.contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Within: what each phase takes is added up."""

    def wrapped(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[phase] = seconds.get(phase, 0.0) + time.process_time() - start

        return run

    with contextlib.ExitStack() as stack:
        for phase, (path, name) in PHASES.items():
            module = importlib.import_module(path)
            function = wrapped(phase, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def measure(kind: str, layers: int) -> dict[str, float]:
    """In this process: seconds by phase, and GB of memory; torch's compiler is loaded before."""
    importlib.import_module("torch._functorch.aot_autograd")
    torch.set_num_threads(1)
    make, loss_fn = MODELS[kind]
    with torch.device("meta"):
        model = make(layers)
        ids = torch.zeros(64, 2048, dtype=torch.long)
    args = ((ids,), dict(labels=ids)) if kind == "llama" else ((ids,), {})
    start = time.process_time()
    placements = dt.placements.for_model(model, *args, size=8)
    derived = time.process_time() - start
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parallel = dt.parallelize(model, dt.Mesh(dp=8, tp=8), placements)
    step = dt.train_step(parallel, loss_fn, opt, inputs=dict(dp=dt.Row()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds: dict[str, float] = {}
    counts = Counts()
    with timed(seconds), counts:
        start, wall = time.process_time(), time.perf_counter()
        plan = step.plan(ids, ids)
        whole, wall = time.process_time() - start, time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    text = str(plan)
    printed = time.process_time() - start
    return {
        **seconds,
        "the rest": whole - sum(seconds.values()),
        "step.plan, all of it": whole,
        "the same by the clock": wall,
        "str(plan)": printed,
        "for_model": derived,
        "peak memory, GB above the start": (after - before) / 2**20,
        "joint exports": counts.exports,
        "ops": len(plan.flow.ops),
        "variables of all integer programs": counts.variables,
        "lines of text": len(text.splitlines()),
    }


class Counts(contextlib.ExitStack):
    """Counts exports of joint graphs and variables while it is entered."""

    exports = variables = 0

    def __enter__(self) -> Counts:
        capture = importlib.import_module("dtensor.frontend.capture.capture")
        stitch = importlib.import_module("dtensor.frontend.capture.stitch")
        choose = importlib.import_module("dtensor.sharding.plan.choose.choose_axis")
        export, solve = capture.export_joint, choose.solve

        def exported(*args: Any) -> Any:
            self.exports += 1
            return export(*args)

        def solved(*args: Any) -> Any:
            found = solve(*args)
            self.variables += found.num_variables
            return found

        for module in (capture, stitch):
            self.enter_context(mock.patch.object(module, "export_joint", exported))
        self.enter_context(mock.patch.object(choose, "solve", solved))
        return self


def report(kinds: Sequence[str], depths: Sequence[int]) -> None:
    """Prints a table for each model, a column for each depth."""
    for kind in kinds:
        columns: list[dict[str, float]] = []
        for layers in depths:
            command = [sys.executable, "-m", "benchmarks.plan_large", "--one", kind, str(layers)]
            made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            columns.append(json.loads(made.stdout.splitlines()[-1]))
        print(f"\n| {kind}, CPU seconds | {' | '.join(f'{n} layers' for n in depths)} |")
        print("|---" * (len(depths) + 1) + "|")
        for name in columns[0]:
            cells = [f"{c[name]:.2f}" if isinstance(c[name], float) else c[name] for c in columns]
            print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 8, 32], help="in layers")
    parser.add_argument(
        "--one", nargs=2, metavar=("MODEL", "LAYERS"), help="measured in this process, as JSON"
    )
    given = parsed(parser, models=["gpt"], depths=[2])
    if given.one:
        kind, layers = given.one
        print(json.dumps(measure(kind, int(layers))))
    else:
        report(given.models, given.depths)


if __name__ == "__main__":
    main()
