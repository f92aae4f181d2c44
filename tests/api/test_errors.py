"""Full error texts for mistakes that are found in a captured program under its placements.

Each text is one sentence of fact, the operands with their numbers, the user's line if there is one,
and a fix. Line numbers of this file are replaced by N.
"""
# ruff: noqa: E501  (messages stand as they are printed)

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.model.stating.stated_placements import input_pins, planner_pins, resolve_placements
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.numerics import dtype_name
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import Request
from dtensor.sharding.rules import registry
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.parse import parse as spec
from dtensor.sharding.spec.placements import Row, Shard
from dtensor.testing import plan_of
from tests.models import MLP, CausalSelfAttention, Llama

TP2, TP4 = Mesh(tp=2), Mesh(tp=4)


def refused(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PlanningError) as caught:
        fn(*args, **kwargs)
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def train(
    loss: Callable[..., Any],
    *batch: Tensor,
    mesh: Mesh | None = None,
    microbatches: int = 2,
    inputs: Mapping[str, Any] | None = None,
) -> Plan:
    mesh = mesh or Mesh(dp=2)
    model = MLP()
    flow = dataflow(capture(loss, (model, *batch), grads="loss"))
    metas = {i.label: i.meta for i in flow.inputs if i.kind == "argument"}
    found = planner_pins(flow, resolve_placements(model, mesh, {}), input_pins(metas, inputs, mesh))
    return plan(
        Request(
            name="train",
            flow=flow,
            mesh=mesh,
            pins=found.pins,
            pinned_by=found.pinned_by,
            batch=found.batch,
            num_microbatches=microbatches,
        )
    )


# -- pins that do not line up ----------------------------------------------------------------------


class Heads(nn.Module):
    """x [b t 16] projected to ``heads`` heads of size 16."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(16, heads * 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        return self.q(x).view(b, t, self.heads, 16).softmax(-1)


def strict(model: nn.Module, mesh: Mesh, pins: Mapping[str, Any], x: Tensor) -> Plan:
    placed = dt.parallelize(model, mesh, pins, misaligned="error")
    return dt.compile(lambda model, x: model(x), mesh).plan(placed, x)


def test_placement_that_cuts_heads_error_proposes_unit() -> None:
    x = torch.empty(2, 4, 16)
    assert_expected_inline(
        refused(strict, Heads(22), TP4, {"q.weight": dict(tp=Row())}, x),
        """\
the pin tp=Shard(0) on q.weight does not line up with the program's use of that dim.
  q.weight: f32[352,16], dim 0: 4 ranks hold 88, 88, 88, 88 of 352
  aten.reshape.default sees it as 22 x 16 in mm: f32[8,352]
  test_errors.py:N: return self.q(x).view(b, t, self.heads, 16).softmax(-1)
fix: tp=Shard(0, unit=16), which lines up
  or parallelize(..., misaligned="gather"): stored so, and gathered before use""",
    )
    strict(Heads(22), TP4, {"q.weight": dict(tp=Shard(0, unit=16))}, x)  # the fix


def test_placement_across_fused_qkv_error_proposes_blocks() -> None:
    model, x = CausalSelfAttention(16, 4, bias=False), torch.empty(2, 4, 16)
    assert_expected_inline(
        refused(strict, model, TP2, {"qkv.weight": dict(tp=Row())}, x),
        """\
the pin tp=Shard(0) on qkv.weight does not line up with the program's use of that dim.
  qkv.weight: f32[48,16], dim 0: 2 ranks hold 24, 24 of 48
  aten.split.Tensor sees it as 3 parts of 16, 16, 16 in reshape_1: f32[2,4,48]
  models.py:N: q, k, v = self.qkv(x).chunk(3, dim=-1)
fix: tp=Shard(0, blocks=3), which lines up
  or parallelize(..., misaligned="gather"): stored so, and gathered before use""",
    )
    strict(model, TP2, {"qkv.weight": dict(tp=Shard(0, blocks=3))}, x)  # the fix


@pytest.mark.slow
def test_too_few_kv_heads_error_proposes_splitting_the_axis() -> None:
    model = Llama(width=32, heads=4, groups=2, layers=1)
    pins = {"*.attn.k.weight": dict(tp=Row())}
    assert_expected_inline(
        refused(strict, model, TP4, pins, torch.zeros(4, 8, dtype=torch.int64)),
        """\
the pin tp=Shard(0) on blocks.0.attn.k.weight (*.attn.k.weight) does not line up with the program's use of that dim.
  blocks.0.attn.k.weight: f32[16,32], dim 0: 4 ranks hold 4, 4, 4, 4 of 16
  aten.reshape.default sees it as 2 x 8 in mm_1: f32[32,16]
  models.py:N: k = self.k(x).view(b, t, self.groups, self.size).transpose(1, 2)
  2 parts over 4 ranks: 1, 1, 0, 0
fix: split the axis, as in Mesh(tp=2, tp_rep=2), and tp=Shard(0), which lines up
  or parallelize(..., misaligned="gather"): stored so, and gathered before use""",
    )
    split = Mesh(tp=2, tp_rep=2)
    strict(model, split, pins, torch.zeros(4, 8, dtype=torch.int64))  # the fix


def test_too_few_heads_for_prime_axis_error_proposes_smaller_axis() -> None:
    mesh = Mesh(tp=3)
    model, x = CausalSelfAttention(24, 4, bias=False), torch.empty(2, 4, 24)
    pins = {"qkv.weight": dict(tp=Row(blocks=3))}
    assert_expected_inline(
        refused(strict, model, mesh, pins, x),
        """\
the pin tp=Shard(0, blocks=3) on qkv.weight does not line up with the program's use of that dim.
  qkv.weight: f32[72,24], dim 0: 3 ranks hold 24, 24, 24 of 72
  aten.reshape.default sees it as 4 x 6 in v: f32[2,4,24]
  models.py:N: v = v.view(b, t, self.heads, d // self.heads).transpose(1, 2)
  4 parts over 3 ranks: 2, 2, 0
fix: an axis of 2 ranks, Mesh(tp=2), and tp=Shard(0, blocks=3), which lines up
  or parallelize(..., misaligned="gather"): stored so, and gathered before use""",
    )
    strict(model, TP2, pins, torch.empty(2, 4, 24))  # the fix


def test_cut_heads_error_on_minor_axis_proposes_unit_only() -> None:
    mesh = Mesh(dp=2, tp=4)
    x = torch.empty(2, 4, 16)
    pins = {"q.weight": dict(dp=Row(), tp=Row())}
    assert_expected_inline(
        refused(strict, Heads(20), mesh, pins, x),
        """\
the pin tp=Shard(0) on q.weight does not line up with the program's use of that dim.
  q.weight: f32[320,16], dim 0: 4 ranks hold 80, 80, 80, 80 of 320
  aten.reshape.default sees it as 20 x 16 in mm: f32[8,320]
  test_errors.py:N: return self.q(x).view(b, t, self.heads, 16).softmax(-1)
fix: tp=Shard(0, unit=16), which lines up
  or parallelize(..., misaligned="gather"): stored so, and gathered before use""",
    )
    strict(Heads(20), mesh, {"q.weight": dict(dp=Row(), tp=Shard(0, unit=16))}, x)  # the fix


# -- the program -----------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Any) -> Tensor:
        return fn(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


@torch.library.custom_op("test_errors::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    return x @ x


@mix.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_op_without_rule_error_proposes_dt_rule() -> None:
    def fn(x: Tensor) -> Tensor:
        return mix(x)

    assert_expected_inline(
        refused(plan_of, fn, TP2, {}, spec("f32[4,4]", TP2)),
        """\
no rule says how test_errors.mix.default(f32[4,4]) may be split: it is not in the tables of dtensor.sharding.rules.
  test_errors.py:N: return mix(x)
fix: dt.rule("test_errors::mix", "... -> ...") if it works element by element;
     dt.rule("test_errors::mix", "a! b! -> c! d!")
     is right for any op and splits nothing: remove the "!" of dims that may be
     split, and dt.testing.certify("test_errors::mix", *arguments) says whether they may""",
    )


def test_failing_rule_error_names_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception of the rule is the cause of the error."""

    def fails(call: OpCall) -> Rule:
        raise KeyError("k")

    monkeypatch.setitem(registry._BUILDERS, "test_errors.mix.default", fails)

    def fn(x: Tensor) -> Tensor:
        return mix(x)

    with pytest.raises(PlanningError) as caught:
        plan_of(fn, TP2, {}, spec("f32[4,4]", TP2))
    assert isinstance(caught.value.__cause__, KeyError)
    assert_expected_inline(
        re.sub(r"\.py:\d+", ".py:N", str(caught.value)),
        """\
no rule says how test_errors.mix.default(f32[4,4]) may be split: its rule fails with KeyError: 'k'.
  test_errors.py:N: return mix(x)
fix: write it with other ops, or as an op of your own that has its dt.rule""",
    )


def test_mixed_dtypes_error_proposes_cast_or_autocast() -> None:
    """Torch can capture this product, but its kernel refuses it."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (4,), weight)

    x = torch.ones(2, 4)
    model = dt.parallelize(Mixed(), TP2, {"up.weight": {"tp": dt.Column()}})
    compiled = dt.compile(lambda m, x: m(x), TP2)
    assert_expected_inline(
        refused(compiled.plan, model, x),
        """\
aten.mm.default does not take bf16 and f32 together.
  x: f32[2,4]
  up.weight: bf16[4,4]
  test_errors.py:N: return self.up(x)
fix: make up.weight f32, as with .to(torch.float32), or run it under torch.autocast""",
    )
    mixed = spec("f32[4,4]", TP2), spec("bf16[4]", TP2)
    assert_expected_inline(
        refused(plan_of, fn, TP2, {}, *mixed),
        """\
aten.native_layer_norm.default does not take bf16 and f32 together.
  x: f32[4,4]
  weight: bf16[4]
  test_errors.py:N: return F.layer_norm(x, (4,), weight)
fix: make weight f32, as with .to(torch.float32), or run it under torch.autocast""",
    )
    # a transposed weight has its own shape; what was cast is not the argument that it was cast from
    assert_expected_inline(
        refused(
            plan_of,
            lambda x, weight: F.linear(x.bfloat16().relu(), weight),
            TP2,
            {},
            spec("f32[2,4]", TP2),
            spec("f32[6,4]", TP2),
        ),
        """\
aten.mm.default does not take bf16 and f32 together.
  relu: bf16[2,4]
  weight: f32[6,4]
  test_errors.py:N: lambda x, weight: F.linear(x.bfloat16().relu(), weight),
fix: make relu f32, as with .to(torch.float32), or run it under torch.autocast""",
    )


def test_parameters_of_several_dtypes_error_proposes_model_float() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    compiled = dt.compile(lambda m, x: m(x), TP2)
    text = refused(compiled.plan, dt.parallelize(model, TP2, {}), torch.ones(2, 4))
    assert text.endswith("fix: call model.float() (its parameters have several dtypes)")
    model.float()  # the fix
    compiled.plan(dt.parallelize(model, TP2, {}), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [
        (torch.bfloat16, "pass x.float(), or call model.to(torch.bfloat16), or use torch.autocast"),
        (torch.int64, "pass x.float()"),
    ],
)
def test_batch_of_other_dtype_than_weights_error_proposes_cast(
    dtype: torch.dtype, fix: str
) -> None:
    model = dt.parallelize(nn.Linear(4, 4), TP2)
    text = refused(dt.compile(lambda m, x: m(x), TP2).plan, model, torch.ones(2, 4, dtype=dtype))
    assert text.splitlines()[1::3] == [f"  x: {dtype_name(dtype)}[2,4]", f"fix: {fix}"]


def test_item_call_error_proposes_tensor_ops() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * x.sum().item()

    assert_expected_inline(
        refused(plan_of, fn, TP2, {}, spec("f32[4,4]", TP2)),
        """\
The program depends on a tensor's value, which is not known when it is planned.
  .item() of f32[]
  test_errors.py:N: return x * x.sum().item()
fix: keep it a tensor (torch.where, a mask that multiplies), or pass it in as a number; to see it, return (loss, {"name": value}) and read loss.metrics""",
    )


def test_unsupported_autograd_function_argument_error_names_class_and_fix() -> None:
    def fn(x: Tensor) -> Tensor:
        return Doubled.apply(x, lambda x: x * 2)

    text = refused(plan_of, fn, TP2, {}, spec("f32[4,4]", TP2, requires_grad=True))
    assert_expected_inline(
        re.sub(r"class \S+\.", "class ", text),
        """\
This torch.autograd.Function cannot be captured: an argument of it is of type function.
  class Doubled
  test_errors.py:N: return Doubled.apply(x, lambda x: x * 2)
fix: pass tensors, numbers, strings and None, in lists, tuples and dicts; or define it with torch.library.custom_op and register_autograd""",
    )


# -- training --------------------------------------------------------------------------------------


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).pow(2).mean()


def test_loss_that_mixes_rows_error_proposes_one_microbatch() -> None:
    def contrastive(model: nn.Module, x: Tensor) -> Tensor:
        z = F.normalize(model(x), dim=-1)
        scores = z @ z.T
        return F.cross_entropy(scores, torch.arange(scores.shape[0]))

    x = torch.randn(8, 16)
    assert_expected_inline(
        refused(train, contrastive, x),
        """\
aten.mm.default mixes rows of the batch, so microbatches would change the result.
  z: f32[8,16], dim 0 split into microbatches
  permute_2: f32[16,8], dim 1 split into microbatches
  test_errors.py:N: scores = z @ z.T
fix: use microbatches=1, or write the loss as a mean or sum over rows""",
    )
    train(contrastive, x, microbatches=1)  # the fix


def test_loss_that_is_not_sum_over_rows_error_proposes_one_microbatch() -> None:
    def root(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).pow(2).mean().sqrt()

    def largest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).abs().amax()

    def first(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y)[0].pow(2).mean()

    batch = torch.randn(8, 16), torch.randn(8, 16)
    assert_expected_inline(
        refused(train, root, *batch),
        """\
aten.sqrt.default needs the sum over all rows of the batch, so microbatches would change the result.
  mean: f32[], a sum over microbatches
  test_errors.py:N: return (model(x) - y).pow(2).mean().sqrt()
fix: use microbatches=1, or write the loss as a mean or sum over rows""",
    )
    assert_expected_inline(
        refused(train, largest, *batch),
        """\
aten.eq.Tensor needs the max over all rows of the batch, so microbatches would change the result.
  amax: f32[], a max over microbatches
  abs_1: f32[8,16], dim 0 split into microbatches
  test_errors.py:N: return (model(x) - y).abs().amax()
fix: use microbatches=1, or write the loss as a mean or sum over rows""",
    )
    assert_expected_inline(
        refused(train, first, *batch),
        """\
aten.select.int mixes rows of the batch, so microbatches would change the result.
  sub: f32[8,16], dim 0 split into microbatches
  test_errors.py:N: return (model(x) - y)[0].pow(2).mean()
fix: use microbatches=1, or write the loss as a mean or sum over rows""",
    )


def test_loss_fn_returning_transformers_output_error_proposes_its_loss() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    def whole(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        return CausalLMOutput(loss=out.mean(), logits=out)

    assert_expected_inline(
        refused(train, whole, torch.randn(8, 16)),
        """\
A loss is one number: loss_fn returns a scalar or (scalar, {name: scalar}).
  it returned {'loss': f32[], 'logits': f32[8,16]}
  test_errors.py:N: def whole(model: nn.Module, x: Tensor) -> Any:
fix: return its loss, as in `return out.loss`""",
    )


@pytest.mark.parametrize("pack", [list, tuple])
def test_list_in_place_of_tensor_error_proposes_tensor_or_unpacking(
    pack: Callable[[Any], Any],
) -> None:
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    for args, length in ((pack([x]), y), 1), ((pack([x, y]),), 2):  # the second is a whole batch
        text = refused(capture, squared_error, (MLP(), *args), grads="loss")
        assert text.endswith(
            f"fix: the argument x is a {pack.__name__} of length {length}: pass its tensor, as in "
            f"step(x), or each of its tensors, as in step(*batch)"
        )


def test_non_scalar_loss_or_metric_error_proposes_reduction() -> None:
    def unreduced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).pow(2)

    def with_metric(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return squared_error(model, x, y), {"outputs": model(x)}

    batch = torch.randn(8, 16), torch.randn(8, 16)
    assert_expected_inline(
        refused(train, unreduced, *batch),
        """\
A loss is one number: loss_fn returns a scalar or (scalar, {name: scalar}).
  it returned f32[8,16]
  test_errors.py:N: def unreduced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
fix: reduce the loss inside loss_fn, as in loss.mean() or loss.sum()""",
    )
    assert_expected_inline(
        refused(train, with_metric, *batch),
        """\
What loss_fn returns beside the loss is a dict of scalar tensors by name.
  it returned {'outputs': f32[8,16]}
  test_errors.py:N: def with_metric(model: nn.Module, x: Tensor, y: Tensor) -> Any:
fix: return (loss, {'accuracy': accuracy}), each value reduced to a scalar""",
    )
