"""What DTensors do above autograd: functions that are kept whole.

    F.scaled_dot_product_attention(q, k, v, is_causal=True)      dt.attention, as in dt.compile
    F.cross_entropy(logits, targets)       dt's ops, which take a split vocabulary

They are rewritten by the code that rewrites them in a captured graph
(frontend/capture/canonical.py); the calls that it does not cover are torch's own.
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
_running = threading.local()
_rewritten: dict[Any, fx.GraphModule | None] = {}


def torch_function(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if is_capturing():
        raise PlanningError(
            "a DTensor is used in a compiled function but was not passed to it.\n"
            "fix: pass it as an argument, as in dt.compile(fn, mesh)(x, w)"
        )
    rewrite = _REWRITES.get(func)
    outer = getattr(_running, "given", None)
    _running.arguments = (*args[:1], *args[2:]) if func in RECURRENT else args, kwargs
    try:
        with DisableTorchFunctionSubclass():
            if rewrite is None:
                return func(*args, **kwargs)
            return rewrite(*args, **kwargs)
    finally:
        _running.arguments = outer


def is_function_argument(x: torch.Tensor) -> bool:
    """Whether a plain tensor is an argument of the torch function that runs, or a view of one, and
    not made by it. The state of a recurrent layer counts as made: its module makes zeros."""
    given = getattr(_running, "given", None)
    if given is None:
        return True
    storage = x.untyped_storage().data_ptr()
    return any(
        type(y) in (torch.Tensor, torch.nn.Parameter) and y.untyped_storage().data_ptr() == storage
        for y in pytree.tree_leaves(given)
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
    target = aten.scaled_dot_product_attention.default
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    kwargs: dict[str, Any] = dict(scale=scale, enable_gqa=enable_gqa)
    done = _run_canonical(target, args, kwargs)
    if done is not None:
        return done
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
    rest = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if size_average is None and reduce is None and reduction in _REDUCTIONS:
        args = (input, target, weight, _REDUCTIONS[reduction], ignore_index, label_smoothing)
        done = _run_canonical(aten.cross_entropy_loss.default, args, {})
        if done is not None:
            return done
    return F.cross_entropy(input, target, *rest)


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """A layer of torch's: with a mask, its attention is torch's plain math."""
    if kwargs.get("attn_mask") is None and kwargs.get("key_padding_mask") is None:
        return F.multi_head_attention_forward(*args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return F.multi_head_attention_forward(*args, **kwargs)


def _lstm(*args: Any) -> Any:
    """In the ops of autograd's form, also where it is off: mkldnn's has no rule."""
    with torch.backends.mkldnn.flags(enabled=False):
        return torch.lstm(*args)


def _fill_diagonal_(x: Any, value: Any, wrap: bool = False) -> Any:
    """Torch's own form writes through a view with strides of its own."""
    diagonal = torch.zeros(x.shape, dtype=torch.bool).fill_diagonal_(True, wrap)
    return x.masked_fill_(diagonal, value)


def _combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """Torch's own form selects by a mask, whose size is a value."""
    return x[torch.combinations(torch.arange(len(x)), r, with_replacement)]


def _vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    """Torch's own form writes into a tensor that it makes."""
    powers = torch.arange(len(x) if N is None else N)
    return x[:, None] ** (powers if increasing else powers.flip(0))


def _get(x: Any, index: Any) -> Any:
    return x[_without_masks(index)]


def _set(x: Any, index: Any, value: Any) -> None:
    x[_without_masks(index)] = value


def _without_masks(index: Any) -> Any:
    """The index with the positions of True in lists and numpy arrays of bools."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        known = isinstance(item, (list, np.ndarray)) and len(item) > 0
        mask = np.asarray(item) if known and not _has_tensors(item) else None
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
    """What the canonical form of the call gives; None where the call has none."""
    call = CallKey()
    shape = tuple(call.key(v) for v in (*args, *kwargs.values()))
    tensors = call.operands
    metas = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
    key = (target, shape, metas)
    if key not in _rewritten:
        given = tuple(call.structure(a) for a in args)
        named = {k: call.structure(v) for k, v in kwargs.items()}
        _rewritten[key] = _rewrite(target, given, named, metas)
    module = _rewritten[key]
    return None if module is None else module(*tensors)


def _rewrite(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], metas: tuple[Any, ...]
) -> fx.GraphModule | None:
    op_graph = OpGraph()
    nodes = [op_graph.read(f"x{i}", *meta) for i, meta in enumerate(metas)]
    op_graph.graph.output(
        op_graph.call(target, *with_nodes(args, nodes), **with_nodes(dict(kwargs), nodes))
    )
    module = fx.GraphModule(torch.nn.Module(), op_graph.graph)
    canonicalise(module)
    same = any(n.target is target for n in module.graph.nodes)
    return None if same else module
