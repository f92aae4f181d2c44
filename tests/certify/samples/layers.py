"""Sample calls of layers: convolutions, pooling, resizing, padding, norms over channels, attention.

See draw.py; planes have fixed sizes, so that windows fit into them.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.certify.samples.draw import Call, Draw, Sample, call, of

aten = torch.ops.aten

_POINTS = {1: "7", 2: "7 6", 3: "4 5 4"}


# -- convolution ---------------------------------------------------------------------------------


def _convolution(
    d: Draw, rank: int, *, groups: int = 1, transposed: bool = False, biased: bool = True
) -> Call:
    """Images n; groups of i input and o output channels; a kernel of size 3 or 2."""
    d.size("n")
    i, o = d.size("i") * groups, d.size("o") * groups
    kernel = " ".join(["3", "2", "2"][:rank])
    x = d(f"n {i} {_POINTS[rank]}")
    weight = d(f"{i} o {kernel}") if transposed else d(f"{o} i {kernel}")
    bias = d(f"{o}") if biased else None
    settings = [[2, 1, 1][:rank], [1] * rank, [1] * rank, transposed, [0] * rank, groups]
    return call(x, weight, bias, *settings)


def _pointwise_convolution(d: Draw) -> Call:
    """A kernel of size 1, so that the plane can be split."""
    x, weight = d("n i 5 6"), d("o i 1 1")
    return call(x, weight, d("o"), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def _backward(forward: Call, d: Draw, mask: list[bool]) -> Call:
    x, weight, bias, *settings = forward[0]
    y = aten.convolution(x, weight, bias, *settings)
    grad = d(" ".join(map(str, y.shape)))
    return call(grad, x, weight, [y.shape[1]], *settings, mask)


_CONVOLUTIONS: list[Sample] = [
    lambda d: _convolution(d, 2),
    lambda d: _convolution(d, 1, biased=False),
    lambda d: _convolution(d, 1, groups=4),
    lambda d: _convolution(d, 1, transposed=True),
    lambda d: _convolution(d, 1, groups=3, transposed=True),
    _pointwise_convolution,
]

CONVOLUTION: dict[str, list[Sample]] = {
    "aten.convolution.default": [*_CONVOLUTIONS, lambda d: _convolution(d, 3, groups=2)],
    "aten.convolution_backward.default": [
        lambda d: _backward(_convolution(d, 2), d, [True, True, True]),
        lambda d: _backward(_convolution(d, 1, groups=4), d, [True, True, True]),
        lambda d: _backward(_convolution(d, 1, transposed=True), d, [True, True, True]),
        lambda d: _backward(_convolution(d, 1, groups=2, transposed=True), d, [True, True, True]),
        lambda d: _backward(_pointwise_convolution(d), d, [True, True, True]),
        lambda d: _backward(_convolution(d, 1), d, [False, True, False]),
    ],
}


# -- planes ----------------------------------------------------------------------------------------


def _planes(d: Draw, rank: int) -> torch.Tensor:
    return d(f"n c {_POINTS[rank]}")


def _like(d: Draw, x: torch.Tensor) -> torch.Tensor:
    return d(" ".join(map(str, x.shape)))


def _with_gradient(name: str, rank: int, *args: Any) -> dict[str, list[Sample]]:
    """op(x, *args), and its backward(grad, x, *args)."""
    op = getattr(aten, name).default

    def backward(d: Draw) -> Call:
        x = _planes(d, rank)
        return call(_like(d, op(x, *args)), x, *args)

    forward = of(f"n c {_POINTS[rank]}", *args)
    return {f"aten.{name}.default": [forward], f"aten.{name}_backward.default": [backward]}


def _resized(name: str, rank: int, *more: Any) -> dict[str, list[Sample]]:
    """op(x, size, ...), and its backward(grad, size, the input's size, ...)."""
    op = getattr(aten, name).default
    size = [5, 9, 3][:rank]

    def backward(d: Draw) -> Call:
        x = _planes(d, rank)
        return call(_like(d, op(x, size, *more)), size, list(x.shape), *more)

    forward = of(f"n c {_POINTS[rank]}", size, *more)
    return {f"aten.{name}.default": [forward], f"aten.{name}_backward.default": [backward]}


def _maxima(rank: int) -> dict[str, list[Sample]]:
    pool = getattr(aten, f"max_pool{rank}d_with_indices").default
    adaptive = getattr(aten, f"adaptive_max_pool{rank}d").default
    window = ([2] * rank, [2] * rank, [1] * rank, [1] * rank, True)
    unpool = [8, 8, 8][:rank]

    def pool_backward(d: Draw) -> Call:
        x = _planes(d, rank)
        y, indices = pool(x, *window)
        return call(_like(d, y), x, *window, indices)

    def adaptive_backward(d: Draw) -> Call:
        x = _planes(d, rank)
        y, indices = adaptive(x, [2] * rank)
        return call(_like(d, y), x, indices)

    def unpooled(d: Draw) -> Call:
        x = d(f"n c {' '.join(map(str, unpool))}")
        y, indices = pool(x, [2] * rank)
        more = ([2] * rank, [0] * rank) if rank == 3 else ()
        return call(y, indices, unpool, *more)

    return {
        f"aten.max_pool{rank}d_with_indices.default": [lambda d: call(_planes(d, rank), *window)],
        f"aten.max_pool{rank}d_with_indices_backward.default": [pool_backward],
        f"aten.adaptive_max_pool{rank}d.default": [lambda d: call(_planes(d, rank), [2] * rank)],
        f"aten.adaptive_max_pool{rank}d_backward.default": [adaptive_backward],
        f"aten.max_unpool{rank}d.default": [unpooled],
    }


def _pads(rank: int) -> dict[str, list[Sample]]:
    pad = [1, 2, 0, 1, 2, 1][: 2 * rank]
    return _with_gradient(f"reflection_pad{rank}d", rank, pad) | _with_gradient(
        f"replication_pad{rank}d", rank, pad
    )


def _averages(rank: int) -> dict[str, list[Sample]]:
    window = ([2] * rank, [2] * rank, [1] * rank, True, False, None)
    found = _with_gradient(f"avg_pool{rank}d", rank, *window)
    adaptive = _with_gradient(f"_adaptive_avg_pool{rank}d", rank, [2] * rank)
    found[f"aten._adaptive_avg_pool{rank}d.default"] = adaptive[
        f"aten._adaptive_avg_pool{rank}d.default"
    ]
    found[f"aten._adaptive_avg_pool{rank}d_backward.default"] = [
        lambda d: call(d(f"n c {' '.join('2' for _ in range(rank))}"), _planes(d, rank))
    ]
    found[f"aten.adaptive_avg_pool{rank}d.default"] = [
        lambda d: call(_planes(d, rank), [2] * rank),
        lambda d: call(d(f"c {_POINTS[rank]}"), [2] * rank),
    ]
    return found


def _sampling(rank: int) -> dict[str, list[Sample]]:
    where = ["3 4", "2 3 2"][rank - 2]

    def backward(d: Draw) -> Call:
        x, grid = _planes(d, rank), d(f"n {where} {rank}")
        return call(d(f"n c {where}"), x, grid, 0, 0, False, [True, True])

    return {
        f"aten.grid_sampler_{rank}d.default": [
            of(f"n c {_POINTS[rank]}", f"n {where} {rank}", 0, 1, False)
        ],
        f"aten.grid_sampler_{rank}d_backward.default": [backward],
    }


def _resizing() -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for rank in (1, 2, 3):
        found |= _resized(f"upsample_nearest{rank}d", rank)
        found |= _resized(f"_upsample_nearest_exact{rank}d", rank)
    found |= _resized("upsample_linear1d", 1, True)
    for name in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa"):
        found |= _resized(name, 2, False)
    found |= _resized("_upsample_bicubic2d_aa", 2, False)
    return found | _resized("upsample_trilinear3d", 3, True)


_PATCHES = ([2, 3], [1, 1], [1, 0], [2, 1])

PLANES: dict[str, list[Sample]] = {
    **_averages(2),
    **_averages(3),
    **_maxima(2),
    **_maxima(3),
    **_pads(1),
    **_pads(2),
    **_pads(3),
    **_sampling(2),
    **_sampling(3),
    **_resizing(),
    "aten.avg_pool1d.default": [lambda d: call(_planes(d, 1), [2], [2], [1], True, False)],
    "aten.adaptive_avg_pool1d.default": [lambda d: call(_planes(d, 1), [3])],
    "aten.im2col.default": [lambda d: call(_planes(d, 2), *_PATCHES), of("c 7 6", *_PATCHES)],
    "aten.col2im.default": [
        lambda d: call(aten.im2col(_planes(d, 2), *_PATCHES), [7, 6], *_PATCHES)
    ],
    "aten.pixel_shuffle.default": [lambda d: call(d(f"n {4 * d.size('c')} h w"), 2)],
    "aten.pixel_unshuffle.default": [
        lambda d: call(d(f"n c {2 * d.size('h')} {2 * d.size('w')}"), 2)
    ],
    "aten.channel_shuffle.default": [
        lambda d: call(d(f"n {3 * d.size('k')} 2 2"), 3),
        lambda d: call(d(f"n {2 * d.size('k')} h"), 2),
    ],
}


# -- norms -----------------------------------------------------------------------------------------


def _statistics(d: Draw) -> list[torch.Tensor]:
    """Weight, bias, running mean and variance."""
    return [d("c"), d("c"), d("c"), d.positive("c")]


def _batch_norm_backward(d: Draw, training: bool, mask: list[bool]) -> tuple[Any, ...]:
    x = d("n c 3")
    weight, bias, mean, var = _statistics(d)
    _, saved_mean, saved_invstd, *_ = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, training, 0.1, 1e-5
    )
    return d("n c 3"), x, weight, mean, var, saved_mean, saved_invstd, training, 1e-5, mask


def _group_norm(d: Draw, biased: bool) -> Call:
    """Three groups of k channels."""
    n, k = d.size("n"), d.size("k")
    channels = f"{3 * k}"
    weight, bias = (d(channels), d(channels)) if biased else (None, None)
    return call(d(f"n {channels} 2 2"), weight, bias, n, 3 * k, 4, 3, 1e-5)


def _group_norm_backward(d: Draw, biased: bool) -> Call:
    x, weight, bias, n, channels, points, groups, eps = _group_norm(d, biased)[0]
    _, mean, rstd = aten.native_group_norm(x, weight, bias, n, channels, points, groups, eps)
    mask = [True, biased, biased]
    return call(_like(d, x), x, mean, rstd, weight, n, channels, points, groups, mask)


_RESERVE = torch.empty(0, dtype=torch.uint8)

NORMS: dict[str, list[Sample]] = {
    "aten._native_batch_norm_legit_functional.default": [
        lambda d: call(d("n c 3 2"), *_statistics(d), True, 0.1, 1e-5),
        lambda d: call(d("n c 3 2"), *_statistics(d), False, 0.1, 1e-5),
        of("n c", None, None, "c", "+c", True, 0.1, 1e-5),
    ],
    "aten._native_batch_norm_legit.no_stats": [
        of("n c 3", "c", "c", True, 0.1, 1e-5),
        of("n c 3", None, None, True, 0.1, 1e-5),
    ],
    "aten._native_batch_norm_legit_no_training.default": [
        lambda d: call(d("n c 3"), *_statistics(d), 0.1, 1e-5),
        of("n c", None, None, "c", "+c", 0.1, 1e-5),
    ],
    "aten._batch_norm_with_update_functional.default": [
        lambda d: call(d("n c 3"), *_statistics(d), 0.1, 1e-5)
    ],
    "aten._batch_norm_no_update.default": [lambda d: call(d("n c 3"), *_statistics(d), 0.1, 1e-5)],
    "aten.native_batch_norm_backward.default": [
        lambda d: call(*_batch_norm_backward(d, True, [True, True, True])),
        lambda d: call(*_batch_norm_backward(d, False, [True, True, True])),
        lambda d: call(*_batch_norm_backward(d, True, [True, False, False])),
    ],
    "aten.batch_norm_backward.default": [
        lambda d: call(*_batch_norm_backward(d, True, [True, True, True]), _RESERVE),
        lambda d: call(*_batch_norm_backward(d, False, [True, True, True]), _RESERVE),
    ],
    "aten.native_group_norm.default": [
        lambda d: _group_norm(d, True),
        lambda d: _group_norm(d, False),
    ],
    "aten.native_group_norm_backward.default": [
        lambda d: _group_norm_backward(d, True),
        lambda d: _group_norm_backward(d, False),
    ],
}

LAYERS: dict[str, list[Sample]] = {**CONVOLUTION, **PLANES, **NORMS}
