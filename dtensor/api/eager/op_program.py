"""One op on DTensors as a program: a graph of that op alone, then the compiled path.

    relu of f32[8,16]{sum@tp}   ->   Graph(relu)  ->  Dataflow  ->  Plan:  all_reduce, relu

No `torch.export`: the graph is built here, with fake tensors for shapes and dtypes. The rest is the
code of `dt.compile`: the same simplification and decomposition, the same planner, the same
lowering. The views through which an op reads its operands are part of its graph, and so are, for an
in-place op, the ops that write the new value back through them:

    x.t()[0].mul_(2)    ->   permute, select, mul, select_scatter, permute; placed as x is

Invariants: planning is pure; it launches and computes nothing. Numbers that an optimizer changes
from step to step stay open (`RunNumber`) if no decomposition could have folded them.
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
from dtensor.sharding.ops.call import Operand, RunNumber, slots_of
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
    """Made at first use: it loads torch's compiler, and triton if that is installed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within, tensors are fake. Torch logs each error of a fake op besides raising it; here it does
    not."""
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
    """An op's call in parts; a plan depends on ``key``."""

    operands: list[Any] = field(default_factory=list)  # DTensors, and plain tensors of one element
    places: dict[int, int] = field(default_factory=dict)  # by id of the tensor
    numbers: list[float] = field(default_factory=list)

    def key(self, value: Any, *, is_open: bool = False) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is float:
            if is_open:
                self.numbers.append(value)
                return (RunNumber, value == 0.0)
            return (float, repr(value))  # so that 0.0, -0.0, 1 and True are four keys, nan one
        if kind is list or kind is tuple:
            return (kind, *(self.key(v) for v in value))
        if kind is bool or kind is complex:
            return (kind, repr(value))
        return value

    def _tensor(self, tensor: torch.Tensor) -> Any:
        place = self.places.get(id(tensor))
        if place is None:
            place = self.places[id(tensor)] = len(self.operands)
            self.operands.append(tensor)
        return (torch.Tensor, place)

    def structure(self, value: Any, numbers: list[str] | None = None) -> Any:
        """The argument with `Operand`s for tensors, and `RunNumber`s for open numbers."""
        if isinstance(value, torch.Tensor):
            return Operand(self.places[id(value)])
        if isinstance(value, (list, tuple)):
            return type(value)(self.structure(v) for v in value)
        if numbers is not None and type(value) is float:
            numbers.append(f"number_{len(numbers)}")
            return RunNumber.of(value, numbers[-1])
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOp:
    """The request: an op, its arguments with `Operand`s for tensors, and the spec of each.

    ``target`` None: the operand itself (a view, or another placement, of it). ``labels``: the names
    of operands in torch's schema. ``write``: the index of the operand that the op changes, chains
    through its views. ``pinned``: placements of the results by axis; None: the cheapest ones.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[tuple[Layout, ViewStep | None], ...]
    labels: tuple[str, ...]
    mesh: Mesh
    write: int | None = None
    pinned: Mapping[str, Placement] | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """Result ``index`` of the program is operand ``operand``, reduced on the op's behalf."""

    index: int
    operand: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """``results``: one per returned tensor, None where the op returns None.

    ``inputs``: the plan's name for each operand, None where the program does not read it.
    ``constants``: plan inputs that a decomposition made. ``folded``: a number was folded in, so the
    plan holds for these numbers alone. ``numbers``: those that the program reads at each run.
    ``moves``: the transfers, by label of the moved value.
    """

    plan: Plan
    results: tuple[Layout | None, ...]
    structure: type
    inputs: tuple[str | None, ...]
    constants: Mapping[str, torch.Tensor]
    folded: bool
    numbers: frozenset[str]
    moves: tuple[tuple[str, Move], ...]
    reduced: tuple[Reduced, ...] = ()


# -- the plan --------------------------------------------------------------------------------------


def plan_op(op: OneOp) -> PlannedOp:
    """Raises PlanningError, and torch's own error where the op does not take such operands."""
    built = _build(op)
    flow = dataflow(built.graph)
    wanted: dict[int, Mapping[str, Placement]] = {}
    if op.pinned is not None:
        wanted = {int(o.of): op.pinned for o in flow.outputs}
    elif op.write is not None:
        wanted = {0: without_pending(op.operands[op.write][0].spec)}
    planned = _plan(op, flow, wanted)
    extra = _reductions(planned) if op.target is not None else []
    if extra:
        outputs = list(flow.outputs)
        for name, spec in extra:
            wanted[len(outputs)] = spec.sharding
            outputs.append(Output(name, "result", len(outputs)))
        flow = replace(flow, outputs=tuple(outputs))
        planned = _plan(op, flow, wanted)
    specs = {int(o.of): _restated_as_pinned(op, o.spec) for o in planned.outputs}
    num_results = len(built.graph.outputs)
    places = {name: i for i, name in enumerate(built.inputs) if name is not None}
    results = iter(range(num_results))
    slots = [slots_of(s.op.call) for s in planned.steps if s.op is not None]
    return PlannedOp(
        plan=planned,
        results=tuple(
            None if strides is None else layout_of(specs[next(results)], strides)
            for strides in built.strides
        ),
        structure=built.structure,
        inputs=built.inputs,
        constants=built.constants,
        numbers=frozenset(name for names in slots for name in names),
        folded=_has_folded_number(flow, planned, built.slots),
        moves=moves_of(planned, places, op.labels),
        reduced=tuple(
            Reduced(num_results + i, places[name], specs[num_results + i])
            for i, (name, _) in enumerate(extra)
        ),
    )


def _plan(op: OneOp, flow: Dataflow, results: Mapping[int, Mapping[str, Placement]]) -> Plan:
    places = {f"operand {i}": layout.spec for i, (layout, _) in enumerate(op.operands)}
    return plan(
        Request(
            name="view" if op.target is None else op_name(op.target),
            flow=flow,
            mesh=op.mesh,
            pins={},
            held={i.name: places[i.label] for i in flow.inputs if i.label in places},
            results=results,
            split_results=True,
            pending_results=True,
        )
    )


def _restated_as_pinned(op: OneOp, spec: TensorSpec) -> TensorSpec:
    """A result in the terms of its pins, if both specs hold the same."""
    stated = None
    if op.write is not None:
        stated = op.operands[op.write][0].spec
    elif op.pinned is not None:
        stated = spec.with_placements(**op.pinned)
    if stated is None or stated.shape != spec.shape or stated.dtype != spec.dtype:
        return spec
    return stated if alike(stated, spec) else spec


def without_pending(spec: TensorSpec) -> dict[str, Placement]:
    """Return the placements of a spec that are no pending sums, as an in-place op keeps them."""
    return {a: p for a, p in spec.sharding.items() if not isinstance(p, Partial)}


def _has_folded_number(flow: Dataflow, planned: Plan, slots: frozenset[str]) -> bool:
    """Whether a number of the call is no longer a direct argument of the one op that took it."""
    computed = [step.op for step in planned.steps if step.op is not None]
    taken = [slots_of(op.call) for op in flow.ops if slots_of(op.call)]
    run = [slots_of(op.call) for op in computed if slots_of(op.call)]
    whole = len(flow.ops) == len({op.name for op in computed})
    return bool(slots) and not (len(taken) == len(run) == 1 and set(run[0]) == slots and whole)


def _reductions(planned: Plan) -> list[tuple[str, TensorSpec]]:
    """The operands that the plan reduces, and their reduced specs: the next op need not reduce
    again."""
    reduced: dict[str, TensorSpec] = {}
    current: dict[str, str] = {i.name: i.name for i in planned.inputs}
    for step in planned.steps:
        for operand, result, move in zip(step.reads, step.gives, step.moves):
            name = current.get(operand)
            if name is not None and (name not in reduced or _is_pending(reduced[name])):
                current[result] = name
                reduced[name] = move.dst
    specs = {item.name: item.spec for item in planned.inputs}
    return [
        (name, dst)
        for name, dst in reduced.items()
        if _is_pending(specs[name]) and not _is_pending(dst)
    ]


def _is_pending(spec: TensorSpec) -> bool:
    return any(isinstance(p, Partial) for p in spec.placements)


# -- the graph -------------------------------------------------------------------------------------


class OpGraph:
    """A graph under construction: each node's result is known, as a fake tensor, when it is
    added."""

    def __init__(self) -> None:
        self.graph: fx.Graph = fx.Graph()

    def read(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = fake(shape, strides, dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with fake_tensors():
            node.meta["val"] = target(*_fake_values(args), **_fake_values(kwargs))
        return node


def with_nodes(value: Any, nodes: Sequence[fx.Node]) -> Any:
    """Arguments with nodes in place of `Operand`s."""

    def node(value: Any) -> Any:
        return nodes[value.index] if isinstance(value, Operand) else value

    return map_aggregate(value, node)


def _fake_values(value: Any) -> Any:
    return fx.map_arg(value, lambda n: n.meta["val"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    graph: Graph
    strides: tuple[tuple[int, ...] | None, ...]
    structure: type
    inputs: tuple[str | None, ...]
    constants: Mapping[str, torch.Tensor]
    slots: frozenset[str]


def _build(op: OneOp) -> _Built:
    op_graph = OpGraph()
    roots = [  # self is no valid argument name
        op_graph.read(f"{label}_", layout.spec.shape, layout.strides, layout.spec.dtype)
        for label, (layout, _) in zip(op.labels, op.operands, strict=True)
    ]
    chains: list[tuple[fx.Node, ...]] = []  # per operand: the whole, then each view of it
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
    return _Built(
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
    """The op's results, and their container; for an in-place op, the whole of its operand."""
    tensors = [chain[-1] for chain in chains]
    if op.target is None:
        return (tensors[0],), torch.Tensor
    args, kwargs = with_nodes(op.args, tensors), with_nodes(dict(op.kwargs), tensors)
    if op.write is not None:
        with fake_tensors():  # torch's own errors for shapes and dtypes
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
    """Fake values that an in-place op may change."""
    return fx.map_arg(
        value, lambda n: fake(n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype)
    )


def _simplify(graph: fx.Graph) -> dict[str, torch.Tensor]:
    """Simplify it in place, to ops that have rules; returns tensors of a decomposition, by
    placeholder."""
    simplify(graph)
    calls = [n for n in graph.nodes if isinstance(n.target, OpOverload)]
    if all(has_rule(op_call(node)[0]) for node in calls):
        return {}
    lifted = GraphAndConstants(graph, {})
    decompose(lifted, fake_mode())
    constants = lift_constants(lifted, fake_mode())
    simplify(graph)
    return {node.name: value for node, value in constants.items()}
