"""Where a node or an error comes from: the user's innermost line.

    source_of_trace('File "mlp.py", line 14, in forward\\n  h = self.up(x)\\n ...')  ->  mlp.py:14

A frame is the user's when its file belongs neither to torch nor to this package. Third-party model
code counts as the user's. Torch keeps only frames of functions named `forward` in a node's stack
trace; `whole_traces` makes it keep all of the user's. Not here: rendering of errors (`detect`).
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.fx.proxy import TracerBase

from dtensor.frontend.graph import Source

_OURS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(os.path.abspath(__file__)))
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Whether a frame in this file is the user's. Generated code (`<eval_with_key>`) is not."""
    return not file.startswith("<") and not os.path.abspath(file).startswith(_OURS)


@lru_cache(maxsize=4096)
def line_of(file: str, line: int, function: str) -> Source:
    """A line of a file, with its text."""
    text = linecache.getline(file, line).strip()
    return Source(file=file, line=line, text=text, function=function)


@contextmanager
def whole_traces(entry_file: str) -> Iterator[None]:
    """Within: stack traces of traced nodes hold every frame of the user below `entry_file`'s."""

    def keep(_tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        entries = [i for i, frame in enumerate(frames) if frame.filename == entry_file]
        below = frames[entries[-1] + 1 :] if entries else []
        return traceback.StackSummary.from_list([f for f in below if is_user_file(f.filename)])

    with mock.patch.object(TracerBase, "_filter_traceback_frames", keep):
        yield


@lru_cache(maxsize=4096)
def frames_of_trace(trace: str) -> tuple[tuple[str, int, str], ...]:
    """(file, line, function) of each user frame of a node's stack trace, innermost last."""
    return tuple(
        (m["file"], int(m["line"]), m["function"])
        for m in _FRAME.finditer(trace)
        if is_user_file(m["file"])
    )


def source_of_trace(trace: str) -> Source | None:
    """The innermost user frame of a node's stack trace."""
    frames = frames_of_trace(trace)
    return line_of(*frames[-1]) if frames else None


def source_here() -> Source | None:
    """The innermost user frame of the calling stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def source_of_exception(error: BaseException) -> Source | None:
    """The innermost user frame that the exception passed, but for the ones that called `capture`.

    The traceback starts at the frame that caught the error, which is below the caller of capture.
    """
    frames: Iterable[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    found = [f for f in frames if is_user_file(f.filename) and f.lineno is not None]
    if not found:
        return None
    return line_of(found[-1].filename, found[-1].lineno or 0, found[-1].name)


def source_of_callable(fn: Callable[..., object]) -> Source | None:
    """The line that defines fn (a module's forward), where it was written in Python."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return None
    return line_of(code.co_filename, code.co_firstlineno, code.co_name)
