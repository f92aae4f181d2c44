"""`step.profile`: its parts add up to the step's time and name the kernels, and profiled steps give
the results of normal steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.api.launch import profiling
from dtensor.api.launch.profiling import NUM_WARM
from dtensor.api.step.loaded_program import programs_of
from dtensor.api.store.session import session_for
from dtensor.daft import Call, Collective, Program, Recv, Send, TaskError, Wait
from dtensor.daft.run.timestamps import LINES, TIMES
from dtensor.daft.verification.verifier import verify
from dtensor.runtime.profile import LAYERS, Profile, RankProfile, Spent
from dtensor.runtime.simulate.breakdown import Floors, Measured, TimedStep, profile_of
from dtensor.runtime.simulate.simulator import simulate
from tests.api.test_bad_data import RAISES
from tests.api.test_bad_data import Net as BadNet
from tests.api.test_bad_data import loss_fn as bad_loss
from tests.models import MLP, square_loss
from tests.training import Run, batches

GOLDEN = Path(__file__).parent.parent / "golden" / "profile.txt"
PINS = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}


def mlp_step(mesh: dt.Mesh, pins: Mapping = PINS) -> dt.TrainStep:
    torch.manual_seed(0)
    model = dt.parallelize(MLP(), mesh, pins)
    return dt.train_step(model, square_loss, torch.optim.AdamW(model.parameters()))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def check_sums(profile: Profile, size: int) -> None:
    assert [own.rank for own in profile.ranks] == list(range(size))
    for own in profile.ranks:
        parts = (own.kernels, own.waiting, own.overhead)
        total = sum(spent.seconds for part in parts for spent in part.values())
        total += own.other_ranks.seconds + own.idle.seconds
        assert own.seconds == pytest.approx(total)
        assert own.seconds + profile.remainder(own.rank) == pytest.approx(profile.seconds)
        assert list(own.overhead) == list(LAYERS)
        assert all(spent.seconds >= 0 for part in parts for spent in part.values())


# -- of a made-up measurement ----------------------------------------------------------------------

FLOORS = Floors(stamp=0.1e-6, instruction=0.4e-6, quick=1.1e-6, overload=3.1e-6)
NONE = Floors(stamp=0.0, instruction=0.0, quick=0.0, overload=0.0)
LINE, WAIT, START, REST, GAP = 10e-6, 50e-6, 20e-6, 1e-6, 1.4e-6


def made_up(program: Program, rank: int) -> dict[str, object]:
    """Return synthetic times of one rank: 10 us for each line, 50 for a wait, 20 for a start, 1 for
    others, and 1.4 between lines."""
    functions, now = dict(program.functions), 100.0 * rank  # clocks of hosts need not agree
    times: list[float] = []
    lines: list[float] = []
    for index, item in enumerate(program.ranks[rank].instructions):
        now += GAP
        begin = now
        match item:
            case Call():
                body = functions[item.fn].statements
                lines.extend(begin + number * LINE for number in range(len(body) + 1))
                now += LINE * len(body)
            case Wait():
                now += WAIT
            case Send() | Recv() | Collective():
                now += START
            case _:
                now += REST
        times += [index, begin, now]
    numbers = {TIMES: times, LINES: lines}
    return {name: torch.tensor(found, dtype=torch.float64) for name, found in numbers.items()}


def made_up_profile() -> tuple[Program, Profile]:
    mesh = dt.Mesh(tp=2)
    step = mlp_step(mesh)
    with dt.launch(mesh):
        float(step(*data()))
        planned = step.plans.latest
        assert planned is not None
        [loaded] = programs_of(session_for(mesh))
        program = loaded.handle.program
    outputs = [made_up(program, rank) for rank in range(2)]
    timed = [TimedStep(controller=100e-6, run=each, outputs=outputs) for each in (1.2e-3, 1.3e-3)]
    measured = Measured(
        program=program,
        lists=verify(program).lists,
        ranks=(0, 1),
        floors=(FLOORS, FLOORS),
        steps=timed,
        plain=(1.36e-3, 1.34e-3),
    )
    return program, profile_of(measured, planned.plan, simulate(planned.plan, planned.grid))


def test_synthetic_measurement_is_divided_into_expected_parts() -> None:
    program, profile = made_up_profile()
    check_sums(profile, 2)
    assert profile.seconds == pytest.approx(1.35e-3)
    assert profile.instrumentation == pytest.approx(0.0)
    functions = dict(program.functions)
    own, instructions = profile.ranks[0], program.ranks[0].instructions
    num_mm = sum(
        line.called == "aten_mm_default"
        for item in instructions
        if isinstance(item, Call)
        for line in functions[item.fn].statements
    )
    assert num_mm == own.kernels["mm"].times == 5
    # a line less its stamp, less what a call of one element takes
    assert own.kernels["mm"].seconds == pytest.approx(5 * (10e-6 - 0.1e-6 - 1.0e-6))
    num_waits = sum(isinstance(item, Wait) for item in instructions)
    assert own.waiting[1,].times == num_waits > 0
    assert own.waiting[1,].seconds == pytest.approx(num_waits * WAIT)
    num_starts = sum(isinstance(item, Collective) for item in instructions)
    assert own.overhead["starts"].seconds == pytest.approx(num_starts * START)
    num_other = sum(not isinstance(i, Call | Wait | Collective) for i in instructions)
    gaps = (len(instructions) - 1) * (GAP - FLOORS.instruction)
    assert own.overhead["engine"].seconds == pytest.approx(gaps + num_other * REST, abs=1e-9)
    assert own.other_ranks.seconds == 0.0
    assert own.idle.seconds == pytest.approx(0.0, abs=1e-9)


def written_down() -> Profile:
    """Return a synthetic profile of two ranks, the second sharing its process, with more ops than
    the table shows."""

    def spent(us: float, predicted: float | None = None, times: int = 0) -> Spent:
        known = None if predicted is None else predicted * 1e-6
        return Spent(seconds=us * 1e-6, predicted=known, times=times)

    ops = {f"op{n}": spent(200.0 - 10 * n, 100.0, n + 1) for n in range(14)}
    layers = dict.fromkeys(LAYERS, spent(40.0)) | {"channel": spent(1500.0, 1000.0)}
    first = RankProfile(
        rank=0,
        kernels=ops,
        waiting={(1,): spent(750.0, 500.0, 4), (1, 2, 3): spent(3.5, 0.0, 1)},
        overhead=layers,
        other_ranks=spent(0.0),
        idle=spent(0.0, 12.5),
    )
    second = replace(first, rank=1, kernels={"mm": spent(0.02)}, waiting={}, other_ranks=spent(99))
    return Profile(
        name="loss_fn",
        seconds=4.5e-3,
        predicted=3.25e-3,
        hardware="a laptop",
        instrumentation=-3e-6,
        num_steps=20,
        ranks=(first, second),
    )


def test_profile_table_equals_golden_file() -> None:
    assert str(written_down()) + "\n" == GOLDEN.read_text()


def test_profile_table_shows_at_most_8_ranks() -> None:
    profile = written_down()
    many = replace(profile, ranks=tuple(replace(profile.ranks[0], rank=r) for r in range(10)))
    text = str(many).splitlines()
    assert sum(line.startswith("rank ") for line in text) == 8
    assert text[-1] == "and 2 ranks more: profile.ranks"


# -- of real steps ---------------------------------------------------------------------------------


@pytest.mark.default("single")
@pytest.mark.parametrize("name", ["single", "tp2", "pp2"])
def test_profile_parts_add_up_in_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(name)
    with dt.launch(run.mesh):
        profile = run.step.profile(3, *batches(1)[0])
        check_sums(profile, run.mesh.size)
        planned = run.step.plans.latest
        with monkeypatch.context() as patch:  # of a small op all may be dispatch
            patch.setattr(profiling, "measure_floors", lambda cluster: (NONE,) * cluster.size)
            undispatched = run.step.profile(1, *batches(1)[0]).ranks[0]
    assert planned is not None and profile.num_steps == 3
    own = profile.ranks[0]
    for op in ("mm", "update", "dt.attention", "native_layer_norm"):
        assert own.kernels[op].times > 0 and own.kernels[op].predicted
        assert undispatched.kernels[op].seconds > 0
    assert own.kernels["update"].times == 1
    assert (own.other_ranks.seconds > 0) == (run.mesh.size > 1)
    assert own.idle.seconds == 0.0  # ranks of a process take turns
    if name == "pp2":
        assert list(own.waiting) == [(1,)]
        assert own.waiting[1,].predicted and own.waiting[1,].times > 0
    text = str(profile)
    assert f"rank {run.mesh.size - 1}" in text and "dispatch" in text


def test_profiled_steps_are_counted_and_bitwise_equal_to_normal_steps() -> None:
    mesh = dt.Mesh(tp=2)
    timed, plain = mlp_step(mesh), mlp_step(mesh)
    count = 2 * (NUM_WARM + 2)
    with dt.launch(mesh):
        timed.profile(2, *data())
        after = float(timed(*data()))
        for _ in range(count):
            plain(*data())
        assert after == float(plain(*data()))
        assert timed.model.steps.present() == count + 1


def test_profile_of_compiled_function_names_its_kernels() -> None:
    mesh = dt.Mesh(tp=2)
    f = dt.compile(lambda x, w: (x @ w).relu(), mesh)
    with dt.launch(mesh):
        x = dt.distribute(torch.randn(4, 8), mesh, tp=dt.Column())
        w = dt.distribute(torch.randn(8, 4), mesh, tp=dt.Row())
        profile = f.profile(2, x, w)
    check_sums(profile, 2)
    assert {"mm", "relu"} <= profile.ranks[1].kernels.keys()
    assert repr(profile).startswith("<profile lambda: ")


def test_profile_works_outside_launch() -> None:
    check_sums(mlp_step(dt.Mesh(tp=2)).profile(1, *data()), 2)


def test_profile_of_function_on_part_of_ranks() -> None:
    whole, half = dt.Mesh(pp=2, tp=2), dt.Mesh(tp=2)
    f = dt.compile(lambda x: x.relu().sum(), half)
    with dt.launch(whole):
        x = dt.transfer(dt.distribute(torch.randn(4, 8), whole), half, (2, 3))
        check_sums(f.profile(2, x), 2)


def test_profile_has_rows_for_checks_and_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "measure_floors", lambda cluster: (NONE,) * cluster.size)
    mesh = dt.Mesh()
    model = dt.parallelize(MLP(), mesh, {})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, square_loss, opt, detect_nan=True, clip_grad_norm=1.0)
    kernels = step.profile(1, *data()).ranks[0].kernels
    assert kernels["checks"].seconds > 0 and kernels["norm"].seconds > 0


@pytest.mark.parametrize("backend", ["inprocess", pytest.param("ray", marks=pytest.mark.ray)])
def test_profile_of_failing_step_raises_and_next_step_runs(backend: dt.daft.Backend) -> None:
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(BadNet(own_op=True), mesh, {})
    step = dt.train_step(model, bad_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    targets = torch.tensor([0, 1, 2, 3])
    good, bad = (torch.randn(4, 8), targets), (torch.full((4, 8), RAISES), targets)
    with dt.launch(mesh, backend=backend):
        first = float(step(*good))
        with pytest.raises(TaskError, match="picky does not like this") as raised:
            step.profile(3, *bad)
        assert "test_bad_data.py" in str(raised.value)
        assert float(step(*good)) < first  # it was raised, and the next one runs
        check_sums(step.profile(1, *good), 2)


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "3", None])
def test_profile_rejects_invalid_number_of_steps(n: object) -> None:
    step = mlp_step(dt.Mesh(tp=2))
    with pytest.raises(dt.PlanningError, match=r"fix: step.profile\(10, \*batch\)"):
        step.profile(n, *data())  # type: ignore[arg-type]
    with pytest.raises(dt.PlanningError, match="of type Tensor|not a whole number"):
        step.profile(*data())  # type: ignore[arg-type]
    assert step.model.steps.present() == 0


@pytest.mark.ray
@pytest.mark.slow
def test_profile_on_ray_includes_channel_and_waiting_time() -> None:
    run = Run.of("tp2_pp2")
    with dt.launch(run.mesh, backend="ray"):
        profile = run.step.profile(3, *batches(1)[0])
        single = run.step.profile(1, *batches(1)[0])
    check_sums(profile, 4)
    for own in profile.ranks:
        assert own.other_ranks.seconds == 0.0
        assert own.overhead["channel"].seconds > 0
        assert sum(spent.seconds for spent in own.waiting.values()) > 0
    # of a single step: which rank takes longest may differ between the steps of a median
    assert min(own.idle.seconds for own in single.ranks) == 0.0


def test_profile_without_batch_uses_last_batch_while_it_exists() -> None:
    run = Run.of("tp2")
    with dt.launch(run.mesh):
        batch = batches(1)[0]
        float(run.step(*batch))
        assert run.step.profile(1).num_steps == 1
        del batch
        float(run.step(*batches(1)[0]))
        with pytest.raises(
            dt.PlanningError, match=r"is gone(.|\n)*fix: step.profile\(1, \*batch\)"
        ):
            run.step.profile(1)
