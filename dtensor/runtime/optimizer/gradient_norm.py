"""The norm of a rank's gradients, for clipping and for loss scales. Generated code calls these.

squares = sum_of_squares((grad_w, grad_b), device)          # f32[]; then summed over ranks
norm, divisor = clip_divisor(squares, max_norm=1.0)
squares = unscaled_squares((grad_w,), scale, device)        # raises GradientOverflow
squares = checked_squares((grad_w,), scale, faults, 1, device)       # records it on the device
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.local.conditions import Condition, checked, float_of


def sum_of_squares(
    gradients: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the sum of squared absolute values of all elements, as a scalar tensor of ``dtype``.

    The tensors are added from left to right; each is summed in its accumulation dtype (float32, or
    float64 for float64).
    """
    total = torch.zeros((), dtype=dtype, device=device)
    for gradient in gradients:
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        total = total + gradient.to(accumulation_dtype(gradient.dtype)).square().sum()
    return total


class GradientOverflow(ArithmeticError):
    """A gradient of a scaled loss is not finite, or its square nearly overflows float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow(Condition):
    """The first of two numbers, a sum of squares, is small enough. The other is the loss scale."""

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, ~(x[:1] < _MAX_SUM_OF_SQUARES)  # also true for NaN

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return x[1:]

    def error(self, value: int, count: int) -> Exception:
        return _overflow(float_of(value))


def _overflow(scale: float) -> GradientOverflow:
    return GradientOverflow(f"a gradient of the loss times {scale:g} is not finite")


_MAX_SUM_OF_SQUARES = 1e30


def unscaled_squares(
    gradients: Sequence[torch.Tensor],
    scale: float | torch.Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the sum of squares of the gradients after dividing them by the loss scale. Waits for
    the device. Raises GradientOverflow if the sum is not finite or nearly overflows."""
    total = sum_of_squares(gradients, device, dtype)
    if device.type != "meta" and not float(total) < _MAX_SUM_OF_SQUARES:  # also true for NaN
        raise _overflow(float(scale))
    return total / scale / scale


def checked_squares(
    gradients: Sequence[torch.Tensor],
    scale: torch.Tensor,
    faults: torch.Tensor,
    number: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the result of `unscaled_squares` without a wait. An overflow is recorded in the row
    ``faults`` as the check ``number``."""
    total = sum_of_squares(gradients, device, dtype)
    checked(Overflow(num=1), torch.stack((total, scale.to(dtype))), faults, number)
    return total / scale / scale


def unscaling_divisor(
    squares: torch.Tensor, scale: float | torch.Tensor, max_norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm, divisor) as `clip_divisor` does, for gradients multiplied by ``scale``."""
    norm, divisor = clip_divisor(squares, max_norm)
    return norm, divisor * scale


def clip_divisor(squares: torch.Tensor, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm, divisor) with divisor = max(1, (norm + 1e-6) / max_norm).
    torch.nn.utils.clip_grad_norm_ multiplies by 1 / divisor; fused kernels divide instead."""
    norm = squares.sqrt()
    return norm, torch.clamp((norm + 1e-6) / max_norm, min=1.0)
