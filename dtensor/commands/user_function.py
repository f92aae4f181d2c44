"""What a user's `module.py:function` or `package.module:function` gives.

    value = named_value("train.py:make", "a function that returns (model, loss_fn, *batch)")
    given = given_by(value, "train.py:make", {"width": 64}, meta=True)
    given.model, given.loss_fn, given.batches, given.stated

A module is imported as Python would run it: its folder, or the current one, is where it imports
from. An exception of the user's code is told as one: its kind, its words, and the user's line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dtensor.api.model.stating.patterns import listing, nearest
from dtensor.errors import PlanningError, shown

KEYS = ("model", "loss_fn", "batch", "batches", "placements", "stages", "inputs", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserResult:
    """``batches``: at least one; ``stated``: what else it states, of KEYS from placements on."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    batches: tuple[tuple[Any, ...], ...]
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])


def is_named(what: str) -> bool:
    """Whether it is meant as a function of the user's, and not as a model's type or file."""
    return ":" in what or what.endswith(".py")


def named_value(what: str, wanted: str) -> Any:
    """The value of ``file.py:NAME`` or ``package.module:NAME``."""
    place, _, name = what.rpartition(":") if ":" in what else (what, "", "")
    module = _imported(place, what)
    public = [n for n, v in vars(module).items() if not n.startswith("_") and _own(v, module)]
    if not name:
        raise PlanningError(
            f"{what} names no value in it: {wanted}.\nfix: {what}:{_likely(public)}"
        )
    if not hasattr(module, name):
        near = nearest(name, public)
        raise PlanningError(
            f"{place} has no {name!r}; it has {listing(public)}.\n"
            f"fix: {place}:{near[0] if near else _likely(public)}"
        )
    return getattr(module, name)


def called(function: Callable[..., Any], what: str, *args: Any, **kwargs: Any) -> Any:
    """PlanningError for what it raises, with the user's line."""
    try:
        return function(*args, **kwargs)
    except PlanningError:
        raise
    except Exception as error:
        raise PlanningError(_told(error, what)) from error


def given_by(value: Any, what: str, arguments: Mapping[str, Any], *, meta: bool) -> UserResult:
    """What the function, called with ``arguments``, returns; on the meta device or as it is."""
    if not callable(value) or isinstance(value, nn.Module):
        raise PlanningError(
            f"{what} is {shown(value)}, not a function.\n"
            f"fix: def make(): return model, loss_fn, x, y"
        )
    _check_arguments(value, what, arguments)
    with torch.device("meta") if meta else nullcontext():
        try:
            returned = called(value, what, **arguments)
        except PlanningError as error:
            if meta and "meta tensor" in str(error).lower():
                raise PlanningError(
                    f"{error}\n  it was called with torch's meta device, whose tensors have no "
                    f"values.\nfix: --real calls it as it is, which takes the model's memory"
                ) from error
            raise
    return _checked(returned, what)


def _checked(returned: Any, what: str) -> UserResult:
    wanted = "(model, loss_fn, *batch), or a dict with model, loss_fn and batch"
    match returned:
        case (nn.Module() as model, loss_fn, *batch) if batch:
            stated: dict[str, Any] = {}
            batches: Any = (tuple(batch),)
        case Mapping():
            stated = dict(returned)
            for key in stated:
                if key not in KEYS:
                    near = nearest(str(key), KEYS)
                    raise PlanningError(
                        f"{what} returns a dict with {key!r}, which means nothing here.\n"
                        f"fix: {near[0] if near else ', '.join(KEYS)}"
                    )
            missing = [key for key in ("model", "loss_fn") if key not in stated]
            if missing or ("batch" in stated) == ("batches" in stated):
                lacks = ", ".join(missing) or "one of batch and batches"
                raise PlanningError(f"{what} returns a dict without {lacks}.\nfix: {wanted}")
            model, loss_fn = stated.pop("model"), stated.pop("loss_fn")
            one = stated.pop("batch", None)
            batches = stated.pop("batches", None) if one is None else (one,)
            batches = tuple(b if isinstance(b, tuple | list) else (b,) for b in batches)
        case _:
            raise PlanningError(f"{what} returns {shown(returned)}.\nfix: {wanted}")
    if not isinstance(model, nn.Module) or not callable(loss_fn) or not batches:
        raise PlanningError(
            f"{what} returns a model {shown(model)} and a loss_fn {shown(loss_fn)}.\nfix: {wanted}"
        )
    return UserResult(
        model=model, loss_fn=loss_fn, batches=tuple(tuple(b) for b in batches), stated=stated
    )


def _check_arguments(function: Callable[..., Any], what: str, given: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            near = nearest(name, parameters)
            raise PlanningError(
                f"--set {name}: {what} takes no such argument.\n"
                f"fix: {near[0] if near else ', '.join(parameters) or 'leave it out'}"
            )


# -- modules ---------------------------------------------------------------------------------------


def _imported(place: str, what: str) -> ModuleType:
    path = Path(place)
    if place.endswith(".py") or path.is_file():
        if not path.is_file():
            near = nearest(path.name, [p.name for p in path.parent.glob("*.py")])
            raise PlanningError(
                f"{what}: there is no file {place}.\n"
                f"fix: {path.with_name(near[0]) if near else 'give its path from this folder'}"
            )
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        if (known := sys.modules.get(path.stem)) is not None and _is_file(known, path):
            return known
        return called(_from_file, what, path)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        file = place.replace(".", "/") + ".py"
        fix = f"{file}:{what.rpartition(':')[2]}" if Path(file).is_file() else "module.py:function"
        raise PlanningError(f"{what}: Python finds no module {place!r} from here.\nfix: {fix}")
    return called(importlib.import_module, what, place)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a file of Python has a loader"
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # as its dataclasses and pickles need
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = before
        raise
    return module


def _is_file(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def _own(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", module.__name__) == module.__name__ and not isinstance(
        value, ModuleType
    )


def _likely(names: list[str]) -> str:
    return names[-1] if names else "make"


def _told(error: Exception, what: str) -> str:
    """The exception, and the last line of the user's that it came through."""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
        return f"{what}: SyntaxError: {error.msg}\n  {where}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_library(f.filename)]
    lines = [f"{what}: {type(error).__name__}: {error}"]
    lines += [f"  {frame.filename}:{frame.lineno}: {frame.line}" for frame in own[-1:]]
    return "\n".join(lines)


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    here = Path(__file__).resolve().parent.parent
    return (
        "site-packages" in parts
        or file.startswith(("<", str(here)))
        or f"python3.{sys.version_info.minor}" in parts
    )
