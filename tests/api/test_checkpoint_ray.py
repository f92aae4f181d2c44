"""Checkpoints on Ray: ranks read and write files directly, not through the controller, and a rank
that is lost during a save fails the save by name."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.runtime.checkpoint import Checkpoint
from tests.chaos.disk import die_at, told
from tests.models import GPT, batch, loss_fn

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

TP: dict[str, Any] = {
    "*.up.*": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
    "embed.weight": dict(tp=dt.Row()),
}


class Wide(nn.Module):
    """A model with one large parameter, of which a step reads one row."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 1024)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).square().mean()


def trained(mesh: dt.Mesh, **stated: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = dt.parallelize(GPT(), mesh, **stated)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, dt.train_step(model, loss_fn, optimizer)


def test_steps_run_during_save_and_another_launch_resumes_from_it(tmp_path: Path) -> None:
    mesh = dt.Mesh(dp=2)
    model, optimizer, step = trained(mesh, zero={"dp": 3})
    with dt.launch(mesh, backend="ray"):
        for i in range(2):
            step(*batch(i))
        future = dt.save(tmp_path / "2", model, optimizer, extra={"next": 2})
        expected = [float(step(*batch(i))) for i in (2, 3)]
        assert future.get() == str(tmp_path / "2")
        found = dt.load(tmp_path / "2", model, optimizer)
        assert (found.step, found.extra) == (2, {"next": 2})
        assert [float(step(*batch(i))) for i in (2, 3)] == expected
    mesh = dt.Mesh(tp=2)
    model, optimizer, step = trained(mesh, placements=TP)
    with dt.launch(mesh, backend="ray"):
        step(*batch(0))
        dt.load(tmp_path / "2", model, optimizer)
        for i in (2, 3):
            loss = float(step(*batch(i)))
        assert loss == pytest.approx(expected[1], rel=1e-5)
        dt.save(tmp_path / "4", model, optimizer)
    whole = Checkpoint.open(tmp_path / "4")  # the launch has waited for it
    for name, value in model.module.state_dict().items():
        assert torch.equal(whole.read(f"model.{name}"), value)


def test_save_fails_by_name_when_rank_is_lost(tmp_path: Path) -> None:
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(Wide(60_000), mesh, {"table.weight": dict(tp=dt.Row())})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    step = dt.train_step(model, lambda model, x: model(x), optimizer)
    with pytest.raises(dt.daft.ActorLost) as caught, dt.launch(mesh, backend="ray") as session:
        step(torch.tensor([3]))
        dt.save(tmp_path / "1", model).get()
        float(step(torch.tensor([3])))
        told(session.cluster, 1, die_at, 60_000_000)  # type: ignore[arg-type]  # about half
        future = dt.save(tmp_path / "2", model)
        future.get()
    assert "rank 1" in str(caught.value)
    assert any("was not written" in note for note in caught.value.__notes__)
    assert os.listdir(tmp_path) == ["1"]
    with pytest.raises(RuntimeError, match="is lost"):
        model.module.table.weight.sum()
    dt.load(tmp_path / "1", model)
    stored = Checkpoint.open(tmp_path / "1").read("model.table.weight")
    assert torch.equal(model.module.table.weight, stored)


def test_controller_memory_does_not_grow_with_saved_state(tmp_path: Path) -> None:
    """Saves and loads 200 MB in a separate process; the controller's peak memory grows by less than
    64 MB."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.api.test_checkpoint_ray", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    grown = float(run.stdout.split()[-1])
    assert grown < 64, run.stdout


def measured(folder: str, mbytes: int = 200) -> float:
    """Return the growth in MB of the controller's peak memory while a state of ``mbytes`` is saved
    and loaded."""
    rows = mbytes * 1_000_000 // (3 * 4 * 1024)  # the parameter and AdamW's two
    mesh = dt.Mesh(tp=2)
    with torch.device("meta"):
        module = Wide(rows)
    model = dt.parallelize(module, mesh, {"table.weight": dict(tp=dt.Row())}, init="reset")
    optimizer = torch.optim.AdamW(module.parameters())
    step = dt.train_step(model, lambda model, x: model(x), optimizer)
    with dt.launch(mesh, backend="ray", bring_home=False):
        float(step(torch.tensor([3, 5])))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        dt.save(f"{folder}/1", model, optimizer).get()
        dt.load(f"{folder}/1", model, optimizer)
        float(step(torch.tensor([3, 5])))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / 1024


if __name__ == "__main__":
    print("MB", measured(sys.argv[1], *map(int, sys.argv[2:])))
