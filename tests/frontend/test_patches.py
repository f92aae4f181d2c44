"""Tests that capture keeps layers whole that torch would decompose while differentiating, and
leaves torch unpatched.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._C import DispatchKey

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.whole_layers import whole_layers

aten = torch.ops.aten


def _names(fn: object, *args: torch.Tensor) -> list[str]:
    graph = capture(fn, args, grads="tangents")  # type: ignore[arg-type]
    return [str(node.target) for node in graph.fx.nodes if node.op == "call_function"]


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "nearest-exact"])
def test_interpolate_is_captured_as_one_forward_and_one_backward_op(mode: str) -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    names = _names(lambda x: F.interpolate(x, size=(7, 5), mode=mode), x)
    assert len(names) == 2
    assert all("upsample" in name for name in names)
    assert names[1].endswith("_backward.default")


def test_multilabel_margin_loss_with_padded_targets_is_one_op_per_direction() -> None:
    # Torch's decomposition counts targets after the end mark -1; its kernel does not.
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[1, 3, -1, 0, 0], [0, -1, 2, 1, 1], [4, 2, 0, -1, 3], [-1, 0, 1, 2, 3]])
    names = _names(F.multilabel_margin_loss, x, target)
    assert [name for name in names if "getitem" not in name] == [
        "aten.multilabel_margin_loss_forward.default",
        "aten.multilabel_margin_loss_backward.default",
    ]


def test_whole_layers_restores_autograd_kernels_on_exit() -> None:
    op = aten.upsample_bilinear2d.default
    before = dict(op.py_kernels)
    assert DispatchKey.Autograd in before
    with whole_layers():
        assert DispatchKey.Autograd not in op.py_kernels
    assert op.py_kernels == before
    with pytest.raises(ValueError, match="inside"), whole_layers():
        raise ValueError("inside")
    assert op.py_kernels == before


def test_default_device_context_around_capture_does_not_change_graph() -> None:
    """As when a model is made on the meta device and planned in the same block."""

    def attends(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum()

    x = torch.randn(2, 2, 4, 8, requires_grad=True)
    plain = capture(attends, (x,), grads="loss")
    with torch.device("meta"):
        assert str(capture(attends, (x,), grads="loss")) == str(plain)
    assert torch.get_default_device().type == "cpu"
