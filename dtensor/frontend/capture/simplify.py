"""Simplify the joint graph to few kinds of ops, and order the sums of gradients.

    detach, alias, clone, ops that change nothing  ->  erased
    view, squeeze, unsqueeze, ...                  ->  reshape(x, sizes): local strides may differ
    t, transpose, permute, numpy_T                 ->  permute(x, dims)
    addmm(b, x, w), baddbmm(b, x, w)               ->  add(mm(x, w), b), add(bmm(x, w), b)
    zeros, ones, new_full, ...; new_empty, ...     ->  full(sizes, value); empty(sizes)
    ((residual + dq) + dk) + dv                    ->  residual + ((dq + dk) + dv)

Invariants: values and shapes are unchanged, except for the rounding of reordered sums; new nodes
take the meta of the node that they replace. An output may be an input, because clones are erased.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dtensor.frontend.graph import bound
from dtensor.private_torch import OpOverload

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt

_IDENTITY = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
}
_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_PERMUTES = {aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default}
_FILLS: dict[Any, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    aten.zeros.default: lambda a: (a["size"], 0),
    aten.ones.default: lambda a: (a["size"], 1),
    aten.scalar_tensor.default: lambda a: ([], a["s"]),
    aten.full.default: lambda a: (a["size"], a["fill_value"]),
    aten.new_zeros.default: lambda a: (a["size"], 0),
    aten.new_ones.default: lambda a: (a["size"], 1),
    aten.new_full.default: lambda a: (a["size"], a["fill_value"]),
}
_EMPTIES = {aten.new_empty.default, aten.new_empty_strided.default, aten.empty_strided.default}
_SCALAR_FORMS: dict[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
_STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
_IGNORED_OPTIONS = ("layout", "pin_memory", "memory_format")


def simplify(graph: fx.Graph) -> None:
    """Simplify the graph in place. Every node must have meta "val"."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            _rewrite(graph, node)
    _share_casts(graph)
    _eliminate_dead(graph)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite one node as the table in the module docstring shows."""

    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(node):
            new = graph.call_function(target, args, kwargs)
        new.meta.update(node.meta)
        return new

    if any(k in node.kwargs for k in _IGNORED_OPTIONS):
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in _IGNORED_OPTIONS}
    target = node.target
    if target is aten._assert_tensor_metadata.default:
        graph.erase_node(node)
    elif target in _IDENTITY:
        _replace(graph, node, node.args[0])
    elif target is aten._to_copy.default:
        _rewrite_cast(graph, node)
    elif target in _SCALAR_FORMS:
        node.target = _SCALAR_FORMS[target]
    elif target is aten.slice.Tensor:
        a = bound(node)
        size, rank = _input(node).meta["val"].shape, _input(node).meta["val"].dim()
        dim = a["dim"] % rank
        start, stop, step = slice(a["start"], a["end"], a["step"]).indices(size[dim])
        node.args = (node.args[0], dim, start, max(start, stop), step)
        if _same_shape(node, node.args[0]):
            _replace(graph, node, node.args[0])
    elif _is_no_op(node):
        _replace(graph, node, node.args[0])
    elif target in _VIEWS:
        base = _input(node)
        while base.target is aten.reshape.default:
            base = _input(base)
        if _same_shape(node, base):
            _replace(graph, node, base)
        else:
            _replace(graph, node, call(aten.reshape.default, base, list(node.meta["val"].shape)))
    elif target in _PERMUTES:
        base, dims = _input(node), _dims(node)
        while base.target is aten.permute.default:
            inner = _dims(base)
            base, dims = _input(base), [inner[d] for d in dims]
        is_identity = dims == list(range(len(dims)))
        _replace(graph, node, base if is_identity else call(aten.permute.default, base, dims))
    elif target is aten.cat.default:
        # cat ignores tensors of shape (0,), such as an empty cache.
        parts: Any = node.args[0]
        non_empty = [x for x in parts if tuple(x.meta["val"].shape) != (0,)]
        if len(non_empty) == 1 and _same_shape(node, non_empty[0]):
            _replace(graph, node, non_empty[0])
        elif 0 < len(non_empty) < len(parts):
            node.args = (non_empty, *node.args[1:])
    elif target in (aten.addmm.default, aten.baddbmm.default):
        a = bound(node)  # in 16 bits the op stays: the rewritten form would round twice
        if a["beta"] == 1 and a["alpha"] == 1 and node.meta["val"].dtype.itemsize >= 4:
            mm = aten.mm.default if target is aten.addmm.default else aten.bmm.default
            left, right = ("mat1", "mat2") if mm is aten.mm.default else ("batch1", "batch2")
            _replace(graph, node, call(aten.add.Tensor, call(mm, a[left], a[right]), a["self"]))
    elif target in _FILLS:
        a = bound(node)
        size, value = _FILLS[target](a)
        dtype = node.meta["val"].dtype
        full = call(aten.full.default, list(size), value, dtype=dtype, device=torch.device("cpu"))
        _replace(graph, node, full)
    elif target in _EMPTIES:
        kwargs = dict(dtype=node.meta["val"].dtype, device=torch.device("cpu"))
        _replace(graph, node, call(aten.empty.memory_format, bound(node)["size"], **kwargs))
    elif target is dt.cross_entropy_rows.default:
        _rewrite_rows(node, call)
    elif target in _STRIDED:
        from dtensor.frontend.capture.strides import as_permutation  # few programs need it

        if nodes := as_permutation(node, call):
            _replace(graph, node, nodes[-1])
            for new in nodes:
                _rewrite(graph, new)
    elif _has_only_numbers(node):
        op: Any = target
        number = op(*node.args, **{k: v for k, v in node.kwargs.items() if k != "device"})
        options = dict(dtype=node.meta["val"].dtype, device=torch.device("cpu"))
        _replace(graph, node, call(aten.full.default, [], number.item(), **options))


def _has_only_numbers(node: fx.Node) -> bool:
    """Return whether the op takes tensors and its arguments here are Python numbers only:
    _conj(1j). Autograd records such ops."""
    target, val = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or node.all_input_nodes or not node.args:
        return False
    takes_tensor = isinstance(target._schema.arguments[0].type, torch.TensorType)
    return takes_tensor and isinstance(val, torch.Tensor) and val.dim() == 0


def _is_no_op(node: fx.Node) -> bool:
    """Return whether the op is an expand to the same shape, or a power of 1."""
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 1 and node.meta["val"].dtype == _input(node).meta["val"].dtype)
    return node.target is aten.expand.default and _same_shape(node, node.args[0])


def _rewrite_cast(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a cast to the same dtype; drop all options but the dtype of others."""
    x, dtype = _input(node), node.meta["val"].dtype
    if x.meta["val"].dtype == dtype:
        _replace(graph, node, x)
    else:
        node.kwargs = {"dtype": dtype}


def _share_casts(graph: fx.Graph) -> None:
    """Replace the casts of an input to one dtype by the first of them, once per phase.

    The gradient of the input stays a sum of float32 terms, one per cast. With autocast's cache,
    torch adds these terms in 16 bits."""
    first_casts: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=aten._to_copy.default)):
        x, backward = _input(node), node.meta.get("partitioner_tag") == "is_backward"
        if x.op == "placeholder":
            first_cast = first_casts.setdefault((x, node.meta["val"].dtype, backward), node)
            if first_cast is not node:
                _replace(graph, node, first_cast)


def _rewrite_rows(node: fx.Node, call: Callable[..., fx.Node]) -> None:
    """Split dt.cross_entropy_rows into dt.ce_stats and dt.ce_loss."""
    logits, target, ignore_index = node.args
    assert isinstance(logits, fx.Node)
    num_classes = int(logits.meta["val"].shape[1])
    stats = call(dt.ce_stats.default, logits, target, ignore_index)
    loss = call(dt.ce_loss.default, stats, target, ignore_index, num_classes)
    loss.meta["val"], stats.meta["val"] = node.meta["val"]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((loss, stats)[int(user.args[1])])  # type: ignore[arg-type]


def _input(node: fx.Node) -> fx.Node:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return x


def _dims(node: fx.Node) -> list[int]:
    """Return the order of the dims of the input in the result of a permutation."""
    rank = _input(node).meta["val"].dim()
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr]
    if node.target is aten.transpose.int:
        i, j = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
        if rank:
            order[i], order[j] = order[j], order[i]
        return order
    return order[::-1]


def _same_shape(a: fx.Node, b: Any) -> bool:
    return bool(a.meta["val"].shape == b.meta["val"].shape)


def _replace(graph: fx.Graph, node: fx.Node, new: Any) -> None:
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _eliminate_dead(graph: fx.Graph) -> None:
    """Erase nodes without users. All ops in the graph are functional, so such nodes are dead."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


# -- sums ------------------------------------------------------------------------------------------

_PRODUCTS = (aten.mm.default, aten.bmm.default)
_PRODUCT_WRAPPERS = (aten.reshape.default, aten.permute.default, aten._to_copy.default)


def order_sums(graph: fx.Graph) -> None:
    """Reorder sums of gradients in the simplified joint graph, in place: add matrix products first.

    Such products may be `Partial`, and a sum of partial values needs only one reduction:
    the gradients of the projections of one attention are then reduced together."""
    for node in list(graph.nodes):
        if _is_sum(node) and not _is_term(node):
            terms = _terms(node)
            products = [t for t in terms if _is_product(t)]
            if len(products) < 2 or terms[: len(products)] == products:
                continue
            other_terms = [t for t in terms if not _is_product(t)]
            total = _left_fold(graph, node, products)
            if other_terms:
                total = _add(graph, node, _left_fold(graph, node, other_terms), total)
            node.replace_all_uses_with(total)
            _erase_sum(graph, node)


def _is_sum(node: fx.Node) -> bool:
    """Return whether the node is a sum of two tensors of equal shape and dtype in the backward."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    if node.meta.get("partitioner_tag") != "is_backward":
        return False
    val = node.meta["val"]
    return all(
        isinstance(x, fx.Node)
        and x.meta["val"].shape == val.shape
        and x.meta["val"].dtype == val.dtype
        for x in node.args
    )


def _is_term(node: fx.Node) -> bool:
    """Return whether the sum is only a term of a larger sum."""
    return len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _terms(node: fx.Node) -> list[fx.Node]:
    """Return the terms of a sum and of the partial sums that only it reads, in order."""
    terms: list[fx.Node] = []
    for term in node.args:
        assert isinstance(term, fx.Node)
        if _is_sum(term) and len(term.users) == 1:
            terms += _terms(term)
        else:
            terms.append(term)
    return terms


def _is_product(node: fx.Node) -> bool:
    """Return whether the value is a matrix product, perhaps reshaped, permuted or cast."""
    while node.target in _PRODUCT_WRAPPERS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node.target in _PRODUCTS


def _left_fold(graph: fx.Graph, before: fx.Node, terms: list[fx.Node]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        total = _add(graph, before, total, term)
    return total


def _add(graph: fx.Graph, before: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        new = graph.call_function(aten.add.Tensor, (a, b))
    new.meta.update(before.meta)
    return new


def _erase_sum(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a sum and the partial sums that only it read."""
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        if not operand.users and _is_sum(operand):
            _erase_sum(graph, operand)
