"""docs/commands.md shows what its commands print.

The commands run in this process, because importing torch and transformers for each would take most
of a minute.

    python -m tests.commands.test_page       # updates the page: review the diff
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from dtensor.__main__ import main
from tests.pages import DOCS, ROOT, blocks_of

PAGE = DOCS / "commands.md"
DIFFERS = re.compile(r"(?<=loss \d\d\.\d)\d*|\d+(\.\d+)? (ms|s|us)\b")
"""Of the machine, in what `run` prints: it stands as `...` on the page."""
LINES = re.compile(r"\b(modeling_gpt2|activations|pytorch_utils)\.py:\d+")
"""Of transformers' files: each of its versions has others."""


def shown(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of the page with the output below it."""
    for block in blocks_of(text):
        if block.kind == "console":
            for part in block.text.split("$ ")[1:]:
                command, _, printed = part.partition("\n")
                yield command, printed


def terminal() -> Callable[[str], str]:
    """Return a function that runs commands as a shell would: `| tail -3`, `> file`, `echo $?`."""
    last = 0

    def run(line: str) -> str:
        nonlocal last
        if line == "echo $?":
            return f"{last}\n"
        line, _, tail = line.partition(" | tail -")
        line, _, file = line.partition(" > ")
        program, *words = shlex.split(line)
        assert program == "dtensor"
        out, err = io.StringIO(), io.StringIO()
        to_out = out if file else err  # a terminal shows both as they come
        with (
            mock.patch.object(sys, "argv", ["dtensor"]),
            contextlib.redirect_stdout(to_out),
            contextlib.redirect_stderr(err),
        ):
            try:
                last = main(words)
            except SystemExit as ended:
                assert isinstance(ended.code, int)
                last = ended.code
        if file:
            Path(file).write_text(out.getvalue())
        lines = err.getvalue().splitlines(keepends=True)
        return "".join(lines[-int(tail) :] if tail else lines)

    return run


def files_of_page(text: str) -> None:
    for block in blocks_of(text):
        if block.file:
            Path(block.file).write_text(block.text)


@pytest.mark.slow
def test_commands_print_what_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = PAGE.read_text()
    files_of_page(text)
    run = terminal()
    for command, wanted in shown(text):
        found, wanted = (LINES.sub(r"\1.py", printed) for printed in (run(command), wanted))
        pattern = "[^\n]*".join(re.escape(part) for part in wanted.split("..."))
        assert re.fullmatch(pattern, found), f"$ {command}\n{found}"


def test_commands_page_has_every_command() -> None:
    from dtensor.__main__ import COMMANDS

    text = PAGE.read_text()
    names = [command.__name__.rpartition(".")[2] for command in COMMANDS]
    assert sorted(re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE)) == sorted(names)
    assert all(f"\n## {name}\n" in text for name in names)


def written() -> str:
    """Return the page with the current output of its commands."""
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        files_of_page(text)
        run = terminal()
        parts: list[str] = []
        for part in re.split(r"(?<=```console\n)(.*?)(?=^```$)", text, flags=re.M | re.S):
            if not part.startswith("$ "):
                parts.append(part)
                continue
            for command in re.findall(r"^\$ (.*)$", part, re.MULTILINE):
                printed = run(command)
                if command.startswith("dtensor run"):
                    printed = DIFFERS.sub("...", printed)
                parts.append(f"$ {command}\n{printed}")
        return "".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(written())
