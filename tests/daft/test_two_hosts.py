"""Tests a launch over two machines (network namespaces with a switch between them), and that
docs/scale_out.md runs on them.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos.disk import MARK as MARKED
from tests.chaos.disk import marked
from tests.machines import REPOSITORY, Machine, Machines, can_make
from tests.pages import blocks_of

PAGE = (REPOSITORY / "docs" / "scale_out.md").read_text()
SHELL = [block for block in blocks_of(PAGE) if block.kind == "sh"]
ADDRESS = "10.77.0.1:6379"
MARK = {MARKED: str(uuid.uuid4())}
"""Of what runs on the machines of these tests, and on none of other tests'."""
TOKEN = {"RAY_AUTH_MODE": "token", **MARK}


def commands(containing: str) -> list[tuple[str, str]]:
    """Return the page's blocks that contain this text, each with the address of its machine."""
    found = [block.text for block in SHELL if containing in block.text and not block.not_run]
    return [(text.split("\n")[0].removeprefix("# on "), text) for text in found]


@contextmanager
def ray_of_two() -> Iterator[tuple[Machine, Machine]]:
    """Start Ray on two machines as the page does; the machines and their processes end with the
    block."""
    with Machines("one", "two") as machines:
        by_address = {machine.address: machine for machine in machines}
        one, two = machines
        (first, heads), (second, joins) = commands("ray start")
        by_address[first].run(heads, **MARK)
        token = one.run("cat ~/.ray/auth_token")
        two.run(f"umask 077; mkdir ~/.ray; printf {token} > ~/.ray/auth_token")
        by_address[second].run(joins, **MARK)
        assert marked(MARK[MARKED])
        yield one, two


@pytest.fixture
def can() -> Iterator[None]:
    """Whether the machines can be made; they are removed again."""
    if not can_make():
        pytest.skip("namespaces cannot be made here")
    networks = interfaces()
    yield
    assert interfaces() == networks
    end = time.monotonic() + 600.0  # the kernel frees the memory of killed processes
    while marked(MARK[MARKED]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not marked(MARK[MARKED])


def interfaces() -> str:
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout


@pytest.mark.ray
@pytest.mark.slow
def test_pipeline_over_two_machines_sends_planned_bytes_and_names_lost_machine(can: None) -> None:
    """The losses equal those of one process. One machine is disconnected at the end."""
    with ray_of_two() as (one, two):
        with one.start(f"python -m tests.daft.two_hosts {ADDRESS}", **TOKEN) as process:
            assert process.stdin is not None and process.stdout is not None
            said = process.stdout.readline()
            if said == "lose\n":
                two.pull_cable()
            out, told = process.communicate("go\n", timeout=900)
        assert process.returncode == 0 and said == "lose\n", told[-4000:]
        found = json.loads(out.splitlines()[-1])
        refused, without, other = found["refused"]
        assert "asks for its token, and this process sends none: RAY_AUTH_MODE" in refused
        assert "asks for its token, and this process has none: RAY_AUTH_TOKEN is not" in without
        assert "'10.77.0.2:6379', and this process has joined the Ray at '10.77.0.1" in other
        assert found["there"] == found["here"] and len(found["here"]) > 5
        assert found["kinds"] == [["pp", "transfer"], ["tp", "all_reduce"]]
        assert found["planned"]["tp"] > 4 * found["planned"]["pp"] > 0
        where = "ranks 0 and 1 on 10.77.0.1 (one)\n  ranks 2 and 3 on 10.77.0.2 (two)"
        assert found["launch"] == f"launch of mesh(pp=2, tp=2): running\n  {where}"
        assert found["launch"] in PAGE
        assert found["status"].count("10.77.0.2 (two)") == 2
        # over pp, each of the two ranks sends half of the forward's values; tp stays in shared
        # memory
        assert 1 <= found["sent"] / found["planned"]["pp"] < 1.01
        assert found["sent here"] < 0.01 * found["planned"]["tp"]
        assert "rank 2: its connection broke" in found["error"]
        lost = "Machine 10.77.0.2 (two) has ended or cannot be reached, with ranks 2 and 3."
        assert lost in found["error"]


@pytest.mark.ray
@pytest.mark.sweep
def test_scale_out_page_commands_run_on_two_machines(can: None) -> None:
    with ray_of_two() as machines:
        by_address = {machine.address: machine for machine in machines}
        ((address, demo),) = commands("train_gpt.py")
        out = by_address[address].run(demo, timeout=900)
        assert "ranks 2 and 3 on 10.77.0.2 (two)" in out
        alone = by_address[address].run(alone_of(demo))
        assert losses(out) == losses(alone) and len(losses(out)) == 2
        for address, stops in commands("ray stop"):
            by_address[address].run(stops)


def alone_of(demo: str) -> str:
    """Return the command that does the same on one machine in one process."""
    return re.sub(r"--backend ray --address=\S+", "", demo).replace("/mnt/demo", "/mnt/alone")


def losses(printed: str) -> list[str]:
    return re.findall(r"^step +\d+ +loss ([\d.]+)", printed, re.MULTILINE)


def test_scale_out_page_blocks_name_their_machine() -> None:
    where = {block.text.split("\n")[0] for block in SHELL if not block.not_run}
    assert where == {"# on 10.77.0.1", "# on 10.77.0.2"}
    assert sum(block.not_run is not None for block in SHELL) == 2


def test_scale_out_page_python_prints_shown_output(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block.text for block in blocks_of(PAGE) if block.kind in ("python", "text")]
    code, shown = blocks
    exec(compile(code, "scale_out.py", "exec"), {})
    assert capsys.readouterr().out == shown


def test_scale_out_page_batch_script_is_valid() -> None:
    (script,) = (block.text for block in SHELL if "#SBATCH" in block.text)
    read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (read.returncode, read.stderr) == (0, "")
    python = script.split("<<'END'\n")[1].split("END\n")[0]
    compile(python, "script", "exec")
