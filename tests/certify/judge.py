"""The certificate of a rule over this library's samples of its op.

    certify_samples("aten.mm.default")        # 3 sizes, 2 and 3 ranks, edges, half, backward

2 ranks first, then 3 with other, negated values; sizes 0 and 1 where the op accepts them. The same
seed gives the same certificate. dtensor.testing.oracle defines what is tried for each call.
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.api.rule import op_overloads
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.rules import rule_for
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables import reasons
from dtensor.testing.certificates import (
    Certificate,
    RuleOf,
    certify_backward,
    certify_call,
    certify_half,
    certify_or_refuse,
)
from dtensor.testing.oracle import UNDEFINED
from dtensor.testing.vary import Arguments, accepts
from tests.certify.samples import (
    EDGES,
    NO_HALF,
    POINTWISE,
    SAMPLES,
    STAND_INS,
    UNCHECKED,
    VARIANTS,
    Draw,
    Sample,
)


def certify_samples(
    name: str, *, rule: RuleOf | None = None, seed: int = 0, brief: bool = False
) -> Certificate:
    """Certify one registered op over its samples and their sizes: on 2 ranks, then on 3 with other,
    negated values. ``brief``: one size, on 2 ranks."""
    (target,) = op_overloads(name)
    given = rule or rule_for

    def found(call: OpCall) -> Rule:
        return given(replace(call, target=target))

    stand_in = STAND_INS.get(name, target)
    values = name not in UNDEFINED
    search = values and name not in UNCHECKED and name not in reasons()
    squares = 1 if name in POINTWISE else 2  # their rules are all alike
    total = Certificate()
    for sample in SAMPLES[name]:
        for variant in range(1 if brief else len(VARIANTS)):
            for negate in (False,) if brief else (False, True):
                args, kwargs = sample(Draw(variant, negate=negate, seed=seed))
                total += certify_call(
                    stand_in,
                    args,
                    kwargs,
                    nums=(3,) if negate else (2,),
                    rule=found,
                    seed=2 * seed + negate,
                    square=variant < squares and not negate and not brief,
                    missing=search and variant == 0 and negate,
                )
        if brief:
            continue
        edges = 0 if name in UNCHECKED else len(EDGES)
        for variant in range(len(VARIANTS), len(VARIANTS) + edges):
            edge = _edge(sample, Draw(variant, seed=seed))
            if edge is not None and accepts(stand_in, *edge):
                total += certify_or_refuse(stand_in, *edge, rule=found, seed=2 * seed, square=False)
        args, kwargs = sample(Draw(0, seed=seed))
        if name not in NO_HALF:
            total += certify_half(stand_in, args, kwargs, found)
        if stand_in is target and values:
            total += certify_backward(target, args, kwargs, rule, seed)
    return total


def _edge(sample: Sample, draw: Draw) -> Arguments | None:
    """Return the sample at sizes 0 and 1, where it can be made."""
    try:
        return sample(draw)
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
        return None
