"""Several meshes in one launch: their ranks, their separate state, and what they share."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft
from dtensor.api.store.meshes import ranks_of_meshes
from dtensor.api.store.session import launched, session_for
from tests.training import assert_same_bits

TRAIN, PLAY = dt.Mesh(dp=2), dt.Mesh(tp=2, name="play")


class MLP(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.dropout(self.up(x).relu(), 0.25))


def loss_fn(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return (model(x) - target).square().mean()


def logits(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


class Side:
    """A model that trains and is evaluated on one mesh."""

    def __init__(self, mesh: dt.Mesh, seed: int) -> None:
        self.mesh, self.module = mesh, MLP(seed)
        placements: dict[str, Any] = {}
        inputs: dict[str, Any] = {}
        if "tp" in mesh.axes:
            placements = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
        if "dp" in mesh.axes:
            inputs = dict(dp=dt.Row())
        self.model = dt.parallelize(self.module, mesh, placements)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = dt.train_step(self.model, loss_fn, self.opt, inputs=inputs)
        self.evaluate = dt.compile(logits, mesh)

    def turn(self, number: int) -> list[Any]:
        torch.manual_seed(number)
        x, y = torch.randn(8, 6), torch.randn(8, 4)
        return [self.step(x, y), self.evaluate(self.model, x)]

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"model": self.module.state_dict(), "optimizer": self.opt.state_dict()}
        )


def read(turns: list[list[Any]]) -> list[Tensor]:
    return [t for loss, y in turns for t in (loss.tensor(), y.full_tensor())]


def alone(mesh: dt.Mesh, seed: int) -> tuple[list[Tensor], dict[str, Any]]:
    dt.manual_seed(3)
    side = Side(mesh, seed)
    with dt.launch(mesh):
        found = read([side.turn(n) for n in range(3)])
    return found, side.state()


def together(ranks: Any, **launch: Any) -> list[tuple[list[Tensor], dict[str, Any]]]:
    dt.manual_seed(3)
    sides = [Side(TRAIN, 1), Side(PLAY, 2)]
    with dt.launch(TRAIN, PLAY, ranks=ranks, **launch):
        turns: list[list[list[Any]]] = [[], []]
        for n in range(3):  # nothing is read between them
            for mine, side in zip(turns, sides, strict=True):
                mine.append(side.turn(n))
        found = [read(mine) for mine in turns]
    return [(values, side.state()) for values, side in zip(found, sides, strict=True)]


# -- ranks -----------------------------------------------------------------------------------------


def test_meshes_get_ranks_in_order_or_as_stated() -> None:
    third = dt.Mesh(k=3)
    assert ranks_of_meshes((TRAIN, PLAY), None) == {TRAIN: (0, 1), PLAY: (2, 3)}
    assert ranks_of_meshes((TRAIN, PLAY), {PLAY: (1, 0)}) == {TRAIN: (0, 1), PLAY: (1, 0)}
    assert ranks_of_meshes((TRAIN, PLAY, third), {PLAY: [0, 1]})[third] == (2, 3, 4)
    assert ranks_of_meshes((PLAY, TRAIN), {PLAY: range(2)}) == {PLAY: (0, 1), TRAIN: (2, 3)}
    assert ranks_of_meshes((third,), {third: (2, 0, 1)}) == {third: (2, 0, 1)}


@pytest.mark.parametrize(
    ("meshes", "ranks", "words"),
    [
        ((dt.Mesh(tp=2), dt.Mesh(tp=2)), None, r'twice.*\n.*dt.Mesh\(tp=2, name="play"\)'),
        ((TRAIN, PLAY), {PLAY: (0,)}, r"states \[0\] for mesh\(tp=2, name=\"play\"\), which has 2"),
        ((TRAIN, PLAY), {PLAY: (0, 0)}, "different numbers of ranks"),
        ((TRAIN, PLAY), {PLAY: (0, -1)}, "different numbers of ranks"),
        ((TRAIN, PLAY), {PLAY: (0, True)}, "different numbers of ranks"),
        ((TRAIN, PLAY), {PLAY: 0}, "not a list of ranks"),
        ((TRAIN, PLAY), {PLAY: (5, 4)}, "leaves ranks 2, 3 of the launch without a mesh"),
        ((TRAIN,), {PLAY: (0, 1)}, "is not a mesh of this launch"),
        ((TRAIN, PLAY), {"play": (0, 1)}, "not a Mesh"),
        ((TRAIN, PLAY), (0, 1), "not a dict"),
        ((), None, "not a Mesh"),
        (("ray",), None, "not a Mesh"),
        ((TRAIN, "ray", PLAY), None, "a backend and a device at most"),
        ((TRAIN, "ray", "cpu", "x"), None, "a backend and a device at most"),
        ((TRAIN, "rya"), None, "backend='rya'"),
        ((TRAIN, 3), None, "not a Mesh"),
    ],
)
def test_launch_rejects_invalid_meshes_and_ranks(meshes: Any, ranks: Any, words: str) -> None:
    with pytest.raises(dt.PlanningError, match=words), dt.launch(*meshes, ranks=ranks):
        pass
    assert launched() is None


def test_launch_of_several_meshes_accepts_positional_backend_and_device() -> None:
    with dt.launch(TRAIN, PLAY, "inprocess", "cpu") as session:
        assert session.mesh == TRAIN and session.ranks == (0, 1)
        assert session_for(PLAY).ranks == (2, 3)


def test_program_for_mesh_outside_launch_error_lists_its_meshes() -> None:
    words = r"mesh\(x=3\).*has mesh\(dp=2\) on ranks 0, 1 and mesh\(tp=2, name=\"play\"\) on ranks"
    with dt.launch(TRAIN, PLAY), pytest.raises(dt.PlanningError, match=words):
        dt.distribute(torch.ones(3), dt.Mesh(x=3))


# -- what each has of its own ----------------------------------------------------------------------


@pytest.mark.default("compiled-apart")
@pytest.mark.parametrize("ranks", [None, {PLAY: (1, 0)}], ids=["apart", "shared"])
@pytest.mark.parametrize("mode", ["compiled", "interpreted"])
def test_two_models_on_two_meshes_equal_separate_launches_bitwise(ranks: Any, mode: Any) -> None:
    both = together(ranks, mode=mode)
    for (found, state), (expected, own) in zip(
        both, (alone(TRAIN, 1), alone(PLAY, 2)), strict=True
    ):
        assert_same_bits(found, expected)
        assert_same_bits(state, own)  # which came home


@pytest.mark.ray
@pytest.mark.slow
def test_two_meshes_on_ray_are_bitwise_equal_to_in_process(ray_session: None) -> None:
    assert_same_bits(together(None, backend="ray"), together(None))


def test_trace_gradients_and_calibrate_work_on_second_mesh() -> None:
    side, other = Side(PLAY, 2), Side(TRAIN, 1)
    with dt.launch(TRAIN, PLAY):
        other.turn(0)
        side.turn(0)
        saved = dt.gather_state_dict(side.model, side.opt)
        expected = [float(side.turn(n)[0]) for n in (1, 2)]
        dt.load_state_dict(side.model, side.opt, saved)
        assert [float(side.turn(n)[0]) for n in (1, 2)] == expected
        batch = torch.randn(8, 6), torch.randn(8, 4)
        assert side.step.profile(1, *batch).seconds > 0
        trace = dt.trace(side.step, *batch)
        assert trace.ranks == (0, 1) and len(trace.peak_bytes) == 2
        for rank in trace.ranks:
            assert trace.spent(rank, "compute") > 0 and trace.spent(rank, "communication") > 0
        assert side.step.gradients(*batch)["up.weight"].shape == (8, 6)
        assert dt.calibrate(PLAY).latency.keys() == {"tp"}


def test_transfer_moves_values_between_meshes_and_mixing_meshes_is_refused() -> None:
    x = torch.randn(6, 4)
    with dt.launch(TRAIN, PLAY) as session:
        a = dt.distribute(x, TRAIN, dp=dt.Row())
        assert dt.transfer_plan(a, PLAY, tp=dt.Row()).bytes_by_pair == {
            (0, 2): 3 * 4 * 4,
            (1, 3): 3 * 4 * 4,
        }
        before = session.launch.sessions.keys()
        b = dt.transfer(a, PLAY, (2, 3), tp=dt.Column())
        assert torch.equal((b.relu() + 1).full_tensor(), x.relu() + 1)
        assert torch.equal(dt.transfer(b, TRAIN, dp=dt.Row()).full_tensor(), x)
        assert session.launch.sessions.keys() == before
        with pytest.raises(dt.PlanningError, match=r"lives on ranks \[2, 3\]"):
            dt.transfer(a, PLAY, (0, 1))
        third = dt.transfer(b, dt.Mesh(k=3), (3, 1, 0), k=dt.Row())  # named by nobody before
        assert torch.equal(third.full_tensor(), x)
        with pytest.raises(dt.PlanningError, match="two meshes"):
            a + b
        with pytest.raises(dt.PlanningError, match=r"fix: dt.transfer\(t, Mesh\(dp=2\)\) first"):
            dt.compile(lambda t: t + 1, TRAIN)(b)


def test_model_of_one_mesh_is_refused_in_program_for_another() -> None:
    side = Side(PLAY, 2)
    words = r'parallelized on mesh\(tp=2, name="play"\), the program is for mesh\(dp=2\)'
    with dt.launch(TRAIN, PLAY), pytest.raises(dt.PlanningError, match=words):
        dt.compile(logits, TRAIN)(side.model, torch.randn(8, 6))


def test_module_parallelized_on_two_meshes_has_one_value() -> None:
    side = Side(TRAIN, 1)
    shown = dt.parallelize(side.module, PLAY, {"up.weight": dict(tp=dt.Row())})
    evaluate = dt.compile(lambda model, x: model.up(x), PLAY)
    x = torch.randn(8, 6)
    with dt.launch(TRAIN, PLAY):
        for n in range(2):
            side.turn(n)
            y = evaluate(shown, x).full_tensor()
            weight = dt.gather_state_dict(side.model)["model"]
            expected = torch.nn.functional.linear(x, weight["up.weight"], weight["up.bias"])
            torch.testing.assert_close(y, expected)


# -- failures --------------------------------------------------------------------------------------


def look_up(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


@pytest.mark.parametrize("mode", ["compiled", "interpreted"])
def test_failed_call_on_one_mesh_does_not_stop_other_mesh(mode: Any) -> None:
    dt.manual_seed(3)
    side = Side(TRAIN, 1)
    with dt.launch(TRAIN, PLAY, mode=mode):
        first = side.turn(0)
        failing = dt.compile(look_up, PLAY)
        table = dt.distribute(torch.ones(3, 2), PLAY)
        with pytest.raises(daft.TaskError, match=r'rank 2, rank 0 of mesh\(tp=2, name="play"\)'):
            failing(table, torch.tensor([7])).full_tensor()
        assert failing(table, torch.tensor([1])).full_tensor().tolist() == [[1.0, 1.0]]
        found = read([first, side.turn(1), side.turn(2)])
    assert_same_bits(found, alone(TRAIN, 1)[0])


@pytest.mark.ray
@pytest.mark.slow
def test_lost_rank_ends_all_meshes_of_launch(ray_session: None) -> None:
    side = Side(TRAIN, 1)
    words = r'rank 3, rank 1 of mesh\(tp=2, name="play"\)'
    with pytest.raises(daft.ActorLost, match=words) as caught:  # noqa: SIM117
        with dt.launch(TRAIN, PLAY, backend="ray") as session:
            read([side.turn(0)])
            cluster: Any = session.launch.cluster
            os.kill(cluster._launch.processes[3].counter.pid, signal.SIGKILL)
            for n in range(200):
                float(side.turn(n)[0])
    notes = " ".join(caught.value.__notes__)
    assert "on all meshes of the launch" in notes and "mesh(dp=2) on ranks 0, 1" in notes
    with pytest.raises(RuntimeError, match="is lost"):
        side.module.up.weight.sum()


def test_launch_of_one_mesh_uses_cluster_directly() -> None:
    """Errors therefore name ranks by one number."""
    for given in ((TRAIN,), (TRAIN, "inprocess")):
        with dt.launch(*given) as session:  # type: ignore[arg-type]
            assert session.cluster is session.launch.cluster
            with pytest.raises(dt.PlanningError, match=r"launch is on mesh\(dp=2\), this"):
                dt.distribute(torch.ones(3), PLAY)
