"""Attention with an explicit mask, without dropout.

    attention_masked(q[b h t d], k[b g s d], v[b g s d], mask[b h t s], scale)
        -> out[b h t d], lse[b h t]                                                 h = g * r

Each dim of the mask may be 1, and leading dims may be missing. A bool mask is True for keys that
the query sees; a float mask is added to the scores. The gradient of a mask holds all scores.

Invariants: as in attention.py. The result of a query that sees no key is 0, and its lse is 0. A row
of the batch has the same bits whatever the other rows are. Finite values of masked keys do not
change the result; a NaN or inf there makes it NaN, as in torch.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor.sharding.local import attention_kernels
from dtensor.sharding.local.attention_kernels import repeat_groups, weights_and_grad
from dtensor.sharding.ops.attention import (
    check_heads,
    empty_results,
    laid_as_operands,
    laid_as_output,
)
from dtensor.sharding.ops.library import LIBRARY, define


def _attention_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output, with the strides of `like_output`, and its log-sum-exp."""
    out, lse = attention_kernels.attention_masked(q, k, v, mask, scale)
    return laid_as_output(q, v, out), lse


def _attention_masked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, with the strides of q, k and v."""
    grads = attention_kernels.attention_masked_backward(grad, q, k, v, mask, out, lse, scale)
    return laid_as_operands(q, k, v, grads)


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the output and its log-sum-exp. Raises ValueError if the mask does
    not broadcast to [b h t s]."""
    check_heads(q, k, v)
    full = (*q.shape[:3], k.shape[2])
    fits = mask.dim() <= 4 and all(
        n in (1, m) for n, m in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise ValueError(
            f"attention_masked takes a bool or float mask that broadcasts to {list(full)}; got "
            f"{mask.dtype} {list(mask.shape)}"
        )
    return empty_results(q, v)


define(
    "attention_masked(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> (Tensor, Tensor)",
    _attention_masked,
    _fake,
)
define(
    "attention_masked_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor out, "
    "Tensor lse, float scale) -> (Tensor, Tensor, Tensor)",
    _attention_masked_backward,
    lambda grad, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)


# -- gradients -------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors of the backward; the log-sum-exp is not differentiable."""
    q, k, v, mask, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, out, lse)


def _grad(ctx: Any, grad: Tensor | None, _lse: None) -> tuple[Any, ...]:
    """Return the gradients of the inputs; the mask's gradient only if it is needed."""
    if grad is None:
        return (None,) * 5
    saved = ctx.saved_tensors
    grads = torch.ops.dt.attention_masked_backward(grad, *saved, ctx.scale)
    if not ctx.needs_input_grad[3]:
        return (*grads, None, None)
    q, k, v, mask, out, lse = saved
    k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
    _, scores_grad = weights_and_grad(grad, q, k, v, mask, out, lse, ctx.scale)
    return (*grads, scores_grad.sum_to_size(mask.shape).to(mask.dtype), None)


torch.library.register_autograd("dt::attention_masked", _grad, setup_context=_setup, lib=LIBRARY)
