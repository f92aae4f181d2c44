"""What is changed in torch while a program is captured, and put back.

    with patched(below=CallAsModule.forward):
        forward = torch.export.export(...).module()
        with whole_layers():  # whole_layers.py
            joint = export_joint(forward, tensors)

- Stack traces of nodes keep every frame that counts (source.py), not only those of `forward`.
- A GraphModule is not turned into Python source unless it is called. Torch makes some forty on its
  way and calls few; that took a fifth of the time. Torch has the same for its own use
  (_LazyGraphModule), which its export does not take up.
- Autocast follows the list of the device that it names (autocast.py).
- A custom autograd Function is recorded with its backward (functions.py), below `Function.apply`,
  which a program may have under another name: relu = MyRelu.apply.
- What `torch.utils.checkpoint` runs is captured, under a number: meta["custom"][CHECKPOINT].
- `module.to(x.device)`, `.float()` and the like do nothing where they change nothing; else they are
  refused.
- Forward-mode derivatives (forward_mode.py).
- What `torch.nn.utils.parametrize.cached()` keeps is the capture's own.

The joint export of forward and backward, `export_joint`, is private to torch too.

Checkpoints. That ops run again in the backward is lost unless it is marked: each outermost call
gets a number, which torch carries from the traced op to the joint graph. With use_reentrant=True
torch makes no gradients where no argument requires grad: refused. So is `context_fn`, which says op
by op what is saved. `preserve_rng_state` needs nothing: random numbers are counted.

Invariants: outside a capture, and for other threads, nothing behaves otherwise (thread_patches.py);
what another thread compiles with `torch.compile` waits for the end, as it waits for others that
compile. These are private parts of torch, which the tests hold for each supported version. Not
here: what a region saves (sharding/plan/passes/recompute.py), what else is refused (refusals.py).
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

from dtensor.frontend.call_lock import CALL_LOCK, PerThread, is_capturing, started
from dtensor.frontend.capture import forward_mode
from dtensor.frontend.capture.autocast import AUTOCAST, CAPTURED_ON, program_device
from dtensor.frontend.capture.refusals import STORED_WARNING, is_same_memory, planning_error
from dtensor.frontend.capture.thread_patches import (
    answered_here,
    filtered,
    here_alone,
    replaced,
    unlogged,
)
from dtensor.frontend.graph import type_text
from dtensor.frontend.source import places_below, source_here
from dtensor.private_torch import compile_lock, forward_ad

if TYPE_CHECKING:
    from dtensor.frontend.capture.functions import AppliedFunctions

CHECKPOINT = "dtensor_checkpoint"
"""The key of torch's node annotations under which the number of a checkpoint stands."""


@contextmanager
def patched(*, below: FunctionType) -> Iterator[list[AppliedFunctions]]:
    """Within a capture. ``below``: the function whose callees' lines are the user's."""
    # Not at the top: they load torch's compiler, and with it triton where that is installed.
    from torch._decomp import decompositions
    from torch.export import _trace
    from torch.fx import graph_module
    from torch.fx.experimental import proxy_tensor, symbolic_shapes

    numbers = itertools.count()  # of checkpoints
    functions: list[AppliedFunctions] = []  # at most one, where there is a custom Function
    explaining = ExitStack()
    changed: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (TracerBase, "_filter_traceback_frames", lambda _: _whole_traces(below)),
        (fx.GraphModule, "recompile", _when_called),
        (torch.nn.Module, "_apply", lambda _: _unmoved),
        (decompositions, "select_one_layer_lstm_function", lambda _: _written_lstm),
        (_Patcher, "patch_method", _patched_here),
        (Thread, "start", _noted),
        (forward_ad.dual_level, "__enter__", forward_mode.entered),
        (forward_ad.dual_level, "__exit__", forward_mode.left),
        (proxy_tensor, "snapshot_fake", forward_mode.batched_snapshot),
        (_trace, "_override_builtin_ops", lambda _: _builtins_here),
        # It would put back what other threads have assigned; what the program has, side_effects.py
        # sees.
        (_trace, "_detect_attribute_assignment", lambda _: lambda _: nullcontext()),
        (_trace, "_ignore_backend_decomps", lambda _: nullcontext),  # flags of the process
        # What torch logs with a traceback it raises too; of a program that depends on data it
        # prints the graph so far.
        (_trace, "print", lambda _: _prints_nothing),
        (graph_module, "print", lambda _: _prints_nothing),  # the line of a graph that raised
        *((torch.autocast, name, change) for name, change in AUTOCAST.items()),
        (
            checkpoints,
            "_checkpoint_without_reentrant_generator",
            lambda _: _numbered(numbers),
        ),
    ]
    plains = [vars(owner).get(name, print) for owner, name, _ in changed]
    changes = [
        (owner, name, here_alone(change(plain), plain))
        for (owner, name, change), plain in zip(changed, plains, strict=True)
    ]
    applying = _watched(numbers, functions, explaining)
    held: Any = parametrize._cache
    weights = PerThread(held)
    weights.clear()  # to this thread: `cached()` around the call has weights that were computed
    changes_here = [(_SingleLevelFunction, "apply", applying), (parametrize, "_cache", weights)]
    with ExitStack() as stack:
        # Before anything is changed: torch changes the same as it compiles, in another thread.
        stack.enter_context(CALL_LOCK.and_then(compile_lock()))
        stack.enter_context(replaced([*changes, *changes_here]))
        stack.enter_context(answered_here(FLAGS))
        stack.enter_context(
            unlogged(
                (symbolic_shapes.log, lambda _: True),
                (fake_tensor.log, lambda record: record.exc_info is not None),
            )
        )
        stack.enter_context(
            filtered(
                ("ignore", "", r"torch\..*"),
                # nn.LSTM and its like keep their parameters a second time in a list, which the
                # export itself swaps.
                ("ignore", STORED_WARNING, ""),
                ("error", STORED_WARNING + r".*self\.(?!\S*_flat_weights)", ""),
            )
        )
        stack.callback(torch.set_autocast_enabled, "cuda", torch.is_autocast_enabled("cuda"))
        torch.set_autocast_enabled("cuda", False)
        stack.enter_context(torch.autocast(CAPTURED_ON, enabled=False))
        if torch.get_default_device().type != CAPTURED_ON:  # `with torch.device("meta"):`
            stack.enter_context(torch.device(CAPTURED_ON))
        with explaining:
            yield functions


FLAGS = (torch.compiler.is_compiling, torch.compiler.is_exporting)
FLAGS += (symbolic_trace.is_fx_tracing, symbolic_trace.is_fx_symbolic_tracing)
"""What torch asks of the process, and another thread's compiled functions at each call."""


def _patched_here(plain: Any) -> Any:
    """While it traces, torch replaces `__call__` and `__getattr__` of all modules."""

    def patch_method(patcher: Any, cls: type, name: str, new: Any, **options: Any) -> None:
        plain(patcher, cls, name, here_alone(new, getattr(cls, name)), **options)

    return patch_method


def _noted(plain: Any) -> Any:
    """What a thread of the program does, the program does."""

    def start(thread: Thread) -> None:
        started(thread)
        plain(thread)

    return start


@contextmanager
def _builtins_here() -> Iterator[None]:
    """As torch has it, but for `math.pow`: to the program that is the plain one."""
    from torch._export.non_strict_utils import _tensor_min_max

    pairs = (("max", max, torch.maximum), ("min", min, torch.minimum))
    made = [
        (name, here_alone(partial(_tensor_min_max, real_callable=f, tensor_callable=of), f))
        for name, f, of in pairs
    ]
    with replaced([(builtins, name, f) for name, f in made]):
        yield


def _written_lstm(*_: object) -> Any:
    """An LSTM without gradients is one op of mkldnn where the CPU has it; here it is the ops that
    it is with gradients, and on every machine."""
    from torch._decomp.decompositions import one_layer_lstm

    return one_layer_lstm


def _prints_nothing(*_: object, **__: object) -> None:
    pass


def _whole_traces(below: FunctionType) -> Any:
    def keep(_tracer: Any, _frames: Any) -> python_traceback.StackSummary:
        return python_traceback.StackSummary.from_list(
            [
                python_traceback.FrameSummary(*place, lookup_line=False)
                for place in places_below(below.__code__)
            ]
        )

    return keep


def _when_called(compiled: Any) -> Any:
    """A module that is called runs what its graph was at its last `recompile`, or is now."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled(self)  # puts the real forward in the place of this one
        return self.forward(*args, **kwargs)

    def recompile(self: Any) -> None:
        codegen = self.graph._codegen
        if isinstance(codegen, PyTreeCodeGen):
            self._in_spec = codegen.pytree_info.in_spec
            self._out_spec = codegen.pytree_info.out_spec
        type(self).forward = forward  # each GraphModule has a class of its own

    return recompile


# -- modules that are moved ------------------------------------------------------------------------


def _unmoved(
    module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True
) -> torch.nn.Module:
    """Torch would swap each parameter for what `.to` returns, itself or not."""
    # Not at the top: it loads torch's compiler, and with it triton where that is installed.
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    named = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    alone: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
    if (device := program_device()) != CAPTURED_ON:
        from dtensor.frontend.capture.seen_device import DeviceMode

        alone = partial(DeviceMode, device)
    for name, x in named:
        with disable_proxy_modes_tracing(), alone(), torch.no_grad():
            made = fn(x)
        if not is_same_memory(made, x):
            now, then = (f"{type_text(y)} on {y.device}" for y in (x, made))
            raise planning_error(
                "The program moves a module or changes its dtype.",
                f"{name}: {now} -> {then if then != now else 'other strides'}",
                source=source_here(),
                fix="do it once, before dt.parallelize; within the program, x.to(...) of "
                "tensors alone",
            )
    return module


# -- checkpoints, and Functions of the user's ------------------------------------------------------


def _outermost(numbers: Iterator[int]) -> AbstractContextManager[object]:
    """A region of its own, unless it is within one."""
    if CHECKPOINT in traceback.current_meta.get("custom", {}):
        return nullcontext()
    return traceback.annotate({CHECKPOINT: next(numbers)})


def _numbered(numbers: Iterator[int]) -> Any:
    def generator(function: Any, preserve: bool, context_fn: Any, *args: Any, **kw: Any) -> Any:
        """Torch runs the function where the generator stands still."""
        if context_fn is not checkpoints.noop_context_fn:
            raise planning_error(
                "torch.utils.checkpoint with context_fn= cannot be captured: a plan saves what "
                "comes into a region, and not op by op.",
                f"context_fn={context_fn!r}",
                source=source_here(),
                fix="leave context_fn out, or checkpoint smaller parts",
            )
        with _outermost(numbers):
            yield

    return generator


def _watched(numbers: Iterator[int], functions: list[AppliedFunctions], stack: ExitStack) -> Any:
    def watched(cls: type, *args: Any) -> Any:
        plain = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
        if is_capturing() and cls is checkpoints.CheckpointFunction:
            function, _, *given = args
            with _outermost(numbers):
                made = function(*given)
            _check_reentrant(given, made)
            return made
        # torch's own, those of custom ops, are exact
        if is_capturing() and cls.__module__.split(".", 1)[0] != "torch":
            return _met(functions, stack).apply(plain, cls, args)
        return plain(*args)

    return classmethod(watched)


def _met(functions: list[AppliedFunctions], stack: ExitStack) -> AppliedFunctions:
    """Loaded by the few programs that have any."""
    from dtensor.frontend.capture.functions import AppliedFunctions

    if not functions:
        functions.append(AppliedFunctions())
        stack.enter_context(functions[0].explain_errors())
    return functions[0]


def _check_reentrant(given: list[Any], made: Any) -> None:
    """Raises where torch would leave out gradients that this capture would make."""
    lost = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(made))
    if lost and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
        raise planning_error(
            "torch.utils.checkpoint makes no gradients here: no argument of it requires grad.",
            source=source_here(),
            fix="use_reentrant=False",
        )


@cache
def load_compiler() -> None:
    """Torch's compiler, where it is not loaded yet. Torch looks up the module of each op that it
    defines by asking all modules for their file; one that is imported late may raise then."""
    getmodule: Any = inspect.getmodule

    def found(*args: Any) -> Any:
        try:
            return getmodule(*args)
        except Exception:
            return None

    with mock.patch.object(inspect, "getmodule", found):
        import torch._dynamo
        import torch._functorch.aot_autograd
        import torch.export  # noqa: F401


def export_joint(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Forward and backward in one graph, its placeholders and output with meta "desc"."""
    # Not at the top: it loads torch's compiler, and with it triton where that is installed.
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._higher_order_ops import effects

    # Torch before 2.13 drops it as dead code, and a singular matrix gives numbers without a word.
    if effects._get_effect("aten::_linalg_check_errors") is None:
        effects._register_effectful_op("aten::_linalg_check_errors", effects._EffectType.ORDERED)
    with ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, module, tuple(tensors)).graph_module
