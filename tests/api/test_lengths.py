"""Calls whose arguments differ only in lengths match plain torch, with one export for all lengths
or one capture for each."""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step import bound_call, lengths
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.lengths import ExportForLengths
from tests.models import GPT, DropoutGPT, Llama, batch, loss_fn

LENGTHS = (6, 9, 12, 23, 9)


@dataclass(slots=True)
class Counted:
    """Counts captures, and graphs made from an export for all lengths."""

    captures: int = 0
    written: int = 0
    refused: str = ""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Use the real capture instead of tests/captures.py, and count."""
    found = Counted()
    plain: Any = lengths.Lengths._exported_graph

    def counting(*args: Any, **kwargs: Any) -> Any:
        found.captures += 1
        return capture(*args, **kwargs)

    def graph(*args: Any) -> Any:
        try:
            made = plain(*args)
        except Exception as error:
            found.refused = str(error)
            raise
        found.written += 1
        return made

    monkeypatch.setattr(bound_call, "capture", counting)
    monkeypatch.setattr(lengths.Lengths, "_exported_graph", graph)
    yield found


NAMED = {f"length {n}": 1.0 + n / 7 for n in range(64)}
TABLE: dict[Any, float] = {n: 1.0 + n / 7 for n in range(64)}


@functools.lru_cache
def doubled(n: int) -> float:
    return 2.0 * n


class Known(enum.IntEnum):
    SHORT = 9
    LONG = 23


class Part(nn.Module):
    """A layer, and a program that uses the length of its result."""

    mask: Tensor

    def __init__(self, use: Callable[[Part, Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(64, 64).tril())
        self.table = nn.Embedding(64, 4)
        self.use = use
        self.seen = 0
        self.limit = 20

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.linear(x), x.shape[0])


def kept_length(part: Part, x: Tensor, n: Any) -> Tensor:
    part.seen = n
    return x * part.seen


def grown(part: Part, x: Tensor, n: Any) -> Tensor:
    if n > part.seen:
        part.seen = n
    return x * part.seen


def stepped(part: Part, x: Tensor, n: Any) -> Tensor:
    for i in range(n // 3):
        x = x + i
    return x


def is_true(part: Part, x: Tensor, n: Any) -> Tensor:
    longer = n > 20
    return x * 2 if longer is True else x


def tried(part: Part, x: Tensor, n: Any) -> Tensor:
    try:
        return x * TABLE[n]
    except TypeError:
        return x


def causal(part: Part, x: Tensor, n: Any) -> Tensor:
    at = torch.arange(n)
    scores = (x @ x.T).masked_fill(at[:, None] < at[None, :], float("-inf"))
    return scores.softmax(-1) @ x


def whole_numbers(part: Part, x: Tensor, n: Any) -> Tensor:
    """Compute many things that a program may do with a length."""
    batch = x[None]
    made = [
        *(x[: n // 2] * n, x[n - 3 :] + x[-1], x.reshape(2 * n, 2) * x.numel()),
        *(part.mask[:n, :n] @ x, x + part.table(torch.arange(n)), causal(part, x, n)),
        *(x * torch.arange(n, 0, -1)[:, None] / n, x.sum(0) / n, x.flip(0).roll(3, 0)),
        *(F.pad(x, (0, 0, n, 0)).view(2, -1, 4).cumsum(1), x + torch.ones(1, 4).expand(n, 4)),
        *(torch.cat([x, x.new_full((n, 4), 2.0)]), x + torch.full((n, 4), n), x * (-n % 5)),
        *(F.scaled_dot_product_attention(batch, batch, batch, is_causal=True), x.unfold(0, 2, 1)),
        *(F.interpolate(x.T[None], scale_factor=1.5, mode="linear"), x * (n << 1) * (n & 3)),
        *(x.repeat_interleave(2, 0).cumsum(0), x.sort(0)[0][n // 2], x[None].flatten(0, 1)),
    ]
    return torch.cat([y.flatten().sin() for y in made])


# what it does with the length, and whether its graph follows from one for all lengths
PROGRAMS: dict[str, tuple[Callable[[Part, Tensor, Any], Tensor], bool]] = {
    "f-string key": (lambda m, x, n: x * NAMED[f"length {n}"], False),
    "dict key that may raise": (tried, False),
    "lru_cache": (lambda m, x, n: x * doubled(n), False),
    "numpy": (lambda m, x, n: x * torch.from_numpy(np.linspace(0, 1, n)).float()[:, None], False),
    "attribute": (kept_length, False),
    "largest so far": (grown, False),
    "range": (stepped, False),
    "share": (lambda m, x, n: x * (n * 0.1 * 0.2), False),
    "enum": (lambda m, x, n: x * (2 if n == Known.LONG else 1), False),
    "type": (lambda m, x, n: x * (2 if type(n) is int and n > 20 else 1), False),
    "pad to eights": (lambda m, x, n: F.pad(x, (0, 0, 0, -n % 8)).view(-1, 8, 4).cumsum(1), False),
    "is True": (is_true, True),
    "branch on an attribute": (lambda m, x, n: x * 2 if n > m.limit else x, True),
    "max": (lambda m, x, n: x * max(n, 10), True),
    "whole numbers": (whole_numbers, True),
}
BRANCHES = ("is True", "branch on an attribute", "max")


def expected(
    part: nn.Module, loss: Callable[..., Tensor], x: Tensor
) -> tuple[float, dict[str, Tensor]]:
    part.zero_grad()
    value = loss(part, x)
    value.backward()
    return value.item(), {n: p.grad for n, p in part.named_parameters() if p.grad is not None}


def same(name: str, got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")


def loss_of(part: nn.Module, x: Tensor) -> Tensor:
    y = part(x)
    return (y * y.detach().cos()).mean()


LARGE = ("whole numbers",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in PROGRAMS],
)
def test_each_length_matches_torch_and_uses_expected_captures(name: str, counted: Counted) -> None:
    use, follows = PROGRAMS[name]
    torch.manual_seed(0)
    plain, model = Part(use), Part(use)
    model.load_state_dict(plain.state_dict())
    parallel = dt.parallelize(model, dt.Mesh(dp=1))
    step = dt.train_step(parallel, loss_of, torch.optim.SGD(model.parameters(), lr=0.0))
    for length in LENGTHS:
        x = torch.randn(length, 4)
        value, gradients = expected(plain, loss_of, x)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The length of")
            found = step.gradients(x)
            assert float(step(x)) == pytest.approx(value, rel=2e-5), (name, length)
        assert found.keys() >= gradients.keys()
        for parameter, gradient in gradients.items():
            same(f"{name} {length} {parameter}", found[parameter], gradient)
    if follows:
        assert counted.written >= (1 if name in BRANCHES else 3), counted
        assert counted.captures <= (3 if name in BRANCHES else 1), counted
    else:
        assert counted.written == 0, counted


def test_lengths_that_differ_after_being_equal_cause_one_more_export(counted: Counted) -> None:
    """The new export has two symbols in place of one."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.sum(0) * x.shape[0] + y.mean(0) * (2 * y.shape[0])

    program = dt.compile(f, dt.Mesh(dp=2))
    for first, second in ((4, 4), (6, 6), (5, 7), (8, 3), (9, 9)):
        x, y = torch.randn(first, 4), torch.randn(second, 4)
        torch.testing.assert_close(program(x, y).full_tensor(), f(x, y))
    assert (counted.captures, counted.written) == (1, 4)


def test_changed_python_value_causes_one_new_export_per_value(counted: Counted) -> None:
    scale = [1.0]
    program = dt.compile(lambda x: x * scale[0] * x.shape[0], dt.Mesh(dp=2))
    length = 2
    for scale[0] in (2.0, 3.0, 4.0, 5.0):
        for _ in range(3):
            length += 1
            found = program(torch.ones(length, 4)).full_tensor()
            assert torch.equal(found, torch.full((length, 4), scale[0] * length))
    assert (counted.captures, counted.written) == (4, 8)


# -- what the program reads ------------------------------------------------------------------------

SCALE = torch.tensor([1.0, 2.0, 3.0, 4.0])
HELD: dict[str, Any] = {"scale": torch.tensor(2.0), "number": 3.0}


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 2.0
        self.caught = [torch.tensor(0.5)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * SCALE * HELD["scale"] * HELD["number"]
        y = y * self.factor + self.caught[0]
        return y * 2 if self.training else y


def in_place(_: Reading) -> None:
    SCALE[1] += 5


def in_numpy(_: Reading) -> None:
    SCALE.numpy()[2] = -1.0


def swapped(_: Reading) -> None:
    HELD["scale"] = torch.tensor(5.0)


def swapped_in_module(model: Reading) -> None:
    model.caught[0] = torch.tensor(7.0)


def set_number(_: Reading) -> None:
    HELD["number"] += 1.0


def set_attribute(model: Reading) -> None:
    model.factor += 1.0


def evaluated(model: Reading) -> None:
    model.eval()


def frozen(model: Reading) -> None:
    model.linear.bias.requires_grad_(False)


CHANGES: dict[Callable[[Reading], None], int] = {
    **{change: 0 for change in (in_place, in_numpy, swapped, swapped_in_module)},
    **{change: 1 for change in (set_number, set_attribute, evaluated, frozen)},
}
OF_MODEL = (swapped_in_module, set_attribute, evaluated, frozen)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_state_is_read_again_with_dynamic_lengths(
    change: Callable[[Reading], None], counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SCALE", SCALE.clone())
    for key, value in HELD.items():
        monkeypatch.setitem(HELD, key, value)
    plain, model = Reading(), Reading()
    model.load_state_dict(plain.state_dict())
    parallel = dt.parallelize(model, dt.Mesh(dp=1))
    step = dt.train_step(parallel, loss_of, torch.optim.SGD(model.parameters(), lr=0.0))

    def check(length: int) -> None:
        x = torch.randn(length, 4)
        value, gradients = expected(plain, loss_of, x)
        found = step.gradients(x)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            same(f"{name} {length}", found[name], gradient)
        assert float(step(x)) == pytest.approx(value, rel=2e-5)

    for length in (5, 8, 11):
        check(length)
    assert (counted.captures, counted.written) == (1, 2)
    change(plain)
    if change in OF_MODEL:
        change(model)
    captured = counted.captures
    check(14)  # of another length at the same time
    assert counted.captures == captured + CHANGES[change]
    check(8)  # which was known before
    check(17)
    check(20)
    assert counted.written >= 3


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Llama(layers=2), id="llama", marks=pytest.mark.slow),
        pytest.param(lambda: GPT(layers=1), id="gpt"),
    ],
)
def test_model_trains_on_batches_of_any_size_with_two_exports(
    make: Callable[[], nn.Module], counted: Counted
) -> None:
    """A shorter last batch changes a second dim, so a second export has both dims dynamic."""
    torch.manual_seed(1)
    plain = make()
    model = make()
    model.load_state_dict(plain.state_dict())
    parallel = dt.parallelize(model, dt.Mesh(dp=2))
    step = dt.train_step(
        parallel,
        loss_fn,
        torch.optim.SGD(model.parameters(), lr=0.1),
        inputs=dict(dp=dt.Row()),
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    sizes = [(4, 8), (4, 11), (3, 11), (2, 9), (4, 1), (3, 14)]
    for size, length in sizes:
        tokens, targets = batch(size=size, length=length, seed=length)
        tokens = F.pad(tokens, (0, 1))[:, :-1]  # not contiguous
        loss, metrics = loss_fn(plain, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = step(tokens, targets)
        assert float(found) == pytest.approx(loss.item(), rel=1e-4), (size, length)
        assert found.metrics["accuracy"] == pytest.approx(metrics["accuracy"].item())
    assert (counted.captures, counted.written) == (2, 4), counted
    for name, value in dt.gather_state_dict(parallel)["model"].items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_dropout_plan_of_dynamic_length_equals_captured_plan(counted: Counted) -> None:
    def step_of(model: nn.Module) -> dt.TrainStep:
        parallel = dt.parallelize(model, dt.Mesh(tp=2))
        return dt.train_step(parallel, loss_fn, torch.optim.AdamW(model.parameters()))

    step = step_of(DropoutGPT())
    for length in (4, 7, 9, 12):
        text = str(step.plan(*batch(length=length)))
        assert "dropout" in text
        assert text == str(step_of(DropoutGPT()).plan(*batch(length=length)))
    assert (counted.captures, counted.written) == (1 + 4, 3)


def test_compiled_function_with_dynamic_length_matches_torch(counted: Counted) -> None:
    w = torch.randn(4, 6)

    def f(x: Tensor, w: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            mean = x.mean(0)
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        return {"rows": y[: x.shape[0] // 2], "mean": mean, "name": "f"}

    program = dt.compile(f, dt.Mesh(tp=2))
    for length in (5, 8, 13, 21, 8):
        x = torch.randn(length, 4)
        found, wanted = program(x, w), f(x, w)
        assert found["name"] == "f"
        assert torch.equal(found["rows"].full_tensor(), wanted["rows"])
        torch.testing.assert_close(found["mean"].full_tensor(), wanted["mean"])
    assert (counted.captures, counted.written) == (1, 3)


# -- what is told ----------------------------------------------------------------------------------


def test_third_capture_for_lengths_warns_once_with_reason_and_fix(counted: Counted) -> None:
    program = dt.compile(lambda x, w: (x * len(str(x.shape[0]))) @ w, dt.Mesh(tp=2))
    w = torch.ones(4, 6)
    for length in (5, 8, 13):
        program(torch.ones(length, 4), w)
    with pytest.warns(UserWarning) as told:
        program(torch.ones(21, 4), w)
    assert len(told) == 1
    text = str(told[0].message)
    assert told[0].filename == __file__
    assert "The length of x (dim 0) changes from call to call" in text
    assert "captured for 3 lengths besides its first" in text
    assert "a length is turned into text (test_lengths.py:" in text
    assert "fix: pad x to a few lengths" in text
    for length in (22, 23, 24):
        program(torch.ones(length, 4), w)


def test_users_exception_for_one_length_is_raised_as_in_capture(counted: Counted) -> None:
    def f(x: Tensor) -> Tensor:
        if x.shape[0] > 10:
            raise ValueError("too long")
        return x * 2

    program = dt.compile(f, dt.Mesh(tp=2))
    for length in (4, 6, 8):
        program(torch.ones(length, 2))
    with pytest.raises(ValueError, match="too long"):
        program(torch.ones(12, 2))
    assert program(torch.ones(9, 2)).full_tensor().sum() == 36
    assert counted.captures == 2


def test_export_that_gives_other_graph_is_not_used(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExportForLengths, "is_as_captured", lambda *_: False)
    monkeypatch.setattr(lengths, "difference", lambda a, b: "a line")
    program = dt.compile(lambda x: x * x.shape[0], dt.Mesh(tp=2))
    for length in (4, 6, 8):
        found = program(torch.ones(length, 2)).full_tensor()
        assert torch.equal(found, torch.full((length, 2), float(length)))
    assert (counted.captures, counted.written) == (3, 0)
    assert counted.refused == "it gives another graph for the first lengths: a line"
