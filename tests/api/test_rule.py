"""`dt.rule`: a rule for a user's op is stated in one line, certified, and used over a mesh with its
gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.api.rule import OpRule
from dtensor.errors import PlanningError
from dtensor.sharding.rules.registry import builders
from dtensor.testing.execute import reference, run, trace

MESH = dt.Mesh(tp=2)


@torch.library.custom_op("test_rule_api::gate", mutates_args=())
def gate(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.tanh(x * weight)
    return out if bias is None else out + bias


@gate.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("test_rule_api::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    inner = grad * (1 - torch.tanh(x * weight) ** 2)
    return inner * weight, (inner * x).sum((0, 1))


@gate_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *gate_backward(grad, *ctx.saved_tensors), None


gate.register_autograd(_backward, setup_context=_keep)

GATE, GATE_BACKWARD = "test_rule_api::gate", "test_rule_api::gate_backward"


@torch.library.custom_op("test_rule_api::mix", mutates_args=())
def mix(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@pytest.fixture
def registry() -> Any:
    """Remove the rules that a test registers."""
    from dtensor.sharding.rules import registry

    before = dict(builders())
    yield
    registry._BUILDERS.clear()
    registry._BUILDERS.update(before)


def _values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = dict(dtype=torch.float64, generator=generator)
    return torch.randn(4, 3, 5, **draw), torch.randn(5, **draw)


@pytest.mark.slow
@pytest.mark.usefixtures("registry")
def test_custom_op_rule_is_certified_and_gives_right_gradients() -> None:
    x, weight = _values()
    stated = dt.rule(GATE, "b t d, d -> b t d")
    first = dt.testing.certify(GATE, x, weight)
    assert first.wrong == ()
    assert len(first.refused) == 1  # the backward, and how to state it
    assert (
        f'dt.rule("{GATE_BACKWARD}", "a! b! c!, d! e! f!, g! -> h! i! j!, k!")' in first.refused[0]
    )

    dt.rule(GATE_BACKWARD, "b t d, b t d, d -> b t d, d", linear="grad")
    for what in (GATE, stated, gate, torch.ops.test_rule_api.gate.default):
        found = dt.testing.certify(what, x, weight)
        assert found.wrong == () and found.refused == () and found.missing == ()
        assert found.checked > first.checked or what is gate

    f = dt.compile(gate, MESH)
    expected = gate(x, weight)
    for placement in (dt.Row(), dt.Column(), dt.Shard(1)):
        y = f(dt.distribute(x, MESH, tp=placement), weight)
        torch.testing.assert_close(y.full_tensor(), expected)
        assert str(y.spec) == "f64[4,3,5]"

    traced = trace(gate, (x.requires_grad_(), weight.requires_grad_()))
    wanted = reference(traced).gradients
    for placement in (dt.Row(), dt.Column(), dt.Shard(1)):
        made = run(traced, MESH, [dict(tp=placement), {}])
        for got, want in zip(made.gradients, wanted, strict=True):
            torch.testing.assert_close(got, want)
    assert [str(c.kind) for c in made.plan.collectives] == ["all_reduce"]


@pytest.mark.default("b t d, b t d, d -> b t d, d-linear2")
@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "pattern, linear",
    [
        ("b t d, b t d, d -> b t d, d", ("grad", "weight")),
        ("b t d, b t d, d -> b t d, d", [("grad", "x")]),
        ("b t d, b t d, d -> b t d, d", (1,)),
    ],
)
def test_certify_finds_wrong_rules(pattern: str, linear: Any) -> None:
    x, weight = _values()
    found = dt.testing.certify(dt.rule(GATE_BACKWARD, pattern, linear=linear), x, x, weight)
    assert found.wrong
    assert all("Partial" in text for text in found.wrong)


@pytest.mark.usefixtures("registry")
def test_certify_finds_wrong_reduction_of_contraction() -> None:
    x, weight = torch.randn(4, 6).double(), torch.randn(6, 5).double()
    right = dt.rule("test_rule_api::mix", "m k, k n -> m n", linear=("x", "weight"), flops="m k n")
    assert dt.testing.certify(right, x, weight).wrong == ()
    assert dt.testing.certify(right, x, weight).missing == ()
    wrong = OpRule(ops=right.ops, pattern="m k, k n -> m n", reduce="max")
    assert dt.testing.certify(right, x, weight, rule=wrong).wrong


@pytest.mark.usefixtures("registry")
def test_restating_equal_rule_is_accepted_and_other_rule_is_refused() -> None:
    one = dt.rule(GATE, "b t d, d, d -> b t d")
    assert dt.rule(torch.ops.test_rule_api.gate.default, "b t d, d, d -> b t d") == one
    assert one.ops == ("test_rule_api.gate.default",)
    with pytest.raises(PlanningError, match="has a rule already"):
        dt.rule(GATE, "b t d!, d!, d! -> b t d!")
    with pytest.raises(PlanningError, match="aten.mm.default has a rule already"):
        dt.rule("aten.mm.default", "m k, k n -> m n")


@pytest.mark.usefixtures("registry")
def test_linear_operands_by_name_work_if_calls_omit_some() -> None:
    """An optional tensor is absent, or one operand of a linear group is a number."""
    x, weight = _values()
    dt.rule(GATE_BACKWARD, "b t d, b t d, d -> b t d, d", linear="grad")
    without = OpRule(
        ops=("test_rule_api.gate.default",), pattern="b t d, d -> b t d", linear=(("bias",),)
    )
    found = dt.testing.certify(GATE, x, weight, rule=without)
    assert found.wrong == () and found.checked > 0
    dt.rule("aten::rrelu_with_noise_backward", "..., ..., ... -> ...", linear="grad_output")


@pytest.mark.usefixtures("registry")
def test_op_rule_with_same_dtypes_refuses_mixed_dtypes() -> None:
    dt.rule(GATE, "b t d, d -> b t d", dtypes="same")
    x, weight = _values()
    with pytest.raises(PlanningError, match="gate.default does not take bf16 and f64 together"):
        dt.compile(gate, MESH).plan(x, weight.bfloat16())


ERRORS = {
    "unknown op": (
        lambda: dt.rule("aten::cholesky_solv", "... -> ..."),
        "there is no op aten::cholesky_solv.\n"
        "  nearest names: aten::cholesky_solve, aten::cholesky_solve.out, "
        "aten::cholesky\n"
        "fix: import the module that registers it (torch.library.custom_op) first",
    ),
    "number of operands": (
        lambda: dt.rule(GATE, "b t d -> b t d"),
        "the pattern 'b t d -> b t d' has 1 operands, test_rule_api.gate.default has 2 to 3: "
        "x, weight, bias.\n"
        "  test_rule_api::gate(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor\n"
        "fix: write the dims of each tensor, in this order, with commas between them",
    ),
    "number of results": (
        lambda: dt.rule(GATE, "b t d, d -> b t d, d"),
        "the pattern 'b t d, d -> b t d, d' has 2 results, test_rule_api.gate.default has 1: "
        "result 0.\n"
        "  test_rule_api::gate(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor\n"
        "fix: write the dims of each tensor, in this order, with commas between them",
    ),
    "name": (
        lambda: dt.rule(GATE, "b t d, d -> b t d", linear=("x", "wieght")),
        'dt.rule for test_rule_api.gate.default: linear names "wieght", which is no tensor '
        "argument of it.\n"
        "  test_rule_api::gate(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor\n"
        'fix: use "weight" for "wieght"',
    ),
    "new factor": (
        lambda: dt.rule(GATE, "b t d, d -> b t e"),
        "the pattern 'b t d, d -> b t e' of test_rule_api.gate.default splits e, which no "
        "operand has: each rank would compute all of it.\n"
        'fix: "b t d, d -> b t e!", or give a localizer that makes each rank compute its part',
    ),
    "reduce": (
        lambda: dt.rule(GATE, "b t d, d -> b t d", reduce="mean"),  # type: ignore[arg-type]
        "dt.rule(\"test_rule_api::gate\", reduce='mean'): the parts of a contracted factor "
        'combine by "sum", "max", "min" or "softmax".\n'
        "fix: leave reduce out for a sum",
    ),
    "dtypes": (
        lambda: dt.rule(GATE, "b t d, d -> b t d", dtypes="smae"),  # type: ignore[arg-type]
        "dt.rule(\"test_rule_api::gate\", dtypes='smae'): operands are taken in any mix of "
        'dtypes ("promote") or in one dtype ("same").\n'
        'fix: "same", or a function of the tuple of dtypes that says whether they are taken',
    ),
    "in place": (
        lambda: dt.rule("aten::add_", "..., ... -> ..."),
        "aten.add_.Scalar changes its arguments: "
        "aten::add_.Scalar(Tensor(a!) self, Scalar other, Scalar alpha=1) -> Tensor(a!)\n"
        "fix: write it as an op that returns new values, and copy the result back",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_rule_errors_have_exact_text(name: str) -> None:
    state, text = ERRORS[name]
    with pytest.raises(PlanningError) as raised:
        state()
    assert str(raised.value) == text


def test_proposed_fix_for_new_factor_passes_its_own_check() -> None:
    from dtensor.api.rule import _check_statement

    op = torch.ops.test_rule_api.gate.default
    _check_statement(op, "b t d, d -> b t e!", (), "sum", None, "promote")
