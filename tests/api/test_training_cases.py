"""Training matches the losses, weights and optimizer state of plain torch in each row of
`tests/golden/training_cases.txt` (tests/api/training_cases.py explains the columns)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.api.training_cases import LIMITS, case_of, covered, rows, wanted
from tests.training import assert_trains_as_torch

ROWS = rows()
ON_RAY = [pytest.mark.ray, pytest.mark.default]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=ON_RAY if row["backend"] == "ray" else [])
        for name, row in ROWS.items()
    ],
)
def test_training_case_matches_torch(
    row: Mapping[str, str], request: pytest.FixtureRequest
) -> None:
    if row["backend"] == "ray":
        request.getfixturevalue("ray_session")
    case = case_of(row)
    assert_trains_as_torch(
        case.placed,
        case.data,
        build=case.build,
        make=case.make,
        loss=case.loss,
        **LIMITS[row["dtype"]],
        **case.stated,
    )


def test_training_cases_cover_each_pair_of_values() -> None:
    """If this fails, run `python -m tests.api.training_cases --write`."""
    assert wanted() <= covered([*ROWS.values()])
