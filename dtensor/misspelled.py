"""Calls whose arguments do not fit a function's parameters, in words that say what fits.

    misfit(train_step, (model, loss_fn, opt), {"microbatches": 4})
    # train_step has no option 'microbatches'.
    # fix: schedule=dt.GPipe(microbatches=4)

Not here: who asks (`checked_call` of errors.py), what a value is checked for.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

_IN_OTHER_WORDS = {
    "microbatches": "schedule=dt.GPipe(microbatches={})",
    "num_microbatches": "schedule=dt.GPipe(microbatches={})",
    "accumulation_steps": "schedule=dt.GPipe(microbatches={})",
    "gradient_accumulation_steps": "schedule=dt.GPipe(microbatches={})",
    "max_grad_norm": "clip_grad_norm={}",
}
"""What an option of other libraries is called here, with its value."""


def no_axis(name: str, stated: tuple[object, ...]) -> TypeError:
    """For a placement that is given the name of an axis, or anything else."""
    axis = stated[0] if isinstance(stated[0], str) and stated[0].isidentifier() else "tp"
    given = ", ".join(map(repr, stated))
    return TypeError(
        f"{name} takes no positional arguments, and was given {given}: a dictionary says which "
        f"axis it is for.\nfix: dict({axis}=dt.{name}())"
    )


def misfit(
    function: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str:
    """What does not fit the function's parameters, and what would; "" where that is not known."""
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
