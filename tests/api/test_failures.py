"""A failing step names the rank, the instruction and the line of the model; nothing hangs and no
state is left behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft
from dtensor.daft import ActorLost, TaskError
from dtensor.runtime.checkpoint import CheckpointError
from tests.api import raising
from tests.chaos.actors import wait_for_file
from tests.chaos.watch import running
from tests.daft import raisers
from tests.daft.raisers import AS_TEXT, NAMES, check, numbered
from tests.models import batch
from tests.training import Placed, Run, assert_losses_close, batches, make_model, train_torch

NEVER_S = 3600.0
"""A deadline that no test lives to see: a failure that is found was found by what happened."""
BACKENDS = ["inprocess", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


def out_of_range(which: str) -> tuple[Tensor, Tensor]:
    """Return a batch with a token or target outside the table."""
    tokens, targets = batch()
    wrong = (tokens if which == "tokens" else targets).clone()
    wrong[0, 0] = 77
    return (wrong, targets) if which == "tokens" else (tokens, wrong)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_exception_in_model_raises_when_its_loss_is_read(backend: str) -> None:
    """It is raised by each `float(loss)` of the failed step and nowhere else; later steps equal a
    run without the failure."""
    run = Run.of("pp2")
    good, bad = batch(), out_of_range("tokens")
    with dt.launch(run.mesh, backend=backend, deadline_s=NEVER_S):  # type: ignore[arg-type]
        first = float(run.step(*good))
        failing = run.step(*bad)
        with pytest.raises(TaskError) as caught:
            float(failing)
        text = str(caught.value)
        assert text.startswith("rank 0 (stage 0), instruction ")
        assert "IndexError: index out of range" in text
        assert re.search(r"at models\.py:\d+: x = self\.embed\(tokens\)", text)
        loss = float(run.step(*good))
        with pytest.raises(TaskError, match="index out of range"):
            float(failing)
        run.state()
    plain = make_model()
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    assert_losses_close([first, loss], train_torch(plain, adam, [good, good], clip=1.0))


def test_target_out_of_range_on_last_stage_names_rank_stage_and_line() -> None:
    run = Run.of("tp2_pp2")
    with dt.launch(run.mesh):
        with pytest.raises(TaskError, match=r"rank 2 \(stage 1\)(.|\n)*Target 77 is out of") as e:
            float(run.step(*out_of_range("targets")))
        assert re.search(r"at models\.py:\d+: loss = F\.cross_entropy", str(e.value))


def test_unread_failure_raises_at_next_call() -> None:
    run = Run.of("tp2")
    with dt.launch(run.mesh):
        run.step(*out_of_range("tokens"))
        with pytest.raises(TaskError, match="index out of range"):
            run.step(*batch())


def test_unread_failure_raises_once_at_end_of_launch() -> None:
    run = Run.of("tp2")
    with pytest.raises(TaskError, match="index out of range"), dt.launch(run.mesh):
        run.step(*out_of_range("tokens"))
    with dt.launch(run.mesh):  # and only once
        float(run.step(*batch()))
        run.state()


def test_failed_call_outside_launch_does_not_affect_next_call() -> None:
    run = Run.of("tp2")
    with pytest.raises(TaskError, match="index out of range"):
        float(run.step(*out_of_range("tokens")))
    with pytest.raises(TaskError, match="index out of range"):
        run.step.gradients(*out_of_range("tokens"))
    first = float(run.step(*batch()))
    fresh = Run.of("tp2")
    with dt.launch(fresh.mesh):
        assert float(fresh.step(*batch())) == first
        fresh.state()


def test_exception_in_compiled_function_names_users_line() -> None:
    mesh = dt.Mesh(tp=2)
    look_up = dt.compile(lambda table, ids: F.embedding(ids, table), mesh)
    with dt.launch(mesh), pytest.raises(TaskError, match=r"test_failures\.py:\d+"):
        look_up(torch.randn(4, 2), torch.tensor([5]))


# -- wherever a host raises ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_any_exception_type_on_host_is_reported_and_launch_continues(
    backend: str, tmp_path: Path
) -> None:
    """Raised in a forward, a backward, a compiled function, an eager op, a reward, an init
    function, a save and a load. The error names the place and has the original exception as its
    cause."""
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(raising.Net(), mesh, {"up.weight": dict(tp=dt.Row())})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, raising.loss, opt)
    x, none = torch.randn(4, 4), raising.NONE
    act = dt.compile(lambda x, kind: torch.ops.raising.forward(x, kind) + 1, mesh)
    with torch.device("meta"):
        net = raising.Net()
    unmade = dt.parallelize(net, mesh, {"up.weight": dict(tp=dt.Row())}, init="reset")
    with dt.launch(mesh, backend=backend) as run:  # type: ignore[arg-type]
        first = float(step(x, none, none))

        def op(kind: Tensor) -> object:
            d = dt.distribute(x, mesh)
            return (torch.ops.raising.forward(d, dt.distribute(kind, mesh)) + 1).full_tensor()

        places: dict[str, Callable[[Tensor], object]] = {
            r"F0 stage 0(.|\n)*at raising\.py:\d+: h = torch": lambda k: float(step(x, k, none)),
            r"B0 stage 0(.|\n)*at raising\.py:\d+: return torch": lambda k: float(step(x, none, k)),
            r"at test_failures\.py:\d+: act = dt\.compile": lambda k: act(x, k).full_tensor(),
            r"at test_failures\.py:\d+: return \(torch\.ops": op,
        }
        for kind in NAMES if backend == "inprocess" else ["SystemExit", *AS_TEXT, "HostsOwn"]:
            for place, ask in places.items():
                with pytest.raises(TaskError, match=f"rank 0 (.|\n)*{place}") as caught:
                    ask(numbered(kind))
                check(caught.value, kind, carried=backend == "ray")
        with pytest.raises(TaskError, match=r"actor 'Actor-0', score: SystemExit: 3") as caught:
            daft.spawn(raisers.Actor).score([1, 2, 3], []).get()
        assert caught.value.failure.issued[0].startswith("tests/api/test_failures.py:")

        recipe = "dtensor.frontend.initial.recipe:_Maker.run"
        with raising.replaced(run.cluster, recipe), exits(r"initialise up\.\w+(.|\n)*: SystemExit"):
            dt.compile(lambda m: m.up.weight * 1, mesh)(unmade).full_tensor()
        path = str(tmp_path / "saved")
        writes = raising.replaced(run.cluster, "dtensor.runtime.checkpoint.saving:write_part")
        with writes, pytest.raises(CheckpointError, match="SystemExit: 3"):
            dt.save(path, model, opt).get()
        dt.save(path, model, opt).get()
        with (
            raising.replaced(run.cluster, "dtensor.runtime.checkpoint.saving:read_shard"),
            exits("SystemExit: 3"),
        ):
            dt.load(path, model, opt)
        dt.load(path, model, opt)
        assert float(step(x, none, none)) < first
        update = "dtensor.runtime.optimizer.shard_optimizer:_update"
        with (
            raising.replaced(run.cluster, update),
            exits(r"rank [01] .*: SystemExit: 3\n  at test_failures\.py:\d+: step = "),
        ):
            float(step(x, none, none))  # after the commit point: the state is lost
        assert isinstance(run.cluster.failure, TaskError)


@contextmanager
def exits(match: str) -> Iterator[None]:
    with pytest.raises(TaskError, match=match) as caught:
        yield
    check(caught.value, "SystemExit")


# -- a lost actor ----------------------------------------------------------------------------------


class Two(nn.Module):
    """A model with one layer for each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).tanh()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.ray
def test_killed_actor_is_named_in_error(ray_session: None, tmp_path: Path) -> None:
    """The actor is killed while it runs its part of a step's forward."""
    from tests.who_hangs.trials import obeying

    stages = {"pp": [["first*"], ["second*"]]}
    where = Placed(axes=dict(pp=2), stages=stages)
    run = Run.of(where, module=Two(), loss=squares, schedule=dt.GPipe(1))
    x = torch.randn(8, 8)
    (orders := tmp_path / "orders").mkdir()
    with (
        obeying(orders),
        dt.launch(run.mesh, backend="ray", deadline_s=NEVER_S) as session,
    ):
        hosts = session.launch.cluster.membership  # type: ignore[attr-defined]
        pids = [hosts.host(rank).counter.pid for rank in range(2)]
        assert all(map(running, pids))
        float(run.step(x))
        (orders / str(pids[1])).write_text("sleep 0")  # in its next call
        loss = run.step(x)
        wait_for_file(str(orders / "begun"))
        assert not loss.done()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(ActorLost) as caught:
            float(loss)
        text = str(caught.value)
        assert re.match(r"rank 1 \(stage 1\), instruction \d+ '.*' \[F0 stage 1", text)
        assert re.search(r"at test_failures\.py:\d+: ", text)
        assert (
            "the state on the ranks is lost; the controller has the values that were put there, of "
            "step 0, 2 " in ("\n".join(caught.value.__notes__))
        )
        with pytest.raises(ActorLost) as again:
            run.step(x)
        assert again.value is caught.value
    assert not any(map(running, pids))
    data = batches(2)
    fresh = Run.of("pp2")
    with dt.launch(fresh.mesh, backend="ray"):
        losses = fresh.losses(data)
        fresh.state()
    plain = make_model()
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    assert_losses_close(losses, train_torch(plain, adam, data, clip=1.0))
