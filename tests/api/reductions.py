"""Reductions, norms and losses over a split dim, and their errors relative to float64.

    found = errors("mean over rows", torch.bfloat16, ["2x2"])    # values, then gradients
    assert not [e for e in found if not e.is_as_torch]

An error is relative to the norm of the result, or of the gradient, in roundings of the dtype (2^-9
for bfloat16). It may be at most 1.2 times the error of torch on one device, or one rounding if
torch's error is smaller than that. docs/precision.md treats matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dtensor as dt
from dtensor.testing.execute import reference, run, tensors_of, trace

F16, BF16, F64, C64 = torch.float16, torch.bfloat16, torch.float64, torch.complex64
DTYPES = (BF16, F16, F64, C64)
ROWS, COLUMNS = 46, 22  # both uneven over 3 and 4 ranks

PLACED: dict[str, tuple[dt.Mesh, dict[str, dt.Placement]]] = {
    "1": (dt.Mesh(), {}),
    "tp2": (dt.Mesh(tp=2), dict(tp=dt.Row())),
    "tp3": (dt.Mesh(tp=3), dict(tp=dt.Row())),
    "2x2": (dt.Mesh(a=2, b=2), dict(a=dt.Row(), b=dt.Row())),
    "columns": (dt.Mesh(tp=3), dict(tp=dt.Column())),
}


def _classes() -> Tensor:
    return torch.arange(ROWS) % COLUMNS


def _norm(order: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.linalg.vector_norm(x, order, dim=0)


def _loss(of: Callable[..., Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
    """Return a function of x: the loss of x against half of its flipped rows."""
    return lambda x: of(x, x.flip(1) * 0.5, **options)


def _probable(of: Callable[..., Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: of(x.sigmoid(), x.flip(1).sigmoid(), **options)


def _divergence(reduction: str) -> Callable[[Tensor], Tensor]:
    return lambda x: F.kl_div(x.log_softmax(1), x.flip(1).softmax(1), reduction=reduction)


CASES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum over rows": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "mean over rows": lambda x: x.mean(0),
    "mean over columns": lambda x: x.mean(1, keepdim=True),
    "nansum": lambda x: torch.where(x > 1.5, torch.nan, x).nansum(0),
    "nanmean": lambda x: torch.where(x > 1.5, torch.nan, x).nanmean(0),
    "var": lambda x: x.var(),
    "var over rows": lambda x: x.var(0),
    "std over rows": lambda x: x.std(0),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "std_mean": lambda x: torch.std_mean(x, 0),
    "norm": lambda x: x.norm(),
    "linalg.norm": lambda x: torch.linalg.norm(x),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, 1),
    **{f"vector_norm {order}": _norm(order) for order in (0, 0.5, 1, 2, 3, math.inf, -math.inf)},
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "prod": lambda x: (x * 0.2 + 1).prod(0),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "cumsum": lambda x: x.cumsum(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "dot": lambda x: x.reshape(-1).dot(x.reshape(-1) * 0.5),
    "vdot": lambda x: torch.vdot(x.reshape(-1), x.reshape(-1)),
    "einsum to a number": lambda x: torch.einsum("ij,ij->", x, x),
    "einsum to columns": lambda x: torch.einsum("ij,ij->j", x, x),
    "sum of squares": lambda x: x.square().sum(0),
    "what is linear in a sum": lambda x: (x.sum(0) * 3 - x.sum(0).flip(0)).reshape(2, -1),
    "a sum in a product": lambda x: x.sum(0) * x.sum(0),
    "a sum of sums": lambda x: (x.sum(0) * 3 + 1).sum(),
    "layer_norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "layer_norm over rows": lambda x: F.layer_norm(x.t(), (ROWS,)),
    "rms_norm": lambda x: F.rms_norm(x, (COLUMNS,)),
    "group_norm": lambda x: F.group_norm(x.reshape(ROWS, 2, -1), 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "normalize": lambda x: F.normalize(x, dim=0),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(1), dim=0),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool1d(x.t()[None], 1),
    **{
        f"{of.__name__} {reduction}": _loss(of, reduction=reduction)
        for of in (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss)
        for reduction in ("mean", "sum")
    },
    **{f"kl_div {r}": _divergence(r) for r in ("sum", "batchmean")},
    "binary_cross_entropy mean": _probable(F.binary_cross_entropy),
    "binary_cross_entropy sum": _probable(F.binary_cross_entropy, reduction="sum"),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.flip(1).sigmoid()),
    "cross_entropy mean": lambda x: F.cross_entropy(x, _classes()),
    "cross_entropy sum": lambda x: F.cross_entropy(x, _classes(), reduction="sum"),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x, x.flip(1).softmax(1)),
    "label smoothing": lambda x: F.cross_entropy(x, _classes(), label_smoothing=0.1),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(1), _classes()),
}


@dataclass(frozen=True, slots=True)
class Error:
    """An error in roundings of the dtype. ``single``: the result is one number, which may be off by
    a full rounding."""

    placed: str
    phase: str
    found: float
    torch: float
    dtype: torch.dtype
    single: bool

    @property
    def is_as_torch(self) -> bool:
        # a rounding moves a number by 0.42 of a unit on average. Of 32 and 64 bits nothing is made
        # narrower on the way (2^15 units or more); another order of terms that cancel costs some
        least = 1.0 if self.single else 0.5
        return self.found <= max(1.2 * self.torch, least if self.dtype in (F16, BF16) else 1024.0)


def errors(name: str, dtype: torch.dtype, placed: Sequence[str], seed: int = 0) -> list[Error]:
    """Return the errors of values and gradients under each placement; empty if torch has no such
    op."""
    function = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    shape, drawn = (ROWS, COLUMNS), torch.complex128 if dtype.is_complex else F64
    x = torch.randn(shape, dtype=drawn, generator=generator).to(dtype).requires_grad_()
    try:
        function(x)
    except (RuntimeError, NotImplementedError):
        return []
    traced = trace(function, (x,), seed=seed + 100)
    by_torch = reference(traced)
    wide = x.detach().to(drawn).requires_grad_()
    exact = tensors_of(function(wide))
    pairs = [
        (value, cotangent.to(value.dtype))
        for value, cotangent in zip(exact, traced.cotangents, strict=True)
        if value.requires_grad and cotangent is not None
    ]
    values, cotangents = zip(*pairs, strict=True)
    (slope,) = torch.autograd.grad(values, wide, cotangents, allow_unused=True)
    found: list[Error] = []
    for place in placed:
        mesh, pins = PLACED[place]
        here = run(traced, mesh, [pins])
        for phase, ours, theirs, right in (
            ("forward", here.tensors, by_torch.tensors, exact),
            ("backward", here.gradients, by_torch.gradients, (slope,)),
        )[: 1 if slope is None else 2]:
            unit = torch.finfo(dtype).eps / 2
            single = sum(value.numel() for value in right) <= 4
            off, by = (_distance(values, right) / unit for values in (ours, theirs))
            found.append(Error(place, phase, off, by, dtype, single))
    return found


def _distance(found: Sequence[Tensor | None], exact: Sequence[Tensor]) -> float:
    """Return the relative distance; infinite if infinities or NaNs are at other places."""
    apart = length = 0.0
    for one, right in zip(found, exact, strict=True):
        assert one is not None
        value, right = one.to(right.dtype), right.detach()
        finite = right.isfinite()
        if not torch.equal(value.isfinite(), finite):
            return math.inf
        apart += (value - right)[finite].abs().square().sum().item()
        length += right[finite].abs().square().sum().item()
    return math.sqrt(apart / length) if length else apart
