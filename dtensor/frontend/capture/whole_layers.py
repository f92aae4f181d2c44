"""Keep ops that have rules from being decomposed by torch during differentiation.

    with whole_layers():
        joint = export_joint(forward, tensors)

Torch registers Python decompositions under autograd for a few ops, and the joint export cannot
disable them. Resizing would lose its fused kernel. The decompositions of the margin losses differ
from their kernels: multilabel_margin_loss is wrong for targets that end early (-1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

_UNDECOMPOSED_OPS = (
    "multi_margin_loss", "multilabel_margin_loss_forward", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def without_decompositions() -> Iterator[None]:
    """Disable the decompositions of these ops in this context; may be nested. The change is global,
    but only tracing uses these kernels, and only one thread traces (`patched`)."""
    import torch._decomp

    packets = [getattr(torch.ops.aten, name) for name in _UNDECOMPOSED_OPS]
    ops = [
        getattr(packet, name)
        for packet in packets
        for name in packet.overloads()
        if "out" not in name
    ]
    original_kernels = [(op, dict(op.py_kernels)) for op in ops]
    try:
        for op in ops:
            for key in _KEYS:
                op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()
        yield
    finally:
        _restore_kernels(original_kernels)


def _restore_kernels(original_kernels: list[tuple[Any, dict[Any, Any]]]) -> None:
    for op, kernels in original_kernels:
        op.py_kernels.clear()
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()


@contextmanager
def whole_layers() -> Iterator[None]:
    """In this context, these ops reach the joint graph undecomposed. Attention that is still in the
    forward decomposes into the same ops on every machine. Must not be nested."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    with without_decompositions():
        original_kernels = [(attention, dict(attention.py_kernels))]
        try:
            attention.py_kernels.update(dict.fromkeys(_KEYS, _math_attention))
            attention._dispatch_cache.clear()
            yield
        finally:
            _restore_kernels(original_kernels)


def _math_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Call the op that SDPBackend.MATH selects; the backend is a setting of the process. The op
    adds its mask to the scores, so a bool mask becomes 0 and -inf."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        float_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = float_mask.masked_fill(~attn_mask, -math.inf)
    math_op = torch.ops.aten._scaled_dot_product_attention_math.default
    return math_op(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                   enable_gqa=enable_gqa)[0]  # fmt: skip
