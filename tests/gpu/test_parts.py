"""Tests the driver of `make gpu`: some parts on simulated GPUs, and parts that fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import __main__ as driver
from tests.gpu.__main__ import main
from tests.gpu.parts import PARTS, Part
from tests.gpu.selected import marked
from tests.gpu.tables import Where


def raises(where: Where) -> None:
    with where.line("first") as line:
        line.found = "a | b"
    with where.line("second"):
        raise ValueError("the second is wrong\nand why")
    where.say("some text")
    raise LookupError("at its end")


def stays(where: Where) -> None:
    """A part that starts a process that leaves the group, as Ray's processes do."""
    other = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    (where.folder / "pid").write_text(str(other.pid))
    with where.line("before"):
        pass
    time.sleep(3600)


def dies(where: Where) -> None:
    os._exit(7)


def says_nothing(where: Where) -> None:
    pass


def is_well(where: Where) -> None:
    with where.line("all") as line:
        line.found = f"{where.num} GPUs"
    where.leave_out("the rest", "not simulated")


@pytest.fixture
def no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the facts of the machine, because another process would import torch for them."""
    names = ("machine", "driver", "cuda", "nccl", "torch", "triton", "ray", "python")
    monkeypatch.setattr(driver, "facts_here", lambda: {**dict.fromkeys(names, "none"), "gpus": []})


OVER_S = 599.0
"""The limit of a part that is over it."""


class Over(subprocess.Popen[bytes]):
    """A process whose limit of `OVER_S` is exceeded as soon as the part has reported something."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout != OVER_S:
            return super().wait(timeout)
        assert isinstance(self.args, list)
        said = Path(self.args[self.args.index("--to") + 1]) / "lines"
        while not said.read_text():
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(self.args, timeout)


def own(function: str, limit_s: float = 600) -> Part:
    return Part(function, f"It {function}", limit_s, f"tests.gpu.test_parts:{function}")


def test_failing_parts_are_reported_and_other_parts_continue(
    tmp_path: Path,
    no_facts: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Over)
    names = ("raises", "stays", "dies", "says_nothing", "is_well")
    parts = [own(name, OVER_S if name == "stays" else 600) for name in names]
    assert main(["--simulated", "2", "--to", str(tmp_path)], parts) == 1
    printed = capsys.readouterr().out
    tables = {name: (tmp_path / f"{n:02}_{name}.md").read_text() for n, name in enumerate(names, 1)}
    for name, said in {
        "raises": "FAILED: second: ValueError: the second is wrong; "
        "this part: LookupError: at its end (1 ok)",
        "stays": "FAILED: over its limit of 599 s, and ended; after before (1 ok)",
        "dies": "FAILED: the process of this part ended with status 7; after its start (0 ok)",
        "says_nothing": "FAILED: it said nothing (0 ok)",
        "is_well": "1 ok, 1 left out",
    }.items():
        assert said in printed and said in tables[name]
        assert "simulated GPUs: no figure here says anything of a GPU" in tables[name]
    assert "| ok | first | a \\| b |  |" in tables["raises"] and "some text" in tables["raises"]
    assert "in raises\n" in (tmp_path / "01_raises.log").read_text()
    assert "| left out | the rest | not simulated |  |" in tables["is_well"]
    from tests.chaos.watch import running

    left = int((tmp_path / "02_stays.tmp" / "pid").read_text())
    while running(left):  # wait until init has reaped the killed process
        time.sleep(0.05)


def test_part_option_selects_parts_by_number_or_name(
    tmp_path: Path, no_facts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [own("raises"), own("is_well"), own("dies")]
    given = ["--simulated", "1", "--to", str(tmp_path), "--part"]
    assert main([*given, "2"], parts) == 0
    assert main([*given, "is_well"], parts) == 0
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["02_is_well.md"]
    with pytest.raises(SystemExit):
        main([*given, "is_wel"], parts)
    assert "no part 'is_wel': raises, is_well, dies, or 1 to 3" in capsys.readouterr().err


def test_correctness_parts_precede_speed_parts_and_limits_are_short() -> None:
    assert all(0 < part.limit_s <= 480 for part in PARTS)
    speeds = [part.name.startswith("speed") for part in PARTS]
    assert speeds == sorted(speeds) and any(speeds)
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module, _, name = part.function.partition(":")
        text = (Path(__file__).parent / f"{module.rpartition('.')[2]}.py").read_text()
        assert f"def {name}(where: Where)" in text


@pytest.mark.slow
def test_driver_without_gpu_exits_with_status_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--to", str(tmp_path), "--part", "1"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "--simulated 2 needs none" in done.stderr
    assert not list(tmp_path.iterdir())


def test_driver_selects_tests_marked_gpu() -> None:
    names = {Path(file).name for file in marked()}
    assert {"test_gpu.py", "test_nccl_protocol.py", "test_kernels.py"} <= names
    assert "test_train.py" not in names


@pytest.mark.slow
def test_parts_run_on_simulated_gpus_and_write_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dtensor.testing.gpus.guard import CompilerMissing, install

    try:
        install()
    except CompilerMissing as error:
        pytest.skip(str(error))
    chosen = ["memcheck", "nccl", "memory", "speed_kernels"]
    patient = [replace(part, limit_s=3_600) for part in PARTS]  # on a busy machine
    status = main(["--simulated", "2", "--to", str(tmp_path), "--part", *chosen], patient)
    assert status == 0, capsys.readouterr().out
    tables = {part: next(tmp_path.glob(f"*_{part}.md")).read_text() for part in chosen}
    assert "| left out | memcheck | not simulated |" in tables["memcheck"]
    assert "not simulated: speed" in tables["speed_kernels"]
    assert "test_nccl_collectives_are_equal_to_one_gpu | 2 passed" in tables["nccl"]
    assert "| ok | GPT, 2 layers" in tables["memory"]
