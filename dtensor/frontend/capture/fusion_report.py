"""Report pattern matches with the user's names: module paths and lines.

PatternMatch("attention", "dt.attention", "", meta)
    ->  Recognised("attention", "dt.attention", "", "layers.0.attn", "model.py:14")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dtensor.frontend.capture.names import module_calls
from dtensor.frontend.capture.recognise.pattern_match import PatternMatch
from dtensor.frontend.source import source_of_trace
from dtensor.sharding.plan.dataflow import Recognised


def fusion_report(
    matches: Iterable[PatternMatch], prefixes: Mapping[str, str]
) -> tuple[Recognised, ...]:
    """Return the matches with the user's paths and lines. ``prefixes``: see `FlatCall.prefixes`."""
    return tuple(_recognised(match, prefixes) for match in matches)


def _recognised(match: PatternMatch, prefixes: Mapping[str, str]) -> Recognised:
    calls = module_calls(match.meta.get("nn_module_stack") or {}, prefixes)
    module = calls[-1].partition("@")[0] if calls else ""
    source = source_of_trace(match.meta.get("stack_trace") or "")
    return Recognised(match.what, match.op, match.reason, module, str(source) if source else "")
