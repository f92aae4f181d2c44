"""A StoredTensor: one named tensor, how it lies, and on which ranks.

    spec = parse("f32[64@tp,16]", Mesh(pp=2, tp=2))
    w = StoredTensor.of("model 0: up.weight", spec, at=(2, 3), numbers=(4, 5, 6, 7))
    w.at, w.ranks                 # (2, 3), (6, 7): of the mesh, and the same as the launch counts
    w.covering()                  # (2, 3): the ranks to ask for the whole of it

The one form of this fact: parameters, buffers, an optimizer's state, gradients and the values of
DTensors are such while ranks have them, and where they are to be is stated as one. A label is
given to one value of a launch only; in the tables of the ranks it is the value's name.

Invariants: ``spec`` is as stored (ZeRO), never as used; ``at`` and ``ranks`` are in one order.
Not here: the values, and who puts them there (api/store/store.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtensor.errors import PlanningError
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.shards import Where, held
from dtensor.sharding.spec.spec import TensorSpec

Numbers = Sequence[int] | Mapping[int, int]
"""By rank of a mesh, its number in the launch."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``label``: of the value, in the launch; ``spec``: as stored; ``at``: the ranks of its mesh
    that have it; ``ranks``: the same by the launch's numbers."""

    label: str
    spec: TensorSpec
    at: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.at) == len(self.ranks) == len(set(self.ranks)):
            raise PlanningError(
                f"{self.label or self.spec} is on the ranks {list(self.at)} of {self.spec.mesh}, "
                f"and as the launch counts on {list(self.ranks)}; "
                f"fix: state {len(self.at)} different ranks"
            )

    @staticmethod
    def of(label: str, spec: TensorSpec, at: Sequence[int], numbers: Numbers) -> StoredTensor:
        """On these ranks of the spec's mesh."""
        return StoredTensor(label, spec, tuple(at), tuple(numbers[rank] for rank in at))

    def on(self, at: Iterable[int]) -> StoredTensor:
        """The same on these of its ranks alone."""
        return StoredTensor.of(self.label, self.spec, tuple(at), self.numbers)

    @property
    def numbers(self) -> Mapping[int, int]:
        """By rank of the mesh, its number in the launch."""
        return dict(zip(self.at, self.ranks, strict=True))

    @property
    def is_pending(self) -> bool:
        return any(isinstance(p, Partial) for p in self.spec.placements)

    def where(self, rank: int) -> Where:
        """What that rank of the mesh has of the global tensor."""
        return held(self.spec, self.spec.mesh.coordinates(rank))

    def covering(self) -> tuple[int, ...]:
        """Of the ranks of the mesh, one for each different shard; all, where it is pending."""
        if self.is_pending:
            return self.at
        first: dict[Where, int] = {}
        for rank in self.at:
            first.setdefault(self.where(rank), rank)
        return tuple(first.values())
