"""Capture one call of a function as a `Graph` of global ops, forward and backward.

    graph = capture(loss_fn, (model, tokens, targets), grads="loss")

The steps: wrap the call as a module of fake tensors (call_as_module.py), export it with non-strict
`torch.export`, rewrite the forward graph (canonical.py), differentiate it with torch's joint export
(stitch.py: repeated layers only once), and simplify, name and describe the result (to_graph.py).

Invariants: nothing is computed and no memory is allocated. The graph records what the program read
besides its arguments (frontend/guards). Everything that the call changed is undone, except caches:
a change is a cache if a second capture changes nothing more.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta

from dtensor.frontend.call_lock import CALL_LOCK, capturing
from dtensor.frontend.capture.autocast import autocast_regions, surrounding
from dtensor.frontend.capture.call_as_module import (
    CallAsModule,
    FlatCall,
    Grads,
    fake_state,
    flat_call,
    refuse_hooks,
    stored_tensor_error,
)
from dtensor.frontend.capture.canonical import canonicalise
from dtensor.frontend.capture.decompose import ModuleWithConstants
from dtensor.frontend.capture.forward_mode import PlainZeros, is_nested
from dtensor.frontend.capture.layers import fingerprint, segments_of
from dtensor.frontend.capture.patches import export_joint, load_compiler, patched
from dtensor.frontend.capture.refusals import (
    STORED_WARNING,
    check_forward,
    data_dependent_error,
    data_dependent_errors,
    random_state_error,
    side_effects_error,
    stored_names,
)
from dtensor.frontend.capture.torch_state import restored_on_failure
from dtensor.frontend.capture.whole_layers import whole_layers
from dtensor.frontend.graph import Const, Graph
from dtensor.frontend.guards.guards import Guards, custom_ops
from dtensor.frontend.guards.side_effects import Change, StateBefore, line_of_change, redo, undo
from dtensor.frontend.guards.unguarded import outside
from dtensor.frontend.guards.walk import walk
from dtensor.frontend.source import source_of_callable, source_of_exception
from dtensor.gc_pause import collector_paused
from dtensor.private_torch import FakeTensorMode, without_trace
from dtensor.signals import act, immediate_handlers

if TYPE_CHECKING:
    from dtensor.frontend.capture.functions import AppliedFunctions


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    grads: Grads,
    each_call: bool = False,
    main: nn.Module | None = None,
) -> Graph:
    """Return the graph of `fn(*args, **kwargs)`. Only shapes, dtypes and requires_grad of tensors
    are used, not their values.

    Args:
        fn: a function or nn.Module. The parameters and buffers of fn, and of modules in args,
            become inputs `Param` and `ModuleBuffer`. If there are several modules, their names
            start with the name of the argument that holds the module.
        grads: "none": forward only. "loss": fn returns a scalar loss or (loss, {name: scalar});
            the loss is differentiated with respect to all parameters and tensor arguments that
            require grad. "tangents": each result that requires grad gets a `Tangent` input.
        main: the module whose parameter names get no prefix, if there are several modules.
        each_call: the graph is used for this call only, so the program may draw random numbers
            and change attributes in Python, as it would in torch.

    Raises:
        PlanningError: the program cannot be captured faithfully (refusals.py).
    """
    with CALL_LOCK, collector_paused():
        return _capture_graph(flat_call(fn, args, kwargs or {}, main), grads, each_call)


def _capture_graph(call: FlatCall, grads: Grads, each_call: bool) -> Graph:
    refuse_hooks(call, grads)
    first = _Capture(call, grads, each_call=each_call)
    try:
        if each_call:
            first.check_tensors()
            return first.with_reads()
        first.check()
        if not first.changes:
            return _with_warnings(first.with_reads())
        second = _capture_again(call, grads)  # if a cache was filled, this changes nothing
    except BaseException:
        undo(first.changes)
        raise
    if second.text() == first.text():
        return _with_warnings(second.with_reads())
    undo(first.changes)
    # The filled cache changed the program. Guard the graph on the state before the cache was
    # filled, so that the next call is captured again.
    graph = _with_warnings(first.with_reads())
    redo(first.changes)
    return graph


def _capture_again(call: FlatCall, grads: Grads) -> _Capture:
    """Return a second capture. Raises PlanningError if it changes an object again: a captured step
    would lose that change."""
    second = _Capture(call, grads)
    try:
        second.check()
        if second.changes:
            line = line_of_change(second.changes[0], second.ran)
            raise side_effects_error(second.changes, line or source_of_callable(call.fn))
    except BaseException:
        undo(second.changes)
        raise
    return second


def _with_warnings(graph: Graph) -> Graph:
    """Return the graph; warn, once per line, of reads that no guard can compare."""
    reads = graph.reads
    assert reads is not None
    for read in () if reads.ran is None else outside(reads.reached, reads.ran):
        warnings.warn_explicit(
            f"The program reads {read.what}, once: when it is captured. What changes there is not "
            f"noticed ({read.line}: {read.line.text})\n"
            f"fix: pass it as an argument, or state that it stays as it is: dt.constant(function)",
            UserWarning,
            read.line.file,
            read.line.line,
            registry=_WARNING_REGISTRIES.setdefault(read.line.file, {}),
        )
    return graph


_WARNING_REGISTRIES: dict[str, dict[Any, Any]] = {}
"""The registry of each file in which Python records its warnings, so that each is shown once."""
MAX_CACHED_FAKES = 1 << 12
"""The size of torch's process-wide cache of ops on fake tensors above which we clear it. A small
model adds some 300 entries per input shape, and torch never evicts them."""


def trim_fake_cache() -> None:
    """Clear torch's cache of ops on fake tensors if it is large."""
    if FakeTensorMode.cache_info().size > MAX_CACHED_FAKES:
        FakeTensorMode.cache_clear()


class _Capture:
    """One run of the Python of a call. ``changes``: the changes that it made to Python objects,
    which stay; after an error they are undone."""

    def __init__(self, call: FlatCall, grads: Grads, *, each_call: bool = False) -> None:
        # Imported here because it loads torch's compiler, and triton if it is installed.
        load_compiler()
        self.call = call
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        before = StateBefore(walk(call.roots))
        root = CallAsModule(call, grads, before, surrounding())
        self.changes: list[Change] = root.notes.changes
        self.drawn_generators: list[str] = []
        try:
            with in_capture() as functions, fake_state(call, grads, mode) as tensors:
                forward = export_call(root, tensors)
                for applied in functions:
                    applied.restore(forward)
                self.graph = graph_of(root, forward, tensors, mode)
        except BaseException:
            undo(self.changes)
            raise
        finally:
            if (writes := root.notes.writes) is not None:
                before.clear_grown_caches(writes)
                self.drawn_generators = before.moved(writes)
                if not each_call:
                    before.put_back(writes)
        self.ran = root.recorder.codes()
        self.values = root.notes.values

    def check_tensors(self) -> None:
        if tensor_changes := [change for change in self.changes if change.has_tensors]:
            line = line_of_change(tensor_changes[0], self.ran)
            raise stored_tensor_error(self.call, [change.path for change in tensor_changes], line)

    def check(self) -> None:
        self.check_tensors()
        if self.drawn_generators:
            raise random_state_error(self.drawn_generators, source_of_callable(self.call.fn))

    def text(self) -> str:
        constants = [c.value.tolist() for c in self.graph.inputs if isinstance(c, Const)]
        return f"{self.graph}{constants}"

    def with_reads(self) -> Graph:
        """Return the graph, with guards on the current values of all that the program read."""
        constants = [(c.name, c.value) for c in self.graph.inputs if isinstance(c, Const)]
        ops = custom_ops(self.graph.fx)
        reads = Guards(self.call.roots, self.ran, constants, ops, values=self.values)
        return replace(self.graph, reads=reads)


@contextmanager
def in_capture() -> Iterator[list[AppliedFunctions]]:
    """Make this thread the one that captures; yield the list of the custom autograd Functions that
    the program applies (at most one `AppliedFunctions`)."""
    with (
        restored_on_failure(),
        capturing(),
        torch.enable_grad(),
        patched(below=CallAsModule.forward) as functions,
        without_trace(),
        immediate_handlers(),  # runs signal handlers at once
    ):
        yield functions


def graph_of(
    root: CallAsModule,
    forward: fx.GraphModule,
    tensors: tuple[torch.Tensor, ...],
    mode: FakeTensorMode,
) -> Graph:
    """Differentiate an exported forward graph and return the `Graph`. Rewrites ``forward``; must
    run inside `in_capture` and `fake_state`."""
    from dtensor.frontend.capture.to_graph import to_graph  # loads torch's compiler, as above

    act()  # handles signals that arrived
    exported = fingerprint(forward)
    matches = canonicalise(forward, itertools.count())
    check_forward(forward, root.grads != "none")
    with whole_layers():
        joint = _differentiate(forward, tensors, mode)
        graph = to_graph(root, joint, forward, mode)
        graph = replace(graph, exported=exported, autocast=tuple(sorted(autocast_regions(forward))))
    if matches:
        from dtensor.frontend.capture.recognise.recognise import fusion_report  # few need it

        graph = replace(graph, recognised=fusion_report(matches, root.call.prefixes))
    return graph


def export_call(root: CallAsModule, tensors: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """Return the exported forward graph of a call; raises errors in terms of the user's program."""
    try:
        with preserve_node_meta():  # holds the numbers of checkpoints
            exported = torch.export.export(root, tensors, strict=False)
            return _buffers_to_constants(exported.module(check_guards=False), root)
    except data_dependent_errors() as error:
        raise data_dependent_error(error, source_of_exception(error)) from error
    except UserWarning as warning:
        if not re.match(STORED_WARNING, str(warning)):
            raise
        raise stored_tensor_error(root.call, stored_names(str(warning)), None) from warning
    except Exception as error:
        from dtensor.frontend.capture.failures import export_error  # only errors need it

        raise export_error(error, root)  # noqa: B904 - its cause is set


def _buffers_to_constants(forward: fx.GraphModule, root: CallAsModule) -> fx.GraphModule:
    """Turn each `nn.Buffer` that the program closed over from a buffer of the exported module into
    a plain attribute, as torch exports other tensors, so that it becomes a constant."""
    buffers = dict(root.named_buffers(remove_duplicate=False))
    for name, value in list(forward.named_buffers(remove_duplicate=False)):
        if name not in buffers:
            path, _, last = name.rpartition(".")
            owner = forward.get_submodule(path)
            del owner._buffers[last]
            setattr(owner, last, value.detach())
    return forward


def _differentiate(
    forward: fx.GraphModule, tensors: tuple[torch.Tensor, ...], mode: FakeTensorMode
) -> ModuleWithConstants:
    """Return the joint graph of forward and backward. Repeated layers are differentiated once."""
    segments = segments_of(forward)
    try:
        if segments:
            from dtensor.frontend.capture.stitch import NotSeparable, stitch  # loads the compiler

            try:
                return stitch(forward, segments, tensors, mode)
            except NotSeparable:
                pass
        with PlainZeros() if is_nested(forward.graph) else nullcontext():
            return export_joint(forward, tensors)
    except Exception as error:
        from dtensor.frontend.capture.failures import backward_error

        raise backward_error(error)  # noqa: B904 - its cause is set
