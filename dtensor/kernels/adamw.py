"""AdamW's update in one pass, with the bits of torch's fused kernel on a CPU; in Triton.

    adamw_(p[n], grad[n], m[n], v[n], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01,
           step=3)                                  # p, m, v are changed; step counts from 1

Invariants: float32 throughout, in the order of torch's vectorised loop (FusedAdamKernel.cpp, as
compiled for processors that multiply and add at once): those two sums are fused, no other, and
division and square root are rounded to the nearest. Its tail, of fewer elements than a vector has,
computes in float64: buffers that 16 divides have none. Numbers of the step are float64 on the host.
"""

# A launch takes options that the kernel does not name.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.blocks import GROUP

_BLOCK = 1024


def adamw_(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Updates p, m, v: f32[n], contiguous, by grad f32[n]."""
    count = p.numel()
    beta1, beta2 = betas
    if count == 0:
        return
    rate1 = 1.0 - beta1
    near = rate1 < 0.5  # torch's lerp begins at the nearer end, and subtracts in float32
    if not near:
        rate1 = float(torch.tensor(rate1, dtype=torch.float32)) - 1.0
    _adamw[(triton.cdiv(count, _BLOCK),)](
        p, grad, m, v, count, 1.0 - lr * weight_decay, rate1, beta2, 1.0 - beta2,
        -lr / (1.0 - beta1**step), (1.0 - beta2**step) ** 0.5, eps, NEAR=near, GROUP=GROUP,
        BLOCK=_BLOCK, EDGES=count % GROUP != 0, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _adamw_some(
    P, G, M, V, c, inside, decay, rate1, beta2, rate2, step_size, root, eps, NEAR: tl.constexpr,
):  # fmt: skip
    p = tl.load(P + c, mask=inside, other=0.0) * decay
    grad = tl.load(G + c, mask=inside, other=0.0)
    m = tl.load(M + c, mask=inside, other=0.0)
    v = tl.load(V + c, mask=inside, other=0.0)
    m = tl.fma(grad - m, rate1, m if NEAR else grad)
    v = tl.fma(rate2 * grad, grad, v * beta2)
    p += tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(P + c, p, mask=inside)
    tl.store(M + c, m, mask=inside)
    tl.store(V + c, v, mask=inside)


@triton.jit
def _adamw(
    P, G, M, V, count, decay, rate1, beta2, rate2, step_size, root, eps,
    NEAR: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    e = tl.arange(0, GROUP)[None, :]
    inside = ((group + 1) * GROUP <= count)[:, None] & (e >= 0)
    c = group[:, None] * GROUP + e
    _adamw_some(P, G, M, V, c, inside, decay, rate1, beta2, rate2, step_size, root, eps, NEAR)
    if EDGES:
        c = count // GROUP * GROUP + tl.arange(0, GROUP)
        inside = (c < count) & (c // BLOCK == block)
        _adamw_some(P, G, M, V, c, inside, decay, rate1, beta2, rate2, step_size, root, eps, NEAR)
