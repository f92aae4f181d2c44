"""Print instructions as text, and parse the text back exactly.

line        = instruction [ "#" label ] [ "@" user's line ], both JSON strings
instruction = [ outputs "=" ] start | "send" name "to" rank "on" name ":" buffer
            | "wait" names | "free" names | "commit" name
start       = "call" fn "(" names ")" [ "writes" names ] | "vote" [ "on" names ] | "commit" name
            | ( "recv" | "borrow" ) "from" rank "on" name ":" buffer
            | kind [ "." op ] "(" names ")" "over" "(" ranks ")" [ "by" distance ]
              "on" name [ sized | "on" "host" ] ":" buffers "=>" buffers
sized       = "sized" "by" "(" names ")" "parts" "(" parts ")" [ "returned" ] [ "limit" rows ]
parts       = parts with "," between them, each of numbers and ranges, "-" if empty: 0-3 7, 4-6, -
buffer      = dtype "[" [ "<=" ] sizes | "*" "]"       e.g. f32[2,3], f32[<=512,64], u8[*]
name        = letters, digits and . : / % _ - or any JSON string
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TypedDict, assert_never

from dtensor.collectives import COLLECTIVES
from dtensor.daft.ir.instructions import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Instruction,
    Recv,
    Send,
    Sizes,
    Vote,
    Wait,
)
from dtensor.daft.ir.label import Label
from dtensor.numerics import DTYPES, REDUCTIONS

EXCERPT = 120

_PLAIN_NAME = re.compile(r"[\w.:/%-]*[\w/%-]")
_TOKEN = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|\w+\[(?:<=)?[\d,]*\]|\w+\[\*\]|=>|[(),=#@]|:(?=\s)|[\w.:/%-]*[\w/%-])',
)


def format_instruction(
    instruction: Instruction, *, brief: bool = False, max_names: int | None = None
) -> str:
    """Return an instruction as one line of text. `brief`: without channels, buffers, the label and
    the user's line. `max_names`: show only so many names of each list."""
    i = instruction

    def names_of(names: Sequence[str]) -> str:
        shown = ", ".join(map(_name, names[:max_names]))
        more = 0 if max_names is None else len(names) - max_names
        return shown if more <= 0 else f"{shown}, ... ({more} more)"

    match i:
        case Call():
            text = f"call {_name(i.fn)}({names_of(i.inputs)})"
            if i.outputs:
                text = f"{names_of(i.outputs)} = {text}"
            if i.writes:
                text += f" writes {names_of(i.writes)}"
        case Send():
            text = f"send {_name(i.value)} to {i.to}"
            text += "" if brief else f" on {_name(i.channel)} : {i.buffer}"
        case Recv():
            text = f"{_name(i.value)} = {'borrow' if i.lent else 'recv'} from {i.source_rank}"
            text += "" if brief else f" on {_name(i.channel)} : {i.buffer}"
        case Collective():
            kind = i.kind if i.op is None else f"{i.kind}.{i.op}"
            text = f"{names_of(i.outputs)} = {kind}({names_of(i.inputs)})"
            text += f" over ({', '.join(map(str, i.group))})"
            text += f" by {i.distance}" if i.distance else ""
            text += "" if brief else f" on {_name(i.channel)}"
            if i.sizes is not None:
                text += f" sized by ({names_of(i.sizes.counts)})"
                text += "" if brief else _format_sizes(i.sizes)
            text += " on host" if i.on_host else ""
            if not brief:
                ins, outs = (", ".join(map(str, b)) for b in (i.in_buffers, i.out_buffers))
                text += f" : {ins}{' ' if ins else ''}=> {outs}"
        case Wait():
            text = f"wait {names_of(i.values)}"
        case Free():
            text = f"free {names_of(i.values)}"
        case Vote():
            text = f"{_name(i.value)} = vote"
            text += f" on {names_of(i.faults)}" if i.faults else ""
        case Commit():
            text = "" if i.predicate is None else f"{_name(i.predicate)} = "
            text += f"commit {_name(i.value)}"
        case _:
            assert_never(i)
    if not brief and i.label is not None:
        text += f" # {json.dumps(str(i.label), ensure_ascii=False)}"
    if not brief and i.source is not None:
        text += f" @ {json.dumps(i.source, ensure_ascii=False)}"
    return text


def excerpt(instruction: Instruction) -> str:
    """Return an instruction for an error message: brief, at most `EXCERPT` characters."""
    text = ""
    for max_names in (None, 4, 2, 1):
        text = format_instruction(instruction, brief=True, max_names=max_names)
        if len(text) <= EXCERPT:
            return text
    return _fit_cell(text, EXCERPT)


def parse_instructions(text: str) -> tuple[Instruction, ...]:
    """Parse one instruction per line. Blank lines are skipped. Raises ValueError for other text."""
    return tuple(_Parser(line).instruction() for line in text.split("\n") if line.strip())


def columns(
    titles: Sequence[str],
    lists: Sequence[Sequence[str]],
    width: int = 100,
    *,
    uncut: bool = False,
) -> str:
    """Print lists side by side as columns, wrapped into blocks that fit ``width``. Long entries are
    cut with `...`, unless ``uncut``."""
    full_widths = [
        max(map(len, (title, *items))) for title, items in zip(titles, lists, strict=True)
    ]
    max_width = max(28, width // max(1, len(lists)) - 7)
    widths = full_widths if uncut else [min(size, max_width) for size in full_widths]
    blocks: list[str] = []
    start = 0
    while start < len(lists):
        end, used = start + 1, widths[start]
        while end < len(lists) and used + widths[end] + 3 <= width - 5:
            used += widths[end] + 3
            end += 1
        rows = [("    ", [_fit_cell(titles[c], widths[c]) for c in range(start, end)])]
        for r in range(max(len(items) for items in lists[start:end])):
            cells = [
                _fit_cell(lists[c][r] if r < len(lists[c]) else "", widths[c])
                for c in range(start, end)
            ]
            rows.append((f"{r:>4}", cells))
        blocks.append("\n".join(f"{n} {' | '.join(cells)}".rstrip() for n, cells in rows))
        start = end
    return "\n\n".join(blocks)


def _fit_cell(text: str, size: int) -> str:
    return text.ljust(size) if len(text) <= size else text[: size - 3] + "..."


def _name(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _format_sizes(sizes: Sizes) -> str:
    """Return the text of `Sizes` after the counts."""
    text = f" parts ({', '.join(map(_format_part, sizes.parts))})"
    text += " returned" if sizes.returned else ""
    return text if sizes.limit is None else f"{text} limit {sizes.limit}"


def _format_part(part: Sequence[int]) -> str:
    """Return the numbers of a part, with runs of three or more as ranges: `0-3 7`."""
    runs: list[list[int]] = []
    for position in part:
        if runs and position == runs[-1][-1] + 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs]
    return " ".join(words) or "-"


class _Tail(TypedDict):
    """The optional end of an instruction."""

    label: Label | None
    source: str | None


class _Parser:
    """A recursive-descent parser of one line, by the grammar at the top."""

    def __init__(self, line: str) -> None:
        """Split the line into tokens. Raises ValueError for text that is no token."""
        self.line = line
        self.tokens: list[str] = []
        self.position = 0
        end = 0
        while end < len(line.rstrip()):
            match = _TOKEN.match(line, end)
            if match is None:
                raise ValueError(f"This is not an instruction at column {end}: {line!r}.")
            self.tokens.append(match.group(1))
            end = match.end()

    def instruction(self) -> Instruction:
        """Parse the whole line."""
        if "=" in self.tokens:
            outputs = self._list()
            self._expect("=")
            return self._start(outputs)
        word = self._word()
        if word == "call":
            return self._call(())
        if word == "send":
            value = self._word()
            self._expect("to")
            rank = int(self._word())
            channel = self._channel()
            return Send(value, rank, channel, *self._buffers(), **self._tail())
        if word in ("wait", "free"):
            kind = Wait if word == "wait" else Free
            return kind(self._list(), **self._tail())
        if word == "commit":
            return Commit(self._word(), **self._tail())
        raise ValueError(f"An instruction cannot start with {word!r}: {self.line!r}.")

    def _start(self, outputs: tuple[str, ...]) -> Instruction:
        """Parse the part after ``outputs =``: a call, a vote, a receive or a collective."""
        word = self._word()
        if word == "call":
            return self._call(outputs)
        if word == "vote":
            (value,) = outputs
            faults: tuple[str, ...] = ()
            if self._peek() == "on":
                self._expect("on")
                faults = self._list()
            return Vote(value, faults, **self._tail())
        if word == "commit":
            (predicate,) = outputs
            return Commit(self._word(), predicate, **self._tail())
        if word in ("recv", "borrow"):
            self._expect("from")
            rank = int(self._word())
            channel = self._channel()
            (value,) = outputs
            lent = word == "borrow"
            return Recv(value, rank, channel, *self._buffers(), lent=lent, **self._tail())
        kind, _, op = word.partition(".")
        if kind not in COLLECTIVES or (op and op not in REDUCTIONS):
            raise ValueError(f"There is no instruction {word!r}: {self.line!r}.")
        inputs = self._parenthesised()
        self._expect("over")
        group = tuple(map(int, self._parenthesised()))
        distance = 0
        if self._peek() == "by":
            self._expect("by")
            distance = int(self._word())
        self._expect("on")
        channel = self._word()
        sizes = self._sizes() if self._peek() == "sized" else None
        on_host = self._peek() == "on"
        if on_host:
            self._expect("on")
            self._expect("host")
        self._expect(":")
        ins = self._buffers()
        self._expect("=>")
        outs = self._buffers()
        return Collective(
            *(kind, group, inputs, outputs, ins, outs, op or None, channel),
            distance=distance,
            sizes=sizes,
            on_host=on_host,
            **self._tail(),
        )

    def _sizes(self) -> Sizes:
        """Parse the part from ``sized`` on."""
        self._expect("sized")
        self._expect("by")
        counts = self._parenthesised()
        self._expect("parts")
        self._expect("(")
        parts: list[tuple[int, ...]] = []
        while self._peek() != ")":
            part: list[int] = []
            while self._peek() not in (",", ")"):
                first, _, last = self._next().partition("-")
                part += range(int(first), int(last or first) + 1) if first else ()
            parts.append(tuple(part))
            if self._peek() == ",":
                self._next()
        self._expect(")")
        returned = self._peek() == "returned"
        if returned:
            self._next()
        limit: int | None = None
        if self._peek() == "limit":
            self._next()
            limit = int(self._word())
        return Sizes(counts, tuple(parts), returned, limit)

    def _call(self, outputs: tuple[str, ...]) -> Call:
        """Parse the part after ``call``: function, inputs and writes."""
        fn = self._word()
        inputs = self._parenthesised()
        writes: tuple[str, ...] = ()
        if self._peek() == "writes":
            self._expect("writes")
            writes = self._list()
        return Call(fn, inputs, outputs, writes, **self._tail())

    def _channel(self) -> str:
        self._expect("on")
        channel = self._word()
        self._expect(":")
        return channel

    def _buffers(self) -> tuple[Buffer, ...]:
        """Parse a list of buffers such as `f32[2,3], u8[*]`, which may be empty."""
        buffers: list[Buffer] = []
        while "[" in self._peek() and not self._peek().startswith('"'):
            dtype, _, sizes = self._next().rstrip("]").partition("[")
            if dtype not in DTYPES:
                raise ValueError(f"There is no dtype {dtype!r}, in {self.line!r}.")
            if sizes == "*":
                buffers.append(Buffer((), DTYPES[dtype], variable=True))
            else:
                shape = tuple(int(s) for s in sizes.removeprefix("<=").split(",") if s)
                bounded = sizes.startswith("<=")
                buffers.append(Buffer(shape, DTYPES[dtype], bounded=bounded))
            if self._peek() == ",":
                self._next()
        return tuple(buffers)

    def _parenthesised(self) -> tuple[str, ...]:
        self._expect("(")
        words = self._list()
        self._expect(")")
        return words

    def _list(self) -> tuple[str, ...]:
        """Parse names separated by commas; () if there are none."""
        words: list[str] = []
        while self._peek() not in ("", ")", "=", "#", "@"):
            words.append(self._word())
            if self._peek() != ",":
                break
            self._next()
        return tuple(words)

    def _tail(self) -> _Tail:
        """Parse the optional label (after `#`) and source (after `@`) at the end of the line."""
        tail = _Tail(label=None, source=None)
        if self._peek() == "#":
            self._next()
            tail["label"] = Label.parse(self._word())
        if self._peek() == "@":
            self._next()
            tail["source"] = self._word()
        if self._peek():
            raise ValueError(f"Nothing may follow, but {self._peek()!r} does: {self.line!r}.")
        return tail

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        if not token:
            raise ValueError(f"The instruction ends too early: {self.line!r}.")
        self.position += 1
        return token

    def _word(self) -> str:
        token = self._next()
        return str(json.loads(token)) if token.startswith('"') else token

    def _expect(self, token: str) -> None:
        if (word := self._next()) != token:
            raise ValueError(f"Expected {token!r}, found {word!r}: {self.line!r}.")
