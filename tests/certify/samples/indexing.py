"""Sample calls of ops that read and write at indices (dtensor.sharding.rules.tables.indexing)."""

from __future__ import annotations

import torch

from tests.certify.samples.draw import Draw, Sample, call, of


def _permutation(d: Draw, size: str) -> torch.Tensor:
    return torch.randperm(d.size(size), generator=d.generator)


def _distinct(d: Draw, rows: str) -> torch.Tensor:
    """Two different columns of four for each row."""
    return torch.tensor([[1, 3]]).repeat(d.size(rows), 1)


_READS: list[Sample] = [
    lambda d: call(d("a b"), [None, d.ints("c", 2)]),
    lambda d: call(d("a b c"), [d.ints("a 1", 2), d.ints("2", 2)]),
    lambda d: call(d("a b 3 c"), [None, d.ints("c 2", 2), None, d.ints("2", 2)]),
    lambda d: call(d("a b 3"), [None, d.ints("c", 2), d.ints("", 3)]),
    lambda d: call(d("a b"), [d.ints("c", 2, -2).int()]),
]
_ADDS: list[Sample] = [
    lambda d: call(d("a b"), [None, d.ints("c", 2)], d("a c"), True),
    lambda d: call(d("a b"), [d.ints("c", 2, -2)], d("b"), True),
    lambda d: call(d("a b"), [d.ints("c", 2), d.ints("c", 2)], d(""), True),
    lambda d: call(d("a b 3"), [d.ints("c 1", 2), d.ints("2", 2)], d("c 2 3"), True),
]
_WRITES: list[Sample] = [
    lambda d: call(d("a b"), [None, _permutation(d, "b")], d("a b")),
    lambda d: call(d("a b"), [_permutation(d, "a")], d("a 1")),
    lambda d: call(d("a b"), [_permutation(d, "a")], d("")),
]


def _scatter_reduce(reduce: str, include_self: bool) -> Sample:
    return lambda d: call(
        d("a b"), 1, d.ints("a 3", 2), d("a 3"), reduce, include_self=include_self
    )


INDEXING: dict[str, list[Sample]] = {
    "aten.index.Tensor": [*_READS, lambda d: call(d("a b"), [d.ints("c 3", 2)])],
    "aten.index_put.default": [*_ADDS, *_WRITES],
    "aten._unsafe_masked_index.default": [
        lambda d: call(d("a b"), d.bools("c"), [None, d.ints("c", 2)], 1.5),
        lambda d: call(d("a b"), d.bools("c 3"), [d.ints("c 1", 2), d.ints("3", 2)], 0),
    ],
    "aten._unsafe_masked_index_put_accumulate.default": [
        lambda d: call(d("a b"), d.bools("a c"), [None, d.ints("c", 2)], d("a c")),
        lambda d: call(d("a b"), d.bools("c 3"), [d.ints("c 1", 2), d.ints("3", 2)], d("c 3")),
    ],
    "aten.index_select.default": [of("a b", 1, "c:2"), of("a b", 0, ":2"), of("", 0, "1:1")],
    "aten.gather.default": [of("a b", 1, "a 3:2"), of("a b", 1, "1 3:2"), of("", 0, ":1")],
    "aten.scatter_add.default": [
        of("a b", 1, "a 3:2", "a 3"),
        of("a b", 0, "c b:2", "c b"),
        of("a 7", 1, "a 3:7", "a 5"),
        of("", 0, ":1", ""),
    ],
    "aten.scatter.src": [
        lambda d: call(d("a 4"), 1, _distinct(d, "a"), d("a 2")),
        lambda d: call(d("a 4"), 1, _distinct(d, "1"), d("a 2")),
        # a cache of slots, heads, positions: each slot's place is its own
        lambda d: call(
            d("a b 4 c"), 2, d.ints("a 1 1 1", 4).expand(d.shape("a b 1 c")), d("a b 1 c")
        ),
        of("a b", 0, "1 b:2", "3 b"),
    ],
    "aten.scatter.value": [of("a b", 1, "a 1:2", 2.0), of("a b", 0, "1 b:2", 0)],
    "aten._unsafe_index.Tensor": _READS,
    "aten._unsafe_index_put.default": [*_ADDS, *_WRITES],
    "aten.index_add.default": [
        of("a b", 1, "c:2", "a c"),
        of("a b", 0, "c:2", "c b", alpha=2.5),
        of("a", 0, "c:1", "c"),
        of("a b:5", 0, "c:2", "c b:5"),
    ],
    "aten.index_copy.default": [
        lambda d: call(d("a b"), 1, _permutation(d, "b"), d("a b")),
        of("a b 4 c", 2, torch.tensor([3, 1]), "a b 2 c"),
        of("", 0, "1:1", "1"),
    ],
    "aten.index_fill.int_Scalar": [
        of("a b", 1, "c:2", 0.0),
        of("a b", 0, "c:2", 2.0),
        of("", 0, "1:1", 2.0),
    ],
    "aten.index_fill.int_Tensor": [of("a b", 1, "c:2", "")],
    "aten.index_reduce.default": [
        lambda d: call(d("a b"), 1, d.ints("c", 2), d("a c"), "prod"),
        lambda d: call(d("a b"), 0, d.ints("c", 2), d("c b"), "amax", include_self=False),
        lambda d: call(d("a b"), 0, d.ints("c", 2), d("c b"), "mean"),
    ],
    "aten.scatter.reduce": [
        of("a b", 1, "a 3:2", "a 3", reduce="multiply"),
        of("a b", 1, "1 3:2", "a 3", reduce="add"),
    ],
    "aten.scatter.value_reduce": [of("a b", 1, "a 3:2", 2.0, reduce="multiply")],
    "aten.scatter_reduce.two": [
        _scatter_reduce("sum", True),
        _scatter_reduce("sum", False),
        _scatter_reduce("amax", True),
        _scatter_reduce("mean", False),
        lambda d: call(d(""), 0, d.ints("", 1), d(""), "sum"),
    ],
    "aten.take.default": [of("a b", "c 3:4"), of("a b", ":4")],
    "aten.put.default": [
        of("a b", "c 2:4", "c 2", True),
        lambda d: call(d("a b"), _permutation(d, "a"), d("a")),
    ],
    "aten.repeat_interleave.Tensor": [of("a:4")],
    "aten.masked_scatter.default": [of("a b", "?a b", "a b c")],
    "aten.masked_scatter_backward.default": [of("a b", "?a b", ["a", "b"])],
}
