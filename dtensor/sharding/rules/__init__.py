"""The op rules: `rule_for(call)` finds one, `register` adds one, `pattern` writes one.

    register("mylib.scale.default", pattern("... , -> ...", linear=((0,), (1,))))

The tables are modules of this package, one per family. Each op in them carries a certificate, see
dtensor.testing.oracle; ops that are whole on every rank on purpose say why (whole.py).
"""

from __future__ import annotations

from dtensor.sharding.rules import (
    activations,
    batchnorm,
    checked,
    conv,
    create,
    diagonals,
    fft,
    indexing,
    linalg,
    losses,
    matmul,
    nnmisc,
    norm,
    pieces,
    pointwise,
    pool,
    random,
    reduce,
    scattering,
    sorting,
    special,
    tokens,
    views,
)
from dtensor.sharding.rules.build import pattern
from dtensor.sharding.rules.registry import NoRule, register, registered, rule_for

__all__ = ["TABLES", "NoRule", "pattern", "register", "registered", "rule_for"]

# One module per family, each with its RULES.
TABLES = (
    activations,
    batchnorm,
    checked,
    conv,
    create,
    diagonals,
    fft,
    indexing,
    linalg,
    losses,
    matmul,
    nnmisc,
    norm,
    pieces,
    pointwise,
    pool,
    random,
    reduce,
    scattering,
    sorting,
    special,
    tokens,
    views,
)

for _table in TABLES:
    for _name, _builder in _table.RULES.items():
        register(_name, _builder)
