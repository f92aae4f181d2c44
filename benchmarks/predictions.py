"""Predicted over measured seconds of a training step: on one H100, and on two Ray actors.

    OMP_NUM_THREADS=1 python -m benchmarks.predictions [--rounds 5] [--write]

The H100's times are those of one rank in results/gpu_step.md. Each of its three models is planned
for `dt.topologies.h100()`, with `launch_latency` fitted to one of them and judged on the other two,
and then with the figure that the topology states. Eager torch, which is another program, is not
predicted. The models are captured on the CPU, under autocast's list for the CPU.

On the Ray actors each prediction follows a calibration, which knows nothing of the model, and is
compared with the steps after it (predicted_time.py).
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from scipy.optimize import brentq

import dtensor as dt
from benchmarks import gpu_step, predicted_time
from benchmarks.smallest import parsed
from dtensor.sharding.plan.plan import Plan

RESULTS = Path(__file__).parent / "results"
NOTES = (
    "Not predicted: two ranks on one GPU, whose one host launches twice the ops. They took 1.3",
    "times as long as one rank in the two GPTs and 2.4 times in the Llama (gpu_step.md). So a part",
    "of the figure may belong to the step and not to the op, or to the machine, whose rounds",
    "differ by half.",
)


def planned(case: gpu_step.Case) -> Plan:
    """The plan of one rank."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpu_step.LR)
    step = dt.train_step(dt.parallelize(model, dt.Mesh(), {}), case.loss, optimizer)
    return step.plan(*case.batch())


def measured() -> dict[str, float]:
    """Return dtensor's measured seconds of a step on one rank, by the label of the case."""
    found: dict[str, float] = {}
    label = ""
    for line in (RESULTS / "gpu_step.md").read_text().splitlines():
        if line.startswith("## "):
            label = line.removeprefix("## ").rpartition(", ")[0]
        elif match := re.match(r"\| dtensor(?:, generated)? \| ([\d.]+) \|", line):
            found[label] = float(match[1]) / 1e3
    return found


def seconds(plan: Plan, launch_latency: float) -> float:
    topology = replace(plan.topology, launch_latency=launch_latency)
    return replace(plan, topology=topology).cost.seconds


def gpu_lines(fit: str, names: Collection[str]) -> Iterator[str]:
    """``fit``: the name of the case to which the launch latency is fitted."""
    times = measured()
    cases = {name: case for name, case in gpu_step.cases(tiny=False).items() if name in names}
    plans = {name: planned(case) for name, case in cases.items()}
    wanted = times[cases[fit].label]
    fitted: float = brentq(lambda latency: seconds(plans[fit], latency) - wanted, 0.0, 1e-3)  # pyright: ignore
    stated = dt.topologies.h100().launch_latency
    yield f"## One H100: launches of {1e6 * fitted:.1f} us, fitted to the case marked *"
    yield ""
    yield (
        "| model | measured, ms | device, ms | launches | predicted, ms | over measured "
        f"| with the stated {1e6 * stated:.0f} us |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, case in cases.items():
        plan, took = plans[name], times[case.label]
        cost = plan.cost
        launches = round(cost.host_seconds / stated)
        predicted = seconds(plan, fitted)
        yield (
            f"| {case.label}{' *' * (name == fit)} | {1e3 * took:.2f} "
            f"| {1e3 * cost.compute_seconds:.2f} | {launches:,} | {1e3 * predicted:.2f} "
            f"| {predicted / took:.2f} | {cost.seconds / took:.2f} |"
        )
    yield ""
    yield from NOTES
    yield ""


def ray_lines(rounds: int, steps: int, names: Collection[str]) -> Iterator[str]:
    yield "## Two Ray actors on the CPU, after a calibration"
    yield ""
    yield "| configuration | predicted | measured (quartiles) | error (of rounds) |"
    yield "|---|---|---|---|"
    for name in names:
        configuration = predicted_time.CONFIGURATIONS[name]
        yield predicted_time.measure(configuration, rounds, steps).row(name)
    yield ""
    yield f"{rounds} rounds of a calibration, a prediction and {steps} steps; the median round."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cases, configurations = list(gpu_step.cases(tiny=False)), list(predicted_time.CONFIGURATIONS)
    parser.add_argument("--fit", default="small", choices=cases)
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--only", nargs="+", default=configurations, choices=configurations)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    given = parsed(parser, cases=["small"], only=["tp=2"], rounds=1, steps=2)
    torch.set_num_threads(1)
    head = "# Predicted over measured seconds of a step"
    lines = [head, "", "`OMP_NUM_THREADS=1 python -m benchmarks.predictions --write`", ""]
    of_gpu = gpu_lines(given.fit, given.cases)
    for line in itertools.chain(of_gpu, ray_lines(given.rounds, given.steps, given.only)):
        print(line, flush=True)
        lines.append(line)
    if given.write:
        (RESULTS / "predictions.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
