"""`dtensor run`: some steps of a training run, with random numbers or the function's batches.

    $ dtensor run gpt2 --set n_layer=2 --mesh tp=2 --steps 5
    step 1  loss 10.9502  812.44 ms
    ...

What is planned is what runs: the losses of the steps, and how long each took with its loss read.
Parameters have the model's own random start, drawn after --seed; the same under any mesh. It is no
trainer: it saves nothing. Exit status 1 where a step fails, or a loss is not finite.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from typing import Any

from dtensor.commands.options import (
    MODEL_EPILOG,
    add_backend,
    add_hardware,
    add_json,
    add_strategy,
    add_workload,
    whole_option,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "run",
        "some training steps, in this process or on Ray: losses and seconds",
        "Runs steps of the workload on ranks, with random numbers or the batches of its function, "
        "and says the loss and the seconds of each. Models have values here, and need memory.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    add_strategy(parser)
    add_hardware(parser)
    add_backend(parser)
    group = parser.add_argument_group("the run")
    group.add_argument("--steps", type=whole_option, default=5, metavar="N", help="(default: 5)")
    group.add_argument("--lr", type=float, metavar="X", help="of the optimizer (default: its own)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    group.add_argument("--trace", metavar="FILE.json", help="write one step more for Perfetto")
    add_json(parser)
    parser.set_defaults(run=run, real=True)


def run(options: argparse.Namespace) -> int:
    import torch

    import dtensor as dt
    from dtensor.commands.json_data import print_json
    from dtensor.commands.launch_errors import launching, too_few_are_users
    from dtensor.commands.placed_workload import PlacedWorkload, check_stated
    from dtensor.commands.simulate import write
    from dtensor.commands.workload import Workload
    from dtensor.sharding.plan.text.words import seconds_text

    mesh, zero = options.mesh, options.zero or {}
    check_stated(options, [mesh], [zero])
    torch.manual_seed(options.seed)
    dt.manual_seed(options.seed)
    with ProgressLine() as progress:
        with progress.doing(f"makes {options.model}"):
            work = Workload.of(options, meta=False)
            placed = PlacedWorkload(work, options)
        with progress.doing(f"captures a step of {work.name}"):
            _ = work.graph
        with progress.doing(f"plans it on {mesh}"):
            step = placed.step(mesh, zero, options.schedule)
            plan = placed.plan(step)
    if not options.json:
        print("\n".join(filter(None, [work.title, placed.words(mesh)])) + "\n", flush=True)
    losses: list[float] = []
    seconds: list[float] = []
    launch = dt.launch(
        mesh,
        backend=options.backend,
        device=options.device,
        address=options.address,
        ranks_per_actor=options.ranks_per_actor,
        bring_home=False,
    )
    with launching(options), ProgressLine() as progress:
        starts = progress.doing(f"starts {mesh.size} ranks, {options.backend}")
        with starts, too_few_are_users():
            launch.start()
        with launch:
            for number in range(options.steps):
                begin = time.perf_counter()
                loss = float(step(*work.batches[number % len(work.batches)]))
                losses.append(loss)
                seconds.append(time.perf_counter() - begin)
                if not options.json:
                    took = seconds_text(seconds[-1])
                    print(f"step {number + 1}  loss {loss:.6g}  {took}", flush=True)
            if options.trace:
                write(options.trace, dt.trace(step, *work.batch).save)
    later = seconds[1:] or seconds
    usual = statistics.median(later)
    if options.json:
        print_json(
            {
                "model": work.title,
                "mesh": mesh.shape,
                "backend": options.backend,
                "losses": losses,
                "seconds": seconds,
                "median_seconds": usual,
                "predicted_seconds": plan.cost.seconds,
                "topology": plan.topology.title,
            }
        )
    else:
        print(
            f"\na step takes {seconds_text(usual)}, the median"
            f"{' after the first' if len(seconds) > 1 else ''}"
        )
        if options.topology:  # else it would be that of other hardware than what ran
            print(f"predicted    {seconds_text(plan.cost.seconds)} ({plan.topology.title})")
    bad = [number + 1 for number, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        print(
            f"The loss of step {bad[0]} is {losses[bad[0] - 1]}.\n"
            f"fix: a smaller --lr, or dt.train_step(..., detect_nan=True), which names the op",
            file=sys.stderr,
        )
    return int(bool(bad))
