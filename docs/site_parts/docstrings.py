"""Docstrings as reStructuredText, which is what autodoc reads. They are written as plain text:

    One sentence.                               paragraphs
    `name` or ``name``                          code; a public name of dtensor is a link
    a paragraph, and below it, indented by 4:   code
    Args:                                       a list of names and what they are
        name, other: what they are
    Raises:                                     a paragraph of its own

All else stands for itself: a `*` of a glob or the `_` of a name marks nothing up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sphinx.application import Sphinx

_INLINE = re.compile(r"(``.+?``|`[^`]+`)|([*_|@\\`])", re.DOTALL)
_ITEM = re.compile(r"(\*{0,2}\w[\w.]*(?:, \*{0,2}\w[\w.]*)*): +(.*)")
_HEADS = {"Args": "Parameters", "Raises": "Raises", "Returns": "Returns"}


def as_rst(lines: Sequence[str], public: frozenset[str] = frozenset()) -> list[str]:
    """``public``: names of dtensor that have an entry in the reference."""
    found: list[str] = []
    text = [line.rstrip() for line in lines]
    at = 0
    while at < len(text):
        line = text[at]
        head = _HEADS.get(line.removesuffix(":")) if line.endswith(":") else None
        if not line:
            found.append("")
            at += 1
        elif head and at + 1 < len(text) and _indent(text[at + 1]) >= 4:
            end = _end_of_indented(text, at + 1)
            found += [f":{head}:", *_section(text[at + 1 : end], public), ""]
            at = end
        elif _indent(line) >= 4:
            end = _end_of_indented(text, at)
            found += ["", ".. code-block:: none", "", *text[at:end], ""]
            at = end
        else:
            end = at + 1
            while end < len(text) and text[end] and not _begins_other(text[end]):
                end += 1
            found += _paragraph(text[at:end], public)
            at = end
    return [*found, ""]


def _begins_other(line: str) -> bool:
    return _indent(line) >= 4 or (line.endswith(":") and line.removesuffix(":") in _HEADS)


def _paragraph(lines: Sequence[str], public: frozenset[str]) -> list[str]:
    """And a list of dashes, which reStructuredText wants apart from what stands above it."""
    found: list[str] = []
    for line in _marked("\n".join(lines), public).split("\n"):
        dash = line.startswith("- ")
        if dash and found and not found[-1].startswith(("- ", "  ")):
            found.append("")
        in_list = not dash and found and found[-1].startswith(("- ", "  "))
        found.append(f"  {line.strip()}" if in_list else line.strip())
    return found


def _section(lines: Sequence[str], public: frozenset[str]) -> list[str]:
    """What stands under Args or Raises: names with what they are, or a paragraph."""
    least = min(_indent(line) for line in lines if line)
    items: list[tuple[str, list[str]]] = []
    for line in (line[least:] for line in lines):
        if item := _ITEM.fullmatch(line):
            items.append((item[1], [item[2]]))
        elif items:
            items[-1][1].append(line.strip())
        else:
            items.append(("", [line.strip()]))
    found: list[str] = []
    for names, words in items:
        indent = " " * 4
        if names:
            found.append(indent + ", ".join(f"``{name}``" for name in names.split(", ")))
            indent = " " * 8
        found += [f"{indent}{line}" for line in _marked("\n".join(words), public).split("\n")]
    return found


def _marked(text: str, public: frozenset[str]) -> str:
    """Literals and links; other signs escaped."""
    found: list[str] = []
    at = 0
    for match in _INLINE.finditer(text):
        found.append(text[at : match.start()])
        at = match.end()
        if match[2]:
            found.append(f"\\{match[2]}")
            continue
        name = match[1].strip("`")
        bare = match[1].startswith("`") and not match[1].startswith("``")
        code = f":py:obj:`{name} <dtensor.{name}>`" if bare and name in public else f"``{name}``"
        before, after = text[: match.start()], text[at:]
        found.append("\\ " if before and before[-1] not in " \n([{<-/'\":" else "")
        found.append(code)
        found.append("\\ " if after and after[0] not in " \n)]}>-/'\":.,;!?" else "")
    return "".join([*found, text[at:]])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _end_of_indented(lines: Sequence[str], start: int) -> int:
    """Behind the last line from ``start`` on that is indented as deep, blank lines in between."""
    end = start
    for number in range(start, len(lines)):
        if lines[number] and _indent(lines[number]) < 4:
            break
        if lines[number]:
            end = number + 1
    return end


def _process(
    app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    import dtensor

    if name.startswith("dtensor"):
        lines[:] = as_rst(lines, frozenset(dtensor.__all__))


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _process)
