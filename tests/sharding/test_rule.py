"""Tests rules: the notation, the mapping from factors to placements and back, views, and the
registry's errors.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import Meta, OpCall, Operand
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.rules import NoRule, pattern, register, registered, registry, rule_for
from dtensor.sharding.rules.notation import parse_rule
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import FactorSharding, Rule
from dtensor.sharding.rules.tables import reasons
from dtensor.sharding.rules.tables.views import factorize
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Shard
from dtensor.testing.certificates import certify_call
from dtensor.testing.execute import reference, run, trace
from dtensor.testing.oracle import call_of, run_global

aten, dt = torch.ops.aten, torch.ops.dt
F32 = torch.float32


Shapes = list[tuple[int, ...]]


def _rule(text: str, operands: Shapes, results: Shapes, **options: Any) -> Rule:
    metas = [Meta(shape, F32) for shape in operands]
    return parse_rule(text, metas, [Meta(shape, F32) for shape in results], **options)


def _texts(rule: Rule) -> list[str]:
    return [f"{list(s.operands)} -> {list(s.results)}" for s in rule.strategies(2)]


def _call(target: object, args: tuple[object, ...], *shapes: tuple[int, ...]) -> OpCall:
    """Return a call whose operands are numbered in order; the last shape is the result's."""
    return OpCall(
        target=target,  # pyright: ignore[reportArgumentType]
        args=args,
        operands=tuple(Meta(shape, F32) for shape in shapes[:-1]),
        results=(Meta(shapes[-1], F32),),
    )


MM = _call(aten.mm.default, (Operand(0), Operand(1)), (8, 6), (6, 4), (8, 4))


def test_mm_rule_has_expected_strategies_and_flop() -> None:
    assert _texts(rule_for(MM)) == [
        "[Replicate(), Replicate()] -> [Replicate()]",
        '[Partial("sum"), Replicate()] -> [Partial("sum")]',
        '[Replicate(), Partial("sum")] -> [Partial("sum")]',
        "[Shard(0), Replicate()] -> [Shard(0)]",
        '[Shard(1), Shard(0)] -> [Partial("sum")]',
        "[Replicate(), Shard(1)] -> [Shard(1)]",
    ]
    assert rule_for(MM).flops == 2 * 8 * 6 * 4


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("m k, k n -> m n", [(8, 6), (6, 4)], [(8, 4)]),
        ("b (h d) -> b h d", [(2, 12)], [(2, 3, 4)]),
        ("b (q + k) -> b q, b k", [(2, 6)], [(2, 4), (2, 2)]),
        ("b k! -> b 1", [(2, 6)], [(2, 1)]),
        (" -> a b", [], [(2, 3)]),
    ],
)
def test_rule_text_round_trips(text: str, operands: list, results: list) -> None:
    assert str(_rule(text, operands, results)).strip() == text.strip()


def test_addend_is_partial_if_contraction_is_split() -> None:
    shapes = [(4,), (8, 6), (6, 4)], [(8, 4)]
    rule = _rule("n, m k, k n -> m n", *shapes, addends=(0,))
    assert _texts(rule) == [
        "[Replicate(), Replicate(), Replicate()] -> [Replicate()]",
        "[Shard(0), Replicate(), Shard(1)] -> [Shard(1)]",
        "[Replicate(), Shard(0), Replicate()] -> [Shard(0)]",
        '[Partial("sum"), Shard(1), Shard(0)] -> [Partial("sum")]',
    ]


def test_unsplittable_op_states_reason() -> None:
    assert reasons()["aten.histogram.bin_ct"] == (
        "the edges of the bins, or their density, depend on all values"
    )
    call = _call(aten.histogram.bin_ct, (Operand(0), 4), (8, 6), (4,))
    call = replace(call, results=(Meta((4,), F32), Meta((5,), F32)))
    assert rule_for(call).factors() == ()


def test_broadcast_dims_of_size_one_have_no_factor() -> None:
    rule = _rule("..., ... -> ...", [(4, 1, 3), (5, 3)], [(4, 5, 3)])
    assert str(rule) == "e0 1 e2, e1 e2 -> e0 e1 e2"
    split = rule.apply({"e1": FactorSharding((5,))}, 2)
    assert split is not None
    assert split.operands == (REPLICATE, Shard(0))
    assert split.results == (Shard(1),)
    whole = _rule("b k! -> b k!", [(4, 6)], [(4, 6)])
    assert whole.apply({"k": FactorSharding((6,))}, 2) is None and whole.factors() == ("b",)


def test_merged_dim_splits_by_major_factor_as_units_and_minor_as_blocks() -> None:
    rule = _rule("b (h d) -> b h d", [(2, 64)], [(2, 4, 16)])
    heads = rule.apply({"h": FactorSharding((4,))}, 3)
    inner = rule.apply({"d": FactorSharding((16,))}, 2)
    assert heads is not None and inner is not None
    assert heads.operands == (Shard(1, unit=16),)
    assert inner.operands == (Shard(1, blocks=4),)
    assert heads.results == (Shard(1),) and inner.results == (Shard(2),)


def test_concatenated_dim_splits_all_parts_together_as_blocks() -> None:
    rule = _rule("b (q + k + v) -> b q, b k, b v", [(2, 12)], [(2, 6), (2, 3), (2, 3)])
    assert rule.apply({"q": FactorSharding((6,))}, 2) is None
    split = rule.strategies(2)[-1]
    assert split.operands == (Shard(1, blocks=(6, 3, 3)),)
    assert split.results == (Shard(1),) * 3
    assert rule.match(rule.operands[0], Shard(1, blocks=(6, 3, 3)), 2) == {
        "q": FactorSharding((6,)),
        "k": FactorSharding((3,)),
        "v": FactorSharding((3,)),
    }
    assert rule.match(rule.operands[0], Shard(1), 2) is None  # a cut across the parts


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=3),
    blocks=st.sampled_from([1, 2]),
    unit=st.sampled_from([1, 2]),
    zigzag=st.booleans(),
    shift=st.sampled_from([0, 1]),
    num=st.sampled_from([2, 3]),
    which=st.integers(0, 2),
)
@settings(max_examples=200, deadline=None)
def test_rule_match_inverts_rule_apply(
    sizes: list[int], blocks: int, unit: int, zigzag: bool, shift: int, num: int, which: int
):
    names = [f"f{i}" for i in range(len(sizes))]
    text = f"({' '.join(names)}) -> {' '.join(names)}"
    rule = _rule(text, [(math.prod(sizes),)], [tuple(sizes)])
    factor = names[which % len(names)]
    size = rule.size[factor]
    if size == 1 or size % blocks or (size // blocks) % unit:
        return
    if zigzag and size // blocks // unit < 2 * num:  # no spec has such a zigzag
        return
    split = FactorSharding((size // blocks,) * blocks, unit, zigzag=zigzag, shift=shift)
    assignment = {factor: split}
    there = rule.apply(assignment, num)
    assert there is not None
    shard = there.operands[0]
    assert isinstance(shard, Shard)
    back = rule.match(rule.operands[0], shard, num)
    # Another factor may have the same image; what it places must be the same.
    assert back is not None
    again = rule.apply(back, num)
    assert again is not None and again.operands[0] == shard


TWELVE = [
    shape
    for rank in range(1, 4)
    for shape in itertools.product([1, 2, 3, 4, 6, 12], repeat=rank)
    if math.prod(shape) == 12
]


@given(st.sampled_from(TWELVE), st.sampled_from(TWELVE))
@settings(max_examples=60, deadline=None)
def test_rule_of_random_view_is_certified(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    x = torch.arange(12, dtype=torch.float64).view(before)
    assert certify_call(aten.view.default, (x, list(after))).wrong == ()


def test_view_rule_has_expected_factors() -> None:
    def text(before: tuple[int, ...], after: tuple[int, ...]) -> str:
        call = _call(aten.view.default, (Operand(0), list(after)), before, after)
        return str(rule_for(call))

    assert text((2, 12), (2, 3, 4)) == "p0 (p1 p2) -> p0 p1 p2"
    assert text((2, 3, 4), (6, 4)) == "p0 p1 p2 -> (p0 p1) p2"
    assert text((6, 1), (6,)) == "p0 1 -> p0"
    assert text((6, 4), (4, 6)) == "(p0 w1!) w4! -> (p0 w2!) w3!"  # 2 divides both sizes
    assert factorize((0, 4), (4, 0)).whole == {"w0", "w1", "w2", "w3"}


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ((3, 1, 1, 7), "b 1 1 s!"),
        ((3, 6, 5, 7), "b (g r) t s!"),
        ((5, 7), "t s!"),
        ((7,), "s!"),
        ((1, 6, 1, 1), "1 (g r) 1 1"),
    ],
)
def test_attention_mask_shares_factors_with_scores(mask: tuple[int, ...], text: str) -> None:
    q, k, m = Meta((3, 6, 5, 8), F32), Meta((3, 2, 7, 8), F32), Meta(mask, torch.bool)
    call = OpCall(
        target=dt.attention_masked.default,
        args=(Operand(0), Operand(1), Operand(2), Operand(3), 0.5),
        operands=(q, k, k, m),
        results=(q, Meta((3, 6, 5), F32)),
    )
    rule = rule_for(call)
    assert rule.kind == "attention" and rule.flops == 2 * 2 * 3 * 6 * 5 * 7 * 8
    assert str(rule) == f"b (g r) t e!, b g s! e!, b g s! f!, {text} -> b (g r) t f!, b (g r) t"


@torch.library.custom_op("test_rule::mix", mutates_args=())
def _mix(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("never run")


@pytest.mark.parametrize(
    "shape, fix",
    [
        (
            (4, 1),
            'fix: dt.rule("test_rule::mix", "..., ... -> ...") if it works element by element;\n'
            '     dt.rule("test_rule::mix", "a! b!, c! d! -> e! f!")\n',
        ),
        ((3, 4), 'fix: dt.rule("test_rule::mix", "a! b!, c! d! -> e! f!")\n'),
    ],
)
def test_op_without_rule_is_refused_with_proposed_rule(shape: tuple[int, ...], fix: str) -> None:
    """An elementwise rule is proposed if the shapes broadcast."""
    op = torch.ops.test_rule.mix.default
    call = _call(op, (Operand(0), Operand(1)), (4, 4), (4, 4))
    call = replace(call, operands=(call.operands[0], Meta(shape, torch.float32)))
    with pytest.raises(NoRule) as raised:
        rule_for(call)
    assert str(raised.value) == (
        f"no rule says how test_rule.mix.default(f32[4,4], f32[{shape[0]},{shape[1]}]) may be "
        f"split: it is not in the tables of dtensor.sharding.rules.\n{fix}"
        '     is right for any op and splits nothing: remove the "!" of dims that may be\n'
        '     split, and dt.testing.certify("test_rule::mix", *arguments) says whether they may'
    )


def _unfit(call: OpCall) -> Rule:
    return pattern("a b -> a")(call)


def _broken(call: OpCall) -> Rule:
    raise KeyError("of the builder")


@pytest.mark.parametrize(
    ("builder", "reason"),
    [
        (_unfit, "the rule 'a b -> a' is for 2 tensors, the call has 3"),
        (_broken, "its rule fails with KeyError: 'of the builder'"),
    ],
)
def test_failing_rule_builder_is_reported_as_missing_rule(
    builder: Builder, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._BUILDERS, "test_rule.mix.default", builder)
    op = torch.ops.test_rule.mix.default
    with pytest.raises(NoRule) as raised:
        rule_for(_call(op, (Operand(0), Operand(1)), (4, 4), (4, 4), (4, 4)))
    assert str(raised.value) == (
        f"no rule says how test_rule.mix.default(f32[4,4], f32[4,4]) may be split: {reason}.\n"
        f"fix: write it with other ops, or as an op of your own that has its dt.rule"
    )
    assert isinstance(raised.value.__cause__, PlanningError | KeyError)


def test_torch_random_ops_have_no_rule() -> None:
    """Capture rewrites them as the project's own counter-based ops."""
    found = [n for n in registered() if "dropout" in n or "bernoulli" in n or "rand" in n]
    assert {n for n in found if not n.startswith("dt.")} <= {
        "aten.native_dropout_backward.default"  # a mask is given
    }


def test_registering_second_rule_for_op_is_refused() -> None:
    with pytest.raises(PlanningError, match="has a rule already"):
        register("aten.mm.default", pattern("m k, k n -> m n"))


@pytest.mark.parametrize(
    ("text", "operands", "message"),
    [
        ("a b", [(2, 3)], "no '->'"),
        ("a, b -> a", [(2,)], "is for 3 tensors"),
        ("a b -> a", [(2,)], "does not fit"),
        ("a? -> a", [(2,)], "not a list of dims"),
        ("(a b c) -> a", [(6,)], "leaves the sizes of"),
        ("a -> a a", [(6,)], "does not fit"),
    ],
)
def test_malformed_rule_texts_are_refused(
    text: str, operands: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(PlanningError, match=message):
        _rule(text, operands, [(2,)])


# -- layers and losses -----------------------------------------------------------------------------


def _rule_of(target: Any, *args: Any) -> Rule:
    call, operands = call_of(target, args, {})
    whole, _ = run_global(call, operands)
    return rule_for(whole)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def test_convolution_bias_gradient_is_replicated_if_input_channels_are_split() -> None:
    x, w, grad = _randn(4, 6, 7), _randn(8, 6, 3), _randn(4, 8, 5)
    settings = ([8], [1], [0], [1], False, [0], 1, [True, True, True])
    rule = _rule_of(aten.convolution_backward.default, grad, x, w, *settings)
    assert str(rule).endswith("n i x0!, o i k0!, o ~i")
    operands = (REPLICATE, Shard(1), Shard(1))
    splits = {s.operands: s.results for s in rule.strategies(2)}
    assert splits[operands] == (Shard(1), Shard(1), REPLICATE)


def test_mean_of_nll_loss_has_no_rule_and_is_decomposed() -> None:
    x, target = _randn(4, 5).log_softmax(1), torch.tensor([1, -100, 0, 3])
    with pytest.raises(NoRule, match="torch decomposes it"):
        _rule_of(aten.nll_loss_forward.default, x, target, None, 1, -100)


def test_group_norm_gradients_of_strided_shards_match_reference() -> None:
    """The backward kernel reads storage in order, and a shard gathered along a dim is strided."""
    tensors = (_randn(4, 6, 5, 5), _randn(6), _randn(6))
    traced = trace(
        lambda x, w, b: F.group_norm(x, 3, w, b), tuple(t.requires_grad_() for t in tensors)
    )
    expected = reference(traced)
    for split in (Shard(1), Shard(3)):
        found = run(traced, Mesh(tp=4), [dict(tp=split), dict(tp=REPLICATE), dict(tp=Shard(0))])
        torch.testing.assert_close(found.gradients, expected.gradients)


def _batch_norm(
    x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    mean, var = mean.clone(), var.clone()
    return F.batch_norm(x, mean, var, w, None, True), mean, var


@pytest.mark.parametrize("bandwidth", [200e9, 1e6])
def test_batch_norm_over_split_batch_uses_statistics_of_full_batch(bandwidth: float) -> None:
    """The batch stays split at any price of a gather; sums are reduced over the ranks."""
    tensors = (_randn(6, 4, 5).requires_grad_(), _randn(4).requires_grad_(), _randn(4), _randn(4))
    traced = trace(_batch_norm, tensors)
    expected = reference(traced)
    topology = Topology(bandwidth=bandwidth, latency=1e-9)
    split = [dict(tp=Shard(0)), *[dict(tp=REPLICATE)] * 3]
    found = run(traced, Mesh(tp=3), split, topology=topology)
    assert found.plan is not None
    assert {c.kind for c in found.plan.collectives} == {"all_reduce"}
    torch.testing.assert_close(found.results, expected.results)
    torch.testing.assert_close(found.gradients, expected.gradients)
