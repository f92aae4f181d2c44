"""Predicted against measured seconds of a training step, on two Ray actors.

    OMP_NUM_THREADS=1 python -m benchmarks.predicted_time [--only pp=2] [--traces tp=2 pp=2]

A round: `dt.calibrate` measures the cluster, without the model; `dt.simulate` predicts the step;
then real steps, each from the call until its loss is read. Five rounds of five steps, as a shared
machine is another one from minute to minute: the error is that of a round's prediction against the
median of its own steps, and the table has the median of the rounds and the range. The model is a
GPT of 4 blocks of width 256 on 16 sequences of 128 tokens, with AdamW: tp=2 with Megatron's
placements, pp=2 with 1F1B of 4 microbatches, dp=2, and dp=2 with zero 1. For the configurations of
``--traces`` the table of `dt.compare_traces` follows, of the median of five traced steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt
from benchmarks.smallest import parsed
from dtensor.runtime.simulate.trace import TraceComparison
from tests.models import GPT

VOCAB, WIDTH, HEADS, BLOCKS = 512, 256, 8, 4
SEQUENCES, TOKENS = 16, 128
MEGATRON = {
    "*.attn.qkv.weight": dict(tp=dt.Row(blocks=3)),
    "*.attn.proj.weight": dict(tp=dt.Column()),
    "*.mlp.up.weight": dict(tp=dt.Row()),
    "*.mlp.down.weight": dict(tp=dt.Column()),
}
HALVES = [["embed*", "positions*", "blocks.[0-1].*"], ["blocks.[2-3].*", "norm*", "head*"]]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    mesh: dt.Mesh
    placements: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    step: Mapping[str, Any] = field(default_factory=dict[str, Any])


BATCH = dict(inputs=dict(dp=dt.Row()))
CONFIGURATIONS = {
    "tp=2": Configuration(mesh=dt.Mesh(tp=2), placements=MEGATRON),
    "pp=2": Configuration(
        mesh=dt.Mesh(pp=2),
        model=dict(stages={"pp": HALVES}),
        step=dict(schedule=dt.OneFOneB(microbatches=4)),
    ),
    "dp=2": Configuration(mesh=dt.Mesh(dp=2), step=BATCH),
    "dp=2 zero 1": Configuration(mesh=dt.Mesh(dp=2), model=dict(zero={"dp": 1}), step=BATCH),
}


def loss_fn(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A calibration, what it predicts, and the steps that follow it at once."""

    predicted: float
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted / statistics.median(self.measured) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    topology: dt.Topology
    rounds: tuple[Round, ...]
    table: TraceComparison

    def row(self, name: str) -> str:
        predicted = statistics.median(one.predicted for one in self.rounds)
        measured = statistics.median(s for one in self.rounds for s in one.measured)
        low, _, high = statistics.quantiles((s for one in self.rounds for s in one.measured), n=4)
        errors = sorted(one.error for one in self.rounds)
        return (
            f"| {name} | {1e3 * predicted:.1f} ms | {1e3 * measured:.1f} ms "
            f"({1e3 * low:.1f} to {1e3 * high:.1f}) | {self.error:+.0%} "
            f"({errors[0]:+.0%} to {errors[-1]:+.0%}) |"
        )

    @property
    def error(self) -> float:
        """The median over rounds."""
        return statistics.median(one.error for one in self.rounds)


def measure(configuration: Configuration, rounds: int, steps: int) -> Found:
    torch.manual_seed(0)
    module = GPT(VOCAB, WIDTH, HEADS, BLOCKS, TOKENS, tied=False)
    ids = torch.randint(VOCAB, (SEQUENCES, TOKENS))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    model = dt.parallelize(
        module, configuration.mesh, configuration.placements, **configuration.model
    )
    step = dt.train_step(model, loss_fn, optimizer, **configuration.step)

    def seconds() -> float:
        start = time.perf_counter()
        float(step(ids, ids))
        return time.perf_counter() - start

    found: list[Round] = []
    with dt.launch(configuration.mesh, backend="ray"):
        for _ in range(3):
            seconds()
        for _ in range(rounds):
            topology = dt.calibrate()
            predicted = dt.simulate(step, ids, ids, topology=topology)
            measured = tuple(seconds() for _ in range(steps))
            found.append(Round(predicted=predicted.seconds, measured=measured))
        traces = sorted((dt.trace(step, ids, ids) for _ in range(5)), key=lambda t: t.seconds)
        dt.gather_state_dict(model, optimizer)
    return Found(
        topology=topology,
        rounds=tuple(found),
        table=dt.compare_traces(predicted, traces[len(traces) // 2]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    names = list(CONFIGURATIONS)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--traces", nargs="*", choices=names, default=["tp=2"])
    arguments = parsed(parser, rounds=1, steps=2, only=["tp=2"])
    torch.set_num_threads(1)
    found: dict[str, Found] = {}
    for name in arguments.only:
        before = os.getloadavg()[0]
        found[name] = measure(CONFIGURATIONS[name], arguments.rounds, arguments.steps)
        load = f"load {before:.1f} to {os.getloadavg()[0]:.1f}"
        print(f"{found[name].row(name)} {load}\n    {found[name].topology}", flush=True)
    print("\n| configuration | predicted | measured (quartiles) | error (of rounds) |")
    print("|---|---|---|---|")
    for name, one in found.items():
        print(one.row(name))
    middle = statistics.median(abs(one.error) for one in found.values())
    print(f"\nmedian of |error|: {middle:.0%}")
    for name in arguments.traces:
        if name in found:
            print(f"\n{name}\n{found[name].table}")


if __name__ == "__main__":
    main()
