"""Mixtures of experts on global tensors: send rows to experts, multiply by expert, add the slots.

    rows, route = to_experts(x, ids, num_experts)    x[T d], ids[T k] -> rows[T k, d]
    h = expert_linear(rows, w_in, route).relu()      w_in[E d f] -> h[T k, f]
    y = from_experts(expert_linear(h, w_out, route), route, weights)      weights[T k] -> y[T d]

The functions run on plain tensors as on captured tensors, and are the reference of their semantics.
A slot is one of the k choices of a token. Rows are sorted by expert; a plan may split them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

import dtensor.sharding.ops.experts  # noqa: F401  (registers the ops)
from dtensor.errors import PlanningError, check_kind, check_number, check_word
from dtensor.frontend.call_lock import is_capturing
from dtensor.frontend.graph import type_text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """The order of the rows that `to_experts` returns.

    Args:
        counts: the number of rows of each expert, i64[E].
        expert: the expert of each row, i64[T k], ascending; -1 for the last rows, which have none.
        slot: the slot of each row, i64[T k]: token * k + its place among the token's k ids.
        num_experts: E.
        top_k: k.
        num_tokens: T.
    """

    counts: Tensor
    expert: Tensor
    slot: Tensor
    num_experts: int
    top_k: int
    num_tokens: int


def to_experts(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Route]:
    """Return one row of ``x`` for each id, sorted by expert, and the route of the rows.

    Args:
        x: the tokens [T d].
        ids: the experts of each token, i64[T k] or i32[T k], in any order; -1 for no expert.
        num_experts: E.

    Returns ``rows`` [T k, d] and a `Route`. Rows of one expert are in the order of their slots.
    Rows of id -1 are last, and are 0 even if the token has a NaN. The gradient of a token is the
    sum of the gradients of its rows, in the order of its slots, in float32 (float64 stays).

    Raises PlanningError if shapes or dtypes do not match, and IndexError for an id outside -1..E-1.
    """
    check_number("num_experts", num_experts, fix="num_experts=8", least=1, whole=True)
    _check_tensor("x", x, 2, "the tokens [T d]", "x.reshape(-1, x.shape[-1])")
    fix = "ids.reshape(-1, ids.shape[-1]), one row of k ids for each token"
    _check_tensor("ids", ids, 2, "the experts of each token [T k]", fix)
    if ids.dtype not in (torch.int64, torch.int32):
        raise PlanningError(
            f"ids are {type_text(ids)}, not integers of 32 or 64 bits.\nfix: ids.long()"
        )
    if ids.shape[0] != x.shape[0] or ids.shape[1] == 0:
        raise PlanningError(
            f"ids have k >= 1 experts for each of {x.shape[0]} tokens; x is {type_text(x)}, ids "
            f"are {type_text(ids)}.\nfix: {fix}"
        )
    return sent_to_experts(x, ids, num_experts)


def sent_to_experts(
    x: Tensor, ids: Tensor, num_experts: int, *, has_spare_id: bool = False
) -> tuple[Tensor, Route]:
    """Return what `to_experts` returns, without its checks of shapes and dtypes. With a spare id,
    the id E marks slots without an expert too, as in transformers."""
    extra = (True,) if has_spare_id else ()
    counts, expert, slot = torch.ops.dt.route(ids, num_experts, *extra)
    num_tokens, k = ids.shape
    rows = torch.ops.dt.take_rows(x, slot, counts, None, k)
    return rows, Route(
        counts=counts,
        expert=expert,
        slot=slot,
        num_experts=num_experts,
        top_k=k,
        num_tokens=num_tokens,
    )


def expert_linear(rows: Tensor, weight: Tensor, route: Route, bias: Tensor | None = None) -> Tensor:
    """Return the product of each row with the weight of its expert, plus the bias of the expert.

    Args:
        rows: [T k, i], in the order of `route`.
        weight: one matrix for each expert, [E i o].
        route: what `to_experts` returned.
        bias: [E o], or None.

    Returns [T k, o]. Rows without an expert are 0, and are not read. An expert without rows gets a
    gradient of zeros. Under `torch.autocast` the operands are cast as by `F.linear`.

    Raises PlanningError if shapes or dtypes do not match.
    """
    _check_rows("expert_linear", rows, route)
    wanted = (route.num_experts, rows.shape[1])
    if weight.dim() != 3 or tuple(weight.shape[:2]) != wanted:
        fix = "weight.transpose(1, 2) if it is [E o i]"
        if weight.dim() == 3 and weight.shape[0] != wanted[0]:
            fix = f"num_experts={weight.shape[0]}, or a weight of {wanted[0]} experts"
        raise PlanningError(
            f"expert_linear's weight is {type_text(weight)}, not [E i o] with E={wanted[0]} "
            f"experts and i={wanted[1]} as the rows.\n"
            f"fix: {fix}"
        )
    if bias is not None and bias.shape != (weight.shape[0], weight.shape[2]):
        raise PlanningError(
            f"expert_linear's bias is {type_text(bias)}, not "
            f"[{weight.shape[0]},{weight.shape[2]}], one row for each expert.\n"
            f"fix: bias.reshape({weight.shape[0]}, {weight.shape[2]})"
        )
    dtype = _autocast_dtype(rows)
    if dtype is not None:
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if len({x.dtype for x in (rows, weight, bias) if x is not None}) > 1:
        types = ", ".join(type_text(x) for x in (rows, weight, bias) if x is not None)
        raise PlanningError(
            f"expert_linear takes rows, weight and bias of one dtype; got {types}.\n"
            f"fix: rows.to(weight.dtype)"
        )
    return torch.ops.dt.expert_mm(rows, weight, route.counts, bias, route.top_k)


def from_experts(rows: Tensor, route: Route, weights: Tensor | None = None) -> Tensor:
    """Return, for each token, the sum of its rows, times their weights.

    Args:
        rows: [T k, d], in the order of `route`.
        route: what `to_experts` returned.
        weights: the weight of each slot, [T k]; None: 1.

    Returns [T d] in the dtype of the rows. The slots of a token are added in order, in float32
    (float64 stays). A slot with id -1 adds 0, whatever its row and weight are.

    Raises PlanningError if shapes or dtypes do not match.
    """
    _check_rows("from_experts", rows, route)
    wanted = (route.num_tokens, route.top_k)
    if weights is not None and (weights.shape != wanted or not weights.is_floating_point()):
        raise PlanningError(
            f"from_experts' weights are {type_text(weights)}, not floating-point numbers "
            f"[{wanted[0]},{wanted[1]}], one for each id.\n"
            f"fix: weights.reshape({wanted[0]}, {wanted[1]})"
        )
    slot, counts = route.slot, route.counts
    return torch.ops.dt.add_rows(rows, slot, counts, weights, route.num_tokens, route.top_k)


def drop_tokens(
    ids: Tensor,
    weights: Tensor,
    num_experts: int,
    capacity_factor: float,
    policy: Literal["probs", "position"] = "probs",
) -> Tensor:
    """Return ``ids`` with -1 in the slots that exceed the capacity of their expert.

    Args:
        ids: the experts of each token, integers [T k]; -1 for no expert.
        weights: the routing weight of each slot, [T k].
        num_experts: E.
        capacity_factor: an expert keeps at most ceil(T k / E * capacity_factor) slots.
        policy: which slots an expert keeps: "probs", the slots with the largest weights, and of
            equal weights the first; "position", the first slots of the batch.

    The capacity counts the slots of the batch that is given. A model that drops tokens is another
    model: use it only if the model was trained with a capacity.

    Raises PlanningError if shapes or arguments do not match.
    """
    check_number("num_experts", num_experts, fix="num_experts=8", least=1, whole=True)
    check_number("capacity_factor", capacity_factor, fix="capacity_factor=1.25", above=0)
    check_word("policy", policy, ("probs", "position"))
    _check_tensor("ids", ids, 2, "the experts of each token [T k]", "ids.reshape(-1, k)")
    if weights.shape != ids.shape:
        raise PlanningError(
            f"drop_tokens takes one weight for each id; ids are {type_text(ids)}, weights are "
            f"{type_text(weights)}.\nfix: weights.gather(1, ids) if weights are [T E]"
        )
    capacity = math.ceil(Fraction(ids.numel(), num_experts) * Fraction(str(float(capacity_factor))))
    flat = ids.reshape(-1)
    order = None
    if policy == "probs":
        by_weight = weights.detach().reshape(-1).sort(descending=True, stable=True)
        order = by_weight.indices
    expert, by_expert = (flat if order is None else flat[order]).sort(stable=True)
    order = by_expert if order is None else order[by_expert]
    place = torch.arange(len(flat), device=ids.device) - torch.searchsorted(expert, expert)
    kept = torch.where(place < capacity, expert, -1)
    return torch.zeros_like(flat).scatter(0, order, kept).view(ids.shape)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts ``x``, or None. Captured tensors are on the CPU, but
    autocast may be for CUDA."""
    if x.dtype == torch.float64:
        return None
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device) and (is_capturing() or x.device.type == device):
            return torch.get_autocast_dtype(device)
    return None


def _check_rows(function: str, rows: Tensor, route: Route) -> None:
    fix = "rows, route = dt.to_experts(x, ids, num_experts)"
    check_kind(f"{function}'s route", route, Route, "a Route", fix)
    number = route.num_tokens * route.top_k
    if rows.dim() != 2 or rows.shape[0] != number:
        raise PlanningError(
            f"{function}'s rows are {type_text(rows)}, not the {number} rows of the route.\n"
            f"fix: {fix}, and only row-wise ops on rows"
        )


def _check_tensor(name: str, x: Tensor, num_dims: int, wanted: str, fix: str) -> None:
    if x.dim() != num_dims:
        raise PlanningError(f"{name} is {type_text(x)}, not {wanted}.\nfix: {fix}")
