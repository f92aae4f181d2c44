"""The tables of rules, one module per family. Importing this package registers every `RULES`."""

from __future__ import annotations

from dtensor.sharding.rules.build import with_dtypes, with_parts
from dtensor.sharding.rules.registry import register
from dtensor.sharding.rules.tables import (
    attention,
    conv,
    create,
    diagonals,
    experts,
    gates,
    indexing,
    linalg,
    losses,
    matmul,
    norm,
    pointwise,
    pool,
    reduce,
    slice_and_cat,
    sorting,
    special,
    tokens,
    views,
)
from dtensor.sharding.rules.tables.dtypes import DTYPES, parts_of
from dtensor.sharding.rules.tables.unsplittable import Unsplittable

TABLES = (
    attention,
    conv,
    create,
    diagonals,
    experts,
    gates,
    indexing,
    linalg,
    losses,
    matmul,
    norm,
    pointwise,
    pool,
    reduce,
    slice_and_cat,
    sorting,
    special,
    tokens,
    views,
)

for _table in TABLES:
    for _name, _builder in _table.RULES.items():
        _builder = with_dtypes(DTYPES[_name], _builder) if _name in DTYPES else _builder
        register(_name, with_parts(parts_of, _builder))


def reasons() -> dict[str, str]:
    """Return why each op that deliberately stays whole on every rank is so, by the op's name."""
    rows = ((name, builder) for table in TABLES for name, builder in table.RULES.items())
    return {name: row.reason for name, row in rows if isinstance(row, Unsplittable)}
