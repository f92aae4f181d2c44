"""`dtensor doctor --gpu` on simulated GPUs."""

from __future__ import annotations

import json

import pytest

import dtensor as dt
from dtensor.__main__ import main
from dtensor.kernels import built_in
from tests.testing.gpus.needed import skip_without_compiler

skip_without_compiler()


@pytest.mark.slow
def test_doctor_gpu_runs_all_checks_on_two_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    with dt.testing.simulated_gpus(2, seed=1) as gpus:
        status = main(["doctor", "--gpu", "--json"])
        report = gpus.report()
    lines = json.loads(capsys.readouterr().out)
    assert status == 0, [line for line in lines if line["state"] == "wrong"]
    names = [line["name"] for line in lines]
    kernels = {name.partition("::")[2] for name in built_in.TRITON}
    assert kernels <= set(names)
    assert {"cuda:0", "cuda:1", "streams", "one GPU", "pair", "two GPUs"} <= set(names)
    assert not report.races and not report.early_frees


@pytest.mark.slow
def test_doctor_gpu_names_failing_check(capsys: pytest.CaptureFixture[str]) -> None:
    with dt.testing.simulated_gpus(1, fails_at=4):
        assert main(["doctor", "--gpu", "--json"]) == 1
    wrong = [line for line in json.loads(capsys.readouterr().out) if line["state"] == "wrong"]
    assert wrong and "OutOfMemoryError" in wrong[0]["found"]


def test_doctor_gpu_without_gpu_fails_with_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu", "--json"]) == 1
    (wrong,) = [line for line in json.loads(capsys.readouterr().out) if line["state"] == "wrong"]
    assert wrong["name"] == "cuda" and "sees none" in wrong["found"]
