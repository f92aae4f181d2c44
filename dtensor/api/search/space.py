"""The space of `search`: its points, and its versioned description.

    facts = SpaceFacts(num_ranks=8, rows=32, layers=4, tp_sizes=(1, 2, 4))
    points_of(facts)[0]          # SearchPoint(pp=1, dp=1, tp=8, ...)
    print(space_text(facts))     # the same in words, as docs/searching.md has it

A point is a mesh pp x dp x tp, a ZeRO level over dp, microbatches under a schedule, and whether
repeated layers are recomputed. Placements over tp are derived (derive.py), stages over pp are
"auto". For generation a point is only a mesh.

Invariants: equal facts give the same points in the same order, and costs play no part. A change of
the space changes SPACE_VERSION or GENERATION_VERSION.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dtensor.runtime.schedule import ZBH1, Interleaved1F1B, OneFOneB, Schedule
from dtensor.sharding.spec.mesh import Mesh, mesh_of

SPACE_VERSION = 1
GENERATION_VERSION = 1

Order = Literal["OneFOneB", "Interleaved1F1B", "ZBH1"]
_SCHEDULES = {"OneFOneB": OneFOneB, "Interleaved1F1B": Interleaved1F1B, "ZBH1": ZBH1}
MAX_MICROBATCHES = 64
STAGES_PER_RANK = 2
"""Stages per rank of Interleaved1F1B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFacts:
    """The properties of a program that bound its space.

    rows: rows of the batch, or slots. layers: the number of repeated layers. tp_sizes: numbers of
    ranks over which the derived placements divide. axes: the axes that the topology has prices for.
    """

    num_ranks: int
    rows: int
    layers: int
    tp_sizes: tuple[int, ...]
    axes: tuple[str, ...] = ("pp", "dp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SearchPoint:
    pp: int
    dp: int
    tp: int
    zero: int
    microbatches: int
    order: Order
    recompute: bool

    @property
    def mesh(self) -> Mesh:
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        return mesh_of(tuple((axis, size) for axis, size in sizes.items() if size > 1))

    @property
    def num_stages(self) -> int:
        return self.pp * (STAGES_PER_RANK if self.order == "Interleaved1F1B" else 1)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule; None for one stage and one microbatch."""
        if self.pp == 1 and self.microbatches == 1:
            return None
        return _SCHEDULES[self.order](self.microbatches)

    @property
    def name(self) -> str:
        """``pp2 dp4 zero1 OneFOneB(8) recompute``."""
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1] or ["one rank"]
        words += [f"zero{self.zero}"] if self.zero else []
        words += [f"{self.order}({self.microbatches})"] if self.schedule is not None else []
        words += ["recompute"] if self.recompute else []
        return " ".join(words)


def points_of(facts: SpaceFacts) -> tuple[SearchPoint, ...]:
    """Return every point of the space, in a fixed order."""
    return tuple(_points(facts))


def _points(facts: SpaceFacts) -> Iterator[SearchPoint]:
    for pp, dp, tp in meshes_of(facts):
        for zero in (0, 1, 2, 3) if dp > 1 else (0,):
            for microbatches in _microbatches(facts.rows // dp):
                for order in _orders(pp, microbatches, facts.layers):
                    for recompute in (False, True) if facts.layers else (False,):
                        yield SearchPoint(
                            pp=pp,
                            dp=dp,
                            tp=tp,
                            zero=zero,
                            microbatches=microbatches,
                            order=order,
                            recompute=recompute,
                        )


def meshes_of(facts: SpaceFacts) -> Iterator[tuple[int, int, int]]:
    """Yield the sizes (pp, dp, tp) of each mesh in the space."""
    num = facts.num_ranks
    for pp in _divisors(num):
        for dp in _divisors(num // pp):
            tp = num // pp // dp
            sizes = {"pp": pp, "dp": dp, "tp": tp}
            priced = all(axis in facts.axes for axis, size in sizes.items() if size > 1)
            cut = pp == 1 or pp <= facts.layers
            if priced and cut and facts.rows % dp == 0 and tp in facts.tp_sizes:
                yield pp, dp, tp


def _microbatches(rows: int) -> Iterator[int]:
    """Yield the powers of two that divide a rank's rows, up to MAX_MICROBATCHES."""
    num = 1
    while rows % num == 0 and num <= MAX_MICROBATCHES:
        yield num
        num *= 2


def _orders(pp: int, microbatches: int, layers: int) -> Sequence[Order]:
    """Return the schedules of a mesh: Interleaved1F1B needs two layers per rank of pp."""
    if pp == 1 or microbatches == 1:
        return ("OneFOneB",)
    if STAGES_PER_RANK * pp <= layers:
        return ("OneFOneB", "Interleaved1F1B", "ZBH1")
    return ("OneFOneB", "ZBH1")


def _divisors(num: int) -> list[int]:
    return [divisor for divisor in range(1, num + 1) if num % divisor == 0]


def space_text(facts: SpaceFacts) -> str:
    """Return a description of a training step's space."""
    sizes = ", ".join(map(str, facts.tp_sizes))
    return (
        f"space {SPACE_VERSION}: meshes pp x dp x tp of {facts.num_ranks} ranks, pp up to "
        f"{max(facts.layers, 1)}, dp dividing {facts.rows} rows, tp of {sizes};\n"
        f"  zero 0 to 3 over dp; microbatches 1, 2, 4 to {MAX_MICROBATCHES}; "
        f"OneFOneB, and with pp ZBH1\n"
        f"  and Interleaved1F1B with {STAGES_PER_RANK} stages a rank; recompute none or the "
        f"{facts.layers} repeated layers"
    )


def generation_space_text(facts: SpaceFacts) -> str:
    """Return a description of the space of generation, where ``facts.rows`` are slots."""
    sizes = ", ".join(map(str, facts.tp_sizes))
    return (
        f"space of generation {GENERATION_VERSION}: meshes pp x dp x tp of {facts.num_ranks} "
        f"ranks, pp up to {max(facts.layers, 1)},\n"
        f"  dp dividing {facts.rows} slots, tp of {sizes}; layers dealt evenly over pp"
    )
