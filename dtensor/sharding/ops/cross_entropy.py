"""Cross entropy as a short chain of ops, each with a rule of one line.

    m = ce_max(logits[n v])                  [n]    contracted with max over v
    z = ce_sumexp(logits, m)                 [n]    contracted with sum
    y = ce_target(logits, target[n])         [n]    contracted with sum: the target's logit
    loss = ce_loss(m, z, y, target)          [n]    elementwise: log(z) + m - y, 0 where ignored
    count = ce_count(target)                 []     contracted with sum: the divisor of a mean
    d = ce_backward(grad[n], logits, m, z, target)  [n v]   nothing contracted

A split vocabulary so costs three reductions of one number per row forward and none backward.
`cross_entropy_rows` is the whole chain as one autograd unit; capture takes it apart.

Invariants: `m`, `z`, `y` and the loss are float32 for half dtypes; an ignored target has zero loss
and zero gradient; a target outside `[0, num_classes)` raises, for which a GPU is waited for.
Not here: class weights, label smoothing, targets that are probabilities.
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.ops.library import LIBRARY, define, local_index


def _rows(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=accumulation_dtype(logits.dtype))


def _ce_max(logits: Tensor) -> Tensor:
    if logits.shape[1] == 0:
        return torch.full_like(_rows(logits), float("-inf"))
    return logits.amax(1).to(accumulation_dtype(logits.dtype))


def _ce_sumexp(logits: Tensor, maximum: Tensor) -> Tensor:
    return (logits - maximum[:, None]).exp_().sum(1)


def _ce_target(
    logits: Tensor, target: Tensor, ignore_index: int, vocab: Sequence[int] = ()
) -> Tensor:
    here, local = local_index(target, vocab, logits.shape[1])
    here &= target != ignore_index
    if logits.shape[1] == 0:
        return torch.zeros_like(_rows(logits))
    picked = logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
    return torch.where(here, picked, 0).to(accumulation_dtype(logits.dtype))


def _ce_loss(
    maximum: Tensor,
    sumexp: Tensor,
    target_logit: Tensor,
    target: Tensor,
    ignore_index: int,
    num_classes: int = -1,
) -> Tensor:
    used = target != ignore_index
    loss = torch.where(used, sumexp.log() + maximum - target_logit, 0)
    if num_classes < 0:
        return loss
    wrong = used & ((target < 0) | (target >= num_classes))
    if bool(wrong.any()):
        raise IndexError(
            f"Target {int(target[wrong][0])} is out of bounds for {num_classes} classes "
            f"(ignore_index={ignore_index})."
        )
    return loss


def _ce_count(target: Tensor, ignore_index: int) -> Tensor:
    return (target != ignore_index).sum().to(torch.float32)


def _ce_backward(
    grad: Tensor,
    logits: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    target: Tensor,
    ignore_index: int,
    vocab: Sequence[int] = (),
) -> Tensor:
    used = target != ignore_index
    here, local = local_index(target, vocab, logits.shape[1])
    here &= used
    probability = (logits - maximum[:, None]).exp_().div_(sumexp[:, None])
    if logits.shape[1] > 0:
        hot = here.to(probability.dtype)[:, None]
        probability.scatter_add_(1, torch.where(here, local, 0)[:, None], -hot)
    # `where`, not a product: an ignored row has zero gradient even where grad is infinite (a mean
    # over no rows).
    out = torch.where(used[:, None], probability.mul_(grad[:, None]), 0)
    return out.to(logits.dtype)


_CE_SCHEMAS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("ce_max(Tensor logits) -> Tensor", _ce_max, _rows),
    (
        "ce_sumexp(Tensor logits, Tensor maximum) -> Tensor",
        _ce_sumexp,
        lambda logits, maximum: _rows(logits),
    ),
    (
        "ce_target(Tensor logits, Tensor target, int ignore_index, int[] vocab=[]) -> Tensor",
        _ce_target,
        lambda logits, target, ignore_index, vocab=(): _rows(logits),
    ),
    (
        "ce_loss(Tensor maximum, Tensor sumexp, Tensor target_logit, Tensor target, "
        "int ignore_index, int num_classes=-1) -> Tensor",
        _ce_loss,
        lambda maximum, *rest: torch.empty_like(maximum),
    ),
    (
        "ce_count(Tensor target, int ignore_index) -> Tensor",
        _ce_count,
        lambda target, ignore_index: target.new_empty((), dtype=torch.float32),
    ),
    (
        "ce_backward(Tensor grad, Tensor logits, Tensor maximum, Tensor sumexp, Tensor target, "
        "int ignore_index, int[] vocab=[]) -> Tensor",
        _ce_backward,
        lambda grad, logits, *rest: logits.new_empty(logits.shape),
    ),
)
for _schema, _run, _fake in _CE_SCHEMAS:
    define(_schema, _run, _fake)


def _cross_entropy_rows(
    logits: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    maximum = _ce_max(logits)
    sumexp = _ce_sumexp(logits, maximum)
    picked = _ce_target(logits, target, ignore_index, ())
    loss = _ce_loss(maximum, sumexp, picked, target, ignore_index, logits.shape[1])
    return loss, maximum, sumexp


# The whole of the chain as one autograd unit; capture takes it apart again in the joint graph.
define(
    "cross_entropy_rows(Tensor logits, Tensor target, int ignore_index) "
    "-> (Tensor, Tensor, Tensor)",
    _cross_entropy_rows,
    lambda logits, *_: (_rows(logits), _rows(logits), _rows(logits)),
)


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.ignore_index = inputs
    _, maximum, sumexp = output
    ctx.mark_non_differentiable(maximum, sumexp)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, maximum, sumexp, target)


def _rows_grad(ctx: Any, grad: Tensor | None, _max: None, _sum: None) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None
    logits, maximum, sumexp, target = ctx.saved_tensors
    args = (grad, logits, maximum, sumexp, target, ctx.ignore_index)
    return torch.ops.dt.ce_backward(*args), None, None


torch.library.register_autograd(
    "dt::cross_entropy_rows", _rows_grad, setup_context=_rows_setup, lib=LIBRARY
)
