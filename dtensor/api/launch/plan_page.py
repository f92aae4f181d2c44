"""What `plan.save` calls: a page of the plan, by the explorer, which is loaded when asked for.

    plan.save("plan.html")

Not here: the page (explorer/page.py); who asks (sharding/plan/plan.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from dtensor.sharding.plan.plan import Plan


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write the plan as a page; where it was written."""
    from dtensor.explorer.page import save_pages  # seldom asked for

    return save_pages(path, {plan.name: plan})
