"""Kernels in Triton: without a GPU their numbers in the interpreter and their machine code, on one
their numbers there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch


@pytest.mark.slow
def test_numbers_in_the_interpreter() -> None:
    """In a process of its own, which an access out of bounds ends."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.sweep", "--quick"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": cases ") == 16, done.stdout


@pytest.mark.slow
def test_machine_code_for_sm_90() -> None:
    """For the others: python -m benchmarks.kernels --aot."""
    from tests.kernels import ahead

    table = list(ahead.rows(["sm_90"], ["aligned", "odd"]))
    assert {row[0] for row in table} == {*ahead.LEAST, "sum of partial results"}
    assert {row[1] for row in table} == {"aligned", "odd"}


@pytest.mark.gpu
def test_numbers_on_a_gpu() -> None:
    from tests.kernels.cases import cases

    failed: list[str] = []
    for case in cases(torch.device("cuda"), full=True):
        try:
            case.check()
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n".join(failed)
