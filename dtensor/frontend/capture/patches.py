"""What is changed in torch while a program is captured, all of it here, and put back.

    with patched(below=CallAsModule.forward):
        forward = torch.export.export(...).module()
        with whole_layers():
            joint = export_joint(forward, tensors)

- Stack traces of nodes keep every frame that counts (source.py), not only those of `forward`.
- A GraphModule is not turned into Python source unless it is called. Torch makes some forty on its
  way and calls few; that took a fifth of the time. Torch has the same for its own use
  (_LazyGraphModule), which its export does not take up.
- What would be lost in silence is refused: autocast for devices other than the CPU and CUDA.
- A custom autograd Function is recorded with its backward (functions.py), below `Function.apply`,
  which a program may have under another name: relu = MyRelu.apply.
- What `torch.utils.checkpoint` runs is captured, under a number: meta["custom"][CHECKPOINT].
- `module.to(x.device)`, `.float()` and the like do nothing where they change nothing; else they are
  refused.
- What `torch.nn.utils.parametrize.cached()` keeps is the capture's own.
- Layers that torch takes apart while differentiating, and that have rules, stay whole.

The joint export of forward and backward, `export_joint`, is private to torch too.

Autocast. A program is captured on fake CPU tensors, whatever runs it. A region follows the list of
the device type that it names: torch itself writes the casts of the CPU's, and cuda_casts.py those
of CUDA's, also where torch sees no GPU and would switch the region off. One around the call is a
region around the user's function and nothing else: the backward runs in the dtypes that the forward
left, as in torch.

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
from dataclasses import dataclass
from functools import cache, partial
from threading import Thread
from types import FunctionType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpoints
from torch import fx
from torch._C import DispatchKey
from torch._subclasses import fake_tensor
from torch.autograd.function import _SingleLevelFunction
from torch.fx import _symbolic_trace as symbolic_trace
from torch.fx import traceback
from torch.fx._symbolic_trace import _Patcher
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.proxy import TracerBase
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from dtensor.errors import PlanningError
from dtensor.frontend.call_lock import CALL_LOCK, PerThread, is_capturing, started
from dtensor.frontend.capture.refusals import ASSIGNED, is_same_memory, planning_error
from dtensor.frontend.capture.thread_patches import (
    answered_here,
    filtered,
    here_alone,
    replaced,
    unlogged,
)
from dtensor.frontend.graph import type_text
from dtensor.frontend.source import places_below, source_here
from dtensor.numerics import dtype_name
from dtensor.private_torch import compile_lock
from dtensor.provider import Provider

if TYPE_CHECKING:
    from dtensor.frontend.capture.functions import AppliedFunctions

CHECKPOINT = "dtensor_checkpoint"
"""The key of torch's node annotations under which the number of a checkpoint stands."""
CAPTURED_ON = "cpu"


@contextmanager
def patched(*, below: FunctionType) -> Iterator[list[AppliedFunctions]]:
    """Within a capture. ``below``: the function whose callees' lines are the user's."""
    # Not at the top: they load torch's compiler, and with it triton where that is installed.
    from torch._decomp import decompositions
    from torch.export import _trace
    from torch.fx import graph_module
    from torch.fx.experimental import symbolic_shapes

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
        (_trace, "_override_builtin_ops", lambda _: _builtins_here),
        # It would put back what other threads have assigned; what the program has, side_effects.py
        # sees.
        (_trace, "_detect_attribute_assignment", lambda _: lambda _: nullcontext()),
        (_trace, "_ignore_backend_decomps", lambda _: nullcontext),  # flags of the process
        # What torch logs with a traceback it raises too; of a program that depends on data it
        # prints the graph so far.
        (_trace, "print", lambda _: _prints_nothing),
        (graph_module, "print", lambda _: _prints_nothing),  # the line of a graph that raised
        (torch.autocast, "__init__", _checked_init),
        (torch.autocast, "__enter__", _checked_enter),
        (torch.autocast, "__exit__", _ended),
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
                ("ignore", ASSIGNED, ""),
                ("error", ASSIGNED + r".*self\.(?!\S*_flat_weights)", ""),
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


# -- autocast --------------------------------------------------------------------------------------


_LISTS = ("cpu", "cuda")
DEVICE = Provider[Callable[[], str]]("dtensor.api.store.session:program_device")
"""Gives the device type that programs of this thread are for, one of the lists'."""
_device = cache(DEVICE.get)  # each call of a step asks


@dataclass(frozen=True, slots=True)
class Surrounding:
    """What a program depends on of where it is called: ``device``: the type of what runs it;
    ``autocast``: the list and the dtype of the autocast around the call."""

    device: str
    autocast: tuple[str, torch.dtype] | None


def surrounding() -> Surrounding:
    """Of two lists around the call, that of the program's device holds, as in torch."""
    device = _device()()
    on = [name for name in _LISTS if torch.is_autocast_enabled(name)]
    if not on:
        return Surrounding(device, None)
    name = device if device in on else on[0]
    return Surrounding(device, (name, torch.get_autocast_dtype(name)))


def region(around: Surrounding) -> AbstractContextManager[object]:
    """The autocast of `surrounding`, entered around the user's function alone."""
    if around.autocast is None:
        return nullcontext()
    name, dtype = around.autocast
    return torch.autocast(name, dtype=dtype)


def lists_of(forward: fx.GraphModule) -> set[str]:
    """Which lists an exported forward follows, each with the dtype: "cuda, bf16"."""
    found: set[str] = set()
    for module in forward.modules():
        if isinstance(module, fx.GraphModule):
            regions = module.graph.find_nodes(
                op="call_function", target=torch.ops.higher_order.wrap_with_autocast
            )
            found |= {f"{n.args[0]}, {dtype_name(n.args[1])}" for n in regions if n.args[2]}  # type: ignore[arg-type]
    return found


def _checked_init(init: Any) -> Any:
    def checked(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type not in _LISTS and enabled:
            raise _lost(device_type, "" if dtype is None else f"dtype={dtype}")
        is_cuda = device_type == "cuda"  # which torch switches off where it sees no GPU
        init(self, device_type, dtype, enabled and not is_cuda, cache_enabled)
        if is_cuda:
            self._enabled = enabled
        self.made_in_capture = True

    return checked


def _checked_enter(enter: Any) -> Any:
    def checked(self: Any) -> Any:
        name, device = self.device, _device()()
        others = [other for other in _LISTS if other != name and torch.is_autocast_enabled(other)]
        self.casts, self.put_back = None, ()
        if self._enabled:
            given = f"dtype={self.fast_dtype}"
            if name not in _LISTS:  # made before the capture, as a decorator is
                raise _lost(name, given)
            if others:
                raise _two_lists(name, others[0], given)
        else:
            if others and name != device:
                raise _ends_nothing(name, others[0])
            if name == "cuda" and not hasattr(self, "made_in_capture"):
                matters = device == "cuda" or torch.is_autocast_enabled("cuda")
                if matters and not torch.cuda.is_available():
                    raise _perhaps_off()
            self.put_back = others  # the list that the program's tensors follow
        for other in self.put_back:
            torch.set_autocast_enabled(other, False)
        if self._enabled and name == "cuda":
            # Not at the top: few programs need it.
            from dtensor.frontend.capture.cuda_casts import cuda_casts

            self.casts = ExitStack()
            self.casts.enter_context(undecomposed())  # torch would resize past the list
            self.casts.enter_context(cuda_casts())
        return enter(self)

    return checked


def _ended(leave: Any) -> Any:
    def ended(self: Any, *raised: Any) -> Any:
        result = leave(self, *raised)
        if self.casts is not None:
            self.casts.close()
        for other in self.put_back:
            torch.set_autocast_enabled(other, True)
        return result

    return ended


def _lost(device_type: str, given: str) -> PlanningError:
    given = given and f", {given}"
    return planning_error(
        f'torch.autocast("{device_type}"{given}) would change no op: a program is captured for the '
        f"CPU or for CUDA.",
        source=source_here(),
        fix=f'torch.autocast("{CAPTURED_ON}"{given}) or torch.autocast("cuda"{given}), whose lists '
        f"of ops differ",
    )


def _two_lists(name: str, other: str, given: str) -> PlanningError:
    return planning_error(
        f'torch.autocast("{name}", {given}) is within one for "{other}": two lists of ops at once.',
        source=source_here(),
        fix=f'torch.autocast("{other}", {given}), or end that one first',
    )


def _ends_nothing(name: str, other: str) -> PlanningError:
    return planning_error(
        f'torch.autocast("{name}", enabled=False) would end nothing: the autocast around it is for '
        f'"{other}".',
        source=source_here(),
        fix=f'torch.autocast("{other}", enabled=False)',
    )


def _perhaps_off() -> PlanningError:
    return planning_error(
        'An autocast for "cuda" was made before the program ran, where torch sees no GPU, and is '
        "off: torch switches off what is on there.",
        source=source_here(),
        fix='make it within the program: with torch.autocast("cuda", ...): in the function',
    )


# -- modules that are moved ------------------------------------------------------------------------


def _unmoved(
    module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True
) -> torch.nn.Module:
    """Torch would swap each parameter for what `.to` returns, itself or not."""
    # Not at the top: it loads torch's compiler, and with it triton where that is installed.
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    named = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    alone: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
    if (device := _device()()) != CAPTURED_ON:
        from dtensor.frontend.capture.seen_device import DevicesAlone

        alone = partial(DevicesAlone, device)
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
        stack.enter_context(functions[0].explaining())
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


# -- layers that are kept whole --------------------------------------------------------------------

# Torch registers Python decompositions under autograd for a few ops, for which the joint export has
# no switch. Resizing is one fused kernel otherwise. Those of the margin losses differ from their
# kernels: multilabel_margin_loss with targets that end early (-1) comes out wrong.
_WHOLE = (
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def undecomposed() -> Iterator[None]:
    """Within it these ops are called as they are; may be nested. Only who traces asks for these
    kernels, and only one traces (`patched`)."""
    import torch._decomp

    packets = [getattr(torch.ops.aten, name) for name in _WHOLE]
    ops = [
        getattr(packet, name)
        for packet in packets
        for name in packet.overloads()
        if "out" not in name
    ]
    before = [(op, dict(op.py_kernels)) for op in ops]
    try:
        for op in ops:
            for key in _KEYS:
                op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()
        yield
    finally:
        _put_kernels_back(before)


def _put_kernels_back(before: list[tuple[Any, dict[Any, Any]]]) -> None:
    for op, kernels in before:
        op.py_kernels.clear()
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()


@contextmanager
def whole_layers() -> Iterator[None]:
    """Within it these ops reach the joint graph as they are, and attention that is left in the
    forward as the ops that it is on every machine; not reentrant."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    with undecomposed():
        before = [(attention, dict(attention.py_kernels))]
        try:
            attention.py_kernels.update(dict.fromkeys(_KEYS, _written_attention))
            attention._dispatch_cache.clear()
            yield
        finally:
            _put_kernels_back(before)


def _written_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What SDPBackend.MATH would choose, which is a choice of the process."""
    written = torch.ops.aten._scaled_dot_product_attention_math.default
    return written(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                   enable_gqa=enable_gqa)[0]  # fmt: skip


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
