"""Rules of ops on planes of images: pooling, resizing, padding, sampling, patches, shuffles.

    max_pool2d_with_indices       "... x0! x1! -> ... y0! y1!, ... y0! y1!"
    grid_sampler_2d               "n c x0! x1!, n u v 2 -> n c u v"
    pixel_shuffle                 "... (c r! s!) h w -> ... c (h r!) (w s!)"
    planes(2, "x -> y, y")        a short form of the first pattern, which most entries use

Batch and channels split freely. The planes are whole, because windows cross any cut of a plane. The
index of a maximum is a position in its plane, so it is the same on every rank.
"""

from __future__ import annotations

import re

from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.rules.build import Groups, full_names, make, pattern, retarget, whole_dims
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import contiguous, positional, unless_empty

_LINEAR: Groups = ((0,),)


def planes(
    rank: int, form: str, *, linear: Groups = (), localize: Localizer | None = None
) -> Builder:
    """Return a builder for ops on planes of ``rank`` dims. ``form`` is a pattern in which x and y
    stand for whole tensors; tensors with the same letter have planes of the same size."""
    text = re.sub("[xy]", lambda plane: f"... {whole_dims(plane[0], rank)}", form)
    return pattern(text, linear=linear, localize=unless_empty(localize))


def _linear(text: str) -> Builder:
    return pattern(text, linear=_LINEAR, localize=unless_empty())


def _sampler(rank: int, backward: bool = False) -> Builder:
    x, y = whole_dims("x", rank), " ".join(f"y{i}" for i in range(rank))
    if backward:
        return _linear(f"n c {y}, n c {x}, n {y} w! -> n c {x}, n {y} w!")
    return _linear(f"n c {x}, n {y} w! -> n c {y}")


def _pixels(text: str) -> Builder:
    """Return a builder for a pixel shuffle, in whose pattern ``r`` and ``s`` are the factors by
    which a plane grows or shrinks."""

    def build(call: OpCall) -> Rule:
        sizes = {"r": call.args[1], "s": call.args[1]}
        return make(call, text, linear=_LINEAR, localize=unless_empty(), sizes=sizes)

    return build


def _local_input_size(call: OpCall, local: Local) -> OpCall:
    """Replace the input's sizes, the third argument of a backward op, by the shard's sizes."""
    args = positional(call)
    args[2] = list(local.result_shape())
    return retarget(call, call.target, *args)


def _channel_shuffle(call: OpCall) -> Rule:
    plane = " ".join(f"d{i}" for i in range(len(call.operands[0].shape) - 2))
    text = f"n (g! k) {plane} -> n (k g!) {plane}"
    sizes = {"g": call.args[1]}
    return make(call, text, linear=_LINEAR, localize=unless_empty(), sizes=sizes)


RULES: dict[str, Builder] = {
    "aten.grid_sampler_2d.default": _sampler(2),
    "aten.grid_sampler_3d.default": _sampler(3),
    "aten.grid_sampler_2d_backward.default": _sampler(2, backward=True),
    "aten.grid_sampler_3d_backward.default": _sampler(3, backward=True),
    "aten.im2col.default": _linear("... c x0! x1! -> ... (c k!) l!"),
    "aten.col2im.default": _linear("... (c k!) l! -> ... c x0! x1!"),
    "aten.pixel_shuffle.default": _pixels("... (c r! s!) h w -> ... c (h r!) (w s!)"),
    "aten.pixel_unshuffle.default": _pixels("... c (h r!) (w s!) -> ... (c r! s!) h w"),
    "aten.channel_shuffle.default": _channel_shuffle,
}

# Each table maps the number of dims of a plane to names of ops.
_LINEAR_OPS = {
    1: """avg_pool1d adaptive_avg_pool1d upsample_nearest1d _upsample_nearest_exact1d
        upsample_linear1d reflection_pad1d replication_pad1d""",
    2: """avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d upsample_nearest2d
        _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa reflection_pad2d replication_pad2d""",
    3: """avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d upsample_nearest3d
        _upsample_nearest_exact3d upsample_trilinear3d reflection_pad3d replication_pad3d""",
}
_GRAD_AND_INPUT = {
    1: "reflection_pad1d_backward replication_pad1d_backward",
    2: """avg_pool2d_backward _adaptive_avg_pool2d_backward reflection_pad2d_backward
        replication_pad2d_backward""",
    3: """avg_pool3d_backward _adaptive_avg_pool3d_backward reflection_pad3d_backward
        replication_pad3d_backward""",
}
_GRAD_AND_SIZE = {
    1: """upsample_nearest1d_backward _upsample_nearest_exact1d_backward
        upsample_linear1d_backward""",
    2: """upsample_nearest2d_backward _upsample_nearest_exact2d_backward
        upsample_bilinear2d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa_backward""",
    3: """upsample_nearest3d_backward _upsample_nearest_exact3d_backward
        upsample_trilinear3d_backward""",
}
_MAXIMA = {
    2: "max_pool2d_with_indices adaptive_max_pool2d",
    3: "max_pool3d_with_indices adaptive_max_pool3d",
}
_MAXIMA_BACKWARD = {
    2: "max_pool2d_with_indices_backward adaptive_max_pool2d_backward",
    3: "max_pool3d_with_indices_backward adaptive_max_pool3d_backward",
}
_PLACED_AT_INDICES = {2: "max_unpool2d", 3: "max_unpool3d"}


def _add_rules(
    ops: dict[int, str], form: str, linear: Groups = _LINEAR, localize: Localizer | None = None
) -> None:
    """Add the rule `planes` to RULES for ops by the number of dims of their planes."""
    for rank, names in ops.items():
        builder = planes(rank, form, linear=linear, localize=localize)
        RULES.update(dict.fromkeys(full_names(names), builder))


_add_rules(_LINEAR_OPS, "x -> y")
_add_rules(_GRAD_AND_INPUT, "y, x -> x")
_add_rules(_GRAD_AND_SIZE, "y -> x", localize=_local_input_size)
_add_rules(_MAXIMA, "x -> y, y", linear=())
_add_rules(_MAXIMA_BACKWARD, "y, x, y -> x", localize=contiguous())
_add_rules(_PLACED_AT_INDICES, "y, y -> x")
