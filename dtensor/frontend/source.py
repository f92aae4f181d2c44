"""Whose line it is: where a node, a warning or an error comes from in the user's program.

    q = rearrange(q, "b t (h d) -> b h t d", h=4)       mlp.py:14, and not einops/_backends.py:96
    h = self.act(self.c_fc(h))                          modeling_gpt2.py:230, of an installed model

A frame is the user's own when its file belongs neither to torch, nor to this package, nor to
Python, nor to an installed library. What is typed at a prompt, in a cell or after ``-c`` is the
user's; other code without a file is generated: nobody's, as are torch's, ours and Python's.

A library's function is an op like torch's: its caller's line is wanted. A library's *model* is
looked at like one's own: from where the `forward` of a module with parameters or parts runs, the
frames of its library count too, until that calls the user's own code again. (A module with neither,
as einops' Rearrange, is an op.) So the line of a call is that of the innermost frame that is the
user's own or that of the model which is running. Where there is none at all, as where a library's
function is itself what is captured, it is that of the outermost frame of a library.

Not here: rendering of errors (refusals.py).
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
    """A line of a file, with its text."""
    text = linecache.getline(file, line).strip()
    return Source(file=file, line=line, text=text, function=function)


# -- whose a frame is ------------------------------------------------------------------------------

OWN = ""
"""The owner of the user's own files; that of a library's is its name."""

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOBODYS = (_TORCH, OURS)
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_PYTHON = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


@lru_cache(maxsize=4096)
def owner_of_file(file: str) -> str | None:
    """OWN, the name of a library, or None for torch, this package and Python's own."""
    path = os.path.abspath(file)
    if path.startswith(_NOBODYS):
        return None
    library = _INSTALLED.match(path)
    if library is not None:
        return library[1]
    return None if path.startswith(_PYTHON) else OWN


@lru_cache(maxsize=4096)
def module_of_file(file: str) -> str:
    """The name of the module, of torch's, of Python's or of a library's, that a file has."""
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
    if file.startswith("<"):  # typed, or generated
        return OWN if frame.f_globals.get("__name__") == "__main__" else None
    return owner_of_file(file)


def _runs_a_model(frame: FrameType) -> bool:
    """Whether it is the forward of a module that has parameters or parts."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return False
    module = frame.f_locals.get(code.co_varnames[0])
    return isinstance(module, torch.nn.Module) and bool(module._parameters or module._modules)


def _users(frames: Iterable[tuple[FrameType, int]]) -> list[Place]:
    """Of frames with their lines, outermost first, those that are the user's or a model's."""
    places: list[Place] = []
    library: Place | None = None
    model: str | None = None  # the library whose model is running
    for frame, line in frames:
        owner = owner_of_frame(frame)
        if owner is None:
            continue
        place = (frame.f_code.co_filename, line, frame.f_code.co_name)
        if owner == OWN or _runs_a_model(frame):
            model = owner
        if owner in (OWN, model):
            places.append(place)
        library = library or place
    return places or ([] if library is None else [library])


# -- from stacks, traces, errors and functions -----------------------------------------------------


def user_place() -> Place | None:
    """The place in the calling stack; without its text, for what runs often."""
    inner: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = owner_of_frame(frame)
        if owner is not None:
            inner.append((frame, frame.f_lineno))
        if owner == OWN:  # what is outside makes no difference
            break
        frame = frame.f_back
    places = _users(reversed(inner))
    return places[-1] if places else None


def caller_level() -> int:
    """How many frames up the first caller is that is not of this package: what a warning names."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("dtensor."):
        frame, level = frame.f_back, level + 1
    return level


def source_here() -> Source | None:
    """The line in the calling stack."""
    place = user_place()
    return None if place is None else line_of(*place)


def lines_text(**lines: Source | None) -> str:
    """Lines of the program by what they are, as a message has them: one below the other."""
    width = max(map(len, lines))
    known = {what: source for what, source in lines.items() if source is not None}
    return "".join(f"  {w:<{width}}  {_place(line)}: {line.text}\n" for w, line in known.items())


def _place(source: Source) -> str:
    """``mlp.py:14``, and ``Cell In[3]:2`` in a notebook, whose cells are files with a number."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(source.file)
    return str(source) if cell is None else f"{' '.join(cell)}:{source.line}"


def places_below(entry: CodeType) -> list[Place]:
    """Those that count below ``entry`` in the calling stack, outermost first; none outside it."""
    below: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not entry:
        if owner_of_frame(frame) is not None:  # first: most are torch's, and each op asks
            below.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _users(reversed(below)) if frame is not None else []


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@lru_cache(maxsize=4096)
def frames_of_trace(trace: str) -> tuple[Place, ...]:
    """The frames of a node's stack trace, innermost last."""
    return tuple((m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(trace))


def source_of_trace(trace: str) -> Source | None:
    """The innermost frame of a node's stack trace."""
    frames = frames_of_trace(trace)
    return line_of(*frames[-1]) if frames else None


def source_of_exception(error: BaseException) -> Source | None:
    """The innermost frame that counts of those that the exception passed, but for the ones that
    called `capture`: the traceback starts at the frame that caught the error, which is below."""
    places = _users(traceback.walk_tb(error.__traceback__))
    return line_of(*places[-1]) if places else None


def source_of_callable(fn: Callable[..., object]) -> Source | None:
    """The line that defines fn (a module's forward), where it was written in Python."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None)
    if code is None or owner_of_file(code.co_filename) is None:
        return None
    return line_of(code.co_filename, code.co_firstlineno, code.co_name)
