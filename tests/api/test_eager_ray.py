"""Eager DTensors on Ray: the same numbers, asynchronously, with failures that name the line."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from tests.api.eager import same
from tests.api.eager_training import MEGATRON, Transformer, equal, spread, train

pytestmark = pytest.mark.ray

TP2 = dt.Mesh(tp=2)


@pytest.fixture(autouse=True)
def allowed(ray_session: None) -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


def test_training_views_and_waiting() -> None:
    """One launch for all that needs no failure: starting actors takes seconds."""
    model = Transformer().double()
    x = torch.randn(6, 4)
    here = _written(x)
    with dt.launch(TP2, backend="ray") as session:
        parallel = spread(model, TP2, MEGATRON)
        wanted = train(model, torch.optim.AdamW, lambda x: x)
        got = train(parallel, torch.optim.AdamW, lambda x: dt.distribute(x, TP2))
        same(got, wanted, atol=1e-5)
        equal(parallel, model, 1e-5)

        assert torch.equal(_written(x), here)

        _an_op_returns_before_it_has_run(session)


def _written(x: torch.Tensor) -> torch.Tensor:
    d = dt.distribute(x, TP2, tp=dt.Row())
    d[1:].t()[0].mul_(2)
    d[0] = d.sum(0) * 0.3
    return (d @ d.t()).softmax(0).full_tensor()


def _an_op_returns_before_it_has_run(session: object) -> None:
    big = dt.distribute(torch.randn(900, 900), TP2)
    (big @ big).add_(1).sum().item()  # all programs are loaded
    start = time.perf_counter()
    y = big
    for _ in range(40):
        y = (big @ y).mul_(1e-2).add_(1)
    issued = time.perf_counter() - start
    y.sum().item()
    total = time.perf_counter() - start
    assert issued < total / 2, f"issued in {issued:.2f} s, done after {total:.2f} s"


def test_a_failure_names_the_line_that_issued_the_op() -> None:
    with pytest.raises(dt.daft.DaftError) as error, dt.launch(TP2, backend="ray"):
        table = dt.distribute(torch.randn(4, 3), TP2)
        good = dt.distribute(torch.tensor([0, 1]), TP2)
        bad = dt.distribute(torch.tensor([0, 7]), TP2)
        F.embedding(good, table)
        rows = F.embedding(bad, table)
        later = rows * 2
        later.full_tensor()
    text = str(error.value)
    assert "embedding" in text and "index out of range" in text and "rank" in text
    assert "test_eager_ray.py" in text and "rows = F.embedding(bad, table)" in text
