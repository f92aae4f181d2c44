"""Which functions of a program CUDA graphs may contain, for `launch(graphs=True)`.

    check_graphs(plan)              # raises PlanningError: index_put at gpt.py:41 reads on the host
    program = with_graphs(program)  # program.graphs: the names of functions that never wait

A function is captured if it calls only torch's and dtensor's own code that never reads a value of
the GPU on the host. Calls of other functions run between graphs: an op or a kernel of the user's
(it may read a value), checks of a program that is not deferred, products by expert, and updates of
whole parameters. `daft/run/graphs.py` captures and replays.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dtensor.daft import Commit, Function, Program
from dtensor.errors import PlanningError
from dtensor.private_torch import OpOverload
from dtensor.runtime.lower.checks import own_conditions
from dtensor.runtime.lower.code import overload_of
from dtensor.sharding.local.device_asserts import CHECKS
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Compute
from dtensor.sharding.plan.text.words import op_text

_aten: Any = torch.ops.aten
_NAMESPACES = ("aten", "dt", "prims")
_READS = frozenset(
    (
        *(_aten.nonzero.default, _aten.masked_select.default, _aten.repeat_interleave.Tensor),
        *(_aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default),
    )
)
_MASKED = frozenset((_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default))
"""Ops that read a mask on the host."""
_WAITING_MODULES = frozenset(
    f"dtensor.{name}"
    for name in (
        *("sharding.ops.experts", "sharding.ops.sampling", "sharding.local.expert_rows"),
        *("sharding.local.grouped_matmul", "runtime.lower.experts"),
    )
)
_WAITING_FUNCTIONS = ("compute_owned", "replace_state")


def check_graphs(plan: Plan) -> None:
    """Raise PlanningError if the host reads a value of the GPU in an op of the plan."""
    for step in plan.steps:
        if isinstance(step, Compute) and _reads_on_host(step):
            source = f" at {step.op.source}" if step.op.source else ""
            raise PlanningError(
                f"graphs=True, and the host reads a value of the GPU in "
                f"{op_text(step.op.call)}{source}, which a CUDA graph cannot contain.\n"
                f"fix: leave graphs out of dt.launch, or use torch.where instead of a mask"
            )


def _reads_on_host(step: Compute) -> bool:
    target = step.op.call.target
    masked = any(spec.dtype in (torch.bool, torch.uint8) for spec in step.operand_specs[1:])
    return target in _READS or (target in _MASKED and masked)


def with_graphs(program: Program) -> Program:
    """Return the program with the names of functions that CUDA graphs may contain."""
    instructions = (i for rank_program in program.ranks for i in rank_program.instructions)
    deferred = any(isinstance(i, Commit) and i.predicate is not None for i in instructions)
    names = (name for name, fn in program.functions if _never_waits(fn, deferred))
    return replace(program, graphs=frozenset(names))


def _never_waits(function: Function, deferred: bool) -> bool:
    """Return whether the host never waits in the function. ``deferred``: the program's operands are
    checked on the device."""
    if function.body is None or any(s.called in _WAITING_FUNCTIONS for s in function.statements):
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
        return value.namespace in _NAMESPACES and value not in _READS and not waits
    if not callable(value):
        return True
    module = getattr(value, "__module__", None) or type(value).__module__
    is_known = module.partition(".")[0] in ("torch", "dtensor", "builtins", "_operator", "math")
    return is_known and module not in _WAITING_MODULES and not waits
