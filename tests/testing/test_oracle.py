"""Tests the oracle that certifies rules: the arguments it varies, what it reports as wrong or
missing, and the saving it states.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules import NoRule, rule_for
from dtensor.sharding.rules.notation import parse_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.parse import parse
from dtensor.sharding.spec.placements import REPLICATE, Partial, Shard
from dtensor.testing import Certificate, certify
from dtensor.testing.certificates import certify_autograd, certify_call
from dtensor.testing.missing import Missing
from dtensor.testing.oracle import cut, equal, tolerance_of
from dtensor.testing.vary import accepts, example, negated, other_sizes, to_half

aten = torch.ops.aten


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _whole_mm(call: OpCall) -> Rule:
    return parse_rule("m! k!, k! n! -> m! n!", call.operands, call.results)


# -- cutting and comparing -------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_oracle_cuts_partial_value_into_nonzero_parts_that_reduce_to_it(op: Any) -> None:
    x = _randn(3, 4)
    spec = parse("f64[3,4]", Mesh(a=2, b=2)).with_placements(a=Partial(op), b=Shard(1))
    shards = cut(x, spec, torch.Generator().manual_seed(0))
    left, right = [shards[0], shards[2]], [shards[1], shards[3]]
    whole = torch.cat([_reduced(left, op), _reduced(right, op)], 1)
    torch.testing.assert_close(whole, x)
    assert not any(torch.equal(s, x[:, :2]) or not s.any() for s in left)


def _reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    a, b = parts
    return a + b if op == "sum" else torch.maximum(a, b) if op == "max" else torch.minimum(a, b)


def test_oracle_tolerance_is_that_of_least_precise_dtype() -> None:
    assert tolerance_of([torch.float64, torch.int64]) == 1e-9
    assert tolerance_of([torch.float64, torch.float32]) == 1e-4
    assert tolerance_of([torch.bfloat16, torch.float32]) == 1e-1
    x = torch.tensor([1.0, float("nan")], dtype=torch.complex128)
    assert equal(x, x + 1e-12, 1e-9)
    assert not equal(x, x + 1e-6, 1e-9)
    assert not equal(x, x.real, 1e-9)


# -- variations ------------------------------------------------------------------------------------


def test_oracle_other_sizes_change_shared_dims_of_all_operands() -> None:
    shapes = [
        tuple(tuple(t.shape) for t in args)
        for args, _ in other_sizes(aten.mm.default, (_randn(4, 6), _randn(6, 2)), {}, rule_for)
    ]
    assert shapes == [
        ((5, 7), (7, 3)),
        ((2, 2), (2, 3)),
        ((4, 1), (1, 2)),
        ((1, 6), (6, 2)),
        ((4, 6), (6, 1)),
    ]


def test_oracle_negated_and_half_arguments_change_only_floats() -> None:
    x, i = _randn(2), torch.tensor([1, 2])
    (y, j, number), named = negated((x, i, 3.0), {"k": i})
    assert torch.equal(y, -x) and torch.equal(j, i) and number == 3.0 and torch.equal(named["k"], i)
    (h, j), _ = to_half((x, i), {})
    assert h.dtype == torch.bfloat16 and j.dtype == torch.int64


def test_oracle_skips_arguments_that_op_rejects() -> None:
    assert accepts(aten.mm.default, (_randn(2, 3), _randn(3, 2)), {})
    assert not accepts(aten.mm.default, (_randn(2, 3), _randn(2, 2)), {})


# -- missing ---------------------------------------------------------------------------------------


def test_certificate_states_saving_of_missing_strategy() -> None:
    found = certify(aten.mm.default, _randn(6, 6), _randn(6, 6), rule=_whole_mm)
    assert found.wrong == ()
    by_operands = {m.operands: m for m in found.missing}
    rows = by_operands[Shard(0), REPLICATE]
    assert rows.results == (Shard(0),)
    assert rows.instead == ("all_gather of operand 0",)
    assert rows.bytes == 6 * 6 * 8 // 2  # half of the matrix, from one rank to the other
    contracted = by_operands[Shard(1), Shard(0)]
    assert contracted.results == (Partial("sum"),)
    assert contracted.instead == ("all_gather of operand 0", "all_gather of operand 1")
    assert contracted.saving.endswith("(288 bytes per rank)")
    assert certify(aten.mm.default, _randn(6, 4), _randn(4, 6)).missing == ()


def test_certify_compares_only_shape_of_uninitialised_result() -> None:
    found = certify(aten.empty_like.default, _randn(4, 6))
    assert (found.wrong, found.missing) == ((), ()) and found.checked > 20


# -- forward and backward --------------------------------------------------------------------------


def test_certify_autograd_decomposes_op_without_rule() -> None:
    def nothing_for_softplus(call: OpCall) -> Rule:
        if call.name == "aten.softplus.default":
            raise NoRule("not here")
        return rule_for(call)

    found = certify_autograd(F.softplus, _randn(4), rule=nothing_for_softplus)
    assert found.refused == () and found.wrong == ()
    assert found.checked > certify_autograd(F.softplus, _randn(4)).checked


def test_certify_autograd_refuses_random_ops() -> None:
    found = certify_autograd(lambda x: torch.bernoulli(x.sigmoid()), _randn(4))
    assert len(found.refused) == 1
    assert "aten.bernoulli" in found.refused[0]


def test_certify_treats_in_place_ops_as_functional() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).add_(x).pow_(2)

    found = certify(fn, _randn(4))
    assert found.refused == () and found.wrong == ()


def test_certify_accepts_functions_of_nested_arguments() -> None:
    def fn(pair: tuple[torch.Tensor, torch.Tensor], *, scale: float) -> dict[str, torch.Tensor]:
        return {"sum": pair[0] + pair[1], "product": pair[0] * pair[1] * scale}

    found = certify(fn, (_randn(4), _randn(4)), scale=2.0)
    assert found.wrong == () and found.checked > 20


# -- certificates ----------------------------------------------------------------------------------


def test_certificate_text_lists_wrong_missing_and_refused() -> None:
    gap = Missing(op="a.b.c", operands=(Shard(0),), results=(Shard(0),))
    one = Certificate(("first",), (gap,), 3, ("no rule says how x.\nfix: y",))
    assert (
        str(one + one)
        == """\
6 strategies run: 2 wrong, 1 missing, 1 ops refused
  wrong    first
  wrong    first
  missing  a.b.c: [Shard(0)] -> [Shard(0)]: saves no communication
  refused  no rule says how x."""
    )


def test_certify_without_arguments_is_refused_with_example_arguments() -> None:
    with pytest.raises(PlanningError) as caught:
        certify("aten::bmm")
    assert (
        str(caught.value)
        == """\
aten.bmm.default is certified with the arguments of a call, and none are given.
  aten::bmm(Tensor self, Tensor mat2) -> Tensor
fix: give them, as in dt.testing.certify("aten.bmm.default", torch.randn(2, 4, 4), \
torch.randn(2, 4, 4))"""
    )
    assert not certify("aten.bmm.default", torch.randn(2, 4, 4), torch.randn(2, 4, 4)).wrong


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (aten.cat.default, "[torch.randn(4, 6), torch.randn(4, 6)]"),
        (aten.sum.dim_IntList, "torch.randn(4, 6), None"),
        (aten.permute.default, "torch.randn(4, 6), [0, 1]"),
        (aten.dot.default, "torch.randn(4), torch.randn(4)"),
        (aten._softmax.default, "torch.randn(4, 6), 1, False"),
        (torch.ops.dt.dropout.default, "torch.randn(4, 6), 0.5, at_seed=1, at_step=1, op=1"),
        (aten.gather.default, "self, dim, index"),  # only its names: no arguments are accepted
    ],
)
def test_certify_example_arguments_are_accepted_by_op(op: Any, text: str) -> None:
    assert example(op) == text
    if "torch" in text:
        eval(f"op({text})")


def test_certificate_is_deterministic_for_seed() -> None:
    x, w = _randn(4, 6), _randn(6, 3)
    for seed in (0, 5):
        one, two = (certify(torch.mm, x, w, seed=seed, rule=rule_for) for _ in range(2))
        assert one == two
    call = (aten.gelu.default, (x,))
    wrong = lambda c: parse_rule("a b -> a b", c.operands, c.results, linear=((0,),))  # noqa: E731
    texts = [certify_call(*call, rule=wrong, seed=seed).wrong for seed in (0, 0, 1)]
    assert texts[0] == texts[1] and all(texts)
    assert all(a.count("Partial") for a in itertools.chain(*texts))
