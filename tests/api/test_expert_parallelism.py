"""Steps with experts split: failures, memory at a bound, ``capacity=``, the load of experts, and
state that moves between strategies."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.errors import PlanningError
from tests.api.expert_layer import EP, ROWS, TOKENS, D, E, F, Model, T, batch, loss_fn
from tests.runtime.test_memory import measure
from tests.training import assert_same_bits

BACKENDS = ["inprocess", pytest.param("ray", marks=pytest.mark.ray)]
EP_ROWS = dict(ep=dt.Row())


class Run:
    def __init__(
        self,
        mesh: dt.Mesh,
        pins: Any = EP,
        inputs: Any = EP_ROWS,
        zero: dict[str, int] | None = None,
        sizes: tuple[int, int] = (D, F),
        **options: Any,
    ) -> None:
        self.mesh, module = mesh, Model(*sizes)
        self.model = dt.parallelize(module, mesh, pins, zero=zero)
        self.optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        self.step = dt.train_step(self.model, loss_fn, self.optimizer, inputs=inputs, **options)

    def state(self) -> dict[str, Any]:
        return dt.gather_state_dict(self.model, self.optimizer)


def skewed(rows_of_first: int) -> tuple[Tensor, Tensor]:
    """Return a batch with this number of rows for expert 0, and the other rows for expert 3."""
    x, _ = batch()
    return x, torch.where(torch.arange(T) < rows_of_first, 0, 3).view(T, 1)


# -- failures --------------------------------------------------------------------------------------


def marked(mark: float) -> tuple[Tensor, Tensor]:
    x, ids = batch(9)
    x[-1, 0] = mark
    return x, ids


def wrong_id() -> tuple[Tensor, Tensor]:
    x, ids = batch(9)
    ids[-1, 0] = E
    return x, ids


FAILURES: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], str]] = {
    "before its counts": (lambda: marked(TOKENS), "marked by 7"),
    "after its counts": (lambda: marked(ROWS), "marked by 8"),
    "backward, between exchanges": (lambda: marked(-ROWS), "marked by -8"),
    "backward, after exchanges": (lambda: marked(-TOKENS), "marked by -7"),
    "an id outside": (wrong_id, r"Expert id 4 is outside -1\.\.3"),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_that_fails_around_an_exchange_is_undone(
    backend: str, request: pytest.FixtureRequest
) -> None:
    """One rank raises; no rank hangs, and the next step has the bits of a run without failures."""
    if backend == "ray":
        request.getfixturevalue("ray_session")
    good = Run(dt.Mesh(ep=2))
    with dt.launch(good.mesh):
        losses = [float(good.step(*batch(i))) for i in range(len(FAILURES) + 1)]
        expected = good.state()
    run, found = Run(dt.Mesh(ep=2)), list[float]()
    with dt.launch(run.mesh, backend=backend):  # type: ignore[arg-type]
        for i, (bad, message) in enumerate(FAILURES.values()):
            found.append(float(run.step(*batch(i))))
            with pytest.raises(TaskError, match=message):
                float(run.step(*bad()))
        found.append(float(run.step(*batch(len(FAILURES)))))
        assert found == losses
        assert_same_bits(run.state(), expected)


# -- memory and capacity ---------------------------------------------------------------------------


def test_plan_prints_memory_at_the_budget_and_at_the_bound() -> None:
    """A rank holds 8 rows if experts have equally many, and at most 32: one of each token."""

    def totals(ep: int, capacity: float | None) -> list[str]:
        plan = Run(dt.Mesh(ep=ep), capacity=capacity).step.plan(*batch())
        return [line for line in str(plan).splitlines() if line.startswith("  total")]

    most = "  total, if each rank receives all the rows it can"
    for capacity, rows in ((1, 8), (1.5, 12), (4, 32)):
        balanced, budget, bound = totals(4, capacity)
        assert budget.startswith(f"  total at capacity={capacity} ") and bound.startswith(most)
        equals = (size(budget) == size(balanced), size(budget) == size(bound))
        assert equals == (rows == 8, rows == 32)
    assert [line.startswith(most) for line in totals(4, None)] == [False, True]
    assert len(totals(1, 2)) == 1


def size(line: str) -> str:
    return line.split("  ")[-1].strip()


@pytest.mark.parametrize("first", [512, 1024], ids=["balanced", "all rows on one rank"])
def test_measured_memory_is_the_balanced_one_and_the_bound(first: int) -> None:
    run = Run(dt.Mesh(ep=2), sizes=(64, 32))
    x, ids = torch.randn(1024, 64), torch.where(torch.arange(1024) < first, 0, 3)
    ids[first // 2 : first] = 1
    plan = run.step.plan(x, ids.view(-1, 1))
    found = measure(run, (x, ids.view(-1, 1)))  # type: ignore[arg-type]
    predicted, _ = plan.totals.memory_with("balanced" if first == 512 else "most")
    assert predicted[0].total == pytest.approx(found[0]["peak"], rel=0.15)


@pytest.mark.parametrize("inputs", [EP_ROWS, None], ids=["tokens split", "tokens whole"])
def test_capacity_that_is_exceeded_undoes_the_step_and_states_one_that_does(inputs: Any) -> None:
    """Step 3 of 6 is skewed. With the stated capacity the run has the bits of a run without."""
    batches = [batch(i) if i != 2 else skewed(24) for i in range(6)]
    plain = Run(dt.Mesh(ep=2), inputs=inputs)
    with dt.launch(plain.mesh):
        losses = [float(plain.step(*each)) for each in batches[:2]]
        before = plain.state()
        losses += [float(plain.step(*each)) for each in batches[2:]]
        after = plain.state()
    tight = Run(dt.Mesh(ep=2), inputs=inputs, capacity=1.2)
    with dt.launch(tight.mesh):
        assert [float(tight.step(*each)) for each in batches[:2]] == losses[:2]
        with pytest.raises(TaskError) as caught:
            float(tight.step(*batches[2]))
        assert_same_bits(tight.state(), before)
        float(tight.step(*batches[3]))
    verb = "receive 24 rows in one exchange" if inputs else "hold 24 rows"
    text = f"Rank 0 would {verb}, and capacity=1.2 allows 20: expert 0 alone has 24."
    assert text in str(caught.value)
    (enough,) = re.findall(r"fix: capacity=([\d.]+), or dt.drop_tokens", str(caught.value))
    wide = Run(dt.Mesh(ep=2), inputs=inputs, capacity=float(enough))
    with dt.launch(wide.mesh):
        found = []
        for each in batches:
            found.append(float(wide.step(*each)))
            rows = dt.expert_load(wide.step).by_rank["experts"]
            assert max(rows.values()) <= float(enough) * T / 2
        assert found == losses
        assert_same_bits(wide.state(), after)


@pytest.mark.parametrize("capacity", [0.99, float("nan"), "2"])
def test_capacity_below_one_is_refused(capacity: Any) -> None:
    with pytest.raises(PlanningError, match=r"capacity=.* is not a number of at least 1.\nfix: c"):
        Run(dt.Mesh(ep=2), capacity=capacity)


# -- the load of experts ---------------------------------------------------------------------------

BOTH = {"experts.*": dict(dp=dt.Shard(0), ep=dt.Shard(0))}
DP_EP = dict(dp=dt.Row(), ep=dt.Row())
STRATEGIES: dict[str, dict[str, Any]] = {
    "one rank": dict(mesh=dt.Mesh(ep=1)),
    "tokens whole": dict(mesh=dt.Mesh(ep=3), inputs=None),
    "experts whole": dict(mesh=dt.Mesh(dp=3), pins={}, inputs=dict(dp=dt.Row())),
    "both split": dict(mesh=dt.Mesh(ep=3)),
    "dp2 ep2": dict(mesh=dt.Mesh(dp=2, ep=2), inputs=DP_EP),
    "experts over two axes": dict(mesh=dt.Mesh(dp=2, ep=2), pins=BOTH, inputs=DP_EP),
    "experts over two axes, tokens over one": dict(
        mesh=dt.Mesh(dp=2, ep=2), pins=BOTH, inputs=dict(dp=dt.Row())
    ),
    "microbatches": dict(mesh=dt.Mesh(ep=2), schedule=dt.GPipe(microbatches=3)),
    "zero": dict(mesh=dt.Mesh(dp=2, ep=2), inputs=DP_EP, zero={"dp": 3}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_expert_load_counts_rows_by_expert_and_rank(strategy: str) -> None:
    """One token has no expert. Ranks that differ on an axis without experts add up."""
    stated = STRATEGIES[strategy]
    run = Run(**stated)
    x, ids = skewed(20)
    ids[3] = -1
    with dt.launch(run.mesh):
        run.step(*batch())
        run.step(x, ids)
        load = dt.expert_load(run.step)
    assert load.rows == {"experts": (19, 0, 0, 12)}
    assert load.fullest_over_mean == {"experts": 19 * 4 / 31}
    by_rank, mesh = load.by_rank["experts"], run.mesh
    assert list(by_rank) == list(range(mesh.size))
    assert sum(by_rank.values()) == 31
    if stated.get("pins", EP) is EP and stated.get("inputs", EP_ROWS) != DP_EP:
        assert by_rank == {1: {0: 31}, 2: {0: 19, 1: 12}, 3: {0: 19, 1: 12, 2: 0}}[mesh.size]
    if stated.get("pins") is BOTH:
        assert by_rank == {0: 19, 1: 0, 2: 0, 3: 12}
    assert re.search(r"\nexperts +31 +0: 19 +2.45 +", str(load))


def test_expert_load_without_a_step_or_without_experts_is_refused() -> None:
    run = Run(dt.Mesh(ep=2))
    with pytest.raises(PlanningError, match="no step was taken.\nfix: loss = step"):
        dt.expert_load(run.step)
    model = torch.nn.Linear(2, 2)
    dense = dt.train_step(
        dt.parallelize(model, dt.Mesh(dp=1)),
        lambda model, x: model(x).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    float(dense(torch.ones(2, 2)))
    with pytest.raises(PlanningError, match="has no rows of experts"):
        dt.expert_load(dense)


# -- moves between strategies ----------------------------------------------------------------------

PATH: list[dict[str, Any]] = [
    dict(mesh=dt.Mesh(ep=2)),
    dict(mesh=dt.Mesh(ep=4)),
    dict(mesh=dt.Mesh(ep=4), inputs={}),
    *(STRATEGIES[name] for name in ("experts over two axes", "zero", "experts whole")),
]


@pytest.mark.parametrize("how", ["switch", "load"])
def test_state_moves_between_strategies(how: str, tmp_path: Path) -> None:
    """The losses go on as on one rank, with the moments of Adam."""
    data, whole = [batch(n) for n in range(len(PATH))], Run(dt.Mesh(ep=1))
    with dt.launch(whole.mesh):
        expected = [float(whole.step(*each)) for each in data]
    losses: list[float] = []
    if how == "switch":
        run = Run(**PATH[0])
        with dt.launch(run.mesh) as session:
            for stated, each in zip(PATH, data, strict=True):
                if losses:
                    given = {"pins": EP, "inputs": EP_ROWS, **stated}
                    mesh, pins = given.pop("mesh"), given.pop("pins")
                    session.switch(run.model, run.optimizer, mesh, pins, **given)
                losses.append(float(run.step(*each)))
    for n, stated in enumerate(PATH if how == "load" else []):
        run = Run(**stated)
        with dt.launch(run.mesh):
            if n:
                dt.load(tmp_path / str(n - 1), run.model, run.optimizer)
            losses.append(float(run.step(*data[n])))
            dt.save(tmp_path / str(n), run.model, run.optimizer).get()
    assert losses == pytest.approx(expected, rel=1e-5)
