"""Globs over the names of parameters and buffers, and what to say when one matches nothing.

    names = names_of(model)                    # canonical name, other names, meta, kind
    matches("blocks.{0..3}.*.weight", "blocks.2.mlp.up.weight")      # True

A glob is fnmatch's (``*`` crosses dots, ``?``, ``[0-1]``) with bash's braces: ``{a,b}`` and the
numeric range ``{0..11}``; other braces stand for themselves. A name matches itself alone, whatever
is in it; in a glob a bracket of a name is ``[[]``. A glob means a tensor when it matches any of the
tensor's names, so a tied parameter can be called by each of them.

Invariants: names are in the order of the module; the canonical name of a tied tensor is its first,
as in a captured graph. Placements and stages are not known here.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal, cast

from torch import nn

from dtensor.errors import PlanningError
from dtensor.frontend.graph import first_names, meta_of, named_tensors
from dtensor.sharding.ops.call import Meta

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A parameter or buffer: all its names, of which ``name``, the first, is the canonical one."""

    name: str
    names: tuple[str, ...]
    kind: Literal["parameter", "buffer"]
    meta: Meta

    def matched_by(self, glob: str, known: Collection[str] = ()) -> bool:
        return any(matches(glob, name, known) for name in self.names)

    def __str__(self) -> str:
        return f"{self.name}: {self.meta}"


def names_of(module: nn.Module) -> tuple[NamedTensor, ...]:
    """Parameters, then buffers, in the module's order; ties found by identity."""
    tensors = named_tensors(module)
    names: dict[str, list[str]] = {}
    for name, first in first_names(module).items():
        names.setdefault(first, []).append(name)
    return tuple(
        NamedTensor(
            name=first,
            names=tuple(every),
            kind="parameter" if isinstance(tensors[first], nn.Parameter) else "buffer",
            meta=meta_of(tensors[first]),
        )
        for first, every in names.items()
    )


def is_patterns(value: object) -> bool:
    """Whether it is a list of globs, and not one alone."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(glob, str) for glob in cast(Sequence[object], value))
    )


def matches(glob: str, name: str, known: Collection[str] = ()) -> bool:
    """Whether the whole of ``name`` is of the form ``glob``; PlanningError for stray braces.
    ``known``: names; a glob that is one of them is not a form but that name alone."""
    if glob == name or glob in known:
        return glob == name
    return any(fnmatch.fnmatchcase(name, plain) for plain in expand(glob))


@lru_cache(maxsize=4096)
def expand(glob: str) -> tuple[str, ...]:
    """The globs without braces that ``glob`` stands for: ``b.{0..1}`` is ``b.0`` and ``b.1``."""
    for braces in _BRACES.finditer(glob):
        inside = braces[1]
        numbers = _RANGE.fullmatch(inside)
        if numbers is not None:
            lo, hi = int(numbers[1]), int(numbers[2])
            parts = [str(i) for i in range(lo, hi + 1)]
            if not parts:
                raise PlanningError(
                    f'"{{{inside}}}" in the pattern "{glob}" states no alternatives.\n'
                    f'fix: write "{{a,b}}" for alternatives, "{{0..11}}" for an ascending range'
                )
        elif "," in inside:
            parts = [part.strip() for part in inside.split(",")]
        else:  # a name may have braces
            continue
        head, tail = glob[: braces.start()], glob[braces.end() :]
        return tuple(chain.from_iterable(expand(head + part + tail) for part in parts))
    if glob.count("{") != glob.count("}"):
        raise PlanningError(
            f'the braces of the pattern "{glob}" do not pair up.\n'
            f'fix: write "{{a,b}}" for alternatives, "{{0..11}}" for a range'
        )
    return (glob,)


# -- a glob that matches nothing -------------------------------------------------------------------


def no_match(
    glob: str,
    where: str,
    module: nn.Module,
    names: Sequence[NamedTensor],
    *,
    kind: Literal["parameter", "module"] = "parameter",
) -> PlanningError:
    """The error for a glob over parameters (``names``: with buffers), or over modules, without a
    match: the nearest names, and a glob that was tried."""
    alone = kind == "parameter"
    paths = [p for p, _ in module.named_modules(remove_duplicate=alone) if p]
    known = [name for named in names for name in named.names] if alone else paths
    others = paths if alone else [named.name for named in names if named.kind == "parameter"]
    also = [name for name in others if matches(glob, name)]
    lines = [f'the pattern "{glob}" of {where} matches no {kind}.']
    if also:
        lines.append(
            f"  it matches the names of {'module' if alone else 'parameter'}s: {listing(also)}"
        )
    near = nearest(glob, known)
    lines.append(f"  nearest names: {', '.join(near)}" if near else f"  {kind}s: {listing(known)}")
    tried = _repaired(glob, known, kind)
    if tried is None:
        lines.append(f"fix: name a {kind} as in model.named_{kind}s(), or remove the pattern")
    elif alone:
        count = sum(named.matched_by(tried) for named in names)
        lines.append(f'fix: "{tried}" matches {count} of {len(names)} parameters and buffers')
    else:
        count = sum(matches(tried, path) for path in paths)
        lines.append(f'fix: "{tried}" matches {count} of {len(paths)} modules')
    return PlanningError("\n".join(lines))


def _repaired(glob: str, names: Sequence[str], kind: Literal["parameter", "module"]) -> str | None:
    """A glob near this one that matches something: an ending, a start, or one word put right."""
    stem, (first, _, rest) = glob.rpartition(".")[0], glob.partition(".")
    of_weights = [f"{glob}.weight", f"{glob}.*", f"*.{glob}", f"*.{glob}.weight"]
    of_modules = [stem, f"{glob}.*", f"*.{glob}", f"*{glob}*"]
    trials = [glob.replace("[", "[[]")]
    trials += of_weights if kind == "parameter" else of_modules
    words = sorted({word for name in names for word in name.split(".")})
    parts = glob.split(".")
    for at, part in enumerate(parts):
        for word in difflib.get_close_matches(part, words, 3, 0.6 if kind == "parameter" else 0.5):
            trials.append(".".join([*parts[:at], word, *parts[at + 1 :]]))
    trials += [f"{first}.*.{rest}"] if kind == "parameter" else []
    return next((t for t in trials if any(matches(t, name) for name in names)), None)


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Up to three of ``known`` that are spelt like ``word``, the nearest first."""
    return difflib.get_close_matches(word, list(dict.fromkeys(known)), 3, cutoff=0.5)


def listing(words: Sequence[str]) -> str:
    """At most eight of the words, and how many more there are."""
    shown = ", ".join(words[:_MAX_SHOWN]) or "none"
    more = len(words) - _MAX_SHOWN
    return f"{shown}, and {more} more" if more > 0 else shown
