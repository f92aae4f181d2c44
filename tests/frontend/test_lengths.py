"""An export for many lengths: equal to a capture of each, or refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.lengths import ForLengths, NotForLengths, export_for_lengths
from tests.models import GPT, Llama, batch, loss_fn

BOTH = {(0, 1): 0, (1, 1): 0}


@pytest.mark.parametrize("make", [lambda: Llama(layers=2), lambda: GPT(positions=64)])
def test_equals_a_capture_of_each_length(make: Callable[[], nn.Module]) -> None:
    model = make()
    found = export_for_lengths(
        loss_fn, (model, *batch(length=12)), {}, grads="loss", main=model, dims=BOTH
    )
    for length in (2, 8, 12, 33):
        args = (model, *batch(length=length))
        graph = found.graph(loss_fn, args, {}, model)
        assert graph is not None
        assert str(graph) == str(capture(loss_fn, args, grads="loss"))
    assert found.graph(loss_fn, (model, *batch(length=1)), {}, model) is None


def exported(use: Callable[[Tensor, Any], Tensor]) -> tuple[ForLengths, Any, nn.Module]:
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return use(model(x), x.shape[0]).square().sum()

    args = (model, torch.empty(12, 4))
    dims = {(0, 0): 0}
    return export_for_lengths(loss, args, {}, grads="loss", main=model, dims=dims), loss, model


TABLE = {f"{n}": float(n) for n in range(64)} | {n: float(n) for n in range(64)}  # type: ignore


@functools.lru_cache
def doubled(n: int) -> float:
    return 2.0 * n


REFUSED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "f-string key": lambda x, n: x * TABLE[f"{n}"],  # type: ignore[index]
    "dict key": lambda x, n: x * TABLE[n],
    "dict get": lambda x, n: x * (TABLE.get(n) or 1.0),
    "lru_cache": lambda x, n: x * doubled(n),
    "len(str)": lambda x, n: x * len(str(n)),
    "shape text": lambda x, n: x * len(str(x.shape)),
    "int": lambda x, n: x * int(n),
    "sqrt": lambda x, n: x / math.sqrt(n),
    "range": lambda x, n: x * sum(range(n)),
    "isinstance": lambda x, n: x * (2 if isinstance(n, int) and n > 20 else 1),
    "type": lambda x, n: x * (2 if type(n) is int and n > 20 else 1),
    "attribute": lambda x, n: x * (2 if hasattr(n, "to_bytes") else 1),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_a_length_that_becomes_something_else_is_refused(
    use: Callable[[Tensor, Any], Tensor],
) -> None:
    with pytest.raises((NotForLengths, Exception)) as error:
        exported(use)
    assert not isinstance(error.value, AssertionError)


def test_a_branch_is_a_guard() -> None:
    found, loss, model = exported(lambda x, n: x * 2 if n > 20 else x * n)
    for length in (5, 20):
        args = (model, torch.empty(length, 4))
        graph = found.graph(loss, args, {}, model)
        assert graph is not None
        assert str(graph) == str(capture(loss, args, grads="loss"))
    assert found.graph(loss, (model, torch.empty(21, 4)), {}, model) is None


def test_what_is_stored_is_refused_and_put_back() -> None:
    kept: dict[str, Any] = {}

    def store(x: Tensor, n: Any) -> Tensor:
        kept["length"] = n
        return x

    with pytest.raises(NotForLengths, match="changes"):
        exported(store)
    assert kept == {}
