"""CPU seconds from a model to a verified program, stage by stage; and whether layers cost choices.

    python -m benchmarks.plan_time [--layers 12] [--microbatches 8] [--profile lower]

A GPT (width 768, 12 heads, 1024 positions, vocabulary 50304) on Mesh(pp=2, dp=2, tp=2) under
Megatron's pins. Nothing is computed and no parameter is allocated: the model is on the meta
device. The counts of variables of the integer programs are printed for the number of layers asked
for and for half of it: repeated layers are solved once, so they agree. Llama-7B's shape:
plan_large.py.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.smallest import parsed
from dtensor.api.model.stating.stages import resolve_stages
from dtensor.api.model.stating.stated_placements import input_pins, planner_pins, resolve_placements
from dtensor.daft import verify
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.runtime.lower.program import lower
from dtensor.runtime.lower.rank_builder import OptimizerRole, Roles
from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.schedule import OneFOneB
from dtensor.sharding.plan import planner
from dtensor.sharding.plan.choose import choose_axis
from dtensor.sharding.plan.choose.solve import Node, Price, Solution, solve
from dtensor.sharding.plan.request import Request, Training, Updater
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from tests.models import GPT, loss_fn
from tests.plans import MEGATRON

T = TypeVar("T")
CASES = {"small": (64, 4, 32, 128), "gpt": (768, 12, 1024, 50304)}  # width, heads, T, vocabulary


def measure(
    layers: int, microbatches: int, case: str, profile: str | None = None
) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds by phase, and by axis the number of variables of its integer program."""
    width, heads, length, vocab = CASES[case]
    seconds: dict[str, float] = {}
    variables: dict[str, int] = {}

    def timed(name: str, action: Callable[[], T]) -> T:
        start = time.process_time()
        if name == profile:
            with cProfile.Profile() as profiler:
                found = action()
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(40)
        else:
            found = action()
        seconds[name] = time.process_time() - start
        return found

    mesh = Mesh(pp=2, dp=2, tp=2)
    with torch.device("meta"):
        model = GPT(vocab, width, heads, layers, length, tied=False)
        batch = torch.zeros(2 * microbatches, length, dtype=torch.long)
    graph = timed("capture", lambda: capture(loss_fn, (model, batch, batch), grads="loss"))
    half = layers // 2
    stages = {
        "pp": [
            ["embed*", "positions*", *(f"blocks.{i}.*" for i in range(half))],
            [*(f"blocks.{i}.*" for i in range(half, layers)), "norm*", "head*"],
        ]
    }
    held = resolve_stages(model, mesh, stages)
    flow = timed("stages", lambda: dataflow(graph, held.held, held.num_stages))
    rules = timed("rules", lambda: planner.rules_of(flow))
    arguments = {i.label: i.meta for i in flow.inputs if i.kind == "argument"}
    named = planner_pins(
        flow,
        resolve_placements(model, mesh, MEGATRON, stage_axis=held.axis),
        input_pins(arguments, dict(dp=Shard(0)), mesh, stage_axis=held.axis),
    )
    trained = frozenset(i.label for i in flow.inputs if i.kind == "parameter")
    adamw = Updater(optimizer="AdamW", trained=trained, state_tensors=2)
    training = Training(updaters=(adamw,), clip_grad_norm=1.0)
    grid = OneFOneB(microbatches).grid(2, 2)
    request = Request(
        name="gpt",
        flow=flow,
        mesh=mesh,
        pins=named.pins,
        pinned_by=named.pinned_by,
        batch=named.batch,
        stage_axis=held.axis,
        num_microbatches=microbatches,
        timetable=GridTimetable(grid),
        training=training,
    )
    del rules

    def solved(nodes: list[Node], price: Price) -> Solution:
        start = time.process_time()
        found = solve(nodes, price)
        axis = f"solve {len(variables)}"
        seconds[axis] = time.process_time() - start
        variables[axis] = found.num_variables
        return found

    emitted = planner.emit

    def emit(*args: object) -> object:
        return timed("emit", lambda: emitted(*args))  # pyright: ignore

    choose_axis.solve, planner.emit = solved, emit  # pyright: ignore
    try:
        plan = timed("plan, all of it", lambda: planner.plan(request))
    finally:
        choose_axis.solve, planner.emit = solve, emitted
    roles = Roles(updates=(OptimizerRole("opt"),))
    lowered = timed("lower", lambda: lower(plan, grid, roles=roles))
    ranks = (tuple(range(mesh.size)),)
    timed("verify", lambda: verify(lowered, ranks))
    timed("print", lambda: str(plan))
    timed("cost and memory", lambda: (plan.cost, plan.memory))
    variables["ops"] = len(flow.ops)
    variables["steps"] = len(plan.steps)
    variables["instructions of rank 0"] = len(lowered.ranks[0].instructions)
    variables["functions"] = len(lowered.functions)
    return seconds, variables


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--case", choices=sorted(CASES), default="gpt")
    parser.add_argument("--profile", help="a phase, as `lower`: where its seconds go")
    given = parsed(parser, layers=2, microbatches=2, case="small")
    torch.set_num_threads(1)
    seconds, full = measure(given.layers, given.microbatches, given.case, given.profile)
    fewer = max(2, given.layers // 2)
    _, half = measure(fewer, given.microbatches, given.case)
    print(f"| phase | seconds, {given.layers} layers |\n|---|---|")
    for name, value in seconds.items():
        print(f"| {name} | {value:.2f} |")
    print(f"\n| count | {given.layers} layers | {fewer} layers |\n|---|---|---|")
    for name, value in full.items():
        print(f"| {name} | {value} | {half[name]} |")


if __name__ == "__main__":
    main()
