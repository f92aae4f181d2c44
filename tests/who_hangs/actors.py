"""Makes an actor hang on order in the middle of a step. The file imports little, because actors
load it.

`obey(folder)` runs before each call of a program. An order is a file in the folder, named after
the process id: `spin 7` makes the process spin in its 8th call from then on, `sleep 7` sleep
there, and `hold 7` hold back all later messages, until the file is removed. The file `begun`
says which order has started.

A message is held back by withholding the semaphore posts that notify partners on this machine
(`same_host.py`): the payload is written, but no partner is notified.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from dtensor.daft.ray.transports import same_host, segments


class Orders:
    """The orders for this process."""

    def __init__(self) -> None:
        self.text = ""  # the last order
        self.left = 0  # remaining calls before it is obeyed

    def obey(self, folder: str) -> None:
        order = Path(folder) / str(os.getpid())
        try:
            text = order.read_text()
        except FileNotFoundError:
            self.text = ""
            return
        if text != self.text:
            self.text, self.left = text, int(text.split()[1])
        self.left -= 1
        if self.left != -1:
            return
        match text.split()[0]:
            case "spin":
                _say_begun(order)
                while order.exists():
                    for _ in range(1000):
                        pass
            case "sleep":
                _say_begun(order)
                while order.exists():
                    time.sleep(0.2)  # observers hardly ever see it awake
            case "hold":
                held_back.begin(order)
            case _:
                raise ValueError(f"an order is spin, sleep or hold, got {text!r}")


class HeldBack:
    """The semaphore posts of this process that are held back."""

    def __init__(self) -> None:
        self.order: Path | None = None
        self.posts: list[int] = []
        self.lock = threading.Lock()
        self.real = segments.calls().post

    def begin(self, order: Path) -> None:
        self.order = order
        threading.Thread(target=self.end_with, args=(order,), daemon=True).start()

    def end_with(self, order: Path) -> None:
        while order.exists():
            time.sleep(0.02)
        with self.lock:
            self.order = None
            for address in self.posts:
                self.real(address)
            self.posts.clear()

    def post(self, address: int) -> int:
        with self.lock:
            if self.order is None:
                return self.real(address)
            self.posts.append(address)
        if len(self.posts) == 1:
            _say_begun(self.order)
        return 0


def _say_begun(order: Path) -> None:
    part = order.with_suffix(".part")
    part.write_text("")
    part.rename(order.with_name("begun"))


orders = Orders()
obey = orders.obey
held_back = HeldBack()
_calls = segments.calls()._replace(post=held_back.post)
same_host.calls = lambda: _calls  # for programs loaded from now on
