"""All ranks in the caller's process, one after the other: the default, and what tests use.

Example: `InProcessCluster(4, torch.device("cpu"))`. With device "cuda" all ranks share one GPU,
and collectives are plain device operations.

Invariants: a run executes at once, in the order of the merged list (`seed` picks another legal
order), and reads its inputs where they are; it gives a finished future. Deterministic. `calls`
counts as if each of the actors were called, so that programs of both backends can be compared.
Calls of several threads take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from dtensor.daft.cluster.cluster import Handle, HostedCluster, Method, Part, hosts_of
from dtensor.daft.errors import DaftError
from dtensor.daft.run.transport import LocalTransport
from dtensor.daft.run.worker import Worker

Made: TypeAlias = tuple[Any, Exception | None]
"""What a call gave, or raised."""


class InProcessCluster(HostedCluster):
    def __init__(
        self, size: int, device: torch.device, *, ranks_per_actor: int = 1, seed: int = 0
    ) -> None:
        everyone = tuple(range(size))
        self._num_actors = len(hosts_of(size, ranks_per_actor))
        self._worker = Worker(everyone, device, LocalTransport(), lent=True)
        super().__init__(size, device, (everyone,), seed)
        self.immediate = True

    def _call(self, host: int, run: int | None, read: bool, method: Method, part: Part) -> Made:
        self.calls += 1 if method is Worker.step else self._num_actors
        try:
            return method(self._worker, *part), None
        except DaftError as error:
            self.failure = error
            return None, error
        except LookupError as error:
            if not read:
                raise
            return None, error

    def collect(self, asked: Sequence[Made], timeout: float | None = None) -> list[Any]:
        (made, error), *_ = asked  # there is one host
        if error is not None:
            raise error
        return [made]

    def came(self, asked: Sequence[Any]) -> bool:
        return True

    def _ship(self, handle: Handle) -> None:
        part = (handle.id, handle.report.lists[0], handle.program)
        self._submit(Worker.load, [part], read=False)

    def _end(self) -> None:
        self._worker.close()
