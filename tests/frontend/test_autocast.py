"""Autocast is part of the program wherever it stands, and what would be lost is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import Graph
from tests.models import MLP

BF16, F32 = torch.bfloat16, torch.float32


class Twice(nn.Module):
    """One weight in two products, and a product that is kept out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.exact = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared(F.relu(self.shared(x)))
        with torch.autocast("cpu", enabled=False):
            return self.exact(h.float())


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def within(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=BF16):
        return plain(model, x)


def ops(graph: Graph) -> list[tuple[str, str, str]]:
    """(op, dtype, phase) of each, in order."""
    return [
        (str(n.target), str(getattr(n.meta["val"], "dtype", "")), n.meta["phase"])
        for n in graph.nodes
        if n.op == "call_function"
    ]


@pytest.mark.slow
def test_around_the_call_is_as_within() -> None:
    args = (Twice(), torch.randn(4, 8))
    with torch.autocast("cpu", dtype=BF16):
        around = capture(plain, args, grads="loss")
        assert torch.is_autocast_enabled("cpu")
    assert ops(around) == ops(capture(within, args, grads="loss"))
    assert ops(around) != ops(capture(plain, args, grads="loss"))
    decorated = torch.autocast("cpu", dtype=BF16)(plain)
    assert ops(around) == ops(capture(decorated, args, grads="loss"))


def test_a_region_without_autocast_has_a_backward_without() -> None:
    """With the autocast around the call in force, the backward of `exact` would be in bf16."""
    with torch.autocast("cpu", dtype=BF16):
        graph = capture(plain, (Twice(), torch.randn(4, 8)), grads="loss")
    products = [o[1:] for o in ops(graph) if "mm" in o[0]]
    assert products == [
        ("torch.bfloat16", "forward"),
        ("torch.bfloat16", "forward"),
        ("torch.float32", "forward"),
        ("torch.float32", "backward"),  # of the weight, of the input
        ("torch.float32", "backward"),
        *[("torch.bfloat16", "backward")] * 3,  # x needs no gradient
    ]


def test_a_weight_is_cast_once_and_its_gradients_are_added_in_float32() -> None:
    graph = capture(within, (Twice(), torch.randn(4, 8)), grads="loss")
    casts = Counter(n.args[0].name for n in graph.nodes if "_to_copy" in str(n.target))
    assert (casts["shared_weight"], casts["shared_bias"], casts["exact_weight"]) == (1, 1, 0)
    added = [o for o in ops(graph) if "aten.add.Tensor" in o[0]]
    assert added == [("aten.add.Tensor", "torch.float32", "backward")] * 2


@pytest.mark.parametrize(("dtype", "whole"), [(BF16, 2), (torch.float16, 2), (F32, 0)])
def test_a_bias_is_added_before_16_bits_are_rounded_to(dtype: torch.dtype, whole: int) -> None:
    """torch's addmm rounds once; a product and a sum would round twice."""
    graph = capture(plain, (MLP().to(dtype), torch.randn(2, 3, 16).to(dtype)), grads="loss")
    found = Counter(op for op, _, phase in ops(graph) if phase == "forward")
    assert (found["aten.addmm.default"], found["aten.mm.default"]) == (whole, 2 - whole)


# -- what is refused -----------------------------------------------------------------------------


def refused(fn: Callable[..., Any]) -> str:
    with pytest.raises(PlanningError) as caught:
        capture(fn, (torch.randn(2, 2),), grads="none")
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def on_cuda(x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        return x @ x


def ends_nothing(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cuda", enabled=False):
        return x @ x


def test_autocast_for_another_device_is_refused() -> None:
    assert_expected_inline(
        refused(on_cuda),
        """\
torch.autocast("cuda", dtype=torch.float16) would change no op: a program is captured on the CPU, whatever device runs it.
  test_autocast.py:N: with torch.autocast("cuda", dtype=torch.float16):
fix: torch.autocast("cpu", dtype=torch.float16), or x.device.type of an argument x: it holds on every device""",  # noqa: E501
    )
    assert 'fix: torch.autocast("cpu", enabled=False)' in refused(ends_nothing)


def test_around_a_call_it_is_refused_too() -> None:
    torch.set_autocast_enabled("cuda", True)  # what torch.autocast("cuda") does where there is one
    try:
        text = refused(torch.square)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert text.startswith('torch.autocast("cuda", dtype=torch.float16) would change no op')


def test_what_changes_nothing_is_let_be() -> None:
    def idle(x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return x @ x

    assert [o[1] for o in ops(capture(idle, (torch.randn(2, 2),), grads="none"))] == [str(F32)]


def test_torch_is_as_before() -> None:
    before = (torch.autocast.__init__, torch.autocast.__enter__)
    refused(on_cuda)
    capture(within, (MLP(), torch.randn(2, 16)), grads="loss")
    assert (torch.autocast.__init__, torch.autocast.__enter__) == before
    assert not torch.is_autocast_enabled("cpu")
