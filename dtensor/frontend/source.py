"""Find the line of the user's program from which a node, a warning or an error comes.

    q = rearrange(q, "b t (h d) -> b h t d", h=4)       mlp.py:14, not einops/_backends.py:96
    h = self.act(self.c_fc(h))                          modeling_gpt2.py:230, of an installed model

This is the line of the innermost frame of the user's code, or of a library's model that is running.
A frame is the user's if its file belongs neither to Python, torch or this package nor to an
installed library, or if it was typed at a prompt, in a cell or after ``-c``. A library's function
counts as an op, so the line is its caller's. But within the `forward` of a library's module with
parameters or submodules (a model), the frames of that library count like the user's. If there is no
such frame, because a library's function is captured, the outermost frame of a library counts.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

import torch

Place = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A line of the user's program."""

    file: str
    line: int
    text: str
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@lru_cache(maxsize=4096)
def line_of(file: str, line: int, function: str) -> Source:
    """Return the record of a line, with its text."""
    text = linecache.getline(file, line).strip()
    return Source(file=file, line=line, text=text, function=function)


# -- the owner of a frame --------------------------------------------------------------------------

OWN = ""
"""The owner of the user's files. The owner of a library's files is the library's name."""

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_PYTHON = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


@lru_cache(maxsize=4096)
def owner_of_file(file: str) -> str | None:
    """Return `OWN`, the name of a library, or None for a file of torch, this package or Python."""
    path = os.path.abspath(file)
    if path.startswith((_TORCH, OURS)):
        return None
    library = _INSTALLED.match(path)
    if library is not None:
        return library[1]
    return None if path.startswith(_PYTHON) else OWN


@lru_cache(maxsize=4096)
def module_of_file(file: str) -> str:
    """Return the name of the module in a file of Python, of a library or of this package."""
    if file.startswith("<"):  # <frozen posixpath>
        return file.strip("<>").partition(" ")[2] or file
    path = os.path.abspath(file)
    library = _INSTALLED.match(path)
    root = next((root for root in (OURS, *_PYTHON) if path.startswith(root)), "")
    start = library.start(1) if library is not None else len(root)
    if root == OURS:
        start -= len("dtensor") + 1
    name = os.path.splitext(path[start:])[0].replace(os.sep, ".")
    return name.removesuffix(".__init__")


def owner_of_frame(frame: FrameType) -> str | None:
    file = frame.f_code.co_filename
    if file.startswith("<"):  # typed by the user, or generated
        return OWN if frame.f_globals.get("__name__") == "__main__" else None
    return owner_of_file(file)


def _runs_a_model(frame: FrameType) -> bool:
    """Return whether a frame runs the forward of a module with parameters or submodules."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return False
    module = frame.f_locals.get(code.co_varnames[0])
    return isinstance(module, torch.nn.Module) and bool(module._parameters or module._modules)


def _user_places(frames: Iterable[tuple[FrameType, int]]) -> list[Place]:
    """Return the places of the user's frames and of running models. If there are none, return the
    outermost place in a library. ``frames``: frames with their lines, outermost first."""
    places: list[Place] = []
    library_place: Place | None = None
    model_library: str | None = None  # the library whose model is running
    for frame, line in frames:
        owner = owner_of_frame(frame)
        if owner is None:
            continue
        place = (frame.f_code.co_filename, line, frame.f_code.co_name)
        if owner == OWN or _runs_a_model(frame):
            model_library = owner
        if owner in (OWN, model_library):
            places.append(place)
        library_place = library_place or place
    return places or ([] if library_place is None else [library_place])


# -- from stacks, traces, errors and functions -----------------------------------------------------


def user_place() -> Place | None:
    """Return the user's place in the calling stack; None if there is none. Faster than
    `source_here`, which also reads the text of the line."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = owner_of_frame(frame)
        if owner is not None:
            frames.append((frame, frame.f_lineno))
        if owner == OWN:  # frames outside of it make no difference
            break
        frame = frame.f_back
    places = _user_places(reversed(frames))
    return places[-1] if places else None


def caller_level() -> int:
    """Return the ``stacklevel`` for a warning at the first caller outside of this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("dtensor."):
        frame, level = frame.f_back, level + 1
    return level


def source_here() -> Source | None:
    """Return the user's line in the calling stack; None if there is none."""
    place = user_place()
    return None if place is None else line_of(*place)


def lines_text(**lines: Source | None) -> str:
    """Return lines of the program as a part of a message, each after its keyword: "  launch
    train.py:14: with dt.launch(mesh):"."""
    width = max(map(len, lines))
    rows = {title: source for title, source in lines.items() if source is not None}
    return "".join(
        f"  {title:<{width}}  {_place_text(source)}: {source.text}\n"
        for title, source in rows.items()
    )


def _place_text(source: Source) -> str:
    """Return "mlp.py:14"; in a notebook, whose cells are temporary files, "Cell In[3]:2"."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(source.file)
    return str(source) if cell is None else f"{' '.join(cell)}:{source.line}"


def user_places_below(entry: CodeType) -> list[Place]:
    """Return the user's frames that ``entry`` called, outermost first; [] if ``entry`` is not in
    the calling stack."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not entry:
        # A capture does this for each op, and most frames are torch's: they are skipped here.
        if owner_of_frame(frame) is not None:
            frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _user_places(reversed(frames)) if frame is not None else []


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@lru_cache(maxsize=4096)
def frames_of_trace(trace: str) -> tuple[Place, ...]:
    """Return the frames of a node's stack trace, innermost last."""
    return tuple((m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(trace))


def source_of_trace(trace: str) -> Source | None:
    """Return the line of the innermost frame of a node's stack trace; None if it is empty."""
    frames = frames_of_trace(trace)
    return line_of(*frames[-1]) if frames else None


def source_of_exception(error: BaseException) -> Source | None:
    """Return the user's innermost line in an exception's traceback; None if there is none."""
    places = _user_places(traceback.walk_tb(error.__traceback__))
    return line_of(*places[-1]) if places else None


def source_of_callable(fn: Callable[..., object]) -> Source | None:
    """Return the line that defines a function, or a module's forward; None if it is in C, torch,
    this package or Python."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None)
    if code is None or owner_of_file(code.co_filename) is None:
        return None
    return line_of(code.co_filename, code.co_firstlineno, code.co_name)
