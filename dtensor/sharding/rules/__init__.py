"""The op rules: `rule_for(call)` finds one, `register` adds one, `pattern` writes one.

    register("mylib.scale.default", pattern("... , -> ...", linear=((0,), (1,))))

The tables: pointwise, matmul, reduce, norm, views, pieces, create, tokens. Each op in them carries
a certificate, see dtensor.testing.oracle.
"""

from __future__ import annotations

from dtensor.sharding.rules import (
    create,
    matmul,
    norm,
    pieces,
    pointwise,
    reduce,
    tokens,
    views,
)
from dtensor.sharding.rules.build import pattern
from dtensor.sharding.rules.registry import NoRule, register, registered, rule_for

__all__ = ["NoRule", "pattern", "register", "registered", "rule_for"]

for _table in (create, matmul, norm, pieces, pointwise, reduce, tokens, views):
    for _name, _builder in _table.RULES.items():
        register(_name, _builder)
