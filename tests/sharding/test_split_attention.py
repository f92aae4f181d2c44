"""Attention of split queries, and in parts as in a ring, equals attention on one rank; its work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor.sharding.rules  # noqa: F401  registers the ops
from dtensor.sharding.local.attention_pieces import band_of, cut, visible_pairs
from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules import rule_for
from dtensor.sharding.rules.rule import FactorSharding, Strategy, fullest_over_mean, fullest_rank
from dtensor.sharding.rules.tables.attention import visible_shifts
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.testing.oracle import Case, call_of, run, run_global, trial

dt = torch.ops.dt
CONTIGUOUS, ZIGZAG = False, True


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention of q, k, v with these options of the op, after is_causal and scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    options: tuple[Any, ...]
    sinks: Tensor | None
    grad: Tensor

    def reference(self) -> tuple[Tensor, ...]:
        """Return out, lse, dq, dk, dv on one rank."""
        rest = self.is_causal, 0.5, *self.options
        out, lse = dt.attention(self.q, self.k, self.v, *rest, self.sinks)
        grads = dt.attention_backward(self.grad, self.q, self.k, self.v, out, lse, *rest)
        return out, lse, *grads


def attention(mask: str, heads: int, groups: int, size: int, dtype: Any = None) -> Attention:
    """``mask``: words: causal, window, softcap, documents, padding, sinks."""
    generator = torch.Generator().manual_seed(size)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    dtype = dtype or torch.float64
    values: list[tuple[Tensor | None, str, Tensor]] = []
    if "documents" in mask:
        documents = (rand(2, size) > 0.5).cumsum(1)
        values.append((documents, "eq", documents))
    if "padding" in mask:  # some queries of a causal attention then see no key
        values.append((None, "key", rand(2, size) > -0.5))
    window = [3, -1] if "window" in mask else []
    queries = [q for q, _, _ in values if q is not None]
    options = (window, 0.7 if "softcap" in mask else 0.0, queries, [k for _, _, k in values])
    return Attention(
        q=rand(2, heads, size, 4),
        k=rand(2, groups, size, 4),
        v=rand(2, groups, size, 6),
        is_causal="causal" in mask,
        options=(*options, [word for _, word, _ in values]),
        sinks=rand(heads) if "sinks" in mask else None,
        grad=rand(2, heads, size, 6),
    )


def split(call: OpCall, num: int, zigzag: bool) -> Strategy:
    size = rule_for(call).size["t"]
    strategy = rule_for(call).apply({"t": FactorSharding((size,), zigzag=zigzag)}, num)
    assert strategy is not None
    return strategy


def run_split(call: OpCall, num: int, zigzag: bool, given: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Run a call with its queries split over ``num`` ranks and return the results of each rank. A
    tensor of ``given`` is cut; a list has the local tensors of the ranks."""
    mesh, strategy = Mesh(cp=num), split(call, num, zigzag)
    specs, results = (
        tuple(
            TensorSpec(meta.shape, meta.dtype, mesh, (placement,))
            for meta, placement in zip(metas, placements, strict=True)
        )
        for metas, placements in (
            (call.operands, strategy.operands),
            (call.results, strategy.results),
        )
    )
    made: list[tuple[Any, ...]] = []
    for rank in range(num):
        at = {"cp": rank}
        operands = [
            x[rank] if isinstance(x, list) else shard_of(x, spec, at)
            for x, spec in zip(given, specs, strict=True)
        ]
        made.append(run(rule_for(call).local_call(call, Local(specs, results, at)), operands))
        for result, spec in zip(made[-1], results, strict=True):
            assert tuple(result.shape) == spec.local_shape(at)
    return made


def ring(a: Attention, num: int, zigzag: bool) -> tuple[list[Any], ...]:
    """Return out, lse, dq, dk and dv of the ranks, computed in parts."""
    whole, _ = call_of(dt.attention.default, (a.q, a.k, a.v, a.is_causal, 0.5, *a.options), {})
    shard = Shard(2, zigzag=zigzag)
    shifts = visible_shifts(whole, shard, num)
    wide = torch.promote_types(a.q.dtype, torch.float32)
    out: list[Any] | None = None
    lse: list[Any] | None = None
    for i in shifts:
        is_last = i == shifts[-1]
        fold = (None, None) if out is None else (a.grad.to(wide), a.grad[..., 0].to(wide))
        sinks = a.sinks if out is None else None
        args = (a.q, a.k, a.v, *fold, a.is_causal, 0.5, i, is_last, *a.options, sinks)
        call, tensors = call_of(dt.attention_part.default, args, {})
        call, _ = run_global(call, tensors)
        given: list[Any] = list(tensors)
        if out is not None:
            given[3:5] = [out, lse]
        made = run_split(call, num, zigzag, given)
        out, lse = [m[0] for m in made], [m[1] for m in made]
    dq: list[Any] | None = None
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (a.k, a.v))
    for i in shifts:
        results = a.grad, a.grad[..., 0].to(wide), None if dq is None else a.q.to(wide)
        args = (a.grad, a.q, a.k, a.v, *results, a.is_causal, 0.5, i, *a.options)
        call, tensors = call_of(dt.attention_part_backward.default, args, {})
        call, _ = run_global(call, tensors)
        given = list(tensors)
        given[4:6] = [out, lse]
        if dq is not None:
            given[6] = dq
        made = run_split(call, num, zigzag, given)
        dq = [m[0] for m in made]
        place = split(call, num, zigzag).results[1]
        for total, which in ((dk, 1), (dv, 2)):
            spec = TensorSpec(tuple(total.shape), total.dtype, Mesh(cp=num), (place,))
            for rank in range(num):
                _add(total, spec, rank, made[rank][which])
    assert out is not None and lse is not None and dq is not None
    return out, lse, dq, [dk], [dv]


def _add(total: Tensor, spec: TensorSpec, rank: int, part: Tensor) -> None:
    """Add the gradients of a rank's keys to ``total``, at the positions of the keys."""
    at = 0
    for start, stop in spec.intervals(2, {"cp": rank}):
        total[:, :, start:stop] += part[:, :, at : at + stop - start]
        at += stop - start


def check_ring(a: Attention, num: int, zigzag: bool, tolerance: float = 1e-12) -> None:
    shard = Shard(2, zigzag=zigzag)
    for want, found in zip(a.reference(), ring(a, num, zigzag), strict=True):
        spec = TensorSpec(tuple(want.shape), want.dtype, Mesh(cp=num), (shard,))
        for rank, x in enumerate(found):
            part = want if len(found) == 1 else shard_of(want, spec, {"cp": rank})
            assert x.shape == part.shape
            assert (x.double() - part.double()).abs().sum() <= tolerance * (1 + part.numel())


def check_gather(a: Attention, num: int, zigzag: bool) -> None:
    out, lse, *_ = a.reference()
    rest = a.is_causal, 0.5, *a.options
    calls = (
        (dt.attention.default, (a.q, a.k, a.v, *rest, a.sinks)),
        (dt.attention_backward.default, (a.grad, a.q, a.k, a.v, out, lse, *rest)),
    )
    for target, args in calls:
        call, operands = call_of(target, args, {})
        call, results = run_global(call, operands)
        case = Case(call=call, rule=rule_for(call), operands=operands, results=results, seed=0)
        assert trial(case, (num,), (split(call, num, zigzag),)) is None


MASKS = ("", "causal", "causal window", "causal documents", "padding", "causal padding sinks")
HEADS = ((4, 4), (4, 2), (4, 1))
SHORT = [
    ("causal", (4, 2), 16, 4, ZIGZAG),
    ("causal window softcap", (4, 4), 11, 3, ZIGZAG),
    ("causal documents padding", (4, 1), 13, 4, ZIGZAG),
    ("causal padding sinks", (4, 2), 11, 2, CONTIGUOUS),
    ("padding", (4, 4), 12, 3, CONTIGUOUS),
    ("causal", (4, 2), 5, 4, CONTIGUOUS),  # the last rank has no tokens
    ("causal sinks", (4, 2), 3, 4, CONTIGUOUS),
]
GRID = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(MASKS, HEADS, (16, 24, 11, 13), (2, 3, 4), (CONTIGUOUS, ZIGZAG))
]


@pytest.mark.parametrize(("mask", "heads", "size", "num", "zigzag"), [*SHORT, *GRID])
def test_split_attention_equals_attention_on_one_rank(
    mask: str, heads: tuple[int, int], size: int, num: int, zigzag: bool
) -> None:
    a = attention(mask, *heads, size)
    check_gather(a, num, zigzag)
    check_ring(a, num, zigzag)


@pytest.mark.parametrize("mask", ["causal", "causal window documents sinks"])
def test_parts_of_16_bits_are_folded_in_float32(mask: str) -> None:
    check_ring(attention(mask, 4, 2, 16, torch.bfloat16), 4, ZIGZAG, tolerance=4e-2)


# -- pieces and work -------------------------------------------------------------------------------


def test_whole_causal_attention_is_one_kernel_call() -> None:
    whole = ((0, 512),)
    assert [p.kind for p in cut(whole, whole, band_of(True, []), 1024)] == ["causal"]
    assert [p.kind for p in cut(whole, whole, band_of(False, [600, 600]), 1024)] == ["all"]


@pytest.mark.parametrize("window", [[], [3, -1], [2, 2], [-1, 4], [0, 0]])
@pytest.mark.parametrize("is_causal", [False, True])
def test_pieces_and_counts_agree_with_enumeration(is_causal: bool, window: list[int]) -> None:
    """Contiguous pieces, two intervals, and many short intervals."""
    band = band_of(is_causal, window)
    sides = [((0, 12),), ((4, 9),), ((0, 3), (9, 12)), tuple((i, i + 1) for i in range(0, 12, 2))]
    for (queries, keys), masked in itertools.product(
        itertools.product(sides, sides), (False, True)
    ):
        at, key = ([i for lo, hi in x for i in range(lo, hi)] for x in (queries, keys))
        want = {
            (i, j)
            for i, j in itertools.product(range(len(at)), range(len(key)))
            if -band.before <= key[j] - at[i] <= band.after
        }
        assert visible_pairs(queries, keys, band) == len(want)
        seen: list[tuple[int, int]] = []
        for piece in cut(queries, keys, band, 4, masked):
            for i, j in itertools.product(range(*piece.rows), range(*piece.keys)):
                on_diagonal = j - piece.keys[0] <= i - piece.rows[0]
                visible = {"all": True, "causal": on_diagonal, "masked": (i, j) in want}
                seen += [(i, j)] if visible[piece.kind] else []
        assert len(seen) == len(want) and set(seen) == want


def causal_call(size: int, window: Sequence[int] = ()) -> OpCall:
    q, k = torch.empty(1, 2, size, 4, device="meta"), torch.empty(1, 2, size, 4, device="meta")
    call, tensors = call_of(dt.attention.default, (q, k, k, True, 0.5, list(window)), {})
    return run_global(call, tensors)[0]


def test_flop_of_causal_attention_count_visible_pairs() -> None:
    assert rule_for(causal_call(512)).flops == 2 * (4 + 4) * 2 * (512 * 513 // 2)
    assert rule_for(causal_call(512, [1, -1])).flops == 2 * (4 + 4) * 2 * (2 * 512 - 1)


@pytest.mark.parametrize("num", [2, 4])
def test_fullest_rank_of_causal_attention(num: int) -> None:
    call = causal_call(num * 256)
    rule = rule_for(call)
    heads = rule.apply({"g": FactorSharding((2,))}, 2)
    assert heads is not None
    contiguous, zigzag = (split(call, num, kind) for kind in (CONTIGUOUS, ZIGZAG))
    share, _ = fullest_rank(call, rule, [(contiguous, num)])
    assert share == pytest.approx((2 * num - 1) / num**2, rel=4e-3)
    assert fullest_over_mean(call, rule, [(contiguous, num)]) == pytest.approx(num * share)
    share, _ = fullest_rank(call, rule, [(zigzag, num)])
    assert share == pytest.approx(1 / num, rel=1e-2)
    assert fullest_over_mean(call, rule, [(heads, 2), (zigzag, num)]) < 1.01


def test_shifts_that_no_rank_sees_are_left_out() -> None:
    assert visible_shifts(causal_call(64), Shard(2), 4) == (0, 1, 2, 3)
    assert visible_shifts(causal_call(64, [16, -1]), Shard(2), 4) == (0, 1)
    assert visible_shifts(causal_call(64, [17, -1]), Shard(2), 4) == (0, 1, 2)
    assert visible_shifts(causal_call(64, [3, -1]), Shard(2, zigzag=True), 4) == (0, 1, 3)
