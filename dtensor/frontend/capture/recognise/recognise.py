"""Replace patterns of an exported forward graph by the dt ops that compute the same.

    sdpa(q, k, v, mask with terms)   ->  dt.attention(q, k, v, True, scale, window=[3, 0])[0]
    sdpa(q, k, v, any other mask)    ->  dt.attention_masked(q, k, v, mask, scale)[0]

This runs before differentiation, because dt ops have their own backward, and before random ops are
numbered. `Plan.recognised` reports all matches and the reasons for failed ones. A pattern whose
intermediate values are used elsewhere is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from dtensor.frontend.capture.memory_rewrites import keep_strides
from dtensor.frontend.capture.names import module_calls
from dtensor.frontend.capture.recognise.attention import (
    pick_repeated_heads,
    rewrite_attention,
    rewrite_written,
    simplify_mask,
)
from dtensor.frontend.capture.recognise.constants import Constants, Writes
from dtensor.frontend.capture.recognise.dropout import rewrite_dropout_add
from dtensor.frontend.capture.recognise.gates import rewrite_gate
from dtensor.frontend.capture.recognise.mask_terms import MaskTerms
from dtensor.frontend.capture.recognise.matching import CASTS, NoMatch, PatternMatch, is_op, users
from dtensor.frontend.capture.recognise.norms import rewrite_layer_norm, rewrite_rms_norm
from dtensor.frontend.capture.recognise.rope import rewrite_rope
from dtensor.frontend.capture.transformers_experts import EXPERTS
from dtensor.frontend.source import source_of_trace
from dtensor.sharding.plan.dataflow import Recognised

aten: Any = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default
_WRITTEN = torch.ops.dt.written_attention.default


Rewrite = Callable[[fx.Graph, fx.Node, Writes], tuple[str, fx.Node]]
_PATTERNS: tuple[tuple[str, Rewrite, tuple[Any, ...]], ...] = (
    ("dropout", rewrite_dropout_add, (aten.dropout.default,)),  # first: norms would take its sum
    ("rms norm", rewrite_rms_norm, (aten.rsqrt.default,)),
    ("layer norm", rewrite_layer_norm, (aten.layer_norm.default,)),
    ("rope", rewrite_rope, (aten.cat.default,)),
    ("gate", rewrite_gate, (aten.silu.default, aten.gelu.default, aten.tanh.default)),
)


def recognise(graph: fx.Graph) -> list[PatternMatch]:
    """Rewrite all patterns in place; return the matches and failed matches in program order."""
    constants = Constants(graph)
    writes, order = constants.writes, {node: i for i, node in enumerate(graph.nodes)}
    report: list[tuple[int, PatternMatch]] = []
    for name, rewrite, targets in _PATTERNS:
        for target in targets:
            for node in graph.find_nodes(op="call_function", target=target):
                try:
                    op, new = rewrite(graph, node, writes)
                except NoMatch as reason:
                    if str(reason):
                        report.append((order[node], PatternMatch(name, "", str(reason), node.meta)))
                else:
                    report.append((order[node], PatternMatch(name, op, "", new.meta)))
    for node in graph.find_nodes(op="call_function", target=aten.rms_norm.default):
        report.append((order[node], PatternMatch("rms norm", "_fused_rms_norm", "", node.meta)))
    for node in graph.find_nodes(op="call_function", target=torch.ops.dt.balance_loss.default):
        match = PatternMatch("load balancing", "dt.balance_loss", "", node.meta)
        report.append((order[node], match))
    report += ((order[node], match) for node, match in _experts(graph))
    report += _attentions(graph, constants, order)
    for node in graph.find_nodes(op="call_function", target=aten.softmax.int):
        if _is_attention_softmax(node):
            reason = "it is written with matmul and softmax"
            report.append((order[node], PatternMatch("attention", "", reason, node.meta)))
    return [match for _, match in sorted(report, key=itemgetter(0))]


def _experts(graph: fx.Graph) -> Iterator[tuple[fx.Node, PatternMatch]]:
    """Yield the experts of transformers that are replaced, and the experts that are a bmm."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.dt.route.default):
        if EXPERTS in (node.meta.get("custom") or {}):
            yield node, PatternMatch("experts", "dt.expert_mm", "", node.meta)
    modules: set[str] = set()
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        calls = node.meta.get("nn_module_stack") or {}
        name, kind = next(reversed(calls.values()), ("", ""))
        if str(kind).endswith("Experts") and name not in modules:
            modules.add(name)
            reason = "each expert multiplies all rows (bmm)"
            yield node, PatternMatch("experts", "", reason, node.meta)


def _attentions(
    graph: fx.Graph, constants: Constants, order: Mapping[fx.Node, int]
) -> Iterator[tuple[int, PatternMatch]]:
    """Rewrite all attentions; yield the position of each in the program, and its match."""
    pick_repeated_heads(graph)
    attentions = graph.find_nodes(op="call_function", target=_ATTENTION)
    masks = MaskTerms(graph, constants)
    for node in attentions:
        simplify_mask(node, masks)
    views = bool(graph.find_nodes(op="call_function", target=aten.view.default))
    for node in attentions:
        if views:
            keep_strides(graph, node)
    rewrites = ((_ATTENTION, rewrite_attention), (_WRITTEN, rewrite_written))
    for target, rewrite in rewrites:
        for node in graph.find_nodes(op="call_function", target=target):
            try:
                op, reason_text = rewrite(graph, node, masks)
            except NoMatch as reason:
                op, reason_text = "", str(reason)
            yield order[node], PatternMatch("attention", op, reason_text, node.meta)


def _is_attention_softmax(softmax: fx.Node) -> bool:
    """Return whether a matmul reads the result, perhaps cast or with dropout: written attention."""
    for user in users(softmax):
        if is_op(user, aten.matmul.default, aten.bmm.default):
            return True
        if is_op(user, *CASTS, aten.dropout.default) and _is_attention_softmax(user):
            return True
    return False


def fusion_report(
    matches: Iterable[PatternMatch], prefixes: Mapping[str, str]
) -> tuple[Recognised, ...]:
    """Return the matches with the user's paths and lines. See `FlatCall.prefixes`."""
    report: list[Recognised] = []
    for match in matches:
        calls = module_calls(match.meta.get("nn_module_stack") or {}, prefixes)
        module = calls[-1].partition("@")[0] if calls else ""
        line = source_of_trace(match.meta.get("stack_trace") or "")
        report.append(Recognised(match.what, match.op, match.reason, module, str(line or "")))
    return tuple(report)
