"""Replace patterns of an exported forward graph by the dt ops that compute the same.

    sdpa(q, k, v, mask of what comes later)  ->  dt.attention(q, k, v, True, scale)[0]
    sdpa(q, k, v, any other mask)            ->  dt.attention_masked(q, k, v, mask, scale)[0]

This runs before differentiation, because dt ops have their own backward, and before random ops are
numbered. `Plan.recognised` reports all matches and the reasons for failed ones. A pattern whose
intermediate values are used elsewhere is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from dtensor.frontend.capture.memory_rewrites import keep_layout
from dtensor.frontend.capture.recognise.attention import Mask, attention, read_copies, settle_mask
from dtensor.frontend.capture.recognise.constants import Constants, Writes
from dtensor.frontend.capture.recognise.dropout import dropped_sum
from dtensor.frontend.capture.recognise.gates import gate
from dtensor.frontend.capture.recognise.matching import CASTS, NoMatch, is_op, users
from dtensor.frontend.capture.recognise.norms import layer_norm, rms_norm
from dtensor.frontend.capture.recognise.pattern_match import PatternMatch
from dtensor.frontend.capture.recognise.rope import rope

aten: Any = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default


Match = Callable[[fx.Graph, fx.Node, Writes], tuple[str, fx.Node]]
_MATCHES: tuple[tuple[str, Match, tuple[Any, ...]], ...] = (
    ("dropout", dropped_sum, (aten.dropout.default,)),  # first: norms would take its sum
    ("rms norm", rms_norm, (aten.rsqrt.default,)),
    ("layer norm", layer_norm, (aten.layer_norm.default,)),
    ("rope", rope, (aten.cat.default,)),
    ("gate", gate, (aten.silu.default, aten.gelu.default, aten.tanh.default)),
)


def recognise(graph: fx.Graph) -> list[PatternMatch]:
    """Rewrite all patterns in place; return the matches and failed matches in program order."""
    constants = Constants(graph)
    writes, order = constants.writes, {node: i for i, node in enumerate(graph.nodes)}
    met: list[tuple[int, PatternMatch]] = []
    for what, match, targets in _MATCHES:
        for target in targets:
            for node in graph.find_nodes(op="call_function", target=target):
                try:
                    op, new = match(graph, node, writes)
                except NoMatch as reason:
                    if str(reason):
                        met.append((order[node], PatternMatch(what, "", str(reason), node.meta)))
                else:
                    met.append((order[node], PatternMatch(what, op, "", new.meta)))
    for node in graph.find_nodes(op="call_function", target=aten.rms_norm.default):
        met.append((order[node], PatternMatch("rms norm", "_fused_rms_norm", "", node.meta)))
    met += _attentions(graph, constants, order)
    for node in graph.find_nodes(op="call_function", target=aten.softmax.int):
        if _weighs(node):
            reason = "it is written with matmul and softmax"
            met.append((order[node], PatternMatch("attention", "", reason, node.meta)))
    return [each for _, each in sorted(met, key=itemgetter(0))]


def _attentions(
    graph: fx.Graph, constants: Constants, order: Mapping[fx.Node, int]
) -> Iterator[tuple[int, PatternMatch]]:
    """Rewrite all attentions; yield the position of each in the program, and its match."""
    read_copies(graph)
    attentions = graph.find_nodes(op="call_function", target=_ATTENTION)
    known: dict[Mask, bool | None] = {}
    for node in attentions:
        settle_mask(node, constants, known)
    views = bool(graph.find_nodes(op="call_function", target=aten.view.default))
    for node in attentions:
        if views:
            keep_layout(graph, node)
        try:
            op, why = attention(graph, node, constants.writes), ""
        except NoMatch as reason:
            op, why = "", str(reason)
        yield order[node], PatternMatch("attention", op, why, node.meta)


def _weighs(softmax: fx.Node) -> bool:
    """Return whether a matmul reads the result, perhaps cast or with dropout: written attention."""
    for user in users(softmax):
        if is_op(user, aten.matmul.default, aten.bmm.default):
            return True
        if is_op(user, *CASTS, aten.dropout.default) and _weighs(user):
            return True
    return False
