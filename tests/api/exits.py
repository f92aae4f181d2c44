"""Ways to end a process inside or after a launch; each case runs in its own process until Python's
exit.

    python -m tests.api.exits FOLDER CASE ...      # prints one line of JSON for each case

dtensor is imported once; each case is a fork that runs to the end of this file, as a program does.
Writes fail for real: the system refuses files above a size limit.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def said(word: str) -> None:
    """Print a word to stdout and flush."""
    os.write(1, f"<{word}>".encode())


def before_the_import() -> None:
    """An exit handler that is registered before dtensor's and so runs after it."""
    said("handler before the import")
    if isinstance(sys.stderr, Tee):  # what logs does so
        sys.stderr = sys.__stderr__


atexit.register(before_the_import)

import resource  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import dtensor as dt  # noqa: E402
from dtensor.api.checkpoint import exit_status  # noqa: E402
from dtensor.api.checkpoint.async_save import Saved  # noqa: E402
from dtensor.runtime.checkpoint import (  # noqa: E402
    CheckpointError,
    saving,
    writing,
)

atexit.register(said, "handler after the import")
exit_status._COPY_S = 600.0  # a machine that is busy takes its time

MESH = dt.Mesh(tp=2)
TO = "ckpt"


def made(steps: bool) -> Any:
    """Return a model; with ``steps``, run a function first, so that its values are on ranks."""
    model = dt.parallelize(nn.Linear(64, 64), MESH, {"weight": dict(tp=dt.Row())})
    if steps:
        loss = dt.compile(lambda model, x: model(x).square().sum(), MESH)
        float(loss(model, torch.ones(2, 64)).full_tensor())
    return model


def fail() -> None:
    """From now on, let writes above a small size fail."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fail_to_publish() -> None:
    """From now on, let the controller's writes fail; writes of ranks succeed."""

    def metadata_bytes(*_: Any) -> bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    writing.metadata_bytes = metadata_bytes


def write_at_the_end() -> None:
    """From now on, delay writes until the main thread has nothing more to do."""
    ends, write = threading.Event(), saving.write_part
    threading._register_atexit(ends.set)  # type: ignore[attr-defined]

    def write_part(*args: Any) -> Any:
        ends.wait()
        said("written at the end")
        return write(*args)

    saving.write_part = write_part


def outside(format: str) -> None:
    model = made(False)
    fail()
    dt.save(TO, model, format=format)


def in_block(then: Callable[[], object], format: str = "dcp", steps: bool = False) -> None:
    with dt.launch(MESH):
        model = made(steps)
        fail()
        dt.save(TO, model, format=format)
        said("went on")
        then()


def never_left(
    then: Callable[[], object],
    *,
    backend: Any = "inprocess",
    fails: bool = True,
    steps: bool = False,
) -> None:
    kept.append(dt.launch(MESH, backend=backend).start())
    model = made(steps)
    if fails and backend == "inprocess":
        fail()
    elif fails:  # actors have limits of their own
        fail_to_publish()
    kept.append(dt.save(TO, model))
    then()


kept: list[Any] = []
"""What lives to the end."""


def nothing() -> None: ...


def wrong() -> None:
    raise ZeroDivisionError


def exit_3() -> None:
    raise SystemExit(3)


def late(then: Callable[[], object], fails: bool, steps: bool = False) -> None:
    write_at_the_end()
    never_left(then, fails=fails, steps=steps)


def read() -> None:
    never_left(nothing)
    try:
        kept[-1].wait()
    except CheckpointError as error:
        said(str(error))


def caught() -> None:
    try:
        in_block(sys.exit)
    except SystemExit:
        said("caught")


def swallowed(made_again: bool) -> None:
    """Swallow the error, so that no one sees its notes; a later checkpoint may exist."""
    with suppress(ZeroDivisionError):
        in_block(wrong)
    if made_again:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        with dt.launch(MESH):
            dt.save(TO, made(False))


def user_file() -> None:
    """Leave text in the buffer of a file, which Python writes at exit."""
    file = open("words", "w")  # noqa: SIM115
    file.write("words")
    kept.append(file)


class Deleted:
    def __del__(self, said: Callable[[str], None] = said) -> None:
        said("deleted")


def objects_of_others() -> None:
    """An exit at which Python flushes a file and deletes an object; this work must be done once."""
    user_file()
    kept.append(Deleted())
    kept.append(Saved("nowhere", wrong))


class Tee:
    closed = False

    def write(self, text: str) -> int:
        return sys.__stderr__.write(text)  # type: ignore[union-attr]

    def flush(self) -> None:
        sys.__stderr__.flush()  # type: ignore[union-attr]


def stderr_is(other: Any) -> None:
    never_left(nothing)
    sys.stderr = other


CASES: dict[str, Callable[[], None]] = {
    "outside, dcp": lambda: outside("dcp"),
    "outside, hf": lambda: outside("hf"),
    "in a launch, hf": lambda: in_block(nothing, "hf"),
    "left at its end": lambda: in_block(nothing, steps=True),
    "left by sys.exit": lambda: in_block(sys.exit),
    "left by sys.exit(0), after steps": lambda: in_block(lambda: sys.exit(0), steps=True),
    "left by sys.exit(3)": lambda: in_block(lambda: sys.exit(3)),
    "left by an exception": lambda: in_block(wrong),
    "left by sys.exit, caught": caught,
    "left by an error, caught": lambda: swallowed(made_again=False),
    "left by an error, caught, then written": lambda: swallowed(made_again=True),
    "never left": lambda: never_left(nothing),
    "never left, after steps": lambda: never_left(nothing, steps=True),
    "never left, sys.exit": lambda: never_left(sys.exit),
    "never left, sys.exit(3)": lambda: never_left(lambda: sys.exit(3)),
    "never left, raise SystemExit(3)": lambda: never_left(exit_3),
    "never left, words": lambda: never_left(lambda: sys.exit("words")),
    "never left, an exception": lambda: never_left(wrong),
    "never left, late": lambda: late(nothing, fails=True, steps=True),
    "never left, late, sys.exit(3)": lambda: late(lambda: sys.exit(3), fails=True),
    "never left, late, written": lambda: late(nothing, fails=False, steps=True),
    "never left, read": read,
    "objects of others": objects_of_others,
    "a stderr of one's own": lambda: stderr_is(Tee()),
    "no stderr": lambda: stderr_is(None),
    "on Ray, never left": lambda: never_left(nothing, backend="ray", steps=True),
    "on Ray, never left, sys.exit(3)": lambda: never_left(lambda: sys.exit(3), backend="ray"),
    "on Ray, never left, written": lambda: never_left(
        nothing, backend="ray", fails=False, steps=True
    ),
}


def run(folder: str, case: str) -> dict[str, Any] | None:
    """Run a case in a fork and return how it ended; return None in the fork itself."""
    os.makedirs(folder)
    out, err = (os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT) for name in ("out", "err"))
    sys.stdout.flush()
    process = os.fork()
    if not process:
        os.chdir(folder)
        os.dup2(out, 1)
        os.dup2(err, 2)
        return None
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    told = {"case": case, "status": status, "files": sorted(os.listdir(folder))}
    for name, descriptor in (("out", out), ("err", err)):
        os.close(descriptor)
        with open(f"{folder}/{name}") as file:
            told[name] = file.read()
    return told


if __name__ == "__main__":
    for number, case in enumerate(sys.argv[2:]):
        ended = run(f"{sys.argv[1]}/{number}", case)
        if ended is None:
            break
        print(json.dumps(ended), flush=True)
    else:
        os._exit(0)
    CASES[case]()
