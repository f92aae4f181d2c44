"""The project's own operators: ops whose rule fits on one line where ATen's would not.

They are plain `torch.library` ops (namespace `dt`), so that each is one node in a captured graph.
Importing this module registers them; the frontend rewrites the user's program into them and the
rules name them. Shapes below are global while planning and local when a rank executes.

    attention(q[b h t d], k[b g s d], v[b g s d]) -> out[b h t d], lse[b h t]        h = g * r
    embedding_shard(weight[r d], ids[...]) -> out[... d]  contracted with sum over the row shards
    annotate(x[...], text) -> x[...]                      states placements, does nothing
    linalg_checked(x[... m n], info[...]) -> x[... m n]   raises torch's error where info is not 0
    checked(x[... m n], ok[...]) -> x[... m n]            ValueError where one of ok is not True
    ask(ok[...])                                          marks a check until it is `checked`

Ops that need to know *which* columns or rows are local take them as `vocab` or `rows`: a flat list
`[start, stop, start, stop, ...]` of global index intervals, in local order; the empty list means
"all, from 0". The other ops are in files of their own: cross_entropy.py, random.py, batch_norm.py.

Invariants: no op aliases or mutates its inputs; every op is right when any dim has size 0 (a
reduction then returns its identity); row statistics and losses are float32 for half dtypes.
Not here: placements, rules, and the rewriting that introduces these ops.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

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


def spread(x: Tensor, num_heads: int) -> Tensor:
    """k or v (b g s d) with each group repeated for its query heads: (b h s d)."""
    groups = x.shape[1]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=1)


def gather_groups(grad: Tensor, num_groups: int) -> Tensor:
    """The adjoint of `spread`: (b h s d) -> (b g s d), summing each group's query heads."""
    b, h, s, d = grad.shape
    if h == num_groups:
        return grad
    return grad.reshape(b, num_groups, h // num_groups, s, d).sum(2)


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    s = (q @ k.mT) * scale
    if is_causal:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        s = s.masked_fill(~keep, float("-inf"))
    return s.to(accumulation_dtype(s.dtype))


def efficient_on_cuda(q: Tensor) -> bool:
    """Whether CUDA's memory-efficient kernel takes this head dim (16-byte rows)."""
    return q.dtype != torch.float64 and (q.shape[-1] * q.element_size()) % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """As the CUDA kernel reads it: elements of a row adjacent, rows on 16-byte boundaries."""
    starts = (x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1]))
    is_read = x.stride(-1) == 1 and all(start % 16 == 0 for start in starts)
    return x if is_read else x.clone(memory_format=torch.contiguous_format)


def rows_first(out: Tensor) -> Tensor:
    """out[b h t d] as (b t h d) in memory: the backward's kernel takes no stride for its rows."""
    return aligned(out.transpose(1, 2).contiguous()).transpose(1, 2)


def _attention_math(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """For what CUDA's kernel does not take; k and v have one group for each head."""
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
    p = (_scores(q, k, is_causal, scale) - lse[..., None]).exp()
    inner = (grad.to(p.dtype) * out.to(p.dtype)).sum(-1, keepdim=True)
    ds = (p * ((grad @ v.mT).to(p.dtype) - inner) * scale).to(q.dtype)
    return ds @ k, ds.mT @ q, p.to(grad.dtype).mT @ grad


def _attention_empty(q: Tensor, k: Tensor) -> bool:
    return q.numel() == 0 or k.numel() == 0


def _attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    lse_dtype = accumulation_dtype(q.dtype)
    if _attention_empty(q, k):
        lse = torch.full(q.shape[:3], float("-inf"), dtype=lse_dtype, device=q.device)
        return torch.zeros_like(q), lse
    if q.device.type == "cpu":  # which takes groups as they are
        out, lse = flash_attention(q, k, v, is_causal, None, scale)
    elif efficient_on_cuda(q):
        k, v = spread(k, q.shape[1]), spread(v, q.shape[1])
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            aligned(q), aligned(k), aligned(v), None, True, 0.0, is_causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]  # the kernel pads the row dim
    else:
        k, v = spread(k, q.shape[1]), spread(v, q.shape[1])
        out, lse = _attention_math(q, k, v, is_causal, scale)
    # the kernels' results fill their memory: strides that a query shares are those of empty_like
    out = out if out.stride() == q.stride() else laid_as(q, out)
    return out, lse.to(lse_dtype).contiguous()


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError where these are not q[b h t d], k[b g s d], v[b g s d] with h = g * r."""
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
    groups = k.shape[1]
    if _attention_empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    num = groups if q.device.type == "cpu" else q.shape[1]
    ks, vs = spread(k, num), spread(v, num)
    if q.device.type == "cpu":
        # The kernel indexes lse as (b, t, h): the layout that its own forward returns.
        laid = lse.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv = flash_attention_backward(grad, q, ks, vs, out, laid, is_causal, None, scale)
    elif efficient_on_cuda(q):
        padded = -(-q.shape[2] // 32) * 32
        full = lse.new_full((*lse.shape[:2], padded), float("inf"))
        full[..., : lse.shape[2]] = lse
        none = torch.empty((), dtype=torch.int64, device=q.device)
        laid = rows_first(out)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            aligned(grad), aligned(q), aligned(ks), aligned(vs), None, laid, full, none, none,
            0.0, (True, True, True, False), is_causal, scale=scale,
        )  # fmt: skip
    else:
        dq, dk, dv = _attention_math_backward(grad, q, ks, vs, out, lse, is_causal, scale)
    dk, dv = gather_groups(dk, groups), gather_groups(dv, groups)
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
    q, k, v, ctx.is_causal, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse)


def _attention_grad(ctx: Any, grad: Tensor | None, _lse: None) -> tuple[Any, ...]:
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
    check_range(ids, num_ids)  # one that no rank has would be zeros
    here, local = local_index(ids, rows, weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    return torch.where(here[..., None], weight[local], 0)


def _embedding_shard_backward(
    grad: Tensor, ids: Tensor, num_rows: int, rows: Sequence[int], padding_idx: int
) -> Tensor:
    here, local = local_index(ids, rows, num_rows)
    here &= ids != padding_idx
    if num_rows == 0:
        return grad.new_zeros((0, grad.shape[-1]))
    kept = torch.where(here[..., None], grad, 0)
    return torch.ops.aten.embedding_dense_backward(
        kept, torch.where(here, local, 0), num_rows, -1, False
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


# -- what passes a value on -----------------------------------------------------------------------

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
    """The error of torch.linalg for a singular matrix: info[i] is not 0 where matrix i is.

    Torch checks by an op without a result, which a graph of values would lose, and with it the
    error. Here the value passes through the check. Each rank checks its matrices.
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
    """What torch checks in Python (``if not valid.all(): raise``): each rank looks at its part.

    x need not be what was checked: it is what is read after it, and has its shape.
    """
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
