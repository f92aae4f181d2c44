"""Sharding rules of ops: `rule_for` finds a rule, `register` adds one, `pattern` writes one.

    register("mylib.scale.default", pattern("... , -> ...", linear=((0,), (1,))))

Importing this package registers the tables of tables/, one module for each family of ops. Every op
in the tables is certified by dtensor.testing.oracle. Ops that deliberately stay whole on every rank
state the reason (tables/unsplittable.py).
"""

from __future__ import annotations

from dtensor.sharding.rules.build import pattern
from dtensor.sharding.rules.registry import NoRule, register, registered, rule_for
from dtensor.sharding.rules.tables import TABLES

__all__ = ["TABLES", "NoRule", "pattern", "register", "registered", "rule_for"]
