"""What hosts' tables were: changes that are undone, and files that outlive a process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtensor.daft import Call, Free, Function, TaskError, launch_cluster
from tests.daft.programs import program
from tests.daft.test_undo import AGREE, CHECKED


def _moved(w: Tensor, x: Tensor) -> tuple[()]:
    w += x
    if x.item() > 100:
        raise ArithmeticError("after the write")
    return ()


MOVED = Function.of(_moved, "moved")
ITEMS = (
    Call("checked", ("x",), ("y",)),
    *AGREE,
    Call("moved", ("w", "x"), (), ("w",)),
    Free(("y",)),
)


def test_a_failure_after_the_commit_point_is_undone() -> None:
    """On all ranks, whether they had written by then or not; and the cluster goes on."""
    made = program(
        *(ITEMS,) * 2,
        functions=[CHECKED, MOVED],
        inputs=[("x",)] * 2,
        state=[("w",)] * 2,
    )
    with launch_cluster(2, snapshot_every=1) as cluster:
        cluster.put([{"w": torch.zeros(3)}, {"w": torch.zeros(2)}])
        handle = cluster.load(made)
        fed = [{"x": torch.tensor(1.0)}, {"x": torch.tensor(2.0)}]
        cluster.run(handle, fed).get()
        for bad in (0, 1):
            wrong = list(fed)
            wrong[bad] = {"x": torch.tensor(101.0)}
            with pytest.raises(TaskError, match=f"rank {bad} .*ArithmeticError: after the write"):
                cluster.run(handle, wrong).get()
            assert cluster.failure is None
            (one,), (two,) = cluster.get([("w",)] * 2).get()
            assert one.tolist() == [1.0 + bad] * 3 and two.tolist() == [2.0 + 2 * bad] * 2
            cluster.run(handle, fed).get()
        assert cluster.get([("w",)] * 2).get()[0][0].tolist() == [3.0] * 3
