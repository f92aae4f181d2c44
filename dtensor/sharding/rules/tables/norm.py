"""Rules of normalisation: dims that statistics are taken over are whole, other dims split freely.

    layer_norm                "... k0!, k0!, k0! -> ... k0!, ... 1, ... 1"
    layer_norm backward       split rows leave the gradients of weight and bias pending
    batch norm, training      "n! c x0!, c, c, c, c -> n! c x0!, c, c, c, c"
    batch norm, evaluating    "n c x0, c, c, c, c -> n c x0, 0, 0"
    bn_squares, bn_sums       "n c x0, c -> c"                summed over the batch
    group norm                "n (g k!) x0!, (g k!), (g k!) -> n (g k!) x0!, n g, n g"

Invariant: no rank silently normalises its rows by the mean of its part of a batch. A norm over a
split dim can be written with pow, mean and rsqrt.
"""

from __future__ import annotations

import math

import dtensor.sharding.ops.batch_norm  # pyright: ignore[reportUnusedImport] - the ops
import dtensor.sharding.ops.norms  # noqa: F401  # pyright: ignore[reportUnusedImport] - likewise
from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import make, operand_index, pattern, retarget, whole_dims
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import contiguous, positional, unless_empty

# -- over trailing dims --------------------------------------------------------------------------


def _factors(call: OpCall, position: int) -> tuple[str, str, str]:
    """Return the terms of the rows, of the normalised dims, and of the statistics' dims of size 1.
    The argument at ``position`` is ``normalized_shape``."""
    count = len(call.arg(position, "normalized_shape"))
    rank = len(call.operands[0].shape)
    rows = " ".join(f"d{i}" for i in range(rank - count))
    return rows, whole_dims("k", count), " ".join("1" for _ in range(count))


def _num_tensors(call: OpCall, *arguments: tuple[int, str]) -> int:
    """Return how many of these optional arguments are tensors."""
    return sum(operand_index(call, position, name) is not None for position, name in arguments)


def _layer_norm(call: OpCall) -> Rule:
    rows, dims, ones = _factors(call, 1)
    terms = [f"{rows} {dims}"] + [dims] * _num_tensors(call, (2, "weight"), (3, "bias"))
    return make(call, f"{', '.join(terms)} -> {rows} {dims}, {rows} {ones}, {rows} {ones}")


def _layer_norm_backward(call: OpCall) -> Rule:
    """Return the rule of (grad, x, mean, rstd, weight?, bias?) -> gradients of x, weight, bias."""
    rows, dims, ones = _factors(call, 2)
    x = f"{rows} {dims}"
    terms = [x, x, f"{rows} {ones}", f"{rows} {ones}"]
    terms += [dims] * _num_tensors(call, (5, "weight"), (6, "bias"))
    text = f"{', '.join(terms)} -> {x}, {dims}, {dims}"
    # The CPU kernel ignores the strides of a shard.
    return make(call, text, linear=((0,),), localize=contiguous())


def _rms_norm(call: OpCall) -> Rule:
    rows, dims, ones = _factors(call, 1)
    terms = [f"{rows} {dims}"] + [dims] * _num_tensors(call, (2, "weight"))
    return make(call, f"{', '.join(terms)} -> {rows} {dims}, {rows} {ones}")


def _rms_norm_backward(call: OpCall) -> Rule:
    """Return the rule of (grad, x, rstd, weight?) -> gradients of x and weight."""
    rows, dims, ones = _factors(call, 2)
    x = f"{rows} {dims}"
    terms = [x, x, f"{rows} {ones}"] + [dims] * _num_tensors(call, (4, "weight"))
    return make(call, f"{', '.join(terms)} -> {x}, {dims}", linear=((0,),))


# -- over channels -------------------------------------------------------------------------------


def _image(rank: int, training: bool) -> str:
    """Return the term of images, ``n c x0``. In training all dims but the channels are whole."""
    mark = "!" if training else ""
    points = [f"x{d}{mark}" for d in range(rank - 2)]
    return " ".join([f"n{mark}", *(["c"] if rank > 1 else []), *points])


def _per_channel(shape: tuple[int, ...], name: str) -> str:
    """Return the term of a vector over channels, which is empty if an op saves no statistics."""
    return "c" if math.prod(shape) else f"{name}!"


def _batch_norm(training_at: int | None, training: bool = True) -> Builder:
    """Return a builder for batch norm. ``training_at``: the position of the op's argument
    ``training``; if it is None, the op has no such argument, and ``training`` is its mode."""

    def build(call: OpCall) -> Rule:
        """Return the rule ``n! c x0!, c, c, c, c -> n! c x0!, c, c, c, c``; z0, z1, ... are dims of
        statistics that the op does not save."""
        trains = training if training_at is None else bool(call.args[training_at])
        x = _image(len(call.operands[0].shape), trains)
        left = [x, *("c" for _ in call.operands[1:])]
        right = [x]
        # In evaluation the op returns its running statistics unchanged.
        same = "" if trains else " ".join(f"~{f}" for f in x.split() if f != "c")
        for i, meta in enumerate(call.results[1:]):
            saved = "" if meta is None else _per_channel(meta.shape, f"z{i}")
            right.append(f"{saved} {same}")
        text = f"{', '.join(left)} -> {', '.join(right)}"
        return make(call, text, localize=unless_empty() if trains else None)

    return build


def _batch_norm_backward(training_at: int) -> Builder:
    """Return a builder for the backward of batch norm. ``training_at``: the position of the op's
    argument ``training``."""

    def build(call: OpCall) -> Rule:
        """Return the rule ``n! c x0!, n! c x0!, c, ... -> n! c x0!, c, c``; z0, z1, ... are dims of
        statistics that the forward did not save."""
        x = _image(len(call.operands[0].shape), bool(call.args[training_at]))
        left = [x, x]
        for i, meta in enumerate(call.operands[2:]):
            left.append(_per_channel(meta.shape, f"z{i}"))
        text = f"{', '.join(left)} -> {x}, c, c"
        return make(call, text, linear=((0,),), localize=unless_empty())

    return build


def _in_parts(result: str | None, linear: tuple[tuple[int, ...], ...] = ()) -> Builder:
    """Return a builder for an op of ops/batch_norm.py, which takes images, then vectors over
    channels. ``result``: the term of its result; None: the result is an image."""

    def build(call: OpCall) -> Rule:
        x = _image(len(call.operands[0].shape), training=False)
        left = ", ".join(x if len(m.shape) > 1 else "c" for m in call.operands)
        return make(call, f"{left} -> {x if result is None else result}", linear=linear)

    return build


def _group_terms(rank: int) -> tuple[str, str]:
    """Return the terms of x, [n, g * k, ...] with g groups, and of a vector over channels."""
    return f"n (g k!) {whole_dims('x', rank - 2)}", "(g k!)"


def _group_norm(call: OpCall) -> Rule:
    """Return the rule of group norm, in which groups split together with their channels."""
    args = positional(call)
    x, channels = _group_terms(len(call.operands[0].shape))
    left = [x, *(channels for _ in call.operands[1:])]
    text = f"{', '.join(left)} -> {x}, n g, n g"
    return make(
        call, text, localize=unless_empty(contiguous(_local_group_norm)), sizes={"g": args[6]}
    )


def _local_group_norm(call: OpCall, local: Local) -> OpCall:
    """Pass the rank's numbers of images, channels and groups."""
    args = positional(call)
    args[3:5] = local.operand_shape(0)[:2]
    args[6] = local.result_shape(1)[1]
    return retarget(call, call.target, *args)


def _group_norm_backward(call: OpCall) -> Rule:
    """Return the rule of (grad, x, mean, rstd, weight?) -> gradients of x, weight, bias."""
    args = positional(call)
    x, channels = _group_terms(len(call.operands[0].shape))
    left = [x, x, "n g", "n g", *(channels for _ in call.operands[4:])]
    text = f"{', '.join(left)} -> {x}, {channels}, {channels}"
    localize = unless_empty(contiguous(_local_group_norm_backward))
    return make(call, text, linear=((0,),), localize=localize, sizes={"g": args[8]})


def _local_group_norm_backward(call: OpCall, local: Local) -> OpCall:
    """Pass the rank's numbers of images, channels and groups."""
    args = positional(call)
    args[5:7] = local.operand_shape(0)[:2]
    args[8] = local.operand_shape(2)[1]
    return retarget(call, call.target, *args)


_NORMED_AND_STATISTIC = "... k!, ... 1"  # the normalised tensor and a statistic of each row

RULES: dict[str, Builder] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
    "aten._native_batch_norm_legit_functional.default": _batch_norm(5),
    "aten._native_batch_norm_legit.no_stats": _batch_norm(3),
    "aten._native_batch_norm_legit_no_training.default": _batch_norm(None, training=False),
    "aten._batch_norm_with_update_functional.default": _batch_norm(None),
    "aten._batch_norm_no_update.default": _batch_norm(None, training=False),
    "aten.native_batch_norm_backward.default": _batch_norm_backward(7),
    "aten.batch_norm_backward.default": _batch_norm_backward(7),
    "dt.bn_squares.default": _in_parts("c"),
    "dt.bn_sums.default": _in_parts("s! c", linear=((0,),)),
    "dt.bn_apply.default": _in_parts(None),
    "dt.bn_backward.default": _in_parts(None),
    "dt.rms_norm.default": pattern(f"... k!, k! -> {_NORMED_AND_STATISTIC}"),
    "dt.rms_norm_backward.default": pattern(
        "... k!, ... k!, ... 1, k! -> ... k!, k!", linear=((0,),)
    ),
    "dt.add_rms_norm.default": pattern(f"... k!, ... k!, k! -> ... k!, {_NORMED_AND_STATISTIC}"),
    "dt.add_layer_norm.default": pattern(
        f"... k!, ... k!, k!, k! -> ... k!, {_NORMED_AND_STATISTIC}, ... 1", localize=contiguous()
    ),
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
}
