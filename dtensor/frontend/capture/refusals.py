"""Refuse programs that cannot be captured faithfully, with the user's line and a fix.

    with RefusalMode(...):           # .item() and the like; parameters that were not passed in
        fn(...)
    check_forward(exported, True)    # sizes that depend on data, sparse gradients
    check_joint(graph)               # random ops, control flow

Without the mode, a parameter that fn closed over would become a constant without a gradient. Some
refusals need patches of torch (patches.py). Errors that the program raises are in failures.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributions import Distribution, constraints
from torch.overrides import TorchFunctionMode

from dtensor.errors import PlanningError, check_dense, is_dense
from dtensor.frontend.capture.forward_mode import make_below_jvp
from dtensor.frontend.capture.packed_sequences import RECURRENT, packed_result
from dtensor.frontend.capture.random_ops import MULTINOMIAL_FIX
from dtensor.frontend.capture.value_reads import (
    VALUE_FUNCTIONS,
    ValueReads,
    base_of,
    is_in_place,
    is_printed,
)
from dtensor.frontend.graph import bound, type_text
from dtensor.frontend.guards.executed_code import CodeRecorder
from dtensor.frontend.source import Source, source_here, source_of_trace
from dtensor.private_torch import (
    BatchNorm,
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    detect_is_causal_mask,
    disable_current_modes,
    functorch_depth,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from dtensor.signals import act, noted

if TYPE_CHECKING:
    from dtensor.frontend.capture.data_assignment import DataAssignments
    from dtensor.frontend.capture.seen_device import ProgramDevice


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch raises for values and sizes that depend on data."""
    # Imported here because it loads sympy, which actors do not need.
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
    """Return a PlanningError: one sentence of fact, the operands, the user's line, the fix."""
    lines = [fact, *(f"  {operand}" for operand in operands)]
    if source is not None:
        lines.append(f"  {source}: {source.text}")
    return PlanningError("\n".join([*lines, f"fix: {fix}"]))


# -- reads of values and other calls -----------------------------------------------------------

_VALUE_READS: dict[Callable[..., Any], str] = {
    torch.Tensor.item: ".item()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__bool__: "the truth of a tensor (if, while, assert, and, or)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__index__: "a tensor as an index of Python",
}

_SEE_FIX = 'to see it, return (loss, {"name": value}) and read loss.metrics'
_NUMBER_READS = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__float__)
_FIX = "keep it a tensor (torch.where, a mask that multiplies), or pass it in as a number"
_TEXT_READS: dict[Callable[..., Any], str] = {
    torch.Tensor.__repr__: "the text of a tensor (str, repr)",
    torch.Tensor.__format__: 'the text of a tensor (f"{tensor}", format)',
}
_OTHER_READS = VALUE_FUNCTIONS - _VALUE_READS.keys()
_DATA: Any = torch.Tensor.data
_DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}


_HOOKS = {
    torch.Tensor.register_hook: "a hook on a gradient",
    torch.Tensor.register_post_accumulate_grad_hook: "a hook on a gradient",
    torch.Tensor.retain_grad: "retain_grad()",
}


class RefusalMode(TorchFunctionMode):
    """Intercept each torch call of the user's function, and refuse calls that capture cannot
    handle.

    recorder: records the executed code; paused while torch runs. parameters: parameters and
    buffers. inputs: the tensor arguments. assignments: the assignments `x.data = y`; None
    before the first one. device: the device type that the program sees."""

    def __init__(
        self,
        recorder: CodeRecorder,
        parameters: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        device: str,
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.devices: ProgramDevice | None = None
        if device != "cpu":
            # Imported here because only programs for GPUs need it.
            from dtensor.frontend.capture.seen_device import ProgramDevice

            self.devices = ProgramDevice(device)
        self.values = ValueReads()
        self.parameters, self.inputs = parameters, inputs
        self.assignments: DataAssignments | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if noted:
            act()
        kwargs = kwargs or {}
        if self.devices is not None:
            if (answered := self.devices.answer(func, args)) is not None:
                return answered[0]
            args, kwargs = self.devices.replace_devices(func, args, kwargs)
        if func in RECURRENT and torch.is_autocast_enabled("cuda"):
            raise planning_error(
                f'Under torch.autocast("cuda"), {func.__name__} is a cuDNN op with its own casts, '
                f"which autocast's lists of ops do not describe.",
                source=source_here(),
                fix='torch.autocast("cuda", enabled=False) around it, and a cast of its input',
            )
        packed = packed_result(func, args, kwargs, self.values, packed_data_error)
        if packed is not None:
            return packed[0]
        if func in _VALUE_READS and not _is_constant(args[0]):
            check = check_of_torch() if func is torch.Tensor.__bool__ else None
            if check is not None and functorch_depth():
                raise planning_error(
                    f"torch checks values inside a derivative or vmap: {check.message}.",
                    type_text(args[0]),
                    source=source_here(),
                    fix="leave out the check, as with validate_args=False of a distribution",
                )
            if check is not None:
                torch.ops.dt.ask(args[0], check.passes, check.message)
                return check.passes
            value = self.values.known_value(args[0])
            if value is not None:
                with disable_current_modes():
                    return func(value)
            if sys._getframe(1).f_code is _CAUSAL_HINT and func is torch.Tensor.__bool__:
                return False  # the mask itself is applied, which gives the same numbers
            if func is torch.Tensor.__float__ and sys._getframe(1).f_code is _BATCH_NORM:
                raise planning_error(
                    "A batch norm that averages all batches (momentum=None) cannot be captured: "
                    "its momentum depends on how many there were.",
                    source=source_here(),
                    fix="state a momentum, as in BatchNorm1d(n, momentum=0.1)",
                )
            fix = f"{_FIX}; {_SEE_FIX}" if func in _NUMBER_READS else _FIX
            raise data_error(f"{_VALUE_READS[func]} of {type_text(args[0])}", source_here(), fix)
        if func in _OTHER_READS and any(isinstance(x, FakeTensor) for x in args):
            values = [
                self.values.known_value(x) if isinstance(x, torch.Tensor) else x for x in args
            ]
            if all(v is not None or x is None for v, x in zip(values, args, strict=True)):
                with disable_current_modes():
                    return func(*values, **kwargs)
            if func in _TEXT_READS and (any(args[1:]) or not is_printed()):
                raise data_error(
                    f"{_TEXT_READS[func]} of {type_text(args[0])}", source_here(), _SEE_FIX
                )
        if func == _DATA.__get__:  # the export would not see a tensor that .data returns
            return self._record_result(args[0].detach())
        if func == _DATA.__set__:
            if is_same_memory(args[1], args[0]) or self._assign_data(args[0], args[1]):
                return None
            raise data_assignment_error(args[0], source_here())
        if func in _DERIVATIVES:
            raise planning_error(
                "A gradient inside the program is not supported yet.",
                source=source_here(),
                fix="return the loss, and let the runtime differentiate it; a derivative along a "
                "direction: torch.func.jvp; a second derivative: jvp of jvp",
            )
        if func in _HOOKS:
            raise gradient_hooks_error([type_text(args[0])], source_here(), _HOOKS[func])
        if func in _CTC:
            raise planning_error(
                "CTC loss is not supported: what it computes depends on the values of the lengths.",
                *(type_text(x) for x in args[:2]),
                source=source_here(),
                fix="a torch.library.custom_op of your own that calls torch.ops.aten._ctc_loss and "
                "_ctc_loss_backward, with register_fake and "
                'register_autograd, and dt.rule("mylib::ctc", "t! b c!, b s!, b, b -> b, t! b c!") '
                "for its losses and gradients by log_probs",
            )
        if func is F.gaussian_nll_loss:  # re-enter the mode to see the calls inside this function
            with self:
                return _GAUSSIAN_NLL(*args, **kwargs)
        if (tensor := make_below_jvp(func, args, kwargs)) is not None:
            return tensor
        calls_back = False
        if self.assignments is not None:
            stale = self.assignments.stale(_flatten((*args, *kwargs.values())))
            if stale is not None:
                raise data_assignment_error(stale, source_here())
        untraced: list[torch.Tensor] = []
        for value in _flatten((*args, *kwargs.values())):
            calls_back |= isinstance(value, FunctionType)
            if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
                continue
            untraced.append(value)
            if not is_dense(value):
                line = f"  {source}: {source.text}\n" if (source := source_here()) else ""
                check_dense("a tensor that the program uses", value, line, name="x")
            if _loses_gradient(value):
                raise planning_error(
                    "A tensor that requires grad is used but was not passed in: its gradient "
                    "would be lost.",
                    f"{type_text(value)}, an argument of {getattr(func, '__name__', func)}",
                    source=source_here(),
                    fix="pass its module as an argument, as in loss_fn(model, x); a criterion's: "
                    "parallelize nn.ModuleDict(dict(model=model, criterion=criterion))"
                    if isinstance(value, nn.Parameter)
                    else "model.z = nn.Parameter(z), read from the model; or z.detach()",
                )
        if untraced:
            return self._record_result(self.values.call_and_record(func, args, kwargs, untraced))
        if calls_back:
            return self._record_result(func(*args, **kwargs))
        with self.recorder.paused():
            return self._record_result(func(*args, **kwargs))

    def _assign_data(self, x: torch.Tensor, y: object) -> bool:
        """Replace `x.data = y` by a copy; return False if a copy would behave differently."""
        if self.assignments is None:
            from dtensor.frontend.capture.data_assignment import DataAssignments  # few programs do

            self.assignments = DataAssignments(self.parameters, self.inputs)
        return self.assignments.assign(x, y)

    def _record_result(self, result: Any) -> Any:
        return result if self.assignments is None else self.assignments.record_result(result)


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values; of lists, tuples and slices yield the items."""
    for value in values:
        if type(value) in (list, tuple):
            yield from _flatten(value)
        elif type(value) is slice:
            yield from (value.start, value.stop, value.step)
        else:
            yield value


def _is_constant(x: torch.Tensor) -> bool:
    """Return whether x has a value: it is a constant (torch.tensor(3.0)) or not traced."""
    while is_functorch_wrapped_tensor(x):  # within torch.func.jvp
        x = get_unwrapped(x)
    return not isinstance(x, FakeTensor) or x.constant is not None


def _loses_gradient(x: torch.Tensor) -> bool:
    """Return whether x requires grad but is not traced, so that its gradient would be lost."""
    if not x.requires_grad or isinstance(x, FakeTensor):
        return False
    while is_functorch_wrapped_tensor(x):  # within torch.func.grad
        x = get_unwrapped(x)
    return x.requires_grad and not isinstance(x, FakeTensor)


_CTC = (F.ctc_loss, torch.ctc_loss)
_BATCH_NORM = BatchNorm.forward.__code__
_CAUSAL_HINT = detect_is_causal_mask.__code__
"""Torch's function that compares the values of a mask, so that attention may drop a causal mask."""
_GAUSSIAN_NLL = FunctionType(
    F.gaussian_nll_loss.__code__,
    {**vars(F), "has_torch_function_variadic": lambda *_: False},
    argdefs=F.gaussian_nll_loss.__defaults__,
)


@dataclass(frozen=True, slots=True)
class TorchCheck:
    """A check of values by torch, which raises ``message`` unless it gives ``passes``."""

    passes: bool
    message: str


def check_of_torch() -> TorchCheck | None:
    """Return the check that the calling torch function makes, or None for an unknown function."""
    frame = sys._getframe(2)
    code, local = frame.f_code, frame.f_locals
    if code is F.gaussian_nll_loss.__code__:
        return TorchCheck(False, "var has negative entry/entries: variances are to be 0 or more")
    if code is Distribution.__init__.__code__:
        return TorchCheck(
            True, _violation(local["self"], f"parameter {local['param']}", local["constraint"])
        )
    if code is Distribution._validate_sample.__code__:
        return TorchCheck(True, _violation(local["self"], "value argument", local["support"]))
    if code in _CONSTRAINTS:
        return TorchCheck(True, f"Expected matrices to satisfy {local['self']}")
    return None


# If a first part of their check fails, these functions return its result; the caller then raises.
_CONSTRAINTS = {
    getattr(constraints, f"_{name}").check.__code__
    for name in ("Symmetric", "PositiveSemidefinite", "PositiveDefinite")
}


def _violation(distribution: Distribution, what: str, constraint: object) -> str:
    kind = type(distribution).__name__
    return f"Expected {what} of distribution {kind} to satisfy the constraint {constraint}"


def is_same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether x and y are the same view of the same memory."""
    if x is y:
        return True
    with DisableTorchFunction():
        return (x.shape, x.stride(), x.dtype, x.device, x.storage_offset()) == (
            *(y.shape, y.stride(), y.dtype, y.device, y.storage_offset()),
        ) and x.untyped_storage()._cdata == y.untyped_storage()._cdata


def data_assignment_error(x: torch.Tensor, source: Source | None) -> PlanningError:
    """Return the error for an assignment `x.data = y` that a copy cannot replace."""
    return planning_error(
        "The program assigns other memory to a tensor (x.data = y), and something else reads or "
        "changes the old or the new memory.",
        type_text(x),
        source=source,
        fix="x.copy_(y) under torch.no_grad(), of a parameter or buffer x",
    )


def data_error(read: str, source: Source | None, fix: str = _FIX) -> PlanningError:
    return planning_error(
        "The program depends on a tensor's value, which is not known when it is planned.",
        read,
        source=source,
        fix=fix,
    )


def data_dependent_error(error: Exception, source: Source | None) -> PlanningError:
    """Return the error for one of the exceptions of `data_dependent_errors`."""
    return data_error(f"{type(error).__name__}: {str(error).splitlines()[0]}", source)


def assigned_attribute_error(
    names: Sequence[str], source: Source | None, stored: StoringHook | None = None
) -> PlanningError:
    """Return the error for tensors that forward stored in attributes ``names`` of a module.
    ``stored``: the torch function that stores them, if known."""
    if {name.rpartition(".")[2] for name in names} == _SCALER_ATTRIBUTES:
        stored = StoringHook("torch.amp.GradScaler", f"leave it out: {_SCALER_FIX}")
    fix = (
        "return it from forward; if it needs no gradient, register it as a buffer and change it in "
        "place; a cache that stays as it is: let one call of the module fill it before"
    )
    return planning_error(
        "The program stores a tensor in an attribute of a module, which would be lost.",
        *names,
        *([] if stored is None else [f"stored by {stored.name}"]),
        source=source,
        fix=fix if stored is None else stored.fix,
    )


@dataclass(frozen=True, slots=True)
class StoringHook:
    """A torch function that makes a module store a weight, and the fix that avoids it."""

    name: str
    fix: str


_HOOK = "a hook before its forward"
_SCALER_ATTRIBUTES = {"_scale", "_growth_tracker"}
_SCALER_FIX = "dt.train_step(..., grad_scaler=scaler) scales the loss; torch.bfloat16 needs none"


def storing_hook(module: nn.Module, name: str) -> StoringHook | None:
    """Return the torch hook that stores this attribute at each forward, or None."""
    # Imported here because only errors need it.
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    args, nn_utils = f'(module, "{name}")', "torch.nn.utils"
    for hook in module._forward_pre_hooks.values():
        match hook:
            case WeightNorm() | SpectralNorm() if hook.name == name:
                kind = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
                fix = f"{nn_utils}.remove_{kind}{args}; {nn_utils}.parametrizations.{kind}{args}"
                return StoringHook(f"{nn_utils}.{kind}, {_HOOK}", fix)
            case BasePruningMethod() if hook._tensor_name == name:
                fix = f"{nn_utils}.prune.remove{args}; to go on with the mask: {nn_utils}."
                fix += f'parametrize.register_parametrization(module, "{name}", a module that '
                hook_name = f"{nn_utils}.prune, {_HOOK}"
                return StoringHook(hook_name, f"{fix}multiplies by the mask)")
            case _:
                pass
    return None


def packed_data_error(
    fact: str = "The shape and order of a packed sequence depend on the lengths, whose values are "
    "not known when the program is planned.",
    *operands: str,
    fix: str = "call pad_packed_sequence(..., total_length=number of steps) and use the padded "
    "tensor with a mask; pack inside the program, and pass the padded tensor and the lengths",
    source: Source | None = None,
) -> PlanningError:
    """Return the error for a packed sequence that is read as a tensor, passed in, or returned."""
    return planning_error(fact, *operands, source=source or source_here(), fix=fix)


FLEX = "torch.nn.attention.flex_attention"


def flex_error(source: Source | None) -> PlanningError:
    return planning_error(
        f"{FLEX} is not supported: its score_mod and mask_mod are programs of their own.",
        source=source,
        fix="torch.nn.functional.scaled_dot_product_attention with attn_mask=, or is_causal=True",
    )


def buffer_grad_error(name: str, source: Source | None) -> PlanningError:
    return planning_error(
        "A buffer is changed to a value that requires grad: steps would share gradients.",
        f"buffer {name}",
        source=source,
        fix="change it under torch.no_grad(), or from a detached value",
    )


def gradient_hooks_error(
    places: Sequence[str], source: Source | None, hook: str = "a hook on a gradient"
) -> PlanningError:
    return planning_error(
        f"The program has {hook}, which a captured step would not call.",
        *places,
        source=source,
        fix="remove the hook; step.gradients() gives gradients, clip_grad_norm= clips them, and a "
        "torch.library.custom_op with register_autograd may change one",
    )


def side_effects_error(changes: Sequence[object], source: Source | None) -> PlanningError:
    """Return the error for a program that changes Python objects at each call: a captured step
    would change them only once."""
    return planning_error(
        "The program changes objects that outlive the call, each time that it is called; a "
        "captured step runs this Python once.",
        *map(str, changes[:4]),
        source=source,
        fix="keep it in a buffer that is changed in place (register_buffer), return it, or change "
        "it outside the step",
    )


def random_state_error(generators: Sequence[str], source: Source | None) -> PlanningError:
    """Return the error for a program that draws from random generators of Python or numpy, or from
    iterators: a captured step would draw only once."""
    return planning_error(
        f"The program draws from {', '.join(generators)}; a captured step would draw once, and "
        f"compute with that value ever after.",
        source=source,
        fix="draw it with torch (torch.rand, dropout), pass it as an argument, or state "
        'capture="each call"',
    )


STORED_WARNING = r"The tensor attributes? "
"""A pattern for the start of torch's warning about tensors that forward stored in a module."""


def stored_names(warning: str) -> list[str]:
    """Return the attributes that torch's warning about stored tensors names."""
    return re.findall(r"self\.(?:module_\d+\.)?([\w.\[\]]+)", warning)


# -- checks of graphs --------------------------------------------------------------------------

_DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
_INDICES = {"where", "nonzero", "nonzero_numpy", "argwhere", "masked_select"}
_ITEMS = {"item", "_local_scalar_dense"}
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "mv", "dot"}
_EMBEDDINGS = {"embedding", "embedding_bag"}
_STRIDED = {"as_strided", "as_strided_copy", "as_strided_scatter", "resize", "resize_as"}


def is_idle_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout that does nothing: p = 0, or not training."""
    return _op_name(node).removesuffix("_") in _DROPOUTS and bool(
        node.args[1] == 0 or not node.args[2]
    )


def check_forward(module: fx.GraphModule, differentiated: bool) -> None:
    """Raise PlanningError for the first node of the exported graph that cannot be planned: its
    value or size depends on data, its gradient would be sparse, or it writes to a captured tensor.
    ``differentiated``: whether the graph gets a backward."""
    no_grad_graphs: list[str] = []  # names of the graphs of no_grad regions
    for node in module.graph.nodes:
        if _op_name(node) in _ITEMS or _has_symbols(node.meta.get("val")):
            source = source_of_trace(node.meta.get("stack_trace") or "")
            text, fix = (f"{_op_name(node)}: a value or size that depends on data", _FIX)
            if _op_name(node) in _INDICES:
                fix = (
                    "torch.where(condition, x, 0) with three arguments, or x * condition: a mask;\n"
                    "     of the tokens of an expert, dt.to_experts"
                )
            raise data_error(text, source, fix)
        if is_in_place(node):
            _check_write(node, module)
        if _op_name(node) in _PRODUCTS:
            _check_product(node)
        if _op_name(node) == "_sample_dirichlet":  # Beta uses it, too; it has no derivative
            raise _random_op_error(node)
        if differentiated and _op_name(node) in _EMBEDDINGS and bound(node)["sparse"]:
            _check_embedding(node)
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            no_grad_graphs.append(node.args[1].target)
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            check_forward(child, differentiated and name not in no_grad_graphs)


def _check_write(node: fx.Node, module: fx.GraphModule) -> None:
    """Raise PlanningError if an in-place op changes a tensor that the program closed over."""
    target: Any = node.target
    written = [a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]
    for x in (bound(node)[name] for name in written):
        base = base_of(x) if isinstance(x, fx.Node) else node
        if base.op != "get_attr":
            continue
        state = (*module.named_parameters(), *module.named_buffers())
        if base.target not in dict(state):
            description = f"{_op_name(node)} of {type_text(x.meta['val'])}, no parameter or buffer"
            source = source_of_trace(node.meta.get("stack_trace") or "")
            raise side_effects_error([description], source)


def _check_product(node: fx.Node) -> None:
    """Raise PlanningError for a product of real and complex tensors, which fake tensors accept."""
    values = [x.meta["val"] for x in node.all_input_nodes if "val" in x.meta]  # our ops have none
    if len({x.dtype.is_complex for x in values}) > 1:
        raise planning_error(
            f"{_op_name(node)} does not take real and complex operands together.",
            *map(type_text, values),
            source=source_of_trace(node.meta.get("stack_trace") or ""),
            fix="make all of them complex, or pass x.real",
        )


def _check_embedding(node: fx.Node) -> None:
    """Raise PlanningError if the gradient of an embedding table would be sparse."""
    weight = bound(node)["weight"]
    if weight.op in ("get_attr", "placeholder") and not weight.meta["val"].requires_grad:
        return
    raise planning_error(
        "The gradient of an embedding with sparse=True is a sparse tensor, and a step's gradients "
        "are dense.",
        f"{_op_name(node)} of {type_text(weight.meta['val'])}",
        source=source_of_trace(node.meta.get("stack_trace") or ""),
        fix="set sparse=False: the same numbers, and an optimizer that takes dense gradients",
    )


def check_joint(graph: fx.Graph) -> None:
    """Raise PlanningError for the first op of the joint graph that is random, is control flow, or
    reads strided memory that is not contiguous."""
    for node in graph.nodes:
        source = source_of_trace(node.meta.get("stack_trace") or "")
        if isinstance(node.target, HigherOrderOperator):
            if "flex_attention" in node.target.name():
                raise flex_error(source)
            raise planning_error(
                f"Control flow inside the graph is not supported yet: {node.target.name()}.",
                source=source,
                fix="compute both branches and choose with torch.where",
            )
        if not isinstance(node.target, OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise _random_op_error(node)
        if _op_name(node) in _STRIDED and not node.args[0].meta["val"].is_contiguous():
            raise planning_error(
                "The program reads a tensor that is not contiguous through strides; its shards "
                "have other strides.",
                f"{_op_name(node)} of {type_text(node.args[0].meta['val'])}",
                source=source,
                fix="call .contiguous() on it first, or write it with slices and views",
            )


def _random_op_error(node: fx.Node) -> PlanningError:
    return planning_error(
        f"This random op has no counter-based form: {_op_name(node)}.",
        source=source_of_trace(node.meta.get("stack_trace") or ""),
        fix=MULTINOMIAL_FIX
        if _op_name(node) == "multinomial"
        else "write it with dropout, rand, randn, randint, bernoulli or their _like forms, "
        "or pass the random tensor as an argument",
    )


def _op_name(node: fx.Node) -> str:
    if not isinstance(node.target, OpOverload):
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
