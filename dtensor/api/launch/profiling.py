"""`step.profile(n, *batch)`: a `Profile` of n steps with timestamps, and n without.

    with launch(mesh, backend="ray"):
        print(step.profile(20, tokens, targets))

Each step is waited for before the next one is called, so that the controller's time is not hidden
by running ahead. Steps with and without timestamps alternate, after `NUM_WARM` of each. Those
without give the duration of a step; those with timestamps give its parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from numbers import Integral

from dtensor.api.step.plan_cache import PlanCache
from dtensor.api.store.session import MeshSession, TimedRun
from dtensor.daft import DaftError
from dtensor.errors import check_kind, check_number
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.runtime.profile import Profile
from dtensor.runtime.simulate.breakdown import (
    Measured,
    TimedStep,
    measure_floors,
    profile_of,
)
from dtensor.runtime.simulate.simulator import simulate

NUM_WARM = 2


def profiled(
    n: int,
    session: MeshSession,
    step: Callable[[], object],
    read: Callable[[object], None],
    plans: PlanCache,
) -> Profile:
    """Time ``n`` steps, and return their profile. Calls of other threads wait meanwhile. Raises
    PlanningError for an invalid ``n``, and the errors of a step.

    Args:
        step: calls the step, and returns its result.
        read: waits for such a result, and raises its failure.
        plans: the cache of the step's plans.
    """
    fix = "step.profile(10, *batch): how many steps to time, then the batch"
    check_kind("n of profile", n, Integral, "a whole number", fix)
    check_number("n", n, least=1, whole=True, fix=fix)
    with CALL_LOCK:
        return _profile_locked(n, session, step, read, plans)


def _profile_locked(
    n: int,
    session: MeshSession,
    step: Callable[[], object],
    read: Callable[[object], None],
    plans: PlanCache,
) -> Profile:
    """Time ``n`` steps of each kind, alternating, and return their profile."""
    for _ in range(NUM_WARM):
        _time_with_timestamps(session, step, read)
        _time_without_timestamps(session, step, read)
    floors = measure_floors(session.cluster)
    steps: list[TimedStep] = []
    plain: list[float] = []
    for _ in range(n):
        recorded, timed = _time_with_timestamps(session, step, read)
        steps.append(timed)
        plain.append(_time_without_timestamps(session, step, read))
    planned = plans.latest
    assert planned is not None, "a run has a plan"
    measured = Measured(
        program=recorded.handle.program,
        lists=recorded.handle.report.lists,
        ranks=session.ranks,
        floors=floors,
        steps=steps,
        plain=plain,
    )
    return profile_of(measured, planned.plan, simulate(planned.plan, planned.grid))


def _time_without_timestamps(
    session: MeshSession, step: Callable[[], object], read: Callable[[object], None]
) -> float:
    """Return the seconds of a step without timestamps, except its wait for earlier calls."""
    begin = time.monotonic()
    with session.recording_run("compiled"):
        result = step()
    recorded, _ = _results_of_recorded_run(session, result, read)
    read(result)
    return time.monotonic() - begin - recorded.settling


def _time_with_timestamps(
    session: MeshSession, step: Callable[[], object], read: Callable[[object], None]
) -> tuple[TimedRun, TimedStep]:
    """Run a step with timestamps. Return the recorded run, and the times of the step."""
    begin = time.monotonic()
    with session.recording_run("timed"):
        result = step()
    recorded, outputs = _results_of_recorded_run(session, result, read)
    results_arrived = recorded.returned if session.cluster.immediate else time.monotonic()
    read(result)
    seconds = time.monotonic() - begin - recorded.settling
    run = results_arrived - recorded.called
    return recorded, TimedStep(controller=seconds - run, run=run, outputs=outputs)


def _results_of_recorded_run(
    session: MeshSession, result: object, read: Callable[[object], None]
) -> tuple[TimedRun, list[dict[str, object]]]:
    """Wait for the recorded run. Return it, and the outputs of each rank. Raises its failure."""
    recorded, session.recorded_run = session.recorded_run, None
    assert recorded is not None, "a step is a run"
    try:
        return recorded, recorded.future.get()
    except DaftError as error:
        read(result)
        raise session.with_loss_note(error) from error.__cause__
