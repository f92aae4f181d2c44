"""What `zero=` must not state."""

from __future__ import annotations

import pytest

import dtensor as dt
from tests.training import TWO_STAGES, make_model


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"dp": 4}, "the level is 1"),
        ({"dp": True}, "the level is 1"),
        ({"tp": 1, "dp": 1}, "names 2 axes"),
        ({"ep": 1}, "has no axis 'ep'"),
        ({"pp": 1}, "holds the pipeline's stages"),
    ],
)
def test_what_is_refused(zero: dict[str, int], message: str) -> None:
    mesh = dt.Mesh(pp=2, dp=2, tp=1)
    with pytest.raises(dt.PlanningError, match=message):
        dt.parallelize(make_model(), mesh, {}, stages=TWO_STAGES, zero=zero)


def test_one_rank_has_nothing_to_split_over() -> None:
    model = dt.parallelize(make_model(), dt.Mesh(dp=1), {}, zero={"dp": 3})
    assert model.zero is None
