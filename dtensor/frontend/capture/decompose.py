"""Ops that no rule covers, written as ops that rules cover, by torch's own decompositions.

    logaddexp(a, b)   ->   max = maximum(a, b); where(isinf(max) & (a == b), max, ...)

An op is expanded only where `rule_for` has nothing to say of this call, so an op with a rule of its
own stays whole, with its fused kernel. The expansion is repeated until all has a rule or nothing is
left to expand; what then lacks a rule is refused by the planner, under the user's line.

Invariants: values are those of torch's decomposition; the new nodes have the line, the phase and
the module of the op that they replace. Random ops are never expanded: their numbers would depend
on the placement. Tensors that a decomposition makes are constants of the graph, which become inputs
(`lift_constants`). Not here: rewrites to ops of the project (canonical.py), alternatives that the
planner prices (dataflow/composites.py).
"""

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

_KEPT = ("partitioner_tag", "seq_nr", "stack_trace", "nn_module_stack", "custom")
Table = Mapping[Any, Callable[..., Any]]


class GraphAndConstants(torch.nn.Module):
    """A graph and the tensors that its get_attr nodes name: a GraphModule that is never called."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)


Held = GraphAndConstants | fx.GraphModule


def decompose(module: Held, mode: FakeTensorMode) -> bool:
    """In place; whether anything changed. Every node must have meta "val" of this mode."""
    changed = False
    waiting = [node for node in module.graph.nodes if node.op == "call_function"]
    while waiting:
        node = waiting.pop()
        if not isinstance(node.target, OpOverload) or has_rule(op_call(node)[0]):
            continue
        inner = _expansion(node, mode)
        if inner is not None:
            waiting += _inline(module, node, inner)
            changed = True
    return changed


def lift_constants(module: Held, mode: FakeTensorMode) -> dict[fx.Node, torch.Tensor]:
    """Each tensor that get_attr nodes name becomes one placeholder after the others; its value."""
    graph = module.graph
    constants: dict[fx.Node, torch.Tensor] = {}
    lifted: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        target = str(node.target)
        if target not in lifted:
            value = module.get_buffer(target)
            # in the words of torch's joint export, which asserts it where there are gradients
            assert not isinstance(value, FakeTensor), f"Unexpected fake buffer {target}"
            before = graph.find_nodes(op="placeholder")
            with graph.inserting_after(before[-1] if before else None):
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


def _expansion(node: fx.Node, mode: FakeTensorMode) -> fx.GraphModule | None:
    """The graph of the decomposed call, of its tensor arguments in order; None if there is none."""
    # Not at the top: it loads torch's compiler, and with it triton where that is installed.
    from torch.fx.experimental.proxy_tensor import make_fx

    target: Any = node.target
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    known = table().get(target)
    if known is None:
        return None
    nodes = node.all_input_nodes
    fakes = [n.meta["val"] for n in nodes]

    def call(*tensors: torch.Tensor) -> Any:
        values = dict(zip(nodes, tensors, strict=True))
        args = _plain(fx.map_arg(node.args, values.__getitem__))
        kwargs = _plain(fx.map_arg(node.kwargs, values.__getitem__))
        out = known(*args, **kwargs)
        return tuple(out) if isinstance(out, (tuple, list)) else out  # named tuples are calls

    try:
        with mode, torch.no_grad():
            inner = make_fx(call)(*fakes)
    except data_dependent_errors():
        return None
    for constant in inner.graph.find_nodes(op="get_attr"):
        constant.meta["val"] = mode.from_tensor(getattr(inner, str(constant.target)))
    if not _is_simpler(inner.graph, target) or not _same(node, inner):
        return None
    return inner


def _plain(value: Any) -> Any:
    """Lists that may be changed, as some decompositions do, in the place of torch.fx's."""
    match value:
        case list():
            return [_plain(v) for v in value]
        case tuple():
            return tuple(_plain(v) for v in value)
        case dict():
            return {k: _plain(v) for k, v in value.items()}
        case _:
            return value


def _is_simpler(graph: fx.Graph, target: Any) -> bool:
    """False where torch's form comes back to the op, or ends in its private prims."""
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    return not any(
        t is target or (isinstance(t, OpOverload) and t.namespace == "prims") for t in targets
    )


def _same(node: fx.Node, inner: fx.GraphModule) -> bool:
    """Whether the expansion gives tensors of the same shapes and dtypes, and is functional."""
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


def _inline(module: Held, node: fx.Node, inner: fx.GraphModule) -> list[fx.Node]:
    """Puts the expansion in the place of the node; the new calls, of ops that may need more."""
    graph = module.graph
    values: dict[fx.Node, Any] = dict(
        zip(inner.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True)
    )
    new: list[fx.Node] = []
    out: Any = None
    with graph.inserting_before(node):
        for old in inner.graph.nodes:
            if old.op == "output":
                out = fx.map_arg(old.args[0], values.__getitem__)
            elif old.op == "get_attr":
                name = _fresh_name(module)
                module.register_buffer(name, getattr(inner, str(old.target)), persistent=False)
                values[old] = graph.get_attr(name)
                values[old].meta["val"] = old.meta["val"]
            elif old.op == "call_function":
                values[old] = graph.node_copy(old, values.__getitem__)
                values[old].meta = {"val": old.meta["val"]}
                new.append(values[old])
    for made in new:
        made.meta.update({k: node.meta[k] for k in _KEPT if k in node.meta})
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


def _fresh_name(module: Held) -> str:
    index = 0
    while f"_expanded_{index}" in module._buffers:
        index += 1
    return f"_expanded_{index}"


@cache
def table() -> Table:
    """Return torch's decompositions by op, and ours of ops for which torch has none. A function,
    because it loads torch's compiler."""
    added = {
        torch.ops.aten._weight_norm_interface_backward.default: _weight_norm_backward,
        torch.ops.aten._new_zeros_with_same_feature_meta.default: _zero_tangent,
    }
    return {**decomposition_table(), **added}


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of w = g v / |v|, the norm over all dims but one: the gradients by v and by g.

    ``norms`` may be float32 where v is of 16 bits.
    """
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad.to(norms.dtype) * v).sum(others, keepdim=True) / norms
    across = grad - v * (along / norms)
    return (g / norms * across).to(v.dtype), along.to(g.dtype)


def _zero_tangent(
    tangent: torch.Tensor, x: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """Return zeros like ``x``. torch copies a tangent into them if its strides differ from those of
    x."""
    shape = (*tangent.shape[:self_num_batch_dims], *x.shape)
    return torch.zeros(shape, dtype=x.dtype, device=x.device)
