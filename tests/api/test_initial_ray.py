"""On Ray, initial values and dropout masks are the same as in process, and the controller holds no
copy of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from tests.models import DropoutGPT, batch, loss_fn

pytestmark = pytest.mark.ray

MESH = dt.Mesh(tp=2)
PINS: dict[str, Any] = {
    "*.up.weight": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
    "embed.weight": dict(tp=dt.Row()),
}


class Wide(nn.Module):
    """A model of 50 million parameters, 200 MB."""

    def __init__(self, width: int = 2500, layers: int = 4) -> None:
        super().__init__()
        parts = [nn.Linear(width, width, bias=False) for _ in range(2 * layers)]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def _train() -> tuple[list[float], dict[str, Tensor]]:
    dt.manual_seed(3)
    with torch.device("meta"):
        model = DropoutGPT(0.2)
    model = dt.parallelize(model, MESH, PINS, init=lambda: DropoutGPT(0.2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, loss_fn, opt)
    losses = [float(step(*batch(i))) for i in range(3)]
    return losses, dt.gather_state_dict(model)["model"]


def _in_status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    line = next(
        text for text in Path("/proc/self/status").read_text().splitlines() if field in text
    )
    return int(line.split()[1]) << 10


def test_initial_values_on_ray_equal_in_process_without_controller_copy() -> None:
    losses, state = _train()
    with dt.launch(MESH, backend="ray", deadline_s=120):
        found, values = _train()
        assert found == losses
        assert all(torch.equal(values[name], state[name]) for name in state)
        pins = {f"parts.{i}.*": dict(tp=dt.Row() if i % 2 == 0 else dt.Column()) for i in range(8)}
        with torch.device("meta"):
            wide = Wide()
        model = dt.parallelize(wide, MESH, pins, init="reset")
        forward = dt.compile(lambda m, x: m(x), MESH)
        x = torch.ones(1, 2500)
        before = _in_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        y = forward(model, x).full_tensor()
        assert y.shape == (1, 2500) and float(y.abs().sum()) > 0
        assert _in_status("VmHWM") - before < 60 << 20
