"""What plans predict beside what their programs take, instruction by instruction, on the clock.

    OMP_NUM_THREADS=1 python -m benchmarks.predictions [--only pp]

Training steps of 1 to 4,096 ranks and 1 to 64 microbatches, from those that are all latency to
those that are all work, on the meta device. For each: the predicted seconds (``plan.cost``), the
simulated ones (`dt.simulate`), their ratio, and the seconds of CPU that the prediction, the rest of
the plan's text and the simulation take. Fails where a ratio is further from 1 than 1%, or 5% with a
pipeline.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt
from benchmarks.plan_large import gpt_loss
from benchmarks.predicted_time import MEGATRON
from benchmarks.smallest import parsed
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.words import seconds_text
from tests.models import GPT, MLP

HEAD = """# Predicted and simulated seconds

`{command}`: training steps as their plans
predict them, beside the whole program on the clock; seconds of CPU to predict, to print the rest of
the plan, and to simulate.

| step | ranks | predicted | simulated | ratio | to predict, s | to print, s | to simulate, s |
|---|---|---|---|---|---|---|---|"""
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.predictions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``layers``: of a GPT, 0 of an MLP; ``stages``: of equal numbers of layers."""

    mesh: dt.Mesh
    tp: Mapping[str, Any] | None = None  # the usual placements
    layers: int = 0
    width: int = 16
    rows: int = 8
    tokens: int = 8
    tied: bool = False
    stages: int = 1
    microbatches: int = 1
    schedule: Callable[[int], dt.Schedule] = dt.OneFOneB
    topology: dt.Topology = field(default_factory=dt.Topology)
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    step: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def made(self) -> tuple[dt.TrainStep, tuple[torch.Tensor, torch.Tensor]]:
        with torch.device("meta"):
            module, x = self._module()
        placements = self.tp or (MEGATRON if self.layers else MLPS)
        stated = dict(self.model)
        if self.stages > 1:
            stated["stages"] = {"pp": self._stages()}
        model = dt.parallelize(
            module, self.mesh, placements if "tp" in self.mesh.axes else {}, **stated
        )
        step = dt.train_step(
            model,
            gpt_loss if self.layers else mlp_loss,
            torch.optim.AdamW(module.parameters(), lr=1e-4),
            inputs=dict(dp=dt.Row()) if "dp" in self.mesh.axes else None,
            schedule=self.schedule(self.microbatches),
            topology=self.topology,
            **self.step,
        )
        return step, (x, x)

    def _module(self) -> tuple[nn.Module, torch.Tensor]:
        if not self.layers:
            return MLP(), torch.empty(self.rows, 16)
        vocab, heads = (32, 4) if self.width == 16 else (32000, self.width // 64)
        module = GPT(vocab, self.width, heads, self.layers, self.tokens, tied=self.tied)
        return module, torch.zeros(self.rows, self.tokens, dtype=torch.long)

    def _stages(self) -> list[list[str]]:
        each = self.layers // self.stages
        found = [[f"blocks.{n * each + i}.*" for i in range(each)] for n in range(self.stages)]
        found[0] += ["embed*", "positions*"]
        found[-1] += ["norm*", "head*"]
        return found


def mlp_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


MLPS = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
FEED_FORWARD = {f"*.{name}": placement for name, placement in MLPS.items()}
TINY: dict[str, Any] = dict(layers=4)
MIDDLE: dict[str, Any] = dict(layers=4, width=1024, rows=64, tokens=1024)
WIDE: dict[str, Any] = dict(layers=8, width=4096, rows=512, tokens=2048)
LAPTOP = dt.topologies.laptop()
HOSTS = dt.topologies.h100(nvlink=["tp"], infiniband=["dp", "pp"])

CASES = {
    "MLP of width 16": Case(mesh=dt.Mesh()),
    "MLP of width 16, tp": Case(mesh=dt.Mesh(tp=2)),
    "MLP of width 16, dp, laptop": Case(mesh=dt.Mesh(dp=8), topology=LAPTOP),
    "GPT of width 16, tp, laptop": Case(mesh=dt.Mesh(tp=2), topology=LAPTOP, **TINY),
    "GPT of width 16, dp tp, clipped": Case(
        mesh=dt.Mesh(dp=2, tp=2), step=dict(clip_grad_norm=1.0), **TINY
    ),
    "GPT of width 16, pp, 1F1B of 4, tied": Case(
        mesh=dt.Mesh(pp=2), stages=2, microbatches=4, tied=True, **TINY
    ),
    "GPT of width 16, pp tp, ZBH1 of 8, laptop": Case(
        mesh=dt.Mesh(pp=4, tp=2),
        stages=4,
        microbatches=8,
        schedule=dt.ZBH1,
        topology=LAPTOP,
        **TINY,
    ),
    "GPT of width 1024": Case(mesh=dt.Mesh(), **MIDDLE),
    "GPT of width 1024, tp": Case(mesh=dt.Mesh(tp=8), **MIDDLE),
    "GPT of width 1024, tp, uneven": Case(mesh=dt.Mesh(tp=3), tp=FEED_FORWARD, **MIDDLE),
    "GPT of width 1024, dp": Case(mesh=dt.Mesh(dp=8), **MIDDLE),
    "GPT of width 1024, dp tp": Case(mesh=dt.Mesh(dp=8, tp=8), topology=HOSTS, **MIDDLE),
    "GPT of width 1024, dp, zero 1": Case(
        mesh=dt.Mesh(dp=64), model=dict(zero={"dp": 1}), **MIDDLE
    ),
    "GPT of width 1024, dp, zero 2, 8 microbatches": Case(
        mesh=dt.Mesh(dp=8), model=dict(zero={"dp": 2}), microbatches=8, **MIDDLE
    ),
    "GPT of width 1024, dp, zero 3": Case(
        mesh=dt.Mesh(dp=64), model=dict(zero={"dp": 3}), topology=HOSTS, **MIDDLE
    ),
    "GPT of width 1024, dp tp, zero 3, recomputed, 4 microbatches": Case(
        mesh=dt.Mesh(dp=16, tp=4),
        model=dict(zero={"dp": 3}),
        microbatches=4,
        step=dict(recompute=["blocks.*"]),
        **MIDDLE,
    ),
    "GPT of width 1024, pp, 1 microbatch": Case(mesh=dt.Mesh(pp=4), stages=4, **MIDDLE),
    "GPT of width 1024, pp, 1F1B of 4": Case(
        mesh=dt.Mesh(pp=4), stages=4, microbatches=4, **MIDDLE
    ),
    "GPT of width 1024, pp, 1F1B of 64": Case(
        mesh=dt.Mesh(pp=4), stages=4, microbatches=64, **MIDDLE
    ),
    "GPT of width 1024, pp, GPipe of 8": Case(
        mesh=dt.Mesh(pp=4), stages=4, microbatches=8, schedule=dt.GPipe, **MIDDLE
    ),
    "GPT of width 1024, pp, interleaved 1F1B of 8": Case(
        mesh=dt.Mesh(pp=2), stages=4, microbatches=8, schedule=dt.Interleaved1F1B, **MIDDLE
    ),
    "GPT of width 1024, pp dp, ZBV of 8": Case(
        mesh=dt.Mesh(pp=2, dp=2),
        stages=4,
        microbatches=8,
        schedule=dt.ZBV,
        topology=HOSTS,
        **MIDDLE,
    ),
    "GPT of width 1024, pp dp tp, 1F1B of 8, zero 1, clipped": Case(
        mesh=dt.Mesh(pp=4, dp=2, tp=2),
        stages=4,
        microbatches=8,
        model=dict(zero={"dp": 1}),
        step=dict(clip_grad_norm=1.0),
        topology=HOSTS,
        **MIDDLE,
    ),
    "GPT of width 1024, pp dp, 1F1B of 4, zero 3, recomputed": Case(
        mesh=dt.Mesh(pp=2, dp=4),
        stages=2,
        microbatches=4,
        model=dict(zero={"dp": 3}),
        step=dict(recompute=["blocks.*"]),
        **MIDDLE,
    ),
    "GPT of width 4096, dp tp, zero 1": Case(
        mesh=dt.Mesh(dp=512, tp=8), model=dict(zero={"dp": 1}), topology=HOSTS, **WIDE
    ),
    "GPT of width 4096, pp dp tp, 1F1B of 64": Case(
        mesh=dt.Mesh(pp=8, dp=64, tp=8),
        stages=8,
        microbatches=64,
        topology=HOSTS,
        **{**WIDE, "rows": 64 * 64},
    ),
}


def line(name: str, case: Case) -> str:
    step, batch = case.made()
    plan: Plan = step.plan(*batch)
    seconds: list[float] = []
    for what in (lambda: plan.cost, plan.text, lambda: dt.simulate(step)):
        start = time.process_time()
        what()
        seconds.append(time.process_time() - start)
    simulated = dt.simulate(step).seconds
    ratio = plan.cost.seconds / simulated
    allowed = 0.05 if plan.num_stages > 1 else 0.01
    assert abs(ratio - 1) <= allowed, f"{name}: {plan.cost} and {simulated:.6g} s simulated"
    cells = [
        name,
        f"{plan.mesh.size:,}",
        seconds_text(plan.cost.seconds),
        seconds_text(simulated),
        f"{ratio:.6f}",
        *(f"{each:.3f}" for each in seconds),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this")
    only = parsed(parser, only=next(iter(CASES))).only
    torch.set_num_threads(1)
    print(HEAD.format(command=COMMAND), flush=True)
    for name, case in CASES.items():
        if only in name:
            print(line(name, case), flush=True)


if __name__ == "__main__":
    main()
