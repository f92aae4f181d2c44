"""Tests the project's own operators against eager torch: values, gradients, shards and empty
dims.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dtensor.sharding.ops.attention
import dtensor.sharding.ops.attention_masked  # noqa: F401
from dtensor.numerics import fold
from dtensor.sharding.local import attention_kernels
from dtensor.sharding.ops.cross_entropy import PIECE_ELEMENTS
from tests.frontend.eager import close

dt = torch.ops.dt


def heads(h: int, t: int, transposed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(2, t, h, 8, dtype=dtype).transpose(1, 2)
    return (x if transposed else x.contiguous()).requires_grad_()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("h", "g", "t", "s"), [(4, 4, 5, 5), (4, 2, 5, 7), (6, 1, 33, 40)])
def test_attention_matches_torch_with_gradients(
    h: int, g: int, t: int, s: int, is_causal: bool, transposed: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = heads(h, t, transposed), heads(g, s, transposed), heads(g, s, transposed)
    out, lse = dt.attention(q, k, v, is_causal, 0.3)
    want = F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=g != h
    )
    cotangent = torch.randn_like(out)
    close(out, want)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), cotangent),
        torch.autograd.grad(want, (q, k, v), cotangent),
        strict=True,
    ):
        close(a, b)
    scores = (q @ k.repeat_interleave(h // g, 1).mT) * 0.3
    if is_causal:
        scores = scores.masked_fill(~torch.ones(t, s).tril().bool(), float("-inf"))
    close(lse, scores.logsumexp(-1).detach())
    assert lse.is_contiguous() and not lse.requires_grad


@pytest.mark.slow
def test_attention_passes_torch_opcheck() -> None:
    q, k = heads(4, 5, True), heads(2, 7, True)
    torch.library.opcheck(dt.attention.default, (q, k, k, True, 0.3))
    out, lse = dt.attention(q.detach(), k.detach(), k.detach(), True, 0.3)
    args = (torch.randn_like(out), q.detach(), k.detach(), k.detach(), out, lse, True, 0.3)
    torch.library.opcheck(dt.attention_backward.default, args)


@pytest.mark.parametrize(
    ("b", "h", "g", "t", "s"),
    [(0, 4, 2, 3, 3), (2, 0, 0, 3, 3), (2, 4, 2, 0, 3), (2, 4, 2, 3, 0)],
)
def test_attention_of_empty_dims_returns_zeros(b: int, h: int, g: int, t: int, s: int) -> None:
    q = torch.randn(b, h, t, 8, requires_grad=True)
    k = torch.randn(b, g, s, 8, requires_grad=True)
    out, lse = dt.attention(q, k, k, True, 1.0)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert float(out.detach().abs().sum()) == 0
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert float(dq.abs().sum()) == 0 and float(dk.abs().sum()) == 0
    assert dq.shape == q.shape and dk.shape == k.shape


def test_attention_on_meta_tensors_refuses_uneven_head_groups() -> None:
    q = torch.empty(2, 4, 3, 8, device="meta")
    with pytest.raises(ValueError, match="splits 4 heads evenly over groups; got 3 groups"):
        dt.attention(q, q[:, :3], q[:, :3], False, 1.0)


# -- attention with a mask -------------------------------------------------------------------------

MASKS = {
    "lengths": lambda b, h, t, s: torch.arange(s) < torch.tensor([s, s // 2])[:, None, None, None],
    "by query": lambda b, h, t, s: torch.rand(b, 1, t, s) < 0.8,
    "some see nothing": lambda b, h, t, s: torch.rand(b, 1, t, 1).expand(b, 1, t, s) < 0.5,
    "by head": lambda b, h, t, s: torch.randn(1, h, 1, s),
    "all dims": lambda b, h, t, s: torch.randn(b, h, t, s),
    "two dims": lambda b, h, t, s: torch.randn(t, s),
    "of queries": lambda b, h, t, s: torch.randn(b, 1, t, 1),
    "lowest": lambda b, h, t, s: torch.zeros(t, s).masked_fill(
        torch.rand(t, 1) < 0.5, torch.finfo(torch.float32).min
    ),
}  # fmt: skip


@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("h", "g", "t", "s"), [(4, 4, 5, 5), (4, 2, 1, 7), (6, 2, 33, 40)])
def test_attention_masked_matches_torch_with_gradients(
    h: int, g: int, t: int, s: int, mask: str, transposed: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = heads(h, t, transposed), heads(g, s, transposed), heads(g, s, transposed)
    given = MASKS[mask](2, h, t, s)
    out, lse = dt.attention_masked(q, k, v, given, 0.3)
    want = F.scaled_dot_product_attention(q, k, v, given, scale=0.3, enable_gqa=g != h)
    cotangent = torch.randn_like(out)
    close(out, want)
    grads = torch.autograd.grad(out, (q, k, v), cotangent)
    for a, b in zip(grads, torch.autograd.grad(want, (q, k, v), cotangent), strict=True):
        close(a, b, 3e-6)
    assert lse.is_contiguous() and not lse.requires_grad and lse.isfinite().all()
    plain = [x.detach() for x in (q, k, v)]
    for a, b in zip(attention_kernels.written_out(*plain, given, 0.3), (out, lse), strict=True):
        close(a, b)
    written = attention_kernels.written_out_backward(
        cotangent, *plain, given, out.detach(), lse, 0.3
    )
    for a, b in zip(written, grads, strict=True):
        close(a, b, 3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("is_bool", [False, True])
def test_attention_masked_matches_float64_in_other_dtypes(
    dtype: torch.dtype, is_bool: bool
) -> None:
    torch.manual_seed(0)
    q, k = heads(4, 5, True, dtype), heads(2, 9, True, dtype)
    added = torch.randn(2, 1, 5, 9)
    mask = added < 1 if is_bool else added
    exact = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    out, lse = dt.attention_masked(q, k, k, mask, 0.3)
    given = mask if is_bool else mask.double()
    want, _ = dt.attention_masked(exact[0], exact[1], exact[1], given, 0.3)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-7, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    close(out.double(), want, tolerance)
    grads = torch.autograd.grad(out.double().sum(), (q, k))
    for a, b in zip(grads, torch.autograd.grad(want.sum(), exact), strict=True):
        close(a.double(), b, tolerance)


def test_attention_masked_gradient_of_mask_matches_torch() -> None:
    torch.manual_seed(0)
    q, k = heads(4, 5, False, torch.float64), heads(2, 7, False, torch.float64)
    for shape in ((2, 4, 5, 7), (1, 4, 1, 7), (5, 7), (2, 1, 5, 1)):
        mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        mine, theirs = (
            torch.autograd.grad(out.pow(2).sum(), (mask, q, k))
            for out in (
                dt.attention_masked(q, k, k, mask, 0.3)[0],
                F.scaled_dot_product_attention(
                    q, k, k, mask.expand(2, 4, 5, 7), scale=0.3, enable_gqa=True
                ),
            )
        )
        for a, b in zip(mine, theirs, strict=True):
            close(a, b, 3e-6)


def test_attention_masked_passes_torch_opcheck() -> None:
    q, k, mask = heads(4, 5, True), heads(2, 7, True), torch.rand(2, 1, 5, 7) < 0.7
    torch.library.opcheck(dt.attention_masked.default, (q, k, k, mask, 0.3))
    plain = q.detach(), k.detach(), k.detach(), mask
    out, lse = dt.attention_masked(*plain, 0.3)
    args = (torch.randn_like(out), *plain, out, lse, 0.3)
    torch.library.opcheck(dt.attention_masked_backward.default, args)


@pytest.mark.parametrize(("groups", "t"), [(8, 1), (2, 1), (2, 6)])
def test_attention_masked_row_is_bitwise_independent_of_other_rows(groups: int, t: int) -> None:
    """As for the slots of a decode step: other rows and masked positions may hold any values."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, h, n, 64) for h, n in ((8, t), (groups, 128), (groups, 128)))
    lengths = torch.randint(8, 100, (8,))
    seen = (torch.arange(128) < lengths[:, None])[:, None, None]
    out, lse = dt.attention_masked(q, k, v, seen, 0.1)
    for row, number in ((0, 1.0), (3, float("nan")), (7, float("inf"))):
        others = torch.arange(8) != row
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[others] = number
        for x in changed[1:]:
            x[row, :, int(lengths[row]) :] = 3e3  # stale
        again, stats = dt.attention_masked(*changed, seen, 0.1)
        assert torch.equal(again[row], out[row]) and torch.equal(stats[row], lse[row])


def test_masked_nan_key_spoils_only_its_own_row_as_in_torch() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    seen = (torch.arange(16) < torch.tensor([5, 9])[:, None])[:, None, None]
    clean, _ = dt.attention_masked(q, k, v, seen, 0.3)
    for stale in (k, v):
        stale[0, :, 12] = float("nan")
        out, _ = dt.attention_masked(q, k, v, seen, 0.3)
        want = F.scaled_dot_product_attention(q, k, v, seen, scale=0.3, enable_gqa=True)
        assert want[0].isnan().any() and torch.equal(out[0].isnan(), want[0].isnan())
        assert torch.equal(out[1], clean[1])
        stale[0, :, 12] = 0.0


@pytest.mark.parametrize(
    ("b", "h", "g", "t", "s"),
    [(0, 4, 2, 3, 3), (2, 0, 0, 3, 3), (2, 4, 2, 0, 3), (2, 4, 2, 3, 0)],
)
def test_attention_masked_of_empty_dims_returns_zeros(
    b: int, h: int, g: int, t: int, s: int
) -> None:
    q = torch.randn(b, h, t, 8, requires_grad=True)
    k = torch.randn(b, g, s, 8, requires_grad=True)
    out, lse = dt.attention_masked(q, k, k, torch.ones(b, 1, 1, s, dtype=torch.bool), 1.0)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert float(out.detach().abs().sum()) == 0
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert float(dq.abs().sum()) == 0 and float(dk.abs().sum()) == 0


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.ones(2, 3, 1, 7, dtype=torch.bool), r"broadcasts to \[2, 4, 5, 7\]"),
        (torch.ones(1, 2, 4, 5, 7, dtype=torch.bool), "broadcasts to"),
        (torch.ones(5, 7, dtype=torch.int64), "bool or float mask"),
    ],
)
def test_attention_masked_on_meta_tensors_refuses_unsupported_masks(
    mask: Tensor, match: str
) -> None:
    q, k = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(2, 2, 7, 8, device="meta")
    with pytest.raises(ValueError, match=match):
        dt.attention_masked(q, k, k, mask.to("meta"), 1.0)


def rows(n: int = 7, v: int = 10, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    target = torch.randint(0, v, (n,), generator=g)
    target[1] = -100
    return (torch.randn(n, v, generator=g) * 3).to(dtype).requires_grad_(), target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cross_entropy_rows_matches_torch_with_gradients(dtype: torch.dtype) -> None:
    logits, target = rows(dtype=dtype)
    exact = logits.detach().double().requires_grad_()
    loss, stats = dt.cross_entropy_rows(logits, target, -100)
    want = F.cross_entropy(exact, target, reduction="none")
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == stats.dtype == accumulation
    close(loss.double(), want, 1e-6)
    cotangent = torch.randn(want.shape, dtype=torch.float64)
    got = torch.autograd.grad(loss, logits, cotangent.to(loss.dtype))[0]
    expected = torch.autograd.grad(want, exact, cotangent)[0]
    assert got.dtype == dtype
    close(got.double(), expected, 4e-3 if dtype == torch.bfloat16 else 1e-6)


SPLITS: list[list[list[int]]] = [
    [[0, 5], [5, 10]],
    [[0, 4], [4, 8], [8, 10]],
    [[0, 2, 6, 8], [2, 6], [8, 10]],  # blocks: a rank holds two intervals
    [[0, 10], []],  # an empty shard has no interval: see below
]


@pytest.mark.parametrize("split", SPLITS)
def test_cross_entropy_over_sharded_vocabulary_matches_torch(split: list[list[int]]) -> None:
    """The forward reduces three numbers per row over the shards; the backward reduces nothing."""
    logits, target = rows()
    want = F.cross_entropy(logits, target, reduction="none")
    cotangent = torch.randn(7)
    expected = torch.autograd.grad(want, logits, cotangent)[0]
    whole = logits.detach()
    intervals = [s or [10, 10] for s in split]
    columns = [
        [c for a, b in zip(s[::2], s[1::2], strict=True) for c in range(a, b)] for s in intervals
    ]
    shards = [whole[:, c] for c in columns]
    parts = [dt.ce_stats(x, target, -100, s) for x, s in zip(shards, intervals, strict=True)]
    stats = fold(parts, "softmax")
    close(dt.ce_loss(stats, target, -100, 10), want.detach())
    got = torch.empty(7, 10)
    for x, s, c in zip(shards, intervals, columns, strict=True):
        got[:, c] = dt.ce_backward(cotangent, x, stats, target, -100, s)
    close(got, expected)


def test_cross_entropy_shard_of_minus_infinity_adds_nothing() -> None:
    """Covers padding of the vocabulary that is set to -inf, and a rank without vocabulary
    entries."""
    logits, target = rows()
    whole = torch.cat([logits.detach(), torch.full((7, 5), -torch.inf)], 1)
    pieces = ([0, 10], [10, 15], [15, 15])
    stats = fold([dt.ce_stats(whole[:, a:b], target, -100, [a, b]) for a, b in pieces], "softmax")
    assert torch.equal(stats, dt.ce_stats(logits.detach(), target, -100))
    assert torch.equal(stats, dt.ce_stats(whole, target, -100))
    ones = torch.ones(7)
    got = [dt.ce_backward(ones, whole[:, a:b], stats, target, -100, [a, b]) for a, b in pieces]
    wanted = dt.ce_backward(ones, logits.detach(), stats, target, -100)
    assert torch.equal(torch.cat(got, 1), torch.cat([wanted, torch.zeros(7, 5)], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cross_entropy_in_pieces_is_bitwise_equal_to_rows_computed_alone(
    dtype: torch.dtype,
) -> None:
    """The rows are computed in several pieces, the last one shorter. The backward also equals the
    plain formula on the whole tensor."""
    v = 3001
    n = 2 * (PIECE_ELEMENTS // v) + 5
    logits, target = rows(n, v, dtype)
    x = logits.detach()
    stats = dt.ce_stats(x, target, -100)
    maximum = x.amax(1, keepdim=True).to(stats.dtype)
    assert torch.equal(stats[:, 1], (x - maximum).exp().sum(1))
    assert torch.equal(
        stats, torch.cat([dt.ce_stats(x[i : i + 1], target[i : i + 1], -100) for i in range(n)])
    )
    grad = torch.rand(n).to(stats.dtype)
    hot = F.one_hot(target.clamp(0), v).to(stats.dtype)
    plain = ((x - maximum).exp() / stats[:, 1:2] - hot) * grad[:, None]
    plain[target == -100] = 0
    assert torch.equal(dt.ce_backward(grad, x, stats, target, -100), plain.to(dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_with_all_targets_ignored_matches_torch(reduction: str) -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    target = torch.full((3,), -100)
    loss, *_ = dt.cross_entropy_rows(logits, target, -100)
    total = loss.sum() if reduction == "sum" else loss.sum() / dt.ce_count(target, -100)
    want = F.cross_entropy(logits, target, reduction=reduction)
    assert torch.equal(total.isnan(), want.isnan())
    assert torch.autograd.grad(total, logits)[0].tolist() == torch.zeros(3, 4).tolist()


def test_cross_entropy_target_out_of_range_raises_index_error() -> None:
    logits, target = rows()
    target[2] = 10
    with pytest.raises(IndexError, match="Target 10 is out of bounds for 10 classes"):
        dt.cross_entropy_rows(logits, target, -100)


def test_cross_entropy_intervals_must_cover_local_dim() -> None:
    logits, target = rows()
    with pytest.raises(ValueError, match=r"hold 4 indices, but the local dim has 10"):
        dt.ce_stats(logits, target, -100, [0, 4])


@pytest.mark.parametrize("op", ["rows", "stats", "loss", "count", "backward"])
def test_cross_entropy_ops_pass_torch_opcheck(op: str) -> None:
    logits, target = rows()
    x, n, stats = logits.detach(), torch.rand(7) + 1, torch.rand(7, 3) + 1
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rows": (dt.cross_entropy_rows, (logits, target, -100)),
        "stats": (dt.ce_stats, (x, target, -100, [0, 4, 6, 12])),
        "loss": (dt.ce_loss, (stats, target, -100, 10)),
        "count": (dt.ce_count, (target, -100)),
        "backward": (dt.ce_backward, (n, x, stats, target, -100, [0, 4, 6, 12])),
    }
    function, args = calls[op]
    torch.library.opcheck(function.default, args)


@pytest.mark.parametrize(
    "intervals", [[[0, 5], [5, 9]], [[0, 2, 5, 7], [2, 5, 7, 9]], [[0, 9], [9, 9]]]
)
def test_embedding_over_row_shards_matches_torch_with_gradients(intervals: list[list[int]]) -> None:
    weight = torch.randn(9, 4, requires_grad=True)
    ids = torch.tensor([[0, 8, 3], [5, 3, 7]])
    want = F.embedding(ids, weight, padding_idx=3)
    grad = torch.randn(2, 3, 4)
    expected = torch.autograd.grad(want, weight, grad)[0]
    outs, grads = [], torch.empty(9, 4)
    for s in intervals:
        index = [i for a, b in zip(s[::2], s[1::2], strict=True) for i in range(a, b)]
        outs.append(dt.embedding_shard(weight.detach()[index], ids, s, 9))
        grads[index] = dt.embedding_shard_backward(grad, ids, len(index), s, 3)
    close(sum(outs), want.detach())  # type: ignore[arg-type]
    close(grads, expected)
    with pytest.raises(IndexError, match="index 9 is out of range for a dim of size 9"):
        dt.embedding_shard(weight.detach()[:5], torch.tensor([3, 9]), [0, 5], 9)


def test_embedding_shard_and_annotate_ops_pass_torch_opcheck() -> None:
    ids = torch.tensor([[0, 8, 3], [5, 3, 7]])
    torch.library.opcheck(dt.embedding_shard.default, (torch.randn(4, 2), ids, [2, 6], 9))
    args = (torch.randn(2, 3, 2), ids, 4, [2, 6], -1)
    torch.library.opcheck(dt.embedding_shard_backward.default, args)
    torch.library.opcheck(dt.annotate.default, (torch.randn(3, 2).t().requires_grad_(), "a b@tp"))
    torch.library.opcheck(dt.annotate_backward.default, (torch.randn(3, 2), "a b@tp"))
