"""The mock of NCCL, and the real transport over it."""

from __future__ import annotations

import pytest
import torch

from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.testing.gpus.guard import CompilerMissing, install
from dtensor.testing.gpus.world import Deadlock
from tests.testing.gpus.exchanges import FLAT, all_exchanges, run_ranks, starts

try:
    install()
except CompilerMissing as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("early", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_exchanges(seed: int, early: float) -> None:
    report = run_ranks(3, seed, all_exchanges, early=early)
    assert not report.races and not report.early_frees
    assert {wait.what for wait in report.host_waits} <= {
        "copy to the host",
        "aten._local_scalar_dense.default",
    }


def test_streams_that_share_a_queue_may_hang() -> None:
    """A rank's receive stands in the queue before its send, for which the next rank waits."""

    def body(rank: int, transport: ExchangeTransport) -> None:
        send, recv = starts(rank, 3)[2:4]
        received = transport.begin(rank, recv)(())
        transport.begin(rank, send)((torch.ones(FLAT.shape, device="cuda"),)).wait()
        assert bool((received.wait()[0] == 1).all())

    run_ranks(3, 0, body)
    with pytest.raises(Deadlock, match="no host and no stream"):
        run_ranks(3, 0, body, num_queues=1)
