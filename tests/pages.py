"""Run Markdown pages: the Python blocks of a page are one program that must print what is shown.

    ```python     run; must print the ```text block below. `# train.py` on line 1: a file to write
    ```sh         run by bash; printed text is compared if ```text follows
    ```console    lines `$ command` with their output; `...` stands for any text

    python -m tests.pages docs/sync.md README.md     # writes the current output: review the diff

A block is not run if its first line, or an HTML comment above it, says ``not run here:`` with a
reason. A failing command fails the page, unless `$ echo $?` follows in ```console. Commands run in
a temporary folder with the contents of the checkout. `start.py:12` is line 12 of the Python
program.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dtensor as dt

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RUN = ("python", "sh", "console")
SHOWN = ("text", "", "json", "yaml", "toml", "ini", "{toctree}", "{eval-rst}")
"""Kinds of blocks; one of any other kind is refused. Without a kind: what differs by machine."""
_FENCE = re.compile(r"^(```+)([^\n`]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"(?:#|<!--) not run here: (.+)")
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True, slots=True)
class Block:
    """``not_run``: the reason, or None. ``file``: the name of the file that a Python block
    contains."""

    kind: str
    text: str
    line: int
    not_run: str | None = None
    file: str | None = None


def blocks_of(text: str) -> list[Block]:
    """Return the blocks in the order of the page."""
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        kind = match[2].split(" ")[0]
        above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        why = _NOT_RUN.match(above) if above.startswith("<!--") else None
        why = why or _NOT_RUN.match(match[3])
        file = _FILE.match(match[3]) if kind == "python" else None
        line = text.count("\n", 0, match.start()) + 2
        reason = why[1].removesuffix("-->").strip() if why and kind in RUN else None
        found.append(Block(kind, match[3], line, reason, file[1] if file else None))
    return found


def pages() -> dict[str, str]:
    """Return the text of all pages, by path in the repository."""
    files = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    there = (f for f in files if "_build" not in f.parts)
    return {f.relative_to(ROOT).as_posix(): f.read_text() for f in sorted(there)}


def run_page(
    name: str, text: str, folder: Path, differ: dict[int, str] | None = None
) -> dict[str, Any]:
    """Run a page's blocks. ``name``: of its program; ``folder``: an empty one, where it runs;
    ``differ``: if given, is filled with the actual output by line of a ```text block. Returns the
    names that the Python blocks define. Raises AssertionError if a block prints other text than the
    page shows."""
    names: dict[str, Any] = {"__name__": f"docs_{name}"}
    printed, must_be_shown = "", False
    program = ""
    dt.manual_seed(0)  # as where nothing has run before it
    for entry in (e for e in ROOT.iterdir() if not e.name.startswith(".")):
        (folder / entry.name).symlink_to(entry)
    with contextlib.chdir(folder), dt.implicit_redistribution("warn"):  # what it sets ends here
        for block in blocks_of(text):
            if block.kind == "text":
                if differ is not None and printed != block.text:
                    differ[block.line] = printed
                else:
                    assert printed == block.text, f"line {block.line} of {name}"
                printed, must_be_shown = "", False
                continue
            if block.kind not in RUN or block.not_run:
                continue
            assert not must_be_shown, f"what is printed stands below it: line {block.line}"
            if block.file:
                Path(block.file).write_text(block.text)
            elif block.kind == "python":
                program += "\n" if program else ""
                lines = program.count("\n")
                program += block.text
                file = f"{name}.py"
                linecache.cache[file] = (len(program), None, program.splitlines(True), file)
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    # dont_inherit: as a file of its own, without this one's `from __future__`
                    code = compile("\n" * lines + block.text, file, "exec", dont_inherit=True)
                    exec(code, names)
                printed, must_be_shown = out.getvalue(), bool(out.getvalue())
            elif block.kind == "sh":
                printed, codes = _bash([f"set -e\n{block.text}"])
                assert codes == [0], printed
            else:
                _console(block)
                printed = ""
    assert not must_be_shown
    return names


def _console(block: Block) -> None:
    commands: list[str] = []
    shown: list[str] = []
    for line in block.text.splitlines(keepends=True):
        if line.startswith("$ "):
            commands.append(line[2:])
            shown.append("")
        elif line.startswith("> ") and not shown[-1]:  # a command of several lines
            commands[-1] += line[2:]
        else:
            shown[-1] += line
    printed, codes = _bash(commands)
    for number, (command, wanted) in enumerate(zip(commands, shown)):
        found = printed.split("\0")[2 * number]
        pattern = ".*".join(re.escape(part) for part in wanted.split("..."))
        assert re.fullmatch(pattern, found, re.DOTALL), f"$ {command}{found}"
        after = commands[number + 1] if number + 1 < len(commands) else ""
        assert codes[number] == 0 or after.strip() == "echo $?", f"$ {command}{found}"


def _bash(commands: list[str]) -> tuple[str, list[int]]:
    """Return the output of the commands, with the exit code between NULs after each, and these
    codes."""
    if len(commands) == 1:
        script = commands[0]
    else:
        script = "\n".join(f"{c}code=$?; printf '\\0%d\\0' $code; (exit $code)" for c in commands)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ran = subprocess.run(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        timeout=900,
    )
    if len(commands) == 1:
        return ran.stdout, [ran.returncode]
    codes = [int(code) for code in ran.stdout.split("\0")[1::2]]
    assert len(codes) == len(commands), ran.stdout
    return ran.stdout, codes


def starts_ray(text: str) -> bool:
    """Whether the page's Python or its commands start Ray."""
    code = "\n".join(b.text for b in blocks_of(text) if b.kind in RUN and not b.not_run)
    said = re.sub(r"^(?!\$)(.*?)#.*$", r"\1", code, flags=re.MULTILINE)  # comments do not
    return bool(re.search(r"backend=\"ray\"|launch\(\"ray\"\)|--backend ray", said))


def written_anew(name: str) -> None:
    """Write the current output of the page's blocks into the page, and the pictures that it
    draws."""
    text, differ = (ROOT / name).read_text(), dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        run_page(Path(name).stem, text, Path(folder), differ)
        for drawn in Path(folder).glob("*.svg"):
            (DOCS / "pictures" / drawn.name).write_text(drawn.read_text())
    lines = text.splitlines(keepends=True)
    for block in reversed(blocks_of(text)):
        if block.kind == "text" and block.line in differ:
            end = block.line - 1 + block.text.count("\n")
            lines[block.line - 1 : end] = differ[block.line]
    (ROOT / name).write_text("".join(lines))


def languages(text: str) -> Iterator[str]:
    """Return the languages of all fences, including those within lists."""
    inside = ""
    for line in text.splitlines():
        fence = re.match(r"\s*(```+|~~~+)(.*)", line)
        if not inside and fence:
            inside = fence[1]
            yield ("" if line.startswith("```") else "indented ") + fence[2].strip().split(" ")[0]
        elif fence and fence[1] == inside and not fence[2].strip():
            inside = ""


if __name__ == "__main__":
    for page in sys.argv[1:]:
        written_anew(page)
