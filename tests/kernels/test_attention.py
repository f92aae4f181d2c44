"""Tests attention through torch's fused kernels: which calls they take, and the shapes they give.

Without a GPU only the fallback op computes values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor.sharding.ops.attention  # noqa: F401  registers the op
from dtensor.kernels import attention
from dtensor.testing.gpus.cuda_ops import fused_sdp_choice

HOPPER = (9, 0)


class Called(TorchDispatchMode):
    """Record the names of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_capability", lambda device: HOPPER)
    monkeypatch.setattr(attention, "_fused_sdp_choice", fused_sdp_choice)
    with FakeTensorMode():
        yield


def heads(groups: int, length: int, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor laid out as [2 g length d], as a projection gives it."""
    return torch.empty(2, length, groups, d, dtype=dtype, device="cuda").transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_fused_attention_takes_grouped_heads_without_copy(
    hopper: None, kernel: str, is_causal: bool
) -> None:
    q, k, v = heads(8, 128), heads(2, 128), heads(2, 128)
    only_flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    with Called() as called, only_flash if kernel == "flash" else nullcontext():
        out, lse = attention.attention(q, k, v, is_causal, 0.1)
        grads = attention.attention_backward(q, q, k, v, out, lse, is_causal, 0.1)
    assert called.names.count(f"aten::_scaled_dot_product_{kernel}_attention") == 1
    assert called.names.count(f"aten::_scaled_dot_product_{kernel}_attention_backward") == 1
    copies = {"aten::clone", "aten::copy_", "aten::repeat_interleave.self_int", "aten::expand"}
    assert not copies & set(called.names)
    wanted = torch.ops.dt.attention(q, k, v, is_causal, 0.1)
    for made, want in zip((out, lse, *grads), (*wanted, q, k, v), strict=True):
        assert (made.shape, made.stride(), made.dtype) == (want.shape, want.stride(), want.dtype)


def test_cudnn_backward_gets_output_and_gradient_in_one_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch keeps cuDNN's backward by the strides of q, k and v alone."""
    q = torch.randn(2, 128, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    grad, out = (torch.randn(q.shape, dtype=q.dtype) for _ in range(2))
    calls: list[tuple[Tensor, ...]] = []

    def record(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        calls.append(args)
        return q, q, q

    class Ops:
        _scaled_dot_product_cudnn_attention_backward = staticmethod(record)

    monkeypatch.setattr(attention, "_kernel", lambda *_: attention._CUDNN)
    monkeypatch.setattr(attention, "_aten", Ops)
    attention.attention_backward(grad, q, q, q, out, torch.zeros(q.shape[:3]), True, 0.1)
    [(given, _, _, _, given_out, given_lse, *_)] = calls
    assert torch.equal(given, grad) and torch.equal(given_out, out)
    assert given.stride() == given_out.stride() == q.stride() != grad.stride()
    assert given_lse.shape == (2, 4, 128, 1)


def test_fused_attention_copies_misaligned_rows() -> None:
    """The kernels check only the last stride; a row that starts at an unaligned address makes the
    GPU unusable."""
    wide = torch.randn(2, 32, 4 * 64 + 8, dtype=torch.bfloat16)
    kept = wide[..., 8:].unflatten(-1, (4, 64)).transpose(1, 2)
    assert attention._aligned_rows(kept) is kept
    for odd in (
        torch.randn(2, 4, 32, 65, dtype=torch.bfloat16)[..., :64],
        wide[..., 1:257].unflatten(-1, (4, 64)).transpose(1, 2),
        torch.randn(2, 4, 64, 32, dtype=torch.bfloat16).mT,
    ):
        made = attention._aligned_rows(odd)
        assert torch.equal(made, odd) and made.is_contiguous() and made.storage_offset() == 0


def test_attention_falls_back_to_op_if_no_fused_kernel_supports_call(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {
        "float32": (heads(4, 32, dtype=torch.float32), heads(2, 32, dtype=torch.float32), False),
        "heads of 4": (heads(4, 32, 4), heads(2, 32, 4), False),
        "not square": (heads(4, 32), heads(2, 48), True),
        "nothing": (heads(4, 0), heads(2, 0), False),
    }
    for what, (q, k, is_causal) in calls.items():
        with Called() as called:
            out, lse = attention.attention(q, k, k, is_causal, 0.1)
            attention.attention_backward(q, q, k, k, out, lse, is_causal, 0.1)
        assert called.names[0] == "dt::attention", what
        assert "dt::attention_backward" in called.names, what
    short, long = ([heads(4, 32, d), heads(2, 32, d), heads(2, 32, d)] for d in (64, 256))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert attention._kernel(*long, False) == attention._FLASH
        monkeypatch.setattr(attention, "_capability", lambda device: (8, 9))
        assert attention._kernel(*long, False) is None
        assert attention._kernel(*short, False) == attention._FLASH
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert attention._kernel(*short, False) is None
    monkeypatch.setattr(attention, "_capability", lambda device: (7, 5))
    assert attention._kernel(*short, False) is None


def test_attention_on_cpu_uses_op() -> None:
    q = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    out, lse = attention.attention(q, q, q, True, 0.3)
    wanted = torch.ops.dt.attention(q, q, q, True, 0.3)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("first, width", [(0, 65), (1, 72), (3, 65)])
def test_fused_attention_on_gpu_handles_rows_at_any_offset(first: int, width: int) -> None:
    made = torch.Generator().manual_seed(0)
    size, strides = (2, 8, 160, 64), (8 * 160 * width, 160 * width, width, 1)
    q, k, v, grad = (torch.randn(size, generator=made).bfloat16() for _ in range(4))
    wide = torch.empty(4, 2 * strides[0] + first, dtype=torch.bfloat16, device="cuda")
    there = [
        row.as_strided(size, strides, row.storage_offset() + first).copy_(x)
        for row, x in zip(wide, (q, k, v, grad), strict=True)
    ]
    out, lse = attention.attention(*there[:3], True, 0.125)
    grads = attention.attention_backward(there[3], *there[:3], out, lse, True, 0.125)
    q, k, v, grad = (x.float() for x in (q, k, v, grad))
    want, want_lse = torch.ops.dt.attention(q, k, v, True, 0.125)
    wanted = torch.ops.dt.attention_backward(grad, q, k, v, want, want_lse, True, 0.125)
    for x, y in zip((out, lse, *grads), (want, want_lse, *wanted), strict=True):
        assert (x.cpu().float() - y).abs().max() <= 1.6e-2 * y.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("groups", [8, 2, 1])
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_fused_attention_on_gpu_matches_cpu_float32(
    kernel: str, groups: int, is_causal: bool
) -> None:
    made = torch.Generator().manual_seed(0)
    shape = {"q": 8, "k": groups, "v": groups, "grad": 8}
    wide = {n: torch.randn(2, h, 160, 64, generator=made) for n, h in shape.items()}
    q, k, v, grad = (x.bfloat16().cuda() for x in wide.values())
    backend = SDPBackend.CUDNN_ATTENTION if kernel == "cudnn" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend):
        assert attention._kernel(q, k, v, is_causal) == backend.value
        out, lse = attention.attention(q, k, v, is_causal, 0.125)
        grads = attention.attention_backward(grad, q, k, v, out, lse, is_causal, 0.125)
    q, k, v, grad = (x.cpu().float() for x in (q, k, v, grad))
    want, want_lse = torch.ops.dt.attention(q, k, v, is_causal, 0.125)
    wanted = torch.ops.dt.attention_backward(grad, q, k, v, want, want_lse, is_causal, 0.125)
    for x, y in zip((out, lse, *grads), (want, want_lse, *wanted), strict=True):
        assert (x.cpu().float() - y).abs().max() <= 1.6e-2 * y.abs().max()
