"""Torch functions that DTensors rewrite above autograd, before torch decomposes them.

    F.scaled_dot_product_attention(q, k, v, is_causal=True)      # dt.attention, as in dt.compile
    F.cross_entropy(logits, targets)               # dt's ops, which take a split vocabulary

The rewrites are the ones of captured graphs (frontend/capture/canonical.py). Calls that they do not
cover run torch's own function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor.api.eager.op_program import CallKey, OpGraph, with_nodes
from dtensor.errors import PlanningError
from dtensor.frontend.call_lock import is_capturing
from dtensor.frontend.capture.canonical import canonicalise
from dtensor.frontend.capture.packed_sequences import RECURRENT
from dtensor.private_torch import DisableTorchFunctionSubclass, pytree

aten: Any = torch.ops.aten


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_running = threading.local()  # ``arguments`` of the torch function that runs
_rewritten: dict[Any, fx.GraphModule | None] = {}  # by op and arguments; None: no rewrite


def torch_function(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a torch function on DTensors, rewritten if it has a rewrite."""
    if is_capturing():
        raise PlanningError(
            "a DTensor is used in a compiled function but was not passed to it.\n"
            "fix: pass it as an argument, as in dt.compile(fn, mesh)(x, w)"
        )
    rewrite = _REWRITES.get(func)
    outer = getattr(_running, "arguments", None)
    _running.arguments = (*args[:1], *args[2:]) if func in RECURRENT else args, kwargs
    try:
        with DisableTorchFunctionSubclass():
            if rewrite is None:
                return func(*args, **kwargs)
            return rewrite(*args, **kwargs)
    finally:
        _running.arguments = outer


def is_function_argument(x: torch.Tensor) -> bool:
    """Return whether a plain tensor is an argument of the running torch function, or a view of one,
    rather than made by the function. The state of a recurrent layer counts as made, because its
    module makes zeros."""
    arguments = getattr(_running, "arguments", None)
    if arguments is None:
        return True
    storage = x.untyped_storage().data_ptr()
    return any(
        type(y) in (torch.Tensor, torch.nn.Parameter) and y.untyped_storage().data_ptr() == storage
        for y in pytree.tree_leaves(arguments)
    )


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the attention: by `dt.attention`, or by torch's math kernel if `dt.attention` does not
    cover the arguments."""
    target = aten.scaled_dot_product_attention.default
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    kwargs: dict[str, Any] = dict(scale=scale, enable_gqa=enable_gqa)
    result = _run_canonical(target, args, kwargs)
    if result is not None:
        return result
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return the cross entropy: by dt's ops, which take a split vocabulary, or by torch's function
    if dt's ops do not cover the arguments."""
    options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if size_average is None and reduce is None and reduction in _REDUCTIONS:
        args = (input, target, weight, _REDUCTIONS[reduction], ignore_index, label_smoothing)
        result = _run_canonical(aten.cross_entropy_loss.default, args, {})
        if result is not None:
            return result
    return F.cross_entropy(input, target, *options)


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """Run torch's multi-head attention; with a mask, use the math kernel, which decomposes."""
    if kwargs.get("attn_mask") is None and kwargs.get("key_padding_mask") is None:
        return F.multi_head_attention_forward(*args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return F.multi_head_attention_forward(*args, **kwargs)


def _lstm(*args: Any) -> Any:
    """Run torch's LSTM without mkldnn, whose fused op has no rule."""
    with torch.backends.mkldnn.flags(enabled=False):
        return torch.lstm(*args)


def _fill_diagonal_(x: Any, value: Any, wrap: bool = False) -> Any:
    """Fill the diagonal by a mask. Torch's own function writes through an as_strided view."""
    diagonal = torch.zeros(x.shape, dtype=torch.bool).fill_diagonal_(True, wrap)
    return x.masked_fill_(diagonal, value)


def _combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """Return combinations by an index. Torch's own function selects by a mask, so the size of its
    result depends on values."""
    return x[torch.combinations(torch.arange(len(x)), r, with_replacement)]


def _vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    """Return the Vandermonde matrix as powers. Torch's own function writes into a new tensor."""
    powers = torch.arange(len(x) if N is None else N)
    return x[:, None] ** (powers if increasing else powers.flip(0))


def _get(x: Any, index: Any) -> Any:
    return x[_without_masks(index)]


def _set(x: Any, index: Any, value: Any) -> None:
    x[_without_masks(index)] = value


def _without_masks(index: Any) -> Any:
    """Return the index with each list or numpy array of bools replaced by the positions of True."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        is_array = isinstance(item, (list, np.ndarray)) and len(item) > 0
        mask = np.asarray(item) if is_array and not _has_tensors(item) else None
        if mask is None or mask.dtype != bool:
            items.append(item)
        else:
            items += map(torch.from_numpy, mask.nonzero())
    return tuple(items) if isinstance(index, tuple) or len(items) != 1 else items[0]


def _has_tensors(item: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(item))


_REWRITES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.fill_diagonal_: _fill_diagonal_,
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__setitem__: _set,
    torch.combinations: _combinations,
    torch.vander: _vander,
    torch.lstm: _lstm,
    F.multi_head_attention_forward: _multi_head,
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
}


def _run_canonical(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the canonical form of a call and return its result; None if there is no such form."""
    call = CallKey()
    shape = tuple(call.key(v) for v in (*args, *kwargs.values()))
    tensors = call.operands
    metas = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
    key = (target, shape, metas)
    if key not in _rewritten:
        structured_args = tuple(call.structure(a) for a in args)
        structured_kwargs = {k: call.structure(v) for k, v in kwargs.items()}
        _rewritten[key] = _rewrite(target, structured_args, structured_kwargs, metas)
    module = _rewritten[key]
    return None if module is None else module(*tensors)


def _rewrite(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], metas: tuple[Any, ...]
) -> fx.GraphModule | None:
    """Return the canonical form of a call as a module of its tensors; None if it has none.
    ``metas``: the shape, strides and dtype of each tensor."""
    op_graph = OpGraph()
    nodes = [op_graph.read(f"x{i}", *meta) for i, meta in enumerate(metas)]
    op_graph.graph.output(
        op_graph.call(target, *with_nodes(args, nodes), **with_nodes(dict(kwargs), nodes))
    )
    module = fx.GraphModule(torch.nn.Module(), op_graph.graph)
    canonicalise(module)
    same = any(n.target is target for n in module.graph.nodes)
    return None if same else module
