"""A step that fails in its update is undone on all ranks if the launch keeps copies of written
values; training then continues with the bits of a run without the failure."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.daft.cluster.inprocess import InProcessCluster
from dtensor.daft.undo.snapshots import MemorySnapshots
from tests.training import assert_same_bits, failing_updates


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.down = nn.Linear(12, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.up(x.to(self.up.weight.dtype)).float()).relu())
        return self.down(hidden.to(self.down.weight.dtype)).float()


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adam by torch's loop": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "plain SGD": partial(torch.optim.SGD, lr=0.01),
    "AdamW on masters": partial(torch.optim.AdamW, lr=0.01),
}


@pytest.mark.default("AdamW-mesh0-0")
@pytest.mark.parametrize(
    ("kind", "mesh", "first"),
    [
        ("AdamW", {"dp": 2}, 0),
        ("AdamW", {"tp": 2}, 2),
        ("Adam by torch's loop", {"tp": 2}, 0),
        ("SGD", {"dp": 2}, 2),
        ("plain SGD", {"tp": 2}, 0),
        ("AdamW on masters", {"tp": 2}, 0),
        ("AdamW on masters", {"dp": 2}, 2),
    ],
)
def test_failed_update_is_undone_on_all_ranks(
    kind: str, mesh: dict[str, int], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails in the first step, when there is no optimizer state yet, and in a later one; before the
    kernel (caused by the user's options) and after it; on either rank. The step number, which seeds
    dropout, is restored too."""
    states: list[tuple[list[float], object]] = []
    until = failing_updates(monkeypatch)
    for fails in (False, True):
        torch.manual_seed(0)
        masters = kind == "AdamW on masters"
        module = _Model()
        for layer in (module.up, module.down) if masters else ():
            layer.to(torch.bfloat16)
        zero = {"dp": 3} if "dp" in mesh else None
        placements = {"up.weight": dict(tp=dt.Column())} if "tp" in mesh else {}
        model = dt.parallelize(module, dt.Mesh(**mesh), placements, zero=zero)
        opt = OPTIMIZERS[kind](module.parameters())
        inputs = dict(dp=dt.Row()) if "dp" in mesh else {}
        step = dt.train_step(
            model, _loss, opt, inputs=inputs, master_weights=masters, clip_grad_norm=1.0
        )
        losses: list[float] = []
        with dt.launch(dt.Mesh(**mesh), snapshot_every=1) as running:
            for number in range(5):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
                if fails and number >= first:
                    opt.param_groups[0]["lr"] = "high"
                    with pytest.raises(TaskError, match="lr='high' .* is not a number"):
                        float(step(x))
                    opt.param_groups[0]["lr"] = 0.01
                    for bad in (1, 2, 2):
                        until[:] = [bad]
                        with pytest.raises(TaskError, match=f"rank {bad - 1} .*after the kernel"):
                            float(step(x))
                        assert running.cluster.failure is None and not until
                losses.append(float(step(x)))
            states.append((losses, dt.gather_state_dict(model, opt)))
    (one, whole), (two, undone) = states
    assert one == two
    assert_same_bits(whole, undone)


@pytest.mark.default("axes0")
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}])
def test_plan_counts_bytes_of_snapshots_for_undo(axes: dict[str, int]) -> None:
    """The plan's memory includes snapshots only inside such a launch: each value that a step
    writes, once per process, and the step number of each parameter."""
    mesh = dt.Mesh(**axes)
    module = _Model()
    placements = {"up.weight": dict(tp=dt.Column())} if "tp" in axes else {}
    model = dt.parallelize(module, mesh, placements, zero={"dp": 3} if "dp" in axes else None)
    opt = torch.optim.AdamW(module.parameters())
    inputs = dict(dp=dt.Row()) if "dp" in axes else {}
    step = dt.train_step(model, _loss, opt, inputs=inputs)
    x = torch.randn(8, 6)
    assert "to undo" not in str(step.plan(x)) and step.plan(x).memory[0].snapshots == 0
    with dt.launch(mesh, snapshot_every=1) as running:
        for _ in range(3):
            float(step(x))
        plan = step.plan(x)
        assert "  kept to undo a step, x1" in str(plan) and "undo a step" in plan.summary()
        cluster = running.cluster
        assert isinstance(cluster, InProcessCluster) and cluster._worker._rollback is not None
        spare = cluster._worker._rollback.snapshots._store
        assert isinstance(spare, MemorySnapshots)
        (kept,) = (own for own in spare._reusable.values() if len(own) > 20)
        of_rank_0 = [value for (rank, _), value in kept.items() if rank == 0]
        numbers = sum(value.nbytes for value in of_rank_0 if not value.dim())
        assert numbers == 4 * len(list(module.parameters())) + 8  # of the norm's batches, an int64
        assert sum(value.nbytes for value in of_rank_0) - numbers + 8 == plan.memory[0].snapshots


class _Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows(ids)).float()


@pytest.mark.default("AdamW on masters-True")
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_undone_on_gpu_leave_state_of_cpu(kind: str, clips: bool) -> None:
    """Steps 0 and 2 of 4 have an id out of range. After the first, the optimizer has no state."""
    good, bad = torch.arange(4), torch.tensor([1, 2, 30, 4])
    mesh, masters = dt.Mesh(dp=2), "masters" in kind

    def trained(device: str) -> tuple[list[float], object]:
        torch.manual_seed(0)
        model = dt.parallelize(_Ids().to(torch.bfloat16 if masters else torch.float32), mesh, {})
        optimizer = OPTIMIZERS[kind](model.parameters())
        step = dt.train_step(
            model,
            _loss,
            optimizer,
            inputs={"x": {"dp": dt.Row()}},
            clip_grad_norm=0.1 if clips else None,
            master_weights=masters,
        )
        losses: list[float] = []
        with dt.launch(mesh, device=device):
            for ids in (bad, good, bad, good):
                if ids is good:
                    losses.append(float(step(ids)))
                    continue
                with pytest.raises(TaskError, match="IndexError"):
                    float(step(ids))
                assert losses or not any(optimizer.state.values())
            return losses, dt.gather_state_dict(model, optimizer)

    expected = trained("cpu")
    with dt.testing.simulated_gpus(seed=1) as gpus:
        found = trained("cuda")
        assert not gpus.report().races
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
