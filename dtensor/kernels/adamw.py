"""AdamW's update in one pass in Triton, with the bits of torch's fused kernel on a CPU.

    fused_adamw_([p[n]], [grad[n]], [m[n]], [v[n]], [], [step[]], lr=1e-3, beta1=0.9, beta2=0.999,
                 weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)      # p, m, v change

The arguments are the lists of `torch._fused_adamw_`; each item is one launch. The step counts stay
on the device, and bias corrections are computed there in float64, so the host does not wait.

Invariants: the kernel rounds in float32 as torch's vectorized loop on CPUs with fused multiply-add
(FusedAdamKernel.cpp). That loop computes a remainder of fewer than 16 elements in float64, so bits
are equal for buffers whose length is a multiple of 16. Other dtypes, amsgrad, `found_inf` and
non-contiguous tensors go to torch's op.
"""

# Triton's stubs do not know that a launch accepts numbers for constexpr parameters.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.launches import ADAMW, GROUP


def fused_adamw_(
    self: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update p, m and v in place; divide the gradients in place by ``grad_scale`` if it is
    given."""
    tensors = (*self, *grads, *exp_avgs, *exp_avg_sqs)
    plain = all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors)
    if amsgrad or found_inf is not None or not plain:
        update: Any = torch.ops.aten._fused_adamw_
        update(
            self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr=lr, beta1=beta1,
            beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=amsgrad, maximize=maximize,
            grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
        return
    rate1 = 1.0 - beta1
    near = rate1 < 0.5  # torch's lerp starts at the nearer end, and subtracts in float32
    if not near:
        rate1 = float(torch.tensor(rate1, dtype=torch.float32)) - 1.0
    if not self:
        return
    rows = _numbers(torch.stack(tuple(state_steps)), lr, beta1, beta2, weight_decay).unbind(0)
    for p, grad, m, v, numbers in zip(self, grads, exp_avgs, exp_avg_sqs, rows, strict=True):
        count = p.numel()
        if count == 0:
            continue
        at = ADAMW.at(count)
        _adamw[at.grid](
            p, grad, m, v, numbers, numbers if grad_scale is None else grad_scale, count, rate1,
            beta2, 1.0 - beta2, eps, NEAR=near, MAXIMIZE=maximize, SCALED=grad_scale is not None,
            EDGES=count % GROUP != 0, **at.options,
        )  # fmt: skip


def _numbers(
    steps: Tensor, lr: float | Tensor, beta1: float, beta2: float, weight_decay: float
) -> Tensor:
    """Return f32[n 4] for steps f32[n]: per item the factor of p, minus the step size, and twice
    the square root of v's bias correction, so that rows are aligned to 16 bytes."""
    at = steps.double()
    rate = lr if isinstance(lr, Tensor) else torch.full_like(at, lr)
    rate = rate.to(at.device, torch.float64).expand_as(at)
    size, root = -rate / (1.0 - beta1**at), (1.0 - beta2**at).sqrt()
    return torch.stack((1.0 - rate * weight_decay, size, root, root), 1).float()


@triton.jit
def _adamw_lanes(
    P, G, M, V, c, inside, decay, step_size, root, scale, rate1, beta2, rate2, eps,
    NEAR: tl.constexpr, MAXIMIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Update the lanes ``c``, elements of the buffers, where ``inside`` is true."""
    p = tl.load(P + c, mask=inside, other=0.0) * decay
    grad = tl.load(G + c, mask=inside, other=0.0)
    m = tl.load(M + c, mask=inside, other=0.0)
    v = tl.load(V + c, mask=inside, other=0.0)
    if SCALED:
        grad = tl.div_rn(grad, scale)
        tl.store(G + c, grad, mask=inside)
    if MAXIMIZE:
        grad = -grad
    m = tl.fma(grad - m, rate1, m if NEAR else grad)
    v = tl.fma(rate2 * grad, grad, v * beta2)
    p += tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(P + c, p, mask=inside)
    tl.store(M + c, m, mask=inside)
    tl.store(V + c, v, mask=inside)


@triton.jit
def _adamw(
    P, G, M, V, NUMBERS, SCALE, count, rate1, beta2, rate2, eps,
    NEAR: tl.constexpr, MAXIMIZE: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements; the last block with elements also has the rest of fewer than GROUP."""
    decay = tl.load(NUMBERS)
    size = tl.load(NUMBERS + 1)
    root = tl.load(NUMBERS + 2)
    scale = tl.load(SCALE)
    block = tl.program_id(0).to(tl.int64)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    inside = ((group + 1) * GROUP <= count)[:, None] & (e >= 0)
    c = group[:, None] * GROUP + e
    _adamw_lanes(
        P, G, M, V, c, inside, decay, size, root, scale, rate1, beta2, rate2, eps,
        NEAR, MAXIMIZE, SCALED,
    )  # fmt: skip
    if EDGES:
        c = count // GROUP * GROUP + tl.arange(0, GROUP)
        inside = (c < count) & (c // BLOCK == block)
        _adamw_lanes(
            P, G, M, V, c, inside, decay, size, root, scale, rate1, beta2, rate2, eps,
            NEAR, MAXIMIZE, SCALED,
        )  # fmt: skip
