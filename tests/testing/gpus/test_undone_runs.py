"""Runs that fail on simulated GPUs: state, numbers and errors are those of CPUs, although the host
does not wait for the outcome of a run before it launches the next."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step.loss import Loss
from tests.api import test_bad_data as bad_data
from tests.api import test_interrupts as interrupts
from tests.testing.gpus.matrix import without_kernels
from tests.testing.gpus.needed import skip_without_compiler
from tests.testing.gpus.waits import PROGRAMS, RANKS, waits_of
from tests.training import Run, batches

skip_without_compiler()


def picky(x: Tensor) -> Tensor:
    """A user's kernel for the op of `bad_data`, which reads a value and raises on the host."""
    if (x == bad_data.RAISES).any():
        raise ValueError("picky does not like this")
    return x.clone()


PLACES = ("tp2", "pp2", "dp2_zero3", "one process")
CASES: list[tuple[str, str]] = list(itertools.product(PLACES, ("label", "op")))


@pytest.mark.default("one process-label")
@pytest.mark.parametrize(("placed", "fault"), CASES)
def test_failed_step_changes_nothing_and_has_error_of_cpus(
    placed: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loss, "done", lambda self: False)  # all steps run ahead
    placement = "tp2" if placed == "one process" else placed
    given: dict[str, Any] = dict(ahead=True, dropout=True, norm=placement == "tp2")
    launch: dict[str, Any] = dict(device="cuda")
    launch |= {} if placed == "one process" else dict(backend="ray")
    seed, kernel = CASES.index((placed, fault)), dt.kernel("bad_data::picky", "cuda")
    with without_kernels(), dt.testing.simulated_gpus(2, seed) as gpus, kernel.using(picky):
        found = bad_data.check(placement, fault, **given, launch=launch)
        report = gpus.report()
        assert not report.races and not report.early_frees
    (expected,) = bad_data.check(placement, fault, **given).errors
    (error,) = found.errors
    assert type(error) is type(expected) and repr(error.__cause__) == repr(expected.__cause__)
    for fact in ("rank", "stage", "line", "reason", "step"):
        assert getattr(error.failure, fact) == getattr(expected.failure, fact), fact
    assert re.search("run 2", str(error))


ONE_WAIT = [name for name in PROGRAMS if name.startswith(("training step", "a token"))]


@pytest.mark.default("training step, tp2")
@pytest.mark.parametrize("name", ONE_WAIT)
def test_host_waits_only_for_results_of_step(name: str) -> None:
    with without_kernels():
        waits = waits_of(PROGRAMS[name])
    assert all("pending_results.py" in wait.line for wait in waits), waits
    assert sum(waits.values()) <= RANKS, waits


@pytest.mark.slow
def test_next_steps_are_launched_before_host_waits_for_first() -> None:
    run, data = Run.of("tp2"), batches(5)
    gpus = dt.testing.simulated_gpus(1)
    with without_kernels(), gpus as simulated, dt.launch(run.mesh, device="cuda"):
        run.losses(data[:2])
        before = len(simulated.report().host_waits)
        losses = [run.step(*each) for each in data[2:]]
        assert len(simulated.report().host_waits) == before
        assert all(loss == loss for loss in map(float, losses))


class Net(interrupts.Net):
    """The simulator does not run the backward of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(4))
def test_interrupt_at_drawn_line_undoes_or_completes_step(
    draw: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "Net", Net)
    number = interrupts.signal.SIGINT
    handler = {number: interrupts.HANDLERS[number][0]}
    with without_kernels(), dt.testing.simulated_gpus(1, draw), interrupts.handled(handler):
        after, drawn = interrupts.states(device="cuda"), random.Random(draw)
        counted = interrupts.AtLine()
        interrupts.tried("step", counted, after, device="cuda")
        for _ in range(3):
            line = interrupts.AtLine(drawn.randint(1, counted.lines))
            interrupts.tried("step", line, after, device="cuda")
