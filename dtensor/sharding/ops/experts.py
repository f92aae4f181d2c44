"""Ops for mixtures of experts: sort the slots of tokens by expert, move rows, multiply by expert.

    counts[E], expert[N], slot[N] = route(ids[T k], E)         N = T k; a slot is token * k + j
    rows[N i] = take_rows(x[T i], slot, counts, None, k)       rows of the tokens, by expert
    rows[N o] = expert_mm(rows, weight[E i o], counts, bias[E o], k)
    y[T o] = add_rows(rows, slot, counts, weights[T k], T, k)  each token adds its slots in order

On a rank, N is the number of rows that arrived, and E the number of local experts. Rows from
counts.sum() on are no rows: results neither read them nor depend on them, and are 0 there. Sums run
in float32, or float64. The host reads the counts of a route once. It reads nothing if the ids are
known to be in range, and torch's kernel multiplies the rows (`has_kernel`).
"""

# Torch leaves the types of its registration functions and of `torch.ops` open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dtensor.numerics import accumulation_dtype
from dtensor.sharding.local.conditions import ExpertIds
from dtensor.sharding.local.grouped_matmul import (
    KERNEL_WIDTH,
    ROUTED,
    expert_outer_products,
    expert_products,
    has_kernel,
    known_numbers,
    numbers_of,
    record_numbers,
    stops_of,
)
from dtensor.sharding.local.in_range import record_check, was_checked
from dtensor.sharding.ops.library import LIBRARY, define


def _route(
    ids: Tensor, num_experts: int, has_spare_id: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of each expert [E], and the expert and the slot of each row [T k], sorted by
    expert (stable). Slots without an expert, of id -1 or the spare id E, are last. Raises
    IndexError for another id outside 0:E. Reads the result and the range of the ids in one wait for
    a GPU, or not at all if the ids are known to be in range."""
    flat = ids.reshape(-1).long()
    are_experts = flat.numel() == 0 or was_checked(ids, (num_experts, 0, None))
    expert, slot = torch.sort(
        flat if are_experts else torch.where(flat < 0, num_experts, flat), stable=True
    )
    starts = torch.searchsorted(expert, torch.arange(num_experts + 1, device=ids.device))
    counts = starts.diff()
    condition = ExpertIds.of(ids, num_experts, has_spare_id)
    if are_experts or was_checked(ids, condition.key):
        record_check(counts, ROUTED)
        return counts, expert if are_experts else _without_spare(expert, num_experts), slot
    untyped_numbers: Any = torch.cat([torch.stack(flat.aminmax()), counts])
    least, most, *numbers = untyped_numbers.tolist()
    if least < -1 or most >= condition.size:
        raise condition.error(least if least < -1 else most, 1)
    record_numbers(counts, numbers)
    if least < 0 or most == num_experts:
        expert = _without_spare(expert, num_experts)
    return counts, expert, slot


def _without_spare(expert: Tensor, num_experts: int) -> Tensor:
    """Replace the spare id by -1, in place."""
    return expert.masked_fill_(expert == num_experts, -1)


def held_route(
    ids: Tensor, num_experts: int, held: list[int], has_spare_id: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `route` for the experts that the rank holds. ``held``: intervals of
    experts as a flat list [start, stop, start, ...]."""
    counts, expert, slot = _route(ids, num_experts, has_spare_id)
    numbers = numbers_of(counts)
    stops = [0, *accumulate(numbers)]
    spans = list(zip(held[::2], held[1::2], strict=True))
    none = [slot[:0]]
    expert, slot = (
        torch.cat([x[stops[lo] : stops[hi]] for lo, hi in spans] or none) for x in (expert, slot)
    )
    of_experts = torch.cat([counts[lo:hi] for lo, hi in spans] or none)
    record_numbers(of_experts, [n for lo, hi in spans for n in numbers[lo:hi]])
    return of_experts, expert, slot


def _take_rows(x: Tensor, slot: Tensor, counts: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Return x[slot // k], times weights[slot] if there are weights."""
    n = _known_rows(slot, counts)
    out = x.new_empty(slot.shape[0], x.shape[1])
    rows, slot = out[:n], slot[:n]
    torch.index_select(x, 0, slot // k, out=rows)
    if weights is not None:
        scale = weights.reshape(-1, 1).index_select(0, slot)
        torch.mul(rows, scale.to(accumulation_dtype(x.dtype)), out=rows)
    return _clear_tail(out, counts, n)


def _add_rows(
    rows: Tensor, slot: Tensor, counts: Tensor, weights: Tensor | None, num_tokens: int, k: int
) -> Tensor:
    """Return, for each token, the sum of its rows, times their weights, in the order of slots."""
    dtype = accumulation_dtype(rows.dtype)
    known = _known_rows(slot, counts)
    n = slot.shape[0] if known is None else known
    positions = _clear_tail(torch.arange(n, device=slot.device), counts, known, n)
    positions = slot.new_full((num_tokens * k,), n).index_copy_(0, slot[:n], positions)
    positions = positions.view(num_tokens, k)
    if known is None or known < num_tokens * k:  # slots without a row read a row of zeros
        rows = torch.cat([rows[:n], rows.new_zeros(1, rows.shape[1])])
        weights = None if weights is None else weights.masked_fill(positions == n, 0)
    out = rows.new_zeros(0)
    for j in range(k):
        part = rows.index_select(0, positions[:, j]).to(dtype)
        if weights is not None:
            part *= weights[:, j : j + 1]
        out = part if j == 0 else out.add_(part)
    return out.to(rows.dtype)


def _slot_grads(
    grad: Tensor, rows: Tensor, slot: Tensor, counts: Tensor, num_tokens: int, k: int
) -> Tensor:
    """Return dot(grad[t], rows[i]) of each slot, where t is the token of row i; 0 without a row."""
    dtype = accumulation_dtype(rows.dtype)
    n = _known_rows(slot, counts)
    slot = slot[:n]
    grads = grad.index_select(0, slot // k).to(dtype)
    dots = _clear_tail(grads.mul_(rows[:n]).sum(1), counts, n)
    return dots.new_zeros(num_tokens * k).index_copy_(0, slot, dots).view(num_tokens, k)


def _expert_mm(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, k: int) -> Tensor:
    return expert_products(rows, weight, counts, bias)


def _expert_outer(rows: Tensor, grad: Tensor, counts: Tensor, k: int) -> Tensor:
    """Return the gradient of the experts' weights."""
    return expert_outer_products(rows, grad, counts)


def _expert_sum(grad: Tensor, counts: Tensor, k: int) -> Tensor:
    """Return the gradient of the experts' biases: the sums of grad[N o] by expert."""
    if grad.is_cuda and has_kernel(grad.dtype, grad.shape[1:]):
        ones = grad.new_ones(grad.shape[0], KERNEL_WIDTH)
        return expert_outer_products(ones, grad, counts)[:, 0].contiguous()
    stops = stops_of(counts, grad.shape[0])
    out = grad.new_zeros(len(stops), grad.shape[1])
    for part, i, j in zip(out, [0, *stops], stops, strict=False):
        if i < j:
            torch.sum(grad[i:j], 0, out=part)
    return out


def _known_rows(slot: Tensor, counts: Tensor) -> int | None:
    """Return the number of rows; None if the host does not know the counts. Raises IndexError if
    the counts exceed the slots."""
    numbers = known_numbers(counts)
    if numbers is None:
        return None
    n = sum(numbers)
    if n > slot.shape[0]:
        stops_of(counts, slot.shape[0])
    return n


def _clear_tail(out: Tensor, counts: Tensor, n: int | None, value: int = 0) -> Tensor:
    """Set what follows the rows of ``out`` to ``value``. ``n``: see `_known_rows`."""
    if n is not None:
        out[n:] = value
        return out
    is_row = torch.arange(out.shape[0], device=out.device) < counts.sum()
    return out.masked_fill_(~is_row.view(-1, *(1 for _ in out.shape[1:])), value)


def _fake_route(
    ids: Tensor, num_experts: int, has_spare_id: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    slot = ids.new_empty(ids.numel(), dtype=torch.int64)
    return slot.new_empty(num_experts), slot, torch.empty_like(slot)


define(
    "route(Tensor ids, int num_experts, bool has_spare_id=False) -> (Tensor, Tensor, Tensor)",
    _route,
    _fake_route,
)
define(
    "take_rows(Tensor x, Tensor slot, Tensor counts, Tensor? weights, int k) -> Tensor",
    _take_rows,
    lambda x, slot, *_: x.new_empty(slot.shape[0], x.shape[1]),
)
define(
    "add_rows(Tensor rows, Tensor slot, Tensor counts, Tensor? weights, int num_tokens, int k) "
    "-> Tensor",
    _add_rows,
    lambda rows, slot, counts, weights, num_tokens, k: rows.new_empty(num_tokens, rows.shape[1]),
)
define(
    "slot_grads(Tensor grad, Tensor rows, Tensor slot, Tensor counts, int num_tokens, int k) "
    "-> Tensor",
    _slot_grads,
    lambda grad, rows, slot, counts, num_tokens, k: rows.new_empty(
        num_tokens, k, dtype=accumulation_dtype(rows.dtype)
    ),
)
define(
    "expert_mm(Tensor rows, Tensor weight, Tensor counts, Tensor? bias, int k) -> Tensor",
    _expert_mm,
    lambda rows, weight, *_: rows.new_empty(rows.shape[0], weight.shape[2]),
)
define(
    "expert_outer(Tensor rows, Tensor grad, Tensor counts, int k) -> Tensor",
    _expert_outer,
    lambda rows, grad, counts, _: rows.new_empty(counts.shape[0], rows.shape[1], grad.shape[1]),
)
define(
    "expert_sum(Tensor grad, Tensor counts, int k) -> Tensor",
    _expert_sum,
    lambda grad, counts, _: grad.new_empty(counts.shape[0], grad.shape[1]),
)


# -- gradients -------------------------------------------------------------------------------------


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, slot, counts, weights, ctx.k = inputs
    ctx.num_tokens = x.shape[0]
    needs_x = weights is not None and weights.requires_grad
    ctx.save_for_backward(x if needs_x else None, slot, counts, weights)


def _take_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, slot, counts, weights = ctx.saved_tensors
    dx = dweights = None
    sizes = (ctx.num_tokens, ctx.k)
    if ctx.needs_input_grad[0]:
        dx = torch.ops.dt.add_rows(grad, slot, counts, weights, *sizes)
    if ctx.needs_input_grad[3]:
        dweights = torch.ops.dt.slot_grads(x, grad, slot, counts, *sizes).to(weights.dtype)
    return dx, None, None, dweights, None


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, slot, counts, weights, *ctx.sizes = inputs
    needs_rows = weights is not None and weights.requires_grad
    ctx.save_for_backward(rows if needs_rows else None, slot, counts, weights)


def _add_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, slot, counts, weights = ctx.saved_tensors
    drows = dweights = None
    if ctx.needs_input_grad[0]:
        drows = torch.ops.dt.take_rows(grad, slot, counts, weights, ctx.sizes[1])
    if ctx.needs_input_grad[3]:
        dweights = torch.ops.dt.slot_grads(grad, rows, slot, counts, *ctx.sizes).to(weights.dtype)
    return drows, None, None, dweights, None, None


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, counts, _, ctx.k = inputs
    # The gradient of a transposed weight is made transposed, so that no copy of it is needed.
    ctx.is_transposed = weight.stride(1) < weight.stride(2)
    ctx.save_for_backward(
        rows if weight.requires_grad else None, weight if rows.requires_grad else None, counts
    )


def _mm_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weight, counts = ctx.saved_tensors
    drows = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        drows = torch.ops.dt.expert_mm(grad, weight.transpose(1, 2), counts, None, ctx.k)
    if ctx.needs_input_grad[1]:
        pair = (grad, rows) if ctx.is_transposed else (rows, grad)
        dweight = torch.ops.dt.expert_outer(*pair, counts, ctx.k)
        dweight = dweight.transpose(1, 2) if ctx.is_transposed else dweight
    if ctx.needs_input_grad[3]:
        dbias = torch.ops.dt.expert_sum(grad, counts, ctx.k)
    return drows, dweight, None, dbias, None


for _name, _setup, _grad in (
    ("take_rows", _take_setup, _take_grad),
    ("add_rows", _add_setup, _add_grad),
    ("expert_mm", _mm_setup, _mm_grad),
):
    torch.library.register_autograd(f"dt::{_name}", _grad, setup_context=_setup, lib=LIBRARY)
