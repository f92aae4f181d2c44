"""Sample calls of the ops that pass a value through a check; see draw.py."""

from __future__ import annotations

import torch

from tests.certify.samples.draw import Draw, Sample, call

Call = tuple[tuple[object, ...], dict[str, object]]


def _sound(d: Draw, batch: str, inner: str) -> Call:
    info = torch.zeros(d.shape(batch), dtype=torch.int32)
    return call(d(f"{batch} {inner}"), info, "linalg.inv", not batch)


def _all_well(d: Draw, batch: str, inner: str) -> Call:
    ok = torch.ones(d.shape(batch), dtype=torch.bool)
    return call(d(f"{batch} {inner}"), ok, "a positive number is wanted, not")


CHECKED: dict[str, list[Sample]] = {
    "dt.checked.default": [
        lambda d: _all_well(d, "a b", ""),
        lambda d: _all_well(d, "a", "c"),
        lambda d: _all_well(d, "", "c"),
    ],
    "dt.linalg_checked.default": [
        lambda d: _sound(d, "a b", "c c"),
        lambda d: _sound(d, "a", "c"),
        lambda d: _sound(d, "", "c c"),
    ],
}
