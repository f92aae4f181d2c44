"""Use some ranks of a cluster as a cluster of their own.

    with launch_cluster(4) as whole:
        part = SubCluster(whole, (2, 3), "part 1: ", 'mesh(tp=2, name="play")')
        part.put([{"w": w0}, {"w": w1}])           # on ranks 2 and 3 of the whole
        part.run(part.load(program_of_two_ranks), [{}, {}]).get()

Several parts may share ranks: each part prefixes its names in the ranks' tables. A program of the
part is renamed for the whole cluster: rank i becomes ``ranks[i]``, state gets the prefix, and the
other ranks take no part. Errors show both numbers of a rank: "rank 2, rank 0 of mesh(tp=2)".
Closing a part stops nothing; if the whole cluster fails, its parts have failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dtensor.daft.cluster.cluster import (
    Cluster,
    Future,
    Handle,
    Method,
    RunRequest,
    check_size,
)
from dtensor.daft.errors import ClusterClosed, DaftError
from dtensor.daft.ir.program import Program, RankProgram
from dtensor.daft.run.worker import NOTHING_DROPPED, Names, Stored
from dtensor.daft.status import Status

if TYPE_CHECKING:
    from dtensor.daft.cluster.call_log import Recovered


class SubCluster(Cluster):
    """Some ranks of the cluster ``whole``. ``title``: the part's name in errors."""

    def __init__(self, cluster: Cluster, ranks: Sequence[int], prefix: str, title: str) -> None:
        self.whole = cluster
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.prefix = prefix
        self.size = len(self.ranks)
        self.device = cluster.device
        self.immediate = cluster.immediate
        self._closed = False
        outside = [rank for rank in self.ranks if not 0 <= rank < cluster.size]
        if outside or len(set(self.ranks)) != self.size or not self.ranks:
            raise ValueError(
                f"A part has distinct ranks of its cluster, 0..{cluster.size - 1}; "
                f"got {list(self.ranks)}."
            )
        self.known_as = {}
        self._names = tuple(f"rank {index} of {title}" for index in range(self.size))
        for rank, name in zip(self.ranks, self._names, strict=True):
            earlier_name = cluster.known_as.get(rank)
            cluster.known_as[rank] = f"{earlier_name} and {name}" if earlier_name else name

    @property
    def calls(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.calls

    @property
    def runs(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.runs

    @property
    def recoveries(self) -> Sequence[Recovered]:
        return self.whole.recoveries

    @property
    def recovered(self) -> int:
        return self.whole.recovered

    @property
    def failure(self) -> DaftError | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.failure

    @property
    def copies(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.whole.copies

    def inner(self, name: str) -> str:
        """Return the name in the ranks' tables for a name of the part."""
        return self.prefix + name

    def put(
        self,
        values: Sequence[Mapping[str, object]],
        *,
        drop: Names = NOTHING_DROPPED,
        wait: bool = False,
    ) -> None:
        """Store values in the ranks of the part, under the names that the tables have."""
        self._check(values, "put")
        renamed_values = [
            {self.inner(n): v for n, v in values_of_rank.items()} for values_of_rank in values
        ]
        self.whole.put(self._spread(renamed_values, {}), drop=self._renamed_drops(drop), wait=wait)

    def get(self, names: Sequence[Sequence[str] | None]) -> Future:
        self._check(names, "get")
        renamed_names = [
            None if names_of_rank is None else [self.inner(n) for n in names_of_rank]
            for names_of_rank in names
        ]
        return _SubClusterFuture(self.whole.get(self._spread(renamed_names, None)), self.ranks)

    def delete(self, names: Sequence[Sequence[str]]) -> None:
        self._check(names, "delete")
        self.whole.delete(
            self._spread([[self.inner(n) for n in names_of_rank] for names_of_rank in names], [])
        )

    def load(self, program: Program) -> Handle:
        self._check(program.ranks, f"Program {program.name!r}")
        return self.whole.load(self._rename_for_whole(program))

    def unload(self, handle: Handle) -> None:
        self.whole.unload(handle)

    def submit(self, request: RunRequest) -> Future:
        """Run the program on the whole cluster, with the names of values that the tables have."""
        self._check(request.inputs, f"A run of {request.handle.program.name!r}")
        renamed_inputs = [
            {
                name: Stored(self.inner(value.name)) if isinstance(value, Stored) else value
                for name, value in inputs_of_rank.items()
            }
            for inputs_of_rank in request.inputs
        ]
        counted = request.counted
        inner_request = request._replace(
            inputs=self._spread(renamed_inputs, {}),
            keep={output: self.inner(name) for output, name in request.keep.items()},
            counted=counted and replace(counted, key=self.inner(counted.key)),
            drop=self._renamed_drops(request.drop),
        )
        return _SubClusterFuture(self.whole.submit(inner_request), self.ranks)

    def _renamed_drops(self, drop: Names) -> Names:
        return {self.ranks[rank]: [self.inner(n) for n in names] for rank, names in drop.items()}

    def call_on(self, rank: int, function: Method, *arguments: object) -> Any:
        return self.whole.call_on(self.ranks[rank], function, *arguments)

    def check_undone(self) -> None:
        self.whole.check_undone()

    def status(self, seconds: float) -> Status:
        """Return the status of all ranks of the whole cluster."""
        return self.whole.status(seconds)

    def grow(self, size: int) -> None:
        raise ValueError("A part has the ranks that it was made of; the whole grows.")

    def interrupted(self) -> None:
        self.whole.interrupted()

    def close(self) -> None:
        self._closed = True

    def _check(self, items: Sequence[object], what: str) -> None:
        if self._closed:
            raise ClusterClosed("This part of a cluster is closed.")
        check_size(self.size, items, what)

    def _spread(self, items: Sequence[Any], nothing: Any) -> list[Any]:
        """Return one item per rank of the whole cluster; `nothing` for ranks outside the part."""
        spread: list[Any] = [nothing] * self.whole.size
        for rank, item in zip(self.ranks, items, strict=True):
            spread[rank] = item
        return spread

    def _rename_for_whole(self, program: Program) -> Program:
        """Return the program with the ranks and state names of the whole cluster."""
        ranks = [RankProgram(instructions=())] * self.whole.size
        stages = [0] * self.whole.size
        known_as = [""] * self.whole.size
        for index, rank_program in enumerate(program.ranks):
            names = {name: self.inner(name) for name in rank_program.state}
            ranks[self.ranks[index]] = replace(
                rank_program,
                instructions=tuple(i.renamed(names, self.ranks) for i in rank_program.instructions),
                state=tuple(map(self.inner, rank_program.state)),
                nbytes=tuple((names.get(name, name), size) for name, size in rank_program.nbytes),
                shares=tuple(
                    (name, names.get(other, other)) for name, other in rank_program.shares
                ),
                replayable=tuple(names.get(name, name) for name in rank_program.replayable),
            )
            stages[self.ranks[index]] = program.stage_of[index]
            known_as[self.ranks[index]] = self._names[index]
        return replace(
            program, ranks=tuple(ranks), stage_of=tuple(stages), known_as=tuple(known_as)
        )


@dataclass(frozen=True, slots=True)
class _SubClusterFuture(Future):
    """A future of the whole cluster, reduced to the ranks of the part."""

    whole: Future
    ranks: tuple[int, ...]

    def get(self, timeout: float | None = None) -> list[Any]:
        results = self.whole.get(timeout)
        return [results[rank] for rank in self.ranks]

    def done(self) -> bool:
        return self.whole.done()

    def check(self) -> None:
        self.whole.check()
