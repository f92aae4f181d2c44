"""Programs that a cluster has loaded, and caches that unload the programs used longest ago.

    moves = ProgramCache[ClusterProgram](64)
    program = moves.get(key) or moves.load(key, lambda: ClusterProgram(cluster, cluster.load(move)))
    program.last_run = cluster.run(program.handle, inputs)

Invariant: if more than ``limit`` programs are loaded, those used longest ago are unloaded, except
programs with a run in flight. Caches of plans are separate, because plans outlive a launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar
from weakref import ref

from dtensor.daft import Cluster, Future, Handle


class Unloadable(Protocol):
    """A value of a `ProgramCache`: a program, or several that are unloaded together."""

    @property
    def is_running(self) -> bool: ...
    def unload(self) -> None: ...


class ClusterProgram:
    """A program that a cluster has loaded. Its caller sets ``last_run``: to a weak reference if the
    run has results or if its failure is read, so that both are freed with the caller's future."""

    def __init__(self, cluster: Cluster, handle: Handle) -> None:
        self.cluster = cluster
        self.handle = handle
        self.last_run: Future | ref[Future] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the last run is in flight. A run whose future is gone does not count: the ranks
        finish it before they unload the program."""
        run = self.last_run() if isinstance(self.last_run, ref) else self.last_run
        return run is not None and not run.done()

    def unload(self) -> None:
        self.cluster.unload(self.handle)


P = TypeVar("P", bound=Unloadable)


class ProgramCache(Generic[P]):
    """The loaded programs of one kind, by key, in the order of their last use."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._programs: OrderedDict[Hashable, tuple[P, object]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[P]:
        """Iterate over the programs. The cache may change meanwhile."""
        return iter([program for program, _ in self._programs.values()])

    def keys(self) -> list[Hashable]:
        return list(self._programs)

    def get(self, key: Hashable, made_for: object = None) -> P | None:
        """Return the program of a key and mark it as used last. Return None if there is no program,
        or if it was made for another object; it is unloaded then."""
        entry = self._programs.get(key)
        if entry is None:
            return None
        program, origin = entry
        if origin is made_for or origin == made_for:
            self._programs.move_to_end(key)
            return program
        del self._programs[key]
        program.unload()
        return None

    def load(self, key: Hashable, load: Callable[[], P], made_for: object = None) -> P:
        """Return the program of a key that the cache lacks: make room, load it and store it."""
        self.evict(self.limit - 1)
        program = load()
        self._programs[key] = program, made_for
        return program

    def evict(self, limit: int | None = None) -> None:
        """Unload the programs used longest ago while more than ``limit`` are loaded (by default the
        cache's limit). Programs with a run in flight stay."""
        excess = len(self._programs) - (self.limit if limit is None else limit)
        for key, (program, _) in list(self._programs.items())[: max(0, excess)]:
            if not program.is_running:
                del self._programs[key]
                program.unload()

    def unload(self, condition: Callable[[P], bool]) -> None:
        """Unload the programs that fulfil the condition, even if they have a run in flight."""
        for key, (program, _) in list(self._programs.items()):
            if condition(program):
                del self._programs[key]
                program.unload()
