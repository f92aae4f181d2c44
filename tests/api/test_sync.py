"""`dt.sync` of replicas: for any placements on both meshes, the actor gets the policy's values
after one step, and only missing bytes are sent."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.store.session import session_for
from dtensor.sharding.redistribute.between_meshes import TransferPlan
from dtensor.sharding.spec.placements import intersect
from dtensor.sharding.spec.shards import shape_of
from tests.api import tied
from tests.api.tied import WIDTH, batch, loss_fn


class Net(tied.Net):
    """A model with buffers (one scalar) and a frozen parameter."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) * self.scale + self.shift
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def net(dtype: torch.dtype = torch.float32, tied: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(tied).to(dtype)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens)


TP = {
    "*.up.weight": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
    "embed.weight": dict(tp=dt.Row()),
}
STAGES = {"pp": [["embed*", "blocks.0.*", "scale", "shift"], ["blocks.1.*", "head*"]]}
PAIRS: dict[str, tuple[dt.Mesh, dict[str, Any], dt.Mesh, dict[str, Any]]] = {
    "tp2 to one": (dt.Mesh(tp=2), {"placements": TP}, dt.Mesh(name="play"), {}),
    "dp2, ZeRO-3, to tp2": (
        dt.Mesh(dp=2),
        {"zero": {"dp": 3}},
        dt.Mesh(tp=2),
        {"placements": TP},
    ),
    "pp2 to tp2": (dt.Mesh(pp=2), {"stages": STAGES}, dt.Mesh(tp=2), {"placements": TP}),
    "tp2pp2 to dp2": (
        dt.Mesh(pp=2, tp=2),
        {"stages": STAGES, "placements": TP},
        dt.Mesh(dp=2),
        {},
    ),
    "tp2 to pp2": (dt.Mesh(tp=2), {"placements": TP}, dt.Mesh(pp=2), {"stages": STAGES}),
    "vocab 50 over 4": (
        dt.Mesh(dp=2),
        {"zero": {"dp": 3}},
        dt.Mesh(tp=4),
        {"placements": TP | {"*.up.bias": dict(tp=dt.Row())}},
    ),
}


def lacking(plan: TransferPlan) -> int:
    """Return the bytes of target shards that the target ranks do not already have as source
    shards."""
    total = 0
    for index, rank in plan.there.numbers.items():
        wanted, held = plan.there.where(index), 0
        for other, number in plan.here.numbers.items():
            if number == rank:
                both = tuple(map(intersect, wanted, plan.here.where(other)))
                held = math.prod(shape_of(both))
        total += (math.prod(shape_of(wanted)) - held) * plan.source.dtype.itemsize
    return total


def fresh_logits(state: Mapping[str, Any], module: nn.Module, mesh: dt.Mesh, **stated: Any) -> Any:
    """Return the logits of a new model with these weights and placements, in its own launch."""
    module = copy.deepcopy(module)
    module.load_state_dict(state)
    model = dt.parallelize(module, mesh, **stated)
    with dt.launch(mesh):
        return dt.compile(logits_of, mesh)(model, batch(9)[0]).full_tensor()


@pytest.mark.default("tp2 to one-False")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_sync_gives_actor_the_values_after_earlier_steps(pair: str, shared: bool) -> None:
    train, stated, play, placed = PAIRS[pair]
    module = net()
    plain = copy.deepcopy(module)
    policy = dt.parallelize(module, train, **stated)
    actor = dt.replica(policy, play, **placed)
    step = dt.train_step(
        policy, loss_fn, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    )
    logits = dt.compile(logits_of, play)
    ranks = {play: range(play.size)} if shared else None
    tokens = batch(9)[0]
    with dt.launch(train, play, ranks=ranks):
        assert dt.sync(policy, actor) == 1  # before any program
        before = logits(actor, tokens).full_tensor()
        for i in range(2):
            step(*batch(i))
        assert dt.sync(policy, actor) == actor.version == 2
        after = logits(actor, tokens).full_tensor()
        plan = dt.sync_plan(policy, actor)
        state = dt.gather_state_dict(policy)["model"]
        mine = dt.gather_state_dict(actor)["model"]
    assert state.keys() == mine.keys()
    assert all(torch.equal(state[name], mine[name]) for name in state)
    assert plan.bytes_sent == sum(map(lacking, plan.transfers.values()))
    torch.testing.assert_close(before, plain(tokens))
    assert not torch.equal(before, after)
    with torch.no_grad():
        plain.shift.copy_(module.shift)
    assert torch.equal(after, fresh_logits(state, plain, play, **placed))


def simple(
    play: dt.Mesh | None = None, **placed: Any
) -> tuple[nn.Module, dt.ParallelModule, dt.ParallelModule]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    policy = dt.parallelize(module, dt.Mesh(tp=2), {"0.weight": dict(tp=dt.Row())})
    return module, policy, dt.replica(policy, play or dt.Mesh(tp=2, name="play"), **placed)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def sgd(policy: dt.ParallelModule) -> dt.TrainStep:
    opt = torch.optim.SGD(policy.parameters(), lr=0.5)
    return dt.train_step(policy, lambda model, x: model(x).square().mean(), opt)


def test_sync_sends_nothing_that_target_rank_already_has() -> None:
    _, policy, actor = simple(placements={"0.weight": dict(tp=dt.Row())})
    ranks = {actor.mesh: (0, 1)}
    before = dt.sync_plan(policy, actor, ranks=ranks)
    with dt.launch(policy.mesh, actor.mesh, ranks=ranks):
        plan = dt.sync_plan(policy, actor)
        assert plan == before
        with pytest.raises(dt.PlanningError, match="fix: leave ranks out"):
            dt.sync_plan(policy, actor, ranks=ranks)
        assert plan.bytes_sent == 0 and plan.messages == ()
        assert plan.bytes_kept == 2 * (12 + 6 + 24 + 4) * 4
        dt.sync(policy, actor)
        step = sgd(policy)
        old = dt.compile(logits_of, actor.mesh)(actor, X).full_tensor()
        step(X)
        # the same ranks, and yet values of its own
        assert torch.equal(dt.compile(logits_of, actor.mesh)(actor, X).full_tensor(), old)
    # apart, and as the program that ran keeps them: all but the last bias split
    assert dt.sync_plan(policy, actor).bytes_sent == 2 * (12 + 3 + 12 + 4) * 4


def test_sync_plan_text_before_anything_runs() -> None:
    _, policy, actor = simple(placements={"2.weight": dict(tp=dt.Column())})
    assert (
        str(dt.sync_plan(policy, actor))
        == """\
sync of Sequential: 4 values, mesh(tp=2) -> mesh(tp=2, name="play")

  0.weight   f32[6@tp,4]   -> f32[6,4]      * 0 -> 2 [0:3,:]   48 bytes
                                            * 1 -> 2 [3:6,:]   48 bytes
                                            * 0 -> 3 [0:3,:]   48 bytes
                                            * 1 -> 3 [3:6,:]   48 bytes
  0.bias     f32[6]        -> f32[6]        * 0 -> 2 [:]       24 bytes
                                            * 1 -> 3 [:]       24 bytes
  2.weight   f32[4,6]      -> f32[4,6@tp]   * 0 -> 2 [:,0:3]   48 bytes
                                            * 1 -> 3 [:,3:6]   48 bytes
  2.bias     f32[4]        -> f32[4]        * 0 -> 2 [:]       16 bytes
                                            * 1 -> 3 [:]       16 bytes

pair            messages   values   bytes
* rank 0 -> 2          1        4     136
* rank 0 -> 3          1        1      48
* rank 1 -> 2          1        1      48
* rank 1 -> 3          1        4     136

368 bytes sent in 4 messages, at most 184 by one rank and 184 to one; 0 are there already
predicted 24.0 us, H100 SXM bf16, NVLink"""
    )
    slow = dt.Topology(latency=1.0, bandwidth=46.0)
    assert dt.sync_plan(policy, actor, topology=slow).seconds == 2 + 184 / 46


def test_sync_orders_pending_steps_and_actor_programs() -> None:
    """Each call sees the calls submitted before it, and no call is waited for."""
    module, policy, actor = simple()
    plain = copy.deepcopy(module)
    step, logits = sgd(policy), dt.compile(logits_of, actor.mesh)
    found: list[dt.DTensor] = []
    with dt.launch(policy.mesh, actor.mesh):
        for _ in range(3):
            dt.sync(policy, actor)
            step(X)
            found.append(logits(actor, X))
        values = [one.full_tensor() for one in found]
    expected: list[Tensor] = []
    opt = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        expected.append(plain(X).detach())
        opt.zero_grad()
        plain(X).square().mean().backward()
        opt.step()
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value, wanted)


def test_sync_sends_values_that_user_wrote_between_steps() -> None:
    module, policy, actor = simple()
    with dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        sgd(policy)(X)
        with torch.no_grad():
            module[0].weight.fill_(0.25)
            module[2].bias.zero_()
        dt.sync(policy, actor)
        mine = dt.gather_state_dict(actor)["model"]
        assert float(mine["0.weight"].min()) == float(mine["0.weight"].max()) == 0.25
        assert not mine["2.bias"].any()
        assert torch.equal(mine["2.weight"], module[2].weight)


def test_sync_to_two_actors_in_two_launches() -> None:
    module, policy, actor = simple()
    other = dt.replica(policy, dt.Mesh(dp=3), {})
    for version in (1, 2):
        with dt.launch(policy.mesh, actor.mesh, other.mesh):
            with pytest.raises(dt.PlanningError, match=r"no value here yet.*\nfix: dt.sync\("):
                dt.compile(logits_of, actor.mesh)(actor, X)
            sgd(policy)(X)
            assert dt.sync(policy, actor) == dt.sync(policy, other) == version
            for one in (actor, other):
                state = dt.gather_state_dict(one)["model"]
                assert all(torch.equal(state[n], p) for n, p in module.state_dict().items())
    assert dt.gather_state_dict(policy)["model"].keys() == module.state_dict().keys()


def test_sync_sends_no_values_through_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    _, policy, actor = simple()
    with dt.launch(policy.mesh, actor.mesh) as session:
        step = sgd(policy)
        float(step(X))
        dt.sync(policy, actor)
        cluster = session.launch.cluster
        sent: list[int] = []
        run = cluster.run

        def counted(handle: Any, inputs: Any, **options: Any) -> Any:
            sent.append(len(pickle.dumps((handle.id, inputs, options))))
            future = run(handle, inputs, **options)
            sent.append(len(pickle.dumps(future.get())))
            return future

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("more than a run")

        float(step(X))
        for name in ("get", "put", "load", "delete"):
            monkeypatch.setattr(cluster, name, refuse)
        monkeypatch.setattr(cluster, "run", counted)
        dt.sync(policy, actor)
        monkeypatch.undo()
        assert len(sent) == 2 and sum(sent) < 1000


def test_sync_of_mixed_dtypes() -> None:
    module = net(torch.bfloat16)
    module.shift = module.shift.double()
    module.register_buffer("count", torch.tensor([3, 4], dtype=torch.int8))
    module.register_buffer("mask", torch.tensor([True, False, True]))
    policy = dt.parallelize(module, dt.Mesh(dp=3), {}, zero={"dp": 3})
    actor = dt.replica(policy, dt.Mesh(tp=2), TP)
    with dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        plan = dt.sync_plan(policy, actor)
        # every pair's values are in one message, of all dtypes
        assert len(plan.messages) == len(plan.bytes_by_pair) == 6
        there = session_for(actor.mesh).model_homes[id(actor)]
        found = there.gather(list(there.stored))
        expected = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_reads_of_actor_are_current_or_refused() -> None:
    module, policy, actor = simple()
    with dt.launch(policy.mesh, actor.mesh):
        with pytest.raises(dt.PlanningError, match="no value here yet"):
            dt.gather_state_dict(actor)
        dt.sync(policy, actor)
        sgd(policy)(X)
        before = dt.gather_state_dict(actor)["model"]
        assert not torch.equal(before["0.weight"], module[0].weight)
        with pytest.raises(RuntimeError, match=r'fix: dt.gather_state_dict\(actor\)\["model"\]'):
            actor.state_dict()
        with pytest.raises(RuntimeError, match="meta"):
            actor.module[0].weight.sum().item()
    with pytest.raises(dt.PlanningError, match="no value here yet"):
        dt.gather_state_dict(actor)


def test_replica_has_own_train_mode_and_no_values_on_controller() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    module.append(module[0])
    policy = dt.parallelize(module, dt.Mesh(a=2))
    actor = dt.replica(policy, dt.Mesh(b=1)).eval()
    assert module.training and not actor.module.training
    assert all(p.is_meta for p in actor.parameters())
    assert actor.module[2] is actor.module[0]
    with dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        y = dt.compile(logits_of, actor.mesh)(actor, X).full_tensor()
        torch.testing.assert_close(y, module[0](module[0](X)))


def test_sync_of_meta_device_policy() -> None:
    """The policy's values are initialized on its ranks and sent from there."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    policy = dt.parallelize(module, dt.Mesh(dp=2), {}, zero={"dp": 3}, init="reset")
    actor = dt.replica(policy, dt.Mesh(tp=2), {"0.weight": dict(tp=dt.Row())})
    with dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        state = dt.gather_state_dict(policy)["model"]
        mine = dt.gather_state_dict(actor)["model"]
        assert all(torch.equal(state[n], mine[n]) and state[n].any() for n in state)


def test_sync_resets_buffer_that_actor_changed() -> None:
    module = nn.BatchNorm1d(4)
    policy = dt.parallelize(module, dt.Mesh(a=1))
    actor = dt.replica(policy, dt.Mesh(b=1))
    with dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        dt.compile(logits_of, actor.mesh)(actor, X)
        assert int(dt.gather_state_dict(actor)["model"]["num_batches_tracked"]) == 1
        dt.sync(policy, actor)
        assert int(dt.gather_state_dict(actor)["model"]["num_batches_tracked"]) == 0
    assert int(module.num_batches_tracked) == 0


def test_replica_and_sync_reject_bad_arguments() -> None:
    module, policy, actor = simple()
    with pytest.raises(dt.PlanningError, match=r'dt.Mesh\(tp=2, name="play"\) is another'):
        dt.replica(policy, dt.Mesh(tp=2))
    with pytest.raises(dt.PlanningError, match=r"fix: dt.replica\(policy, mesh"):
        dt.replica(actor, dt.Mesh(a=1))
    with pytest.raises(dt.PlanningError, match="replica takes a parallelized module"):
        dt.replica(module, dt.Mesh(a=1))  # type: ignore[arg-type]
    with pytest.raises(dt.PlanningError, match=r"fix: state them"):
        dt.replica(policy, dt.Mesh(pp=2), stages="auto")
    with pytest.raises(dt.PlanningError, match="matches no"):
        dt.replica(policy, dt.Mesh(tp=4), {"up.weight": dict(tp=dt.Row())})
    with pytest.raises(dt.PlanningError, match=r"fix: dt.train_step\(policy"):
        sgd(actor)
    with pytest.raises(dt.PlanningError, match=r"fix: dt.load_state_dict\(policy"):
        dt.load_state_dict(actor, None, {"model": module.state_dict()})
    other = dt.parallelize(copy.deepcopy(module), dt.Mesh(c=2))
    for call in (dt.sync, dt.sync_plan):
        with pytest.raises(dt.PlanningError, match="is a replica of another module"):
            call(other, actor)
        with pytest.raises(dt.PlanningError, match=r"fix: actor = dt.replica\(policy"):
            call(policy, other)
        with pytest.raises(dt.PlanningError, match=r"the policy first"):
            call(actor, policy)
    with pytest.raises(dt.PlanningError, match=r"not NoneType.\nfix: actor = dt.replica"):
        dt.sync(policy, None)  # type: ignore[arg-type]
    with pytest.raises(dt.PlanningError, match=r"fix: with dt.launch\(Mesh\(tp=2\), Mesh\(tp=2, n"):
        dt.sync(policy, actor)
    with dt.launch(policy.mesh), pytest.raises(dt.PlanningError, match="fix: dt.launch"):
        dt.sync(policy, actor)


def test_sync_plan_refuses_policy_that_changed_since_replica() -> None:
    module, policy, actor = simple()
    module.register_buffer("late", torch.zeros(2))
    with pytest.raises(dt.PlanningError, match="the policy alone has late"):
        dt.sync_plan(policy, actor)
    del module.late
    module.double()
    with pytest.raises(dt.PlanningError, match=r"0.weight is f64\[6,4\] in the policy, f32\[6,4\]"):
        dt.sync_plan(policy, actor)


@pytest.mark.ray
def test_sync_on_ray_in_many_messages_gives_policys_values(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dtensor.runtime.transfer.between_meshes.BUCKET_BYTES", 256
    )  # many messages
    module = net()
    train, play = dt.Mesh(dp=2), dt.Mesh(tp=2)
    policy = dt.parallelize(module, train, {}, zero={"dp": 3})
    actor = dt.replica(policy, play, TP)
    step = dt.train_step(
        policy, loss_fn, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    )
    logits = dt.compile(logits_of, play)
    with dt.launch(train, play, backend="ray"):
        seen: list[dt.DTensor] = []
        for i in range(3):
            step(*batch(i))
            dt.sync(policy, actor)
            seen.append(logits(actor, batch(9)[0]))
        values = [one.full_tensor() for one in seen]
        plan = dt.sync_plan(policy, actor)
        assert len(plan.messages) > 10 * len(plan.bytes_by_pair)
        state = dt.gather_state_dict(policy)["model"]
        mine = dt.gather_state_dict(actor)["model"]
    assert all(torch.equal(state[name], mine[name]) for name in state)
    assert not torch.equal(values[0], values[1])
    assert torch.equal(values[-1], fresh_logits(state, net(), play, placements=TP))
