"""Values sent to the ranks in pieces: how much of them the controller holds meanwhile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.daft.cluster.cluster import HostedCluster
from dtensor.errors import PlanningError

MESH = dt.Mesh(tp=2)
STATUS = Path("/proc/self/status")


def loss_fn(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def stepping(width: int, layers: int, **placements: Any) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    model = dt.parallelize(net, MESH, {"*.weight": placements})
    return dt.train_step(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-3))


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Record the bytes of each put, and whether it was waited for."""
    monkeypatch.setattr("dtensor.api.store.store.PIECE_BYTES", 2000)
    found: list[tuple[int, bool]] = []
    put = HostedCluster.put

    def noted(self: Any, values: Any, *, wait: bool = False, **given: Any) -> None:
        tensors = [v for own in values for v in own.values() if isinstance(v, Tensor)]
        found.append((sum(t.nbytes for t in tensors), wait))
        put(self, values, wait=wait, **given)

    monkeypatch.setattr(HostedCluster, "put", noted)
    return found


@pytest.mark.parametrize("placement", [dt.Row(), dt.Column(), dt.Replicate(), dt.Row(blocks=2)])
def test_values_are_sent_in_bounded_pieces_and_step_is_right(puts: Any, placement: Any) -> None:
    step = stepping(16, 5, tp=placement)
    plain = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(5)))
    plain.load_state_dict(step.model.module.state_dict())
    x = torch.randn(3, 16)
    with dt.launch(MESH):
        first = float(step(x))
        nbytes = 5 * 16 * 16 * 4 * (2 if placement == dt.Replicate() else 1)
        sent = [put for put in puts if put[0] > 1000]
        assert sum(n for n, _ in sent) == nbytes
        assert [wait for _, wait in sent] == [True] * (len(sent) - 1) + [sent[-1][0] >= 2000]
        assert len(sent) > 2 and all(n < 2000 + 1024 for n, _ in sent)
        state = dt.gather_state_dict(step.model, step.optimizer)
        puts.clear()
        dt.load_state_dict(step.model, step.optimizer, state)
        float(step(x))
        assert (
            sum(n for n, _ in puts) > 2 * nbytes
        )  # the optimizer's state; the weights are as before
        assert all(n < 2000 + 1024 for n, _ in puts)
    with torch.no_grad():
        assert first == pytest.approx(float(loss_fn(plain, x)), rel=1e-5)


def test_value_of_wrong_shape_fails_sending_and_next_call_works(puts: Any) -> None:
    step = stepping(16, 5, tp=dt.Row())
    x = torch.randn(3, 16)
    step.plan(x)
    last = step.model.module[4]
    before = last.weight
    with dt.launch(MESH):
        last.weight.data = torch.zeros(3, 16)
        with pytest.raises((PlanningError, TaskError), match=r"4\.weight"):
            step(x)
        last.weight.data = torch.eye(16)
        assert float(step(x)) > 0 and last.weight is before


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux")
@pytest.mark.parametrize("options", [{}, dict(snapshot_every=1)], ids=["plain", "kept"])
def test_controller_memory_stays_bounded_while_sending_weights(
    ray_session: None, options: Any
) -> None:
    """Of 256 MiB at most a fifth may be in flight."""
    step = stepping(2048, 16, tp=dt.Row())
    x = torch.randn(2, 2048)
    step.plan(x)
    with dt.launch(MESH, backend="ray", bring_home=False, **options):
        dt.compile(lambda x: x + 1, MESH)(torch.ones(2)).full_tensor()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is
        before = _mebibytes("VmRSS")
        loss = step(x)
        assert _mebibytes("VmHWM") - before < 96
        float(loss)


def _mebibytes(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) / 1024
