"""Labels of instructions: the action of the schedule that they belong to, and what they do in it.

    Label("F", 0, 1, "all_reduce", "mm_3", "over tp")     F0 stage 1: all_reduce mm_3 over tp
    Label("F", 0, 1)                                      F0 stage 1
    Label("update")                                       update

Code (traces, profiles, the explorer) reads the fields; the text is for people. Invariants:
``str(Label.parse(text)) == text`` for every text, and ``Label.parse(str(label)) == label`` for the
labels that lowering makes. An action is a plain word here: labels do not depend on schedules.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TEXT = re.compile(
    r"(?:([A-Za-z]+)(0|[1-9][0-9]*) stage (0|[1-9][0-9]*)|([^:]*))(?:: (.+))?", re.DOTALL
)
_COMMUNICATION = re.compile(r"(\w+) (.+) ((?:over|from stage) .+)", re.DOTALL)


class Label(NamedTuple):
    """The purpose of an instruction.

    ``action``, ``microbatch``, ``stage``: "F", 0, 1; or only a word such as "update". For a
    collective or message, ``verb``: what it does, "all_reduce"; ``what``: its value; ``way``: "over
    tp" or "from stage 0". They are "" for the code of the action. A NamedTuple, because each
    program pickles many.
    """

    action: str
    microbatch: int | None = None
    stage: int | None = None
    verb: str = ""
    what: str = ""
    way: str = ""

    def doing(self, verb: str, what: str = "", way: str = "") -> Label:
        """Return the label of an instruction within the same action."""
        return Label(self.action, self.microbatch, self.stage, verb, what, way)

    @property
    def numbered(self) -> str:
        """The action and its microbatch: ``F0``, ``update``."""
        return self.action if self.microbatch is None else f"{self.action}{self.microbatch}"

    @property
    def place(self) -> str:
        """The action and its stage: ``F0 stage 1``, ``update``."""
        return self.numbered if self.stage is None else f"{self.numbered} stage {self.stage}"

    def __str__(self) -> str:
        done = " ".join(filter(None, (self.verb, self.what, self.way)))
        return f"{self.place}: {done}" if done else self.place

    @staticmethod
    def parse(text: str) -> Label:
        """Return the label with this text. Text of another form becomes the action of the label."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return Label(text)
        action, microbatch, stage, other_text, purpose = match.groups()
        label = Label(other_text) if action is None else Label(action, int(microbatch), int(stage))
        communication = _COMMUNICATION.fullmatch(purpose or "")
        return label.doing(*communication.groups()) if communication else label.doing(purpose or "")
