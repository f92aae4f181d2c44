"""A `Program`: a list of instructions for each rank of a cluster, and the functions they call.

    buffer = Buffer((2,), torch.float32)
    square = Function(name="square", source="def forward(x):\\n    return (mul(x, x),)",
                      bindings=(("mul", torch.mul),))
    send = (Call("square", ("x",), ("y",)), Send("y", 1, "f", buffer), Wait(("y",)), Free(("y",)))
    receive = (Recv("y", 0, "f", buffer), Wait(("y",)))
    ranks = (RankProgram(instructions=send, inputs=("x",)),      # rank 0 sends x * x to rank 1
             RankProgram(instructions=receive, outputs=("y",)))
    Program(name="demo", ranks=ranks, functions=(("square", square),), stage_of=(0, 1))

`verification/verifier.py` checks programs: no run hangs, and no value is missing or leaks.
"""

from __future__ import annotations

import copyreg
import linecache
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from dtensor.daft.ir.code import Body, Check, CodeLine
from dtensor.daft.ir.instructions import Commit, Instruction
from dtensor.daft.ir.text import columns, format_instruction
from dtensor.daft.remote_exceptions import traceback_of
from dtensor.op_names import op_packet
from dtensor.private_torch import OpOverload, OpOverloadPacket

Built: TypeAlias = Callable[..., tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RankProgram:
    """The list of one rank, and the values that it shares with the outside.

    `inputs` are given to each run and dropped at its end; `outputs` are returned; `state` stays in
    the rank's table from run to run. `nbytes`: (value, bytes) of inputs, state and Call outputs.
    `shares`: (value, other) if a value that a `Call` returns may share the storage of `other`, an
    input or state; all other values have their own storage. `changed`: inputs that the run changes,
    visibly for the caller. `replayable`: changed inputs and state that may be written before the
    commit point, because repeating a failed run gives the same results.
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
        """The values that outlive a run: state, and inputs that the run changes."""
        return frozenset((*self.state, *self.changed))

    @property
    def is_deferred(self) -> bool:
        """Whether a commit leaves the votes to the device (see `Commit`)."""
        return any(isinstance(i, Commit) and i.predicate is not None for i in self.instructions)

    def __repr__(self) -> str:
        return f"<list of {len(self.instructions):,} instructions>"

    def text(self) -> str:
        """Return the instructions in the grammar of `text.py`, one per line."""
        return "\n".join(map(format_instruction, self.instructions))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program:
    """The instructions of all ranks for one run, and the functions that they call.

    `stage_of[rank]`: its pipeline stage. `known_as[rank]`: its name for users, if it differs from
    its number in the program. Both appear in errors. `graphs`: the functions that may be part of a
    CUDA graph, because they never wait on the host for a value of the device; None: no graphs.
    """

    name: str
    ranks: tuple[RankProgram, ...]
    functions: tuple[tuple[str, Function], ...]
    stage_of: tuple[int, ...]
    known_as: tuple[str, ...] = ()
    graphs: frozenset[str] | None = None

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
    def is_deferred(self) -> bool:
        """Whether the host reads no value of the device during a run."""
        return any(rank_program.is_deferred for rank_program in self.ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that have an instruction, an input, an output or state."""
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
        """Return the whole program as text, without the source of its functions."""
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
    """Python source that defines `forward`, which takes positional arguments and returns a tuple.

    `bindings`: the globals of the source. `lines[i]`: the user's line ("gpt.py:41: x = self.up(x)")
    for line i + 1 of `source`. `body`: the records from which source and lines are made, or None.
    `checks`: the checks that the code makes on the device.
    """

    name: str
    source: str
    bindings: tuple[tuple[str, object], ...] = ()
    lines: tuple[str | None, ...] = ()
    body: Body | None = None
    checks: tuple[Check, ...] = ()

    @staticmethod
    def straight(
        name: str, body: Body, bindings: Mapping[str, object], checks: tuple[Check, ...] = ()
    ) -> Function:
        """Return the function with this body of straight-line code."""
        bound = tuple(sorted(bindings.items(), key=lambda item: item[0]))
        return Function(
            name=name,
            source=body.source,
            bindings=bound,
            lines=body.user_lines,
            body=body,
            checks=checks,
        )

    @staticmethod
    def of(fn: Callable[..., object], name: str | None = None) -> Function:
        """Wrap ``fn``, which must return a tuple and which actors can import. ``name``: by default
        ``fn.__qualname__``."""
        return Function(
            name=name if name is not None else fn.__qualname__,
            source="forward = wrapped",
            bindings=(("wrapped", fn),),
        )

    def __reduce__(self) -> tuple[object, ...]:
        if self.body is not None:  # the receiver makes the text from it
            return Function.straight, (self.name, self.body, dict(self.bindings), self.checks)
        return _function, (self.name, self.source, self.bindings, self.lines, self.checks)

    def __repr__(self) -> str:
        return f"<function {self.name}, lines: {len(self.source.splitlines()):,}>"

    @property
    def filename(self) -> str:
        return f"<dtensor {self.name}>"

    @property
    def statements(self) -> tuple[CodeLine, ...]:
        """The lines of the body; () if there is none."""
        return () if self.body is None else self.body.lines

    def build(self) -> Built:
        """Compile the source and return `forward`. Raises ValueError if it does not define one.

        `forward` takes its inputs as arguments. The `forward` of a boxed body is also there as the
        attribute ``boxed``, which takes one list of the inputs and empties it.
        """
        code = compile(self.source, self.filename, "exec")
        text = self.source.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(self.source), None, text, self.filename)
        namespace: dict[str, object] = dict(self.bindings)
        exec(code, namespace)
        if "forward" not in namespace:
            raise ValueError(f"The source of function {self.name!r} does not define `forward`.")
        forward = cast(Built, namespace["forward"])
        if self.body is None or not self.body.boxed:
            return forward

        def unboxed(*inputs: object) -> tuple[object, ...]:
            return forward(list(inputs))

        unboxed.boxed = forward  # type: ignore[attr-defined]
        return unboxed

    def user_line(self, error: BaseException) -> str | None:
        """Return the user's line that raised `error`, or None if it is unknown."""
        line: str | None = None
        for frame in traceback.extract_tb(traceback_of(error)):
            number = frame.lineno
            if frame.filename == self.filename and number and number <= len(self.lines):
                line = self.lines[number - 1]
        return line


def _function(name: str, source: str, bindings: Any, lines: Any, checks: Any) -> Function:
    return Function(name=name, source=source, bindings=bindings, lines=lines, checks=checks)


# Torch operators are pickled by name, because their schema is a C++ object.
def _overload(name: str, overload: str) -> object:
    return getattr(op_packet(name), overload)


def _reduce_overload(op: OpOverload) -> tuple[object, ...]:
    name, _, overload = op.name().partition(".")
    return (_overload, (name, overload or "default"))


def _reduce_packet(op: OpOverloadPacket) -> tuple[object, ...]:
    return (op_packet, (str(op).replace(".", "::", 1),))


copyreg.pickle(OpOverload, _reduce_overload)  # type: ignore[arg-type]
copyreg.pickle(OpOverloadPacket, _reduce_packet)  # type: ignore[arg-type]
