"""What `dt.search` picks beside what people would try, measured; and how long a large search takes.

    python -m benchmarks.search --model gpt|llama [--ranks 2|4] [--rounds 3] [--write]
    python -m benchmarks.search --large [--write]

On 2 or 4 ranks of Ray on this machine: `dt.calibrate` measures it, the search picks, and its pick,
pasted as it is printed, runs beside five usual strategies. Each has a launch of its own in each
round; a figure is the median over rounds of the median of five steps. ``--large``: LlamaForCausalLM
of 7B's shape, 32 layers on the meta device, 64 sequences of 2,048 tokens, on 64 ranks of H100s,
NVLink along tp. ``--write`` puts the section into results/search.md in place of the one before.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import dtensor as dt
from benchmarks.plan_large import llama, llama_loss
from benchmarks.smallest import parsed
from tests.models import GPT

RESULTS = Path(__file__).with_name("results") / "search.md"
ROWS, LENGTH, VOCAB = 16, 128, 512
STEPS = 5


def small_gpt() -> nn.Module:
    return GPT(VOCAB, 256, 8, 4, LENGTH, tied=False)


def gpt_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def small_llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "gpt": (small_gpt, gpt_loss),
    "llama": (small_llama, llama_loss),
}
Made = tuple[dt.Mesh, dt.TrainStep]


def usual(num_ranks: int, tp: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Five strategies that one would try, as `dt.compare` takes them."""
    batch = dict(inputs=dict(dp=dt.Row()))
    dp, pp = dt.Mesh(dp=num_ranks), dt.Mesh(pp=num_ranks)
    stages = {"pp": dt.Auto(num_stages=num_ranks)}
    return {
        "data parallel": dict(mesh=dp, **batch),
        "data parallel, ZeRO 3": dict(mesh=dp, zero={"dp": 3}, **batch),
        "tensor parallel": dict(mesh=dt.Mesh(tp=num_ranks), placements=tp),
        "pipeline, 1F1B of 4": dict(mesh=pp, stages=stages, schedule=dt.OneFOneB(4)),
        "pipeline, ZB-H1 of 8": dict(mesh=pp, stages=stages, schedule=dt.ZBH1(8)),
    }


def pick(
    name: str, num_ranks: int, rounds: int, rows: int, steps: int, most: int | None
) -> list[str]:
    """``rows``: of a batch; ``steps``: timed in a launch; ``most``: strategies, None: all."""
    make, loss_fn = MODELS[name]
    tokens = torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        shape, ids = make(), torch.empty(rows, LENGTH, dtype=torch.int64)
    topology = calibrated(num_ranks)
    print(topology, flush=True)
    begin = time.process_time()
    found = dt.search(shape, loss_fn, num_ranks, ids, ids, topology=topology)
    searched = time.process_time() - begin
    print(found, flush=True)
    strategies = usual(num_ranks, dict(dt.placements.for_model(shape, (ids,), {})))
    compared = dt.compare(shape, loss_fn, strategies, ids, ids, topology=topology)
    predicted = {f"the search's: {found.best.name}": found.best.seconds}
    predicted |= {row.name: row.seconds for row in compared}
    predicted = dict(list(predicted.items())[:most])

    def built(which: str) -> Made:
        torch.manual_seed(0)
        model = make()
        if which.startswith("the search's"):
            names: dict[str, Any] = dict(model=model, loss_fn=loss_fn, torch=torch, dt=dt)
            exec(found.best.text, names)
            return names["mesh"], names["step"]
        options = dict(strategies[which])
        mesh, placements = options.pop("mesh"), options.pop("placements", {})
        stated = {k: options.pop(k) for k in ("stages", "zero") if k in options}
        parallel = dt.parallelize(model, mesh, placements, **stated)
        optimizer = torch.optim.AdamW(model.parameters())
        return mesh, dt.train_step(parallel, loss_fn, optimizer, **options)

    seconds: dict[str, list[float]] = {which: [] for which in predicted}
    for _ in range(rounds):
        for which in predicted:
            mesh, step = built(which)
            with dt.launch(mesh, backend="ray"):
                seconds[which].append(step_seconds(step, tokens, steps))
            print(f"{which}: {1e3 * seconds[which][-1]:.1f} ms", flush=True)
    medians = {which: statistics.median(own) for which, own in seconds.items()}
    best = min(medians.values())
    lines = [
        f"## {name}, {num_ranks} ranks on {os.cpu_count()} cores",
        "",
        f"`python -m benchmarks.search --model {name} --ranks {num_ranks} --write`, {rounds} "
        f"rounds, load {os.getloadavg()[0]:.1f}; the search took {searched:.1f} s of a core, "
        f"planned {found.num_planned} of {found.num_points} points.",
        "",
        "| strategy | predicted | measured | of the best |",
        "|---|---|---|---|",
    ]
    for which, median in medians.items():
        lines.append(
            f"| {which} | {1e3 * predicted[which]:.1f} ms | {1e3 * median:.1f} ms "
            f"| {median / best:.2f} |"
        )
    return lines


def calibrated(num_ranks: int) -> dt.Topology:
    """Of this machine; what one axis shows holds for all, since all ranks share it."""
    mesh = dt.Mesh(tp=num_ranks)
    with dt.launch(mesh, backend="ray"):
        found = dt.calibrate()
    return dt.Topology(
        latency=found.latency_of("tp"),
        bandwidth=found.bandwidth_of("tp"),
        flops=found.flops,
        memory_bandwidth=found.memory_bandwidth,
        memory_bytes=8 * 2**30,
        op_latency=found.op_latency,
        step_latency=found.step_latency,
        attention_flops=found.attention_flops,
        update_bandwidth=found.update_bandwidth,
        name="this machine, calibrated",
    )


def step_seconds(step: dt.TrainStep, tokens: Tensor, steps: int) -> float:
    """Of a step, from the call until its loss is read; the median of ``steps``, after two."""

    def once() -> float:
        begin = time.perf_counter()
        float(step(tokens, tokens))
        return time.perf_counter() - begin

    return statistics.median([once() for _ in range(2 + steps)][2:])


def large() -> list[str]:
    with torch.device("meta"):
        model = llama(32)
        ids = torch.empty(64, 2048, dtype=torch.int64)
    topology = dt.topologies.h100(nvlink=("tp",), infiniband=("dp", "pp"))
    cpu, wall, load = time.process_time(), time.perf_counter(), os.getloadavg()[0]
    found = dt.search(model, llama_loss, 64, ids, ids, topology=topology)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(found)
    return [
        "## Llama of 7B's shape, 32 layers, 64 ranks",
        "",
        f"`python -m benchmarks.search --large --write`: {cpu:.1f} s of a core, {wall:.1f} s "
        f"by the clock at a load of {load:.1f}.",
        "",
        "```text",
        *str(found).splitlines(),
        "```",
    ]


def write(lines: list[str]) -> None:
    """In place of the section of the same title."""
    text = RESULTS.read_text() if RESULTS.exists() else "# Searching for a strategy\n"
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [s.rstrip() for s in sections if not s.startswith(lines[0] + "\n")]
    RESULTS.write_text("\n\n".join([*kept, "\n".join(lines)]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=sorted(MODELS), default=min(MODELS))
    what.add_argument("--large", action="store_true")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    parser.set_defaults(rows=ROWS, steps=STEPS, most=None)
    options = parsed(parser, rounds=1, rows=8, steps=1, most=1)
    how = options.model, options.ranks, options.rounds, options.rows, options.steps, options.most
    lines = large() if options.large else pick(*how)
    print("\n".join(lines))
    if options.write:
        write(lines)


if __name__ == "__main__":
    main()
