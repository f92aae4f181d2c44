"""Eager DTensors on Ray: the same numbers, asynchronously, with failures that name the line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor.daft import Call
from tests.api.eager import same
from tests.api.eager_training import MEGATRON, Transformer, equal, spread, train
from tests.chaos.actors import wait_for_file
from tests.daft.programs import function, program

pytestmark = pytest.mark.ray

TP2 = dt.Mesh(tp=2)


@pytest.fixture(autouse=True)
def allowed(ray_session: None) -> Iterator[None]:
    with dt.implicit_redistribution("allow"):
        yield


def test_training_views_and_waiting(tmp_path: Path) -> None:
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

        _an_op_returns_before_it_has_run(session, tmp_path / "go")


def _written(x: torch.Tensor) -> torch.Tensor:
    d = dt.distribute(x, TP2, tp=dt.Row())
    d[1:].t()[0].mul_(2)
    d[0] = d.sum(0) * 0.3
    return (d @ d.t()).softmax(0).full_tensor()


def _an_op_returns_before_it_has_run(session: Any, go: Path) -> None:
    """The actors wait for a file while 40 ops are issued; ops that waited would wait for ever."""
    x = torch.randn(4, 4)
    big, y = (dt.distribute(x, TP2) for _ in range(2))
    source = "def forward():\n    wait_for_file(go)\n    return ()"
    wait = function("wait", source, wait_for_file=wait_for_file, go=str(go))
    handle = session.cluster.load(program(*[[Call("wait", (), ())]] * 2, functions=[wait]))
    held = session.cluster.run(handle, [{}, {}])
    for _ in range(40):
        y = (big @ y).mul_(1e-2).add_(1)
    assert not held.done()
    go.touch()
    expected = x
    for _ in range(40):
        expected = (x @ expected).mul_(1e-2).add_(1)
    torch.testing.assert_close(y.full_tensor(), expected)


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
