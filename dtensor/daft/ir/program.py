"""A `Program`: the instructions of each rank of a cluster for one run, and the code they call.

Example, two ranks, rank 0 squares `x` and sends it on:

    ch = Buffer((2,), torch.float32)
    square = Function(name="square", source="def forward(x):\\n    return (mul(x, x),)",
                      bindings=(("mul", torch.mul),), lines=(None, "net.py:3: y = x * x"))
    Program(
        name="demo",
        ranks=(
            RankProgram(instructions=(Call("square", ("x",), ("y",)), Send("y", 1, "f", ch),
                                      Wait(("y",)), Free(("y",))), inputs=("x",)),
            RankProgram(instructions=(Recv("y", 0, "f", ch), Wait(("y",))), outputs=("y",)),
        ),
        functions=(("square", square),),
        stage_of=(0, 1),
    )

`str(program)` prints the lists side by side; `program.text()` prints all of it, in the grammar of
`text.py`, whose `parse_instructions` reads a rank's list back. Local code is data: a `Function` is
source text that an actor compiles once.

Invariants (checked by `verification/verifier.py`, not here): no run can hang; every value is
defined before use and freed once, except inputs (fed each run, dropped at its end), outputs
(returned, then dropped) and state (in the actor's table from run to run). A `Call` may return a
value that shares storage with an input or state: if `shares` declares it, readers of one see no
write to the other; undeclared sharing is the author's responsibility. `forward` takes positional
arguments and returns a tuple, one item per output of the `Call`. A frame of the built code has the
file name `<dtensor NAME>`, so that a traceback through it leads to `lines`, the user's own. A
function pickles, with torch operators among the bindings too.

It knows neither backends nor the meaning of values. It does not optimise, trace, or check the code.
"""

from __future__ import annotations

import copyreg
import linecache
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from dtensor.daft.ir.code import Body, CodeLine
from dtensor.daft.ir.instructions import Instruction
from dtensor.daft.ir.text import columns, format_instruction
from dtensor.daft.remote_exceptions import traceback_of
from dtensor.op_names import op_packet
from dtensor.private_torch import OpOverload, OpOverloadPacket

Built: TypeAlias = Callable[..., tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RankProgram:
    """One rank's list of `instructions`. `nbytes` are (value, bytes) of Call outputs, inputs and
    state.

    `shares` are (value, other): a value that a `Call` returns, and an input or state whose storage
    it may share; all other values have their own storage. `changed` are inputs that outlive the
    run, like state: the caller sees their changes. `replayable` are those of them, and of state,
    that may be written before the commit point: a failed run may leave them written, and its
    repetition has the same results.
    """

    instructions: tuple[Instruction, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    nbytes: tuple[tuple[str, int], ...] = ()
    shares: tuple[tuple[str, str], ...] = ()
    changed: tuple[str, ...] = ()
    replayable: tuple[str, ...] = ()

    @property
    def lasting(self) -> frozenset[str]:
        """The values that outlive a run: state, and inputs that it changes."""
        return frozenset((*self.state, *self.changed))

    def __repr__(self) -> str:
        return f"<list of {len(self.instructions):,} instructions>"

    def text(self) -> str:
        """The instructions in the grammar of `text.py`, one a line."""
        return "\n".join(map(format_instruction, self.instructions))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program:
    """A list for each of `ranks`, and the `functions` that these call, by name. `stage_of[rank]` is
    its pipeline stage, which errors name, like `known_as[rank]`, the rank's number for users: by
    default its number here."""

    name: str
    ranks: tuple[RankProgram, ...]
    functions: tuple[tuple[str, Function], ...]
    stage_of: tuple[int, ...]
    known_as: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.stage_of) != len(self.ranks):
            raise ValueError(
                f"Program {self.name!r} has {len(self.ranks)} ranks, "
                f"but stages for {len(self.stage_of)}: {self.stage_of}."
            )

    @property
    def size(self) -> int:
        """The number of ranks, including those that take no part."""
        return len(self.ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part: they have an instruction, an input, an output or state."""
        return tuple(
            rank
            for rank, rank_program in enumerate(self.ranks)
            if rank_program.instructions
            or rank_program.inputs
            or rank_program.outputs
            or rank_program.state
        )

    def __repr__(self) -> str:
        num = sum(len(rank.instructions) for rank in self.ranks)
        return f"<program {self.name}: ranks: {self.size:,}, instructions: {num:,}>"

    def __str__(self) -> str:
        titles = [f"rank {r} (stage {stage})" for r, stage in enumerate(self.stage_of)]
        lists = [[format_instruction(i, brief=True) for i in p.instructions] for p in self.ranks]
        return f"program {self.name}    {self.size} ranks\n{columns(titles, lists)}"

    def text(self) -> str:
        """Everything but the functions' source."""
        parts = [f"program {self.name}"]
        for rank, program in enumerate(self.ranks):
            head = f"rank {rank} (stage {self.stage_of[rank]})"
            for word, names in (
                ("inputs", program.inputs),
                ("outputs", program.outputs),
                ("state", program.state),
                ("changed", program.changed),
                ("replayable", program.replayable),
            ):
                head += f"    {word} {', '.join(names)}" if names else ""
            parts.append(head)
            parts += [f"  {format_instruction(i)}" for i in program.instructions]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Function:
    """Python source that defines `forward`, with the globals (`bindings`) that it needs. `name`:
    its name in calls.

    `lines[i]` is the user's line ("gpt.py:41: x = self.up(x)") for line i + 1 of `source`. `body`:
    the code as records, from which both are made; None if there are no records.
    """

    name: str
    source: str
    bindings: tuple[tuple[str, object], ...] = ()
    lines: tuple[str | None, ...] = ()
    body: Body | None = None

    @staticmethod
    def straight(name: str, body: Body, bindings: Mapping[str, object]) -> Function:
        """A function of straight-line code."""
        bound = tuple(sorted(bindings.items(), key=lambda item: item[0]))
        return Function(
            name=name, source=body.source, bindings=bound, lines=body.user_lines, body=body
        )

    @staticmethod
    def of(fn: Callable[..., object], name: str | None = None) -> Function:
        """Wrap ``fn``, which actors can import; ``name`` is by default its own name. It returns a
        tuple, as every `forward` does."""
        return Function(
            name=name if name is not None else fn.__qualname__,
            source="forward = wrapped",
            bindings=(("wrapped", fn),),
        )

    def __reduce__(self) -> tuple[object, ...]:
        if self.body is not None:  # the receiver makes the text from it
            return Function.straight, (self.name, self.body, dict(self.bindings))
        return _function, (self.name, self.source, self.bindings, self.lines)

    def __repr__(self) -> str:
        return f"<function {self.name}, lines: {len(self.source.splitlines()):,}>"

    @property
    def filename(self) -> str:
        return f"<dtensor {self.name}>"

    @property
    def statements(self) -> tuple[CodeLine, ...]:
        """The lines of its body; empty without one."""
        return () if self.body is None else self.body.lines

    def build(self) -> Built:
        """The function that the source defines. ValueError if it defines none."""
        code = compile(self.source, self.filename, "exec")
        text = self.source.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(self.source), None, text, self.filename)
        namespace: dict[str, object] = dict(self.bindings)
        exec(code, namespace)
        if "forward" not in namespace:
            raise ValueError(f"The source of function {self.name!r} does not define `forward`.")
        return cast(Built, namespace["forward"])

    def user_line(self, error: BaseException) -> str | None:
        """The user's line under which `error` was raised; None if the table has none."""
        line: str | None = None
        for frame in traceback.extract_tb(traceback_of(error)):
            number = frame.lineno
            if frame.filename == self.filename and number and number <= len(self.lines):
                line = self.lines[number - 1]
        return line


def _function(name: str, source: str, bindings: Any, lines: Any) -> Function:
    return Function(name=name, source=source, bindings=bindings, lines=lines)


# Operators do not pickle by themselves (their bound schema is a C++ object): they are pickled by
# name.
def _overload(name: str, overload: str) -> object:
    return getattr(op_packet(name), overload)


def _reduce_overload(op: OpOverload) -> tuple[object, ...]:
    name, _, overload = op.name().partition(".")
    return (_overload, (name, overload or "default"))


def _reduce_packet(op: OpOverloadPacket) -> tuple[object, ...]:
    return (op_packet, (str(op).replace(".", "::", 1),))


copyreg.pickle(OpOverload, _reduce_overload)  # type: ignore[arg-type]
copyreg.pickle(OpOverloadPacket, _reduce_packet)  # type: ignore[arg-type]
