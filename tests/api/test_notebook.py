"""A launch across notebook cells: cells that fail, are interrupted or run again, and a closing cell
that never runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from jupyter_client.manager import KernelManager

from tests.chaos.watch import processes_of, running

SETUP = '''
get_ipython().run_line_magic("xmode", "Minimal")  # IPython asserts that each frame has a line
import time, torch, dtensor as dt
import torch.nn.functional as F

mesh = dt.Mesh(dp=2)
x, y = torch.randn(8, 4), torch.arange(8) % 3

def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)

def made(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = dt.parallelize(module, mesh, {})
    return dt.train_step(model, loss_fn, optimizer, inputs=dict(dp=dt.Row()))

def steps_taken(most=100):
    """After which numbers of steps in plain torch the weights are these."""
    torchs, found = torch.nn.Linear(4, 3), []
    torchs.load_state_dict(begin)
    optimizer = torch.optim.SGD(torchs.parameters(), lr=0.1)
    for number in range(most):
        if torch.allclose(module.weight, torchs.weight, atol=1e-6):
            found.append(number)
        optimizer.zero_grad()
        loss_fn(torchs, x, y).backward()
        optimizer.step()
    return found

module = torch.nn.Linear(4, 3)
begin = {name: value.clone() for name, value in module.state_dict().items()}
step = made(module)
'''
LAUNCH = "run = dt.launch(mesh)"
BEGUN = "print('begun', flush=True)\n"
DEADLINE_S = 300.0
BAD_LABEL = "float(step(x, y + 70))"


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a cell. ``text``: its printed output and value; ``error``: name and message of
    its exception, or ""."""

    text: str
    error: str


class Notebook:
    """Runs cells one after the other in a real kernel, which is its own process."""

    def __init__(self, folder: Path) -> None:
        file = str(folder / "kernel.json")
        self.kernel = KernelManager(transport="ipc", connection_file=file)  # no port to fight for
        self.kernel.shutdown_wait_time = 600.0  # by default it is killed after 5 s of its end

    def __enter__(self) -> Self:
        self.kernel.start_kernel()
        self.client = self.kernel.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)

    @property
    def pid(self) -> int:
        return self.kernel.provisioner.pid

    def __call__(self, code: str, interrupt_at: str | None = None) -> Ran:
        """Run a cell. ``interrupt_at``: interrupt the kernel when this text is printed. Raises
        TimeoutError with the cell's output after `DEADLINE_S`."""
        text: list[str] = []
        error: list[str] = []

        def interrupt(printed: str) -> None:
            if interrupt_at is not None and interrupt_at in printed:
                self.kernel.interrupt_kernel()

        shows: dict[str, Callable[[Any], object]] = {
            "stream": lambda of: (text.append(of["text"]), interrupt(of["text"])),
            "execute_result": lambda of: text.append(of["data"]["text/plain"]),
            "error": lambda of: error.append(f"{of['ename']}: {of['evalue']}"),
        }

        def show(message: Any) -> None:
            shows.get(message["msg_type"], lambda _: None)(message["content"])

        run = self.client.execute_interactive
        try:
            run(code, output_hook=show, timeout=DEADLINE_S, store_history=True)
        except TimeoutError:
            sent = interrupt_at is not None and interrupt_at in "".join(text)
            raise TimeoutError(
                f"a cell has not ended. printed: {text}, interrupted: {sent}\n{code}"
            ) from None
        return Ran("".join(text), "".join(error))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as notebook:
        yield notebook


@pytest.fixture
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    assert not kernel(SETUP).error
    yield kernel
    assert not kernel("run.close()").error


@pytest.mark.slow
def test_launch_across_notebook_cells_survives_failing_cells(notebook: Notebook) -> None:
    assert notebook(f"{LAUNCH}\nrun").text == "launch of mesh(dp=2): never started"
    refused = notebook("step(x, y)").error
    assert refused.startswith("PlanningError: a launch was made and never started")
    _, launch, call, fix = refused.splitlines()
    assert re.fullmatch(r"  launch  Cell In\[\d+\]:1: run = dt.launch\(mesh\)", launch)
    assert re.fullmatch(r"  call    Cell In\[\d+\]:1: step\(x, y\)", call) and "run.start()" in fix
    assert not notebook("run.start()").error
    assert not notebook("for _ in range(3):\n    step(x, y)").error
    assert "IndexError" in notebook(BAD_LABEL).error
    assert notebook("1 / 0").error == "ZeroDivisionError: division by zero"
    assert notebook("run").text.startswith("launch of mesh(dp=2): running")
    assert not notebook("float(step(x, y))").error
    assert not notebook("run.close()").error
    assert notebook("steps_taken()").text == "[4]"


@pytest.mark.slow
def test_rerun_notebook_cells_restart_launch(notebook: Notebook) -> None:
    cells = [f"{LAUNCH}\nrun.start()", "step(x, y)"]
    for cell in cells:
        assert not notebook(cell).error
    again = notebook(cells[0]).error
    assert again.startswith("PlanningError: a launch is running already")
    assert "  running  " in again and f": {LAUNCH}\n" in again and "fix: run.close()" in again
    assert not notebook(cells[1]).error  # in the first, which `run` is still
    for cell in ("run.close()", *cells, "run.close()", "run.close()"):
        assert not notebook(cell).error
    assert notebook("steps_taken()").text == "[3]"
    for cell in (LAUNCH, LAUNCH, f"{LAUNCH}\nrun", "run.start()", cells[1]):
        assert not notebook(cell).error
    assert "has ended" in notebook("run.close()\nrun.start()").error


def test_interrupt_between_steps_keeps_launch_usable(notebook: Notebook) -> None:
    assert not notebook(f"{LAUNCH}\nrun.start()").error
    waits = f"for _ in range(3):\n    step(x, y)\n{BEGUN}time.sleep(1e6)"
    assert notebook(waits, interrupt_at="begun").error.startswith("KeyboardInterrupt")
    assert not notebook("step(x, y)").error
    block = (
        f"run.close()\nwith dt.launch(mesh) as run:\n    step(x, y)\n    {BEGUN}    time.sleep(1e6)"
    )
    assert notebook(block, interrupt_at="begun").error.startswith("KeyboardInterrupt")
    assert notebook("run, steps_taken()").text == "(launch of mesh(dp=2): ended, [5])"


@pytest.mark.slow
def test_interrupt_within_steps_keeps_launch_usable(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        assert not notebook(f"{SETUP}\n{LAUNCH}\nrun.start()\nnum = 0").error
        loop = f"step(x, y)\n{BEGUN}while True:\n    step(x, y)\n    num += 1"
        assert notebook(loop, interrupt_at="begun").error.startswith("KeyboardInterrupt")
        assert not notebook("float(step(x, y))\nrun.close()").error
        # the step that was interrupted may have been committed before
        assert notebook("{2, 3} & {n - num for n in steps_taken(num + 4)} != set()").text == "True"


@pytest.mark.slow
@pytest.mark.ray
def test_kernel_shutdown_without_closing_launch_leaves_no_process(tmp_path: Path) -> None:
    """Steps run on Ray and are interrupted; then the kernel ends."""
    with Notebook(tmp_path) as notebook:
        assert not notebook(SETUP).error
        on_ray = "run = dt.launch(mesh, backend='ray', deadline_s=3600)\nrun.start()"
        assert not notebook(on_ray).error
        waits = f"step(x, y)\n{BEGUN}time.sleep(1e6)"
        assert notebook(waits, interrupt_at="begun").error.startswith("KeyboardInterrupt")
        assert not notebook("float(step(x, y))").error
        assert "IndexError" in notebook(BAD_LABEL).error
        processes = processes_of(notebook.pid)
        assert any("raylet" in name for name in processes.values())
        notebook.kernel.shutdown_kernel()
        while any(map(running, processes)) or processes_of(notebook.pid):  # until none is left
            time.sleep(0.05)
