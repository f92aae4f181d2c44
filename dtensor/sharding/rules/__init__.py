"""The op rules: `rule_for(call)` finds one, `register` adds one, `pattern` writes one.

    register("mylib.scale.default", pattern("... , -> ...", linear=((0,), (1,))))

The tables are one module per family (tables/); importing this package registers them. Each op in
them carries a certificate, see dtensor.testing.oracle; ops that are whole on every rank on purpose
say why (tables/unsplittable.py).
"""

from __future__ import annotations

from dtensor.sharding.rules.build import pattern
from dtensor.sharding.rules.registry import NoRule, register, registered, rule_for
from dtensor.sharding.rules.tables import TABLES

__all__ = ["TABLES", "NoRule", "pattern", "register", "registered", "rule_for"]
