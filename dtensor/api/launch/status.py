"""`status`: the activity of each rank of the running launch, and the rank that others wait for.

    status = dt.status()          # in a thread other than the one that waits, or between steps
    print(status)                 # a row for each rank, and the rank that hangs
    status.waited_for, status.chain, status.hangs

`python -m dtensor status` (commands/status.py) shows the launches of other processes.
"""

from __future__ import annotations

from dtensor.api.store.session import launched
from dtensor.daft.status import Status
from dtensor.errors import PlanningError, check_number


def status(seconds: float = 0.3) -> Status:
    """Return the status of each rank of the running launch, and the rank that others wait for.

    The ranks' shared state is read twice, ``seconds`` apart; no message is sent to the ranks, which
    may be stopped. A rank that moved in between does not hang; a rank that used the CPU computes.
    Any thread may call this. With ``backend="inprocess"``, a step that hangs blocks the thread that
    called it, so call this in another thread.

    The `Status` prints as a table. ``.ranks`` has a record for each rank, ``.waited_for`` is the
    rank that others wait for, ``.chain`` the chain of waiting ranks, ``.link`` the ranks of a
    message that does not arrive, and ``.hangs`` whether the wait takes too long.

    Raises PlanningError outside a launch or for invalid ``seconds``; the launch's failure if a rank
    was lost.
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
