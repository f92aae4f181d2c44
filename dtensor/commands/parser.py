"""The parser of the command line. An error is one sentence with a fix.

    $ dtensor plan gpt2 --mehs tp=2
    dtensor plan: --mehs is no option.
    fix: --mesh (dtensor plan --help has all)

argparse would print the whole usage before each error, a screen of options. The exit status of an
error is 2.
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
"""The fix for each required argument that is missing."""
_NAMES_OF_OUTPUT = ("--save", "--out", "--file", "--html")
"""Options that do not exist and by which users mean -o."""


class CommandParser(argparse.ArgumentParser):
    """The parser of the whole command line, and of each command."""

    _command_line: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        self._command_line = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {self._rewrite(message)}\n")

    def _rewrite(self, message: str) -> str:
        """Return argparse's message as a sentence with a fix."""
        if match := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message):
            return self.unknown("command", match[1], self._commands())
        if match := re.match(r"unrecognized arguments: (.*)", message):
            return self.unknown_arguments(match[1].split())
        if match := re.match(
            r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message
        ):
            choices = re.findall(r"'(.*?)'", match[3])
            fix = (nearest(match[2], choices) or [", ".join(choices)])[0]
            return f"{match[1]} {match[2]} is none.\nfix: {fix}"
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
        """Return the command line with the missing options. The value of an option is a word of the
        command line that has no option and looks like the value, or else an example."""
        words = [_with_function(word) for word in self._command_line]
        for name in names:
            option, example = _MISSING[name].split()
            form = r"\w+=\d+(,\w+=\d+)*" if "=" in example else r"\d+"
            candidates = [
                i
                for i, word in enumerate(words)
                if i and re.fullmatch(form, word) and not words[i - 1].startswith("-")
            ]
            words += [option, words.pop(candidates[0]) if candidates else example]
        return " ".join([self.prog, *words])

    def unknown_arguments(self, arguments: Sequence[str]) -> str:
        """Return the message about arguments that the parser did not recognise."""
        options = [argument for argument in arguments if argument.startswith("-")]
        if not options:
            return f"{arguments[0]} is one argument too many.\nfix: {self.prog} --help says which"
        return self.unknown("option", options[0].partition("=")[0], self._option_strings())

    def unknown(self, kind: str, word: str, choices: Iterable[str]) -> str:
        """Return the message about a word that is none of the choices."""
        if word in _NAMES_OF_OUTPUT:
            has_output = "-o" in self._option_string_actions
            command = self.prog if has_output else f"{self.prog.rpartition(' ')[0]} explore"
            return f"{word} is no {kind}.\nfix: {command} ... -o FILE.html"
        near = nearest(word, choices)
        fix = near[0] if near else f"one of {', '.join(choices)}"
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
    """Return "file.py:make" for a Python file, with its last public function if it has no `make`;
    any other word unchanged."""
    file = Path(word)
    if file.suffix != ".py" or not file.is_file():
        return word
    names = re.findall(r"^def ([a-z]\w*)", file.read_text(), re.MULTILINE)
    return ":".join([word, *(["make"] if "make" in names else names[-1:])])


def add_command(parsers: Any, name: str, help: str, text: str, epilog: str = "") -> CommandParser:
    """Add and return the parser of a command. ``help``: for the list of commands; ``text``: for the
    help of the command; ``epilog``: printed as written, without wrapping."""
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
    """Prints help with at most 100 columns, or the width of the terminal if that is less."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(100, _columns()))


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns - 2 if sys.stdout.isatty() else 100
