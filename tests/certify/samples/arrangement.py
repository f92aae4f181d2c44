"""Sample calls of views that copy, partial writes, diagonals, windows, strides and creation.

Rules of dtensor.sharding.rules.tables.views, slice_and_cat, diagonals, create.
"""

from __future__ import annotations

from tests.certify.samples.draw import Sample, call, each, of

ARRANGEMENT: dict[str, list[Sample]] = {
    "aten._reshape_alias.default": [of("a 12", ["a", 3, 4], [12, 4, 1])],
    "aten.view_copy.default": [of("a 12", ["a", 3, 4])],
    "aten.expand_copy.default": [of("a 1", ["a", "b"])],
    "aten.permute_copy.default": [of("a b c", [2, 0, -2])],
    "aten.t_copy.default": [of("a b")],
    "aten.transpose_copy.int": [of("a b c", 0, -1)],
    "aten.unsqueeze_copy.default": [of("a b", 1)],
    "aten.squeeze_copy.default": [of("a 1 b")],
    "aten.squeeze_copy.dim": [of("a 1 b", 1)],
    "aten.squeeze_copy.dims": [of("a 1 b 1", [1, -1])],
    "aten.slice_copy.Tensor": [of("a 9", -1, 2, 7)],
    "aten.narrow_copy.default": [of("a 9", 1, 2, 5), of("a 9", 1, -4, 3)],
    "aten.select_copy.int": [of("a b c", 1, -1)],
    **each("split_copy.Tensor unsafe_split.Tensor", of("a 12", 4, 1)),
    **each(
        "split_with_sizes_copy.default unsafe_split_with_sizes.default", of("a 12", [6, 2, 4], 1)
    ),
    "aten.unbind_copy.int": [of("a b 3", -1)],
    "aten.slice_scatter.default": [
        of("a 9", "a 5", 1, 2, 7),
        of("a b", "a b", 0),
        of("a 7", "a 4", 1, 0, 9, 2),
        of("a 4", "a 0", 1, 2, 2),
    ],
    "aten.select_scatter.default": [of("a 3 b", "a b", 1, -1)],
    "aten.diagonal_scatter.default": [of("a 3 4 b", "a b 3", 1, 1, 2)],
    "aten.as_strided_scatter.default": [of("a 6", "2 3", [2, 3], [3, 1], 1)],
    "aten.diagonal.default": [of("a 3 4 b", 1, 1, 2), of("a b"), of("a 3 4", -1, -2, -1)],
    "aten.diagonal_copy.default": [of("a 3 4 b", -1, 2, 1)],
    "aten.diagonal_backward.default": [of("a b 3", ["a", 3, 4, "b"], 1, 1, 2)],
    "aten.diag_embed.default": [of("a b"), of("a b 3", 1, 0, 2)],
    "aten.cat.default": [
        lambda d: call([d("a b"), d("a c")], 1),
        lambda d: call([d("a 4"), d("a 4")], -1),
        lambda d: call([d("a b"), d("a 1"), d("a 0")], 1),
        lambda d: call([d("0"), d("a b"), d("a b")], 1),
    ],
    "aten.trace.default": [of("a b")],
    "aten.unfold.default": [of("a 7 b", 1, 3, 2), of("", 0, 1, 1)],
    "aten.unfold_copy.default": [of("a 7 b", -2, 2, 1)],
    "aten.unfold_backward.default": [of("a 3 b 3", ["a", 7, "b"], 1, 3, 2)],
    "aten.roll.default": [of("a b c", [1], [1]), of("a b c", [1, -2], [0, -1]), of("a b", [3])],
    "aten.as_strided.default": [of("a 6", [2, 3], [3, 1], 1)],
    "aten.resize.default": [of("4 6", [3, 2])],
    "aten.as_strided_copy.default": [of("a 6", [2, 2], [1, 2])],
    "aten.empty_strided.default": [of(["a", "b"], ["b", 1])],
    "aten.empty_permuted.default": [of(["a", "b"], [1, 0])],
    "aten.new_empty_strided.default": [
        of("a b", ["a", "b"], ["b", 1]),
        of("a b", ["b", "a"], [1, "b"]),
    ],
    "aten._efficientzerotensor.default": [of(["a", "b"])],
}
