"""The parser of the command line: errors in one sentence, with the nearest right word.

    $ dtensor plan gpt2 --mehs tp=2
    dtensor plan: --mehs is no option.
    fix: --mesh (dtensor plan --help has all)

argparse says the whole usage first, which is a screen of options; here `--help` has that.
Invariant: what is no command or option ends with exit status 2.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dtensor.api.model.stating.patterns import nearest

_MISSING = {
    "MODEL": "gpt2, a config.json, or module.py:function",
    "--mesh": "--mesh tp=2,pp=2",
    "--ranks": "--ranks 8",
}
"""What is said where an argument that a command needs is not there."""
_WRITES = ("--save", "--out", "--file", "--html")
"""What people call the option -o."""


class CommandParser(argparse.ArgumentParser):
    """Of the whole command line, and of each command."""

    _words: Sequence[str] = ()  # as they were given

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {self._plain(message)}\n")

    def _plain(self, message: str) -> str:
        if match := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message):
            return self.unknown("command", match[1], self._commands())
        if match := re.match(r"unrecognized arguments: (.*)", message):
            return self.unknown_arguments(match[1].split())
        if match := re.match(
            r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message
        ):
            known = re.findall(r"'(.*?)'", match[3])
            near = nearest(match[2], known)
            return f"{match[1]} {match[2]} is none.\nfix: {near[0] if near else ', '.join(known)}"
        if match := re.match(r"argument (\S+?)(?:/\S+)?: (.*)", message, re.DOTALL):
            return f"{match[1]}: {match[2]}"
        if match := re.match(r"the following arguments are required: (.*)", message):
            names = match[1].split(", ")
            if "MODEL" not in names and all(name in _MISSING for name in names):
                return f"{', '.join(names)} is missing.\nfix: {self._completed(names)}"
            fixes = [_MISSING.get(name, f"see {self.prog} --help") for name in names]
            return f"{', '.join(names)} is missing.\nfix: {', '.join(dict.fromkeys(fixes))}"
        return message

    def _completed(self, names: Sequence[str]) -> str:
        """The command with options that are missing: of a word without a name, or an example."""
        words = [_with_function(word) for word in self._words]
        for name in names:
            option, example = _MISSING[name].split()
            kind = r"\w+=\d+(,\w+=\d+)*" if "=" in example else r"\d+"
            bare = [i for i, word in enumerate(words) if i and re.fullmatch(kind, word)]
            bare = [i for i in bare if not words[i - 1].startswith("-")]
            stated = words.pop(bare[0]) if bare else example
            words += [option, stated]
        return " ".join([self.prog, *words])

    def unknown_arguments(self, given: Sequence[str]) -> str:
        """Of arguments that nothing takes: what is said."""
        options = [each for each in given if each.startswith("-")]
        if not options:
            return f"{given[0]} is one argument too many.\nfix: {self.prog} --help says which"
        return self.unknown("option", options[0].partition("=")[0], self._option_strings())

    def unknown(self, kind: str, word: str, known: Iterable[str]) -> str:
        if word in _WRITES:
            writes = "-o" in self._option_string_actions
            by = self.prog if writes else f"{self.prog.rpartition(' ')[0]} explore"
            return f"{word} is no {kind}.\nfix: {by} ... -o FILE.html"
        near = nearest(word, known)
        fix = near[0] if near else f"one of {', '.join(known)}"
        return f"{word} is no {kind}.\nfix: {fix} ({self.prog} --help has all)"

    def _option_strings(self) -> list[str]:
        strings = (text for action in self._actions for text in action.option_strings)
        return [text for text in strings if text.startswith("--")]

    def _commands(self) -> list[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return list(action.choices)
        return []


def _with_function(word: str) -> str:
    """A file of Python's, and its function `make`, or the last one."""
    file = Path(word)
    if file.suffix != ".py" or not file.is_file():
        return word
    names = re.findall(r"^def ([a-z]\w*)", file.read_text(), re.MULTILINE)
    return ":".join([word, *(["make"] if "make" in names else names[-1:])])


def add_command(parsers: Any, name: str, help: str, text: str, epilog: str = "") -> CommandParser:
    """The parser of a command. ``text``: what it does; ``epilog`` stands as it is written."""
    parser: CommandParser = parsers.add_parser(
        name,
        help=help,
        description=textwrap.fill(text, 98),
        epilog=epilog,
        formatter_class=Help,
    )
    parser.set_defaults(parser=parser)
    return parser


class Help(argparse.RawDescriptionHelpFormatter):
    """Options in a column of their own; words of 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(100, _columns()))


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns - 2 if sys.stdout.isatty() else 100
