"""Sample calls of ops of this library: random numbers (with one key, shards must be parts of the
whole), values that pass a check, batch norm written out."""

from __future__ import annotations

import torch

from tests.certify.samples.draw import Call, Draw, Sample, call, of

KEY = {"at_seed": 1 << 40 | 5, "at_step": 3, "op": 2}
F32, F64 = torch.float32, torch.float64


def _all_well(d: Draw, batch: str, inner: str) -> Call:
    ok = torch.ones(d.shape(batch), dtype=torch.bool)
    return call(d(f"{batch} {inner}"), ok, "a positive number is wanted, not")


def _sound(d: Draw, batch: str, inner: str) -> Call:
    info = torch.zeros(d.shape(batch), dtype=torch.int32)
    return call(d(f"{batch} {inner}"), info, "linalg.inv", not batch)


OWN: dict[str, list[Sample]] = {
    "dt.dropout.default": [of("a b", 0.25, **KEY), of("a b c", 0.5, **KEY), of("a", 1.0, **KEY)],
    "dt.dropout_add.default": [
        of("a b", "a b", 0.25, **KEY),
        of("a b c", "a b c", 0.5, **KEY),
        of("a", "a", 1.0, **KEY),
    ],
    "dt.dropout_backward.default": [of("a b", "?a b", 0.25)],
    "dt.random_integers.default": [of(["a", "b"], -3, 9, torch.int64, **KEY)],
    "dt.random_normal.default": [of(["a", "b"], F32, **KEY), of(["a", "b", "c"], F64, **KEY)],
    "dt.random_uniform.default": [
        *(of(dims, dtype, **KEY) for dims, dtype in ((["a", "b"], F32), (["a"], F32))),
        of(["a", "b"], F64, **KEY),
    ],
    "dt.checked.default": [
        lambda d, b=b, i=i: _all_well(d, b, i) for b, i in (("a b", ""), ("a", "c"), ("", "c"))
    ],
    "dt.linalg_checked.default": [
        lambda d, b=b, i=i: _sound(d, b, i) for b, i in (("a b", "c c"), ("a", "c"), ("", "c c"))
    ],
    "dt.bn_squares.default": [of("n c 3", "c"), of("n c", "c")],
    "dt.bn_sums.default": [of("n c 3", "n c 3", "c"), of("n c", "n c", "c")],
    "dt.bn_apply.default": [of("n c 3", "c", "c", "c"), of("n c", "c", "c", "c")],
    "dt.bn_backward.default": [
        of("n c 3", "n c 3", "c", "c", "c", "c"),
        of("n c", "n c", "c", "c", "c", "c"),
    ],
}
