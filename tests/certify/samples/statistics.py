"""Sample calls of batch norm's written-out form."""

from __future__ import annotations

from tests.certify.samples.draw import Sample, call

STATISTICS: dict[str, list[Sample]] = {
    "dt.bn_squares.default": [
        lambda d: call(d("n c 3"), d("c")),
        lambda d: call(d("n c"), d("c")),
    ],
    "dt.bn_sums.default": [
        lambda d: call(d("n c 3"), d("n c 3"), d("c")),
        lambda d: call(d("n c"), d("n c"), d("c")),
    ],
    "dt.bn_apply.default": [
        lambda d: call(d("n c 3"), d("c"), d("c"), d("c")),
        lambda d: call(d("n c"), d("c"), d("c"), d("c")),
    ],
    "dt.bn_backward.default": [
        lambda d: call(d("n c 3"), d("n c 3"), d("c"), d("c"), d("c"), d("c")),
        lambda d: call(d("n c"), d("n c"), d("c"), d("c"), d("c"), d("c")),
    ],
}
