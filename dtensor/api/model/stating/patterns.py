"""Globs over the names of parameters and buffers, and the error for a glob that matches nothing.

    names = names_of(model)                    # canonical name, other names, meta, kind
    matches("blocks.{0..3}.*.weight", "blocks.2.mlp.up.weight")      # True

Globs follow fnmatch (``*`` crosses dots, ``?``, ``[0-1]``) with braces as in bash: ``{a,b}`` and
the range ``{0..11}``; other braces are literal. A full name matches only itself, even if it
contains special characters; in a glob, a literal bracket is ``[[]``. A glob matches a tied tensor
if it matches any of its names. The canonical name of a tied tensor is its first.
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
    """A parameter or buffer with all its names; ``name`` is the first, the canonical name."""

    name: str
    names: tuple[str, ...]
    kind: Literal["parameter", "buffer"]
    meta: Meta

    def matched_by(self, glob: str, names_as_is: Collection[str] = ()) -> bool:
        return any(matches(glob, name, names_as_is) for name in self.names)

    def __str__(self) -> str:
        return f"{self.name}: {self.meta}"


def names_of(module: nn.Module) -> tuple[NamedTensor, ...]:
    """Return the parameters, then the buffers, in the module's order, each with all its names."""
    tensors = named_tensors(module)
    names: dict[str, list[str]] = {}
    for name, first in first_names(module).items():
        names.setdefault(first, []).append(name)
    return tuple(
        NamedTensor(
            name=first,
            names=tuple(all_names),
            kind="parameter" if isinstance(tensors[first], nn.Parameter) else "buffer",
            meta=meta_of(tensors[first]),
        )
        for first, all_names in names.items()
    )


def is_patterns(value: object) -> bool:
    """Return whether the value is a sequence of globs; False for a single string."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(glob, str) for glob in cast(Sequence[object], value))
    )


def matches(glob: str, name: str, names_as_is: Collection[str] = ()) -> bool:
    """Return whether the glob matches the full name. A glob that is one of ``names_as_is`` matches
    only itself. Raises PlanningError for unpaired braces."""
    if glob == name or glob in names_as_is:
        return glob == name
    return any(fnmatch.fnmatchcase(name, plain) for plain in expand(glob))


@lru_cache(maxsize=4096)
def expand(glob: str) -> tuple[str, ...]:
    """Return the globs without braces that ``glob`` stands for: ("b.0", "b.1") for "b.{0..1}"."""
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
        else:  # literal braces of a name
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


def no_match_error(
    glob: str,
    argument: str,
    module: nn.Module,
    names: Sequence[NamedTensor],
    *,
    kind: Literal["parameter", "module"] = "parameter",
) -> PlanningError:
    """Return the error for a glob over parameters and buffers (``names``), or over modules, that
    matches nothing. The error has the nearest names, and a similar glob that matches."""
    of_parameters = kind == "parameter"
    paths = [p for p, _ in module.named_modules(remove_duplicate=of_parameters) if p]
    candidates = [name for named in names for name in named.names] if of_parameters else paths
    parameters = [named.name for named in names if named.kind == "parameter"]
    other_kind, other_names = ("module", paths) if of_parameters else ("parameter", parameters)
    matched_other_names = [name for name in other_names if matches(glob, name)]
    lines = [f'the pattern "{glob}" of {argument} matches no {kind}.']
    if matched_other_names:
        lines.append(f"  it matches the names of {other_kind}s: {listing(matched_other_names)}")
    near = nearest(glob, candidates)
    lines.append(
        f"  nearest names: {', '.join(near)}" if near else f"  {kind}s: {listing(candidates)}"
    )
    repaired = _repaired(glob, candidates, kind)
    if repaired is None:
        lines.append(f"fix: name a {kind} as in model.named_{kind}s(), or remove the pattern")
    elif of_parameters:
        count = sum(named.matched_by(repaired) for named in names)
        lines.append(f'fix: "{repaired}" matches {count} of {len(names)} parameters and buffers')
    else:
        count = sum(matches(repaired, path) for path in paths)
        lines.append(f'fix: "{repaired}" matches {count} of {len(paths)} modules')
    return PlanningError("\n".join(lines))


def _repaired(glob: str, names: Sequence[str], kind: Literal["parameter", "module"]) -> str | None:
    """Return a similar glob that matches a name, or None: with another start or end, an escaped
    bracket, or one misspelt word corrected."""
    stem, (first, _, after_first) = glob.rpartition(".")[0], glob.partition(".")
    weight_globs = [f"{glob}.weight", f"{glob}.*", f"*.{glob}", f"*.{glob}.weight"]
    module_globs = [stem, f"{glob}.*", f"*.{glob}", f"*{glob}*"]
    trials = [glob.replace("[", "[[]")]
    trials += weight_globs if kind == "parameter" else module_globs
    words = sorted({word for name in names for word in name.split(".")})
    parts = glob.split(".")
    for at, part in enumerate(parts):
        for word in difflib.get_close_matches(part, words, 3, 0.6 if kind == "parameter" else 0.5):
            trials.append(".".join([*parts[:at], word, *parts[at + 1 :]]))
    trials += [f"{first}.*.{after_first}"] if kind == "parameter" else []
    return next((t for t in trials if any(matches(t, name) for name in names)), None)


def nearest(word: str, words: Iterable[str]) -> list[str]:
    """Return up to three of ``words`` that are spelt like ``word``, the nearest first."""
    return difflib.get_close_matches(word, list(dict.fromkeys(words)), 3, cutoff=0.5)


def listing(words: Sequence[str]) -> str:
    """Return a text with at most eight of the words, and the number of the others."""
    shown = ", ".join(words[:_MAX_SHOWN]) or "none"
    more = len(words) - _MAX_SHOWN
    return f"{shown}, and {more} more" if more > 0 else shown
