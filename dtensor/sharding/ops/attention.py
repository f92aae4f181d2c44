"""Ops of the namespace ``dt``: attention, embedding of row shards, marks and checks.

    attention(q[b h t d], k[b g s d], v[b g s d]) -> out[b h t d], lse[b h t]        h = g * r
    embedding_shard(weight[r d], ids[...]) -> out[... d]  the sum over row shards is the embedding
    annotate(x[...], text) -> x[...]                      states placements, does nothing
    linalg_checked(x[... m n], info[...]) -> x[... m n]   raises torch's error if an info is not 0
    checked(x[... m n], ok[...]) -> x[... m n]            raises ValueError if an ok is False
    ask(ok[...])                                          a check that capture turns into `checked`

Invariants of all dt ops: they do not alias or mutate inputs; they are right if a dim has size 0
(a reduction returns its identity); row statistics and losses are float32 for 16-bit dtypes.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.local.in_range import check_range
from dtensor.sharding.local.local_forms import flash_attention, flash_attention_backward
from dtensor.sharding.ops import (
    cross_entropy as cross_entropy,  # registers the ops of cross entropy
)
from dtensor.sharding.ops import random as random  # registers the random ops
from dtensor.sharding.ops.library import LIBRARY, define, laid_as, local_index

# -- attention ---------------------------------------------------------------------------------


def repeat_groups(x: Tensor, num_heads: int) -> Tensor:
    """Return k or v [b g s d] with each group repeated for its query heads, [b h s d]."""
    groups = x.shape[1]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=1)


def sum_groups(grad: Tensor, num_groups: int) -> Tensor:
    """Return the gradient of `repeat_groups`: [b h s d] -> [b g s d], summed over query heads."""
    b, h, s, d = grad.shape
    if h == num_groups:
        return grad
    return grad.reshape(b, num_groups, h // num_groups, s, d).sum(2)


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Return q k^T * scale [b h t s], in float32 for 16-bit dtypes; -inf where s > t if causal."""
    scores = (q @ k.mT) * scale
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.to(accumulation_dtype(scores.dtype))


def efficient_on_cuda(q: Tensor) -> bool:
    """Return whether CUDA's memory-efficient kernel takes this head dim: rows of 16 bytes."""
    return q.dtype != torch.float64 and (q.shape[-1] * q.element_size()) % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if its rows do not start on multiples of 16 bytes or have a
    stride other than 1, which CUDA's kernel does not take."""
    starts = (x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1]))
    is_aligned = x.stride(-1) == 1 and all(start % 16 == 0 for start in starts)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def rows_first(out: Tensor) -> Tensor:
    """Return out[b h t d] with the memory of a [b t h d], as CUDA's backward kernel assumes."""
    return aligned(out.transpose(1, 2).contiguous()).transpose(1, 2)


def _attention_math(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp by plain ops. k and v have as many heads as q."""
    scores = _scores(q, k, is_causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def _attention_math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `_attention_math` with respect to q, k and v."""
    # dS = P * (grad v^T - sum(grad * out)); dq = scale dS k; dk = scale dS^T q; dv = P^T grad
    p = (_scores(q, k, is_causal, scale) - lse[..., None]).exp()
    row_sums = (grad.to(p.dtype) * out.to(p.dtype)).sum(-1, keepdim=True)
    ds = (p * ((grad @ v.mT).to(p.dtype) - row_sums) * scale).to(q.dtype)
    return ds @ k, ds.mT @ q, p.to(grad.dtype).mT @ grad


def is_empty(q: Tensor, k: Tensor) -> bool:
    return q.numel() == 0 or k.numel() == 0


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Call the backward of CUDA's memory-efficient kernel. k and v have as many heads as q."""
    padded_lse = lse.new_full((*lse.shape[:2], -(-q.shape[2] // 32) * 32), math.inf)
    padded_lse[..., : lse.shape[2]] = lse  # the weights of a row with an lse of inf are 0
    no_seed = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        aligned(grad), aligned(q), aligned(k), aligned(v), bias, rows_first(out), padded_lse,
        no_seed, no_seed, 0.0, (True, True, True, False), is_causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the kernel of the device and head dim; return the output and its log-sum-exp."""
    lse_dtype = accumulation_dtype(q.dtype)
    if is_empty(q, k):
        lse = torch.full(q.shape[:3], float("-inf"), dtype=lse_dtype, device=q.device)
        return torch.zeros_like(q), lse
    if q.device.type == "cpu":  # its kernel takes grouped heads
        out, lse = flash_attention(q, k, v, is_causal, None, scale)
    elif efficient_on_cuda(q):
        k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            aligned(q), aligned(k), aligned(v), None, True, 0.0, is_causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]  # the kernel pads the row dim
    else:
        k, v = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1])
        out, lse = _attention_math(q, k, v, is_causal, scale)
    # the kernels return dense results: if the strides are q's, they are also empty_like(q)'s
    out = out if out.stride() == q.stride() else laid_as(q, out)
    return out, lse.to(lse_dtype).contiguous()


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless these are q[b h t d], k[b g s d], v[b g s d] with h = g * r."""
    b, h, _, d = q.shape
    if k.dim() != 4 or k.shape != v.shape or k.shape[0] != b or k.shape[3] != d:
        raise ValueError(
            f"attention takes q[b h t d], k[b g s d], v[b g s d]; got {list(q.shape)}, "
            f"{list(k.shape)}, {list(v.shape)}"
        )
    if h != k.shape[1] and (k.shape[1] == 0 or h % k.shape[1] != 0):
        raise ValueError(f"attention splits {h} heads evenly over groups; got {k.shape[1]} groups")


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the output and its log-sum-exp."""
    check_heads(q, k, v)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, with the strides of q, k and v."""
    groups = k.shape[1]
    if is_empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    num = groups if q.device.type == "cpu" else q.shape[1]
    ks, vs = repeat_groups(k, num), repeat_groups(v, num)
    if q.device.type == "cpu":
        dq, dk, dv = flash_attention_backward(grad, q, ks, vs, out, lse, is_causal, None, scale)
    elif efficient_on_cuda(q):
        dq, dk, dv = efficient_backward(grad, q, ks, vs, None, out, lse, is_causal, scale)
    else:
        dq, dk, dv = _attention_math_backward(grad, q, ks, vs, out, lse, is_causal, scale)
    dk, dv = sum_groups(dk, groups), sum_groups(dv, groups)
    pairs = ((q, dq), (k, dk), (v, dv))
    dq, dk, dv = (laid_as(x, dx.to(x.dtype)) for x, dx in pairs)
    return dq, dk, dv


define(
    "attention(Tensor q, Tensor k, Tensor v, bool is_causal, float scale) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    lambda grad, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors of the backward; the log-sum-exp is not differentiable."""
    q, k, v, ctx.is_causal, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse)


def _attention_grad(ctx: Any, grad: Tensor | None, _lse: None) -> tuple[Any, ...]:
    """Return the gradients of q, k and v, and None for is_causal and scale."""
    if grad is None:
        return (None,) * 5
    q, k, v, out, lse = ctx.saved_tensors
    grads = torch.ops.dt.attention_backward(grad, q, k, v, out, lse, ctx.is_causal, ctx.scale)
    return (*grads, None, None)


torch.library.register_autograd(
    "dt::attention", _attention_grad, setup_context=_attention_setup, lib=LIBRARY
)


# -- embedding over row shards -----------------------------------------------------------------


def _embedding_shard(weight: Tensor, ids: Tensor, rows: Sequence[int], num_ids: int) -> Tensor:
    """Return the embedding of the ids in ``rows``, the intervals of the table that ``weight`` is;
    zeros for other ids."""
    check_range(ids, num_ids)  # an id that no rank holds would silently give zeros
    is_local, local = local_index(ids, rows, weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    return torch.where(is_local[..., None], weight[local], 0)


def _embedding_shard_backward(
    grad: Tensor, ids: Tensor, num_rows: int, rows: Sequence[int], padding_idx: int
) -> Tensor:
    """Return the gradient of the rank's rows; other ranks' ids and padding add nothing."""
    is_local, local = local_index(ids, rows, num_rows)
    is_local &= ids != padding_idx
    if num_rows == 0:
        return grad.new_zeros((0, grad.shape[-1]))
    local_grad = torch.where(is_local[..., None], grad, 0)
    return torch.ops.aten.embedding_dense_backward(
        local_grad, torch.where(is_local, local, 0), num_rows, -1, False
    )


define(
    "embedding_shard(Tensor weight, Tensor ids, int[] rows, int num_ids) -> Tensor",
    _embedding_shard,
    lambda weight, ids, rows, num_ids: weight.new_empty((*ids.shape, weight.shape[1])),
)
define(
    "embedding_shard_backward(Tensor grad, Tensor ids, int num_rows, int[] rows, "
    "int padding_idx) -> Tensor",
    _embedding_shard_backward,
    lambda grad, ids, num_rows, rows, padding_idx: grad.new_empty((num_rows, grad.shape[-1])),
)


# -- marks and checks, which return their operand -------------------------------------------------

define("annotate(Tensor x, str text) -> Tensor", lambda x, text: x.clone(),
        lambda x, text: torch.empty_like(x))  # fmt: skip
define("annotate_backward(Tensor grad, str text) -> Tensor", lambda grad, text: grad.clone(),
        lambda grad, text: torch.empty_like(grad))  # fmt: skip


def _annotate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.text = inputs[1]


def _annotate_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.dt.annotate_backward(grad, ctx.text), None


torch.library.register_autograd(
    "dt::annotate", _annotate_grad, setup_context=_annotate_setup, lib=LIBRARY
)


def _linalg_checked(x: Tensor, info: Tensor, api_name: str, is_matrix: bool) -> Tensor:
    """Return a copy of x. Raises the error of torch.linalg if an ``info`` is not 0, which means
    that the matrix is singular. Each rank checks its matrices.

    Torch's own check is an op without a result, which a graph of values drops. Here the value
    passes through the check.
    """
    check: Any = torch.ops.aten._linalg_check_errors.default
    check(info.contiguous(), api_name, is_matrix=is_matrix)
    return x.clone()


define(
    "linalg_checked(Tensor x, Tensor info, str api_name, bool is_matrix) -> Tensor",
    _linalg_checked,
    lambda x, info, api_name, is_matrix: torch.empty_like(x),
)


def _checked(x: Tensor, ok: Tensor, message: str) -> Tensor:
    """Return a copy of x. Raises ValueError if an element of ``ok`` on this rank is False, for
    checks that torch makes in Python (``if not valid.all(): raise``). x is a value of the same
    shape that the program reads after the check."""
    if not ok.is_meta and not bool(ok.all()):
        raise ValueError(f"{message}: {int((~ok).sum())} of {ok.numel()} on this rank are not")
    return x.clone()


define(
    "checked(Tensor x, Tensor ok, str message) -> Tensor",
    _checked,
    lambda x, ok, message: torch.empty_like(x),
)
torch.library.register_autograd("dt::checked", lambda ctx, grad: (grad, None, None), lib=LIBRARY)
define("ask(Tensor ok, bool wanted, str message) -> ()", lambda *_: None, lambda *_: None)
has_side_effect(torch.ops.dt.ask.default)
