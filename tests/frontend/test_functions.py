"""Tests that capture uses the backward of custom torch.autograd.Functions."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture


class Tripled(torch.autograd.Function):
    """x * x with 3 x as its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * grad


class Scaled(torch.autograd.Function):
    """Takes numbers and strings beside tensors, stores them on ctx, and returns None as their
    gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, how: str, shift: Tensor | None) -> Tensor:
        ctx.factor, ctx.how, ctx.has_shift = factor, how, shift is not None
        y = x * factor if how == "times" else x + factor
        return y if shift is None else y + shift

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x = grad * ctx.factor * 2 if ctx.how == "times" else grad * 5
        return of_x, None, None, grad.sum(0) * 7 if ctx.has_shift else None


class Both(torch.autograd.Function):
    """Returns two results, one of them not differentiable, and gradients that nobody needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sign = (x > 0).float()
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(x, w, sign)
        return x @ w, x.exp(), sign

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w, sign = ctx.saved_tensors
        of_x = a @ w.t() + 2 * b * sign if ctx.needs_input_grad[0] else None
        of_w = x.t() @ a * 10 if ctx.needs_input_grad[1] else None
        return of_x, of_w


class SetUp(torch.autograd.Function):
    """The newer form, with a forward without ctx."""

    @staticmethod
    def forward(x: Tensor, power: int) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.power = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return grad * y * ctx.power, None


class Nested(torch.autograd.Function):
    """Calls another Function inside; torch asks only the outer one for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return Tripled.apply(x) + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Tripled.apply(grad)


class Lists(torch.autograd.Function):
    """Takes tensors in a list, which torch treats as constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: list[Tensor]) -> Tensor:
        return x * others[0] + others[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 11, None


class Net(nn.Module):
    """A model with each form of Function, twice."""

    def __init__(self, apply: Callable[..., Tensor], layers: int = 2) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 12) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(12, 8) for _ in range(layers))
        self.apply_function = apply

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(self.apply_function(up(x), up))
        return x.square().mean()


def both(x: Tensor, layer: Any) -> Tensor:
    y, z, sign = Both.apply(x, layer.weight @ layer.weight.t())
    return y + z * sign


def in_no_grad(x: Tensor, layer: Any) -> Tensor:
    with torch.no_grad():
        scale = Tripled.apply(x).mean()
    return Tripled.apply(x) * scale


def autocast(x: Tensor, layer: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (Tripled.apply(x @ layer.weight) @ layer.weight.t()).float()


tripled = Tripled.apply

FORMS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "saved": lambda x, _: Tripled.apply(x),
    "numbers": lambda x, _: Scaled.apply(x, 0.5, "times", None),
    "other numbers": lambda x, up: Scaled.apply(x, 2, "plus", up.bias),
    "several": both,
    "set up": lambda x, _: SetUp.apply(x.abs() + 0.1, 2),
    "nested": lambda x, _: Nested.apply(x),
    "lists": lambda x, up: Lists.apply(x, [up.bias, x.detach()]),
    "twice": lambda x, _: Tripled.apply(x) + Scaled.apply(x, 3.0, "times", None),
    "in a checkpoint": lambda x, _: checkpoint(Tripled.apply, x, use_reentrant=False),
    "in a reentrant checkpoint": lambda x, _: checkpoint(Tripled.apply, x, use_reentrant=True),
    "another name": lambda x, _: tripled(x),
    "in no_grad": in_no_grad,
    "in autocast": autocast,
}


@pytest.mark.default("saved")
@pytest.mark.sample("saved", "several", "in autocast", "nested", "twice", "in a checkpoint")
@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_autograd_function_come_from_its_backward(form: str) -> None:
    torch.manual_seed(0)
    model, x = Net(FORMS[form]), torch.randn(6, 8)
    reference = copy.deepcopy(model)
    reference(x).backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    pins = {"up.*.weight": dict(tp=dt.Row()), "down.*.weight": dict(tp=dt.Column())}
    if form in ("several", "in autocast"):  # these contract the dim that would be split
        pins = {"down.*.weight": dict(tp=dt.Row())}
    placed = dt.parallelize(model, dt.Mesh(tp=2), pins)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(placed, lambda model, x: model(x), optimizer)
    found = step.gradients(x)
    assert set(found) == set(expected)
    close = 2e-2 if form == "in autocast" else 1e-5
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert (found[name] - gradient).abs().max() <= close * scale, name


def test_ops_of_autograd_function_are_sharded_like_other_ops() -> None:
    model = Net(FORMS["saved"], layers=1)
    pins = {"up.*.weight": dict(tp=dt.Row()), "down.*.weight": dict(tp=dt.Column())}
    placed = dt.parallelize(model, dt.Mesh(tp=2), pins)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dt.train_step(placed, lambda model, x: model(x), optimizer).plan(torch.randn(6, 8))
    assert [(c.kind, c.phase) for c in plan.collectives] == [("all_reduce", "forward")]
    text = str(plan)
    ops = re.findall(r" = (mul\(.*?\)) +(\S+) .*test_functions.py:(\d+)", text)
    assert {spec for call, spec, _ in ops if "add" in call} == {"f32[6,12@tp]"}


def test_applications_of_autograd_function_compare_equal_by_shapes_and_options() -> None:
    """Equal applications let repeated layers be differentiated once."""
    from dtensor.frontend.capture.functions import AppliedFunction

    def applied(*args: Any) -> AppliedFunction:
        return AppliedFunction(Scaled.apply, Scaled, args, None)

    x, y = torch.randn(2), torch.randn(3)
    assert applied(x, 0.5, "times", None) == applied(y, 0.5, "times", None)
    others = [(x, 0.5, "plus", None), (x, 0.5, "times", y), (x, 1, "times", None)]
    assert all(applied(x, 1.0, "times", None) != applied(*other) for other in others)


def test_autograd_function_runs_in_compiled_function_without_gradients() -> None:
    mesh = dt.Mesh(tp=2)
    x = torch.randn(4, 6)
    found = dt.compile(lambda x: Tripled.apply(x) + 1, mesh)(dt.distribute(x, mesh, tp=dt.Row()))
    assert torch.equal(found.full_tensor(), x * x + 1)


# -- refused ---------------------------------------------------------------------------------------


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anything: Any) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def error_of(fn: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(PlanningError) as caught:
        capture(fn, args, grads="tangents")
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def test_autograd_function_that_writes_its_input_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        return InPlace.apply(x * 1)

    assert_expected_inline(
        error_of(fn, torch.randn(3, requires_grad=True)),
        """\
This torch.autograd.Function cannot be captured: it changes an argument in place (ctx.mark_dirty).
  class tests.frontend.test_functions.InPlace
  test_functions.py:N: return InPlace.apply(x * 1)
fix: return a new tensor; or define it with torch.library.custom_op and register_autograd""",
    )


def test_autograd_function_argument_of_opaque_type_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        return Plain.apply(x, lambda: x)

    assert_expected_inline(
        error_of(fn, torch.randn(3, requires_grad=True)),
        """\
This torch.autograd.Function cannot be captured: an argument of it is of type function.
  class tests.frontend.test_functions.Plain
  test_functions.py:N: return Plain.apply(x, lambda: x)
fix: pass tensors, numbers, strings and None, in lists, tuples and dicts; or define it with torch.library.custom_op and register_autograd""",  # noqa: E501
    )


def test_autograd_function_whose_forward_closes_over_tensor_is_refused() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        class Closed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * w

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad

        return Closed.apply(x)

    text = error_of(fn, torch.randn(3, requires_grad=True), torch.randn(3))
    assert "reads a tensor of the program that apply was not given" in text


def test_autograd_function_whose_backward_closes_over_tensor_is_refused() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        class Closed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * w

        return Closed.apply(x)

    text = error_of(fn, torch.randn(3, requires_grad=True), torch.randn(3))
    assert "reads a tensor of the program that apply was not given" in text


def test_autograd_function_that_branches_on_data_is_refused() -> None:
    class Branches(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    text = error_of(Branches.apply, torch.randn(3, requires_grad=True))
    assert "The program depends on a tensor's value" in text


def test_random_op_inside_autograd_function_is_refused() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * torch.rand_like(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    text = error_of(Noisy.apply, torch.randn(3, requires_grad=True))
    assert "This random op has no counter-based form" in text
