"""Messages for calls whose arguments do not match a function's parameters.

    mismatch_text(train_step, (model, loss_fn, opt), {"microbatches": 4})
    # train_step has no option 'microbatches'.
    # fix: schedule=dt.GPipe(microbatches=4)

`errors.checked_call` raises a TypeError with this text.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

_FIXES = {
    "microbatches": "schedule=dt.GPipe(microbatches={})",
    "num_microbatches": "schedule=dt.GPipe(microbatches={})",
    "accumulation_steps": "schedule=dt.GPipe(microbatches={})",
    "gradient_accumulation_steps": "schedule=dt.GPipe(microbatches={})",
    "max_grad_norm": "clip_grad_norm={}",
}
"""The option of dtensor for an option of other libraries; {} is its value."""


def positional_argument_error(name: str, stated: tuple[object, ...]) -> TypeError:
    """Return the error for a placement that was called with arguments: `dt.Row("tp")`."""
    axis = stated[0] if isinstance(stated[0], str) and stated[0].isidentifier() else "tp"
    arguments = ", ".join(map(repr, stated))
    return TypeError(
        f"{name} takes no positional arguments, and was given {arguments}: a dictionary says which "
        f"axis it is for.\nfix: dict({axis}=dt.{name}())"
    )


def mismatch_text(
    function: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str:
    """Return which argument does not match the function's parameters, and a fix. Return "" if this
    function does not find one."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in parameters.values() if p.default is p.empty]
    for word, value in kwargs.items():
        if word not in parameters:
            matches = difflib.get_close_matches(word, parameters, 1)
            fix = f"{matches[0]}={value!r}" if matches else f"one of {', '.join(parameters)}"
            fix = _FIXES[word].format(repr(value)) if word in _FIXES else fix
            return f"{name} has no option {word!r}.\nfix: {fix}"
    if not positional and args:
        return str(positional_argument_error(name, args))
    example = f"fix: dt.{name}({', '.join(required)}, ...)"
    if len(args) > len(positional):
        return (
            f"{name} takes {len(positional)} positional arguments ({', '.join(positional)}), and "
            f"was given {len(args)}; the others have names: "
            f"{', '.join(list(parameters)[len(positional) :])}.\n{example}"
        )
    passed = {*positional[: len(args)], *kwargs}
    missing = [parameter for parameter in required if parameter not in passed]
    return f"{name} lacks {', '.join(missing)}.\n{example}" if missing else ""
