"""A training step of one block whose sequence is split over 2 or 4 ranks; the strategies at scale.

    OMP_NUM_THREADS=1 python -m benchmarks.context_parallel [--tokens 2048 8192] [--write]
    OMP_NUM_THREADS=1 python -m benchmarks.context_parallel --simulate [--write]

The block has causal attention with 4 heads of 64, one sequence, float32; a step is forward, mse
loss, backward and AdamW, one thread a rank. dtensor on Ray with ``attention="ring"`` and "heads" is
beside the same by hand on gloo (benchmarks/context_parallel_peer.py), with the same layout of the
tokens, and "ring" beside dtensor's "gather". Gradients and losses are compared before and after.
Timed as in benchmarks/transformer_block.py: interleaved, and ratios pair by pair.

``--simulate`` plans Llama-3-8B with one sequence of 131,072 tokens in the zigzag layout on H100s,
in bf16, with ZeRO-3 over all ranks but tp's and every layer recomputed: the predicted seconds of a
step, the exposed communication and the memory of a rank by strategy, and what "auto" takes. It also
plans one block on 64 ranks in both layouts, for the ratio of the CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtensor as dt
from benchmarks.context_parallel_peer import LR, Peers, Shape
from benchmarks.pipelining import check_gradients
from benchmarks.smallest import parsed
from benchmarks.transformer_block import Beside, Run, machine, measure, ours, plain_gradients, table

STRATEGIES = ("heads", "gather", "ring")
ROUNDS = {2048: 20, 4096: 14, 8192: 8, 16384: 5}
RESULTS = Path(__file__).parent / "results"


def layout(zigzag: bool) -> dt.Placement:
    return dt.Zigzag(1) if zigzag else dt.Shard(1)


def step_of(shape: Shape, mesh: dt.Mesh, strategy: str) -> dt.TrainStep:
    model = dt.parallelize(shape.model(), mesh, {}, attention={"cp": strategy})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return dt.train_step(
        model,
        lambda model, x, y: F.mse_loss(model(x), y),
        optimizer,
        inputs=dict(cp=layout(shape.zigzag)),
    )


# -- measured --------------------------------------------------------------------------------------


def compare(shape: Shape, mesh: dt.Mesh, peers: Peers, rounds: int) -> dict[str, Beside]:
    """Inside a launch of ``mesh``."""
    batch = [dt.distribute(x, mesh, cp=layout(shape.zigzag)) for x in shape.batch()]
    wanted = plain_gradients(shape)
    steps = {strategy: step_of(shape, mesh, strategy) for strategy in STRATEGIES}
    for step in steps.values():
        check_gradients(step.gradients(*batch), wanted)
    runs = {strategy: ours(step, batch) for strategy, step in steps.items()}
    found: dict[str, Beside] = {}
    for kind in ("ring", "heads"):
        check_gradients(peers.gradients(kind, shape), wanted)
        beside: dict[str, Run] = {"by hand": partial(peers.steps, kind, shape)}
        if kind == "ring":
            beside["gather"] = runs["gather"]
        times = measure(runs[kind], beside, rounds, 1)
        found |= {f"{kind}: {name}": pair for name, pair in times.items()}
    return found


def measured(given: argparse.Namespace) -> list[str]:
    lines = [
        "# A training step of a block whose sequence is split",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.context_parallel {' '.join(sys.argv[1:])}`",
        "",
        f"{machine()}. 1 sequence, 4 heads of 64; medians, and medians of "
        "the ratios of pairs, with their 95% interval. What the sides are: "
        "benchmarks/context_parallel.py.",
        "",
    ]
    for num in given.ranks:
        for zigzag in (True, False):
            shapes = [Shape(tokens=tokens, zigzag=zigzag) for tokens in given.tokens]
            mesh = dt.Mesh(cp=num)
            with Peers(num, shapes) as peers, dt.launch(mesh, backend="ray"):
                found = {
                    shape.tokens: compare(
                        shape, mesh, peers, given.rounds or ROUNDS.get(shape.tokens, 2)
                    )
                    for shape in shapes
                }
            title = f"{num} ranks, {'zigzag' if zigzag else 'contiguous'}"
            lines += table(title, found, size="tokens")
    return lines


# -- simulated -------------------------------------------------------------------------------------


def llama(layers: int, **smaller: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        num_hidden_layers=layers,
        use_cache=False,
    )
    config = LlamaConfig(**sizes | smaller)
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def llama_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels).loss


def topology(mesh: dt.Mesh) -> dt.Topology:
    """Return 8 H100s a host: the last axis is inside a host if it has at most 8 ranks."""
    *outer, inner = mesh.axes
    nvlink = (inner,) if mesh.axis_size(inner) <= 8 else ()
    return dt.topologies.h100(
        nvlink=nvlink, infiniband=tuple(a for a in (*outer, inner) if a not in nvlink)
    )


def llama_plan(mesh: dt.Mesh, words: dict[str, str], given: argparse.Namespace) -> dt.Plan:
    """Return the plan of the step on ``mesh``, whose axes but tp split the sequence."""
    sizes = dict(hidden_size=128, vocab_size=256, intermediate_size=256) if given.smallest else {}
    module = llama(given.layers, **sizes)
    ids = torch.zeros(1, given.length, dtype=torch.long, device="meta")
    axes = [axis for axis in mesh.axes if axis != "tp"]
    heads = {"*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"}
    rows = {*heads, "*.gate_proj.weight", "*.up_proj.weight", "lm_head.weight"}
    columns = {"*.o_proj.weight", "*.down_proj.weight"}
    tp = {"tp": dt.Row()}, {"tp": dt.Column()}
    pins = {name: tp[0] for name in sorted(rows)} | {name: tp[1] for name in sorted(columns)}
    model = dt.parallelize(
        module,
        mesh,
        pins if "tp" in mesh.axes else {},
        zero=dict.fromkeys(axes, 3),
        recompute=["model.layers.*"],
        attention=words,
    )
    step = dt.train_step(
        model,
        llama_loss,
        torch.optim.AdamW(module.parameters(), lr=1e-4),
        inputs={axis: layout(zigzag=axis == "cp") for axis in axes},
        topology=topology(mesh),
    )
    return step.plan(ids, ids)


def simulated(given: argparse.Namespace) -> list[str]:
    lines = [
        "# Llama-3-8B with one sequence of 131,072 tokens on H100s, by strategy",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.context_parallel {' '.join(sys.argv[1:])}`",
        "",
        f"{given.layers} layers, {given.length:,} tokens in the zigzag layout over cp, bf16, "
        "ZeRO-3 over all axes but tp, every layer recomputed. 8 GPUs a host: the last axis has "
        "NVLink if it has at most 8 ranks, every other axis InfiniBand. A GPU has 80 GB.",
        "",
        "| ranks | mesh | attention | step | exposed communication | memory of a rank | auto |",
        "|---|---|---|---|---|---|---|",
    ]
    for mesh in given.meshes:
        axes = [axis for axis in mesh.axes if axis != "tp"]
        rows = [dict.fromkeys(axes, word) for word in STRATEGIES]
        if len(axes) == 2:
            rows = [{axes[0]: word, axes[1]: "heads"} for word in ("gather", "ring")]
        chosen = llama_plan(mesh, {}, given).sequence
        words = {choice.axis: choice.word for choice in chosen}
        for row in rows:
            lines.append(_row(mesh, row, "taken" if row == words else "", given))
            print(lines[-1], file=sys.stderr, flush=True)
    return [*lines, "", *planning(given)]


def _row(mesh: dt.Mesh, words: dict[str, str], taken: str, given: argparse.Namespace) -> str:
    sizes = " x ".join(f"{axis}{size}" for axis, size in mesh.shape.items())
    text = ", ".join(words.values())
    try:
        plan = llama_plan(mesh, words, given)
    except dt.PlanningError as error:
        reason = str(error).splitlines()[0]
        return f"| {mesh.size} | {sizes} | {text} | refused: {reason} | | | |"
    again = any(choice.gathers_again for choice in plan.sequence)
    text += ", keys gathered again" if again else ""
    cost, memory = plan.cost, plan.totals.memory.total / 2**30
    fits = "" if plan.totals.fits else ", does not fit"
    return (
        f"| {mesh.size} | {sizes} | {text} | {cost.seconds:.2f} s | "
        f"{cost.communication_seconds:.2f} s | {memory:.1f} GiB{fits} | {taken} |"
    )


def planning(given: argparse.Namespace) -> list[str]:
    """Measure the CPU seconds to plan one block on 64 ranks in both layouts. Return lines with the
    seconds and the ratio of zigzag to contiguous."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    num = 4 if given.smallest else 64
    for number in range(given.rounds or 5):
        for zigzag in (True, False) if number % 2 else (False, True):
            shape = Shape(tokens=given.length, zigzag=zigzag)
            step = step_of(shape, dt.Mesh(cp=num), "ring")
            batch = [torch.empty(1, shape.tokens, shape.width, device="meta") for _ in range(2)]
            start = time.process_time()
            step.plan(*batch)
            seconds[zigzag].append(time.process_time() - start)
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    mine, theirs = (statistics.median(times) for times in seconds.values())
    return [
        "## Planning one block",
        "",
        f"{given.length:,} tokens, cp={num}, ring: {mine:.2f} s of CPU with the zigzag, "
        f"{theirs:.2f} s with the contiguous layout; median of the ratios of "
        f"{len(ratios)} pairs {statistics.median(ratios):.2f}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help="in place of fewer rounds for more tokens")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--simulate", action="store_true", help="plan Llama-3-8B instead")
    parser.add_argument("--layers", type=int, default=32, help="of Llama-3-8B")
    parser.add_argument("--write", action="store_true", help="benchmarks/results")
    meshes = [dt.Mesh(cp=num) for num in (8, 16, 32, 64)]
    meshes += [dt.Mesh(cp=num, tp=8) for num in (2, 4, 8)]
    meshes += [dt.Mesh(cp=num, up=8) for num in (2, 4, 8)]
    parser.set_defaults(meshes=meshes, length=131072)
    small: dict[str, Any] = dict(
        tokens=[64], rounds=2, ranks=[2], layers=1, length=256, meshes=[dt.Mesh(cp=2)]
    )
    given = parsed(parser, **small)
    torch.set_num_threads(1)
    modes = [True, False] if given.smallest else [given.simulate]
    for simulate in modes:
        text = "\n".join(simulated(given) if simulate else measured(given))
        print(text, flush=True)
        if given.write:
            name = "context_parallel_simulated.md" if simulate else "context_parallel.md"
            (RESULTS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
