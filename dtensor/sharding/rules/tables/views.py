"""Rules of ops that only rearrange dims: view, permute, expand, squeeze and similar ops.

    view      [8,64] -> [8,4,16]     "p0 (p1 p2) -> p0 p1 p2"
    expand    [8,1] -> [8,5]         "d0 1 -> d0 d1"

The factors of a view are found by reading both shapes from the left: the greatest common divisor of
the current dims is the next factor. If it is 1, the dims are whole up to the next boundary that
both shapes have. All ops are linear. Localizers replace sizes in arguments by the local sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.rules.build import (
    broadcast_term,
    dim_names,
    linear_groups,
    local_sizes,
    make,
    resolve_dims,
    retarget,
    sized_call,
    with_kind,
)
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule

aten: Any = torch.ops.aten


def factorize(before: tuple[int, ...], after: tuple[int, ...]) -> _Matching:
    """Return the factors of both shapes, which have the same number of elements: (8, 64) and
    (8, 4, 16) are p0 (p1 p2) and p0 p1 p2, with p0 = 8, p1 = 4, p2 = 16."""
    matching = _Matching([[] for _ in before], [[] for _ in after])
    if math.prod(before) == 0:
        matching.separate(before, after)
        return matching
    i = j = 0
    left, right = 1, 1  # the parts of the current dims without a factor yet; 1: take the next dim
    while True:
        while left == 1 and i < len(before):
            left, i = before[i], i + 1
        while right == 1 and j < len(after):
            right, j = after[j], j + 1
        common = math.gcd(left, right)
        if common > 1:
            name = matching.new(common)
            matching.left[i - 1].append(name)
            matching.right[j - 1].append(name)
            left, right = left // common, right // common
        elif left == right == 1:
            return matching
        else:
            i, j = matching.add_whole(i, j, left, right, before, after)
            left = right = 1


@dataclass(slots=True)
class _Matching:
    """The factor names of each dim of both shapes, while `factorize` adds to them."""

    left: list[list[str]]
    right: list[list[str]]
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    whole: set[str] = field(default_factory=set[str])

    def new(self, size: int, *, whole: bool = False) -> str:
        """Add a factor of this size, and return its name. ``whole``: it may not be split."""
        name = f"{'w' if whole else 'p'}{len(self.sizes)}"
        self.sizes[name] = size
        if whole:
            self.whole.add(name)
        return name

    def add_whole(
        self, i: int, j: int, left: int, right: int, before: tuple[int, ...], after: tuple[int, ...]
    ) -> tuple[int, int]:
        """Add whole factors up to the next common boundary; return the dims after it."""
        self.left[i - 1].append(self.new(left, whole=True))
        self.right[j - 1].append(self.new(right, whole=True))
        while left != right:
            if left < right:
                self.left[i].append(self.new(before[i], whole=True))
                left, i = left * before[i], i + 1
            else:
                self.right[j].append(self.new(after[j], whole=True))
                right, j = right * after[j], j + 1
        return i, j

    def separate(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """Give each dim a separate whole factor, for tensors without elements."""
        for factors, size in (*zip(self.left, before), *zip(self.right, after)):
            factors.append(self.new(size, whole=True))


def _view(call: OpCall) -> Rule:
    """Return the rule of a view, whose factors `factorize` finds."""
    matching = factorize(call.operands[0].shape, call.result.shape)
    return Rule(
        operands=(tuple((tuple(factors),) for factors in matching.left),),
        results=(tuple((tuple(factors),) for factors in matching.right),),
        sizes=tuple(matching.sizes.items()),
        whole=frozenset(matching.whole),
        linear=tuple(frozenset(group) for group in linear_groups(call, ((0,),))),
        localize=_reshape,
    )


def _reshape(call: OpCall, local: Local) -> OpCall:
    # reshape, not view: a shard of a contiguous tensor may be strided.
    return sized_call(call, local, 1, aten.reshape.default, call.args[0], ())


def with_repeat_fallback(rule: Rule, dim: int, *, splits: bool) -> Rule:
    """Return the rule of a view that joins ``dim``, a dim of repeats, to the dim before it, with a
    fallback for shards that cut a group of repeats:

        b g r s d -> b (g r) s d      with fallback      b g! r! s d -> b h s d

    In the fallback the operand is whole, and each rank takes its part of the result. ``splits``:
    the view goes the other way, as in the gradient: each rank writes its part into zeros, and the
    result is a pending sum.
    """
    separate, joined = (rule.results, rule.operands) if splits else (rule.operands, rule.results)
    # the factors (g, r) of the heads and of their repeats, and the joined dim that has both
    pair = (*separate[0][dim - 1][0][-1:], *separate[0][dim][0])
    at = next((i for i, (product,) in enumerate(joined[0]) if set(pair) <= set(product)), None)
    if len(pair) != 2 or at is None:
        return rule
    (product,) = joined[0][at]
    first = product.index(pair[0])
    heads = (*product[:first], "h", *product[first + 2 :])  # h replaces g r
    cut = (tuple((heads,) if i == at else d for i, d in enumerate(joined[0])),)
    fallback = replace(
        rule,
        operands=cut if splits else separate,
        results=separate if splits else cut,
        sizes=(*rule.sizes, ("h", rule.size[pair[0]] * rule.size[pair[1]])),
        whole=rule.whole | set(pair),
        localize=None,
    )
    joined_dims = [i for i, (factors,) in enumerate(separate[0]) if set(factors) & set(product)]
    return replace(rule, fallback=fallback, localize=_part_of_repeat(at, joined_dims, splits))


def _part_of_repeat(at: int, joined_dims: list[int], splits: bool) -> Localizer:
    """Return the localizer of `with_repeat_fallback`; its view joins ``joined_dims`` to ``at``."""

    def localize(call: OpCall, local: Local) -> OpCall:
        """Return a plain reshape if the rank's operand and result have equally many elements; else
        a reshape that reads or writes only the positions in dim ``at`` that the rank holds."""
        operand, result = local.operand_shape(0), local.result_shape()
        if math.prod(operand) == math.prod(result):
            return _reshape(call, local)
        intervals = local.result_intervals if splits else local.operand_intervals
        sizes = (call.result if splits else call.operands[0]).shape
        indices = [0]  # the global indices in dim ``at`` of the rank's elements of joined_dims
        for dim in joined_dims:
            spans = intervals(0, dim)
            columns = [j for lo, hi in spans for j in range(lo, hi)]
            indices = [i * sizes[dim] + j for i in indices for j in columns]
        intervals_at = (local.operand_intervals if splits else local.result_intervals)(0, at)
        position_of = {index: i for i, index in enumerate(indices)}
        positions = [position_of[i] for lo, hi in intervals_at for i in range(lo, hi)]
        run = local_forms.filled_reshape if splits else local_forms.part_of_reshape
        joined = list(operand if splits else result)
        joined[at] = len(indices)
        return retarget(call, run, call.args[0], joined, list(result), at, positions)

    return localize


def _expand(call: OpCall) -> Rule:
    after = call.result.shape
    factors = dim_names(len(after))
    source = broadcast_term(factors, call.operands[0].shape, after)
    return make(call, f"{source} -> {' '.join(factors)}", linear=((0,),), localize=local_sizes(1))


def _repeat(call: OpCall) -> Rule:
    """Return the rule of repeat, "d0 -> (r0 d0)" for each dim."""
    before, repeats = call.operands[0].shape, tuple(call.args[1])
    new = len(repeats) - len(before)
    source = dim_names(len(before))
    result = [f"r{i}" if i < new else f"(r{i} d{i - new})" for i in range(len(repeats))]
    return make(
        call,
        f"{' '.join(source)} -> {' '.join(result)}",
        linear=((0,),),
        localize=_local_repeats,
        sizes={f"r{i}": count for i, count in enumerate(repeats)},
    )


def _local_repeats(call: OpCall, local: Local) -> OpCall:
    """Replace the global repeats by the rank's: local result sizes over local operand sizes."""
    repeats = list(call.args[1])
    after, before = local.result_sizes(), local.operand_sizes(0)
    new = len(after) - len(before)
    for i, size in enumerate(after):
        local_size = 1 if i < new else before[i - new]
        if local_size:
            repeats[i] = 1 if size == local_size else local.result_size(0, i) // local_size
    return call.with_arg(1, repeats)


def _permutation(order: list[int], call: OpCall) -> Rule:
    """Return the rule whose result dim i is dim ``order[i]`` of the operand."""
    return make(
        call,
        f"{' '.join(dim_names(len(order)))} -> {' '.join(f'd{i}' for i in order)}",
        linear=((0,),),
    )


def _permute(call: OpCall) -> Rule:
    rank = len(call.operands[0].shape)
    return _permutation([d % rank for d in call.args[1]], call)


def _t(call: OpCall) -> Rule:
    return _permutation(list(range(len(call.operands[0].shape)))[::-1], call)


def _transpose(call: OpCall) -> Rule:
    """Return the rule of a transpose of two dims, "d0 d1 -> d1 d0"."""
    rank = len(call.operands[0].shape)
    order = list(range(rank))
    if rank:
        a, b = call.args[1] % rank, call.args[2] % rank
        order[a], order[b] = b, a
    return _permutation(order, call)


def _unsqueeze(call: OpCall) -> Rule:
    source = dim_names(len(call.operands[0].shape))
    at = call.args[1] % (len(source) + 1)
    result = [*source[:at], "1", *source[at:]]
    return make(call, f"{' '.join(source)} -> {' '.join(result)}", linear=((0,),))


def _squeeze(call: OpCall) -> Rule:
    """Return the rule of squeeze, "d0 1 d2 -> d0 d2"."""
    shape = call.operands[0].shape
    dim: Any = call.arg(1, "dim")
    dropped = [d for d in resolve_dims(dim, len(shape)) if shape[d] == 1]
    source = ["1" if i in dropped else f"d{i}" for i in range(len(shape))]
    result = " ".join(f for i, f in enumerate(source) if i not in dropped)
    # a reshape to stated sizes, because squeeze would drop a dim that is 1 only on this rank
    return make(call, f"{' '.join(source)} -> {result}", linear=((0,),), localize=_reshape)


RULES: dict[str, Builder] = {
    "aten.view.default": _view,
    "aten._unsafe_view.default": with_kind("view", _view),
    "aten.reshape.default": _view,
    "aten.expand.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.permute.default": _permute,
    "aten.t.default": _t,
    "aten.transpose.int": _transpose,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten._reshape_alias.default": _view,
    "aten.view_copy.default": _view,
    "aten.expand_copy.default": _expand,
    "aten.permute_copy.default": _permute,
    "aten.t_copy.default": _t,
    "aten.transpose_copy.int": _transpose,
    "aten.unsqueeze_copy.default": _unsqueeze,
    "aten.squeeze_copy.default": _squeeze,
    "aten.squeeze_copy.dim": _squeeze,
    "aten.squeeze_copy.dims": _squeeze,
}
