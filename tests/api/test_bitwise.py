"""For one placement, interpreted and compiled modes, in-process and Ray backends give bitwise equal
results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.daft import Mode
from tests.training import Run, adamw, assert_same_bits, batches, make_model, sgd

DATA = batches(3, ignored=True)
SCHEDULES = {"tp4": dt.GPipe(2), "dp4": dt.GPipe(1)}


DTYPES = {"bf16": torch.bfloat16, "f64": torch.float64}


def build(case: str) -> Run:
    placed, _, dtype = case.partition(" ")
    make = sgd if placed in ("dp4", "tp2") and not dtype else adamw
    schedule = SCHEDULES.get(placed, dt.OneFOneB(2))
    module = make_model().to(DTYPES.get(dtype, torch.float32))
    return Run.of(placed, module=module, make=make, schedule=schedule)


def outcome(run: Run) -> dict[str, Any]:
    """Return losses, norms, the gradients of one more batch, and the full state."""
    losses = [run.step(*one) for one in DATA]
    return {
        "losses": [loss.tensor() for loss in losses],
        "norms": [loss.grad_norm for loss in losses],
        "gradients": run.step.gradients(*DATA[0]),
        **run.state(),
    }


def in_process(placed: str, mode: Mode) -> dict[str, Any]:
    run = build(placed)
    with dt.launch(run.mesh, mode=mode):
        return outcome(run)


@pytest.mark.slow
@pytest.mark.parametrize("placed", ["dp2", "tp4", "dp4", "tp2_pp2"])
def test_interpreted_mode_is_bitwise_equal_to_compiled_mode(placed: str) -> None:
    assert_same_bits(in_process(placed, "interpreted"), in_process(placed, "compiled"))


@pytest.mark.slow
def test_second_run_is_bitwise_equal_to_first() -> None:
    assert_same_bits(in_process("dp2_tp2", "compiled"), in_process("dp2_tp2", "compiled"))


@pytest.mark.ray
@pytest.mark.parametrize("placed", ["tp4", "dp4", "tp2_pp2", "dp4 bf16", "tp2_pp2 f64"])
def test_ray_backend_is_bitwise_equal_to_in_process(placed: str, ray_session: None) -> None:
    """Both modes run in one launch, each on its own copy of the model."""
    expected = in_process(placed, "compiled")
    runs = {mode: build(placed) for mode in ("compiled", "interpreted")}
    with dt.launch(runs["compiled"].mesh, backend="ray") as session:
        for mode, run in runs.items():
            session.mode = mode  # type: ignore[assignment]
            assert_same_bits(outcome(run), expected, mode)
        session.mode = "compiled"
        run = runs["compiled"]
        before = session.cluster.calls
        ahead = [run.step(*one) for one in DATA]
        assert session.cluster.calls - before == len(DATA) * run.mesh.size
        float(ahead[-1])
        run.state()
