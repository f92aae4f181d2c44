"""What an instruction is for: the action of a schedule that has it, and what it does there.

    Label("F", 0, 1, "all_reduce", "mm_3", "over tp")     F0 stage 1: all_reduce mm_3 over tp
    Label("F", 0, 1)                                      F0 stage 1
    Label("update")                                       update

Who counts or draws by it (a trace, a profile, the explorer) asks for its fields; the text is for
people: programs, errors, files.

Invariants: ``str(Label.parse(text)) == text`` for every text, and ``Label.parse(str(label)) ==
label`` for the labels that lowering makes. It knows no schedule: an action is a word.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TEXT = re.compile(
    r"(?:([A-Za-z]+)(0|[1-9][0-9]*) stage (0|[1-9][0-9]*)|([^:]*))(?:: (.+))?", re.DOTALL
)
_MOVED = re.compile(r"(\w+) (.+) ((?:over|from stage) .+)", re.DOTALL)


class Label(NamedTuple):
    """``action``, ``microbatch``, ``stage``: "F", 0, 1; of what has no microbatch a word, "update".
    ``verb``: what is done within it, "" of its own code; ``what``: with which value; ``way``: over
    which axis, or from which stage.

    A tuple, as a program pickles one for each message.
    """

    action: str
    microbatch: int | None = None
    stage: int | None = None
    verb: str = ""
    what: str = ""
    way: str = ""

    def doing(self, verb: str, what: str = "", way: str = "") -> Label:
        """Of something within the same action."""
        return Label(self.action, self.microbatch, self.stage, verb, what, way)

    @property
    def numbered(self) -> str:
        """The action and its microbatch: ``F0``, ``update``."""
        return self.action if self.microbatch is None else f"{self.action}{self.microbatch}"

    @property
    def place(self) -> str:
        """The action alone: ``F0 stage 1``, ``update``."""
        return self.numbered if self.stage is None else f"{self.numbered} stage {self.stage}"

    def __str__(self) -> str:
        done = " ".join(filter(None, (self.verb, self.what, self.way)))
        return f"{self.place}: {done}" if done else self.place

    @staticmethod
    def parse(text: str) -> Label:
        """The label that prints so; of a text that is none, one whose action is all of it."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return Label(text)
        action, microbatch, stage, word, done = match.groups()
        label = Label(word) if action is None else Label(action, int(microbatch), int(stage))
        moved = _MOVED.fullmatch(done or "")
        return label.doing(*moved.groups()) if moved else label.doing(done or "")
