"""`dt.trace()`: what ran in a launch, of several programs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import dtensor as dt


def double(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) * 2


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_runs_of_several_programs(tmp_path: Path) -> None:
    net, mesh, x = nn.Linear(8, 8), dt.Mesh(tp=2), torch.randn(4, 8)
    model = dt.parallelize(net, mesh, {"weight": dict(tp=dt.Column())})
    step = dt.train_step(model, loss, torch.optim.SGD(net.parameters(), lr=0.1))
    f = dt.compile(double, mesh)
    with dt.launch(mesh) as session:
        f(model, x)
        with dt.trace() as recording:
            first = time.monotonic()
            for _ in range(3):
                step(x)
            recording.note("judge", "score", first, time.monotonic())
            twice = f(model, x).full_tensor()
            with pytest.raises(RuntimeError, match="before the `with` block has ended"):
                recording.timeline()
        assert session.launch.cluster.recording is None
        step(x)  # is no part of it
        assert torch.allclose(f(model, x).full_tensor(), twice, atol=1) and twice.shape == (4, 8)
    timeline = recording.timeline()
    assert timeline.num_runs == {"loss": 3, "double": 1} and timeline.ranks == (0, 1)
    for rank in timeline.ranks:
        own = [span for (_, r), spans in timeline.spans.items() if r == rank for span in spans]
        assert all(0 <= span.begin <= span.end <= timeline.seconds for span in own)
        assert timeline.spent("double", rank) > 0 and timeline.spent("loss", rank) > 0
        assert 0 < timeline.busy(rank) < 1
    sent = [s for s in timeline.spans["double", 0] if s.track == "communication"]
    assert len(sent) == 1  # the all_reduce of the product
    assert "loss" in str(timeline) and "judge" not in str(timeline)
    picture = timeline._repr_svg_()
    for words in ("rank 0", "rank 1", "judge", "score", "double", "waits"):
        assert f">{words}<" in picture
    timeline.save(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    places = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert places == ["rank 0", "rank 1", "judge"]
    assert any(e["name"].startswith("double: ") and e["pid"] == 1 for e in events)


def test_a_run_that_was_undone_is_left_out() -> None:
    mesh = dt.Mesh(tp=2)
    f = dt.compile(lambda table, i: table[i], mesh)
    table, good, bad = torch.randn(4, 2), torch.tensor([1]), torch.tensor([7])
    with dt.launch(mesh), dt.trace() as recording:
        f(table, good)
        with pytest.raises(dt.daft.TaskError):
            f(table, bad).full_tensor()
    assert recording.timeline().num_runs == {"lambda": 1}


def test_mistakes() -> None:
    with pytest.raises(dt.PlanningError, match="in a launch"):
        dt.trace().__enter__()
    with (
        dt.launch(dt.Mesh()),
        dt.trace(),
        pytest.raises(dt.PlanningError, match="one recording at a time"),
    ):
        dt.trace().__enter__()
    recording = dt.trace()
    with pytest.raises(ValueError, match="mine"), dt.launch(dt.Mesh()), recording:
        raise ValueError("mine")
    with pytest.raises(RuntimeError, match="has ended well"):
        recording.timeline()
