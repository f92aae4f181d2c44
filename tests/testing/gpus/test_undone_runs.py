"""Runs that fail on simulated GPUs: state, numbers and errors are those of CPUs, although the host
does not wait for the outcome of a run before it launches the next."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from torch import Tensor

import dtensor as dt
from dtensor.api.step.loss import Loss
from dtensor.testing.gpus.guard import CompilerMissing, install
from tests.api import test_bad_data as bad_data
from tests.testing.gpus.matrix import without_kernels

try:
    install()
except CompilerMissing as error:
    pytest.skip(str(error), allow_module_level=True)


def picky(x: Tensor) -> Tensor:
    """A user's kernel for the op of `bad_data`, which reads a value and raises on the host."""
    if (x == bad_data.RAISES).any():
        raise ValueError("picky does not like this")
    return x.clone()


PLACES = ("tp2", "pp2", "dp2_zero3", "one process")
CASES = list(itertools.product(PLACES, ("label", "op")))


@pytest.mark.default("tp2-label", "one process-label")
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
