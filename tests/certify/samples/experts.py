"""Samples of the ops of mixtures of experts: rows of t tokens, k slots each, by expert."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtensor.sharding.ops import experts as experts  # registers torch.ops.dt
from tests.certify.samples.draw import Call, Draw, Sample, call

Routing = Callable[[Draw, str], torch.Tensor]
"""Returns the ids [t, k] of a draw."""


def _uniform(d: Draw, dims: str) -> torch.Tensor:
    return d.ints(dims, d.size("e"))


def _to_one(d: Draw, dims: str) -> torch.Tensor:
    ids = d.ints(dims, 1) + d.size("e") - 1
    if d.variant == 0:
        ids[0] = 0  # with rows of one expert only, wrong strategies give right values by chance
    return ids


def _no_rows_for_some(d: Draw, dims: str) -> torch.Tensor:
    return d.ints(dims, (d.size("e") + 1) // 2)


def _without_expert(d: Draw, dims: str) -> torch.Tensor:
    return d.ints(dims, d.size("e"), -1)


def _every_expert(d: Draw, dims: str) -> torch.Tensor:
    if not d.size("e"):
        raise ValueError("a token has at least one slot")
    return torch.arange(d.size("e")).expand(d.size("t"), -1).contiguous()


ROUTINGS: tuple[Routing, ...] = (
    _uniform,
    _to_one,
    _no_rows_for_some,
    _without_expert,
    _every_expert,
)


class _Rows:
    """A route of a draw, with its rows."""

    def __init__(self, d: Draw, routing: Routing) -> None:
        d.shape("t e")  # the order in which sizes are drawn
        self.draw = d
        self.ids = routing(d, "t 2")
        self.t, self.k = self.ids.shape
        self.counts, _, self.slot = torch.ops.dt.route(self.ids, d.size("e"))

    def __call__(self, dims: str) -> torch.Tensor:
        """Return random rows; the rows past the counts are NaN, as no op may read them."""
        rows = self.draw(f"{self.t * self.k} {dims}")
        rows[int(self.counts.sum()) :] = float("nan")
        return rows


def _samples(make: Callable[[Draw, _Rows], Call]) -> list[Sample]:
    return [lambda d, r=r: make(d, _Rows(d, r)) for r in ROUTINGS]


def _weights(d: Draw, r: _Rows) -> torch.Tensor:
    return d(f"{r.t} {r.k}")


EXPERTS: dict[str, list[Sample]] = {
    "dt.route.default": _samples(lambda d, r: call(r.ids, d.size("e"))),
    "dt.take_rows.default": [
        *_samples(lambda d, r: call(d("t d"), r.slot, r.counts, None, r.k)),
        *_samples(lambda d, r: call(d("t d"), r.slot, r.counts, _weights(d, r), r.k)),
    ],
    "dt.add_rows.default": [
        *_samples(lambda d, r: call(r("d"), r.slot, r.counts, None, r.t, r.k)),
        *_samples(lambda d, r: call(r("d"), r.slot, r.counts, _weights(d, r), r.t, r.k)),
    ],
    "dt.slot_grads.default": _samples(
        lambda d, r: call(d("t d"), r("d"), r.slot, r.counts, r.t, r.k)
    ),
    "dt.expert_mm.default": [
        *_samples(lambda d, r: call(r("i"), d("e i o"), r.counts, None, r.k)),
        *_samples(lambda d, r: call(r("i"), d("e i o"), r.counts, d("e o"), r.k)),
    ],
    "dt.expert_outer.default": _samples(lambda d, r: call(r("i"), r("o"), r.counts, r.k)),
    "dt.expert_sum.default": _samples(lambda d, r: call(r("o"), r.counts, r.k)),
}
