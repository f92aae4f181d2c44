"""A notebook: cells that run one after the other in a real kernel, a process of its own.

with Notebook(tmp_path) as notebook:
    notebook("x = 3")
    assert notebook("x + 1").text == "4"
    notebook("while True: print(x, flush=True)", interrupt_at="3")    # KeyboardInterrupt
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jupyter_client.manager import KernelManager


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a cell: ``text`` is what it printed and its value; ``error`` an exception's name
    and words, or ""."""

    text: str
    error: str


class Notebook:
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
        """Run a cell. ``interrupt_at``: the kernel is interrupted when that is printed."""
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

        self.client.execute_interactive(code, output_hook=show, timeout=None, store_history=True)
        return Ran("".join(text), "".join(error))
