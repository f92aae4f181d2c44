"""Captures one call of a function as a `Graph` of global ops, forward and backward.

    graph = capture(loss_fn, (model, tokens, targets), grads="loss")

The route: non-strict `torch.export` under fake tensors, rewrites on that forward graph
(`canonical`), then torch's joint export, of repeated layers once (`differentiate`), simplified
(`joint`) and named (`names`). The joint export was chosen because it keeps phase tags, parameter
names and the link from a backward op to its forward, and captured every model it was tried on;
`make_fx` of a gradient has none of these.

Invariants: nothing is computed, no memory is taken, the user's objects are as before.
Not here: placements; what cannot be captured (`detect`).
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor.frontend.capture import autocast
from dtensor.frontend.capture import invocation as call_module
from dtensor.frontend.capture.canonical import canonicalise
from dtensor.frontend.capture.checkpoints import recording_checkpoints
from dtensor.frontend.capture.invocation import Grads, Program, faked, make_call
from dtensor.frontend.capture.refusals import (
    assigned_attribute,
    assigned_names,
    check_forward,
    data_dependent,
    data_dependent_errors,
    refusing,
)
from dtensor.frontend.capture.uncompiled import uncompiled
from dtensor.frontend.graph import Graph
from dtensor.frontend.marks import capturing_marks
from dtensor.frontend.source import source_of_callable, source_of_exception, whole_traces
from dtensor.sharding.plan.gc_pause import collector_paused

# Torch's warning about tensors that forward stored in a module. nn.LSTM and its like are exempt:
# they keep their parameters a second time in a list, which the export itself swaps.
_ASSIGNED = r"The tensor attributes? "
_ASSIGNED_BY_USER = _ASSIGNED + r".*self\.(?!\S*_flat_weights)"


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
        PlanningError: the program cannot be captured faithfully (see `detect`).
    """
    # Not at the top: these load torch's compiler, and with it triton where that is installed.
    from dtensor.frontend.capture.differentiate import differentiate
    from dtensor.frontend.capture.fused import whole_layers
    from dtensor.frontend.capture.to_graph import finish

    call = make_call(fn, args, kwargs or {})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    root = Program(call, grads, autocast.surrounding())
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(capturing_marks())
        stack.enter_context(refusing())
        stack.enter_context(autocast.honoured())
        stack.enter_context(whole_traces(call_module.__file__))
        stack.enter_context(uncompiled())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\..*")
        warnings.filterwarnings("ignore", message=_ASSIGNED)
        warnings.filterwarnings("error", message=_ASSIGNED_BY_USER)
        # An LSTM without gradients is one op of mkldnn where the CPU has it; here it is the ops
        # that it is with gradients, and on every machine. (It warns of other flags: filtered.)
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        tensors = stack.enter_context(faked(call, grads, mode))
        with recording_checkpoints():
            forward = _export(root, tensors)
        canonicalise(forward, itertools.count())
        check_forward(forward)
        # Attention that `canonicalise` leaves decomposes the same on every machine.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(whole_layers())
        joint = differentiate(forward, tensors, mode)
        return finish(call, root, joint, forward, mode)


def _export(root: Program, tensors: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    try:
        return torch.export.export(root, tensors, strict=False).module(check_guards=False)
    except data_dependent_errors() as error:
        raise data_dependent(error, source_of_exception(error)) from error
    except UserWarning as warning:
        if not re.match(_ASSIGNED, str(warning)):
            raise
        names = assigned_names(str(warning))
        raise assigned_attribute(names, source_of_callable(root.call.fn)) from warning
