"""Programs over the mock of NCCL, on simulated GPUs: a sample of what gpu_programs.py runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import dtensor as dt
from dtensor.daft.ray.transports.nccl import NcclWire
from dtensor.testing.gpus.guard import CompilerMissing, install
from tests.daft.explore import exhaustive
from tests.daft.gpu_programs import disagreement, hangs, of_messages, training_step

try:
    install()
except CompilerMissing as error:
    pytest.skip(str(error), allow_module_level=True)


def test_the_verifier_agrees_with_nccl() -> None:
    programs = list(exhaustive(2, 2, "c"))[::20]
    assert [d for made in programs if (d := disagreement(made, (0, 1))) is not None] == []


@pytest.mark.parametrize(
    ("schedule", "v", "p"), [(dt.GPipe, 1, 2), (dt.LoopedBFS, 2, 2), (dt.OneFOneB, 1, 3)]
)
def test_the_messages_of_a_step_end(schedule: Callable[[int], dt.Schedule], v: int, p: int) -> None:
    program = training_step(schedule, v, p)
    assert [seed for seed in range(4) if hangs(of_messages(program, seed), seed)] == []


def test_a_first_message_within_a_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what `NcclWire.open` sends."""
    program = training_step(dt.GPipe, 1, 2)
    monkeypatch.setattr(NcclWire, "_connect", lambda *_: None)
    assert [seed for seed in range(4) if hangs(of_messages(program, seed), seed)] != []
