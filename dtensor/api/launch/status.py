"""`status`: what the ranks of the running launch do, and for which one the others wait.

    status = dt.status()          # in another thread than the one that waits, or between steps
    print(status)                 # a row for each rank, and who hangs
    status.waited_for, status.chain, status.hangs

Not here: how it is found out (`daft/diagnosis/`), the warning of a step that takes too long
(`daft/ray/diagnosis/failure_detector.py`), and other processes' launches (`commands/status.py`).
"""

from __future__ import annotations

from dtensor.api.store.session import launched
from dtensor.daft.status import Status
from dtensor.errors import PlanningError, check_number


def status(seconds: float = 0.3) -> Status:
    """What each rank of the running launch does, and the one rank that others wait for.

    Nothing is asked of the ranks, which may be stopped. They are looked at twice, ``seconds``
    apart, which is how long this takes: who has moved meanwhile does not hang, and who has used the
    CPU computes. Any thread may call it; with ``backend="inprocess"`` a step that hangs does so in
    the thread that has called it, and another one has to ask.

    Returns a `Status`: ``.ranks`` has a record for each rank, ``.waited_for`` is the rank that
    others wait for, ``.chain`` who waits for whom, ``.link`` the ranks of a message that is held
    back, ``.hangs`` whether it takes too long. It prints as a table.

    Raises PlanningError outside of a launch, and for seconds that are none; where a rank was lost,
    and with it the launch, the error that says so.
    """
    check_number("seconds", seconds, above=0, fix="dt.status(seconds=0.3)")
    session = launched()
    if session is None:
        raise PlanningError(
            "no launch is running in this process.\n"
            "fix: dt.status() within `with dt.launch(...)`; for launches of other processes, "
            "`python -m dtensor status` in a terminal"
        )
    return session.launch.cluster.status(seconds)
