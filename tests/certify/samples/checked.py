"""Sample calls of the ops that pass a value through a check; see draw.py."""

from __future__ import annotations

import torch

from tests.certify.samples.draw import Draw, Sample, call

Call = tuple[tuple[object, ...], dict[str, object]]


def _sound(d: Draw, batch: str, inner: str) -> Call:
    info = torch.zeros(d.shape(batch), dtype=torch.int32)
    return call(d(f"{batch} {inner}"), info, "linalg.inv", not batch)


CHECKED: dict[str, list[Sample]] = {
    "dt.linalg_checked.default": [
        lambda d: _sound(d, "a b", "c c"),
        lambda d: _sound(d, "a", "c"),
        lambda d: _sound(d, "", "c c"),
    ]
}
