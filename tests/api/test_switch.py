"""`run.switch`: a model continues under another placement with the bits of a model that was
gathered and loaded. Only missing values are sent, and a refused or failed switch changes
nothing."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.launch.launching import LaunchSession
from dtensor.api.store.home import ModelHome
from dtensor.daft import Cluster, DaftError, Program, Send
from dtensor.daft.cluster.inprocess import InProcessCluster
from dtensor.runtime.optimizer import shard_optimizer
from dtensor.runtime.transfer import between_meshes
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.stored import StoredTensor
from tests.models import GPT, DropoutGPT, loss_fn
from tests.training import MEGATRON, TWO_STAGES, assert_same_bits, batches, make_model

FOUR_STAGES = {
    "pp": [
        ["embed*", "positions*", "blocks.0.norm1.*", "blocks.0.attn.*"],
        ["blocks.0.norm2.*", "blocks.0.mlp.*"],
        ["blocks.1.*"],
        ["norm*", "head*"],
    ]
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A placement as arguments of `parallelize`, `train_step` and `switch`."""

    axes: Mapping[str, int]
    pins: Mapping[str, Mapping[str, dt.Placement]] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, dt.Placement] = field(default_factory=dict)
    schedule: dt.Schedule = field(default_factory=lambda: dt.OneFOneB(microbatches=2))

    @property
    def mesh(self) -> dt.Mesh:
        return dt.Mesh(**self.axes)

    @property
    def steps(self) -> dict[str, Any]:
        return {"inputs": self.inputs, "schedule": self.schedule}


ROWS = dict(dp=dt.Row())
SIZES = dict(tp=dt.Row(sizes=(0, 40, 24)))
UNEVEN = {"*.up.weight": SIZES, "*.down.weight": dict(tp=dt.Column())}
PLACES: dict[str, Place] = {
    "single": Place(axes={}),
    "dp2 zero1": Place(axes=dict(dp=2), how=dict(zero={"dp": 1}), inputs=ROWS),
    "dp4": Place(axes=dict(dp=4), inputs=ROWS),
    "dp4 zero3": Place(axes=dict(dp=4), how=dict(zero={"dp": 3}), inputs=ROWS),
    "dp2 ep2 zero3": Place(
        axes=dict(dp=2, ep=2), how=dict(zero={"dp": 3, "ep": 3}), inputs=dict(ROWS, ep=dt.Row())
    ),
    "tp2": Place(axes=dict(tp=2), pins=MEGATRON),
    "tp3 uneven": Place(axes=dict(tp=3), pins=UNEVEN),
    "tp4": Place(axes=dict(tp=4), pins=MEGATRON, how=dict(recompute=["blocks.*"])),
    "pp2": Place(axes=dict(pp=2), how=dict(stages=TWO_STAGES)),
    "pp2 of 4": Place(
        axes=dict(pp=2),
        how=dict(stages=FOUR_STAGES),
        schedule=dt.Interleaved1F1B(microbatches=2),
    ),
    "dp2 tp2 zero2": Place(
        axes=dict(dp=2, tp=2), pins=MEGATRON, how=dict(zero={"dp": 2}), inputs=ROWS
    ),
}


class Trained:
    """A GPT that is trained under one placement after another."""

    def __init__(
        self,
        at: Place,
        *,
        module: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.at = at
        self.module = (make_model() if module is None else module).to(dtype)
        self.model = dt.parallelize(self.module, at.mesh, at.pins, **at.how)
        self.opt = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        options = {"clip_grad_norm": 1.0, **options}
        self.step = dt.train_step(self.model, loss_fn, self.opt, **at.steps, **options)

    def switch(self, run: LaunchSession, at: Place, **stated: Any) -> dt.SyncPlan:
        given = {**at.how, **at.steps, **stated}
        expected = run.switch_plan(self.model, self.opt, at.mesh, at.pins, **given)
        found = run.switch(self.model, self.opt, at.mesh, at.pins, **given)
        assert str(found) == str(expected) and found.what == "switch"
        self.at = at
        return found

    def losses(self, data: list[tuple[Tensor, Tensor]]) -> list[float]:
        return [float(loss) for loss in [self.step(*one) for one in data]]

    def state(self) -> dict[str, Any]:
        return dt.gather_state_dict(self.model, self.opt)


def loaded_under(at: Place, state: Mapping[str, Any], like: Trained, **options: Any) -> Trained:
    """Return a new model with that state under that placement."""
    dtype = next(like.module.parameters()).dtype
    module = type(like.module)() if isinstance(like.module, DropoutGPT) else None
    found = Trained(at, module=module, dtype=dtype, **options)
    dt.load_state_dict(found.model, found.opt, state)
    return found


def tables(run: LaunchSession) -> dict[int, list[str]]:
    """Return the names in the table of each rank of an in-process launch."""
    cluster = run.launch.cluster
    assert isinstance(cluster, InProcessCluster)
    found: dict[int, list[str]] = {rank: [] for rank in range(cluster.size)}
    for rank, name in cluster._worker._table:
        if rank in found:
            found[rank].append(name)
    return found


def homes(model: dt.ParallelModule, run: LaunchSession) -> ModelHome:
    return run.launch.sessions[model.mesh].model_homes[id(model)]


def elements(model_home: ModelHome, run: LaunchSession) -> dict[tuple[str, int], set[int]]:
    """Return the elements that each rank has, by label and launch rank, found by slicing numbered
    elements."""
    found: dict[tuple[str, int], set[int]] = {}
    for label, stored in named(model_home).items():
        whole = torch.arange(math.prod(stored.spec.shape)).reshape(stored.spec.shape)
        for rank, number in stored.numbers.items():
            own = shard_of(whole, stored.spec, model_home.mesh.coordinates(rank))
            found[label, number] = set(own.flatten().tolist())
    return found


def named(model_home: ModelHome) -> dict[str, StoredTensor]:
    """Return all values on ranks, including the optimizer's."""
    found = dict(model_home.stored)
    for home in model_home.optimizers.values():
        found |= {f"{key} of {label}": own for (label, key), own in home.values().items()}
    return found


@contextmanager
def sends(monkeypatch: pytest.MonkeyPatch, kind: type[Cluster]) -> Iterator[dict[str, int]]:
    """Record the bytes of the Sends of each program that is loaded, by name."""
    found: dict[str, int] = {}
    load = kind.load

    def counted(self: Cluster, program: Program) -> Any:
        sent = [i for own in program.ranks for i in own.instructions if isinstance(i, Send)]
        found[program.name] = sum(i.buffer.nbytes for i in sent)
        return load(self, program)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "load", counted)
        yield found


PAIRS = (
    ("dp4 zero3", "dp2 zero1"),
    ("tp2", "pp2"),
    ("single", "tp2"),
    ("tp2", "tp4"),
    ("tp3 uneven", "dp4 zero3"),
    ("pp2", "pp2 of 4"),
    ("dp2 tp2 zero2", "pp2"),
    ("dp4 zero3", "dp4"),
    ("dp2 ep2 zero3", "dp2 tp2 zero2"),
    ("tp4", "single"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_switch_there_and_back_is_bitwise_equal_to_gather_and_load(
    here: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, data = PLACES[here], PLACES[there], batches(5)
    trained = Trained(a)
    with dt.launch(a.mesh) as run:
        trained.losses(data[:2])
        before = elements(homes(trained.model, run), run)
        with sends(monkeypatch, InProcessCluster) as sent:
            plan = trained.switch(run, b)
        model_home = homes(trained.model, run)
        after = elements(model_home, run)
        specs = named(model_home)
        assert len(specs) == 4 * len(model_home.stored)  # the optimizer's step and two moments
        assert {n for n, _ in before} == specs.keys() and len(plan.transfers) == len(specs)
        lacking = sum(
            len(wanted - before.get(key, set())) * specs[key[0]].spec.dtype.itemsize
            for key, wanted in after.items()
        )
        assert sent == {"switch of GPT": plan.bytes_sent} and plan.bytes_sent == lacking
        held = {rank for name in after for rank in name[1:]}
        assert all(not names for rank, names in tables(run).items() if rank not in held)
        at_switch = trained.state()
        losses = trained.losses(data[2:4])
        later = trained.state()
        trained.switch(run, a)
        assert_same_bits(trained.state(), later)
        back = trained.losses(data[4:])
        assert trained.model.mesh == a.mesh
    assert_same_bits(dict(trained.module.state_dict()), trained.state()["model"])

    fresh = Trained(a)
    with dt.launch(a.mesh):
        fresh.losses(data[:2])
        assert_same_bits(fresh.state(), at_switch)
    loaded = loaded_under(b, at_switch, trained)
    with dt.launch(b.mesh):
        assert loaded.losses(data[2:4]) == losses
        assert_same_bits(loaded.state(), later)
    again = loaded_under(a, later, trained)
    with dt.launch(a.mesh):
        assert again.losses(data[4:]) == back


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "interpreted"])
def test_switch_shrinks_and_grows_mesh_reusing_ranks(mode: Any) -> None:
    """Data parallel over 4, 2 and 4 ranks with ZeRO; ranks that are freed are used again."""
    four, two, data = PLACES["dp4 zero3"], PLACES["dp2 zero1"], batches(4)
    trained = Trained(four)
    with dt.launch(four.mesh, mode=mode) as run:
        trained.losses(data[:1])
        trained.switch(run, two)
        trained.losses(data[1:2])
        assert not tables(run)[2] and not tables(run)[3]
        trained.switch(run, four)
        trained.losses(data[2:3])
        assert run.launch.cluster.size == 4
        assert run.launch.places == {four.mesh: (0, 1, 2, 3), two.mesh: (0, 1)}
        other = dt.Mesh(dp=2, name="others")
        trained.switch(run, two)
        run.switch(trained.model, trained.opt, other, {}, ranks=(2, 3))
        assert not tables(run)[0] and not tables(run)[1]
        assert len(trained.losses(data[3:])) == 1


@pytest.mark.slow
def test_switch_adds_ranks_to_launch() -> None:
    """A launch of one rank grows; values and programs on its mesh stay usable."""
    one, data = PLACES["single"], batches(2)
    trained = Trained(one)
    double = dt.compile(lambda x: x * 2, one.mesh)
    with dt.launch(one.mesh) as run:
        x = dt.distribute(torch.arange(4.0), one.mesh)
        y = double(x)
        trained.losses(data[:1])
        at = PLACES["tp4"]
        plan = trained.switch(run, at)
        assert run.launch.cluster.size == 4 and run.launch.places[at.mesh] == (0, 1, 2, 3)
        assert {pair[0] for pair in plan.bytes_by_pair} == {0}
        trained.losses(data[1:])
        assert (double(x) + y).full_tensor().tolist() == [0, 4, 8, 12]


def test_failed_update_on_new_rank_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, data = PLACES["single"], PLACES["tp2"], batches(3)
    update, until = shard_optimizer.update, [-1]

    def failing(*given: Any) -> None:
        update(*given)
        until[0] -= 1
        if until[0] == 0:
            raise ArithmeticError("after the kernel")

    monkeypatch.setattr(shard_optimizer, "update", failing)
    trained = Trained(a)
    with dt.launch(a.mesh, snapshot_every=1) as run:
        trained.losses(data[:1])
        trained.switch(run, b)
        trained.losses(data[1:2])
        state = trained.state()
        until[0] = 2  # that of rank 1
        with pytest.raises(DaftError, match="after the kernel"):
            trained.losses(data[2:])
        assert_same_bits(trained.state(), state)
        trained.losses(data[2:])


@pytest.mark.slow
def test_switch_moves_master_weights_and_kept_gradients() -> None:
    a, b, data = PLACES["dp4 zero3"], PLACES["tp2"], batches(3)
    options = dict(master_weights=True, keep_gradients=True)
    trained = Trained(a, dtype=torch.bfloat16, **options)
    with dt.launch(a.mesh) as run:
        trained.losses(data[:2])
        assert trained.step.gradients()
        trained.switch(run, b)
        with pytest.raises(dt.PlanningError, match="no gradients of a last step are kept"):
            trained.step.gradients()
        assert not tables(run)[2] and not tables(run)[3]
        state = trained.state()
        loss, later, gradients = trained.losses(data[2:]), trained.state(), trained.step.gradients()
    loaded = loaded_under(b, state, trained, **options)
    with dt.launch(b.mesh):
        assert loaded.losses(data[2:]) == loss
        assert_same_bits(loaded.state(), later)
        assert_same_bits(loaded.step.gradients(), gradients)


@pytest.mark.slow
def test_switch_continues_random_numbers() -> None:
    a, b, data = PLACES["dp4"], PLACES["tp2"], batches(4)
    still, moved = Trained(a, module=DropoutGPT()), Trained(a, module=DropoutGPT())
    moved.module.load_state_dict(still.module.state_dict())
    with dt.launch(a.mesh):
        losses = still.losses(data)
    with dt.launch(a.mesh) as run:
        found = moved.losses(data[:2])
        moved.switch(run, b)
        found += moved.losses(data[2:])
    assert found[:2] == losses[:2]
    assert found == pytest.approx(losses, rel=1e-5)


def test_compiled_function_follows_switched_model() -> None:
    a, b = PLACES["tp2"], PLACES["pp2"]
    model = dt.parallelize(make_model(), a.mesh, a.pins)
    x = batches(1)[0][0]
    logits, early = (dt.compile(lambda m, x: m(x), a.mesh) for _ in range(2))
    with dt.launch(a.mesh) as run:
        first = logits(model, x)
        run.switch(model, None, b.mesh, b.pins, **b.how)
        second = logits(model, x)
        assert first.spec.mesh == a.mesh and second.spec.mesh == b.mesh
        torch.testing.assert_close(second.full_tensor(), first.full_tensor())
        assert early(model, x).spec.mesh == b.mesh
        assert logits.plan(model, x).mesh == b.mesh and len(logits.plans) == 1
        late = dt.compile(lambda m, x: m(x), a.mesh)
        with pytest.raises(dt.PlanningError, match="the model was parallelized on mesh"):
            late(model, x)
        with pytest.raises(dt.PlanningError, match="x is on mesh"):
            logits(model, dt.distribute(x, a.mesh))
        run.switch(model, None, a.mesh, a.pins)
        assert torch.equal(logits(model, x).full_tensor(), first.full_tensor())
        assert late(model, x).spec.mesh == a.mesh


@pytest.mark.slow
def test_switch_before_first_step_sends_nothing() -> None:
    a, b, data = PLACES["dp4"], PLACES["tp2"], batches(1)
    trained, fresh = Trained(a), Trained(b)
    with dt.launch(a.mesh) as run:
        plan = run.switch(trained.model, trained.opt, b.mesh, b.pins)
        assert str(plan) == "switch of GPT: no value is on the ranks yet"
        with pytest.raises(dt.PlanningError, match='inputs names the axis "dp"'):
            trained.losses(data)
        step = dt.train_step(trained.model, loss_fn, trained.opt, clip_grad_norm=1.0, **b.steps)
        loss = float(step(*data[0]))
    with dt.launch(b.mesh):
        assert fresh.losses(data) == [loss]


def test_switch_keeps_values_that_user_wrote_and_read() -> None:
    a, b = PLACES["dp4"], PLACES["tp2"]
    trained, data = Trained(a), batches(2)
    with dt.launch(a.mesh) as run:
        trained.losses(data[:1])
        with torch.no_grad():
            trained.module.norm.weight.fill_(0.5)
        shown = trained.module.embed.weight.sum().item()
        plan = trained.switch(run, b)
        assert "norm.weight" not in plan.transfers  # the controller has it, and puts it there
        assert trained.module.embed.weight.sum().item() == shown
        assert torch.equal(trained.state()["model"]["norm.weight"], torch.full((16,), 0.5))
        trained.losses(data[1:])
        assert not torch.equal(trained.module.norm.weight, torch.full((16,), 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["elsewhere", "same mesh"])
def test_failed_switch_changes_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails to assemble the received values; then no rank keeps new values."""
    data = batches(3)
    mesh = dt.Mesh(tp=2)
    at = Place(axes=dict(tp=2), pins=MEGATRON)
    trained = Trained(at)
    to = dt.Mesh(tp=2, name="other") if place == "elsewhere" else mesh
    unpacked, calls = between_meshes.unpack, []

    def fails(*given: Any) -> tuple[Tensor, ...]:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return unpacked(*given)

    with dt.launch(mesh) as run:
        trained.losses(data[:1])
        before, names, places = trained.state(), tables(run), dict(run.launch.places)
        entries = named(homes(trained.model, run))
        monkeypatch.setattr(between_meshes, "unpack", fails)
        with pytest.raises(DaftError, match="no memory") as caught:
            run.switch(trained.model, trained.opt, to, {})
        assert "which changed nothing" in str(caught.value.__notes__)
        monkeypatch.setattr(between_meshes, "unpack", unpacked)
        assert tables(run) == names and run.launch.places == places
        assert named(homes(trained.model, run)) == entries
        assert trained.model.mesh == mesh and trained.step.plan(*data[1]).mesh == mesh
        assert_same_bits(trained.state(), before)
        losses = trained.losses(data[1:2])
        run.switch(trained.model, trained.opt, to, {})
        after = named(homes(trained.model, run))
        assert {n: s.label for n, s in after.items()} == {n: s.label for n, s in entries.items()}
        assert {stored.spec.mesh for stored in after.values()} == {to}
        trained.losses(data[2:])
    fresh = Trained(at)
    with dt.launch(mesh):
        assert fresh.losses(data[:2])[1:] == losses


def test_refused_switch_changes_nothing() -> None:
    a, data = PLACES["dp4"], batches(2)
    trained = Trained(a)
    model, opt, tp = trained.model, trained.opt, dt.Mesh(tp=2)
    with dt.launch(a.mesh) as run:
        trained.losses(data[:1])
        names = tables(run)

        def refused(match: str, *given: Any, **stated: Any) -> None:
            for verb in (run.switch, run.switch_plan):
                with pytest.raises(dt.PlanningError, match=match):
                    verb(*given, **stated)

        refused("matches no parameter", model, opt, tp, {"*.qkvv.weight": dict(tp=dt.Row())})
        refused('names the axis "dp"', model, opt, tp, {"*.qkv.weight": dict(dp=dt.Row())})
        refused('inputs names the axis "dp"', model, opt, tp, MEGATRON)
        refused("has no axis 'dp'", model, opt, tp, MEGATRON, inputs={}, zero={"dp": 1})
        tp3, strict = dt.Mesh(tp=3), dict(misaligned="error", inputs={})
        refused("does not line up", model, opt, tp3, MEGATRON, **strict)
        refused("stage 0 matches no", model, opt, dt.Mesh(pp=2), {}, stages={"pp": [["a"], ["b"]]})
        refused("another optimizer of this model", model, None, tp, MEGATRON, inputs={})
        other = torch.optim.SGD(trained.module.parameters(), lr=0.1)
        refused("another optimizer of this model", model, other, tp, MEGATRON, inputs={})
        stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        refused("that are not the model's", model, [opt, stranger], tp, MEGATRON, inputs={})
        refused("takes a parallelized module", trained.module, opt, tp, MEGATRON)
        refused("not a Mesh", model, opt, MEGATRON)
        refused("is the class GPipe", model, opt, tp, {}, inputs={}, schedule=dt.GPipe)
        refused("which has 2 ranks", model, opt, tp, {}, inputs={}, ranks=(0,))
        refused("new ones are 4, 5", model, opt, tp, {}, inputs={}, ranks=(0, 9))
        refused("is on ranks", model, opt, a.mesh, {}, ranks=(3, 2, 1, 0))
        refused("takes inputs|is a replica|replica has", dt.replica(model, tp, {}), None, tp, {})
        elsewhere = dt.parallelize(make_model(), tp, {})
        refused("the running launch is on", elsewhere, None, a.mesh, {})
        never = dt.parallelize(make_model(), a.mesh, {})
        refused("inputs= changes the model's later steps", never, None, tp, {}, inputs={})
        with pytest.raises(TypeError, match="stage"):
            run.switch(model, opt, tp, MEGATRON, stage={})
        assert tables(run) == names and run.launch.places == {a.mesh: (0, 1, 2, 3)}
        assert model.mesh == a.mesh and model.switches == 0
        losses = trained.losses(data[1:])
    with pytest.raises(RuntimeError, match="the launch has ended"):
        run.switch(model, opt, tp, MEGATRON, inputs={})
    fresh = Trained(a)
    with dt.launch(a.mesh):
        assert fresh.losses(data)[1:] == losses


def test_switch_raises_failure_of_earlier_step_first() -> None:
    at, (tokens, targets) = PLACES["dp4"], batches(1)[0]
    trained = Trained(at)
    with dt.launch(at.mesh) as run:
        trained.step(tokens, targets)
        trained.step(tokens, targets + 1000)
        with pytest.raises(DaftError):
            run.switch(trained.model, trained.opt, dt.Mesh(tp=2), {}, inputs={})
        assert trained.model.mesh == at.mesh
        run.switch(trained.model, trained.opt, dt.Mesh(tp=2), {}, inputs={})
        trained.losses([(tokens, targets)])
        assert trained.model.steps.present() == 2


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.down(F.gelu(self.up(x)))


def test_switched_policy_still_syncs_to_its_replica() -> None:
    train, play = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
    torch.manual_seed(0)
    net = Pair()
    policy = dt.parallelize(net, train, {}, zero={"dp": 3})
    actor = dt.replica(policy, play, {"up.weight": dict(tp=dt.Row())})
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    step = dt.train_step(policy, lambda m, x: m(x).square().mean(), opt)
    x = torch.randn(4, 8)
    with dt.launch(train, play) as run:
        step(x)
        dt.sync(policy, actor)
        run.switch(policy, opt, dt.Mesh(dp=4, name="more"), {}, zero={"dp": 1})
        assert run.launch.places[dt.Mesh(dp=4, name="more")] == (0, 1, 4, 5)  # not the replica's
        step(x)
        dt.sync(policy, actor)
        assert_same_bits(
            dt.gather_state_dict(actor)["model"], dt.gather_state_dict(policy)["model"]
        )
        assert net.seen.item() == 2


def test_teacher_must_be_switched_before_student() -> None:
    a, b = dt.Mesh(dp=2), dt.Mesh(tp=2)
    torch.manual_seed(0)
    student, teacher = (dt.parallelize(Pair(), a, {}) for _ in range(2))
    opt = torch.optim.SGD(student.parameters(), lr=0.1)
    step = dt.train_step(student, lambda m, t, x: F.mse_loss(m(x), t(x).detach()), opt)
    x = torch.randn(4, 8)
    with dt.launch(a) as run:
        float(step(teacher, x))
        with pytest.raises(dt.PlanningError, match="was parallelized on mesh"):
            run.switch(student, opt, b, {})
        run.switch(teacher, None, b, {})
        run.switch(student, opt, b, {})
        float(step(teacher, x))
        assert student.mesh == teacher.mesh == b


@pytest.mark.slow
def test_optimizer_state_read_by_user_is_sent_from_controller() -> None:
    a, b, data = PLACES["dp4 zero3"], PLACES["tp2"], batches(3)
    losses = []
    for looks in (False, True):
        trained = Trained(a)
        with dt.launch(a.mesh) as run:
            trained.losses(data[:2])
            if looks:
                steps = [float(e["step"]) for e in trained.opt.state_dict()["state"].values()]
                assert set(steps) == {2}
            plan = trained.switch(run, b)
            assert any("exp_avg" in name for name in plan.transfers) is not looks
            assert not tables(run)[2] and not tables(run)[3]
            losses.append((trained.losses(data[2:]), trained.state()))
    assert losses[0][0] == losses[1][0]
    assert_same_bits(losses[0][1], losses[1][1])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 12)
        self.one, self.two = nn.Linear(12, 4), nn.Linear(12, 4)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_switch_moves_state_of_two_steps_of_one_optimizer(kind: Any) -> None:
    """State that only the earlier step updates is kept on the controller, and goes where that step
    needs it."""
    a, b, x = dt.Mesh(dp=2), dt.Mesh(tp=2), torch.randn(4, 8)
    pins = {"body.weight": dict(tp=dt.Row()), "one.weight": dict(tp=dt.Column())}
    options = dict(momentum=0.9) if kind is torch.optim.SGD else {}

    def made(mesh: dt.Mesh, pins: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = dt.parallelize(Heads(), mesh, pins, zero={"dp": 1} if "dp" in mesh.axes else None)
        opt = kind(model.parameters(), lr=0.1, **options)

        def loss(name: str) -> Any:
            def of(m: Any, x: Tensor) -> Tensor:
                return m.get_submodule(name)(m.body(x).relu()).square().mean()

            return of

        return model, opt, *(dt.train_step(model, loss(name), opt) for name in ("one", "two"))

    model, opt, one, two = made(a, {})
    with dt.launch(a) as run:
        float(one(x)), float(two(x))
        state = dt.gather_state_dict(model, opt)
        run.switch(model, opt, b, pins)
        assert_same_bits(dt.gather_state_dict(model, opt), state)
        losses = [float(one(x)), float(two(x)), float(one(x))]
        later = dt.gather_state_dict(model, opt)
        run.switch(model, opt, a, {}, zero={"dp": 1})
        assert_same_bits(dt.gather_state_dict(model, opt), later)
        float(one(x)), float(two(x))
    model, opt, one, two = made(b, pins)
    dt.load_state_dict(model, opt, state)
    with dt.launch(b):
        assert [float(one(x)), float(two(x)), float(one(x))] == losses
        assert_same_bits(dt.gather_state_dict(model, opt), later)


def test_switch_moves_two_optimizers() -> None:
    a, b, x = dt.Mesh(dp=2), dt.Mesh(tp=2), torch.randn(4, 8)
    torch.manual_seed(0)
    model = dt.parallelize(Pair(), a, {})
    up = torch.optim.AdamW(model.module.up.parameters(), lr=0.1)
    down = torch.optim.SGD(model.module.down.parameters(), lr=0.1, momentum=0.9)
    steps = [dt.train_step(model, lambda m, x: m(x).square().mean(), opt) for opt in (up, down)]
    with dt.launch(a) as run:
        for step in steps:
            float(step(x))
        state = [dt.gather_state_dict(model, opt) for opt in (up, down)]
        with pytest.raises(dt.PlanningError, match="another optimizer of this model .*SGD"):
            run.switch(model, up, b, {"up.weight": dict(tp=dt.Row())})
        run.switch(model, [up, down], b, {"up.weight": dict(tp=dt.Row())})
        assert_same_bits([dt.gather_state_dict(model, opt) for opt in (up, down)], state)
        for step in steps:
            float(step(x))
        names = {name for own in tables(run).values() for name in own}
        assert all(name.startswith("part 1: model 0: ") for name in names), names


def test_switch_on_same_mesh_sends_only_what_zero_level_changes() -> None:
    """The ZeRO level changes and changes back."""
    at, data = PLACES["dp4"], batches(4)
    trained = Trained(at)
    with dt.launch(at.mesh) as run:
        trained.losses(data[:1])
        for one, level in zip(data[1:], (3, 1, 0), strict=True):
            how = {} if level == 0 else dict(zero={"dp": level})
            state = trained.state()
            plan = trained.switch(run, Place(axes=dict(dp=4), how=how, inputs=ROWS))
            assert_same_bits(trained.state(), state)
            cut = sum(t.bytes_sent for n, t in plan.transfers.items() if n == "embed.weight")
            assert cut == (0 if level != 1 else 3 * 32 * 16 * 4)
            trained.losses([one])
            assert all(name.startswith("model 0: ") for name in tables(run)[0])
        assert plan.bytes_sent == sum(
            3 * t.source.nbytes for n, t in plan.transfers.items() if "exp_avg" in n
        )
        assert run.switch(trained.model, trained.opt, at.mesh, {}).bytes_sent == 0


def test_meta_device_model_can_be_switched() -> None:
    mesh, data = dt.Mesh(dp=2), batches(2)
    with torch.device("meta"):
        module = GPT()
    model = dt.parallelize(module, mesh, {}, init="reset", zero={"dp": 3})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = dt.train_step(model, loss_fn, opt)
    with dt.launch(mesh) as run:
        float(step(*data[0]))
        before = dt.gather_state_dict(model)["model"]
        run.switch(model, opt, dt.Mesh(tp=4), MEGATRON)
        assert_same_bits(dt.gather_state_dict(model)["model"], before)
        float(step(*data[1]))
        after = dt.gather_state_dict(model, opt)
    assert not torch.equal(after["model"]["norm.weight"], before["norm.weight"])


@pytest.mark.slow
def test_generator_of_switched_model_must_be_made_again() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    a, b = dt.Mesh(tp=2), dt.Mesh(tp=4)
    pins = {"*.q_proj.weight": dict(tp=dt.Row()), "*.o_proj.weight": dict(tp=dt.Column())}
    model = dt.parallelize(LlamaForCausalLM(config).eval(), a, pins)
    gen = dt.generator(model, slots=2, length=16)
    with dt.launch(a) as run:
        first = gen([[1, 2, 3]], max_new_tokens=4)[0].tokens
        request = gen.submit([1, 2, 3], max_new_tokens=4)
        gen.step()
        run.switch(model, None, b, pins)
        for call in (lambda: gen([[1, 2, 3]]), gen.step, lambda: gen.plan("decode")):
            with pytest.raises(dt.PlanningError, match=r"fix: make a new one: dt.generator\(model"):
                call()
        assert not request.done
        again = dt.generator(model, slots=2, length=16)
        assert again([[1, 2, 3]], max_new_tokens=4)[0].tokens == first


@pytest.mark.slow
@pytest.mark.ray
def test_switches_on_ray_are_bitwise_equal_to_in_process(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, then three, one, and two pipeline stages."""
    data = batches(4)
    names = ("tp2", "tp3 uneven", "single", "pp2")
    first, *others = (PLACES[name] for name in names)
    found: list[tuple[list[float], Any]] = []
    for backend in ("inprocess", "ray"):
        trained = Trained(first)
        with dt.launch(first.mesh, backend=backend) as run:
            losses = trained.losses(data[:1])
            for at, one in zip(others, data[1:], strict=True):
                loss = trained.step(*one)  # is under way
                trained.switch(run, at)
                losses.append(float(loss))
            losses += trained.losses(data[:1])
            found.append((losses, trained.state()))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])


@pytest.mark.slow
@pytest.mark.ray
def test_ranks_join_and_are_replaced_during_switch_on_ray(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that fails to start changes nothing; a spare joins; ranks lost before and during a
    switch are replaced."""
    from dtensor.daft.ray.cluster import RayCluster
    from dtensor.daft.ray.recovery.membership import Membership

    data, a, b = batches(5), PLACES["tp2"], PLACES["tp3 uneven"]
    expected = Trained(a)
    with dt.launch(a.mesh) as run:
        losses = expected.losses(data[:2])
        expected.switch(run, b)
        losses += expected.losses(data[2:4])
        expected.switch(run, a)
        losses += expected.losses(data[4:])
        state = expected.state()

    trained = Trained(a)
    with dt.launch(a.mesh, backend="ray", spares=1) as run:
        cluster = run.launch.cluster
        assert isinstance(cluster, RayCluster)

        def lose(host: int) -> None:
            os.kill(cluster.membership.host(host).counter.pid, signal.SIGKILL)

        found = trained.losses(data[:1])
        add, wait = Membership.add, RayCluster._wait_until_started

        def wait_until(done: Callable[[], bool]) -> None:
            while not done():
                time.sleep(0.05)

        def stillborn(membership: Membership, new: Any) -> Any:
            processes = add(membership, new)
            for process in processes:
                wait_until(lambda process=process: bool(process.counter.pid))
                os.kill(process.counter.pid, signal.SIGKILL)
                wait_until(lambda process=process: process.gone)
            return processes

        with monkeypatch.context() as patch, pytest.raises(DaftError, match="did not start"):
            patch.setattr(Membership, "add", stillborn)
            trained.switch(run, b)
        assert (
            trained.model.mesh == a.mesh
            and cluster.size == 2
            and len(cluster.membership.processes) == 2
        )
        found += trained.losses(data[1:2])
        spares = {spare.index for spare in cluster.membership.start_spares()} or {
            cluster.membership.spares[0].index
        }

        def late(self: RayCluster, *given: Any) -> None:
            wait(self, *given)
            lose(0)

        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="recovered in"):
            patch.setattr(RayCluster, "_wait_until_started", late)
            trained.switch(run, b)
        assert cluster.membership.host(2).index in spares
        found += trained.losses(data[2:3])
        lose(2)
        with pytest.warns(RuntimeWarning, match="recovered in"):
            found += trained.losses(data[3:4])
            trained.switch(run, a)
        found += trained.losses(data[4:])
        assert_same_bits(trained.state(), state)
    assert found == losses
