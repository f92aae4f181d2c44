"""Tests that programs that cannot be captured are refused with the user's line and a fix. The
message text is part of the contract.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Mutation, Result
from tests.frontend.eager import check, run_graph
from tests.models import MLP


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def refused(fn: Callable[..., Any], *args: Any, grads: Any = "none") -> str:
    """Return the text of the error, with line numbers as N, because they move with this file."""
    with pytest.raises(PlanningError) as caught:
        capture(fn, args or (torch.randn(2, 3),), grads=grads)
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def contexts() -> Any:
    return nullcontext(), nullcontext()


def checkpoint_op_by_op(model: nn.Module, x: Tensor) -> Tensor:
    """
    torch.utils.checkpoint with context_fn= cannot be captured: a plan saves the inputs of a region, and cannot select ops.
      context_fn=<function>
      test_refusals.py:N: return checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    fix: leave context_fn out, or checkpoint smaller parts
    """  # noqa: E501
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


def checkpoint_without_a_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """
    torch.utils.checkpoint makes no gradients here: no argument of it requires grad.
      test_refusals.py:N: return checkpoint(model, x, use_reentrant=True).sum()
    fix: use_reentrant=False
    """
    return checkpoint(model, x, use_reentrant=True).sum()


def item(x: Tensor) -> Tensor:
    """
    The program depends on a tensor's value, which is not known when it is planned.
      .item() of f32[]
      test_refusals.py:N: return x * x.sum().item()
    fix: keep it a tensor (torch.where, a mask that multiplies), or pass it in as a number; to see it, return (loss, {"name": value}) and read loss.metrics
    """  # noqa: E501
    return x * x.sum().item()


def formatted(x: Tensor) -> Tensor:
    """
    The program depends on a tensor's value, which is not known when it is planned.
      the text of a tensor (f"{tensor}", format) of f32[]
      test_refusals.py:N: print(f"{x.sum():.3f}")
    fix: to see it, return (loss, {"name": value}) and read loss.metrics
    """
    print(f"{x.sum():.3f}")
    return x


def branch(x: Tensor) -> Tensor:
    """
    The program depends on a tensor's value, which is not known when it is planned.
      the truth of a tensor (if, while, assert, and, or) of bool[]
      test_refusals.py:N: if x.sum() > 0:
    fix: keep it a tensor (torch.where, a mask that multiplies), or pass it in as a number
    """
    if x.sum() > 0:
        return x
    return -x


def boolean_mask(x: Tensor) -> Tensor:
    """
    The program depends on a tensor's value, which is not known when it is planned.
      index: a value or size that depends on data
      test_refusals.py:N: return x[x > 0].sum()
    fix: keep it a tensor (torch.where, a mask that multiplies), or pass it in as a number
    """
    return x[x > 0].sum()


def where_alone(x: Tensor) -> Tensor:
    """
    The program depends on a tensor's value, which is not known when it is planned.
      where: a value or size that depends on data
      test_refusals.py:N: return x[torch.where(x > 0)].sum()
    fix: torch.where(condition, x, 0) with three arguments, or x * condition: a mask;
         of the tokens of an expert, dt.to_experts
    """
    return x[torch.where(x > 0)].sum()


def other_memory(model: nn.Module, x: Tensor) -> Tensor:
    """
    The program assigns other memory to a tensor (x.data = y), and something else reads or changes the old or the new memory.
      f32[3]
      test_refusals.py:N: model.running_mean.data = x[0]
    fix: x.copy_(y) under torch.no_grad(), of a parameter or buffer x
    """  # noqa: E501
    model.running_mean.data = x[0]
    return model(x)


def random_op(x: Tensor) -> Tensor:
    """
    This random op has no counter-based form: multinomial.
      test_refusals.py:N: return torch.multinomial(x, 2)
    fix: torch.argmax(p / torch.empty_like(p).exponential_(), -1) draws one of each row of p, and .topk(n, -1).indices of the quotient n without replacement
    """  # noqa: E501
    return torch.multinomial(x, 2)


def control_flow(x: Tensor) -> Tensor:
    """
    Control flow inside the graph is not supported yet: cond.
      test_refusals.py:N: return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
    fix: compute both branches and choose with torch.where
    """
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


def gradient_inside(x: Tensor) -> Tensor:
    """
    A gradient inside the program is not supported yet.
      test_refusals.py:N: (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    fix: return the loss, and let the runtime differentiate it; a derivative along a direction: torch.func.jvp; a second derivative: jvp of jvp
    """  # noqa: E501
    (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return g.pow(2).sum()


class Average(nn.Module):
    """
    A buffer is changed to a value that requires grad: steps would share gradients.
      buffer mean
      test_refusals.py:N: self.mean.lerp_(y.mean(0), 0.1)
    fix: change it under torch.no_grad(), or from a detached value
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean.lerp_(y.mean(0), 0.1)
        return (y - self.mean).sum()


def changed_argument(x: Tensor) -> Tensor:
    """
    The program changes an argument in place; only parameters and buffers may be, and DTensors that dt.compile is given.
      x
      test_refusals.py:N: x.add_(1)
    fix: write the out-of-place form (x = x + 1), or register the tensor as a buffer; for dt.compile: x = dt.distribute(x, mesh) before the calls
    """  # noqa: E501
    x.add_(1)
    return x * 2


def packed_data(x: Tensor) -> Tensor:
    """
    The shape and order of a packed sequence depend on the lengths, whose values are not known when the program is planned.
      test_refusals.py:N: return nn.utils.rnn.pack_padded_sequence(x, (x > 0).sum(0)).data.sum()
    fix: call pad_packed_sequence(..., total_length=number of steps) and use the padded tensor with a mask; pack inside the program, and pass the padded tensor and the lengths
    """  # noqa: E501
    return nn.utils.rnn.pack_padded_sequence(x, (x > 0).sum(0)).data.sum()


def flexible_attention(x: Tensor) -> Tensor:
    """
    torch.nn.attention.flex_attention is not supported: its score_mod and mask_mod are programs of their own.
      test_refusals.py:N: return flex_attention(x, x, x)
    fix: torch.nn.functional.scaled_dot_product_attention with attn_mask=, or is_causal=True
    """  # noqa: E501
    x = x[None, None]
    return flex_attention(x, x, x)


class Storing(nn.Module):
    """
    The program stores a tensor in an attribute of a module, which would be lost.
      last
      test_refusals.py:N: self.last = x * 2
    fix: return it from forward; if it needs no gradient, register it as a buffer and change it in place; a cache that stays as it is: let one call of the module fill it before
    """  # noqa: E501

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last + 1


CLOSED_OVER = MLP()
LEAF = torch.ones(3, requires_grad=True)


def closed_over(x: Tensor) -> Tensor:
    """
    A tensor that requires grad is used but was not passed in: its gradient would be lost.
      f32[64,16], an argument of linear
      models.py:N: h = self.up(x)
    fix: pass its module as an argument, as in loss_fn(model, x); a criterion's: parallelize nn.ModuleDict(dict(model=model, criterion=criterion))
    """  # noqa: E501
    return CLOSED_OVER(x)


def leaf_closed_over(x: Tensor) -> Tensor:
    """
    A tensor that requires grad is used but was not passed in: its gradient would be lost.
      f32[3], an argument of mul
      test_refusals.py:N: return x * LEAF
    fix: model.z = nn.Parameter(z), read from the model; or z.detach()
    """
    return x * LEAF


def loss_of_rows(model: nn.Module, x: Tensor) -> Tensor:
    """
    A loss is one number: loss_fn returns a scalar or (scalar, {name: scalar}).
      it returned f32[2]
      test_refusals.py:N: def loss_of_rows(model: nn.Module, x: Tensor) -> Tensor:
    fix: reduce the loss inside loss_fn, as in loss.mean() or loss.sum()
    """
    return model(x).pow(2).mean(-1)


TOTAL = torch.zeros(3)


def in_place_of_a_constant(x: Tensor) -> Tensor:
    """
    The program changes objects that outlive the call, each time that it is called; a captured step runs this Python once.
      add_ of f32[1,3], no parameter or buffer
      test_refusals.py:N: return x * TOTAL.view(1, 3).add_(1)
    fix: keep it in a buffer that is changed in place (register_buffer), return it, or change it outside the step
    """  # noqa: E501
    return x * TOTAL.view(1, 3).add_(1)


def detached_loss(model: nn.Module, x: Tensor) -> Tensor:
    """
    The loss does not depend on any parameter that requires grad.
      it returned f32[]
      test_refusals.py:N: def detached_loss(model: nn.Module, x: Tensor) -> Tensor:
    fix: pass the model as an argument of loss_fn, and do not detach its output
    """
    return model(x).mean().detach()


X = torch.randn(2, 3)
MODEL_AND_X = MLP(), torch.randn(2, 16)
REFUSED = [
    (checkpoint_op_by_op, MODEL_AND_X, "tangents"),
    (checkpoint_without_a_gradient, MODEL_AND_X, "loss"),
    (item, (X,), "none"),
    (formatted, (X,), "none"),
    (where_alone, (X,), "none"),
    (branch, (X,), "none"),
    (boolean_mask, (X,), "none"),
    (other_memory, (nn.BatchNorm1d(3), X), "none"),
    (random_op, (X,), "none"),
    pytest.param(control_flow, (X,), "none", marks=pytest.mark.slow),
    (gradient_inside, (torch.randn(2, requires_grad=True),), "loss"),
    (Average(), (X,), "loss"),
    (changed_argument, (X,), "none"),
    (packed_data, (X,), "none"),
    (flexible_attention, (X,), "none"),
    (Storing(), (X,), "none"),
    (closed_over, (torch.randn(2, 16),), "tangents"),
    (leaf_closed_over, (X,), "tangents"),
    (in_place_of_a_constant, (X,), "none"),
    (loss_of_rows, MODEL_AND_X, "loss"),
    (detached_loss, MODEL_AND_X, "loss"),
]


@pytest.mark.parametrize(("fn", "args", "grads"), REFUSED)
def test_refused_programs_raise_message_in_their_docstring(
    fn: Callable[..., Any], args: tuple[Any, ...], grads: Any
) -> None:
    """The docstring of each program is the expected message."""
    text = re.sub(r"<.*>", "<function>", refused(fn, *args, grads=grads))
    assert text == inspect.cleandoc(fn.__doc__ or "")


EYE = torch.eye(3).to_sparse()
with warnings.catch_warnings(action="ignore"):  # nested tensors are a prototype in torch
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
LAZY = nn.LazyLinear(2)
UNPLANNABLE: list[tuple[Callable[[Tensor], Any], str, str]] = [
    (
        lambda x: torch.sparse.mm(EYE, x.t()),
        "a tensor that the program uses is a sparse tensor (torch.sparse_coo)",
        "x.to_dense() before the call",
    ),
    (
        lambda x: x + NESTED.to_padded_tensor(0),
        "a tensor that the program uses is a nested tensor (torch.strided)",
        "x.to_padded_tensor(0) before the call",
    ),
    (lambda x: LAZY(x), "LAZY (global of", "call the module once on a batch before"),
]


@pytest.mark.parametrize(("fn", "fact", "fix"), UNPLANNABLE, ids=["sparse", "nested", "lazy"])
def test_unsupported_closed_over_objects_are_refused_with_fix(
    fn: Callable[[Tensor], Any], fact: str, fix: str
) -> None:
    text = refused(fn)
    assert text.startswith(fact) and f"fix: {fix}" in text


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("place", ["", "1"])
def test_torch_jit_modules_are_refused(place: str) -> None:
    made: Any = torch.jit.trace(nn.Linear(3, 2), torch.ones(2, 3))
    text = refused(nn.Sequential(nn.Identity(), made) if place else made)
    assert text.startswith(f"{place or 'the module'} is a module of torch.jit (Linear)")
    assert text.endswith("fix: use the module that was scripted or traced")


def test_reading_sorted_indices_of_packed_sequence_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        lengths = torch.tensor([1, 2, 2])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return x[0, packed.sorted_indices]

    assert refused(fn).startswith("The shape and order of a packed sequence depend on the lengths")


def test_pad_packed_sequence_to_fewer_steps_than_packed_is_refused() -> None:
    def fn(x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(packed, total_length=1)[0]

    text = refused(fn, torch.randn(2, 3), torch.tensor([1, 1, 1]))
    assert text.startswith("pad_packed_sequence(total_length=1) is shorter than the 2 steps")
    assert text.endswith("fix: total_length=2, and a slice of the first 1 steps")


def returns_a_number(model: nn.Module, x: Tensor) -> Any:
    return 3.0


def returns_a_tensor_beside(model: nn.Module, x: Tensor) -> Any:
    out = model(x)
    return out.mean(), {"out": out}


@pytest.mark.parametrize(
    ("loss", "what"),
    [(returns_a_number, "3.0 (float)"), (returns_a_tensor_beside, "{'out': f32[2,16]}")],
)
def test_loss_function_that_returns_no_scalar_tensor_is_refused(
    loss: Callable[..., Any], what: str
) -> None:
    assert f"it returned {what}" in refused(loss, *MODEL_AND_X, grads="loss")


@pytest.mark.parametrize(
    "ask",
    [
        float,
        int,
        Tensor.tolist,
        lambda x: range(5)[x.long()],
        lambda x: x.nonzero().float().sum(),
        lambda x: len(str(x)),
        lambda x: len("%s" % [x]),
        lambda x: float(f"{x:.3f}"),
    ],
)
def test_python_conversions_of_traced_tensor_are_refused(ask: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * torch.as_tensor(ask(x.sum()))

    text = refused(fn)
    assert text.startswith("The program depends on a tensor's value")
    assert "test_refusals.py:N" in text


def test_traced_tensor_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Tensor) -> Tensor:
        print(
            f"x {x}",
            "y {}".format(x.sum()),  # noqa: UP032
            str(torch.tensor([3.0])),
        )
        return x * float(f"{torch.tensor(3.0):.1f}")

    graph = capture(fn, (torch.randn(2),), grads="none")
    assert [n.args[1] for n in graph.nodes] == [3.0]
    text = capsys.readouterr().out
    assert text.startswith("x FakeTensor") and text.endswith("tensor([3.])\n")


def test_item_of_constant_tensor_made_in_program_is_allowed() -> None:
    def fn(x: Tensor) -> Tensor:
        steps = torch.zeros(4)
        steps[1:].fill_(1.0)
        return x * float(torch.tensor(3.0)) + steps.sum().item()

    graph = capture(fn, (torch.randn(2),), grads="none")
    assert [n.args[1] for n in graph.nodes] == [3.0, 3.0]


def test_item_of_constant_overwritten_with_argument_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        steps = torch.zeros(4)
        steps[1:].copy_(x)
        return x * steps.sum().item()

    assert ".item() of f32[]" in refused(fn, torch.randn(3))


@pytest.mark.parametrize(
    ("move", "operand"),
    [
        (lambda m: m.double(), "weight: f32[16,16] on cpu -> f64[16,16] on cpu"),
        (lambda m: m.to("meta"), "weight: f32[16,16] on cpu -> f32[16,16] on meta"),
    ],
)
def test_moving_module_or_changing_its_dtype_in_program_is_refused(move: Any, operand: str) -> None:
    def fn(model: nn.Module, x: Tensor) -> Tensor:
        return move(model)(x)

    model = nn.Linear(16, 16)
    text = refused(fn, model, torch.randn(2, 16))
    assert text.splitlines()[:2] == [
        "The program moves a module or changes its dtype.",
        f"  {operand}",
    ]
    assert model.weight.dtype == torch.float32


class Held(nn.Module):
    def __init__(self, change: Callable[[Held], Tensor | None]) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.arange(9.0).view(3, 3), requires_grad=False)
        self.q = nn.Parameter(torch.ones(3, 3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            more = self.change(self)
        return x @ self.k @ self.q + (0.0 if more is None else more)


def given_old(m: Held) -> Tensor:
    old = m.k.data
    m.k.data = m.k.data * 2
    return m.k - old


def given_and_changed(m: Held) -> None:
    y = m.k * 2
    m.k.data = y
    y.zero_()


def given_and_read(m: Held) -> Tensor:
    y = m.k * 2
    m.k.data = y
    m.k.mul_(2)
    return y


def given_twice(m: Held) -> None:
    m.k.data = y = m.k * 2
    m.q.data = y


def given_of_another(m: Held) -> None:
    m.k.data = m.q.data


def given_in_another_shape(m: Held) -> None:
    m.k.data = m.k[:, :1].clone()


@pytest.mark.parametrize(
    "change",
    [
        *(given_old, given_and_changed, given_and_read, given_twice, given_of_another),
        given_in_another_shape,
    ],
)
def test_data_assignment_that_copy_cannot_express_is_refused(change: Any) -> None:
    text = refused(Held(change), torch.randn(2, 3))
    assert text.startswith("The program assigns other memory to a tensor (x.data = y)")


def given(m: Held) -> None:
    m.k.data = m.k.data * 2


def given_and_looked_at(m: Held) -> Tensor:
    m.k.data = m.k * 2
    m.k.data += m.q.data
    return m.k.view(-1)[:3]


def given_again(m: Held) -> None:
    m.k.data = m.k.data * 2
    m.k.data = m.k.data + m.q.data


@pytest.mark.parametrize("change", [given, given_and_looked_at, given_again])
def test_data_assignment_that_copy_can_express_matches_eager(change: Any) -> None:
    module, x = Held(change), torch.randn(2, 3)
    found = run_graph(capture(module, (x,), grads="none"), module, (x,), {})
    torch.testing.assert_close(found[Result(0)], module(x).detach())
    torch.testing.assert_close(found[Mutation("k")], module.k.detach())


def test_refused_data_dependence_inside_torch_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """If torch's own code asks for a value, torch.export would print the graph so far."""

    def fn(x: Tensor) -> Tensor:
        return F.ctc_loss(x, x[0].long(), torch.tensor([2]), x[:1, 0].long())

    def within(x: Tensor) -> Tensor:
        return torch.tensor_split(x, x[0].long().abs())[0]

    assert "fix: a torch.library.custom_op" in refused(fn, torch.randn(4, 3))
    assert "The program depends on a tensor's value" in refused(within, torch.randn(4, 3))
    assert capfd.readouterr().err == ""


def test_batch_norm_with_cumulative_average_is_refused() -> None:
    assert "momentum=0.1" in refused(nn.BatchNorm1d(3, momentum=None), torch.randn(2, 3))


def test_torch_func_grad_inside_program_is_refused_naming_user_line() -> None:
    """The suggested fix, torch.func.jvp, is captured."""

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: model(z).square().sum())(x).square().sum()

    def along(model: nn.Module, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda z: model(z), (x,), (torch.ones_like(x),))[1].square().sum()

    args = (MLP(), torch.randn(2, 16))
    text = refused(penalty, *args, grads="loss")
    assert text.startswith("A gradient inside the program is not supported yet.")
    assert "test_refusals.py:N: return torch.func.grad(" in text
    check(along, args)  # the fix


def test_dropout_without_effect_is_removed() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.5, training=False), 0.0) + 1

    graph = capture(fn, (torch.randn(2),), grads="none")
    assert [n.target for n in graph.nodes] == [torch.ops.aten.add.Tensor]


@pytest.mark.parametrize(
    "op",
    [
        lambda x: torch._standard_gamma(x),
        lambda x: torch.randperm(x.shape[-1]),
        lambda x: x.geometric_(0.5),
        lambda x: x.normal_(generator=torch.Generator()),
        lambda x: torch.distributions.Beta(x, x).rsample(),
    ],
)
def test_random_ops_without_counter_based_form_are_refused(op: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = op(x.sigmoid())
        return x + noise

    assert "This random op has no counter-based form" in refused(fn)


def test_parameter_written_before_backward_reads_it_is_refused() -> None:
    """Torch raises in the backward as well."""

    def fn(model: MLP, x: Tensor) -> Tensor:
        y = model(x)
        with torch.no_grad():
            model.down.weight.mul_(2)
        return y.sum()

    text = refused(fn, MLP(), torch.randn(2, 16), grads="loss")
    assert text.startswith("The program's backward raises while it is captured.")
    assert "modified by an inplace operation" in text


def pruned(module: nn.Linear) -> None:
    from torch.nn.utils import prune  # torch does not import it by itself

    prune.random_unstructured(module, "weight", amount=0.3)


@pytest.mark.parametrize(
    ("apply", "by", "fix"),
    [
        (
            nn.utils.weight_norm,
            "torch.nn.utils.weight_norm",
            'torch.nn.utils.remove_weight_norm(module, "weight"); '
            'torch.nn.utils.parametrizations.weight_norm(module, "weight")',
        ),
        (
            nn.utils.spectral_norm,
            "torch.nn.utils.spectral_norm",
            'torch.nn.utils.remove_spectral_norm(module, "weight"); '
            'torch.nn.utils.parametrizations.spectral_norm(module, "weight")',
        ),
        (
            pruned,
            "torch.nn.utils.prune",
            'torch.nn.utils.prune.remove(module, "weight"); to go on with the mask: '
            'torch.nn.utils.parametrize.register_parametrization(module, "weight", a module that '
            "multiplies by the mask)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weight_norm_hooks_are_refused_with_working_fix(apply: Any, by: str, fix: str) -> None:
    def fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    model = MLP()
    apply(model.down)
    text = refused(fn, model, torch.randn(2, 16), grads="loss")
    assert text.splitlines() == [
        "The program stores a tensor in an attribute of a module, which would be lost.",
        "  down.weight",
        f"  stored by {by}, a hook before its forward",
        "  test_refusals.py:N: def fn(model: nn.Module, x: Tensor) -> Tensor:",
        f"fix: {fix}",
    ]
    scope = {"torch": torch, "module": model.down}
    exec(fix.partition("; to go on")[0], scope)
    capture(fn, (model, torch.randn(2, 16)), grads="loss")


def test_buffer_created_by_forward_is_refused_and_module_unchanged() -> None:
    """No fake tensor is left in the module."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", None, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(16.0)
            return x * self.table

    module = Caching()
    x = torch.ones(2, 16)
    assert refused(module, x).splitlines()[:2] == [
        "The program stores a tensor in an attribute of a module, which would be lost.",
        "  table",
    ]
    assert module.table is None
    module(x)  # the fix: one call fills it
    assert len(capture(module, (x,), grads="none").inputs) == 2


def test_frozen_module_can_be_closed_over() -> None:
    model = MLP().requires_grad_(False)
    graph = capture(lambda x: model(x), (torch.randn(2, 16),), grads="none")
    assert len(graph.inputs) == 5


def test_capture_leaves_autograd_functions_and_checkpoint_unpatched() -> None:
    capture(lambda x: Doubled.apply(x), (torch.randn(2),), grads="none")
    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()
    checkpoint(lambda y: y * 2, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embedding_gradients_are_refused_with_fix(kind: Any) -> None:
    """A sparse table is accepted if nothing is differentiated, or if the table is frozen."""

    def fn(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids).sum()

    table, ids = kind(10, 4, sparse=True), torch.tensor([[1, 2], [0, 2]])
    text = refused(fn, table, ids, grads="loss")
    assert text.replace("embedding_bag", "embedding") == (
        "The gradient of an embedding with sparse=True is a sparse tensor, and a step's gradients "
        "are dense.\n"
        "  embedding of f32[10,4]\n"
        "  test_refusals.py:N: return model(ids).sum()\n"
        "fix: set sparse=False: the same numbers, and an optimizer that takes dense gradients"
    )
    capture(fn, (table, ids), grads="none")
    table.sparse = False  # the fix
    capture(fn, (table, ids), grads="loss")


def test_sparse_embedding_without_gradient_is_accepted() -> None:
    def fn(table: nn.Module, model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            found = table(ids)
        return model(found).sum()

    tables = [nn.Embedding(10, 4, sparse=True) for _ in range(2)]
    tables[1].requires_grad_(False)
    for table in tables:
        capture(fn, (table, nn.Linear(4, 2), torch.tensor([1, 2])), grads="loss")
    capture(
        lambda table, model, ids: model(table(ids)).sum(),
        (tables[1], nn.Linear(4, 2), torch.tensor([1, 2])),
        grads="loss",
    )
