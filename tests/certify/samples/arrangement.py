"""Sample calls of views that copy, partial writes, diagonals, windows, strides and creation.

Rules of dtensor.sharding.rules.tables.views, slice_and_cat, diagonals, create.
"""

from __future__ import annotations

from tests.certify.samples.draw import Sample, call

_COPIES: dict[str, list[Sample]] = {
    "aten._reshape_alias.default": [lambda d: call(d("a 12"), [d.size("a"), 3, 4], [12, 4, 1])],
    "aten.view_copy.default": [lambda d: call(d("a 12"), [d.size("a"), 3, 4])],
    "aten.expand_copy.default": [lambda d: call(d("a 1"), [d.size("a"), d.size("b")])],
    "aten.permute_copy.default": [lambda d: call(d("a b c"), [2, 0, -2])],
    "aten.t_copy.default": [lambda d: call(d("a b"))],
    "aten.transpose_copy.int": [lambda d: call(d("a b c"), 0, -1)],
    "aten.unsqueeze_copy.default": [lambda d: call(d("a b"), 1)],
    "aten.squeeze_copy.default": [lambda d: call(d("a 1 b"))],
    "aten.squeeze_copy.dim": [lambda d: call(d("a 1 b"), 1)],
    "aten.squeeze_copy.dims": [lambda d: call(d("a 1 b 1"), [1, -1])],
    "aten.slice_copy.Tensor": [lambda d: call(d("a 9"), -1, 2, 7)],
    "aten.narrow_copy.default": [
        lambda d: call(d("a 9"), 1, 2, 5),
        lambda d: call(d("a 9"), 1, -4, 3),
    ],
    "aten.select_copy.int": [lambda d: call(d("a b c"), 1, -1)],
    "aten.split_copy.Tensor": [lambda d: call(d("a 12"), 4, 1)],
    "aten.split_with_sizes_copy.default": [lambda d: call(d("a 12"), [6, 2, 4], 1)],
    "aten.unsafe_split.Tensor": [lambda d: call(d("a 12"), 4, 1)],
    "aten.unsafe_split_with_sizes.default": [lambda d: call(d("a 12"), [6, 2, 4], 1)],
    "aten.unbind_copy.int": [lambda d: call(d("a b 3"), -1)],
}

_WRITES: dict[str, list[Sample]] = {
    "aten.slice_scatter.default": [
        lambda d: call(d("a 9"), d("a 5"), 1, 2, 7),
        lambda d: call(d("a b"), d("a b"), 0),
        lambda d: call(d("a 7"), d("a 4"), 1, 0, 9, 2),
        lambda d: call(d("a 4"), d("a 0"), 1, 2, 2),
    ],
    "aten.select_scatter.default": [lambda d: call(d("a 3 b"), d("a b"), 1, -1)],
    "aten.diagonal_scatter.default": [lambda d: call(d("a 3 4 b"), d("a b 3"), 1, 1, 2)],
    "aten.as_strided_scatter.default": [
        lambda d: call(d("a 6"), d("2 3"), [2, 3], [3, 1], 1),
    ],
}

_WALKS: dict[str, list[Sample]] = {
    "aten.diagonal.default": [
        lambda d: call(d("a 3 4 b"), 1, 1, 2),
        lambda d: call(d("a b")),
        lambda d: call(d("a 3 4"), -1, -2, -1),
    ],
    "aten.diagonal_copy.default": [lambda d: call(d("a 3 4 b"), -1, 2, 1)],
    "aten.diagonal_backward.default": [
        lambda d: call(d("a b 3"), [d.size("a"), 3, 4, d.size("b")], 1, 1, 2)
    ],
    "aten.diag_embed.default": [
        lambda d: call(d("a b")),
        lambda d: call(d("a b 3"), 1, 0, 2),
    ],
    "aten.cat.default": [
        lambda d: call([d("a b"), d("a c")], 1),
        lambda d: call([d("a 4"), d("a 4")], -1),
        lambda d: call([d("a b"), d("a 1"), d("a 0")], 1),
        lambda d: call([d("0"), d("a b"), d("a b")], 1),
    ],
    "aten.trace.default": [lambda d: call(d("a b"))],
    "aten.unfold.default": [
        lambda d: call(d("a 7 b"), 1, 3, 2),
        lambda d: call(d(""), 0, 1, 1),
    ],
    "aten.unfold_copy.default": [lambda d: call(d("a 7 b"), -2, 2, 1)],
    "aten.unfold_backward.default": [
        lambda d: call(d("a 3 b 3"), [d.size("a"), 7, d.size("b")], 1, 3, 2)
    ],
    "aten.roll.default": [
        lambda d: call(d("a b c"), [1], [1]),
        lambda d: call(d("a b c"), [1, -2], [0, -1]),
        lambda d: call(d("a b"), [3]),
    ],
    "aten.as_strided.default": [lambda d: call(d("a 6"), [2, 3], [3, 1], 1)],
    "aten.resize.default": [lambda d: call(d("4 6"), [3, 2])],
    "aten.as_strided_copy.default": [lambda d: call(d("a 6"), [2, 2], [1, 2])],
}

_CREATION: dict[str, list[Sample]] = {
    "aten.empty_strided.default": [lambda d: call(list(d.shape("a b")), [d.size("b"), 1])],
    "aten.empty_permuted.default": [lambda d: call(list(d.shape("a b")), [1, 0])],
    "aten.new_empty_strided.default": [
        lambda d: call(d("a b"), list(d.shape("a b")), [d.size("b"), 1]),
        lambda d: call(d("a b"), list(d.shape("b a")), [1, d.size("b")]),
    ],
    "aten._efficientzerotensor.default": [lambda d: call(list(d.shape("a b")))],
}

ARRANGEMENT: dict[str, list[Sample]] = {**_COPIES, **_WRITES, **_WALKS, **_CREATION}
