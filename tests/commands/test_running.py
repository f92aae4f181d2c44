"""`dtensor run`, `calibrate`, `explore` and `doctor`, and how the command line ends."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor.__main__ as command_line
from dtensor.commands import doctor, plan, selftest
from tests.commands.conftest import Command

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_run_command_gives_same_losses_under_each_mesh(command: Command):
    line = "run tiny --batch 4 --length 8 --steps 2 --seed 3 --json --mesh"
    found = [json.loads(command(f"{line} {mesh}").out) for mesh in ("tp=1", "tp=2", "pp=2,dp=2")]
    for one in found[1:]:
        assert one["losses"] == pytest.approx(found[0]["losses"], rel=1e-5)
    assert found[0]["losses"][1] < found[0]["losses"][0]


def test_run_command_fails_if_loss_is_not_finite(command: Command):
    ran = command("run mlp.py:make --mesh dp=2 --optimizer SGD --lr 1e30 --steps 3")
    assert ran.status == 1
    assert ran.out.splitlines()[0] == "mlp: MLP, 2.1 k parameters in f32; a batch of f32[8,16]"
    assert ran.err.startswith("The loss of step 2 is inf.\nfix: a smaller --lr")


def test_plan_command_uses_topology_saved_by_calibrate(command: Command):
    assert command("calibrate --mesh dp=2 --save here.json").status == 0
    saved = json.loads(Path("here.json").read_text())
    assert sorted(saved["latency"]) == ["dp"]
    line = "plan mlp.py:make --mesh dp=2 --json --topology here.json"
    planned = json.loads(command(line).out)
    assert planned["topology"] == saved["name"]
    assert saved.pop("launch_latency") == 0  # files of before launch_latency
    Path("here.json").write_text(json.dumps(saved))
    assert json.loads(command(line).out)["seconds"] == planned["seconds"]
    Path("here.json").write_text(json.dumps({**saved, "bandwith": 3}))
    assert "fix: bandwidth" in command(line).err


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("what", ["calibrate", "run mlp.py:make"])
def test_too_few_gpus_error_is_one_sentence(command: Command, ray_session: None, what: str):
    ran = command(f"{what} --mesh dp=2 --backend ray --device cuda --ranks-per-actor 1")
    assert ran.status == 2
    assert "2 ranks in 2 actors on device 'cuda' need 2 free GPUs" in ran.err


def test_explore_command_writes_strategies_that_have_plan(command: Command):
    line = "explore mlp.py:make --placements none --mesh dp=2 --mesh pp=4 --mesh tp=2"
    ran = command(f"{line} -o plans.html")
    assert ran.status == 0
    assert ran.err.startswith("pp4 OneFOneB(8) has no plan: ")
    page = Path("plans.html").read_text()
    assert "dp2" in page and "tp2" in page and "pp4" not in page
    assert command(f"{line} -o plans.txt").err.endswith("fix: 'plans.html'\n")


def test_doctor_lists_components_and_passes_self_test(command: Command):
    found = {row["name"]: row for row in json.loads(command("doctor --no-ray --json").out)}
    assert found["self-test"]["state"] == "ok", found
    assert found["torch"]["found"] == metadata.version("torch")
    assert found["torch"]["note"] == "supported: >=2.11,<2.14"
    assert {"python", "ray", "triton", "transformers", "cores", "ports", "/dev/shm"} <= set(found)


def test_doctor_reports_wrong_losses_and_errors_of_gpu_training(monkeypatch: pytest.MonkeyPatch):
    """With a simulated GPU whose losses are close, wrong or NaN, or that raises."""
    assert list(doctor.on_gpu()) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {1.00001: "ok", 1.01: "wrong", math.nan: "wrong", None: "wrong"}
    for loss, state in found.items():

        def losses(backend: str, mesh: Any, device: str = "cpu", loss: Any = loss) -> list[float]:
            if loss is None:
                raise RuntimeError("no C compiler")
            return [loss if device == "cuda" else 1.0]

        monkeypatch.setattr(selftest, "losses", losses)
        (check,) = doctor.on_gpu()
        assert (check.state, check.name) == (state, "on the GPU"), check
    assert check.found == "RuntimeError: no C compiler"


@pytest.mark.gpu
def test_doctor_gpu_training_passes_on_this_gpu():
    (check,) = doctor.on_gpu()
    assert check.state == "ok", check


def test_doctor_names_missing_or_old_packages(command: Command, monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return {"torch": "2.10.1"}.get(name, "99.0" if name == "transformers" else "50.1")

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor, "in_process", lambda: iter(()))
    monkeypatch.setattr(doctor, "MIN_MEMORY", 0)  # what others leave is no matter here
    monkeypatch.setattr(doctor, "MIN_SHARED_MEMORY", 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    ran = command("doctor --no-ray")
    rows = {line.split()[1]: line for line in ran.out.splitlines() if line and line[0] in "ow"}
    assert ran.status == 1
    assert rows["torch"].startswith("wrong") and "pip install 'torch>=2.11,<2.14'" in rows["torch"]
    assert rows["ray"].startswith("warning") and "pip install 'dtensor[ray]'" in rows["ray"]
    assert rows["transformers"].startswith("warning")
    assert rows["cores"].startswith("warning") and "999" in rows["cores"]
    assert ran.out.endswith("1 wrong, 3 warnings.\n")


@pytest.mark.parametrize(
    ("version", "bounds", "kept"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.14.0rc1", ">=2.11,<2.14", False),
        ("2.9", ">=2.11,<2.14", False),
        ("3", ">=3.0", True),
        ("1.0.post1", "", True),
    ],
)
def test_version_is_within_bounds(version: str, bounds: str, kept: bool):
    assert doctor.within(version, bounds) == kept


def test_interrupted_command_prints_nothing(command: Command, monkeypatch: pytest.MonkeyPatch):
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run", interrupted)
    assert command("plan mlp.py:make --mesh tp=2") == (command_line.INTERRUPTED, "", "")


@pytest.mark.slow
def test_closed_output_pipe_is_no_error():
    """As in `dtensor plan --help | head -1`, when head exits before the output is written."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "dtensor", "plan", "--help"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
