"""From a captured graph to the planner's Dataflow: operands named, stages assigned.

    dataflow(graph, {"embed.weight": (0,), "head.weight": (1,)}, num_stages=2)

Not here: on which stage an op runs (assign_stages.py).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.fx

from dtensor.frontend.dataflow.assign_stages import Stages, staged
from dtensor.frontend.dataflow.composites import COMPOSITES, OVER_BATCH, expansion
from dtensor.frontend.graph import (
    Arg,
    Const,
    Grad,
    Graph,
    ModuleBuffer,
    Mutation,
    Param,
    Result,
    Tangent,
    meta_of,
    op_call,
)
from dtensor.sharding.ops.call import Meta, with_run_numbers
from dtensor.sharding.plan.dataflow import Dataflow, Input, Op, Output


def dataflow(
    graph: Graph,
    stages: Stages | None = None,
    num_stages: int = 1,
    homes: Stages | None = None,
    at: Mapping[str, int] | None = None,
) -> Dataflow:
    """The Dataflow of ``graph``. ``stages``: parameter or buffer name to the stages that hold it;
    ``homes``: by each of their names; ``at``: name of an argument to the stage on which it lies;
    see assign_stages.py.

    Raises PlanningError where an op would need a parameter of a stage before its inputs'.
    """
    flow = _ops(graph)
    return flow if num_stages == 1 else staged(flow, stages or {}, num_stages, homes, at)


# -- ops -----------------------------------------------------------------------------------------


def _ops(graph: Graph) -> Dataflow:
    inputs: list[Input] = []
    names: dict[torch.fx.Node, str | tuple[str | None, ...]] = {}
    ops: list[Op] = []
    outputs: list[Output] = []
    entries = iter(graph.inputs)
    held = {e.name for e in graph.inputs if isinstance(e, (Param, ModuleBuffer))}
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            inputs.append(_input(node, next(entries), held))
            names[node] = node.name
        elif node.op == "output":
            values = cast(Iterable[Any], node.args[0])
            for value, of in zip(values, graph.outputs, strict=True):
                outputs.append(_output(names[value], of, held))
        elif node.target is operator.getitem:
            parts = names[cast(torch.fx.Node, node.args[0])]
            name = parts[cast(int, node.args[1])]
            assert name is not None
            names[node] = name
        else:
            op = _op(node, names)
            names[node] = op.results if op.call.multiple else cast(str, op.results[0])
            ops.append(op)
    flow = Dataflow(inputs=tuple(inputs), ops=tuple(ops), outputs=tuple(outputs))
    return replace(flow, recognised=graph.recognised, autocast=graph.autocast)


def _label(entry: Arg, held: Collection[str]) -> str:
    """What an argument is called: apart from a parameter or buffer of its name."""
    return f"{entry.name} (argument)" if entry.name in held else entry.name


def _input(node: torch.fx.Node, entry: object, held: Collection[str]) -> Input:
    meta = meta_of(node.meta["val"])
    match entry:
        case Param(name):
            return Input(name=node.name, meta=meta, kind="parameter", label=name)
        case ModuleBuffer(name):
            return Input(name=node.name, meta=meta, kind="buffer", label=name)
        case Arg():
            return Input(name=node.name, meta=meta, kind="argument", label=_label(entry, held))
        case Const(name, value):
            return Input(name=node.name, meta=meta, kind="constant", label=name, constant=value)
        case Tangent(output):
            return Input(name=node.name, meta=meta, kind="tangent", label=f"tangent {output}")
        case _:
            raise AssertionError(f"unknown graph input {entry!r}")


def _output(name: object, of: object, held: Collection[str]) -> Output:
    assert isinstance(name, str)
    match of:
        case Result(index):
            return Output(name, "result", index)
        case Grad(Param(label) | ModuleBuffer(label)):
            return Output(name, "gradient", label)
        case Grad(Arg() as entry):
            return Output(name, "gradient", _label(entry, held))
        case Mutation(label, None):
            return Output(name, "mutation", label)
        case Mutation(label, int(index)):
            return Output(name, "mutation", _label(Arg(index, label), held))
        case _:
            raise AssertionError(f"unknown graph output {of!r}")


def _op(node: torch.fx.Node, names: Mapping[torch.fx.Node, Any]) -> Op:
    call, operands = op_call(node)
    call = with_run_numbers(call)
    taken: list[str] = []
    for operand in operands:
        name = names[operand]
        assert isinstance(name, str), f"{node.name} takes a tuple"
        taken.append(name)
    parts: list[str | None] = [node.name]
    if call.multiple:
        parts = _part_names(node, call.results)
    source = node.meta.get("source")
    return Op(
        name=node.name,
        call=call,
        operands=tuple(taken),
        results=tuple(parts),
        phase=node.meta["phase"],
        source=str(source) if source else "",
        source_text=source.text.strip() if source else "",
        module=node.meta.get("module", ""),
        calls=node.meta["calls"],
        checkpoint=node.meta["checkpoint"],
        seq=node.meta.get("seq"),
        expand=expansion if call.name in COMPOSITES else None,
        over_batch=call.name in OVER_BATCH,
    )


def _part_names(node: torch.fx.Node, results: Sequence[Meta | None]) -> list[str | None]:
    """Names for the tensors of a tuple: the user's where there are any, else the op's own."""
    users = {
        u.args[1]: u.name
        for u in node.users
        if u.target is operator.getitem and not u.name.startswith("getitem")
    }
    return [
        None if meta is None else users.get(i, f"{node.name}_out{i}" if i else node.name)
        for i, meta in enumerate(results)
    ]
