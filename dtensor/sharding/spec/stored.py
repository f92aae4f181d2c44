"""`StoredTensor`: the label, the sharding and the ranks of one tensor that is stored on ranks.

    spec = parse("f32[64@tp,16]", Mesh(pp=2, tp=2))
    w = StoredTensor.of("model 0: up.weight", spec, at=(2, 3), numbers=(4, 5, 6, 7))
    w.at, w.ranks                 # (2, 3), (6, 7): ranks in the mesh, the same ranks in the launch
    w.covering()                  # (2, 3): ranks whose shards together are the whole tensor

It describes parameters, buffers, optimizer state, gradients and the values of DTensors, and also
the place to which one of them moves. api/store/store.py stores the values.

Invariants: a label belongs to one value of a launch; ``spec`` is the sharding in storage (ZeRO),
which may differ from the sharding in use; ``at`` and ``ranks`` have the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtensor.errors import PlanningError
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.shards import Where, held_indices
from dtensor.sharding.spec.spec import TensorSpec

Numbers = Sequence[int] | Mapping[int, int]
"""The launch's number of each rank of a mesh, by the rank in the mesh."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``label``: the name of the value in the launch and in the tables of the ranks; ``spec``: its
    sharding in storage; ``at``: the ranks that hold it, as numbers in its mesh; ``ranks``: the same
    ranks, as numbers in the launch."""

    label: str
    spec: TensorSpec
    at: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise PlanningError unless each rank of the mesh has a different number in the launch."""
        if not len(self.at) == len(self.ranks) == len(set(self.ranks)):
            raise PlanningError(
                f"{self.label or self.spec} is on the ranks {list(self.at)} of {self.spec.mesh}, "
                f"but {list(self.ranks)} are stated as their numbers in the launch; "
                f"fix: state {len(self.at)} different ranks"
            )

    @staticmethod
    def of(label: str, spec: TensorSpec, at: Sequence[int], numbers: Numbers) -> StoredTensor:
        """Return the tensor stored on the ranks ``at`` of the spec's mesh."""
        return StoredTensor(label, spec, tuple(at), tuple(numbers[rank] for rank in at))

    def on(self, at: Iterable[int]) -> StoredTensor:
        """Return the same tensor, stored only on the ranks ``at``, a part of its ranks."""
        return StoredTensor.of(self.label, self.spec, tuple(at), self.numbers)

    @property
    def numbers(self) -> Mapping[int, int]:
        """The launch's number of each rank that holds the tensor, by the rank in the mesh."""
        return dict(zip(self.at, self.ranks, strict=True))

    @property
    def is_pending(self) -> bool:
        return any(isinstance(p, Partial) for p in self.spec.placements)

    def where(self, rank: int) -> Where:
        """Return the global indices that this rank of the mesh holds."""
        return held_indices(self.spec, self.spec.mesh.coordinates(rank))

    def covering(self) -> tuple[int, ...]:
        """Return one rank of the mesh for each different shard; all ranks if it is pending."""
        if self.is_pending:
            return self.at
        first: dict[Where, int] = {}
        for rank in self.at:
            first.setdefault(self.where(rank), rank)
        return tuple(first.values())
