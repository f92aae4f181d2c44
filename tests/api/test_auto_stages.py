"""`stages="auto"`: the chosen cut has the lowest predicted time, behaves like the same stages
stated by hand, and does not change later."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step.bound_call import BoundCall
from dtensor.frontend.graph import Graph
from tests.api.test_stage_graphs import Skips, square, vectors
from tests.models import GPT, batch, loss_fn
from tests.training import assert_gradients_close, gradients_of

# a slow device, so that compute counts beside latency
TOPOLOGY = dt.Topology(
    latency=1e-6, bandwidth=1e9, flops=1e9, memory_bandwidth=1e10, launch_latency=0.0
)
Stages = Any


def large_vocabulary() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, vocab=256, tied=False)


def data(size: int = 8) -> tuple[Tensor, ...]:
    return batch(0, size, 8)


def step_of(module: nn.Module, pp: int, stages: Stages, **options: Any) -> dt.TrainStep:
    model = dt.parallelize(module, dt.Mesh(pp=pp), {}, stages=stages)
    given: dict[str, Any] = dict(schedule=dt.OneFOneB(2), topology=TOPOLOGY, **options)
    return dt.train_step(model, loss_fn, torch.optim.AdamW(module.parameters()), **given)


@functools.cache
def graph() -> tuple[GPT, Graph]:
    module = large_vocabulary()
    return module, BoundCall.of(loss_fn, (module, *data()), {}).graph("loss")


def slowest(plan: dt.Plan) -> float:
    return max(work.seconds for work in plan.totals.stages)


def gpt_plan(pp: int, stages: Stages) -> tuple[dt.Plan, dict[str, Any]]:
    module, found = graph()
    step = step_of(module, pp, stages)
    plan = step.plan_of(found, *data())
    return plan, plan.stages or step.model.stages


def said(plan: dt.Plan) -> str:
    """Return the plan's text as one line."""
    return " ".join(str(plan).split())


def chosen(model: dt.ParallelModule) -> dict[str, list[list[str]]]:
    """Return the model's stages after they have been chosen."""
    (stages,) = model.stages.values()
    assert isinstance(stages, list)
    return model.stages


@pytest.mark.sample("3")
@pytest.mark.parametrize("pp", [2, 3])
def test_auto_stages_give_fewer_layers_to_stage_with_large_head(pp: int) -> None:
    """Stages with equal layer counts ignore that the head costs as much as one or two layers."""
    plan, stages = gpt_plan(pp, "auto")
    naive = {
        2: [["embed*", "positions*", "blocks.0*"], ["blocks.1*", "norm*", "head*"]],
        3: [["embed*", "positions*"], ["blocks.*"], ["norm*", "head*"]],
    }[pp]
    assert slowest(plan) < 0.9 * slowest(gpt_plan(pp, {"pp": naive})[0])
    # who states what was chosen gets the same plan; the head alone says that it was chosen
    again, stated = gpt_plan(pp, stages)
    assert stated == stages and again == plan
    assert "of even" in said(plan) and "of even" not in said(again)
    assert str(plan).partition("stage 0 of")[2] == str(again).partition("stage 0 of")[2]


def every_cut(names: Sequence[str], pp: int) -> list[list[list[str]]]:
    inner = itertools.combinations(range(1, len(names)), pp - 1)
    bounds = [(0, *one, len(names)) for one in inner]
    return [[list(names[i:j]) for i, j in itertools.pairwise(b)] for b in bounds]


def test_auto_stages_with_skip_connections_match_best_cut_by_brute_force() -> None:
    module, given = Skips(), vectors()
    captured = BoundCall.of(square, (module, *given), {}).graph("loss")

    def plan_of(stages: Stages) -> dt.Plan:
        model = dt.parallelize(module, dt.Mesh(pp=3), {}, stages=stages)
        optimizer = torch.optim.SGD(module.parameters())
        step = dt.train_step(model, square, optimizer, topology=TOPOLOGY)
        return step.plan_of(captured, *given)

    names = [f"{name}.*" for name in ("down1", "down2", "middle", "up2", "up1")]
    found = [plan_of({"pp": cut}) for cut in every_cut(names, 3)]
    assert slowest(plan_of("auto")) == pytest.approx(min(map(slowest, found)), rel=1e-9)


@pytest.mark.slow
def test_first_program_that_runs_fixes_auto_stages_for_later_programs() -> None:
    module = large_vocabulary()
    step = step_of(module, 2, {"pp": "auto"})
    plan = step.plan(*data())
    other = tuple(torch.cat([x] * 4) for x in data())
    step.plan(*other)
    assert step.model.stages == {"pp": dt.Auto(num_stages=2)}  # planning changes nothing
    with dt.launch(step.model.mesh):
        float(step(*data()))
        assert chosen(step.model) == plan.stages
        wider = step.plan(*other)
        assert wider.stages == plan.stages
        assert [(i.label, i.stages) for i in wider.inputs] == [
            (i.label, i.stages) for i in plan.inputs
        ]
        float(step(*other))
        dt.gather_state_dict(step.model)


@pytest.mark.slow
def test_auto_stages_train_bitwise_equal_to_same_stages_stated() -> None:
    """`dt.Auto(num_stages=4)` puts two stages on each rank; the schedule chooses which ranks."""
    mesh, losses = dt.Mesh(pp=2), list[list[float]]()
    stages: Stages = {"pp": dt.Auto(num_stages=4)}
    for _ in range(2):
        module = large_vocabulary()
        model = dt.parallelize(module, mesh, {}, stages=stages)
        optimizer = torch.optim.AdamW(module.parameters())
        step = dt.train_step(model, loss_fn, optimizer, schedule=dt.ZBV(4), topology=TOPOLOGY)
        evaluate = dt.compile(lambda m, *b: loss_fn(m, *b)[0], mesh)
        with dt.launch(mesh):
            losses.append([float(step(*data())) for _ in range(3)])
            losses[-1].append(float(evaluate(model, *data()).full_tensor()))
            state = dt.gather_state_dict(model, optimizer)
        stages = model.stages
        assert step.plan(*data()).stage_ranks == (0, 1, 1, 0)
    assert losses[0] == losses[1] and losses[0][3] < losses[0][0]
    plain = large_vocabulary()
    plain.load_state_dict(state["model"])
    assert loss_fn(plain, *data())[0].item() == pytest.approx(losses[0][3], rel=1e-5)


def test_compare_accepts_auto_stages_and_finds_them_faster() -> None:
    stated = [["embed*", "positions*", "blocks.0*"], ["blocks.1*", "norm*", "head*"]]
    options: dict[str, Any] = dict(schedule=dt.OneFOneB(2), topology=TOPOLOGY)
    found = dt.compare(
        large_vocabulary(),
        loss_fn,
        {
            "auto": (dt.Mesh(pp=2), {}, dict(stages="auto", **options)),
            "by count": (dt.Mesh(pp=2), {}, dict(stages={"pp": stated}, **options)),
            "too many": (dt.Mesh(pp=64), {}, dict(stages="auto", **options)),
        },
        *data(),
    )
    assert found["auto"].plan.auto
    assert found["auto"].seconds < found["by count"].seconds
    assert "cut into 64 stages" in str(found["too many"].error)


class Tables(nn.Module):
    """Two large tables that take no time, and six layers that take time."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(2000, 32), nn.Embedding(2000, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.one(x) + self.two(x))


def test_auto_stages_respect_memory_limit_over_time() -> None:
    module = Tables()

    def plan_of(memory: float) -> dt.Plan:
        topology = dt.Topology(
            latency=0.0, flops=1e9, memory_bandwidth=1e15, memory_bytes=memory, launch_latency=0.0
        )
        model = dt.parallelize(module, dt.Mesh(pp=2), {}, stages="auto")
        optimizer = torch.optim.AdamW(module.parameters())
        step = dt.train_step(model, square, optimizer, topology=topology)
        return step.plan(torch.zeros(64, dtype=torch.long))

    free, tight, few = plan_of(1e9), plan_of(1.5e6), plan_of(1000)
    assert free.auto == (("one.*", "two.*", "layers.{0..2}.*"), ("layers.{3..5}.*",))
    assert tight.auto == few.auto == (("one.*",), ("two.*", "layers.*"))
    assert max(m.total for m in free.memory) > 1.5e6 > max(m.total for m in tight.memory)
    assert "above its 1000 B" in said(few) and "above its" not in said(tight)


class Functional(nn.Module):
    """A model whose head uses the embedding's weight without its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.ws = nn.ParameterList(torch.randn(8, 8) * 0.3 for _ in range(2))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = torch.tanh(block(y))
        for w in self.ws:
            y = torch.tanh(y @ w)
        return F.linear(y, self.embed.weight)


class Repeated(nn.Module):
    """A model that calls one layer four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for _ in range(4):
            y = y + self.down(torch.relu(self.up(y)))
        return self.head(y)


def next_token(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())


@pytest.mark.default("Functional")
@pytest.mark.parametrize("make", [Functional, Repeated])
def test_auto_stages_handle_shared_and_unused_parameters(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randint(0, 11, (8, 6))
    mesh = dt.Mesh(pp=2)
    model = dt.parallelize(module, mesh, {}, stages="auto")
    step = dt.train_step(
        model,
        next_token,
        torch.optim.SGD(module.parameters()),
        schedule=dt.OneFOneB(2),
        topology=TOPOLOGY,
    )
    if make is Functional:
        stages = step.plan(x).stages["pp"]
        assert all("embed.weight" in stage for stage in stages)
        assert "unused.*" in stages[1]  # where the modules around it are
    with dt.launch(mesh):
        found = step.gradients(x)
    expected = gradients_of(module, (x,), next_token)
    assert_gradients_close({name: found[name] for name in expected}, expected)


def test_auto_stages_mistakes_raise_planning_error() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with pytest.raises(dt.PlanningError, match=r"axis pp, which is not in the mesh.\n  mesh\(tp=2"):
        dt.parallelize(module, dt.Mesh(tp=2), {}, stages="auto")
    with pytest.raises(dt.PlanningError, match=r'fix: write "pipe"'):
        dt.parallelize(module, dt.Mesh(pipe=2), {}, stages={"pip": "auto"})
    with pytest.raises(dt.PlanningError, match=r"fix: Auto\(num_stages=4\)"):
        dt.parallelize(module, dt.Mesh(pp=2), {}, stages={"pp": dt.Auto(num_stages=3)})
    model = dt.parallelize(module, dt.Mesh(pp=3), {}, stages="auto")
    step = dt.train_step(model, square, torch.optim.SGD(module.parameters()))
    with pytest.raises(dt.PlanningError, match=r"and there are 2.\n  0, 2\nfix: .*pp=2"):
        step.plan(torch.randn(4, 4))
    assert model.stages == {"pp": dt.Auto(num_stages=3)}  # nothing was decided
    one = dt.parallelize(module, dt.Mesh(pp=1), {}, stages="auto")
    assert one.stages == {"pp": [["*"]]}
