"""Placements by what a weight does, for modules: resolved to Shards when a program is planned.

    dt.ColumnParallel(blocks=3)     the output dim of the product that the weight feeds, in 3 blocks
    dt.RowParallel(unit=16)         the dim that the product sums over, cut at multiples of 16

Values alone, as placements are; what they mean in a program is
api/model/stating/roles_of_weights.py's to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.sharding.spec.placements import check_split, options_of

Blocks = int | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnParallel:
    """Splits what a module's weight gives out, in whichever dim of the weight that is: of an
    ``nn.Linear`` the rows, of a ``Conv1D`` of GPT-2 the columns. The glob is a module's name:
    ``{"*.attn.qkv": dict(tp=dt.ColumnParallel(blocks=3))}``.

    Args:
        blocks: of a fused projection, as of `Shard`.
        unit: of whole heads, as of `Shard`.

    Raises PlanningError as `Shard` does; at planning, where no one product says which dim it is.
    """

    blocks: Blocks = 1
    unit: int = 1

    def __post_init__(self) -> None:
        check_split(self, 0, self.blocks, self.unit)

    def __repr__(self) -> str:
        return f"ColumnParallel({', '.join(options_of(self))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParallel:
    """Splits what a module's weight sums over; its products are pending until reduced.

    Args:
        blocks, unit: as of `Shard`, of the dim that is summed over.

    Raises PlanningError as `ColumnParallel` does.
    """

    blocks: Blocks = 1
    unit: int = 1

    def __post_init__(self) -> None:
        check_split(self, 0, self.blocks, self.unit)

    def __repr__(self) -> str:
        return f"RowParallel({', '.join(options_of(self))})"


Role = ColumnParallel | RowParallel
