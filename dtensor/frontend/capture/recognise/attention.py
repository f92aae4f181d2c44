"""Rewrite attention as one dt op; drop repeated heads, and masks if they have terms.

    sdpa(q[b h t d], k, v, i[None] <= i[:, None])   ->  dt.attention(q, k, v, True, scale)[0]
    sdpa(q[b h t d], k, v, mask[b 1 t s])           ->  dt.attention_masked(q, k, v, mask, scale)[0]
    k[b g s d] repeated to [b h s d]                ->  both take k[b g s d]
    dt.written_attention(out, q, k, v, mask, ...)   ->  dt.attention with softcap or sinks, or out

mask_terms.py decomposes masks. A mask that requires grad is not rewritten, because its gradient
needs all scores. Repeated keys and values are read before the repetition. Results are equal up to
the rounding of another kernel.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

import dtensor.sharding.ops.attention_masked
import dtensor.sharding.ops.heads  # noqa: F401  (registers the op)
from dtensor.frontend.capture.recognise.constants import Writes
from dtensor.frontend.capture.recognise.mask_terms import MaskTerms, Terms
from dtensor.frontend.capture.recognise.matching import NoMatch, erase_unused
from dtensor.frontend.graph import Writer, bound, op_text

aten: Any = torch.ops.aten
dt: Any = torch.ops.dt

_MEAN = "its mask gives the mean of all values to a query that sees no key, such as padding"
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default)


def simplify_mask(node: fx.Node, masks: MaskTerms) -> None:
    """Remove a mask that hides nothing; replace one that hides only later keys by `is_causal`."""
    a = bound(node)
    if a["attn_mask"] is None or a["is_causal"]:
        return
    try:
        terms = _terms(a, masks)
    except NoMatch:
        return
    if terms.options():
        return
    a.update(attn_mask=None, is_causal=terms.is_causal)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    node.args = tuple(a.pop(name) for name in names)
    node.kwargs = a


def _terms(a: dict[str, Any], masks: MaskTerms) -> Terms:
    """Return the terms of an attention's mask. Raises NoMatch with the reason if it has none."""
    mask = a["attn_mask"]
    terms = masks.of(mask, a["query"].meta["val"].shape[2], a["key"].meta["val"].shape[2])
    if mask.meta["val"].is_floating_point() and not terms.sees_itself:
        raise NoMatch(_MEAN)
    return terms


def rewrite_attention(graph: fx.Graph, node: fx.Node, masks: MaskTerms) -> tuple[str, str]:
    """Rewrite the attention in place as one dt op. Return the op's name, and why the mask stays an
    operand, or "". Call `simplify_mask` before. Raises NoMatch with the reason if no dt op fits."""
    a = bound(node)
    q, k, v = (a[name].meta["val"] for name in ("query", "key", "value"))
    mask: Any = a["attn_mask"]
    out = node.meta["val"]
    if a["dropout_p"] != 0:
        raise NoMatch("it drops weights, each by a number of its own")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise NoMatch(f"its queries have {q.dim()} dims and not 4")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or k.shape[:3] != v.shape[:3]:
        raise NoMatch("its queries, keys and values have different sizes")
    is_grouped = k.shape[1] == 1 or (a["enable_gqa"] and q.shape[1] % k.shape[1] == 0)
    if q.shape[1] != k.shape[1] and not is_grouped:
        raise NoMatch("its queries and keys have different numbers of heads")
    terms, reason = Terms(is_causal=a["is_causal"]), ""
    if mask is not None:
        if a["is_causal"]:  # torch raises where it runs
            raise NoMatch("it has a mask and is_causal")
        if source := _differentiable_source(mask):
            raise NoMatch(f"its mask depends on {source}, which wants a gradient")
        try:
            terms = _terms(a, masks)
        except NoMatch as why:
            reason = str(why)
    if reason and q.shape[3] != v.shape[3]:
        raise NoMatch(f"its values have another width than its keys, and {reason}")
    keys, values = _before_repeat(node, a["key"], a["value"], masks.writes)
    call = Writer(graph, node)
    scale = a["scale"] if a["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    tensors = [
        call.cast(x, val.dtype, out.dtype) for x, val in ((a["query"], q), (keys, k), (values, v))
    ]
    if mask is None or not reason:
        op = dt.attention.default
        pair = call(op, *tensors, terms.is_causal, scale, **terms.options())
    else:
        op, mask = dt.attention_masked.default, _before_expand(mask, node, masks.writes)
        if mask.meta["val"].dtype != torch.bool and q.dtype != out.dtype:
            mask = call.cast(mask, mask.meta["val"].dtype, out.dtype)  # autocast casts it, too
        pair = call(op, *tensors, mask, scale)
    call.replace(call(operator.getitem, pair, 0))
    return op_text(pair), reason


def rewrite_written(graph: fx.Graph, node: fx.Node, masks: MaskTerms) -> tuple[str, str]:
    """Rewrite an attention that a model of transformers writes out as dt.attention. Raises NoMatch
    with the reason if its mask has no terms."""
    a = bound(node)
    q, k, v = (a[name].meta["val"] for name in ("q", "k", "v"))
    mask, out = a["mask"], node.meta["val"]
    if q.shape[2] != k.shape[2]:
        raise NoMatch("its queries and keys have different lengths")
    terms = Terms() if mask is None else masks.of(mask, q.shape[2], k.shape[2])
    if not terms.sees_itself and a["sinks"] is None:
        raise NoMatch(_MEAN)
    call = Writer(graph, node)
    tensors = [
        call.cast(a[name], x.dtype, out.dtype) for name, x in zip("qkv", (q, k, v), strict=True)
    ]
    options: dict[str, Any] = terms.options()
    if a["softcap"]:
        options["softcap"] = a["softcap"]
    if a["sinks"] is not None:
        options["sinks"] = a["sinks"]
    pair = call(dt.attention.default, *tensors, terms.is_causal, a["scale"], **options)
    rows = call(aten.transpose.int, call(operator.getitem, pair, 0), 1, 2)
    call.replace(call(aten.contiguous.default, rows))
    erase_unused(graph, a["written"])
    return op_text(pair), ""


def pick_repeated_heads(graph: fx.Graph) -> None:
    """Replace heads that are picked from a cache and then repeated by a pick of one head for each
    query head, in place, so that each rank can read its own copies."""
    for pick in graph.find_nodes(op="call_function", target=dt.pick_heads.default):
        source, picked, heads = pick.args
        repeats = [
            (node, node.meta["val"].shape[1])
            for target in (*_RESHAPES, aten.repeat_interleave.self_int)
            for node in graph.find_nodes(op="call_function", target=target)
            if _source_of_repeat(node) is pick
        ]
        for user in list(pick.users):
            if user.target is aten.scaled_dot_product_attention.default:
                num = bound(user)["query"].meta["val"].shape[1]
                if bound(user)["enable_gqa"] and num > len(heads):
                    repeats.append((user, num))
        for node, num in repeats:
            copies = [head for head in heads for _ in range(num // len(heads))]
            repeated = Writer(graph, pick)(dt.pick_heads.default, source, list(picked), copies)
            b, _, s, d = pick.meta["val"].shape
            repeated.meta["val"] = pick.meta["val"].new_empty((b, num, s, d))
            if node in pick.users:
                node.replace_input_with(pick, repeated)
            else:
                node.replace_all_uses_with(repeated)


def _differentiable_source(mask: fx.Node) -> str:
    """Return the name of a value that requires grad and on which the mask depends; "" if none."""
    waiting, visited = [mask], {mask}
    while waiting:
        node = waiting.pop()
        val = node.meta.get("val")
        if isinstance(val, Tensor) and not val.dtype.is_floating_point:
            continue
        if isinstance(val, Tensor) and val.requires_grad:
            _, dot, path = str(node.target).partition(".")  # below the module that was called
            return path if dot else "an argument"
        inputs = [n for n in node.all_input_nodes if n not in visited]
        visited.update(inputs)
        waiting += [] if node.target is aten.detach.default else inputs
    return ""


def _before_expand(mask: fx.Node, node: fx.Node, writes: Writes) -> fx.Node:
    """Return the mask before it was expanded: the op broadcasts it."""
    source = mask
    while source.target is aten.expand.default:
        source = _first_operand(source)
    return mask if source is mask or writes.between(source, node) else source


def _before_repeat(node: fx.Node, key: fx.Node, value: fx.Node, writes: Writes) -> tuple[Any, Any]:
    """Return keys and values before both were repeated the same number of times; else unchanged."""
    if key.meta["val"].shape[1] != node.meta["val"].shape[1]:
        return key, value
    keys, values = _source_of_repeat(key), _source_of_repeat(value)
    if keys is None or values is None:
        return key, value
    is_written = writes.between(key, node) or writes.between(value, node)
    same_shape = keys.meta["val"].shape == values.meta["val"].shape
    return (keys, values) if same_shape and not is_written else (key, value)


def _source_of_repeat(x: fx.Node) -> fx.Node | None:
    """Return the source [b g s d] of x [b (g r) s d] in which each head of g is repeated r times in
    a row; None if x is not of this form."""
    while x.target in _COPIES:
        x = _first_operand(x)
    if x.target is aten.repeat_interleave.self_int:
        a = bound(x)
        source = a["self"]
        is_full = a["output_size"] is None or a["output_size"] == x.meta["val"].shape[1]
        return source if is_full and a["dim"] in (1, -3) else None
    if x.target not in _RESHAPES:
        return None
    expanded = _first_operand(x)
    while expanded.target in _COPIES:
        expanded = _first_operand(expanded)
    if expanded.target is not aten.expand.default:
        return None
    unsqueezed = _first_operand(expanded)
    if unsqueezed.target is not aten.unsqueeze.default or unsqueezed.args[1] not in (2, -3):
        return None
    source = _first_operand(unsqueezed)
    if source.meta["val"].dim() != 4:
        return None
    b, g, s, d = source.meta["val"].shape
    repeats = expanded.meta["val"].shape[2]
    shapes = (tuple(expanded.meta["val"].shape), tuple(x.meta["val"].shape))
    return source if shapes == ((b, g, repeats, s, d), (b, g * repeats, s, d)) else None


def _first_operand(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
