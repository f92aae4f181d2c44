"""One op on DTensors as a program: a graph of that op alone, then the compiled path.

    relu of f32[8,16]{sum@tp}   ->   Graph(relu)  ->  Dataflow  ->  Plan:  all_reduce, relu

No `torch.export`: the graph is written down here, with fake tensors for shapes and dtypes. What
follows is the code of `dt.compile`: the same simplification and decomposition, the same planner,
the same lowering. The views through which an op reads its operands are part of its graph, and so
are, for an in-place op, the ops that write the new value back through them:

    x.t()[0].mul_(2)    ->   permute, select, mul, select_scatter, permute; placed as x is

Invariants: planning is pure; it launches and computes nothing. Numbers that an optimizer changes
from step to step are left open (`Slot`) where no decomposition could have folded them.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from dtensor.api.eager.inplace import functional, write_back
from dtensor.api.eager.moves import folded, moves_of, numbers_of, reductions
from dtensor.api.eager.values import Layout, View
from dtensor.frontend.capture.decompose import decompose, has_rule
from dtensor.frontend.capture.simplify import simplify
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Arg, Graph, OutTree, Result
from dtensor.frontend.op_calls import op_call
from dtensor.sharding.ops.call import Operand, Slot
from dtensor.sharding.plan.dataflow import Dataflow, Output
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import Request
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Partial, Placement
from dtensor.sharding.spec.spec import TensorSpec, alike

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@cache
def mode() -> FakeTensorMode:
    """Made at first use: it loads torch's compiler, and with it triton where that is installed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fakes() -> Iterator[None]:
    """Within: tensors are fake. Torch logs each error of a fake op beside raising it: not here."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        with mode(), torch.no_grad():
            yield
    finally:
        _LOG.disabled = before


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOp:
    """What is asked: an op, its arguments with `Operand`s for tensors, and how each is held.

    ``target`` None: the operand itself (a view, or another placement, of it).
    ``write``: the index of the operand that the op changes, seen through its views.
    ``pinned``: placements of the results by axis; where None they come out as they are cheapest.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[tuple[Layout, View | None], ...]
    labels: tuple[str, ...]
    mesh: Mesh
    write: int | None = None
    pinned: Mapping[str, Placement] | None = None


@dataclass(frozen=True, slots=True)
class ResultMeta:
    """A tensor that an op returns; ``strides`` as on one device."""

    spec: TensorSpec
    strides: tuple[int, ...]


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
    ``constants``: plan inputs that a decomposition made. ``folded``: a number was folded in, so
    the plan holds for these numbers alone. ``numbers``: those that the program reads at each run.
    ``moves``: what is sent, by label of what is moved.
    """

    plan: Plan
    results: tuple[ResultMeta | None, ...]
    structure: type
    inputs: tuple[str | None, ...]
    constants: Mapping[str, torch.Tensor]
    folded: bool
    numbers: frozenset[str]
    moves: tuple[tuple[str, Move], ...]
    reduced: tuple[Reduced, ...] = ()


def plan_op(op: OneOp) -> PlannedOp:
    """Raises PlanningError, and torch's own error where the op does not take such operands."""
    built = _Builder(op).build()
    flow = dataflow(built.graph)
    wanted: dict[int, Mapping[str, Placement]] = {}
    if op.pinned is not None:
        wanted = {int(o.of): op.pinned for o in flow.outputs}
    elif op.write is not None:
        wanted = {0: _kept(op.operands[op.write][0].spec)}
    planned = _plan(op, flow, wanted)
    extra = reductions(planned)
    if extra and op.target is not None:
        outputs = list(flow.outputs)
        for name, spec in extra:
            wanted[len(outputs)] = spec.sharding
            outputs.append(Output(name, "result", len(outputs)))
        flow = replace(flow, outputs=tuple(outputs))
        planned = _plan(op, flow, wanted)
    specs = {int(o.of): _as_stated(op, o.spec) for o in planned.outputs}
    own = len(built.graph.outputs)
    places = {name: i for i, name in enumerate(built.inputs) if name is not None}
    results = iter(range(own))
    return PlannedOp(
        plan=planned,
        results=tuple(
            None if strides is None else ResultMeta(specs[next(results)], strides)
            for strides in built.strides
        ),
        structure=built.structure,
        inputs=built.inputs,
        constants=built.constants,
        numbers=numbers_of(planned),
        folded=folded(flow, planned, built.slots),
        moves=moves_of(planned, places, op.labels),
        reduced=tuple(
            Reduced(own + i, places[name], specs[own + i]) for i, (name, _) in enumerate(extra)
        )
        if op.target is not None
        else (),
    )


def _plan(op: OneOp, flow: Dataflow, results: Mapping[int, Mapping[str, Placement]]) -> Plan:
    places = {f"operand {i}": layout.spec for i, (layout, _) in enumerate(op.operands)}
    return plan(
        Request(
            name=_short(op.target),
            flow=flow,
            mesh=op.mesh,
            pins={},
            held={i.name: places[i.label] for i in flow.inputs if i.label in places},
            results=results,
            split_results=True,
            pending_results=True,
        )
    )


def _as_stated(op: OneOp, spec: TensorSpec) -> TensorSpec:
    """A result in the words of what it was pinned to, where both hold the same."""
    stated = None
    if op.write is not None:
        stated = op.operands[op.write][0].spec
    elif op.pinned is not None:
        stated = spec.with_placements(**op.pinned)
    if stated is None or stated.shape != spec.shape or stated.dtype != spec.dtype:
        return spec
    return stated if alike(stated, spec) else spec


def _short(target: Any) -> str:
    return "view" if target is None else str(target._schema.name).split("::")[1]


def _kept(spec: TensorSpec) -> dict[str, Placement]:
    """What an in-place op leaves as it is: all but pending sums, which may end."""
    return {a: p for a, p in spec.sharding.items() if not isinstance(p, Partial)}


# -- the graph ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    graph: Graph
    strides: tuple[tuple[int, ...] | None, ...]
    structure: type
    inputs: tuple[str | None, ...]
    constants: Mapping[str, torch.Tensor]
    slots: frozenset[str]


class _Builder:
    def __init__(self, op: OneOp) -> None:
        self.op = op
        self.graph = fx.Graph()
        self.roots: list[fx.Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with fakes():
            node.meta["val"] = target(*_vals(args), **_vals(kwargs))
        return node

    def build(self) -> _Built:
        op = self.op
        seen: list[tuple[fx.Node, ...]] = []  # per operand: the whole, then each view of it
        roots = self.roots
        for label, (layout, _) in zip(op.labels, op.operands, strict=True):
            node = self.graph.placeholder(f"{label}_")  # self is no name for an argument
            node.meta["val"] = fake(layout.spec.shape, layout.strides, layout.spec.dtype)
            roots.append(node)
        for node, (_, view) in zip(roots, op.operands, strict=True):
            chain = [node]
            for step in view.steps() if view is not None else ():
                chain.append(self.call(step.target, chain[-1], *step.args))
            seen.append(tuple(chain))
        values = self._values([chain[-1] for chain in seen], seen)
        strides = tuple(None if v is None else tuple(v.meta["val"].stride()) for v in values.items)
        outputs = [v for v in values.items if v is not None]
        self.graph.output(tuple(outputs))
        constants = self._simplify()
        roots = self.roots
        inputs = self._inputs(roots)
        for node in self.graph.nodes:
            if node.op != "output":
                node.meta.update(phase="forward", source=None, module="", seq=None)
                node.meta.update(calls=(), checkpoint=None)
        places = {node: f"operand {i}" for i, node in enumerate(roots)}
        arguments = tuple(
            Arg(i, places.get(node) or node.name)
            for i, node in enumerate(self.graph.find_nodes(op="placeholder"))
        )
        return _Built(
            graph=Graph(
                fx=self.graph,
                inputs=arguments,
                outputs=tuple(Result(i) for i in range(len(outputs))),
                aliases=MappingProxyType({}),
                out_tree=OutTree(pytree.tree_flatten(())[1], (), ()),
            ),
            strides=strides,
            structure=values.structure,
            inputs=inputs,
            constants=constants,
            slots=frozenset(_slots(op.args) | _slots(tuple(op.kwargs.values()))),
        )

    def _values(self, tensors: list[fx.Node], seen: list[tuple[fx.Node, ...]]) -> _Values:
        """What the op returns; for an in-place op, the whole that its operand is a view of."""
        op = self.op
        if op.target is None:
            return _Values((tensors[0],), torch.Tensor)

        def place(value: Any) -> Any:
            return tensors[value.index] if isinstance(value, Operand) else value

        args = map_aggregate(op.args, place)
        kwargs = map_aggregate(dict(op.kwargs), place)
        if op.write is not None:
            with fakes():  # torch's own errors for shapes and dtypes
                op.target(*_clones(args), **_clones(kwargs))
            changed = functional(self.call, op.target, tensors[op.write], args, kwargs)
            return _Values((write_back(self.call, op, seen[op.write], changed),), torch.Tensor)
        node = self.call(op.target, *args, **kwargs)
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            return _Values((node,), torch.Tensor)
        node.meta["val"] = tuple(val)
        items: list[fx.Node | None] = []
        for i, part in enumerate(val):
            item = None if part is None else self.graph.call_function(operator.getitem, (node, i))
            if item is not None:
                item.meta["val"] = part
            items.append(item)
        return _Values(tuple(items), type(val) if type(val) in (tuple, list) else tuple)

    def _simplify(self) -> dict[str, torch.Tensor]:
        simplify(self.graph)
        calls = [n for n in self.graph.nodes if isinstance(n.target, OpOverload)]
        if all(has_rule(op_call(node)[0]) for node in calls):
            return {}
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        places = dict(zip(self.graph.nodes, module.graph.nodes, strict=True))
        self.roots = [places[node] for node in self.roots]
        self.graph = module.graph
        decompose(module, mode())
        constants = self._lift(module)
        simplify(self.graph)
        return constants

    def _lift(self, module: fx.GraphModule) -> dict[str, torch.Tensor]:
        """Tensors that a decomposition made become placeholders, fed at each run."""
        found: dict[str, torch.Tensor] = {}
        for node in self.graph.find_nodes(op="get_attr"):
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                placeholder = self.graph.placeholder(f"constant_{len(found)}")
            placeholder.meta["val"] = node.meta["val"]
            found[placeholder.name] = module.get_buffer(str(node.target)).detach()
            node.replace_all_uses_with(placeholder)
            self.graph.erase_node(node)
        return found

    def _inputs(self, roots: list[fx.Node]) -> tuple[str | None, ...]:
        """Each operand's name; what is not read is dropped."""
        names: list[str | None] = []
        for node in roots:
            names.append(node.name if node.users else None)
            if not node.users:
                self.graph.erase_node(node)
        return tuple(names)


@dataclass(frozen=True, slots=True)
class _Values:
    items: tuple[fx.Node | None, ...]
    structure: type


def fake(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with fakes():
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def _vals(value: Any) -> Any:
    return fx.map_arg(value, lambda n: n.meta["val"])


def _clones(value: Any) -> Any:
    """Fake values that an in-place op may change."""
    return fx.map_arg(
        value, lambda n: fake(n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype)
    )


def _slots(values: tuple[Any, ...]) -> set[str]:
    return {value.name for value in values if isinstance(value, Slot)}
