"""From a function or module to one `torch.fx` graph of global ops, forward and backward.

    graph = capture(loss_fn, (model, tokens, targets), grads="loss")
    print(graph)

May import `dtensor.sharding` and `dtensor.errors`. Nothing here knows ranks or actors.
"""

from dtensor.frontend.capture import capture
from dtensor.frontend.graph import (
    Arg,
    Buffer,
    Const,
    Grad,
    Graph,
    Mutation,
    Param,
    Result,
    Source,
    Tangent,
)
from dtensor.frontend.marks import annotate

__all__ = [
    "Arg",
    "Buffer",
    "Const",
    "Grad",
    "Graph",
    "Mutation",
    "Param",
    "Result",
    "Source",
    "Tangent",
    "annotate",
    "capture",
]
