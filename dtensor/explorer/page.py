"""Writes one plan, or several side by side, as a self-contained HTML file.

    save_pages("plans.html", {"tp4": first, "dp2tp2": second})    # returns the path
    page({"tp4": first})                                          # the text of the file

The file contains page.html, page.css, page.js, and the plans (contents.py) as JSON in an element
that is not a script. It loads nothing from a network. The same plans give the same bytes. Every "<"
in a plan's text is escaped, so no text can end its element.
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
    """Write a page about the plans, given by name, to ``path``. With several plans, the page shows
    first how they differ.

    Returns the written path. Raises PlanningError if the path ends in neither .html nor .htm, if
    its folder does not exist, or if a value is not a plan; OSError if the file cannot be written.
    """
    checked = checked_path(path)
    text = page(plans)
    checked.write_text(text, encoding="utf-8")
    return checked


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path. Raises PlanningError if no page can be written there."""
    fix = 'plan.save("plan.html")'
    check_kind("the path of a page", path, str | os.PathLike, "a path", fix)
    checked = Path(path)
    if checked.suffix.lower() not in _SUFFIXES:
        name = checked.name or "plan"
        raise PlanningError(
            f"{str(checked)!r} does not end in .html, and a plan is saved as a page.\n"
            f"fix: {str(checked.with_name(name).with_suffix('.html'))!r}"
        )
    if checked.is_dir():
        raise PlanningError(
            f"{str(checked)!r} is a folder.\nfix: {str(checked / 'plan.html')!r}, a file in it"
        )
    if not checked.parent.is_dir():
        raise PlanningError(
            f"there is no folder {str(checked.parent)!r} to save {checked.name!r} in.\n"
            f"fix: make it first, or save in a folder that is there: {checked.name!r}"
        )
    return checked


def page(plans: Mapping[str, Plan]) -> str:
    """Return the text of the HTML file. Raises PlanningError if a value is not a plan."""
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
        "style": _read_file("page.css"),
        "data": _escape(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        "script": _read_file("page.js"),
    }
    before, *pieces = _read_file("page.html").split("{{")
    text = [before]
    for piece in pieces:
        name, _, after = piece.partition("}}")
        text += [parts[name], after]
    return "".join(text)


def _escape(text: str) -> str:
    """Return JSON with escapes for HTML's special characters and Unicode line separators."""
    codes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
    return text.translate(codes)


def _read_file(name: str) -> str:
    return (files("dtensor.explorer") / name).read_text(encoding="utf-8")
