"""`plan.save("plan.html")`: imports the explorer on demand, and writes a plan as an HTML page."""

from __future__ import annotations

import os
from pathlib import Path

from dtensor.sharding.plan.plan import Plan


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write a plan as an HTML page, and return the page's path."""
    from dtensor.explorer.page import save_pages  # rarely needed

    return save_pages(path, {plan.name: plan})
