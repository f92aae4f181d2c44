"""Which dtypes go together: that the tool tells classes apart, and a share of its table anew."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.extras import missing

pytest.importorskip("transformers", reason=missing("transformers"))

from dtensor.api.rule import op_overloads
from dtensor.sharding.rules.dtypes import Half, accepts, beside_indices
from dtensor.sharding.rules.tables.dtypes import DTYPES
from dtensor.testing.oracle import call_of
from tests.certify import dtypes
from tests.certify.dtypes import DtypeFacts, dtype_facts, expected_dtypes, recorded, table
from tests.certify.samples import SAMPLES, Draw
from tests.certify.test_certificates import SEED

TEXT = dtypes.TABLE.read_text()
RECORDED = recorded(TEXT)
LONG = {"aten.batch_norm_backward.default"}  # 9 s
SHARE = sorted(random.Random(SEED).sample(sorted(RECORDED), 8))  # about 0.5 s each
this_torch = pytest.mark.skipif(
    not dtypes.is_of_this_torch(TEXT) or not torch.backends.mkldnn.is_available(),
    reason="the table is of another version of torch, or of another kind of CPU",
)
quiet = pytest.mark.filterwarnings("ignore")  # the ops' own: deprecations


def test_the_table_has_the_ops_with_several_operands() -> None:
    several = {op for op, samples in SAMPLES.items() if any(map(_has_several, samples))}
    assert set(RECORDED) == several, "run python -m tests.certify.dtypes"


def _has_several(sample: Callable[[Draw], tuple[object, dict[str, object]]]) -> bool:
    leaves = tree_leaves(sample(Draw(0)))
    return sum(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in leaves) > 1


@pytest.mark.slow
@pytest.mark.sample(*sorted(set(SHARE) - LONG))
@this_torch
@quiet
@pytest.mark.parametrize("op", SHARE)
def test_the_recorded_class(op: str) -> None:
    assert expected_dtypes(op) == RECORDED[op], "run python -m tests.certify.dtypes"


@this_torch
@quiet
@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten.mm.default", "same"),
        ("aten.index_add.default", "same"),
        ("aten.add.Tensor", "promote"),
        ("aten.where.self", "promote"),
        ("aten.copy.default", "like 0"),
        ("aten.masked_fill.Tensor", "like 0"),
        ("aten.native_layer_norm.default", "half 0"),
        ("aten.relu.default", ""),
    ],
)
def test_known_classes(op: str, kind: str) -> None:
    assert expected_dtypes(op) == kind


# -- the field of the rules ------------------------------------------------------------------------

# Classes that the field leaves open: torch's meta kernels name the statistics' dtype wrongly.
OPEN = {
    "aten.batch_norm_backward.default",
    "aten.native_batch_norm_backward.default",
    "aten.native_group_norm_backward.default",
}
# Of no one class; the field refuses what each of their kernels refuses, or nothing.
NEITHER: dict[str, object] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": Half((0, 1, 2)),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": "promote",
    "aten._trilinear.default": "promote",
    "aten.convolution.default": "same",
    "aten.convolution_backward.default": "same",
    "aten.gelu_backward.default": "promote",
    "aten.native_layer_norm_backward.default": "promote",
    "aten.nll_loss2d_backward.default": beside_indices,
    "aten.nll_loss_backward.default": beside_indices,
    "dt.add_layer_norm.default": "same",
    "dt.add_rms_norm.default": "promote",
    "dt.bias_gelu_backward.default": "same",
    "dt.attention_masked.default": Half((0, 1, 2), free=(3,)),
    "dt.attention_masked_backward.default": Half((0, 1, 2, 3, 5), free=(4,)),
    "dt.bn_sums.default": "promote",
    "dt.gated_backward.default": "same",
    "dt.rms_norm_backward.default": "promote",
}


@pytest.mark.parametrize("op", sorted(RECORDED))
def test_the_rule_says_the_recorded_class(op: str) -> None:
    kind, _, narrow = RECORDED[op].partition(" ")
    stated = DTYPES.get(op, "promote")
    match kind:
        case "same":
            assert stated in ("same", beside_indices)
        case "half":
            assert stated == ("promote" if op in OPEN else Half(tuple(map(int, narrow.split()))))
        case "neither":
            assert stated == NEITHER[op]
        case _:  # promote, like
            assert stated == "promote"


def test_no_rule_says_more() -> None:
    assert set(DTYPES) <= set(RECORDED)


@this_torch
@quiet
@pytest.mark.parametrize("op", [*SHARE, "aten.mm.default", "aten.index_add.default"])
def test_the_rule_refuses_what_the_kernels_refuse(op: str) -> None:
    """Of the mixes of floats that it takes alone, run on real tensors."""
    (target,) = op_overloads(op)
    dtypes_of = DTYPES.get(op, "promote")
    for sample, facts in zip(SAMPLES[op], dtype_facts(op).samples, strict=True):
        _, operands = call_of(target, *sample(Draw(0)))
        alone = {t.dtypes[0] for t in facts.trials if t.uniform and t.results is not None}
        for trial in facts.mixed if RECORDED[op] != "neither" else ():
            if not alone.issuperset(trial.dtypes):
                continue  # as linalg.pinv, which has no kernel for bf16
            mixed = iter(trial.dtypes)
            given = [next(mixed) if x.dtype == torch.float64 else x.dtype for x in operands]
            if trial.floats and not (dtypes_of == "promote" and op in OPEN):
                assert accepts(dtypes_of, tuple(given)) == (trial.results is not None), trial


# -- functions whose class is known ----------------------------------------------------------------


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype != y.dtype:
        raise TypeError("of one dtype")
    return x * y


def _half(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype != y.dtype and (x.dtype.itemsize != 2 or y.dtype != torch.float32):
        raise TypeError("of one dtype, or the first of half precision")
    return x * y.to(x.dtype)


def _no_float64(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if torch.float64 in (x.dtype, y.dtype) and x.dtype != y.dtype:
        raise TypeError("not with float64")
    return x * y


def _narrower(x: torch.Tensor, y: torch.Tensor) -> torch.dtype:
    return min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)


PLANTED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "same": (_same, "same"),
    "promote": (torch.mul, "promote"),
    "promote to bool": (torch.lt, "promote"),
    "like 0": (lambda x, y: (x * y).to(x.dtype), "like 0"),
    "like 1": (lambda x, y: (x * y).to(y.dtype), "like 1"),
    "half 0": (_half, "half 0"),
    "neither": (_no_float64, "neither"),
    "neither: the narrower": (lambda x, y: (x * y).to(_narrower(x, y)), "neither"),
}


def test_planted_functions_are_classed_and_the_table_can_be_read_back() -> None:
    found = [_facts(fn, op=f"a.{name}") for name, (fn, _) in PLANTED.items()]
    assert [facts.kind for facts in found] == [kind for _, kind in PLANTED.values()]
    text = table(found)
    assert recorded(text) == {facts.op: facts.kind for facts in found}
    assert dtypes.is_of_this_torch(text)


def _facts(fn: Callable[..., torch.Tensor], op: str) -> DtypeFacts:
    x, y = (torch.ones(2, 3, dtype=torch.float64) for _ in range(2))
    call, operands = dtypes.call_of(fn, (x, y), {})
    return DtypeFacts(op=op, samples=(dtypes.sample_facts(call, operands),))
