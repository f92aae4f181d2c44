"""`dtensor run`: runs some training steps, with a random batch or the batches of a user's function.

    $ dtensor run gpt2 --set n_layer=2 --mesh tp=2 --steps 5
    step 1  loss 10.9502  812.44 ms
    ...

It prints the loss and the seconds of each step; the seconds include reading the loss. The
parameters depend on --seed and not on the mesh. Nothing is saved. Exit status 1 if a step fails or
a loss is not finite.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from typing import Any

from dtensor.commands.options import (
    HARDWARE,
    LAUNCH,
    MODEL_EPILOG,
    STRATEGY,
    OptionGroup,
    add_json,
    add_workload,
    positive_int,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine

RUN = OptionGroup(
    "the run",
    {
        "steps": dict(type=positive_int, default=5, metavar="N", help="steps to run (default: 5)"),
        "lr": dict(
            type=float,
            metavar="X",
            help="learning rate of the optimizer (default: the optimizer's default)",
        ),
        "seed": dict(type=int, default=0, metavar="N", help="random seed (default: 0)"),
        "trace": dict(
            metavar="FILE.json", help="run one more step and write its trace for Perfetto"
        ),
    },
)


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "run",
        "runs some training steps, in this process or on Ray: losses and seconds",
        "Runs training steps of the model on ranks, with a random batch or the batches of its "
        "function, and prints the loss and the seconds of each step. The model needs memory: it is "
        "not on the meta device.",
        MODEL_EPILOG,
    )
    add_workload(parser, meta=False)
    for group in (STRATEGY, HARDWARE, LAUNCH, RUN):
        group.add_to(parser)
    add_json(parser)
    parser.set_defaults(run=run, real=True)


def run(options: argparse.Namespace) -> int:
    import torch

    import dtensor as dt
    from dtensor.commands.json_data import print_json
    from dtensor.commands.launch_errors import launch_errors, start_errors
    from dtensor.commands.placed_workload import PlacedWorkload, check_strategy_options
    from dtensor.commands.simulate import write
    from dtensor.commands.workload import Workload
    from dtensor.sharding.plan.text.words import seconds_text

    mesh, zero = options.mesh, options.zero or {}
    check_strategy_options(options, [mesh], [zero])
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
        print("\n".join(filter(None, [work.title, placed.defaults_text(mesh)])) + "\n", flush=True)
    losses: list[float] = []
    seconds: list[float] = []
    launch = dt.launch(mesh, **LAUNCH.values(options), bring_home=False)
    with launch_errors(), ProgressLine() as progress:
        with progress.doing(f"starts {mesh.size} ranks, {options.backend}"), start_errors():
            launch.start()
        with launch:
            for number in range(options.steps):
                begin = time.perf_counter()
                loss = float(step(*work.batches[number % len(work.batches)]))
                losses.append(loss)
                seconds.append(time.perf_counter() - begin)
                if not options.json:
                    time_text = seconds_text(seconds[-1])
                    print(f"step {number + 1}  loss {loss:.6g}  {time_text}", flush=True)
            if options.trace:
                write(options.trace, dt.trace(step, *work.batch).save)
    median = statistics.median(seconds[1:] or seconds)  # the first step also compiles and sends
    if options.json:
        print_json(
            {
                "model": work.title,
                "mesh": mesh.shape,
                "backend": options.backend,
                "losses": losses,
                "seconds": seconds,
                "median_seconds": median,
                "predicted_seconds": plan.cost.seconds,
                "topology": plan.topology.title,
            }
        )
    else:
        print(
            f"\na step takes {seconds_text(median)}, the median"
            f"{' after the first' if len(seconds) > 1 else ''}"
        )
        if options.topology:  # the default topology is not this hardware
            print(f"predicted    {seconds_text(plan.cost.seconds)} ({plan.topology.title})")
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            print(
                f"The loss of step {number + 1} is {loss}.\n"
                f"fix: a smaller --lr, or dt.train_step(..., detect_nan=True), which names the op",
                file=sys.stderr,
            )
            return 1
    return 0
