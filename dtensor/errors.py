"""PlanningError, and checks of the type, range and spelling of arguments.

check_kind("the mesh", 3, Mesh, "a Mesh", "dt.Mesh(tp=2)")
# PlanningError: the mesh is 3 (int), not a Mesh.
# fix: dt.Mesh(tp=2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dtensor.numerics import dtype_name


class PlanningError(ValueError):
    """The program, its placements or its arguments cannot be planned as stated.

    It is raised before anything runs, and the caller can fix it. Its text has one sentence of fact,
    the operands, the user's line, and a fix that was checked.
    """


P = ParamSpec("P")
T = TypeVar("T")


def checked_call(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function with a better TypeError for arguments that do not match its parameters:
    the message has a fix. A TypeError that the function itself raises is unchanged."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            from dtensor.misspelled import mismatch_text  # seldom needed

            raise TypeError(mismatch_text(function, args, kwargs) or str(error)) from None

    return checked


def check_order(name: str, kinds: Mapping[str, type[object]], *args: object) -> None:
    """Raise PlanningError if the arguments are in the wrong order. ``kinds``: the class of each
    argument, by parameter, in the right order."""
    order = [next((word for word in kinds if isinstance(arg, kinds[word])), "") for arg in args]
    if sorted(order) == sorted(kinds):
        raise PlanningError(
            f"the arguments of {name} are in another order: {', '.join(order)}.\n"
            f"fix: dt.{name}({', '.join(kinds)})"
        )


def check_kind(
    what: str, value: object, kind: type[Any] | UnionType, wanted: str, fix: str
) -> None:
    """Raise PlanningError unless ``value`` is an instance of ``kind`` (``wanted``: "a Mesh")."""
    # A class may match a protocol whose methods it defines, although it is not an instance.
    if isinstance(value, type) or not isinstance(value, kind):
        raise PlanningError(f"{what} is {shown(value)}, not {wanted}.\nfix: {fix}")


def check_callable(what: str, value: object, fix: str) -> None:
    """Raise PlanningError unless ``value`` is a function or another callable."""
    if not callable(value):
        raise PlanningError(f"{what} is {shown(value)}, not a function.\nfix: {fix}")


def check_number(
    name: str,
    value: object,
    *,
    fix: str,
    above: float | None = None,
    least: float | None = None,
    whole: bool = False,
) -> None:
    """Raise PlanningError unless ``value`` is a number (``whole``: an integer) that is greater than
    ``above`` and not less than ``least``, if they are stated."""
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    number = cast(float, value)
    if not (is_number and (above is None or number > above) and (least is None or number >= least)):
        bound = f"above {above}" if above is not None else f"of at least {least}"
        kind = "whole number" if whole else "number"
        raise PlanningError(f"{name}={value!r} is not a {kind} {bound}.\nfix: {fix}")


def check_word(name: str, value: object, words: Sequence[str]) -> None:
    """Raise PlanningError unless ``value`` is one of ``words``."""
    if value not in words:
        *others, last = (f'"{word}"' for word in words)
        (nearest,) = get_close_matches(str(value), words, n=1, cutoff=0)
        fact = f"{name}={value!r}: it is {', '.join(others)} or {last}"
        raise PlanningError(f'{fact}\nfix: {name}="{nearest}"')


def pickling_error(fact: str, fix: str) -> TypeError:
    """Return the error for an attempt to pickle an object whose values are on ranks."""
    return TypeError(f"{fact}: it is a handle on values of ranks.\nfix: {fix}")


def check_dense(what: str, x: torch.Tensor, line: str = "", *, name: str = "") -> None:
    """Raise PlanningError for a sparse or nested tensor. ``line``: the text of the user's line."""
    if not is_dense(x):
        kind = "nested" if x.is_nested else "sparse"
        shape = f"{x.size(0)} tensors" if x.is_nested else list(x.shape)
        raise PlanningError(
            f"{what} is a {kind} tensor ({x.layout}), which no rule takes.\n"
            f"  {shape} of {dtype_name(x.dtype)}\n{line}"
            f"fix: {name or what}.{'to_padded_tensor(0)' if x.is_nested else 'to_dense()'} before "
            f"the call"
        )


def is_dense(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


def check_module(path: str, module: nn.Module) -> None:
    """Raise PlanningError for a module of torch.jit, and for a lazy parameter or buffer of the
    module itself (not of its submodules), which has no shape yet."""
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanningError(
            f"{path or 'the module'} is a module of torch.jit ({module.original_name}), whose "
            f"program cannot be captured.\n"
            f"fix: use the module that was scripted or traced"
        )
    for key, x in (*module._parameters.items(), *module._buffers.items()):
        name = f"{path}.{key}" if path else key
        if x is not None and is_lazy(x):
            raise PlanningError(
                f"{name} has no shape yet: it belongs to a lazy module.\n"
                f"fix: call the module once on a batch before, which gives it one"
            )


def shown(value: object) -> str:
    """Return a value as text for a message: "3 (int)"; "of type T" if it is long."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = repr(value), type(value).__name__
    return f"of type {kind}" if "\n" in text or len(text) > 200 else f"{text} ({kind})"
