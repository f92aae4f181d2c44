"""The loss of a step behaves as a float: in arithmetic, comparison, printing and averaging."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt


@pytest.fixture(scope="module")
def losses() -> list[dt.Loss]:
    """Return the different losses of two steps."""
    torch.manual_seed(0)
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(nn.Linear(4, 4), mesh, {"weight": dict(tp=dt.Row())})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, lambda m, x, y: F.mse_loss(m(x), y), opt)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with dt.launch(mesh):
        both = [step(x, y), step(x, y)]
        dt.gather_state_dict(model)
    return both


def same(found: object, expected: object) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.allclose(found, expected)
    if isinstance(expected, np.ndarray):
        return isinstance(found, np.ndarray) and bool(np.allclose(found, expected))
    return type(found) is type(expected) and found == expected


ONE: dict[str, Callable[[Any], Any]] = {
    "add": lambda a: a + 1,
    "radd": lambda a: 1 + a,
    "sub": lambda a: a - 1,
    "rsub": lambda a: 1 - a,
    "mul": lambda a: a * 3,
    "div": lambda a: a / 3,
    "rdiv": lambda a: 3 / a,
    "floordiv": lambda a: a // 1,
    "mod": lambda a: a % 1,
    "pow": lambda a: a**2,
    "rpow": lambda a: 2**a,
    "divmod": lambda a: divmod(a, 1),
    "neg": lambda a: -a,
    "abs": lambda a: abs(-a),
    "lt": lambda a: (a < 2, a < 0.1, a > 2, a > 0.1),
    "ge": lambda a: (a >= 2, a >= 0.1, a <= 2, a <= 0.1),
    "eq": lambda a: (a == float(a), a == 7, a != 7, a is not None),
    "bool": lambda a: bool(a),
    "int": lambda a: int(a),
    "round": lambda a: (round(a), round(a, 3)),
    "floor": lambda a: (math.floor(a), math.ceil(a), math.trunc(a)),
    "math": lambda a: (math.isnan(a), math.isfinite(a), math.exp(a), math.isclose(a, a + 1e-12)),
    "format": lambda a: (f"{a:.3f}", f"{a}", f"{a:>12.2e}", "%.4f" % a, str(a)),  # noqa: UP031
    "numpy scalar": lambda a: (bool(np.isnan(a)), np.float64(1) + a, np.isscalar(a)),
    "numpy array": lambda a: np.ones(2) * a,
    "tensor": lambda a: torch.ones(2) * a,
    "tensor at the right": lambda a: a - torch.ones(2),
}
BOTH: dict[str, Callable[[list[Any]], Any]] = {
    "sum": lambda both: sum(both),
    "mean": lambda both: sum(both) / len(both),
    "extremes": lambda both: (float(max(both)), float(min(both))),
    "sorted": lambda both: [float(a) for a in sorted(both)],
    "statistics": lambda both: statistics.fmean(both),
    "numpy": lambda both: (np.mean(both), np.std(both)),
    "array": lambda both: np.array(both),
    "between": lambda both: (both[0] - both[1], both[0] < both[1], both[0] == both[1]),
}


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_loss_equal_functions_of_its_float(
    losses: list[dt.Loss], name: str
) -> None:
    assert same(ONE[name](losses[0]), ONE[name](float(losses[0])))


@pytest.mark.parametrize("name", BOTH)
def test_functions_of_several_losses_equal_functions_of_floats(
    losses: list[dt.Loss], name: str
) -> None:
    assert same(BOTH[name](losses), BOTH[name]([float(a) for a in losses]))


def test_running_total_of_losses_is_float(losses: list[dt.Loss]) -> None:
    total = 0.0
    for loss in losses:
        total += loss
    assert type(total) is float and total == float(losses[0]) + float(losses[1])


def test_torch_functions_accept_loss_as_scalar_tensor(losses: list[dt.Loss]) -> None:
    both = torch.stack([a.tensor() for a in losses])
    assert torch.equal(torch.stack(losses), both)  # type: ignore[arg-type]
    assert not torch.isnan(losses[0])  # type: ignore[arg-type]
    assert torch.equal(losses[0].detach().cpu(), both[0])
    assert losses[0].detach().item() == float(losses[0])


def test_missing_loss_attribute_error_proposes_float(losses: list[dt.Loss]) -> None:
    with pytest.raises(AttributeError, match=r"float\(loss\)") as caught:
        losses[0].numpy()
    assert "loss.tensor().numpy" in str(caught.value)
    with pytest.raises(AttributeError, match=r"no 'metric'(.|\n)*float\(loss\)"):
        losses[0].metric  # noqa: B018
    with pytest.raises(TypeError, match="a step has run forward, backward and the optimizer"):
        losses[0].backward()
    with pytest.raises(TypeError, match="unsupported operand"):
        losses[0] + "x"
    assert losses[0] is not None and losses[0] != "x"


def test_equal_losses_are_different_dict_keys(losses: list[dt.Loss]) -> None:
    """As for tensors: equal by value, but hashed by identity."""
    assert len({losses[0], losses[1], losses[0]}) == 2


def test_detached_losses_do_not_wait_for_steps() -> None:
    """The step does not compare pending losses by value internally."""
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(nn.Linear(2, 2), mesh, {})
    step = dt.train_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.0)
    )
    with dt.launch(mesh):
        kept = [step(torch.ones(2, 2)).detach() for _ in range(6)]
        assert not kept[-1].was_read
        assert len({float(a) for a in kept}) == 1
        dt.gather_state_dict(model)
