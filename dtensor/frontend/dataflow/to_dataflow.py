"""Convert a captured graph to the planner's Dataflow, with a stage for each op.

dataflow(graph, {"embed.weight": (0,), "head.weight": (1,)}, num_stages=2)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.fx

from dtensor.frontend.dataflow.assign_stages import Stages, assign_stages
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
    """Return the Dataflow of ``graph``. `assign_stages` documents the other arguments.

    Raises PlanningError if an op needs a parameter of an earlier stage than the op's inputs.
    """
    flow = _ops(graph)
    return flow if num_stages == 1 else assign_stages(flow, stages or {}, num_stages, homes, at)


def _ops(graph: Graph) -> Dataflow:
    """Return the Dataflow without stages."""
    inputs: list[Input] = []
    names: dict[torch.fx.Node, str | tuple[str | None, ...]] = {}
    ops: list[Op] = []
    outputs: list[Output] = []
    graph_inputs = iter(graph.inputs)
    module_names = {x.name for x in graph.inputs if isinstance(x, (Param, ModuleBuffer))}
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            inputs.append(_input(node, next(graph_inputs), module_names))
            names[node] = node.name
        elif node.op == "output":
            values = cast(Iterable[Any], node.args[0])
            for value, graph_output in zip(values, graph.outputs, strict=True):
                outputs.append(_output(names[value], graph_output, module_names))
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


def _label(argument: Arg, module_names: Collection[str]) -> str:
    """Return an argument's label, which differs from all names of parameters and buffers."""
    name = argument.name
    return f"{name} (argument)" if name in module_names else name


def _input(node: torch.fx.Node, graph_input: object, module_names: Collection[str]) -> Input:
    name, meta = node.name, meta_of(node.meta["val"])
    match graph_input:
        case Param(label):
            return Input(name=name, meta=meta, kind="parameter", label=label)
        case ModuleBuffer(label):
            return Input(name=name, meta=meta, kind="buffer", label=label)
        case Arg():
            label = _label(graph_input, module_names)
            return Input(name=name, meta=meta, kind="argument", label=label)
        case Const(label, value):
            return Input(name=name, meta=meta, kind="constant", label=label, constant=value)
        case Tangent(output):
            return Input(name=name, meta=meta, kind="tangent", label=f"tangent {output}")
        case _:
            raise AssertionError(f"unknown graph input {graph_input!r}")


def _output(value: object, graph_output: object, module_names: Collection[str]) -> Output:
    assert isinstance(value, str)
    match graph_output:
        case Result(index):
            return Output(value, "result", index)
        case Grad(Param(label) | ModuleBuffer(label)):
            return Output(value, "gradient", label)
        case Grad(Arg() as argument):
            return Output(value, "gradient", _label(argument, module_names))
        case Mutation(label, None):
            return Output(value, "mutation", label)
        case Mutation(label, int(index)):
            return Output(value, "mutation", _label(Arg(index, label), module_names))
        case _:
            raise AssertionError(f"unknown graph output {graph_output!r}")


def _op(node: torch.fx.Node, names: Mapping[torch.fx.Node, Any]) -> Op:
    """Return the dataflow's op for a node of the graph."""
    call, operand_nodes = op_call(node)
    call = with_run_numbers(call)
    operands: list[str] = []
    for operand in operand_nodes:
        name = names[operand]
        assert isinstance(name, str), f"{node.name} takes a tuple"
        operands.append(name)
    results: list[str | None] = [node.name]
    if call.multiple:
        results = _result_names(node, call.results)
    source = node.meta.get("source")
    return Op(
        name=node.name,
        call=call,
        operands=tuple(operands),
        results=tuple(results),
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


def _result_names(node: torch.fx.Node, results: Sequence[Meta | None]) -> list[str | None]:
    """Return names for the results of an op: the user's variables, else "split", "split_out1"."""
    variables = {
        u.args[1]: u.name
        for u in node.users
        if u.target is operator.getitem and not u.name.startswith("getitem")
    }
    return [
        None if meta is None else variables.get(i, f"{node.name}_out{i}" if i else node.name)
        for i, meta in enumerate(results)
    ]
