"""The dtypes that a rule accepts together are those that torch's kernels accept."""

from __future__ import annotations

import pytest
import torch

from tests.extras import missing

pytest.importorskip("transformers", reason=missing("transformers"))

from dtensor.api.rule import op_overloads
from dtensor.sharding.rules.dtypes import Dtypes, Half, same_float_dtype
from dtensor.sharding.rules.tables.dtypes import DTYPES, VALUES
from dtensor.testing.oracle import call_of
from tests.certify.dtypes import disagreements, varied_operands
from tests.certify.samples import SAMPLES, Draw

this_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or not torch.backends.mkldnn.is_available(),
    reason="kernels of other versions of torch and of other kinds of CPU may take other dtypes",
)

# What the field leaves open: torch's meta kernels name the statistics' dtype wrongly.
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
    "aten.nll_loss2d_backward.default": same_float_dtype,
    "aten.nll_loss_backward.default": same_float_dtype,
    "dt.add_layer_norm.default": "same",
    "dt.add_rms_norm.default": "promote",
    "dt.bias_gelu_backward.default": "same",
    "dt.attention.default": Half((0, 1, 2), free=VALUES),
    "dt.attention_backward.default": Half((0, 1, 2, 3, 4), free=VALUES[3:]),
    "dt.attention_part.default": Half((0, 1, 2), free=VALUES),
    "dt.attention_part_backward.default": Half((0, 1, 2, 3), free=VALUES[1:]),
    "dt.attention_masked.default": Half((0, 1, 2), free=(3,)),
    "dt.cache_attention.default": Half((0, 1, 2), free=(3,)),
    "dt.attention_masked_backward.default": Half((0, 1, 2, 3, 5), free=(4,)),
    "dt.bn_sums.default": "promote",
    "dt.gated_backward.default": "same",
    "dt.rms_norm_backward.default": "promote",
}


def _has_several(op: str) -> bool:
    (target,) = op_overloads(op)
    samples = (call_of(target, *sample(Draw(0)))[1] for sample in SAMPLES[op])
    return any(len(varied_operands(operands)) > 1 for operands in samples)


SEVERAL = [op for op in sorted(SAMPLES) if _has_several(op)]


@this_torch
@pytest.mark.filterwarnings("ignore")  # the ops' own: deprecations
@pytest.mark.parametrize("op", sorted({*SEVERAL} - {*OPEN, *NEITHER}))
def test_rule_refuses_dtypes_that_kernels_refuse(op: str) -> None:
    assert disagreements(op, DTYPES.get(op, "promote")) == []


def test_ops_outside_dtype_sweep_state_known_dtypes() -> None:
    assert {op: DTYPES.get(op, "promote") for op in NEITHER} == NEITHER
    assert not OPEN & set(DTYPES)
    assert set(DTYPES) <= set(SEVERAL)


@this_torch
@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("aten.mm.default", "promote"),
        ("aten.add.Tensor", "same"),
        ("aten.native_layer_norm.default", "same"),
        ("aten.native_layer_norm.default", Half((0, 1))),
        ("aten.linear.default", Half((0,))),
    ],
)
def test_wrong_dtype_statement_is_found(op: str, wrong: Dtypes) -> None:
    assert disagreements(op, wrong)
