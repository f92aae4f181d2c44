"""Random ops on DTensors: counter-based ops, whose numbers do not depend on placements.

    rand_like(x)      ->  dt.random_uniform(shape, dtype), placed as x is
    x.bernoulli_(p)   ->  x.copy_(dt.random_uniform(shape, f32) < p)

Ops are rewritten as in a captured graph (frontend/capture/random_ops.py). Each run of a random op
takes the next number of one counter of the process, which `dt.manual_seed` resets, so that a
program has the same results on every mesh. Noise whose shape is not x's is on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from dtensor.api.eager.execute_op import execute
from dtensor.api.eager.op_program import CallKey, OpGraph, with_nodes
from dtensor.api.eager.values import CellTensor
from dtensor.frontend.capture.random_ops import randomise

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt

_FACTORIES = {dt.random_uniform.default, dt.random_normal.default, dt.random_integers.default}
_rewritten: dict[Any, fx.Graph | None] = {}  # by op and arguments; None: no such form


def draw(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a random op on DTensors and return its result; None if it has no counter-based form."""
    if target is aten.native_dropout.default:
        x, p, train = args
        if train is False:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        return dt.dropout.default(x, p, at_seed=0, at_step=0, op=0)
    call = CallKey()
    shape = tuple(call.key(v) for v in (*args, *kwargs.values()))
    metas = tuple((tuple(t.shape), t.stride(), t.dtype) for t in call.operands)
    key = (target, shape, tuple(kwargs), metas)
    if key not in _rewritten:
        structured_args = tuple(call.structure(a) for a in args)
        structured_kwargs = {k: call.structure(v) for k, v in kwargs.items()}
        _rewritten[key] = _rewrite(target, structured_args, structured_kwargs, metas)
    graph = _rewritten[key]
    if graph is None:
        return None
    like = next(x for x in call.operands if isinstance(x, CellTensor))
    noise = _run(graph, call.operands, like)
    return args[0] if target._schema.is_mutable else noise


def _rewrite(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], metas: tuple[Any, ...]
) -> fx.Graph | None:
    """Return the op as a graph of counter-based ops; None if it has no such form."""
    op_graph = OpGraph()
    nodes = [op_graph.read(f"x{i}", *meta) for i, meta in enumerate(metas)]
    node = op_graph.call(target, *with_nodes(args, nodes), **with_nodes(dict(kwargs), nodes))
    op_graph.graph.output(node)
    return op_graph.graph if randomise(op_graph.graph, node, itertools.count()) else None


def _run(graph: fx.Graph, operands: list[Any], like: CellTensor) -> Any:
    """Run a graph op by op. Noise is placed like ``like`` if it has its shape."""
    values: dict[fx.Node, Any] = {}
    remaining = iter(operands)
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])  # type: ignore[misc]
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "output":
            return args[0]
        elif node.target in _FACTORIES:
            values[node] = _draw_like(node.target, args, kwargs, like)
        else:
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("the graph has no output")


def _draw_like(target: Any, args: tuple[Any, ...], kwargs: Any, like: CellTensor) -> Any:
    """Return noise, placed like ``like`` if it has its shape, else replicated."""
    size, dtype = args[0], args[-1]
    noise: Any = like.new_empty(size, dtype=dtype)
    cell = noise._cell
    pinned = cell.layout.spec.sharding
    (value,) = execute(target, (list(size), *args[1:]), kwargs, pinned=pinned, like=cell).values
    assert value is not None
    cell.set(value)
    return noise
