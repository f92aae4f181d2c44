"""No point of the space is better than what `search` finds: every one is planned.

A small model here; `python -m tests.api.search_brute` has five, with and without a limit.
"""

from __future__ import annotations

import pytest
import torch

from tests.extras import missing

pytest.importorskip("transformers", reason=missing("transformers"))

from tests.api.search_brute import NETWORKS, Case, judge, residual, square


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, limit", [(4, 12e6), (3, None)])
def test_nothing_of_the_space_is_better(num_ranks: int, limit: float | None) -> None:
    x = torch.empty(12, 256, device="meta")
    model, placements = residual(width=256, layers=3, x=x)
    case = Case(
        model=model,
        loss_fn=square,
        batch=(x, x),
        num_ranks=num_ranks,
        layers=("0", "1", "2"),
        tp=(1, 2, 4) if num_ranks == 4 else (1, 3),
        placements=placements,
        memory=12e6,
    )
    judged = judge(case, NETWORKS["slow"], limit, "time")
    assert judged.brute and judged.right and judged.alike == len(judged.brute)
    assert judged.num_planned < judged.num_points / 3
