"""Tests that ranks can join a cluster: existing state stays, and programs loaded before do not
include the new ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor.daft import Backend, Call, Mode, TaskError, launch_cluster
from dtensor.daft.cluster.subcluster import SubCluster
from tests.daft.programs import function, pipeline, program


def state(*values: float) -> list[dict[str, object]]:
    return [{"w": torch.full((4,), v), "n": torch.zeros(())} for v in values]


def grown(backend: Backend, mode: Mode, ranks_per_actor: int | None = None) -> None:
    divide = function("divide", "def forward(x):\n    return (x.reshape(3),)\n")
    fails = program(
        [Call("divide", ("x",), ("y",))],
        [],
        functions=[divide],
        inputs=[("x",), ()],
        outputs=[("y",), ()],
    )
    with launch_cluster(2, backend=backend, ranks_per_actor=ranks_per_actor) as cluster:
        early, undone = cluster.load(pipeline(2)), cluster.load(fails)
        cluster.put(state(1, 2))

        def ran(handle: Any, cluster: Any, *more: dict[str, object]) -> Tensor:
            size, last = cluster.size, handle.program.size - 1
            fed: list[dict[str, object]] = [{"x": torch.ones(4)}, *more, *[{}] * (size - 1)]
            return cluster.run(handle, fed[:size], mode=mode).get()[last]["y"]

        assert ran(early, cluster).tolist() == [4.0] * 4
        cluster.grow(4)
        assert cluster.size == 4 and len(cluster.get([()] * 4).get()) == 4
        assert ran(early, cluster).tolist() == [4.0] * 4
        part = SubCluster(cluster, (0, 1), "", "the first two")
        assert ran(early, part).tolist() == [4.0] * 4
        assert [n.item() for (n,) in part.get([("n",)] * 2).get()] == [3.0, 3.0]
        failed = cluster.run(undone, [{"x": torch.ones(4)}, {}, {}, {}], mode=mode)
        with pytest.raises(TaskError, match="shape"):
            failed.get()
        with pytest.raises(ValueError, match=r"Rank 3 .* takes the inputs \[\], got \['x'\]"):
            ran(early, cluster, {}, {}, {"x": torch.ones(4)})
        with pytest.raises(ValueError, match="takes one item per rank: 4 ranks, got 2"):
            cluster.put(state(1, 2))
        with pytest.raises(LookupError):
            cluster.get([(), (), ("w",), ()]).get()
        cluster.put([{}, {}, *state(3, 4)])
        late = cluster.load(pipeline(4))
        assert ran(late, cluster).tolist() == [11.0] * 4
        cluster.grow(4)
        with pytest.raises(ValueError, match="of 4 ranks does not grow to 3"):
            cluster.grow(3)
        assert cluster.failure is None


@pytest.mark.parametrize("mode", ["compiled", "interpreted"])
@pytest.mark.parametrize("ranks_per_actor", [1, 2])
def test_cluster_grows_in_process(mode: Mode, ranks_per_actor: int) -> None:
    grown("inprocess", mode, ranks_per_actor)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("ranks_per_actor", [1, 2])
def test_cluster_grows_on_ray(ray_session: None, ranks_per_actor: int) -> None:
    grown("ray", "compiled", ranks_per_actor)
