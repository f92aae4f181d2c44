"""Sample calls of the random ops: with one key, shards must be parts of the whole; see draw.py."""

from __future__ import annotations

import torch

from tests.certify.samples.draw import Draw, Sample, call

dt = torch.ops.dt
KEY = {"at_seed": 1 << 40 | 5, "at_step": 3, "op": 2}
Call = tuple[tuple[object, ...], dict[str, object]]


def _drawn(*more: object, dims: str = "a b", dtype: torch.dtype = torch.float32) -> Sample:
    return lambda d: call(list(d.shape(dims)), *more, dtype, **KEY)


def _backward(d: Draw) -> Call:
    return call(d("a b"), d.bools("a b"), 0.25)


RANDOM: dict[str, list[Sample]] = {
    "dt.dropout.default": [
        lambda d: call(d("a b"), 0.25, **KEY),
        lambda d: call(d("a b c"), 0.5, **KEY),
        lambda d: call(d("a"), 1.0, **KEY),
    ],
    "dt.dropout_add.default": [
        lambda d: call(d("a b"), d("a b"), 0.25, **KEY),
        lambda d: call(d("a b c"), d("a b c"), 0.5, **KEY),
        lambda d: call(d("a"), d("a"), 1.0, **KEY),
    ],
    "dt.dropout_backward.default": [_backward],
    "dt.random_integers.default": [_drawn(-3, 9, dtype=torch.int64)],
    "dt.random_normal.default": [_drawn(), _drawn(dims="a b c", dtype=torch.float64)],
    "dt.random_uniform.default": [_drawn(), _drawn(dims="a"), _drawn(dtype=torch.float64)],
}
