"""Tests what a failing user program reports while it is captured: the user's line, the module and
the operands, in few lines. Exceptions that the program raises itself pass through unchanged.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp, linearize, vmap

import dtensor as dt
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.refusals import RefusalMode
from dtensor.private_torch import dispatch_modes, function_modes, functorch_depth


class Part(nn.Module):
    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(width, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self, self.up(x)))


class Net(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Part(lambda _, h: F.gelu(h)), last])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def error_of(last: nn.Module) -> PlanningError:
    """Return the error that refuses a step of a model with this last part."""
    with pytest.raises(PlanningError) as caught:
        capture(loss_fn, (Net(last), torch.randn(4, 8)), grads="loss")
    return caught.value


def text_of(error: PlanningError) -> str:
    return re.sub(r"test_failures.py:\d+", "test_failures.py:N", str(error))


def test_linear_of_wrong_size_error_names_module_and_operands() -> None:
    error = error_of(Part(lambda _, h: F.gelu(h), width=12))
    assert isinstance(error.__cause__, RuntimeError)
    assert_expected_inline(
        text_of(error),
        """\
The program raises while it is captured.
  RuntimeError: a and b must have same reduction dim, but got [4, 16] X [12, 8].
  blocks.1.down: Linear(in_features=12, out_features=8, bias=True)
  linear(f32[4,16], f32[8,12], f32[8])
  test_failures.py:N: return self.down(self.act(self, self.up(x)))
fix: change that line or what reaches it; to see it alone, make the call in plain torch""",
    )


def test_missing_attribute_error_suggests_similar_name() -> None:
    error = error_of(Part(lambda self, h: self.downn(h)))  # type: ignore[operator]
    assert isinstance(error.__cause__, AttributeError)
    assert_expected_inline(
        text_of(error),
        """\
The program raises while it is captured.
  AttributeError: 'Part' object has no attribute 'downn'
  blocks.1: Part
  h: f32[4,16]
  test_failures.py:N: error = error_of(Part(lambda self, h: self.downn(h)))  # type: ignore[operator]
fix: is down meant?""",  # noqa: E501
    )


def test_wrong_view_error_names_operands_and_line() -> None:
    error = error_of(Part(lambda _, h: h.view(4, 3)))
    assert_expected_inline(
        text_of(error),
        """\
The program raises while it is captured.
  RuntimeError: shape '[4, 3]' is invalid for input of size 64
  blocks.1: Part
  view(f32[4,16], 4, 3)
  test_failures.py:N: error = error_of(Part(lambda _, h: h.view(4, 3)))
fix: change that line or what reaches it; to see it alone, make the call in plain torch""",
    )


def test_unknown_keyword_error_names_module_and_line() -> None:
    error = error_of(Part(lambda _, h: F.gelu(h, aproximate="tanh")))  # type: ignore[call-arg]
    assert_expected_inline(
        text_of(error),
        """\
The program raises while it is captured.
  TypeError: gelu() got an unexpected keyword argument 'aproximate'
  blocks.1: Part
  h: f32[4,16]
  test_failures.py:N: error = error_of(Part(lambda _, h: F.gelu(h, aproximate="tanh")))  # type: ignore[call-arg]
fix: change that line or what reaches it; to see it alone, make the call in plain torch""",  # noqa: E501
    )


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda _, h: h + torch.ones(3), r"add\(f32\[4,16\], f32\[3\]\)"),
        (lambda _, h: torch.cat([h, torch.ones(3, 3)]), r"cat\(\[f32\[4,16\], f32\[3,3\]\]\)"),
        (lambda _, h: h[:, 40], "IndexError: index 40 is out of bounds"),
        (lambda _, h: h.sum(dims=1), r"TypeError: sum\(\) received an invalid(.|\n)*h: f32\[4,16"),
        (lambda _, h: h.nonsense(), "AttributeError: 'Tensor' object has no attribute 'nonsense'"),
        (lambda _, h: {}["a"], "KeyError: 'a'"),
        (lambda _, h: F.dropout(h, p=2.0), "ValueError: dropout probability has to be between"),
    ],
    ids=["broadcast", "cat", "index", "overload", "method", "key", "torch's own raise"],
)
def test_torch_and_python_errors_name_module_and_line(
    act: Callable[..., Tensor], words: str
) -> None:
    error = error_of(Part(act))
    assert re.search(words, str(error)), error
    assert "\n  blocks.1: Part\n" in str(error) and "test_failures.py:" in str(error)


def test_wrong_number_of_arguments_error_shows_function_definition() -> None:
    with pytest.raises(PlanningError, match=r"takes 2 positional arguments but 3 were given") as e:
        capture(loss_fn, (nn.Linear(2, 2), torch.ones(2), torch.ones(2)), grads="loss")
    assert re.search(r"test_failures.py:\d+: def loss_fn", str(e.value))


def raises(error: Exception) -> Callable[..., Tensor]:
    def act(_: nn.Module, h: Tensor) -> Tensor:
        raise error

    return act


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyError, AssertionError])
def test_exception_raised_by_program_propagates_as_same_object_with_note(
    kind: type[Exception],
) -> None:
    """The note names the module, so an `except` clause around the step still catches the
    exception."""
    mine = kind("my own")
    with pytest.raises(kind, match="my own") as caught:
        capture(loss_fn, (Net(Part(raises(mine))), torch.randn(4, 8)), grads="loss")
    assert caught.value is mine and mine.args == ("my own",)
    (note,) = mine.__notes__
    assert note == "raised while the program was captured, in blocks.1: Part"


def test_missing_or_failing_backward_of_custom_op_is_explained() -> None:
    @torch.library.custom_op("test_failures::no_backward", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x * 2

    op.register_fake(torch.empty_like)
    with pytest.raises(PlanningError, match=r"no autograd formula(.|\n)*fix: .*register_autograd"):
        capture(loss_fn, (Net(Part(lambda _, h: op(h))), torch.randn(4, 8)), grads="loss")

    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.nonsense()  # type: ignore[operator]

    op.register_autograd(backward)
    with pytest.raises(
        PlanningError, match=r"backward raises(.|\n)*'nonsense'\n  test_failures.py"
    ):
        capture(loss_fn, (Net(Part(lambda _, h: op(h))), torch.randn(4, 8)), grads="loss")


@pytest.mark.parametrize("last", ["size", "own", "item"])
def test_traceback_of_failed_capture_fits_in_30_lines(last: str) -> None:
    """Counts lines from the user's call to the last line, both for a capture and for a step."""
    made = {
        "size": lambda: Part(lambda _, h: F.gelu(h), width=12),
        "own": lambda: Part(raises(ValueError("my own"))),
        "item": lambda: Part(lambda _, h: h * h.sum().item()),
    }
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(Net(made[last]()), mesh, {})
    step = dt.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError) as caught:
        step.plan(torch.randn(4, 8))
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) <= 30, "\n".join(lines)
    assert not any("site-packages/torch" in line for line in lines)


@pytest.mark.slow
def test_standard_error_of_failing_script_names_user_line(tmp_path: Path) -> None:
    """Checks the standard error of a whole program, including what torch logs."""
    file = tmp_path / "train.py"
    file.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            import dtensor as dt

            mesh = dt.Mesh(tp=2)
            model = dt.parallelize(nn.Sequential(nn.Linear(8, 16), nn.Linear(12, 8)), mesh, {})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = dt.train_step(model, lambda model, x: model(x).sum(), optimizer)
            step(torch.randn(4, 8))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": str(Path(dt.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and len(lines) <= 30, done.stderr
    assert "  1: Linear(in_features=12, out_features=8, bias=True)" in lines
    assert (
        "  train.py:9: step = dt.train_step(model, lambda model, x: model(x).sum(), optimizer)"
        in (lines)
    )


# -- torch's own state after a failure -------------------------------------------------------------


def _dual(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(dual.sin() * 2).tangent + x


def _in_modes(x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("cpu"):
        y = x @ x + torch.ones(3, 3)
    with torch.inference_mode():
        z = torch.zeros(3, 3) + 1
    return y + z.clone()


def _in_float64(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    y = x.double() + torch.ones(3, 3)
    torch.set_default_dtype(torch.float32)
    return y.float() * 2


STATEFUL: dict[str, Callable[[Tensor], Any]] = {
    "jvp": lambda x: jvp(lambda a: a.sin() * a, (x,), (torch.ones_like(x),))[1] + x,
    "jvp of jvp": lambda x: jvp(lambda a: jvp(torch.sin, (a,), (a,))[1] * 2, (x,), (x,))[1] + x,
    "jacfwd": lambda x: jacfwd(lambda a: a.sin() * 2)(x[0]) + x,
    "vmap": lambda x: vmap(lambda row: row.sin() * row.sum())(x) + x,
    "vmap of jvp": lambda x: vmap(lambda r: jvp(torch.sin, (r,), (r,))[1] + 1)(x) * 2,
    "dual numbers": _dual,
    "modes": _in_modes,
    "default dtype": _in_float64,
    "no gradient": lambda x: torch.no_grad()(lambda a: a.sin() * a)(x) + x,
    "nothing of these": lambda x: x.cos() + x,
}


def _written(a: Tensor) -> Tensor:
    made = torch.zeros(2, 3)
    made[:, 0] = a[:, 1]
    return made * a


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch.func.jvp
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")  # of linearize
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jvp(torch.sin, (x,), (torch.ones(1, 3).expand_as(x),))[1],
        lambda x: jvp(torch.sin, (x,), (x.cos().t().contiguous().t(),))[1],
        lambda x: jvp(_written, (x,), (x.cos(),))[1],
        lambda x: jvp(lambda a: jvp(_written, (a,), (x,))[1], (x,), (x.cos(),))[1],
        lambda x: linearize(torch.sin, x)[1](x.cos()),
    ],
    ids=["expanded", "transposed", "written", "written, twice", "linearize"],
)
def test_forward_mode_derivatives_match_torch(fn: Callable[[Tensor], Tensor]) -> None:
    """Covers tangents whose strides differ from their primals, and tensors created and written
    inside."""
    x = torch.randn(2, 3)
    with dt.launch(dt.Mesh()):
        torch.testing.assert_close(dt.compile(fn, dt.Mesh())(x).full_tensor(), fn(x))


def test_in_place_write_to_integer_tensor_inside_jvp_is_refused_with_fix() -> None:
    def fn(x: Tensor) -> Tensor:
        return jvp(lambda a: a * torch.arange(3).add_(1), (x,), (x,))[1]

    with pytest.raises(PlanningError, match=r"fix: write into a copy .* x.clone\(\)"):
        capture(fn, (torch.ones(3),), grads="none")


def torchs_state() -> tuple[Any, ...]:
    with torch.no_grad():
        made = torch.ones(2) + 1
    return (
        made.dtype,
        made.device,
        functorch_depth(),
        (forward_ad._current_level, torch._C._is_fwd_grad_enabled()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        len(function_modes()),
        len(dispatch_modes()),
        jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))[1].item(),
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch.func.jvp
@pytest.mark.parametrize("name", list(STATEFUL))
def test_failed_capture_leaves_no_torch_mode_or_level_open(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails each torch call of the program in turn."""
    before, real = torchs_state(), RefusalMode.__torch_function__
    fails_at = calls = 0

    def failing(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal calls
        calls, kwargs = calls + 1, kwargs or {}
        if calls == fails_at:
            raise ZeroDivisionError
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(RefusalMode, "__torch_function__", failing)
    while calls >= fails_at:
        calls, fails_at = 0, fails_at + 1
        with suppress(PlanningError, ZeroDivisionError):
            capture(STATEFUL[name], (torch.ones(3, 3),), grads="none")
        assert torchs_state() == before, f"call {fails_at}"
    assert fails_at > 2
