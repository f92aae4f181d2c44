"""Tests that ops without a rule are decomposed into ops that have one, with equal results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.composites import COMPOSITES, expansion
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.sharding.ops.call import Meta, OpCall
from dtensor.sharding.rules import rule_for
from dtensor.testing.oracle import call_of, run
from tests.frontend.eager import close

aten = torch.ops.aten


def _flow(fn: Callable[..., object], *shapes: Sequence[int]) -> list[OpCall]:
    xs = tuple(torch.randn(*s).requires_grad_() for s in shapes)
    return [op.call for op in dataflow(capture(fn, xs, grads="tangents")).ops]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: torch.logaddexp(x, y),
        lambda x, y: F.glu(x) + F.glu(y),
        lambda x, y: F.pairwise_distance(x, y),
        lambda x, y: torch.addcdiv(x, x, y),
        lambda x, y: F.huber_loss(x, y),
    ],
)
def test_ops_without_rule_decompose_into_ops_with_rules(fn: Callable[..., object]) -> None:
    for call in _flow(fn, (4, 6), (4, 6)):
        rule_for(call)


def test_ops_with_rule_are_not_decomposed() -> None:
    names = {call.name for call in _flow(lambda x: F.softmax(F.gelu(x), -1), (4, 6))}
    assert names >= {"aten.gelu.default", "aten._softmax.default", "aten.gelu_backward.default"}


def test_decomposed_ops_keep_source_line_and_phase() -> None:
    x = torch.randn(4, 6).requires_grad_()
    ops = dataflow(capture(lambda x: F.glu(x), (x,), grads="tangents")).ops
    assert {op.source.split(":")[0] for op in ops} == {"test_decompose.py"}
    phases = [op.phase for op in ops]
    assert phases == sorted(phases, reverse=True) and set(phases) == {"forward", "backward"}


def test_random_op_without_counter_based_form_is_refused() -> None:
    with pytest.raises(dt.PlanningError, match="no counter-based form: multinomial"):
        capture(lambda x: torch.multinomial(x, 2), (torch.rand(2, 3),), grads="none")


# -- effects ---------------------------------------------------------------------------------------


def test_decomposed_inverse_still_raises_for_singular_matrix() -> None:
    mesh = dt.Mesh(tp=2)
    x = torch.randn(4, 3, 3) + 3 * torch.eye(3)
    inverse = dt.compile(torch.linalg.inv, mesh)
    split = dt.distribute(x, mesh, tp=dt.Row())
    close(inverse(split).full_tensor(), torch.linalg.inv(x))
    x[3] = 0  # on rank 1
    with pytest.raises(TaskError, match=r"rank 1 .*linalg.inv: \(Batch element 1\).*singular"):
        inverse(dt.distribute(x, mesh, tp=dt.Row())).full_tensor()


# -- composite ops ---------------------------------------------------------------------------------

f64 = torch.float64


def _rows() -> torch.Tensor:
    return torch.randn(3, 5, dtype=f64, generator=torch.Generator().manual_seed(0))


def _weight() -> torch.Tensor:
    return torch.randn(5, dtype=f64, generator=torch.Generator().manual_seed(1))


def _norm_backward() -> tuple[object, ...]:
    x, w = _rows(), _weight()
    _, mean, rstd = torch.native_layer_norm(x, [5], w, w, 1e-5)
    return (x.sin(), x, [5], mean, rstd, w, w, [True, True, True])


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten._softmax.default, (_rows(), -1, False), {}),
        (aten._log_softmax.default, (_rows(), 0, False), {}),
        (aten._softmax_backward_data.default, (_rows(), _rows().softmax(1), 1, f64), {}),
        (aten._log_softmax_backward_data.default, (_rows(), _rows().log_softmax(1), 1, f64), {}),
        (aten._safe_softmax.default, (_rows(), 1), {}),
        (aten.logsumexp.default, (_rows(), [1]), {}),
        (aten.var.correction, (_rows(), [1]), {"correction": 0}),
        (aten.var_mean.correction, (_rows(), [0, 1]), {"correction": 2, "keepdim": True}),
        (aten.std.correction, (_rows(), None), {}),
        (aten.native_layer_norm.default, (_rows(), [5], _weight(), _weight(), 1e-5), {}),
        (aten.native_layer_norm_backward.default, _norm_backward(), {}),
    ],
)
def test_decompositions_give_results_of_original_op(
    target: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    call, operands = call_of(target, args, kwargs)
    want = run(call, operands)
    call = OpCall(
        target=call.target,
        args=tuple(tuple(a) if isinstance(a, list) else a for a in call.args),
        kwargs=call.kwargs,
        operands=call.operands,
        results=tuple(None if r is None else _meta(r) for r in want),
        multiple=len(want) > 1,
    )
    assert call.name in COMPOSITES
    found = expansion(call)
    assert found is not None and len(found.calls) > 1
    values = list(operands)
    for inner, numbers in zip(found.calls, found.operands, strict=True):
        rule_for(inner)
        values.append(operator.itemgetter(0)(run(inner, [values[n] for n in numbers])))
    for number, value in zip(found.results, want, strict=True):
        if number is not None:
            torch.testing.assert_close(values[number], value)


def _meta(x: torch.Tensor) -> Meta:
    return Meta(tuple(x.shape), x.dtype)
