"""What choosing one axis after another costs against choosing both at once.

    python -m benchmarks.planner_loss [--programs 60]

The planner solves each axis exactly, given the axes before it. Here the same ops, options and
prices make one integer program over pairs of placements: its optimum is the joint one. The loss is
(seconds of the planner's choice) / (seconds of the joint optimum) - 1, both under the joint prices:
an op takes the roofline of its doubly split part, a conversion the cheapest path of moves on the
two axes. Printed: transformer blocks under Megatron's pins, and the distribution over random
programs with search="free", where every factor of every op may be split. `plan` takes the cheapest
of several such choices (composite ops written out, the pins followed), which is left out here.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.smallest import parsed
from dtensor.errors import PlanningError
from dtensor.sharding.plan import planner
from dtensor.sharding.plan.choose import choose_axis
from dtensor.sharding.plan.choose.solve import Node, Option, Price, Solution, solve
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.request import Request
from dtensor.sharding.redistribute.moves import seconds
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.placements import REPLICATE, Placement, Shard
from dtensor.sharding.spec.spec import TensorSpec
from tests.sharding.enumerated import evaluate


@dataclass(frozen=True, slots=True)
class Pair:
    """Placements on the two axes; the solver needs no more of a placement than equality."""

    first: Placement
    second: Placement


@dataclass(frozen=True, slots=True)
class Loss:
    """Seconds under the joint prices: of the planner's choice, and of the joint optimum."""

    planned: float
    joint: float

    @property
    def relative(self) -> float:
        return self.planned / self.joint - 1 if self.joint else 0.0


def loss(request: Request) -> Loss:
    """For a request on a mesh of exactly two axes larger than 1, one stage, one microbatch."""
    axes = [a for a, n in request.mesh.shape.items() if n > 1]
    assert len(axes) == 2 and request.stage_axis is None and request.num_microbatches == 1
    recorded: list[tuple[Sequence[Node], Solution]] = []

    def record(nodes: Sequence[Node], price: Price) -> Solution:
        found = solve(nodes, price)
        recorded.append((nodes, found))
        return found

    choose_axis.solve = record  # pyright: ignore
    try:
        planner.plan_flow(request, planner.training_flow(request))
    finally:
        choose_axis.solve = solve
    (first, chose_first), (second, chose_second) = recorded
    model = _Model(request, (axes[0], axes[1]))
    nodes = [model.node(a, b) for a, b in zip(first, second, strict=True)]
    planned = {
        b.name: chose_first.chosen[a.name] * len(b.options) + chose_second.chosen[b.name]
        for a, b in zip(first, second, strict=True)
    }
    spent = evaluate(nodes, planned, model.price)
    return Loss(spent, evaluate(nodes, solve(nodes, model.price).chosen, model.price))


class _Model:
    """The joint options and prices."""

    def __init__(self, request: Request, axes: tuple[str, str]) -> None:
        self.request, self.axes = request, axes
        self.rules = planner.rules_of(request.flow)
        self.ops: dict[str, Op] = {op.name: op for op in request.flow.ops}
        self.cache: dict[tuple[object, ...], float] = {}

    def spec(self, value: str, at: Placement) -> TensorSpec:
        meta, mesh = self.request.flow.metas[value], self.request.mesh
        pair = at if isinstance(at, Pair) else Pair(REPLICATE, REPLICATE)
        placed = dict(zip(self.axes, (pair.first, pair.second), strict=True))
        placements = tuple(placed.get(a, REPLICATE) for a in mesh.axes)
        return TensorSpec(meta.shape, meta.dtype, mesh, placements)

    def price(self, value: str, src: Placement, dst: Placement) -> float:
        key = (self.request.flow.metas[value], src, dst)
        if key not in self.cache:
            ends = self.spec(value, src), self.spec(value, dst)
            self.cache[key] = seconds(*ends, self.request.topology, whole=True)
        return self.cache[key]

    def node(self, first: Node, second: Node) -> Node:
        assert first.name == second.name
        pairs = itertools.product(first.options, second.options)
        return Node(first.name, tuple(self.option(first, a, b) for a, b in pairs), first.group)

    def option(self, node: Node, a: Option, b: Option) -> Option:
        reads = tuple(
            (value, _pair(p, q)) for (value, p), (_, q) in zip(a.reads, b.reads, strict=True)
        )
        writes = tuple(
            (value, _pair(p, q)) for (value, p), (_, q) in zip(a.writes, b.writes, strict=True)
        )
        op = self.ops.get(node.name)
        if op is not None:
            return Option(reads, writes, self.work(op, (*reads, *writes)))
        # the ends of outputs: pending sums may wait, and are then reduced at no latency
        return Option(reads, writes, a.seconds + b.seconds)

    def work(self, op: Op, placed: Sequence[tuple[str, Placement]]) -> float:
        if self.rules[op.name].kind in ("view", "mark"):
            return 0.0
        sizes = [self.request.mesh.axis_size(axis) for axis in self.axes]
        pairs = [p if isinstance(p, Pair) else Pair(REPLICATE, REPLICATE) for _, p in placed]
        splits = [[isinstance(q, Shard) for q in (pair.first, pair.second)] for pair in pairs]
        share = math.prod(
            1 / size if any(split[i] for split in splits) else 1.0 for i, size in enumerate(sizes)
        )
        moved = 0.0
        for (value, _), split in zip(placed, splits, strict=True):
            meta = self.request.flow.metas[value]
            part = math.prod(1 / s if cut else 1.0 for s, cut in zip(sizes, split, strict=True))
            moved += math.prod(meta.shape) * meta.dtype.itemsize * part
        flops = self.rules[op.name].flops * share
        return self.request.topology.compute_seconds(flops=flops, bytes_moved=moved)


def _pair(p: Placement, q: Placement) -> Placement:
    return REPLICATE if p == q == REPLICATE else Pair(p, q)  # pyright: ignore


# -- what is measured ----------------------------------------------------------------------------


def blocks() -> dict[str, Request]:
    """Transformer blocks under Megatron's pins, the batch over dp."""
    from torch import nn

    from dtensor.api.model.stating.stated_placements import (
        input_pins,
        planner_pins,
        resolve_placements,
    )
    from dtensor.frontend.capture.capture import capture
    from dtensor.frontend.dataflow.to_dataflow import dataflow
    from dtensor.sharding.spec.mesh import Mesh
    from tests.models import MLP, Block, CausalSelfAttention
    from tests.plans import MEGATRON

    width, length = 256, 128
    models: dict[str, nn.Module] = {
        "Megatron MLP": MLP(width, 4 * width),
        "attention": CausalSelfAttention(width, 8, bias=True),
        "GPT layer": Block(width, 8, bias=True),
    }
    mesh = Mesh(dp=2, tp=2)
    found: dict[str, Request] = {}
    for name, model in models.items():
        x = torch.zeros(8, length, width)
        graph = capture(_square_loss, (model, x), grads="loss")
        flow = dataflow(graph)
        arguments = {i.label: i.meta for i in flow.inputs if i.kind == "argument"}
        names = [n for n, _ in model.named_parameters()]
        pins = {g: p for g, p in MEGATRON.items() if any(g.strip("*") in n for n in names)}
        named = planner_pins(
            flow,
            resolve_placements(model, mesh, pins),
            input_pins(arguments, dict(dp=Shard(0)), mesh),
        )
        found[name] = Request(
            name=name, flow=flow, mesh=mesh, pins=named.pins, pinned_by=named.pinned_by
        )
    return found


def _square_loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


def random_loss(seed: int) -> Loss:
    """Of one random program on Mesh(a=2, b=2), with search="free"."""
    from dtensor.sharding.spec.mesh import Mesh
    from tests.sharding.programs import (
        flow_of,
        fused,
        random_pins,
        random_program,
        random_topology,
    )

    rng = random.Random(seed)
    flow = fused(flow_of(random_program(rng, loss=False, num_ops=(3, 5))))
    mesh = Mesh(a=2, b=2)
    pins = random_pins(rng, flow, mesh, often=0.2)
    topology = random_topology(rng)
    return loss(
        Request(name="random", flow=flow, mesh=mesh, pins=pins, search="free", topology=topology)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=60, help="random ones")
    given = parsed(parser, programs=2)
    torch.set_num_threads(1)
    print("| program | axis after axis, us | jointly, us | loss |\n|---|---|---|---|")
    for name, request in blocks().items():
        for latency in (5e-6, 0.0):
            topology = replace(Topology(), latency=latency)
            found = loss(replace(request, topology=topology))
            row = f"{found.planned * 1e6:.2f} | {found.joint * 1e6:.2f} | {found.relative:.2%}"
            print(f"| {name}, latency {latency * 1e6:.0f} us | {row} |")
    losses: list[float] = []
    seed = 0
    while len(losses) < given.programs:
        with contextlib.suppress(PlanningError):  # random pins that do not fit the program
            losses.append(random_loss(seed).relative)
        seed += 1
    losses.sort()
    exact = sum(x < 1e-9 for x in losses)
    print(f"\n{len(losses)} random programs: {exact} without loss; ", end="")
    print(
        ", ".join(
            f"{q:.0%} lose at most {losses[int(q * (len(losses) - 1))]:.1%}"
            for q in (0.5, 0.75, 0.9, 1.0)
        )
    )


if __name__ == "__main__":
    main()
