"""Sample calls of orders, searches, histograms and more reductions.

Rules of dtensor.sharding.rules.tables.sorting and reduce.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.certify.samples.draw import Draw, Sample, call
from tests.certify.samples.special import complex_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _sorted(d: Draw, dims: str) -> torch.Tensor:
    return d(dims).sort(-1).values


def _search_with_sorter(d: Draw) -> Call:
    x = d("a b")
    return call(x, d("a c"), sorter=x.argsort(-1))


def _norms() -> list[Sample]:
    return [
        lambda d: call(d("a b")),
        lambda d: call(d("a b"), 2, [1], True),
        lambda d: call(d("a b c"), 1, [1]),
        lambda d: call(d("a b c"), 0, [0, 2], True),
        lambda d: call(d("a b c"), math.inf, [1]),
        lambda d: call(complex_of(d, "a b"), math.inf, [1]),
        lambda d: call(d("a b c"), -math.inf),
        lambda d: call(d("a b c"), 3, [1]),
    ]


def _segments(d: Draw, reduce: str, **kwargs: Any) -> Call:
    """Rows 0..1, none, 2..4 of five."""
    lengths = torch.tensor([2, 0, 3])
    return call(d("5 a b"), reduce, lengths=lengths, axis=0, unsafe=True, **kwargs)


def _segments_of_each(d: Draw) -> Call:
    lengths = torch.tensor([2, 0, 3]).repeat(d.size("a"), 1)
    return call(d("a 5 b"), "sum", lengths=lengths, axis=1)


def _segments_backward(d: Draw, reduce: str) -> Call:
    x, lengths = d("5 a b"), torch.tensor([2, 0, 3])
    out = torch.segment_reduce(x, reduce, lengths=lengths, axis=0, unsafe=True, initial=0)
    return call(d("3 a b"), out, x, reduce, lengths=lengths, axis=0, initial=0)


_ORDERS: dict[str, list[Sample]] = {
    "aten.segment_reduce.default": [
        lambda d: _segments(d, "sum"),
        lambda d: _segments(d, "max", initial=1),
        lambda d: _segments(d, "mean", initial=0),
        _segments_of_each,
    ],
    "aten._segment_reduce_backward.default": [
        lambda d: _segments_backward(d, "sum"),
        lambda d: _segments_backward(d, "max"),
    ],
    "aten.argsort.stable": [lambda d: call(d("a b"), stable=True, dim=0)],
    "aten.msort.default": [lambda d: call(d("a b"))],
    "aten.kthvalue.default": [
        lambda d: call(d("a b"), 2),
        lambda d: call(d("a b c"), 1, 0, True),
    ],
    "aten.mode.default": [lambda d: call(d.ints("a b", 3)), lambda d: call(d("a b"), 0, True)],
    "aten.median.dim": [lambda d: call(d("a b c"), 1), lambda d: call(d("a b"), 0, True)],
    "aten.nanmedian.dim": [lambda d: call(d("a b c"), 1), lambda d: call(d("a b"), 0, True)],
    "aten.median.default": [lambda d: call(d("a b"))],
    "aten.nanmedian.default": [lambda d: call(d("a b"))],
    "aten.cummax.default": [lambda d: call(d("a b"), 1), lambda d: call(d("a b"), 0)],
    "aten.cummin.default": [lambda d: call(d("a b"), 1)],
    "aten.logcumsumexp.default": [lambda d: call(d("a b"), 1), lambda d: call(d("a b"), 0)],
    "aten.bucketize.Tensor": [
        lambda d: call(d("a b"), _sorted(d, "c")),
        lambda d: call(d("a b"), _sorted(d, "c"), out_int32=True, right=True),
    ],
    "aten.bucketize.Scalar": [lambda d: call(0.1, _sorted(d, "a"))],
    "aten.searchsorted.Tensor": [
        lambda d: call(_sorted(d, "a b"), d("a c")),
        lambda d: call(_sorted(d, "c"), d("a b"), right=True),
        _search_with_sorter,
    ],
    "aten.searchsorted.Scalar": [lambda d: call(_sorted(d, "a"), 0.1)],
    "aten.histc.default": [
        lambda d: call(d("a b"), 4, -1, 1),
        lambda d: call(d("a b"), 4),
    ],
    "aten.histogram.bin_ct": [lambda d: call(d("a b"), 4)],
    "aten.histogram.bins_tensor": [lambda d: call(d("a b"), _sorted(d, "4"))],
    "aten._histogramdd_bin_edges.default": [lambda d: call(d("a 2"), [2, 3])],
    "aten._histogramdd_from_bin_cts.default": [lambda d: call(d("a 2"), [2, 3])],
    "aten._histogramdd_from_bin_tensors.default": [
        lambda d: call(d("a 2"), [_sorted(d, "3"), _sorted(d, "4")])
    ],
    "aten.hash_tensor.default": [lambda d: call(d("a b"))],
    "aten.nonzero_static.default": [lambda d: call(d.ints("a b", 2), size=5)],
}

_REDUCTIONS: dict[str, list[Sample]] = {
    "aten.linalg_vector_norm.default": _norms(),
    "aten.std_mean.correction": [lambda d: call(d("a b"), [1], correction=0, keepdim=True)],
    "aten.count_nonzero.default": [
        lambda d: call(d.ints("a b", 2)),
        lambda d: call(d.ints("a b", 2), -1),
    ],
    "aten.count_nonzero.dim_IntList": [lambda d: call(d.ints("a b c", 2), [0, -1])],
    "aten.nansum.default": [
        lambda d: call(d("a b").log()),
        lambda d: call(d("a b").log(), [1], True),
    ],
    "aten.prod.default": [lambda d: call(d("a b"))],
}

ORDERING: dict[str, list[Sample]] = {**_ORDERS, **_REDUCTIONS}
