"""Decompose ops that have no sharding rule, with torch's decompositions.

    logaddexp(a, b)   ->   max = maximum(a, b); where(isinf(max) & (a == b), max, ...)

Only calls for which `rule_for` finds no rule are decomposed, so that ops with rules keep their
fused kernels. This repeats until all ops have rules or nothing can be decomposed; the planner
refuses ops that still have no rule.

Invariants: new nodes have the line, phase and module of the op that they replace. Random ops are
not decomposed: their numbers would depend on the placement. Tensors that a decomposition creates
are constants of the graph, which `lift_constants` turns into inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from dtensor.frontend.capture.refusals import data_dependent_errors
from dtensor.frontend.graph import op_call
from dtensor.private_torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    decomposition_table,
    pytree,
)
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules.registry import NoRule, rule_for

_COPIED_META = ("partitioner_tag", "seq_nr", "stack_trace", "nn_module_stack", "custom")
Table = Mapping[Any, Callable[..., Any]]


class GraphAndConstants(torch.nn.Module):
    """A graph with the tensors that its get_attr nodes name; unlike a GraphModule, not callable."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)


ModuleWithConstants = GraphAndConstants | fx.GraphModule


def decompose(module: ModuleWithConstants, mode: FakeTensorMode) -> bool:
    """Decompose ops without rules, in place; return whether the graph changed."""
    changed = False
    waiting = [node for node in module.graph.nodes if node.op == "call_function"]
    while waiting:
        node = waiting.pop()
        if not isinstance(node.target, OpOverload) or has_rule(op_call(node)[0]):
            continue
        decomposition = _decomposition(node, mode)
        if decomposition is not None:
            waiting += _replace_by(module, node, decomposition)
            changed = True
    return changed


def lift_constants(
    module: ModuleWithConstants, mode: FakeTensorMode
) -> dict[fx.Node, torch.Tensor]:
    """Replace get_attr nodes by one placeholder per tensor; return the tensors by placeholder."""
    graph = module.graph
    constants: dict[fx.Node, torch.Tensor] = {}
    lifted: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        target = str(node.target)
        if target not in lifted:
            value = module.get_buffer(target)
            # The text of an assertion of torch's joint export; functions.py explains both.
            assert not isinstance(value, FakeTensor), f"Unexpected fake buffer {target}"
            placeholders = graph.find_nodes(op="placeholder")
            with graph.inserting_after(placeholders[-1] if placeholders else None):
                lifted[target] = graph.placeholder(f"const_{len(lifted)}")
            lifted[target].meta["val"] = mode.from_tensor(value)
            constants[lifted[target]] = value.detach().cpu()
        node.replace_all_uses_with(lifted[target])
        graph.erase_node(node)
    return constants


def has_rule(call: OpCall) -> bool:
    try:
        rule_for(call)
    except NoRule:
        return False
    return True


def _decomposition(node: fx.Node, mode: FakeTensorMode) -> fx.GraphModule | None:
    """Return the decomposition of a call as a graph whose placeholders are its tensor arguments in
    order; None if there is no usable decomposition."""
    # Imported here because it loads torch's compiler, and triton if it is installed.
    from torch.fx.experimental.proxy_tensor import make_fx

    target: Any = node.target
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    decomposition = table().get(target)
    if decomposition is None:
        return None
    nodes = node.all_input_nodes
    fakes = [n.meta["val"] for n in nodes]

    def call(*tensors: torch.Tensor) -> Any:
        values = dict(zip(nodes, tensors, strict=True))
        args = _mutable(fx.map_arg(node.args, values.__getitem__))
        kwargs = _mutable(fx.map_arg(node.kwargs, values.__getitem__))
        out = decomposition(*args, **kwargs)
        return tuple(out) if isinstance(out, (tuple, list)) else out  # make_fx traces named tuples

    try:
        with mode, torch.no_grad():
            traced = make_fx(call)(*fakes)
    except data_dependent_errors():
        return None
    for constant in traced.graph.find_nodes(op="get_attr"):
        constant.meta["val"] = mode.from_tensor(getattr(traced, str(constant.target)))
    if not _is_simpler(traced.graph, target) or not _is_equivalent(node, traced):
        return None
    return traced


def _mutable(value: Any) -> Any:
    """Replace the immutable lists and dicts of torch.fx, which some decompositions change."""
    match value:
        case list():
            return [_mutable(v) for v in value]
        case tuple():
            return tuple(_mutable(v) for v in value)
        case dict():
            return {k: _mutable(v) for k, v in value.items()}
        case _:
            return value


def _is_simpler(graph: fx.Graph, target: Any) -> bool:
    """Return whether the decomposition contains neither the op itself nor torch's private prims."""
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    return not any(
        t is target or (isinstance(t, OpOverload) and t.namespace == "prims") for t in targets
    )


def _is_equivalent(node: fx.Node, inner: fx.GraphModule) -> bool:
    """Return whether the decomposition is functional and returns the same shapes and dtypes."""
    if any(
        isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in inner.graph.nodes
    ):
        return False
    old, out = node.meta["val"], inner.graph.output_node().args[0]
    new = fx.map_arg(out, lambda n: n.meta["val"])
    if isinstance(old, (tuple, list)) != isinstance(new, (tuple, list)):
        return False
    olds, news = pytree.tree_leaves(old), pytree.tree_leaves(new)
    return len(olds) == len(news) and all(
        a is None or (b is not None and a.shape == b.shape and a.dtype == b.dtype)
        for a, b in zip(olds, news, strict=True)
    )


def _replace_by(
    module: ModuleWithConstants, node: fx.Node, expansion: fx.GraphModule
) -> list[fx.Node]:
    """Replace the node by its decomposition; return the new calls, which may need decomposition."""
    graph = module.graph
    values: dict[fx.Node, Any] = dict(
        zip(expansion.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True)
    )
    new: list[fx.Node] = []
    out: Any = None
    with graph.inserting_before(node):
        for old in expansion.graph.nodes:
            if old.op == "output":
                out = fx.map_arg(old.args[0], values.__getitem__)
            elif old.op == "get_attr":
                name = _fresh_name(module)
                module.register_buffer(name, getattr(expansion, str(old.target)), persistent=False)
                values[old] = graph.get_attr(name)
                values[old].meta["val"] = old.meta["val"]
            elif old.op == "call_function":
                values[old] = graph.node_copy(old, values.__getitem__)
                values[old].meta = {"val": old.meta["val"]}
                new.append(values[old])
    for new_node in new:
        new_node.meta.update({k: node.meta[k] for k in _COPIED_META if k in node.meta})
    if isinstance(out, (tuple, list)):
        for user in list(node.users):
            assert user.target is operator.getitem, "a tuple is read by its items"
            index: Any = user.args[1]
            user.replace_all_uses_with(out[index])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(out)
    graph.erase_node(node)
    return new


def _fresh_name(module: ModuleWithConstants) -> str:
    index = 0
    while f"_expanded_{index}" in module._buffers:
        index += 1
    return f"_expanded_{index}"


@cache
def table() -> Table:
    """Return torch's decompositions by op, and ours for ops without one. Loads torch's compiler."""
    added = {
        torch.ops.aten._weight_norm_interface_backward.default: _weight_norm_backward,
        torch.ops.aten._new_zeros_with_same_feature_meta.default: _zero_tangent,
    }
    return {**decomposition_table(), **added}


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of w = g v / |v| with respect to v and g; the norm is over all dims but
    ``dim``. ``norms`` may be float32 if v is of 16 bits."""
    other_dims = [d for d in range(v.dim()) if d != dim % v.dim()]
    g_gradient = (grad.to(norms.dtype) * v).sum(other_dims, keepdim=True) / norms
    residual = grad - v * (g_gradient / norms)
    return (g / norms * residual).to(v.dtype), g_gradient.to(g.dtype)


def _zero_tangent(
    tangent: torch.Tensor, x: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """Return zeros like ``x``, into which torch copies a tangent that has other strides than x."""
    shape = (*tangent.shape[:self_num_batch_dims], *x.shape)
    return torch.zeros(shape, dtype=x.dtype, device=x.device)
