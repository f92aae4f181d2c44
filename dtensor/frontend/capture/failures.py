"""Report errors that the user's program raises during capture in terms of the user's program.

    PlanningError: The program raises while it is captured.
      RuntimeError: a and b must have same reduction dim, but got [4, 16] X [12, 8].
      blocks.3.mlp.down: Linear(in_features=12, out_features=8, bias=True)
      linear(f32[4,16], f32[8,12], f32[8])
      mlp.py:23: return self.down(F.gelu(h))
    fix: ...

An exception that the program or a library itself raises keeps its type and text; a note names the
module. In both cases the traceback has only the user's frames, without torch's export.
"""

from __future__ import annotations

import difflib
import dis
import os
import re
import traceback
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from dtensor.errors import PlanningError
from dtensor.frontend.capture.call_as_module import CallAsModule, FlatCall, leaf_names
from dtensor.frontend.capture.refusals import FLEX, RefusalMode, flex_error, planning_error
from dtensor.frontend.graph import type_text
from dtensor.frontend.source import OURS, owner_of_frame, source_of_callable, source_of_exception
from dtensor.private_torch import pytree

MAX_LINES = 4  # of the message of the original error
MAX_OPERANDS = 8
MAX_FRAMES = 3


def export_error(error: Exception, root: CallAsModule) -> Exception:
    """Return the exception to raise for an error during the export of the program."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if all(f.f_code is not CallAsModule.forward.__code__ for f, _ in frames):
        return error
    if isinstance(error, PlanningError):
        return error.with_traceback(users_frames(error, MAX_FRAMES))
    raiser = raised_by(error)
    if raiser == "dtensor":
        return error
    if any(f.f_globals.get("__name__") == FLEX for f, _ in frames):
        raise flex_error(source_of_exception(error)) from error
    running, source = _running_module(frames, root.call), source_of_exception(error)
    if raiser is not None or isinstance(error, Warning):
        if running:
            error.add_note(f"raised while the program was captured, in {running}")
        return error.with_traceback(users_frames(error, MAX_FRAMES))
    planning = planning_error(
        "The program raises while it is captured.",
        *_message_lines(error),
        *([running] if running else []),
        *_operands(frames, source.text if source else ""),
        source=source or source_of_callable(root.call.fn),
        fix=_suggest_fix(error, root.call),
    )
    innermost = users_frames(error, 1)
    planning.__cause__ = error.with_traceback(None)
    return planning.with_traceback(innermost)


def backward_error(error: Exception) -> Exception:
    """Return the exception to raise for an error during differentiation: a backward that the user
    wrote raised, or an op has no backward."""
    source, raiser = source_of_exception(error), raised_by(error)
    explained = str(error).startswith("Unexpected fake")  # functions.py explains it
    if isinstance(error, PlanningError) or raiser == "dtensor" or explained:
        return error
    if raiser is not None:
        return error.with_traceback(users_frames(error, MAX_FRAMES))
    planning = planning_error(
        "The program's backward raises while it is captured.",
        *_message_lines(error),
        source=source,
        fix="change that line, or what reaches it; an op of your own needs a register_autograd, "
        "a module that is not trained .requires_grad_(False)",
    )
    cause = error.with_traceback(innermost_entry(error))
    planning.__cause__ = cause
    return planning.with_traceback(users_frames(error, 1))


def _message_lines(error: Exception) -> list[str]:
    """Return the first lines of the message, without torch's names of fake tensors."""
    text = re.sub(r"\b(Fake|Functional)Tensor\b", "Tensor", str(error)).strip()
    lines = f"{type(error).__name__}: {text}".removesuffix(": ").splitlines()
    return lines[:MAX_LINES]


def _suggest_fix(error: Exception, call: FlatCall) -> str:
    """Return the fix that the text of the error suggests."""
    if re.search(
        r"\bnot (list|tuple)\b|^'(list|tuple)' object|missing \d+ required pos", str(error)
    ):
        args, kwargs = pytree.tree_unflatten(call.leaves, call.spec)

        def is_list(value: Any) -> bool:
            is_sequence = isinstance(value, list | tuple) and value is not args
            return is_sequence and any(isinstance(x, torch.Tensor) for x in value)

        values = pytree.tree_leaves((args, kwargs), is_leaf=is_list)
        names = leaf_names(call.fn, args, kwargs, is_list)
        for name, value in zip(names, values, strict=True):
            if is_list(value):
                return (
                    f"the argument {name} is a {type(value).__name__} of length {len(value)}: pass "
                    f"its tensor, as in step(x), or each of its tensors, as in step(*batch)"
                )
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        similar = difflib.get_close_matches(error.name, dir(error.obj), 1, cutoff=0.8)
        if similar:
            return f"is {similar[0]} meant?"
    if re.search(r"dtype|scalar type|Input type|Type promoting|not implemented for '", str(error)):
        return "give the operands dtypes that go together: x.float(), or x.long() of indices"
    if "mutate a captured Tensor" in str(error):
        return "write into a copy that the function makes, x.clone(), or use torch.where, torch.cat"
    return "change that line or what reaches it; to see it alone, make the call in plain torch"


def _running_module(frames: list[tuple[FrameType, int]], call: FlatCall) -> str:
    """Return path and repr of the innermost module of which a frame runs a method ("" if none):
    `blocks.3.mlp.down: Linear(...)`."""
    names = {
        id(module): path
        for child, root in call.modules.items()
        for path, module in root.named_modules(prefix=call.prefixes[child])
    }
    for frame, _ in reversed(frames):
        code = frame.f_code
        instance = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(instance, nn.Module) and id(instance) in names:
            path, kind = names[id(instance)], type(instance).__name__
            text = repr(instance)
            kind = kind if "\n" in text or len(text) > 80 else text
            return f"{path}: {kind}" if path else kind
    return ""


def _operands(frames: list[tuple[FrameType, int]], line: str) -> list[str]:
    """Return the types of the failing torch call's operands, or of the tensors on the line."""
    for frame, _ in reversed(frames):
        if frame.f_code is RefusalMode.__torch_function__.__code__:
            func, args = frame.f_locals["func"], frame.f_locals["args"]
            keywords = frame.f_locals["kwargs"].items()
            operands = [_operand(a) for a in args] + [f"{k}={_operand(v)}" for k, v in keywords]
            return [f"{getattr(func, '__name__', func)}({', '.join(operands[:MAX_OPERANDS])})"]
    values = next((f.f_locals for f, _ in reversed(frames) if owner_of_frame(f) is not None), {})
    names = dict.fromkeys(re.findall(r"(?<![.\w])[A-Za-z_]\w*", line))
    tensors = [w for w in names if isinstance(values.get(w), torch.Tensor)]
    return [f"{w}: {type_text(values[w])}" for w in tensors[:MAX_OPERANDS]]


def _operand(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_operand(v) for v in value[:MAX_OPERANDS])
        return f"[{inside}]"
    text = type_text(value)
    return text if len(text) <= 80 else type(value).__name__


# -- tracebacks ------------------------------------------------------------------------------------


def without_ours(error: Exception) -> Exception:
    """Return the error, without our frames if it is about the user's program."""
    entry = innermost_entry(error)
    is_users = entry is not None and owner_of_frame(entry.tb_frame) is not None
    if is_users or (isinstance(error, PlanningError) and error.__cause__ is not None):
        return error.with_traceback(users_frames(error))
    return error


def raised_by(error: BaseException) -> str | None:
    """Return whose `raise` or `assert` raised the error: OWN (the user), the name of a library, or
    "dtensor". None for torch, for Python, and if no such statement raised it (x[9], a @ b)."""
    last = innermost_entry(error)
    if last is None:
        return None
    code = last.tb_frame.f_code
    if code.co_code[last.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
        return None
    is_ours = os.path.abspath(code.co_filename).startswith(OURS)
    return "dtensor" if is_ours else owner_of_frame(last.tb_frame)


def innermost_entry(error: BaseException) -> TracebackType | None:
    """Return the last entry of an error's traceback, or None."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def users_frames(error: BaseException, limit: int | None = None) -> TracebackType | None:
    """Return the error's traceback with only the frames of the user and of libraries, and of these
    only the innermost ``limit``. None if there are none."""
    entries: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        if owner_of_frame(trace.tb_frame) is not None:
            entries.append(trace)
        trace = trace.tb_next
    filtered: TracebackType | None = None
    for entry in reversed(entries[-limit:] if limit else entries):
        filtered = TracebackType(filtered, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return filtered
