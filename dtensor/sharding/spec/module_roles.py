"""Placements that name the role of a module's weight instead of a dim.

    dt.ColumnParallel(blocks=3)     split the output dim of the weight's product, in 3 blocks
    dt.RowParallel(unit=16)         split the dim that the product sums over, at multiples of 16

api/model/stating/roles_of_weights.py replaces them by Shards when it plans a program.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.sharding.spec.placements import check_split, options_of

Blocks = int | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnParallel:
    """Split the output features of a module's weight, whichever dim of the weight they are: rows of
    an ``nn.Linear``, columns of GPT-2's ``Conv1D``. The key of the placement is a glob for modules:
    ``{"*.attn.qkv": dict(tp=dt.ColumnParallel(blocks=3))}``.

    Args:
        blocks: the number of equal blocks that a fused weight joins, such as 3 for qkv, or their
            sizes. Each block is split separately.
        unit: the size of a head. The dim is cut only at multiples of it, so that heads stay whole.

    Raises PlanningError if ``blocks`` or ``unit`` is not a whole number of at least 1. Planning
    raises PlanningError if the module's product does not determine the dim.
    """

    blocks: Blocks = 1
    unit: int = 1

    def __post_init__(self) -> None:
        check_split(self, 0, self.blocks, self.unit)

    def __repr__(self) -> str:
        return f"ColumnParallel({', '.join(options_of(self))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParallel:
    """Split the input features of a module's weight. The product sums over them, so its result is a
    pending sum until it is reduced.

    Args:
        blocks: the number of equal blocks of the input features, or their sizes.
        unit: the input features are cut only at multiples of it.

    Raises PlanningError if ``blocks`` or ``unit`` is not a whole number of at least 1. Planning
    raises PlanningError if the module's product does not determine the dim.
    """

    blocks: Blocks = 1
    unit: int = 1

    def __post_init__(self) -> None:
        check_split(self, 0, self.blocks, self.unit)

    def __repr__(self) -> str:
        return f"RowParallel({', '.join(options_of(self))})"


Role = ColumnParallel | RowParallel
