"""Captures one call of a function as a `Graph` of global ops, forward and backward.

    graph = capture(loss_fn, (model, tokens, targets), grads="loss")

The route: the call as a module of fake tensors (call_as_module.py), non-strict `torch.export` of
it, rewrites on that forward graph (canonical.py), torch's joint export, of repeated layers once
(layers.py, stitch.py), which is then simplified (simplify.py), named (names.py) and described
(to_graph.py). The joint export was chosen because it keeps phase tags, parameter names and the link
from a backward op to its forward, and captured every model it was tried on; `make_fx` of a gradient
has none of these.

Invariants: nothing is computed, no memory is taken, the user's objects are as before.
Not here: placements; what cannot be captured (refusals.py); what torch is changed for (patches.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.traceback import preserve_node_meta
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor.frontend.capture.call_as_module import CallAsModule, Grads, faked, flat_call
from dtensor.frontend.capture.canonical import canonicalise
from dtensor.frontend.capture.decompose import Held
from dtensor.frontend.capture.layers import segments_of
from dtensor.frontend.capture.patches import export_joint, patched, surrounding, whole_layers
from dtensor.frontend.capture.refusals import (
    ASSIGNED,
    assigned_attribute,
    assigned_names,
    check_forward,
    data_dependent,
    data_dependent_errors,
)
from dtensor.frontend.graph import Graph
from dtensor.frontend.marks import capturing_marks
from dtensor.frontend.source import source_of_callable, source_of_exception
from dtensor.sharding.gc_pause import collector_paused


@collector_paused()
def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    grads: Grads,
) -> Graph:
    """The graph of `fn(*args, **kwargs)`; of tensors only shape, dtype and requires_grad count.

    Args:
        fn: a function or nn.Module. Modules among args, or fn itself, give inputs `Param` and
            `ModuleBuffer` under their own names; with several modules the argument's name first.
        grads: "none": forward only. "loss": fn returns a scalar or (scalar, {name: scalar}) and
            the first is differentiated by all parameters and tensor arguments that require grad,
            with cotangent 1. "tangents": each result that requires grad gets a `Tangent`.

    Raises:
        PlanningError: the program cannot be captured faithfully (refusals.py).
    """
    # Not at the top: it loads torch's compiler, and with it triton where that is installed.
    from dtensor.frontend.capture.to_graph import to_graph

    call = flat_call(fn, args, kwargs or {})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    root = CallAsModule(call, grads, surrounding())
    with (
        torch.enable_grad(),
        capturing_marks(),
        patched(below=CallAsModule.forward) as functions,
        faked(call, grads, mode) as tensors,
    ):
        forward = _export(root, tensors)
        for met in functions:
            met.restore(forward)
        canonicalise(forward, itertools.count())
        check_forward(forward)
        # Attention that `canonicalise` leaves decomposes the same on every machine.
        with sdpa_kernel(SDPBackend.MATH), whole_layers():
            joint = _differentiate(forward, tensors, mode)
            return to_graph(root, joint, forward, mode)


def _export(root: CallAsModule, tensors: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    try:
        with preserve_node_meta():  # the numbers of checkpoints
            return torch.export.export(root, tensors, strict=False).module(check_guards=False)
    except data_dependent_errors() as error:
        raise data_dependent(error, source_of_exception(error)) from error
    except UserWarning as warning:
        if not re.match(ASSIGNED, str(warning)):
            raise
        names = assigned_names(str(warning))
        raise assigned_attribute(names, source_of_callable(root.call.fn)) from warning


def _differentiate(
    forward: fx.GraphModule, tensors: tuple[torch.Tensor, ...], mode: FakeTensorMode
) -> Held:
    """The joint graph of forward and backward; repeated layers are differentiated once."""
    segments = segments_of(forward)
    if segments:
        from dtensor.frontend.capture.stitch import NotAlone, stitch  # as to_graph

        try:
            return stitch(forward, segments, tensors, mode)
        except NotAlone:
            pass
    return export_joint(forward, tensors)
