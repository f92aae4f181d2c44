"""Which functions of a program CUDA graphs may contain, for `launch(graphs=True)`.

    program = with_graphs(program)  # program.graphs: the names of functions that never wait

A function is captured if it calls only torch's and dtensor's own code that never reads a value of
the GPU on the host. Calls of other functions run between graphs: an op or a kernel of the user's
(it may read a value), checks and updates of a program that is not deferred, products by expert, and
updates of whole parameters. `daft/run/graphs.py` captures and replays.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dtensor.daft import Function, Program
from dtensor.private_torch import OpOverload
from dtensor.runtime.lower.checks import own_conditions
from dtensor.runtime.lower.code import READING_MODULES, overload_of
from dtensor.sharding.local.device_asserts import CHECKS

_NAMESPACES = ("aten", "dt", "prims")
_WAITING_FUNCTIONS = ("compute_owned", "replace_state")


def with_graphs(program: Program) -> Program:
    """Return the program with the names of functions that CUDA graphs may contain."""
    deferred = program.is_deferred
    names = (name for name, fn in program.functions if _never_waits(fn, deferred))
    return replace(program, graphs=frozenset(names))


def _never_waits(function: Function, deferred: bool) -> bool:
    """Return whether the host never waits in the function. ``deferred``: the program's operands are
    checked on the device."""
    waiting = _WAITING_FUNCTIONS if deferred else (*_WAITING_FUNCTIONS, "step_optimizer")
    if function.body is None or any(s.called in waiting for s in function.statements):
        return False
    return all(_is_captured(value, deferred) for _, value in function.bindings)


def _is_captured(value: object, deferred: bool) -> bool:
    """Return whether a graph may contain calls of a value that code is bound to."""
    if any(value is check for check in CHECKS.values()):
        return False
    if isinstance(value, partial):
        value = value.func  # pyright: ignore[reportUnknownMemberType]
    overload = overload_of(value)
    waits = not deferred and (overload or value) in own_conditions()
    if isinstance(value, OpOverload):
        return value.namespace in _NAMESPACES and not waits
    if not callable(value):
        return True
    module = getattr(value, "__module__", None) or type(value).__module__
    is_known = module.partition(".")[0] in ("torch", "dtensor", "builtins", "_operator", "math")
    return is_known and module not in READING_MODULES and not waits
