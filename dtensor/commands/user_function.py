"""Imports and calls a user's function, given as `module.py:function` or `package.module:function`.

    function = import_value("train.py:make", "a function that returns (model, loss_fn, *batch)")
    result = call_workload_function(function, "train.py:make", {"width": 64}, meta=True)
    result.model, result.loss_fn, result.batches, result.stated

A module can import from its folder, or from the current folder if it is given by a dotted name, as
if Python ran it. An exception of the user's code becomes a PlanningError with the type, the message
and the user's line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dtensor.api.model.stating.patterns import listing, nearest
from dtensor.errors import PlanningError, shown

KEYS = (
    "model", "loss_fn", "batch", "batches", "placements", "stages", "inputs", "attention",
    "optimizer",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UserResult:
    """The result of a user's function. ``batches``: at least one; ``stated``: the returned
    placements, stages, inputs, attention and optimizer, by key."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    batches: tuple[tuple[Any, ...], ...]
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])


def is_value_path(text: str) -> bool:
    """Return whether the text is the path of a Python value, as "train.py:make", and not a model
    type or a configuration file."""
    return ":" in text or text.endswith(".py")


def import_value(path: str, wanted: str) -> Any:
    """Return the value of ``file.py:NAME`` or ``package.module:NAME``. ``wanted``: what the value
    has to be, for the error of a path without a name."""
    place, _, name = path.rpartition(":") if ":" in path else (path, "", "")
    module = _import_module(place, path)
    public = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and getattr(value, "__module__", module.__name__) == module.__name__
        and not isinstance(value, ModuleType)
    ]
    likely_name = public[-1] if public else "make"
    if not name:
        raise PlanningError(f"{path} names no value in it: {wanted}.\nfix: {path}:{likely_name}")
    if not hasattr(module, name):
        near = nearest(name, public)
        raise PlanningError(
            f"{place} has no {name!r}; it has {listing(public)}.\n"
            f"fix: {place}:{near[0] if near else likely_name}"
        )
    return getattr(module, name)


def call_user_function(function: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """Call the function. Its exceptions are raised as PlanningError with the user's line."""
    try:
        return function(*args, **kwargs)
    except PlanningError:
        raise
    except Exception as error:
        raise PlanningError(_error_text(error, path)) from error


def call_workload_function(
    function: Any, path: str, arguments: Mapping[str, Any], *, meta: bool
) -> UserResult:
    """Call the function that returns model, loss and batches, under torch's meta device if
    ``meta``. Raises PlanningError if it is no function, or returns something else."""
    if not callable(function) or isinstance(function, nn.Module):
        raise PlanningError(
            f"{path} is {shown(function)}, not a function.\n"
            f"fix: def make(): return model, loss_fn, x, y"
        )
    _check_arguments(function, path, arguments)
    with torch.device("meta") if meta else nullcontext():
        try:
            returned = call_user_function(function, path, **arguments)
        except PlanningError as error:
            if meta and "meta tensor" in str(error).lower():
                raise PlanningError(
                    f"{error}\n  it was called with torch's meta device, whose tensors have no "
                    f"values.\nfix: --real calls it as it is, which takes the model's memory"
                ) from error
            raise
    return _user_result(returned, path)


def _user_result(returned: Any, path: str) -> UserResult:
    """Return the checked result of a user's function."""
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
                        f"{path} returns a dict with {key!r}, which means nothing here.\n"
                        f"fix: {near[0] if near else ', '.join(KEYS)}"
                    )
            missing = [key for key in ("model", "loss_fn") if key not in stated]
            if missing or ("batch" in stated) == ("batches" in stated):
                lacks = ", ".join(missing) or "one of batch and batches"
                raise PlanningError(f"{path} returns a dict without {lacks}.\nfix: {wanted}")
            model, loss_fn = stated.pop("model"), stated.pop("loss_fn")
            batch = stated.pop("batch", None)
            batches = stated.pop("batches", None) if batch is None else (batch,)
            batches = tuple(b if isinstance(b, tuple | list) else (b,) for b in batches)
        case _:
            raise PlanningError(f"{path} returns {shown(returned)}.\nfix: {wanted}")
    if not isinstance(model, nn.Module) or not callable(loss_fn) or not batches:
        raise PlanningError(
            f"{path} returns a model {shown(model)} and a loss_fn {shown(loss_fn)}.\nfix: {wanted}"
        )
    return UserResult(
        model=model, loss_fn=loss_fn, batches=tuple(tuple(b) for b in batches), stated=stated
    )


def _check_arguments(function: Callable[..., Any], path: str, names: Iterable[str]) -> None:
    """Raise PlanningError for a name of --set that is no argument of the function."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            near = nearest(name, parameters)
            raise PlanningError(
                f"--set {name}: {path} takes no such argument.\n"
                f"fix: {near[0] if near else ', '.join(parameters) or 'leave it out'}"
            )


# -- modules ---------------------------------------------------------------------------------------


def _import_module(place: str, path: str) -> ModuleType:
    """Import a file or a dotted module name. ``path``: the whole text of the user, for errors."""
    file = Path(place)
    if place.endswith(".py") or file.is_file():
        if not file.is_file():
            near = nearest(file.name, [p.name for p in file.parent.glob("*.py")])
            raise PlanningError(
                f"{path}: there is no file {place}.\n"
                f"fix: {file.with_name(near[0]) if near else 'give its path from this folder'}"
            )
        folder = str(file.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        if (imported := sys.modules.get(file.stem)) is not None and _is_file(imported, file):
            return imported
        return call_user_function(_import_file, path, file)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        file_name = place.replace(".", "/") + ".py"
        fix = "module.py:function"
        if Path(file_name).is_file():
            fix = f"{file_name}:{path.rpartition(':')[2]}"
        raise PlanningError(f"{path}: Python finds no module {place!r} from here.\nfix: {fix}")
    return call_user_function(importlib.import_module, path, place)


def _import_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(file.stem)
    sys.modules[file.stem] = module  # dataclasses and pickle look the module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if previous is None:
            del sys.modules[file.stem]
        else:
            sys.modules[file.stem] = previous
        raise
    return module


def _is_file(module: ModuleType, file: Path) -> bool:
    module_file = getattr(module, "__file__", None)
    return module_file is not None and Path(module_file).resolve() == file.resolve()


def _error_text(error: Exception, path: str) -> str:
    """Return the type and message of the exception and the last line of user code that raised
    it."""
    if isinstance(error, SyntaxError) and error.filename:
        line = f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
        return f"{path}: SyntaxError: {error.msg}\n  {line}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not _is_library(frame.filename)]
    lines = [f"{path}: {type(error).__name__}: {error}"]
    lines += [f"  {frame.filename}:{frame.lineno}: {frame.line}" for frame in user_frames[-1:]]
    return "\n".join(lines)


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    package = Path(__file__).resolve().parent.parent
    return (
        "site-packages" in parts
        or file.startswith(("<", str(package)))
        or f"python3.{sys.version_info.minor}" in parts
    )
