"""Calls whose arguments do not fit a function's parameters, in words that say what fits.

    @checked_call
    def Row(*, blocks=1, unit=1): ...

    Row("tp")
    # TypeError: Row takes no positional arguments, and was given 'tp'.
    # fix: dict(tp=dt.Row())

Invariants: a call that fits is as without it, its signature and its types too; a TypeError that the
function itself raises passes as it is. Not here: what a value is checked for (errors.py).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from dtensor.errors import PlanningError

P = ParamSpec("P")
T = TypeVar("T")

_IN_OTHER_WORDS = {
    "microbatches": "schedule=dt.GPipe(microbatches={})",
    "num_microbatches": "schedule=dt.GPipe(microbatches={})",
    "accumulation_steps": "schedule=dt.GPipe(microbatches={})",
    "gradient_accumulation_steps": "schedule=dt.GPipe(microbatches={})",
    "max_grad_norm": "clip_grad_norm={}",
}
"""What an option of other libraries is called here, with its value."""


def checked_call(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose TypeError for arguments that do not fit says what fits."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # of the function itself
            raise TypeError(_misfit(function, args, kwargs) or str(error)) from None

    return called


def check_order(name: str, kinds: Mapping[str, type[object]], *args: object) -> None:
    """PlanningError for arguments of these kinds, by parameter, in another order."""
    given = [next((word for word in kinds if isinstance(arg, kinds[word])), "") for arg in args]
    if sorted(given) == sorted(kinds):
        raise PlanningError(
            f"the arguments of {name} are in another order: {', '.join(given)}.\n"
            f"fix: dt.{name}({', '.join(kinds)})"
        )


def no_axis(name: str, stated: tuple[object, ...]) -> TypeError:
    """For a placement that is given the name of an axis, or anything else."""
    axis = stated[0] if isinstance(stated[0], str) and stated[0].isidentifier() else "tp"
    given = ", ".join(map(repr, stated))
    return TypeError(
        f"{name} takes no positional arguments, and was given {given}: a dictionary says which "
        f"axis it is for.\nfix: dict({axis}=dt.{name}())"
    )


def _misfit(
    function: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str:
    name, signature = function.__name__, inspect.signature(function)
    known = signature.parameters
    takes = [p.name for p in known.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [p.name for p in known.values() if p.default is p.empty]
    for word, value in kwargs.items():
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            fix = f"{near[0]}={value!r}" if near else f"one of {', '.join(known)}"
            fix = _IN_OTHER_WORDS[word].format(repr(value)) if word in _IN_OTHER_WORDS else fix
            return f"{name} has no option {word!r}.\nfix: {fix}"
    if not takes and args:
        return str(no_axis(name, args))
    example = f"fix: dt.{name}({', '.join(needed)}, ...)"
    if len(args) > len(takes):
        return (
            f"{name} takes {len(takes)} positional arguments ({', '.join(takes)}), and was given "
            f"{len(args)}; the others have names: {', '.join(list(known)[len(takes) :])}.\n"
            f"{example}"
        )
    missing = [one for one in needed if one not in takes[: len(args)] and one not in kwargs]
    return f"{name} lacks {', '.join(missing)}.\n{example}" if missing else ""
