"""All ranks in the caller's process, one after the other: the default, and what tests use.

Example: `InProcessCluster(4, torch.device("cpu"))`. With device "cuda" all ranks share one GPU,
and collectives are plain device operations.

Invariants: a run executes at once, in the order of the merged list (`seed` picks another legal
order), and reads its inputs where they are; it gives a finished future. Deterministic. `calls`
counts as if each actor concerned were called, so that programs of both backends can be compared.
Calls of several threads take turns. With `snapshot_every`, a run that fails anywhere is undone; as
there is nobody else, each change is kept, whichever number it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from dtensor.daft.cluster.cluster import Handle, HostedCluster, Method, Part, hosts_of
from dtensor.daft.errors import DaftError
from dtensor.daft.ir.program import Program
from dtensor.daft.run.snapshots import Copies
from dtensor.daft.run.transport import LocalTransport
from dtensor.daft.run.worker import Worker

Made: TypeAlias = tuple[Any, Exception | None]
"""What a call gave, or raised."""


class InProcessCluster(HostedCluster):
    def __init__(
        self,
        size: int,
        device: torch.device,
        *,
        ranks_per_actor: int = 1,
        seed: int = 0,
        snapshot_every: int | None = None,
    ) -> None:
        everyone = tuple(range(size))
        self._actor_of = tuple(
            actor for actor, ranks in enumerate(hosts_of(size, ranks_per_actor)) for _ in ranks
        )
        copies = None if snapshot_every is None else Copies()
        self._worker = Worker(everyone, device, LocalTransport(), lent=True, snapshots=copies)
        super().__init__(size, device, (everyone,), seed)
        self.immediate = True
        self.number_changes(None if copies is None else 1)

    def _call(self, host: int, run: int | None, read: bool, method: Method, part: Part) -> Made:
        try:
            return method(self._worker, *part), None
        except DaftError as error:
            self.failure = error
            return None, error
        except LookupError as error:
            if not read:
                raise
            return None, error

    def _count(self, ranks: Sequence[int]) -> int:
        return len({self._actor_of[rank] for rank in ranks})

    def collect(self, asked: Sequence[Made], timeout: float | None = None) -> list[Any]:
        for _, error in asked:  # there is one host
            if error is not None:
                raise error
        return [made for made, _ in asked]

    def came(self, asked: Sequence[Any]) -> bool:
        return True

    def ended(self, asked: Made) -> bool:
        return asked[1] is None

    def _prepare(self, program: Program, hosts: Sequence[int]) -> None:
        pass

    def _ship(self, handle: Handle) -> Sequence[Any]:
        part = (handle.id, handle.report.lists[0], handle.program)
        self._submit(Worker.load, handle.places, [part] * len(handle.places), read=False)
        return ()

    def _joined(self, asked: Sequence[Any]) -> None:
        pass

    def _end(self) -> None:
        self._worker.close()
