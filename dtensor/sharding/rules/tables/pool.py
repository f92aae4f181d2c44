"""Rules of ops on planes of images: pooling, resizing, padding, sampling, patches, shuffles.

    max_pool2d_with_indices       "... x0! x1! -> ... y0! y1!, ... y0! y1!"
    grid_sampler_2d               "n c x0! x1!, n u v 2 -> n c u v"
    pixel_shuffle                 "... (c r! s!) h w -> ... c (h r!) (w s!)"

Batch and channels split freely; the planes are whole, as a window reaches over any cut. Indices
of a maximum count within its plane, so that they are the same on every rank.
"""

from __future__ import annotations

from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import Groups, make, retarget
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.planes import contiguous, planes, positional, unless_empty

_LINEAR: Groups = ((0,),)


def _local_input_size(call: OpCall, local: Local) -> OpCall:
    """Of a backward that is told the whole input's sizes, third."""
    args = positional(call)
    args[2] = list(local.result_shape())
    return retarget(call, call.target, *args)


def _sampler(rank: int) -> Builder:
    x = " ".join(f"x{i}!" for i in range(rank))
    y = " ".join(f"y{i}" for i in range(rank))

    def build(call: OpCall) -> Rule:
        text = f"n c {x}, n {y} w! -> n c {y}"
        return make(call, text, linear=_LINEAR, localize=unless_empty())

    return build


def _sampler_backward(rank: int) -> Builder:
    x = " ".join(f"x{i}!" for i in range(rank))
    y = " ".join(f"y{i}" for i in range(rank))

    def build(call: OpCall) -> Rule:
        text = f"n c {y}, n c {x}, n {y} w! -> n c {x}, n {y} w!"
        return make(call, text, linear=_LINEAR, localize=unless_empty())

    return build


def _im2col(call: OpCall) -> Rule:
    text = "... c x0! x1! -> ... (c k!) l!"
    return make(call, text, linear=_LINEAR, localize=unless_empty())


def _col2im(call: OpCall) -> Rule:
    text = "... (c k!) l! -> ... c x0! x1!"
    return make(call, text, linear=_LINEAR, localize=unless_empty())


def _pixel_shuffle(call: OpCall) -> Rule:
    factor: int = call.args[1]
    text = "... (c r! s!) h w -> ... c (h r!) (w s!)"
    sizes = {"r": factor, "s": factor}
    return make(call, text, linear=_LINEAR, localize=unless_empty(), sizes=sizes)


def _pixel_unshuffle(call: OpCall) -> Rule:
    factor: int = call.args[1]
    text = "... c (h r!) (w s!) -> ... (c r! s!) h w"
    sizes = {"r": factor, "s": factor}
    return make(call, text, linear=_LINEAR, localize=unless_empty(), sizes=sizes)


def _channel_shuffle(call: OpCall) -> Rule:
    rest = " ".join(f"d{i}" for i in range(len(call.operands[0].shape) - 2))
    text = f"n (g! k) {rest} -> n (k g!) {rest}"
    sizes = {"g": call.args[1]}
    return make(call, text, linear=_LINEAR, localize=unless_empty(), sizes=sizes)


RULES: dict[str, Builder] = {
    "aten.grid_sampler_2d.default": _sampler(2),
    "aten.grid_sampler_3d.default": _sampler(3),
    "aten.grid_sampler_2d_backward.default": _sampler_backward(2),
    "aten.grid_sampler_3d_backward.default": _sampler_backward(3),
    "aten.im2col.default": _im2col,
    "aten.col2im.default": _col2im,
    "aten.pixel_shuffle.default": _pixel_shuffle,
    "aten.pixel_unshuffle.default": _pixel_unshuffle,
    "aten.channel_shuffle.default": _channel_shuffle,
}

# Ops by the number of their planes' dims.
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


def _add(ops: dict[int, str], builder: dict[int, Builder]) -> None:
    for rank, names in ops.items():
        RULES.update({f"aten.{name}.default": builder[rank] for name in names.split()})


_RANKS = (1, 2, 3)
_add(_LINEAR_OPS, {r: planes(r, "x -> y", linear=_LINEAR) for r in _RANKS})
_add(_GRAD_AND_INPUT, {r: planes(r, "y, x -> x", linear=_LINEAR) for r in _RANKS})
_add(
    _GRAD_AND_SIZE,
    {r: planes(r, "y -> x", linear=_LINEAR, localize=_local_input_size) for r in _RANKS},
)
_add(_MAXIMA, {r: planes(r, "x -> y, y") for r in _RANKS})
_add(
    _MAXIMA_BACKWARD,
    {r: planes(r, "y, x, y -> x", linear=_LINEAR, localize=contiguous()) for r in _RANKS},
)
_add(_PLACED_AT_INDICES, {r: planes(r, "y, y -> x", linear=_LINEAR) for r in _RANKS})
