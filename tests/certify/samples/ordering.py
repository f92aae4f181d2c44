"""Sample calls of orders, searches, histograms and more reductions.

Rules of dtensor.sharding.rules.tables.sorting and reduce.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.certify.samples.draw import Call, Draw, Sample, call, each, of


def _sorted(d: Draw, dims: str) -> torch.Tensor:
    return d(dims).sort(-1).values


def _search_with_sorter(d: Draw) -> Call:
    x = d("a b")
    return call(x, d("a c"), sorter=x.argsort(-1))


def _norms() -> list[Sample]:
    return [
        of("a b"),
        of("a b", 2, [1], True),
        of("a b c", 1, [1]),
        of("a b c", 0, [0, 2], True),
        of("a b c", math.inf, [1]),
        of("~a b", math.inf, [1]),
        of("a b c", -math.inf),
        of("a b c", 3, [1]),
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


ORDERING: dict[str, list[Sample]] = {
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
    "aten.argsort.stable": [of("a b", stable=True, dim=0)],
    **each("msort.default median.default nanmedian.default hash_tensor.default", of("a b")),
    "aten.kthvalue.default": [of("a b", 2), of("a b c", 1, 0, True)],
    "aten.mode.default": [of("a b:3"), of("a b", 0, True)],
    **each("median.dim nanmedian.dim", of("a b c", 1), of("a b", 0, True)),
    **each("cummax.default logcumsumexp.default", of("a b", 1), of("a b", 0)),
    "aten.cummin.default": [of("a b", 1)],
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
    "aten.histc.default": [of("a b", 4, -1, 1), of("a b", 4)],
    "aten.histogram.bin_ct": [of("a b", 4)],
    "aten.histogram.bins_tensor": [lambda d: call(d("a b"), _sorted(d, "4"))],
    **each("_histogramdd_bin_edges.default _histogramdd_from_bin_cts.default", of("a 2", [2, 3])),
    "aten._histogramdd_from_bin_tensors.default": [
        lambda d: call(d("a 2"), [_sorted(d, "3"), _sorted(d, "4")])
    ],
    "aten.nonzero_static.default": [of("a b:2", size=5)],
    "aten.linalg_vector_norm.default": _norms(),
    "aten.std_mean.correction": [of("a b", [1], correction=0, keepdim=True)],
    "aten.count_nonzero.default": [of("a b:2"), of("a b:2", -1)],
    "aten.count_nonzero.dim_IntList": [of("a b c:2", [0, -1])],
    "aten.nansum.default": [
        lambda d: call(d("a b").log()),
        lambda d: call(d("a b").log(), [1], True),
    ],
    "aten.prod.default": [of("a b")],
}
