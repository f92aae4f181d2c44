"""Sample calls of ops that are not pointwise; see draw.py."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decomposition_table

from tests.certify.samples.draw import Call, Draw, Sample, call, each, of

aten = torch.ops.aten


_OVER_DIMS = of("a b c", [1]), of("a b c", [0, -1], True)
_OVER_DIM = of("a b c", 1), of("a b c", -1, True)


def _one_true(d: Draw, dims: str) -> torch.Tensor:
    """A tensor that is True in one place, which one rank holds."""
    found = torch.zeros(d.shape(dims), dtype=torch.bool)
    found.view(-1)[-1 if d.sign > 0 else 0] = True
    return found


def _halves(d: Draw) -> Call:
    return call(d.ints("a b", 2).double(), -1, True)


REDUCTIONS: dict[str, list[Sample]] = {
    **each("mean.dim amin.default logsumexp.default", *_OVER_DIMS),
    "aten.sum.dim_IntList": [*_OVER_DIMS, of("a b:5", [0]), of("?a b", [0]), of("a b", None)],
    "aten.amax.default": [*_OVER_DIMS, of("a b:-9:9", [0])],
    **each("argmin.default max.dim min.dim prod.dim_int", *_OVER_DIM),
    "aten.argmax.default": [*_OVER_DIM, of("a b")],
    **each("sum mean max min", of("a b"), of(""), overload="default"),
    "aten.any.default": [lambda d: call(_one_true(d, "a b"))],
    **each("any.dim all.dim", of("?a b", 0), _halves),
    "aten.any.dims": [lambda d: call(_one_true(d, "a b c"), [0, 1])],
    "aten.all.default": [lambda d: call(~_one_true(d, "a b"))],
    "aten.all.dims": [lambda d: call(~_one_true(d, "a b c"), [0, 1])],
    **each("var var_mean std", of("a b", [1], correction=0, keepdim=True), overload="correction"),
    **each("softmax.int log_softmax.int", of("a b c", -1), of("a b", 0)),
    **each("cumsum.default cumprod.default _safe_softmax.default", of("a b c", -1), of("a b", 0)),
    **each("_softmax.default _log_softmax.default", of("a b c", -1, False)),
    "aten._softmax_backward_data.default": [
        lambda d: call(d("a b"), d("a b").softmax(1), 1, torch.float64)
    ],
    "aten._log_softmax_backward_data.default": [
        lambda d: call(d("a b"), d("a b").log_softmax(1), 1, torch.float64)
    ],
    "aten.flip.default": [of("a b c", [0, 2])],
    "aten.sort.default": [of("a b")],
    "aten.sort.stable": [of("a b", stable=True, dim=0)],
    "aten.argsort.default": [of("a b", 0)],
    "aten.topk.default": [of("a b", 2), of("a b", 1, 0)],
    "aten.mse_loss.default": [of("a b", "a b"), of("a b", "a b", 2), of("a b", "a b", 0)],
    "aten.mse_loss_backward.default": [
        *(of("", "a b", "a b", 1), of("", "a b", "a b", 2), of("a b", "a b", "a b", 0)),
    ],
}


def _layer_norm_backward(d: Draw) -> Call:
    x, weight, bias = d("b t d"), d("d"), d("d")
    _, mean, rstd = aten.native_layer_norm(x, [d.size("d")], weight, bias, 1e-5)
    mask = [True, True, True]
    return call(d("b t d"), x, [d.size("d")], mean, rstd, weight, bias, mask)


def _layer_norm_backward_plain(d: Draw) -> Call:
    x = d("b t d")
    _, mean, rstd = aten.native_layer_norm(x, [d.size("d")], None, None, 1e-5)
    return call(d("b t d"), x, [d.size("d")], mean, rstd, None, None, [True, False, False])


def rms_norm_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """CPU has no kernel for it: run the definition of torch's decompositions on the given
    shards."""
    return decomposition_table[aten._fused_rms_norm_backward.default](*args)


# What is run in place of ops that have no CPU kernel.
STAND_INS = {"aten._fused_rms_norm_backward.default": rms_norm_backward}


def _rms_norm_backward(d: Draw) -> Call:
    x, weight = d("b t d"), d("d")
    _, rstd = aten._fused_rms_norm(x, [d.size("d")], weight, 1e-5)
    return call(d("b t d"), x, [d.size("d")], rstd, weight, [True, True])


def _attention_backward(d: Draw, heads: int, groups: int, causal: bool) -> Call:
    q, k, v = (d(f"b {n} t e") for n in (heads, groups, groups))
    out, lse = torch.ops.dt.attention(q, k, v, causal, 0.5)
    return call(d(f"b {heads} t e"), q, k, v, out, lse, causal, 0.5)


def _attention_of(
    d: Draw, heads: int, groups: int, options: str, keys: str = "t", part: bool = False
) -> tuple[list[Any], list[Any]]:
    """Return q, k, v and the options of an attention op. ``options`` has letters: c is_causal, w a
    window, s a softcap, d documents, p padding, k sinks. Values are wider than keys."""
    tensors = [d(f"b {heads} t 4"), d(f"b {groups} {keys} 4"), d(f"b {groups} {keys} 6")]
    values: list[tuple[Any, str, Any]] = []
    if "d" in options:
        values.append((d.ints("b t", 2), "eq", d.ints(f"b {keys}", 2)))
    if "p" in options:
        values.append((None, "key", d.bools(f"1 {keys}")))
    window = [0, 0] if part else [2, -1] if "w" in options else []
    queries = [q for q, _, _ in values if q is not None]
    mask = [window, 0.7 if "s" in options else 0.0, queries, [k for _, _, k in values]]
    sinks = d(str(heads)) if "k" in options else None
    return tensors, ["c" in options, 0.5, *mask, [word for _, word, _ in values], sinks]


def _attention_with(d: Draw, heads: int, groups: int, options: str) -> Call:
    tensors, others = _attention_of(d, heads, groups, options, "s")
    return call(*tensors, *others)


def _attention_with_backward(d: Draw, heads: int, groups: int, options: str) -> Call:
    tensors, others = _attention_of(d, heads, groups, options, "s")
    results = torch.ops.dt.attention(*tensors, *others)
    return call(d(f"b {heads} t 6"), *tensors, *results, *others[:-1])


def _attention_part(d: Draw, heads: int, groups: int, options: str, begins: bool) -> Call:
    """A query sees only its own key, so that parts with a shift of 0 have all pairs; parts of other
    shifts are tested together (tests/sharding/test_split_attention.py)."""
    tensors, (causal, scale, *others) = _attention_of(d, heads, groups, options, part=True)
    fold = (None, None) if begins else (d(f"b {heads} t 6"), d(f"b {heads} t"))
    return call(*tensors, *fold, causal, scale, 0, not begins, *others)


def _attention_part_backward(d: Draw, heads: int, groups: int, options: str, begins: bool) -> Call:
    tensors, others = _attention_of(d, heads, groups, options, part=True)
    results = torch.ops.dt.attention(*tensors, *others)
    dq = None if begins else d(f"b {heads} t 4")
    grads = d(f"b {heads} t 6"), *tensors, *results, dq
    return call(*grads, *others[:2], 0, *others[2:-1])


_OPTIONS = ((4, 4, "cw"), (6, 2, "dk"), (6, 3, "cps"), (4, 1, "cwdpsk"))
_PARTS = ((4, 4, "c", True), (6, 2, "dk", False), (6, 3, "cps", False))


def _attention_masked_backward(d: Draw, heads: int, groups: int, mask: str) -> Call:
    (q, k, v, seen, scale), _ = _attention_masked(heads, groups, mask)(d)
    out, lse = torch.ops.dt.attention_masked(q, k, v, seen, scale)
    return call(d(f"b {heads} t 4"), q, k, v, seen, out, lse, scale)


def _attention_masked(heads: int, groups: int, mask: str) -> Sample:
    """``mask``: its dims; a float, or a bool of which some rows may hide every key."""
    return of(f"b {heads} t 4", f"b {groups} s 4", f"b {groups} s 4", mask, 0.5)


def _cache_attention(heads: int, groups: int, mask: str, softcap: float, width: int) -> Sample:
    """3 parts of 2 blocks of 2 positions."""
    k, v = f"b {groups} 12 4", f"b {groups} 12 {width}"
    return of(f"b {heads} t 4", k, v, mask, 0.5, 3, 2, softcap)


def _pick_heads(have: list[int], heads: list[int]) -> Sample:
    """Keys or values in which the heads of one group are equal."""
    return lambda d: call(d(f"b {max(have) + 1} s 4")[:, have], have, heads)


_MASKS = (
    (4, 4, "?b 1 1 s"), (6, 3, "?b 1 1 s"), (6, 2, "?b 1 t s"), (4, 2, "b 4 t s"), (4, 4, "t s"),
    (6, 1, "1 6 1 s"), (2, 2, "?b 1 t 1"),
)  # fmt: skip


def _rms_backward(d: Draw, offset: float) -> Call:
    x, weight = d("b t d"), d("d")
    _, rstd = torch.ops.dt.rms_norm(x, weight, 1e-5, offset, x.dtype, x.dtype)
    return call(d("b t d"), x, rstd, weight, offset)


MATMUL: dict[str, list[Sample]] = {
    "aten.mm.default": [of("m k", "k n")],
    "aten.bmm.default": [of("b m k", "b k n")],
    "aten.mv.default": [of("m k", "k")],
    "aten.dot.default": [of("k", "k")],
    "aten.addmm.default": [
        of("n", "m k", "k n", beta=2.0, alpha=0.5),
        of("m n", "m k", "k n"),
        of("1 n", "m k", "k n"),
    ],
    "aten.baddbmm.default": [of("b 4 3", "b 4 k", "b k 3")],
    "aten.linear.default": [of("b t k", "n k"), of("b k", "n k", "n")],
    "dt.attention.default": [
        of(f"b {heads} t e", f"b {groups} t e", f"b {groups} t e", causal, 0.5)
        for heads, groups, causal in ((4, 4, True), (6, 2, False), (6, 3, True))
    ]
    + [lambda d, how=how: _attention_with(d, *how) for how in _OPTIONS],
    "dt.attention_backward.default": [
        lambda d, how=how: _attention_backward(d, *how)
        for how in ((4, 4, True), (6, 2, False), (3, 3, True))
    ]
    + [lambda d, how=how: _attention_with_backward(d, *how) for how in _OPTIONS],
    "dt.attention_part.default": [lambda d, how=how: _attention_part(d, *how) for how in _PARTS],
    "dt.attention_part_backward.default": [
        lambda d, how=how: _attention_part_backward(d, *how) for how in _PARTS
    ],
    "dt.attention_masked.default": [_attention_masked(*m) for m in _MASKS],
    "dt.attention_masked_backward.default": [
        lambda d, m=m: _attention_masked_backward(d, *m) for m in _MASKS
    ],
    "dt.cache_attention.default": [
        _cache_attention(4, 4, "?b 1 1 12", 0.0, 4),
        _cache_attention(6, 3, "b 1 t 12", 0.0, 4),
        _cache_attention(6, 2, "?b 1 t 12", 2.0, 4),
        _cache_attention(2, 2, "?1 1 t 12", 0.0, 3),
    ],
    "dt.cache_attention_fold.default": [of("3 b h t 5"), of("3 b h t 5", "h")],
    "dt.pick_heads.default": [
        _pick_heads([0, 1], [0, 0, 0, 1, 1, 1]),
        _pick_heads([0, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1]),  # the copies of 3 ranks
    ],
    "aten.native_layer_norm.default": [
        of("b t d", ["d"], "d", "d", 1e-5),
        of("b t d", ["t", "d"], None, None, 1e-5),
    ],
    "aten.native_layer_norm_backward.default": [_layer_norm_backward, _layer_norm_backward_plain],
    "aten._fused_rms_norm.default": [of("b t d", ["d"], "d", 1e-5), of("b t d", ["d"], None, 1e-5)],
    "aten._fused_rms_norm_backward.default": [_rms_norm_backward],
    "dt.rms_norm.default": [
        of("b t d", "d", 1e-5, offset, torch.float32, torch.float32) for offset in (0.0, 1.0)
    ],
    "dt.rms_norm_backward.default": [lambda d, o=o: _rms_backward(d, o) for o in (0.0, 1.0)],
    "dt.add_rms_norm.default": [of("b t d", "b t d", "d", 1e-5, 1.0, torch.float32, torch.float32)],
    "dt.add_layer_norm.default": [
        of("b t d", "b t d", "d", "d", 1e-5),
        of("b d", "b d", "d", "d", 1e-5),
    ],
    "dt.gated.default": [
        lambda d: call(d("b t d"), d("b t d"), "silu"),
        lambda d: call(d("b d"), d("b d"), "gelu_new"),
    ],
    "dt.gated_backward.default": [
        lambda d: call(d("b t d"), d("b t d"), d("b t d"), "silu"),
        lambda d: call(d("b d"), d("b d"), d("b d"), "gelu_tanh"),
    ],
    "dt.bias_gelu.default": [
        lambda d: call(d("b t d"), d("d"), "gelu"),
        lambda d: call(d("d"), d("d"), "gelu_new"),
    ],
    "dt.bias_gelu_backward.default": [
        lambda d: call(d("b t d"), d("b t d"), d("d"), "gelu"),
        lambda d: call(d("b d"), d("b d"), d("d"), "gelu_tanh"),
    ],
    "dt.rope.default": [of("b 4 t 6", "t 6", "t 6"), of("b 4 t 6", "b 1 t 6", "b 1 t 6")],
    "dt.rope_backward.default": [of("b 4 t 6", "1 1 t 6", "1 1 t 6", torch.float32)],
    "aten.view.default": [
        lambda d: call(d("b t d"), [d.size("b") * d.size("t"), d.size("d")]),
        of("b 12", ["b", 2, 6]),
        of("b 4 6", [-1, 24]),
        of("6 4 b", [4, 6, "b"]),
        of("b 12 3", ["b", 4, 9]),
        of("1 b", ["b", 1, 1]),
        of("1 1", []),
    ],
    "aten._unsafe_view.default": [
        lambda d: call(d("b t d"), [d.size("b"), d.size("t") * d.size("d")])
    ],
    "aten.reshape.default": [of("b 12", ["b", 3, 4])],
    "aten.expand.default": [of("a 1", ["a", "b"]), of("a b", ["c", -1, -1]), of("", ["c", 3])],
    "aten.repeat.default": [of("a b", [2, 3]), of("a b", [2, 1, 4]), of("a b", [2, 0])],
    "aten.permute.default": [of("a b c", [2, 0, -2])],
    "aten.t.default": [of("a b"), of("a")],
    "aten.transpose.int": [of("a b c", 0, -1)],
    "aten.unsqueeze.default": [of("a b", 1), of("a b", -1)],
    "aten.squeeze.default": [of("a 1 b 1")],
    "aten.squeeze.dim": [of("a 1 b", 1), of("a b", 0)],
    "aten.squeeze.dims": [of("a 1 b 1", [1, -1])],
    "aten.slice.Tensor": [
        of("a 6", 1, 0, 3),
        of("a 9", -1, 2, 7),
        of("a b", 0, 0, 9223372036854775807),
        of("a 7", 1, -3, None),
        of("a 7", 1, 0, 9, 2),
        of("a 4", 1, 2, 2),
        of("a 12", -1, 0, 2**63 - 1, 2),
        of("a 12", 1, 2, 12, 3),
    ],
    "aten.slice_backward.default": [
        of("a 3", ["a", 6], 1, 0, 3, 1),
        of("a 5", ["a", 9], 1, 2, 7, 1),
        of("a 4", ["a", 7], 1, 0, 9, 2),
        of("a 6", ["a", 12], 1, 0, 2**63 - 1, 2),
        of("a 4", ["a", 12], 1, 2, 12, 3),
    ],
    "aten.select.int": [of("a b c", 1, -1), of("a b", 0, 0)],
    "aten.select_backward.default": [of("a c", ["a", 3, "c"], 1, -1)],
    "aten.split.Tensor": [of("a 12", 4, 1), of("a 7", 3, -1), of("a b", 100)],
    "aten.split_with_sizes.default": [
        of("a 12", [6, 2, 4], 1),
        of("a 6", [1, 5], 1),
        of("a 6", [6, 0], 1),
    ],
    "aten.chunk.default": [of("a 12", 3, -1), of("7 b", 2)],
    "aten.unbind.int": [of("a b 3", -1)],
    "aten.stack.default": [lambda d: call([d("a b"), d("a b")], 1)],
    "aten.constant_pad_nd.default": [
        of("a b", [1, 2]),
        of("a b", [0, 2, 3, 0], 1.5),
        of("a 6", [-1, 2]),
    ],
    "aten.full.default": [of(["a", "b"], 2.0), of([], 2.0)],
    **each("zeros.default empty.memory_format", of(["a", "b"])),
    "aten.ones.default": [of(["a", "b"], dtype=torch.int64)],
    "aten.new_zeros.default": [of("a b", ["a", "b"]), of("a b", ["c", "b", "a"])],
    "aten.new_ones.default": [of("a b", ["b", "a"])],
    "aten.new_full.default": [of("a b", ["b"], 3.0)],
    "aten.new_empty.default": [of("a b", ["a", "b"])],
    "aten.scalar_tensor.default": [of(2.0)],
    "aten.arange.default": [
        lambda d: call(d.size("a")),
        lambda d: call(d.size("a"), dtype=torch.float64),
    ],
    "aten.arange.start": [lambda d: call(3, 3 + d.size("a"))],
    "aten.arange.start_step": [of(1, 12, 2), of(0.5, 4.0, 0.5, dtype=torch.float64)],
    "aten.tril.default": [of("a b"), of("c a b", 1)],
    "aten.triu.default": [of("a b", 1), of("a b", -1)],
}

IGNORE = -100


def _target(d: Draw) -> torch.Tensor:
    target = d.ints("n", d.size("v"))
    target[0] = IGNORE
    return target


def _cross_entropy(d: Draw) -> tuple[torch.Tensor, ...]:
    """Logits, their rows' statistics, and targets, one of them ignored."""
    logits, target = d("n v"), _target(d)
    return logits, torch.ops.dt.ce_stats(logits, target, IGNORE), target


def _ce_loss(d: Draw) -> Call:
    return call(*_cross_entropy(d)[1:], IGNORE, d.size("v"))


def _ce_backward(d: Draw) -> Call:
    return call(d("n"), *_cross_entropy(d), IGNORE)


def _next_tokens(d: Draw) -> Call:
    """Greedy and drawn rows, with and without filters."""
    n = d.size("n")
    request = torch.tensor([[7 << 40, 0], [5, 2], [9, 0]]).repeat(n, 1)[:n]
    knobs = torch.tensor([[0.0, 1.0], [0.7, 1.0], [1.3, 0.6]]).repeat(n, 1)[:n]
    return call(d("n v"), torch.arange(n), request, knobs)


def _balance(ranks: int, num: int, *, backward: bool = False, masked: bool = True) -> Sample:
    """The sums of a load-balancing loss over the rows of ``num`` microbatches on ``ranks``."""

    def sample(d: Draw) -> Call:
        rows, e, k = ranks * num * d.size("r"), d.size("e"), 2
        mask = d(f"{rows}") > 0 if masked else None
        if backward:
            return call(d(f"{num} 3 e"), mask, rows, torch.float64, ranks, num)
        return call(d(f"{rows} e"), d.ints(f"{rows} {k}", e, -1), mask, ranks, num)

    return sample


def _balance_samples(*, backward: bool = False) -> list[Sample]:
    return [
        _balance(1, 1, backward=backward),
        _balance(2, 2, backward=backward),
        _balance(1, 3, backward=backward, masked=False),
        _balance(4, 1, backward=backward, masked=False),
    ]


TOKENS: dict[str, list[Sample]] = {
    "aten.embedding.default": [
        lambda d: call(d("v d"), d.ints("b t", d.size("v"))),
        lambda d: call(d("v d"), d.ints("b", d.size("v")), 1),
    ],
    "aten.embedding_dense_backward.default": [
        lambda d: call(d("b t d"), d.ints("b t", d.size("v")), d.size("v"), -1, False),
        lambda d: call(d("b d"), d.ints("b", d.size("v")), d.size("v"), 1, False),
    ],
    "aten.embedding_renorm.default": [
        lambda d: call(d("v d"), d.ints("b t", d.size("v")), 0.5, 2.0),
    ],
    "dt.ce_stats.default": [lambda d: call(d("n v"), _target(d), IGNORE)],
    "dt.ce_loss.default": [_ce_loss],
    "dt.ce_count.default": [lambda d: call(_target(d), IGNORE)],
    "dt.ce_backward.default": [_ce_backward],
    "dt.cross_entropy_rows.default": [lambda d: call(d("n v"), _target(d), IGNORE)],
    "dt.next_tokens.default": [_next_tokens],
    "dt.balance_sums.default": _balance_samples(),
    "dt.balance_sums_grad.default": _balance_samples(backward=True),
    "dt.balance_loss.default": [of("+m 3 e", 4.0)],
    "dt.balance_loss_grad.default": [of("", "+m 3 e", 4.0)],
}

TENSORS: dict[str, list[Sample]] = {
    **REDUCTIONS,
    **MATMUL,
    **TOKENS,
}


# Views that copy, partial writes, diagonals, windows, strides and creation.
ARRANGEMENT: dict[str, list[Sample]] = {
    "aten._reshape_alias.default": [of("a 12", ["a", 3, 4], [12, 4, 1])],
    "aten.view_copy.default": [of("a 12", ["a", 3, 4])],
    "aten.expand_copy.default": [of("a 1", ["a", "b"])],
    "aten.permute_copy.default": [of("a b c", [2, 0, -2])],
    "aten.t_copy.default": [of("a b")],
    "aten.transpose_copy.int": [of("a b c", 0, -1)],
    "aten.unsqueeze_copy.default": [of("a b", 1)],
    "aten.squeeze_copy.default": [of("a 1 b")],
    "aten.squeeze_copy.dim": [of("a 1 b", 1)],
    "aten.squeeze_copy.dims": [of("a 1 b 1", [1, -1])],
    "aten.slice_copy.Tensor": [of("a 9", -1, 2, 7)],
    "aten.narrow_copy.default": [of("a 9", 1, 2, 5), of("a 9", 1, -4, 3)],
    "aten.select_copy.int": [of("a b c", 1, -1)],
    **each("split_copy.Tensor unsafe_split.Tensor", of("a 12", 4, 1)),
    **each(
        "split_with_sizes_copy.default unsafe_split_with_sizes.default", of("a 12", [6, 2, 4], 1)
    ),
    "aten.unbind_copy.int": [of("a b 3", -1)],
    "aten.slice_scatter.default": [
        of("a 9", "a 5", 1, 2, 7),
        of("a b", "a b", 0),
        of("a 7", "a 4", 1, 0, 9, 2),
        of("a 4", "a 0", 1, 2, 2),
        of("a 12", "a 6", 1, 1, 12, 2),
    ],
    "aten.select_scatter.default": [of("a 3 b", "a b", 1, -1)],
    "aten.diagonal_scatter.default": [of("a 3 4 b", "a b 3", 1, 1, 2)],
    "aten.as_strided_scatter.default": [of("a 6", "2 3", [2, 3], [3, 1], 1)],
    "aten.diagonal.default": [of("a 3 4 b", 1, 1, 2), of("a b"), of("a 3 4", -1, -2, -1)],
    "aten.diagonal_copy.default": [of("a 3 4 b", -1, 2, 1)],
    "aten.diagonal_backward.default": [of("a b 3", ["a", 3, 4, "b"], 1, 1, 2)],
    "aten.diag_embed.default": [of("a b"), of("a b 3", 1, 0, 2)],
    "aten.cat.default": [
        lambda d: call([d("a b"), d("a c")], 1),
        lambda d: call([d("a 4"), d("a 4")], -1),
        lambda d: call([d("a b"), d("a 1"), d("a 0")], 1),
        lambda d: call([d("0"), d("a b"), d("a b")], 1),
    ],
    "aten.trace.default": [of("a b")],
    "aten.unfold.default": [of("a 7 b", 1, 3, 2), of("", 0, 1, 1)],
    "aten.unfold_copy.default": [of("a 7 b", -2, 2, 1)],
    "aten.unfold_backward.default": [of("a 3 b 3", ["a", 7, "b"], 1, 3, 2)],
    "aten.roll.default": [of("a b c", [1], [1]), of("a b c", [1, -2], [0, -1]), of("a b", [3])],
    "aten.as_strided.default": [of("a 6", [2, 3], [3, 1], 1)],
    "aten.resize.default": [of("4 6", [3, 2])],
    "aten.as_strided_copy.default": [of("a 6", [2, 2], [1, 2])],
    "aten.empty_strided.default": [of(["a", "b"], ["b", 1])],
    "aten.empty_permuted.default": [of(["a", "b"], [1, 0])],
    "aten.new_empty_strided.default": [
        of("a b", ["a", "b"], ["b", 1]),
        of("a b", ["b", "a"], [1, "b"]),
    ],
    "aten._efficientzerotensor.default": [of(["a", "b"])],
}


# Random numbers (with one key, shards must be parts of the whole), values that pass a check, batch
# norm written out.
KEY = {"at_seed": 1 << 40 | 5, "at_step": 3, "op": 2}
F32, F64 = torch.float32, torch.float64


def _all_well(d: Draw, batch: str, inner: str) -> Call:
    ok = torch.ones(d.shape(batch), dtype=torch.bool)
    return call(d(f"{batch} {inner}"), ok, "a positive number is wanted, not")


def _sound(d: Draw, batch: str, inner: str) -> Call:
    info = torch.zeros(d.shape(batch), dtype=torch.int32)
    return call(d(f"{batch} {inner}"), info, "linalg.inv", not batch)


OWN: dict[str, list[Sample]] = {
    "dt.dropout.default": [of("a b", 0.25, **KEY), of("a b c", 0.5, **KEY), of("a", 1.0, **KEY)],
    "dt.dropout_add.default": [
        of("a b", "a b", 0.25, **KEY),
        of("a b c", "a b c", 0.5, **KEY),
        of("a", "a", 1.0, **KEY),
    ],
    "dt.dropout_backward.default": [of("a b", "?a b", 0.25)],
    "dt.random_integers.default": [of(["a", "b"], -3, 9, torch.int64, **KEY)],
    "dt.random_normal.default": [of(["a", "b"], F32, **KEY), of(["a", "b", "c"], F64, **KEY)],
    "dt.random_uniform.default": [
        *(of(dims, dtype, **KEY) for dims, dtype in ((["a", "b"], F32), (["a"], F32))),
        of(["a", "b"], F64, **KEY),
    ],
    "dt.checked.default": [
        lambda d, b=b, i=i: _all_well(d, b, i) for b, i in (("a b", ""), ("a", "c"), ("", "c"))
    ],
    "dt.linalg_checked.default": [
        lambda d, b=b, i=i: _sound(d, b, i) for b, i in (("a b", "c c"), ("a", "c"), ("", "c c"))
    ],
    "dt.bn_squares.default": [of("n c 3", "c"), of("n c", "c")],
    "dt.bn_sums.default": [of("n c 3", "n c 3", "c"), of("n c", "n c", "c")],
    "dt.bn_apply.default": [of("n c 3", "c", "c", "c"), of("n c", "c", "c", "c")],
    "dt.bn_backward.default": [
        of("n c 3", "n c 3", "c", "c", "c", "c"),
        of("n c", "n c", "c", "c", "c", "c"),
    ],
}
