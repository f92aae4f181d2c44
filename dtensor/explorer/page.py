"""A plan, or several side by side, as one HTML file that opens from disk: `plan.save("plan.html")`.

    save_pages("plans.html", {"tp4": first, "dp2tp2": second})    # gives the path
    page({"tp4": first})                                          # the text of the file

The file holds page.html, page.css and page.js as they lie beside this one, and the plans as JSON in
an element that no script runs from. It loads nothing, from no network.

Invariants: the same plans give the same bytes; no text of a plan can end the element that it stands
in, as every "<" of it is written as an escape. Not here: what is shown (contents.py), how it looks
(page.css), what it does (page.js).
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from dtensor.errors import PlanningError, check_kind, shown
from dtensor.explorer.contents import contents, title_of
from dtensor.sharding.plan.plan import Plan

_SUFFIXES = (".html", ".htm")


def save_pages(path: str | os.PathLike[str], plans: Mapping[str, Plan]) -> Path:
    """Write a page of the plans to ``path``, by name; of several, how they differ is shown first.

    Returns where it was written. PlanningError for a path that ends in neither .html nor .htm, one
    in a folder that is not there, and what is no plan; OSError where it cannot be written.
    """
    where = checked_path(path)
    text = page(plans)
    where.write_text(text, encoding="utf-8")
    return where


def checked_path(path: str | os.PathLike[str]) -> Path:
    """PlanningError for where no page can be written."""
    fix = 'plan.save("plan.html")'
    check_kind("the path of a page", path, str | os.PathLike, "a path", fix)
    where = Path(path)
    if where.suffix.lower() not in _SUFFIXES:
        name = where.name or "plan"
        raise PlanningError(
            f"{str(where)!r} does not end in .html, and a plan is saved as a page.\n"
            f"fix: {str(where.with_name(name).with_suffix('.html'))!r}"
        )
    if where.is_dir():
        raise PlanningError(
            f"{str(where)!r} is a folder.\nfix: {str(where / 'plan.html')!r}, a file in it"
        )
    if not where.parent.is_dir():
        raise PlanningError(
            f"there is no folder {str(where.parent)!r} to save {where.name!r} in.\n"
            f"fix: make it first, or save in a folder that is there: {where.name!r}"
        )
    return where


def page(plans: Mapping[str, Plan]) -> str:
    """The text of the file."""
    fix = 'save_pages("plans.html", {"tp4": plan, "dp2tp2": other})'
    check_kind("the first argument of save_pages", plans, Mapping, "a dict of name to plan", fix)
    if not plans:
        raise PlanningError(f"there is no plan to save.\nfix: {fix}")
    for name, plan in plans.items():
        check_kind("the name of a plan", name, str, "a string", fix)
        if not isinstance(plan, Plan):
            raise PlanningError(f"{name!r} is {shown(plan)}, not a plan.\nfix: {fix}")
    data = {"plans": [{"label": name, **contents(plan)} for name, plan in plans.items()]}
    first = next(iter(plans.values()))
    title = " and ".join(plans) if len(plans) > 1 else f"plan of {title_of(first)} on {first.mesh}"
    parts = {
        "title": html.escape(title),
        "style": _file("page.css"),
        "data": _escaped(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        "script": _file("page.js"),
    }
    before, *rest = _file("page.html").split("{{")
    text = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        text += [parts[name], after]
    return "".join(text)


def _escaped(text: str) -> str:
    """JSON in which nothing opens or closes an element, and no line ends inside a string."""
    codes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
    return text.translate(codes)


def _file(name: str) -> str:
    return (files("dtensor.explorer") / name).read_text(encoding="utf-8")
