"""Patch torch while a program is captured, only for the thread that captures (thread_patches.py).

    with patched(below=CallAsModule.forward):
        forward = torch.export.export(...).module()
        with whole_layers():  # whole_layers.py
            joint = export_joint(forward, tensors)

The patched parts are private to torch: tests check them for each supported version. The ops of each
outermost `torch.utils.checkpoint` call get a number, meta["custom"][CHECKPOINT], which torch copies
to the joint graph.

Invariants: other threads see torch unchanged, but `torch.compile` in another thread waits.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import traceback as python_traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from threading import Thread
from types import FunctionType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpoints
from torch import fx
from torch._subclasses import fake_tensor
from torch.autograd.function import _SingleLevelFunction
from torch.fx import _symbolic_trace as symbolic_trace
from torch.fx import traceback
from torch.fx._symbolic_trace import _Patcher
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.proxy import TracerBase
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from dtensor.frontend.call_lock import CALL_LOCK, CaptureLocalDict, is_capturing, started
from dtensor.frontend.capture import forward_mode
from dtensor.frontend.capture.autocast import AUTOCAST, CAPTURE_DEVICE, program_device
from dtensor.frontend.capture.refusals import STORED_WARNING, is_same_memory, planning_error
from dtensor.frontend.capture.thread_patches import (
    filter_logs,
    filter_warnings,
    if_capturing,
    patch_attributes,
    patch_flags,
)
from dtensor.frontend.capture.transformers_attention import attention_patches
from dtensor.frontend.capture.transformers_experts import experts_patches
from dtensor.frontend.capture.transformers_losses import loss_patches
from dtensor.frontend.graph import type_text
from dtensor.frontend.source import source_here, user_places_below
from dtensor.private_torch import compile_lock, forward_ad

if TYPE_CHECKING:
    from dtensor.frontend.capture.functions import AppliedFunctions

CHECKPOINT = "dtensor_checkpoint"
"""The key of the checkpoint's number in torch's node annotations."""


@contextmanager
def patched(*, below: FunctionType) -> Iterator[list[AppliedFunctions]]:
    """Apply all patches in this context; yield the list of the applied custom autograd Functions.
    ``below``: the function whose callees are the user's code."""
    # Imported here because they load torch's compiler, and triton if it is installed.
    from torch._decomp import decompositions
    from torch.export import _trace
    from torch.fx import graph_module
    from torch.fx.experimental import proxy_tensor, symbolic_shapes

    numbers = itertools.count()  # of checkpoints
    functions: list[AppliedFunctions] = []  # empty until a custom Function is applied, then one
    error_context = ExitStack()
    replacements: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (TracerBase, "_filter_traceback_frames", lambda _: _keep_user_frames(below)),
        (fx.GraphModule, "recompile", _recompile_lazily),
        (torch.nn.Module, "_apply", lambda _: _apply_unless_moved),
        (decompositions, "select_one_layer_lstm_function", lambda _: _decomposed_lstm),
        (_Patcher, "patch_method", _patch_for_thread),
        (Thread, "start", _register_thread),
        (forward_ad.dual_level, "__enter__", forward_mode.enter_with_plain_zeros),
        (forward_ad.dual_level, "__exit__", forward_mode.exit_with_plain_zeros),
        (proxy_tensor, "snapshot_fake", forward_mode.batched_snapshot),
        (_trace, "_override_builtin_ops", lambda _: _patch_builtins),
        # Torch's function would undo assignments of other threads. side_effects.py records the
        # program's assignments.
        (_trace, "_detect_attribute_assignment", lambda _: lambda _: nullcontext()),
        (_trace, "_ignore_backend_decomps", lambda _: nullcontext),  # sets process-wide flags
        # For a data-dependent program torch prints the graph so far; it raises an error, too.
        (_trace, "print", lambda _: _print_nothing),
        (graph_module, "print", lambda _: _print_nothing),  # prints the line that raised
        *((torch.autocast, name, change) for name, change in AUTOCAST.items()),
        (
            checkpoints,
            "_checkpoint_without_reentrant_generator",
            lambda _: _checkpoint_generator(numbers),
        ),
        *attention_patches(),
        *experts_patches(),
    ]
    originals = [vars(owner).get(name, print) for owner, name, _ in replacements]
    changes: list[tuple[Any, str, Any]] = [
        (owner, name, if_capturing(change(original), original))
        for (owner, name, change), original in zip(replacements, originals, strict=True)
    ]
    recorded_apply = _recorded_apply(numbers, functions, error_context)
    parametrize_cache: Any = parametrize._cache
    weights = CaptureLocalDict(parametrize_cache)
    weights.clear()  # a `cached()` around the call may hold computed weights
    changes += [(_SingleLevelFunction, "apply", recorded_apply), (parametrize, "_cache", weights)]
    changes += loss_patches()
    with ExitStack() as stack:
        # Take torch's lock first: another thread that compiles patches the same attributes.
        stack.enter_context(CALL_LOCK.also_holding(compile_lock()))
        stack.enter_context(patch_attributes(changes))
        stack.enter_context(patch_flags(PROCESS_FLAGS))
        stack.enter_context(
            filter_logs(
                (symbolic_shapes.log, lambda _: True),
                (fake_tensor.log, lambda record: record.exc_info is not None),
            )
        )
        stack.enter_context(
            filter_warnings(
                ("ignore", "", r"torch\..*"),
                # Export itself assigns the second list of parameters of nn.RNNBase modules.
                ("ignore", STORED_WARNING, ""),
                ("error", STORED_WARNING + r".*self\.(?!\S*_flat_weights)", ""),
            )
        )
        stack.callback(torch.set_autocast_enabled, "cuda", torch.is_autocast_enabled("cuda"))
        torch.set_autocast_enabled("cuda", False)
        stack.enter_context(torch.autocast(CAPTURE_DEVICE, enabled=False))
        if torch.get_default_device().type != CAPTURE_DEVICE:  # `with torch.device("meta"):`
            stack.enter_context(torch.device(CAPTURE_DEVICE))
        with error_context:
            yield functions


PROCESS_FLAGS = (torch.compiler.is_compiling, torch.compiler.is_exporting)
PROCESS_FLAGS += (symbolic_trace.is_fx_tracing, symbolic_trace.is_fx_symbolic_tracing)
"""Process-wide flags that torch, and compiled functions of other threads, read at each call."""


def _patch_for_thread(original: Any) -> Any:
    """Make torch's patches of `Module.__call__` and `__getattr__` apply to this thread only."""

    def patch_method(patcher: Any, cls: type, name: str, new: Any, **options: Any) -> None:
        original(patcher, cls, name, if_capturing(new, getattr(cls, name)), **options)

    return patch_method


def _register_thread(original: Any) -> Any:
    """Wrap Thread.start: a thread that the program starts counts as a part of the program."""

    def start(thread: Thread) -> None:
        started(thread)
        original(thread)

    return start


@contextmanager
def _patch_builtins() -> Iterator[None]:
    """Patch `max` and `min` for this thread as torch does for the process, but leave `math.pow`."""
    from torch._export.non_strict_utils import _tensor_min_max

    pairs = (("max", max, torch.maximum), ("min", min, torch.minimum))
    patches = [
        (name, if_capturing(partial(_tensor_min_max, real_callable=f, tensor_callable=op), f))
        for name, f, op in pairs
    ]
    with patch_attributes([(builtins, name, f) for name, f in patches]):
        yield


def _decomposed_lstm(*_: object) -> Any:
    """Return torch's decomposition of an LSTM layer into plain ops. Without gradients, torch
    selects one mkldnn op on CPUs that support it."""
    from torch._decomp.decompositions import one_layer_lstm

    return one_layer_lstm


def _print_nothing(*_: object, **__: object) -> None:
    pass


def _keep_user_frames(below: FunctionType) -> Any:
    """Return a replacement of torch's filter of frames: keep all user frames (source.py)."""

    def user_frames(_tracer: Any, _frames: Any) -> python_traceback.StackSummary:
        return python_traceback.StackSummary.from_list(
            [
                python_traceback.FrameSummary(*place, lookup_line=False)
                for place in user_places_below(below.__code__)
            ]
        )

    return user_frames


def _recompile_lazily(compiled: Any) -> Any:
    """Wrap GraphModule.recompile: generate Python source only when the module is called. Export
    makes some forty modules and calls few; generating all took a fifth of the time."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled(self)  # replaces this forward by the generated one
        return self.forward(*args, **kwargs)

    def recompile(self: Any) -> None:
        codegen = self.graph._codegen
        if isinstance(codegen, PyTreeCodeGen):
            self._in_spec = codegen.pytree_info.in_spec
            self._out_spec = codegen.pytree_info.out_spec
        type(self).forward = forward  # each GraphModule has a class of its own

    return recompile


# -- modules that are moved ------------------------------------------------------------------------


def _apply_unless_moved(
    module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True
) -> torch.nn.Module:
    """Replace Module._apply (`.to`, `.float()`): do nothing if fn changes no parameter or buffer.
    Raises PlanningError if fn would move or cast one."""
    # Imported here because it loads torch's compiler, and triton if it is installed.
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    tensors = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    mode: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
    if (device := program_device()) != CAPTURE_DEVICE:
        from dtensor.frontend.capture.seen_device import DeviceMode

        mode = partial(DeviceMode, device)
    for name, x in tensors:
        with disable_proxy_modes_tracing(), mode(), torch.no_grad():
            result = fn(x)
        if not is_same_memory(result, x):
            old, new = (f"{type_text(y)} on {y.device}" for y in (x, result))
            raise planning_error(
                "The program moves a module or changes its dtype.",
                f"{name}: {old} -> {new if new != old else 'other strides'}",
                source=source_here(),
                fix="do it once, before dt.parallelize; within the program, x.to(...) of "
                "tensors alone",
            )
    return module


# -- checkpoints and custom autograd Functions -----------------------------------------------------


def _number_checkpoint(numbers: Iterator[int]) -> AbstractContextManager[object]:
    """Return a context that numbers the ops of a checkpoint, unless it is inside another one."""
    if CHECKPOINT in traceback.current_meta.get("custom", {}):
        return nullcontext()
    return traceback.annotate({CHECKPOINT: next(numbers)})


def _checkpoint_generator(numbers: Iterator[int]) -> Any:
    """Return a replacement of torch's generator for checkpoints that only numbers their ops."""

    def generator(function: Any, preserve: bool, context_fn: Any, *args: Any, **kw: Any) -> Any:
        """Torch runs the function while this generator is suspended at its yield."""
        if context_fn is not checkpoints.noop_context_fn:
            raise planning_error(
                "torch.utils.checkpoint with context_fn= cannot be captured: a plan saves the "
                "inputs of a region, and cannot select ops.",
                f"context_fn={context_fn!r}",
                source=source_here(),
                fix="leave context_fn out, or checkpoint smaller parts",
            )
        with _number_checkpoint(numbers):
            yield

    return generator


def _recorded_apply(
    numbers: Iterator[int], functions: list[AppliedFunctions], stack: ExitStack
) -> Any:
    """Return a replacement of the `apply` below `Function.apply` that records custom Functions and
    reentrant checkpoints. Patching below also covers aliases: relu = MyRelu.apply."""

    def apply(cls: type, *args: Any) -> Any:
        original = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
        if is_capturing() and cls is checkpoints.CheckpointFunction:
            function, _, *inputs = args
            with _number_checkpoint(numbers):
                result = function(*inputs)
            _check_reentrant(inputs, result)
            return result
        # Torch's own Functions, which implement custom ops, need no recording.
        if is_capturing() and cls.__module__.split(".", 1)[0] != "torch":
            return _applied_functions(functions, stack).apply(original, cls, args)
        return original(*args)

    return classmethod(apply)


def _applied_functions(functions: list[AppliedFunctions], stack: ExitStack) -> AppliedFunctions:
    """Return the record of applied Functions; make it at the first call."""
    from dtensor.frontend.capture.functions import AppliedFunctions

    if not functions:
        functions.append(AppliedFunctions())
        stack.enter_context(functions[0].explain_errors())
    return functions[0]


def _check_reentrant(inputs: list[Any], result: Any) -> None:
    """Raise PlanningError if only capture would make gradients for a reentrant checkpoint."""
    has_gradients = any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(result)
    )
    if has_gradients and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        raise planning_error(
            "torch.utils.checkpoint makes no gradients here: no argument of it requires grad.",
            source=source_here(),
            fix="use_reentrant=False",
        )


@cache
def load_compiler() -> None:
    """Import torch's compiler. While it defines ops, torch asks all modules for their file. A lazy
    module may raise then, so such errors are ignored."""
    getmodule: Any = inspect.getmodule

    def getmodule_or_none(*args: Any) -> Any:
        try:
            return getmodule(*args)
        except Exception:
            return None

    with mock.patch.object(inspect, "getmodule", getmodule_or_none):
        import torch._dynamo
        import torch._functorch.aot_autograd
        import torch.export  # noqa: F401


def export_joint(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Return forward and backward in one graph. Placeholders and output have meta "desc"."""
    # Imported here because it loads torch's compiler, and triton if it is installed.
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._higher_order_ops import effects

    # Torch before 2.13 drops this check as dead code: a singular matrix would raise no error.
    if effects._get_effect("aten::_linalg_check_errors") is None:
        effects._register_effectful_op("aten::_linalg_check_errors", effects._EffectType.ORDERED)
    with ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, module, tuple(tensors)).graph_module
