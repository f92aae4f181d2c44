"""One op on DTensors as a program: a graph of this op, planned as `dt.compile` plans a graph.

    relu of f32[8,16]{sum@tp}   ->   Graph(relu)  ->  Dataflow  ->  Plan:  all_reduce, relu
    x.t()[0].mul_(2)    ->   permute, select, mul, select_scatter, permute; placed as x is

The graph includes the views through which the op reads its operands and, for an in-place op, the
ops that write the new value back through these views. Invariants: planning launches and computes
nothing. Numbers that an optimizer changes from step to step are inputs of the program
(`RunNumber`), unless a decomposition folds them.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from dtensor.api.eager.errors import op_name
from dtensor.api.eager.policy import moves_of
from dtensor.api.eager.values import ViewStep
from dtensor.api.eager.views import functional, write_back
from dtensor.api.store.handle import Layout, layout_of
from dtensor.errors import PlanningError
from dtensor.frontend.capture.decompose import (
    GraphAndConstants,
    decompose,
    has_rule,
    lift_constants,
)
from dtensor.frontend.capture.simplify import simplify
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Arg, Graph, OutTree, Result, op_call
from dtensor.private_torch import FakeTensorMode, OpOverload, pytree
from dtensor.sharding.ops.call import Operand, RunNumber, run_number_names
from dtensor.sharding.plan.dataflow import Dataflow, Output
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import Request
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Partial, Placement, Shard
from dtensor.sharding.spec.spec import TensorSpec, alike

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@cache
def fake_mode() -> FakeTensorMode:
    """Return the fake mode of all ops. It is made at first use, because this loads torch's
    compiler, and Triton if it is installed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within the block, new tensors are fake, and torch does not also log errors that it raises."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        with fake_mode(), torch.no_grad():
            yield
    finally:
        _LOG.disabled = before


def fake(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with fake_tensors():
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


# -- the request, and the answer -----------------------------------------------------------


@dataclass(slots=True)
class CallKey:
    """Collects the tensors and run numbers of an op's call while `key` walks its arguments."""

    operands: list[Any] = field(default_factory=list)  # DTensors, and plain tensors of one element
    index_of: dict[int, int] = field(default_factory=dict)  # by id of the tensor, its index there
    numbers: list[float] = field(default_factory=list)

    def key(self, value: Any, *, is_run_number: bool = False) -> Any:
        """Return the part of the plan's key for an argument. ``is_run_number``: a float is a number
        of the run, and the plan depends only on whether it is 0."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is float:
            if is_run_number:
                self.numbers.append(value)
                return (RunNumber, value == 0.0)
            return (float, repr(value))  # 0.0, -0.0, 1 and True differ; all NaNs are equal
        if kind is list or kind is tuple:
            return (kind, *(self.key(v) for v in value))
        if kind is bool or kind is complex:
            return (kind, repr(value))
        return value

    def _tensor(self, tensor: torch.Tensor) -> Any:
        """Return the key of a tensor operand, and record the tensor at its first occurrence."""
        index = self.index_of.get(id(tensor))
        if index is None:
            index = self.index_of[id(tensor)] = len(self.operands)
            self.operands.append(tensor)
        return (torch.Tensor, index)

    def structure(self, value: Any, numbers: list[str] | None = None) -> Any:
        """Return the argument with `Operand`s in place of tensors, and with `RunNumber`s in place
        of floats if ``numbers`` is a list, to which it adds their names."""
        if isinstance(value, torch.Tensor):
            return Operand(self.index_of[id(value)])
        if isinstance(value, (list, tuple)):
            return type(value)(self.structure(v) for v in value)
        if numbers is not None and type(value) is float:
            numbers.append(f"number_{len(numbers)}")
            return RunNumber.of(value, numbers[-1])
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOp:
    """The request to plan one op. Its arguments have `Operand`s in place of tensors."""

    target: Any  # None: the result is the operand itself, through its views, or placed otherwise
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[tuple[Layout, ViewStep | None], ...]  # each cell's layout, and the view of it
    labels: tuple[str, ...]  # the names of the operands in torch's schema
    mesh: Mesh
    write: int | None = None  # the index of the operand that the op changes through its views
    pinned: Mapping[str, Placement] | None = None  # of the results, by axis; None: the cheapest


@dataclass(frozen=True, slots=True)
class Reduced:
    """Result ``index`` of the program is the reduced value of operand ``operand``, a pending sum
    that the op needed reduced."""

    index: int
    operand: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """The plan of one op, and how to run it."""

    plan: Plan
    results: tuple[Layout | None, ...]  # of each returned tensor; None if the op returns None there
    structure: type  # the container of the results, or torch.Tensor
    inputs: tuple[str | None, ...]  # each operand's name in the plan; None if it is not read
    constants: Mapping[str, torch.Tensor]  # inputs of the plan that a decomposition made
    folded: bool  # whether numbers were folded in, so that the plan is for these numbers only
    numbers: frozenset[str]  # the numbers that the program reads at each run
    moves: tuple[tuple[str, Move], ...]  # the transfers, with the label of the moved value
    reduced: tuple[Reduced, ...] = ()


# -- the plan --------------------------------------------------------------------------------------


def plan_op(op: OneOp) -> PlannedOp:
    """Plan an op. Raises PlanningError, or torch's own error for operands that the op refuses."""
    built_op = _build_graph(op)
    flow = dataflow(built_op.graph)
    pins: dict[int, Mapping[str, Placement]] = {}
    if op.pinned is not None:
        pins = {int(o.of): op.pinned for o in flow.outputs}
    elif op.write is not None:
        pins = {0: without_pending(op.operands[op.write][0].spec)}
    planned = _plan(op, flow, pins)
    reductions = _reductions(planned) if op.target is not None else []
    if reductions:
        outputs = list(flow.outputs)
        for name, spec in reductions:
            pins[len(outputs)] = spec.sharding
            outputs.append(Output(name, "result", len(outputs)))
        flow = replace(flow, outputs=tuple(outputs))
        planned = _plan(op, flow, pins)
    specs = {int(o.of): _restated_as_pinned(op, o.spec) for o in planned.outputs}
    if any(spec.ragged is not None for spec in specs.values()):  # ops are planned one by one
        raise PlanningError(
            "dt.to_experts takes tokens that are split only in a training step or a compiled "
            "function, which know all ops on the rows.\nfix: dt.compile(function, mesh)"
        )
    num_results = len(built_op.graph.outputs)
    index_of_input = {name: i for i, name in enumerate(built_op.inputs) if name is not None}
    results = iter(range(num_results))
    names_by_op = [run_number_names(s.op.call) for s in planned.steps if s.op is not None]
    return PlannedOp(
        plan=planned,
        results=tuple(
            None if strides is None else layout_of(specs[next(results)], strides)
            for strides in built_op.strides
        ),
        structure=built_op.structure,
        inputs=built_op.inputs,
        constants=built_op.constants,
        numbers=frozenset(name for names in names_by_op for name in names),
        folded=_has_folded_number(flow, planned, built_op.slots),
        moves=moves_of(planned, index_of_input, op.labels),
        reduced=tuple(
            Reduced(num_results + i, index_of_input[name], specs[num_results + i])
            for i, (name, _) in enumerate(reductions)
        ),
    )


def _plan(op: OneOp, flow: Dataflow, results: Mapping[int, Mapping[str, Placement]]) -> Plan:
    """Plan the op's dataflow with the operands' present specs. ``results``: pins by index."""
    specs = {f"operand {i}": layout.spec for i, (layout, _) in enumerate(op.operands)}
    return plan(
        Request(
            name="view" if op.target is None else op_name(op.target),
            flow=flow,
            mesh=op.mesh,
            pins={},
            held={i.name: specs[i.label] for i in flow.inputs if i.label in specs},
            results=results,
            split_results=True,
            pending_results=True,
        )
    )


def _restated_as_pinned(op: OneOp, spec: TensorSpec) -> TensorSpec:
    """Return a result's spec as the user stated it, if the stated spec is equivalent."""
    stated = None
    if op.write is not None:
        stated = op.operands[op.write][0].spec
    elif op.pinned is not None:
        stated = spec.with_placements(**op.pinned)
    if stated is None or stated.shape != spec.shape or stated.dtype != spec.dtype:
        return spec
    return stated if alike(stated, spec) else spec


def without_pending(spec: TensorSpec) -> dict[str, Placement]:
    """Return the placements of a spec without pending sums: an in-place op keeps the others."""
    return {a: p for a, p in spec.sharding.items() if not isinstance(p, Partial)}


def _has_folded_number(flow: Dataflow, planned: Plan, slots: frozenset[str]) -> bool:
    """Return whether a run number is no longer a direct argument of the one op that took it."""
    computed = [step.op for step in planned.steps if step.op is not None]
    in_flow = [run_number_names(op.call) for op in flow.ops if run_number_names(op.call)]
    in_plan = [run_number_names(op.call) for op in computed if run_number_names(op.call)]
    all_computed = len(flow.ops) == len({op.name for op in computed})
    intact = len(in_flow) == len(in_plan) == 1 and set(in_plan[0]) == slots and all_computed
    return bool(slots) and not intact


def _reductions(planned: Plan) -> list[tuple[str, TensorSpec]]:
    """Return the operands that the plan reduces, with their reduced specs. The program returns
    them, so that the next op does not reduce them again."""
    reduced_specs: dict[str, TensorSpec] = {}
    input_of_value: dict[str, str] = {i.name: i.name for i in planned.inputs}
    for step in planned.steps:
        for operand, result, move in zip(step.reads, step.gives, step.moves):
            name = input_of_value.get(operand)
            if name is not None and (name not in reduced_specs or _is_pending(reduced_specs[name])):
                input_of_value[result] = name
                reduced_specs[name] = move.dst
    specs = {item.name: item.spec for item in planned.inputs}
    return [
        (name, dst)
        for name, dst in reduced_specs.items()
        if _is_pending(specs[name]) and not _is_pending(dst)
    ]


def _is_pending(spec: TensorSpec) -> bool:
    return any(isinstance(p, Partial) for p in spec.placements)


# -- the graph -------------------------------------------------------------------------------------


class OpGraph:
    """A graph under construction. Each node gets its result as a fake tensor when it is added."""

    def __init__(self) -> None:
        self.graph: fx.Graph = fx.Graph()

    def read(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> fx.Node:
        """Add a placeholder that stands for a tensor with this shape, strides and dtype."""
        node = self.graph.placeholder(name)
        node.meta["val"] = fake(shape, strides, dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call, and compute its result as a fake tensor."""
        node = self.graph.call_function(target, args, kwargs)
        with fake_tensors():
            node.meta["val"] = target(*_fake_values(args), **_fake_values(kwargs))
        return node


def with_nodes(value: Any, nodes: Sequence[fx.Node]) -> Any:
    """Return arguments with nodes in place of `Operand`s."""

    def node(value: Any) -> Any:
        return nodes[value.index] if isinstance(value, Operand) else value

    return map_aggregate(value, node)


def _fake_values(value: Any) -> Any:
    return fx.map_arg(value, lambda n: n.meta["val"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltOp:
    """An op's graph, and the fields of `PlannedOp` that are known before planning. ``strides``: of
    each result; ``slots``: the names of the call's run numbers."""

    graph: Graph
    strides: tuple[tuple[int, ...] | None, ...]
    structure: type
    inputs: tuple[str | None, ...]
    constants: Mapping[str, torch.Tensor]
    slots: frozenset[str]


def _build_graph(op: OneOp) -> _BuiltOp:
    """Build the graph of an op, with the views of its operands, and simplify it."""
    op_graph = OpGraph()
    roots = [  # with "_", because "self" is not a valid argument name
        op_graph.read(f"{label}_", layout.spec.shape, layout.strides, layout.spec.dtype)
        for label, (layout, _) in zip(op.labels, op.operands, strict=True)
    ]
    chains: list[tuple[fx.Node, ...]] = []  # per operand: the cell, then each view of it
    for root, (_, view) in zip(roots, op.operands, strict=True):
        chain = [root]
        for step in view.steps() if view is not None else ():
            chain.append(op_graph.call(step.target, chain[-1], *step.args))
        chains.append(tuple(chain))
    results, structure = _results(op, op_graph, chains)
    strides = tuple(None if r is None else tuple(r.meta["val"].stride()) for r in results)
    outputs = tuple(r for r in results if r is not None)
    graph = op_graph.graph
    graph.output(outputs)
    constants = _simplify(graph)
    inputs = tuple(root.name if root.users else None for root in roots)
    for root in roots:
        if not root.users:
            graph.erase_node(root)
    for node in graph.nodes:
        if node.op != "output":
            node.meta.update(phase="forward", source=None, module="", seq=None)
            node.meta.update(calls=(), checkpoint=None)
    labels = {root: f"operand {i}" for i, root in enumerate(roots)}
    arguments = tuple(
        Arg(i, labels.get(node) or node.name)
        for i, node in enumerate(graph.find_nodes(op="placeholder"))
    )
    values = (*op.args, *op.kwargs.values())
    return _BuiltOp(
        graph=Graph(
            fx=graph,
            inputs=arguments,
            outputs=tuple(Result(i) for i in range(len(outputs))),
            out_tree=OutTree(pytree.tree_flatten(())[1], (), ()),
        ),
        strides=strides,
        structure=structure,
        inputs=inputs,
        constants=constants,
        slots=frozenset(value.name for value in values if isinstance(value, RunNumber)),
    )


def _results(
    op: OneOp, op_graph: OpGraph, chains: Sequence[tuple[fx.Node, ...]]
) -> tuple[tuple[fx.Node | None, ...], type]:
    """Return the op's results and their container. The result of an in-place op is the new value of
    the written operand's cell."""
    tensors = [chain[-1] for chain in chains]
    if op.target is None:
        return (tensors[0],), torch.Tensor
    args, kwargs = with_nodes(op.args, tensors), with_nodes(dict(op.kwargs), tensors)
    if op.write is not None:
        with fake_tensors():  # raises torch's own errors for shapes and dtypes
            op.target(*_fake_clones(args), **_fake_clones(kwargs))
        layout, view = op.operands[op.write]
        split = any(isinstance(p, Shard) for p in layout.spec.placements)
        new = functional(op_graph.call, op.target, tensors[op.write], args, kwargs)
        return (
            write_back(op_graph.call, view, chains[op.write], new, is_split=split),
        ), torch.Tensor
    node = op_graph.call(op.target, *args, **kwargs)
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return (node,), torch.Tensor
    node.meta["val"] = tuple(val)
    items: list[fx.Node | None] = []
    for i, part in enumerate(val):
        item = None if part is None else op_graph.graph.call_function(operator.getitem, (node, i))
        if item is not None:
            item.meta["val"] = part
        items.append(item)
    return tuple(items), type(val) if type(val) in (tuple, list) else tuple


def _fake_clones(value: Any) -> Any:
    """Return arguments with copies of the nodes' fake tensors, which an in-place op may change."""
    return fx.map_arg(
        value, lambda n: fake(n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype)
    )


def _simplify(graph: fx.Graph) -> dict[str, torch.Tensor]:
    """Simplify and decompose a graph, in place, to ops that have rules. Return the constants that a
    decomposition made, by placeholder."""
    simplify(graph)
    calls = [n for n in graph.nodes if isinstance(n.target, OpOverload)]
    if all(has_rule(op_call(node)[0]) for node in calls):
        return {}
    lifted = GraphAndConstants(graph, {})
    decompose(lifted, fake_mode())
    constants = lift_constants(lifted, fake_mode())
    simplify(graph)
    return {node.name: value for node, value in constants.items()}
