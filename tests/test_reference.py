"""The reference lists every public name; docstrings state arguments, results and exceptions;
examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import daft
from tests.pages import DOCS

_ENTRY = re.compile(
    r"^(?:\.\. (auto\w+|py:data):: dtensor\.([\w.]+)|   :members: (.+))", re.MULTILINE
)


def entries() -> Iterator[tuple[str, str]]:
    """Return (directive, name) of everything that the reference pages document, including
    members."""
    for page in sorted(DOCS.glob("reference/*.md")):
        latest = ""
        for kind, name, members in _ENTRY.findall(page.read_text()):
            if not members:
                latest = name
                yield kind, name
            yield from (("member", f"{latest}.{m}") for m in members.split(", ") if m)


def functions_of(module: Any) -> list[str]:
    """Return the functions that users call: defined in the module, without an underscore."""
    found = inspect.getmembers(module, inspect.isfunction)
    return [n for n, f in found if f.__module__ == module.__name__ and not n.startswith("_")]


ENTRIES = dict((name, kind) for kind, name in entries())
PUBLIC = {
    *(name for name in dt.__all__ if not inspect.ismodule(getattr(dt, name))),
    *(f"testing.{name}" for name in dt.testing.__all__ if name != "strategies"),
    *(f"testing.strategies.{name}" for name in functions_of(dt.testing.strategies)),
    *(f"daft.{name}" for name in daft.__all__),
    *(f"topologies.{name}" for name in functions_of(dt.topologies)),
    "placements.for_model",
}


def named(path: str) -> Any:
    found: Any = dt
    for part in path.split("."):
        if not hasattr(found, part):  # a module that nothing has loaded yet
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def test_every_public_name_is_in_reference() -> None:
    assert PUBLIC - set(ENTRIES) == set()


def test_every_reference_entry_has_docstring() -> None:
    for name, kind in ENTRIES.items():
        thing = named(name)
        if kind != "py:data":
            assert thing.__doc__ and len(thing.__doc__.split()) >= 3, name


RAISE_NOTHING = {"compare_traces", "topologies.laptop"}
"""Of their own, as do the strategies, which Hypothesis calls."""


def test_function_docstrings_name_parameters_and_exceptions() -> None:
    silent: list[str] = []
    for name, kind in ENTRIES.items():
        if kind != "autofunction":
            continue
        thing = named(name)
        said = thing.__doc__
        for parameter in inspect.signature(thing).parameters.values():
            if not re.search(rf"\b{parameter.name}\b", said):
                silent.append(f"{name}: {parameter.name}")
        quiet = name in RAISE_NOTHING or name.startswith("testing.strategies.")
        if not quiet and not re.search(r"[Rr]aise|[Ee]rror", said):
            silent.append(f"{name}: what it raises")
    assert silent == []


def test_class_docstrings_name_constructor_parameters() -> None:
    pages = "\n".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    silent: list[str] = []
    for name in re.findall(r"^\.\. autoclass:: dtensor\.([\w.]+)$", pages, re.MULTILINE):
        if name.startswith("daft."):  # instructions, whose fields the page explains
            continue
        said = named(name).__doc__
        for parameter in inspect.signature(named(name)).parameters:
            if not re.search(rf"\b{parameter}\b", said) and parameter != "unnamed":
                silent.append(f"{name}: {parameter}")
    assert silent == []


def test_no_docstring_only_refers_to_module_docstring() -> None:
    for name in ENTRIES:
        said = " ".join((named(name).__doc__ or "").split())
        assert not re.search(r"[Ss]ee the module('s)? docstring", said), name


@pytest.mark.default("Mesh")
@pytest.mark.parametrize(
    "name", [n for n in ENTRIES if ">>> " in (getattr(named(n), "__doc__", None) or "")]
)
def test_docstring_examples_give_shown_output(name: str) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(
        named(name), name, module=False, globs={"dt": dt, "torch": torch}
    )
    assert tests
    for test in tests:
        ran = doctest.DocTestRunner(verbose=False).run(test)
        assert ran.attempted and not ran.failed
