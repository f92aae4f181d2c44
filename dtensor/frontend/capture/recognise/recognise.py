"""Recognition: what an exported forward graph writes out and the project has as one op.

    sdpa(q, k, v, mask of what comes later)  ->  dt.attention(q, k, v, True, scale)[0]

Before differentiation, because the project's ops bring their own backward, and before random ops
are numbered. What is met is told, recognised or not (`Plan.recognised`).

Invariants: those of canonical.py. A pattern of which a value is used elsewhere stays as it is.
Not here: the patterns.
"""

from __future__ import annotations

import torch
from torch import fx

from dtensor.frontend.capture.memory import keep_layout
from dtensor.frontend.capture.recognise.attention import attention, settle_mask
from dtensor.frontend.capture.recognise.constants import Constants
from dtensor.frontend.capture.recognise.met import Met

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default


def recognise(graph: fx.Graph) -> list[Met]:
    """In place. Returns what was recognised and what was not."""
    met: list[Met] = []
    constants = Constants(graph)
    attentions = graph.find_nodes(op="call_function", target=_ATTENTION)
    masks = {node: settle_mask(node, constants) for node in attentions}
    views = bool(graph.find_nodes(op="call_function", target=aten.view.default))
    for node, mask in masks.items():
        if views:
            keep_layout(graph, node)
        reason = mask or attention(graph, node, constants.writes)
        met.append(Met("attention", "" if reason else "dt.attention", reason, node.meta))
    return met
