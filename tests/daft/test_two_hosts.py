"""Two machines for real: namespaces with a switch between them; docs/scale_out.md runs on them."""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.chaos.disk import MARK as MARKED
from tests.chaos.disk import marked
from tests.machines import REPOSITORY, Machine, Machines, can_make
from tests.pages import blocks_of

PAGE = (REPOSITORY / "docs" / "scale_out.md").read_text()
SHELL = [block for block in blocks_of(PAGE) if block.kind == "sh"]
ADDRESS = "10.77.0.1:6379"
SCRIPT = "python -m tests.daft.two_hosts"
MARK = {MARKED: str(uuid.uuid4())}
"""Of what runs on the machines of these tests, and on none of other tests'."""
TOKEN = {"RAY_AUTH_MODE": "token", **MARK}


def commands(containing: str) -> list[tuple[str, str]]:
    """The page's blocks with this, each with the address of the machine that it is for."""
    found = [block.text for block in SHELL if containing in block.text and not block.not_run]
    return [(text.split("\n")[0].removeprefix("# on "), text) for text in found]


@contextmanager
def ray_of_two() -> Iterator[tuple[Machine, Machine]]:
    """As the page starts it; the machines end, and with them all that is theirs."""
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
    """What was made is gone afterwards."""
    if not can_make():
        pytest.skip("namespaces cannot be made here: test_two_nodes_on_one_network has what can be")
    networks = interfaces()
    yield
    assert interfaces() == networks
    end = time.monotonic() + 600.0  # the kernel frees the memory of what it has killed
    while marked(MARK[MARKED]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not marked(MARK[MARKED])


def interfaces() -> str:
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout


def last_line(text: str) -> dict[str, Any]:
    return json.loads(text.strip().splitlines()[-1])


def lose(one: Machine, what: str, lost: Any) -> dict[str, Any]:
    """What a launch says in the course of which this is done."""
    with one.start(f"{SCRIPT} {what}", **TOKEN) as process:
        assert process.stdin is not None and process.stdout is not None
        said = process.stdout.readline()
        if said == "lose\n":
            lost()
        out, told = process.communicate("go\n", timeout=900)
    assert process.returncode == 0 and said == "lose\n", told[-4000:]
    return last_line(out)


def is_named(found: dict[str, Any]) -> None:
    kind, error, *_ = found["error"]
    assert kind == "ActorLost" and "rank 2: its connection broke" in error
    assert "Machine 10.77.0.2 (two) has ended or cannot be reached, with ranks 2 and 3." in error


@pytest.mark.ray
@pytest.mark.slow
def test_a_pipeline_over_two_machines(can: None) -> None:
    """Bytes between them are those of the plan, losses those of one process; one is cut off."""
    with ray_of_two() as (one, two):
        found = lose(one, f"trains {ADDRESS}", two.pull_cable)
        refused, without, other = found["refused"]
        assert "asks for its token, and this process sends none: RAY_AUTH_MODE" in refused
        assert "asks for its token, and this process has none: RAY_AUTH_TOKEN is not" in without
        assert "'10.77.0.2:6379', and this process has joined the Ray at '10.77.0.1" in other
        checks(found)
        where = "ranks 0 and 1 on 10.77.0.1 (one)\n  ranks 2 and 3 on 10.77.0.2 (two)"
        assert found["launch"] == f"launch of mesh(pp=2, tp=2): running\n  {where}"
        assert found["launch"] in PAGE
        assert found["status"].count("10.77.0.2 (two)") == 2
        # of pp the two ranks there send the forward's half each; tp stays, in shared memory
        assert 1 <= found["sent"] / found["planned"]["pp"] < 1.01
        assert found["sent here"] < 0.01 * found["planned"]["tp"]
        is_named(found)


def checks(found: dict[str, Any]) -> None:
    assert found["there"] == found["here"] and len(found["here"]) > 5
    assert found["kinds"] == [["pp", "transfer"], ["tp", "all_reduce"]]
    assert found["planned"]["tp"] > 4 * found["planned"]["pp"] > 0


@pytest.mark.ray
@pytest.mark.sweep
@pytest.mark.parametrize("how", ["end", "cable"])
@pytest.mark.parametrize("spares", [0, 2])
def test_a_machine_that_is_lost(can: None, how: str, spares: int) -> None:
    with ray_of_two() as (one, two):
        found = lose(one, f"loses {ADDRESS} {spares}", two.end if how == "end" else two.pull_cable)
        if not spares:
            is_named(found)
            return
        assert found["there"] == last_line(one.run(f"{SCRIPT} here -"))["here"]
        ((told, _),) = found["recovered"]
        assert "Machine 10.77.0.2 (two) has ended or cannot be reached, with ranks 2 and 3" in told
        assert "ranks 0, 1, 2 and 3 on 10.77.0.1 (one)" in found["launch"]


@pytest.mark.ray
@pytest.mark.sweep
def test_the_page_runs(can: None) -> None:
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
    """The same on one machine, in one process."""
    return re.sub(r"--backend ray --address=\S+", "", demo).replace("/mnt/demo", "/mnt/alone")


def losses(printed: str) -> list[str]:
    return re.findall(r"^step +\d+ +loss ([\d.]+)", printed, re.MULTILINE)


def test_every_block_of_the_page_is_somebodys() -> None:
    where = {block.text.split("\n")[0] for block in SHELL if not block.not_run}
    assert where == {"# on 10.77.0.1", "# on 10.77.0.2"}
    assert sum(block.not_run is not None for block in SHELL) == 2


def test_its_python_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block.text for block in blocks_of(PAGE) if block.kind in ("python", "text")]
    code, shown = blocks
    exec(compile(code, "scale_out.py", "exec"), {})
    assert capsys.readouterr().out == shown


def test_the_batch_script_is_one() -> None:
    (script,) = (block.text for block in SHELL if "#SBATCH" in block.text)
    read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (read.returncode, read.stderr) == (0, "")
    python = script.split("<<'END'\n")[1].split("END\n")[0]
    compile(python, "script", "exec")


@pytest.mark.ray
@pytest.mark.slow
def test_two_nodes_on_one_network() -> None:
    """What can be shown without namespaces: two of Ray's nodes that share all else."""
    if can_make():
        pytest.skip("namespaces can be made here: test_a_pipeline_over_two_machines has it all")
    on_one_network()


def on_one_network() -> None:
    import sys

    ran = subprocess.run(
        [sys.executable, "-m", "tests.daft.two_hosts", "nodes", "-"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = last_line(ran.stdout)
    checks(found)
    first, second = found["launch"].splitlines()[1:]
    assert "ranks 0 and 1 on" in first and "ranks 2 and 3 on" in second
    # all ranks are here: their transfers go from node to node, both ways, and their sums do not
    assert 2 <= found["sent"] / found["planned"]["pp"] < 2.02
    assert found["sent here"] < 0.01 * found["planned"]["tp"]
