"""Rewrite masked writes, attention outputs and float32 logits of an exported graph.

    x[mask] = value                        ->  x.copy_(where(mask, value, x))
    attention(q, k, v).transpose.view      ->  the same, with the strides of torch's kernel
    cross_entropy(x.float().view(n, v))    ->  cross_entropy(x.view(n, v)), x of 16 bits

Few programs need these rewrites (canonical.py imports them lazily). Invariants: values are
unchanged. New nodes carry the line and module of the node that they replace."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dtensor.frontend.graph import USERS_META, Writer, bound
from dtensor.numerics import is_narrow
from dtensor.private_torch import OpOverload

aten: Any = torch.ops.aten


def masked_fill(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite index_put with a bool mask as `where`: the number of elements that a mask selects
    depends on its values, but the size of a `where` does not."""
    a = bound(node)
    x, value = a["self"], a["values"]
    if len(a["indices"]) != 1 or a["indices"][0] is None or a["accumulate"]:
        return
    (mask,) = a["indices"]
    trailing_dims = x.meta["val"].dim() - mask.meta["val"].dim()
    if mask.meta["val"].dtype != torch.bool or value.meta["val"].dim() > trailing_dims:
        return
    call = Writer(graph, node)
    if trailing_dims:
        mask = call(aten.reshape.default, mask, [*mask.meta["val"].shape, *[1] * trailing_dims])
    new_values = call(aten.where.self, mask, value, x)
    in_place = node.target is aten.index_put_.default
    call.replace(call(aten.copy_.default, x, new_values) if in_place else new_values)


def keep_strides(graph: fx.Graph, node: fx.Node) -> None:
    """Give the output of attention the strides of torch's kernel [b, t, h, d] if the program views
    it: our op has other strides. The copy is erased in the final graph."""
    out = node.meta["val"]
    if not _has_merging_view(node) or out.dim() != 4 or not out.transpose(1, 2).is_contiguous():
        return
    users = list(node.users)
    with graph.inserting_after(node):
        transposed = graph.call_function(aten.transpose.int, (node, 1, 2))
    with graph.inserting_after(transposed):
        kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
        contiguous = graph.call_function(aten.clone.default, (transposed,), kwargs)
    with graph.inserting_after(contiguous):
        result = graph.call_function(aten.transpose.int, (contiguous, 1, 2))
    for new in (transposed, contiguous, result):
        new.meta.update({k: node.meta[k] for k in USERS_META if k in node.meta})
    node.replace_all_uses_with(result, delete_user_cb=users.__contains__)


def remove_logits_cast(graph: fx.Graph, logits: Any) -> None:
    """Remove the cast to float32 of the logits of a cross entropy, whose statistics are float32
    anyway. The cast stays if other nodes read it, or if a later op writes in place."""
    views: list[fx.Node] = []
    while isinstance(logits, fx.Node) and logits.target in _VIEWS and len(logits.users) == 1:
        views.append(logits)
        logits = logits.args[0]
    if (
        not isinstance(logits, fx.Node)
        or logits.target is not aten.to.dtype
        or len(logits.users) > 1
    ):
        return
    original = logits.args[0]
    assert isinstance(original, fx.Node)
    dtype = original.meta["val"].dtype
    if not is_narrow(dtype) or logits.meta["val"].dtype != torch.float32 or _writes_after(logits):
        return
    logits.replace_all_uses_with(original)
    graph.erase_node(logits)
    for view in views:
        view.meta["val"] = view.meta["val"].to(dtype)


_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.contiguous.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.permute.default,
    aten.transpose.int,
}


def _writes_after(node: fx.Node) -> bool:
    """Return whether an op after ``node`` may write in place."""
    later = node.next
    while later.op != "output":
        if isinstance(later.target, OpOverload):
            if later.target._schema.is_mutable:
                return True
        elif later.op == "call_function" and later.target is not operator.getitem:
            return True  # an op with a nested graph
        later = later.next
    return False


def _has_merging_view(node: fx.Node) -> bool:
    """Return whether the program merges dims of the transposed output with `view`, which needs the
    strides of torch's kernel."""
    transposes = (aten.transpose.int, aten.permute.default)
    for user in node.users:
        if user.target in transposes and any(u.target is aten.view.default for u in user.users):
            return True
        if user.target in (*transposes, aten.reshape.default) and _has_merging_view(user):
            return True
    return False
