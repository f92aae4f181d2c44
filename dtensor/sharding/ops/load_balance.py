"""The load-balancing loss of mixtures of experts (Switch Transformer, arXiv:2101.03961).

    sums = balance_sums(softmax(logits)[T E], ids[T k], mask[T]?)     [m 3 E]
    loss = balance_loss(sums, E)                                      []

The loss is E * sum over e of f_e * P_e, where f_e is the number of slots that choose expert e, and
P_e the sum of its probabilities, both divided by the number of tokens. m is 1: the loss is over all
tokens. For a loss of each microbatch, frontend/dataflow/aux_per_microbatch.py sets m to the number
of microbatches; then T is (d m r), r rows of a microbatch on each of d ranks.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dtensor.errors import PlanningError
from dtensor.numerics import accumulation_dtype
from dtensor.sharding.ops.library import LIBRARY, define


def load_balancing_loss(
    logits: Tensor, ids: Tensor, num_experts: int, mask: Tensor | None = None
) -> Tensor:
    """Return the load-balancing loss of a router, the value that transformers computes.

    The loss is E * sum over experts e of f_e * P_e: f_e is the number of slots of ``ids`` that are
    e, and P_e the sum of softmax(logits)[:, e], both divided by the number of tokens. It is k if
    the experts are chosen equally often, and it is differentiable with respect to ``logits``. If
    ``mask`` counts no token, the loss is NaN. With microbatches, state
    ``train_step(..., aux_loss="per_microbatch")``.

    Args:
        logits: [T, E], the router's output before the softmax.
        ids: [T, k] of an integer dtype, the experts of each token. -1 is no expert.
        num_experts: E.
        mask: [T], 1 or True for tokens that count, 0 or False for others. Default: all count.

    Returns a scalar, float32, or float64 if the logits are. Raises PlanningError if a shape or
    dtype does not fit.
    """
    _check(logits, ids, num_experts, mask)
    return balance_of_layers([torch.softmax(logits, -1)], [ids], mask)


def balance_of_layers(
    probabilities: Sequence[Tensor], ids: Sequence[Tensor], mask: Tensor | None
) -> Tensor:
    """Return the loss of several routers, of which f and P are means over the tokens of all.
    ``probabilities``, ``ids``: [T E] and [T k] of each router. ``mask``: [T] or None."""
    parts = [
        torch.ops.dt.balance_sums(layer, experts, mask)
        for layer, experts in zip(probabilities, ids, strict=True)
    ]
    scale = float(probabilities[0].shape[1])
    return torch.ops.dt.balance_loss(reduce(torch.add, parts), scale)


def _check(logits: Tensor, ids: Tensor, num_experts: int, mask: Tensor | None) -> None:
    num_tokens = logits.shape[0] if logits.dim() == 2 else -1
    facts = (
        (logits.dim() == 2 and logits.shape[1] == num_experts, "logits is [T, E]", "logits"),
        (ids.dim() == 2 and ids.shape[0] == num_tokens, "ids is [T, k]", "ids"),
        (not ids.is_floating_point() and ids.dtype != torch.bool, "ids holds integers", "ids"),
        (mask is None or mask.shape == (num_tokens,), "mask is [T]", "mask"),
    )
    given = dict(logits=logits, ids=ids, mask=mask)
    for holds, fact, name in facts:
        if not holds:
            shapes = ", ".join(
                f"{n}: {x.dtype} {list(x.shape)}" for n, x in given.items() if x is not None
            )
            fixes = dict(
                logits="logits.flatten(0, -2)", ids="ids.flatten(0, -2).long()",
                mask="mask.flatten()",
            )  # fmt: skip
            raise PlanningError(
                f"load_balancing_loss: {fact}, for T tokens and E = {num_experts} experts.\n"
                f"  {shapes}\n"
                f"fix: pass {fixes[name]}"
            )


# -- ops -------------------------------------------------------------------------------------------


def _in_parts(x: Tensor, ranks: int, num: int) -> Tensor:
    """Reshape [(d m r) ...] to [d m r ...], for d = ranks and m = num; d is 0 without rows."""
    rows = x.shape[0] // (ranks * num) if ranks else 0
    return x.reshape(ranks, num, rows, *x.shape[1:])


def _balance_sums(
    probabilities: Tensor, ids: Tensor, mask: Tensor | None, ranks: int = 1, num: int = 1
) -> Tensor:
    """Return [m 3 E]: by expert, the sums over d and r of its probabilities, of the slots that
    choose it, and of the tokens that count, which are equal for all experts."""
    dtype, num_experts = accumulation_dtype(probabilities.dtype), probabilities.shape[1]
    out = probabilities.new_zeros((num, 3, num_experts), dtype=dtype)
    wide = _in_parts(probabilities, ranks, num)
    weights = _in_parts(ids >= 0, ranks, num).to(dtype)
    if mask is None:
        out[:, 2] = wide.shape[0] * wide.shape[2]
    else:
        counts = _in_parts(mask.to(dtype), ranks, num)
        out[:, 2] = counts.sum((0, 2))[:, None]
        wide, weights = wide * counts[..., None], weights * counts[..., None]
    torch.sum(wide, (0, 2), dtype=dtype, out=out[:, 0])
    experts = _in_parts(ids.clamp(min=0).long(), ranks, num)
    shape = (num, experts.numel() // max(num, 1))
    indices, values = (x.transpose(0, 1).reshape(shape) for x in (experts, weights))
    out[:, 1].scatter_add_(1, indices, values)
    return out


def _balance_sums_grad(
    grad: Tensor,
    mask: Tensor | None,
    size: int,
    dtype: torch.dtype,
    ranks: int = 1,
    num: int = 1,
) -> Tensor:
    """Return the gradient of the probabilities, [(d m r) E], from grad[m 3 E]. ``size``: the number
    of rows."""
    rows = size // (ranks * num) if ranks else 0
    wide = grad[None, :, None, 0].expand(ranks, num, rows, grad.shape[2])
    if mask is not None:
        wide = wide * _in_parts(mask.to(grad.dtype), ranks, num)[..., None]
    return wide.to(dtype).reshape(size, grad.shape[2]).contiguous()


def _balance_loss(sums: Tensor, scale: float) -> Tensor:
    """Return ``scale`` times the sum of P * f over experts and microbatches, for sums[m 3 E]."""
    probabilities, chosen, count = sums.unbind(1)
    return (chosen / count * (probabilities / count)).sum() * scale


def _balance_loss_grad(grad: Tensor, sums: Tensor, scale: float) -> Tensor:
    """Return the gradient [m 3 E], which is 0 but for the probabilities."""
    _, chosen, count = sums.unbind(1)
    out = torch.zeros_like(sums)
    out[:, 0] = chosen / count / count * (grad * scale)
    return out


define(
    "balance_sums(Tensor probabilities, Tensor ids, Tensor? mask, int ranks=1, int num=1) "
    "-> Tensor",
    _balance_sums,
    lambda probabilities, ids, mask, ranks=1, num=1: probabilities.new_empty(
        (num, 3, probabilities.shape[1]), dtype=accumulation_dtype(probabilities.dtype)
    ),
)
define(
    "balance_sums_grad(Tensor grad, Tensor? mask, SymInt size, ScalarType dtype, int ranks=1, "
    "int num=1) -> Tensor",
    _balance_sums_grad,
    lambda grad, mask, size, dtype, *_: grad.new_empty((size, grad.shape[2]), dtype=dtype),
)
define(
    "balance_loss(Tensor sums, float scale) -> Tensor",
    _balance_loss,
    lambda sums, scale: sums.new_empty(()),
)
define(
    "balance_loss_grad(Tensor grad, Tensor sums, float scale) -> Tensor",
    _balance_loss_grad,
    lambda grad, sums, scale: sums.new_empty(sums.shape),
)


def _sums_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    probabilities, _, mask, *ctx.parts = inputs
    ctx.size, ctx.dtype = probabilities.shape[0], probabilities.dtype
    ctx.save_for_backward(mask)


def _sums_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    gradient = torch.ops.dt.balance_sums_grad(grad, mask, ctx.size, ctx.dtype, *ctx.parts)
    return gradient, None, None, None, None


def _loss_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    sums, ctx.scale = inputs
    ctx.save_for_backward(sums)


def _loss_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.dt.balance_loss_grad(grad, *ctx.saved_tensors, ctx.scale), None


torch.library.register_autograd(
    "dt::balance_sums", _sums_grad, setup_context=_sums_setup, lib=LIBRARY
)
torch.library.register_autograd(
    "dt::balance_loss", _loss_grad, setup_context=_loss_setup, lib=LIBRARY
)
