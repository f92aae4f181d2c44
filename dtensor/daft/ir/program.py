"""A `Program`: what each rank of a cluster does in one run, and the code it calls.

Example, two ranks, rank 0 squares `x` and sends it on:

    ch = Buffer((2,), torch.float32)
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
`text.py`, whose `parse_instructions` reads a rank's list back.

Invariants (checked by `verify/verifier.py`, not here): no run can hang; every value is defined
before use and freed once, except inputs (fed each run, dropped at its end), outputs (returned, then
dropped) and state (in the actor's table from run to run). A `Call` may return a value that shares
storage with one of its inputs; writing to either is then its author's business.

It knows nothing of backends, nor of what the values mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.daft.ir.functions import Function
from dtensor.daft.ir.instructions import Instruction
from dtensor.daft.ir.text import columns, format_instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """One rank's list. `nbytes` are (value, bytes) of Call outputs, inputs and state."""

    instructions: tuple[Instruction, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    nbytes: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        """The instructions in the grammar of `text.py`, one a line."""
        return "\n".join(map(format_instruction, self.instructions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A list for each rank; `stage_of[rank]` is its pipeline stage, which errors name."""

    name: str
    ranks: tuple[RankProgram, ...]
    functions: tuple[tuple[str, Function], ...]
    stage_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.stage_of) != len(self.ranks):
            raise ValueError(
                f"Program {self.name!r} has {len(self.ranks)} ranks, "
                f"but stages for {len(self.stage_of)}: {self.stage_of}."
            )

    @property
    def size(self) -> int:
        return len(self.ranks)

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
            ):
                head += f"    {word} {', '.join(names)}" if names else ""
            parts.append(head)
            parts += [f"  {format_instruction(i)}" for i in program.instructions]
        return "\n".join(parts)
