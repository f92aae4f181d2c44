"""What cannot be captured faithfully, refused while planning with the user's line and a remedy.

    with Watch():                    # .item() and the like, parameters that were closed over
        fn(...)
    check_forward(exported)          # sizes that depend on data
    check_joint(graph)               # random ops, control flow

Without this, a parameter that is closed over would become a constant without gradient. Not here:
what torch must be changed for to refuse it (patches.py); what the program itself raises, and what
torch raises in it (failures.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode

from dtensor.errors import PlanningError
from dtensor.frontend.graph import type_text
from dtensor.frontend.reads.effects import Change, line_of_change
from dtensor.frontend.reads.ran import CodeRecorder
from dtensor.frontend.reads.walk import RanCode
from dtensor.frontend.source import Source, source_here, source_of_trace


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What torch raises for values and sizes that depend on data."""
    # Not at the top: it loads sympy, which an actor never needs.
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
        PendingUnbackedSymbolNotFound,
    )

    return (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
        PendingUnbackedSymbolNotFound,
    )


def planning_error(fact: str, *operands: str, source: Source | None, fix: str) -> PlanningError:
    """One sentence of fact, the operands, the user's line, the fix."""
    lines = [fact, *(f"  {operand}" for operand in operands)]
    if source is not None:
        lines.append(f"  {source}: {source.text}")
    return PlanningError("\n".join([*lines, f"fix: {fix}"]))


# -- what the user's code asks of a value ------------------------------------------------------

_ASKS: dict[Callable[..., Any], str] = {
    torch.Tensor.item: ".item()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__bool__: "the truth of a tensor (if, while, assert, and, or)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__index__: "a tensor as an index of Python",
}

_DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}


_HOOKS = {
    torch.Tensor.register_hook: "a hook on a gradient",
    torch.Tensor.register_post_accumulate_grad_hook: "a hook on a gradient",
    torch.Tensor.retain_grad: "retain_grad()",
}


class Watch(TorchFunctionMode):
    """Sees each torch call of the user's function, before anything is computed. ``recorder``: what
    code torch runs for it is of no interest."""

    def __init__(self, recorder: CodeRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS and not _is_constant(args[0]):
            raise _asks_for_data(f"{_ASKS[func]} of {type_text(args[0])}", source_here())
        if func in _DERIVATIVES:
            raise planning_error(
                "A gradient inside the program is not supported yet.",
                source=source_here(),
                fix="return the loss, and let the runtime differentiate it",
            )
        if func in _HOOKS:
            raise hooks_on_gradients([type_text(args[0])], source_here(), _HOOKS[func])
        calls_back = False
        for value in _opened((*args, *kwargs.values())):
            calls_back |= isinstance(value, FunctionType)
            if isinstance(value, torch.Tensor) and _is_stray(value):
                raise planning_error(
                    "A tensor that requires grad is used but was not passed in: its gradient "
                    "would be lost.",
                    f"{type_text(value)}, an argument of {getattr(func, '__name__', func)}",
                    source=source_here(),
                    fix="pass the module as an argument, as in loss_fn(model, x)",
                )
        if calls_back:
            return func(*args, **kwargs)
        with self.recorder.paused():
            return func(*args, **kwargs)


def _opened(values: Iterable[Any]) -> Iterator[Any]:
    """The values, of lists and tuples their items."""
    for value in values:
        if type(value) in (list, tuple):
            yield from value
        else:
            yield value


def _is_constant(x: torch.Tensor) -> bool:
    """Whether torch knows x's value while capturing (torch.tensor(3.0)), or x is no traced one."""
    return not isinstance(x, FakeTensor) or x.constant is not None


def _is_stray(x: torch.Tensor) -> bool:
    return x.requires_grad and not isinstance(x, FakeTensor)


def _asks_for_data(what: str, source: Source | None) -> PlanningError:
    return planning_error(
        "The program depends on a tensor's value, which is not known when it is planned.",
        what,
        source=source,
        fix="keep it a tensor (torch.where, a mask that multiplies), or pass it in as a number",
    )


def data_dependent(error: Exception, source: Source | None) -> PlanningError:
    """For torch's own exceptions about values and sizes that depend on data."""
    return _asks_for_data(f"{type(error).__name__}: {str(error).splitlines()[0]}", source)


def assigned_attribute(names: Sequence[str], source: Source | None) -> PlanningError:
    """For tensors that forward stored in a module, which capture forgets."""
    return planning_error(
        "The program stores a tensor in an attribute of a module, which would be lost.",
        *names,
        source=source,
        fix="return the tensor, or register it as a buffer and change it in place; a cache that "
        "stays as it is: let one call of the module fill it before",
    )


def requires_grad_kept(name: str, source: Source | None) -> PlanningError:
    return planning_error(
        "A buffer is changed to a value that requires grad: steps would share gradients.",
        f"buffer {name}",
        source=source,
        fix="change it under torch.no_grad(), or from a detached value",
    )


def hooks_on_gradients(
    where: Sequence[str], source: Source | None, what: str = "a hook on a gradient"
) -> PlanningError:
    return planning_error(
        f"The program has {what}, which a captured step would not call.",
        *where,
        source=source,
        fix="remove the hook; step.gradients() gives gradients, clip_grad_norm= clips them, and a "
        "torch.library.custom_op with register_autograd may change one",
    )


def changes_outside(
    changes: Sequence[Change], ran: RanCode | None, source: Source | None
) -> PlanningError:
    """For a program that changes, at each call, what a captured step would change once."""
    return planning_error(
        "The program changes what is there after the call, each time that it is called; a captured "
        "step runs this Python once.",
        *map(str, changes[:4]),
        source=line_of_change(changes[0], ran) or source,
        fix="keep it in a buffer that is changed in place (register_buffer), return it, or change "
        "it outside the step",
    )


def draws(generators: Sequence[str], source: Source | None) -> PlanningError:
    """For random numbers of Python's or numpy's, and iterators, which a captured step would take
    from once."""
    return planning_error(
        f"The program draws from {', '.join(generators)}; a captured step would draw once, and "
        f"compute with that value ever after.",
        source=source,
        fix="draw it with torch (torch.rand, dropout), pass it as an argument, or state "
        'capture="each call"',
    )


ASSIGNED = r"The tensor attributes? "
"""How torch's warning about tensors that forward stored in a module begins."""


def assigned_names(warning: str) -> list[str]:
    """The attributes that torch's warning about stored tensors names."""
    return re.findall(r"self\.(?:module_\d+\.)?([\w.\[\]]+)", warning)


# -- what the forward graph shows --------------------------------------------------------------

_DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
_ITEMS = {"item", "_local_scalar_dense"}
_STRIDED = {"as_strided", "as_strided_copy", "as_strided_scatter", "resize", "resize_as"}


def is_idle_dropout(node: fx.Node) -> bool:
    """A dropout that does nothing: p = 0, or not training. Args are (x, p, train)."""
    return _op_name(node).removesuffix("_") in _DROPOUTS and bool(
        node.args[1] == 0 or not node.args[2]
    )


def check_forward(module: fx.GraphModule) -> None:
    """Raises for the first node of the exported graph whose value or size depends on data."""
    for node in module.graph.nodes:
        if _op_name(node) in _ITEMS or _has_symbols(node.meta.get("val")):
            source = source_of_trace(node.meta.get("stack_trace") or "")
            raise _asks_for_data(f"{_op_name(node)}: a value or size that depends on data", source)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            check_forward(child)


def check_joint(graph: fx.Graph) -> None:
    """Raises for the first op of the decomposed graph that is random or holds a graph itself."""
    for node in graph.nodes:
        source = source_of_trace(node.meta.get("stack_trace") or "")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise planning_error(
                f"Control flow inside the graph is not supported yet: {node.target.name()}.",
                source=source,
                fix="compute both branches and choose with torch.where",
            )
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise planning_error(
                f"This random op has no counter-based form: {_op_name(node)}.",
                source=source,
                fix="write it with dropout, rand, randn, randint, bernoulli or their _like forms, "
                "or pass the random tensor as an argument",
            )
        if _op_name(node) in _STRIDED and not node.args[0].meta["val"].is_contiguous():
            raise planning_error(
                "The program reads a tensor through strides of memory that it does not fill in "
                "order; shards of it lie in memory otherwise.",
                f"{_op_name(node)} of {type_text(node.args[0].meta['val'])}",
                source=source,
                fix="call .contiguous() on it first, or write it with slices and views",
            )


def _op_name(node: fx.Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return node.target._schema.name.split("::")[1]


def _has_symbols(val: Any) -> bool:
    match val:
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return True
        case torch.Tensor():
            return any(isinstance(s, torch.SymInt) for s in val.shape)
        case list() | tuple():
            return any(_has_symbols(v) for v in val)
        case _:
            return False
