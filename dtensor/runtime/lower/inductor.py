"""Compile local code by torch's compiler, for `launch(local="inductor")`.

    program = compile_segments(program, inputs_by_rank, device, compile)

    h = mm(x, w); del w                    given = [x, w, bias]; del w
    b = h.add_(bias); del h                g, = compiled_0(given)
    g = gelu(b); del b                     fill(g, seed)
    fill(g, seed)                          y = mm(g, v)
    y = mm(g, v)

Each rank's list runs once on fake tensors, which gives the layouts of all values. Lines that
nothing keeps from it are compiled, as pieces as long as possible (pieces.py); other lines stay: an
op that reads values on the host, a kernel that is not torch's, a write to an input, a number of the
run. Functions that differ only in names become one function, so layers and ranks share their code.
A piece that cannot be compiled stays as it is, with the reason as a comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from types import FunctionType
from typing import TypeAlias

import torch
from torch import Tensor

from dtensor.daft import Call, Collective, Commit, Free, Function, Instruction, Program, Recv, Vote
from dtensor.daft.ir.code import Body, CodeLine
from dtensor.daft.ir.instructions import WORD, Buffer
from dtensor.daft.ir.program import Built
from dtensor.kernels.registry import op_of_kernel
from dtensor.private_torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
)
from dtensor.runtime.lower.code import READING_MODULES, is_view, overload_of, plain_key
from dtensor.runtime.lower.pieces import CompiledPiece, Layout, PieceSource
from dtensor.runtime.lower.rank_builder import MAX_LINES
from dtensor.sharding.local.device_asserts import CHECKS

MIN_OPS = 2
"""The least number of ops, besides views, in a piece."""
Compile: TypeAlias = Callable[[PieceSource], Mapping[str, bytes] | str]
"""A function that returns a piece's artifact for each kind of device, or why there is none."""
_COMPILED_NAMESPACES = ("aten", "prims", "dt")
_COMPILED_MODULES = ("dtensor.sharding.", "torch")
_RECORDING = ("checked", "satisfied", "record_check")  # that an operand was checked


def compile_segments(
    program: Program,
    inputs_by_rank: Sequence[Mapping[str, object]],
    device: torch.device,
    compile: Compile,
) -> Program:
    """Return the program with its local code compiled. ``inputs_by_rank``: for each rank, its
    inputs and state by name, a `Buffer` for a tensor, else the value."""
    rewriter = _Rewriter(program.functions, device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        calls = [
            list(_FakeRun(rewriter, mode, inputs).run(rank.instructions))
            for rank, inputs in zip(program.ranks, inputs_by_rank, strict=True)
        ]
    for piece in rewriter.pieces.values():
        piece.compile(compile)
    functions = {rewritten.name: rewritten.function() for rewritten in rewriter.by_key.values()}
    ranks = tuple(
        replace(rank, instructions=tuple(instructions))
        for rank, instructions in zip(program.ranks, calls, strict=True)
    )
    called = {i.fn for rank in ranks for i in rank.instructions if isinstance(i, Call)}
    functions = {**rewriter.functions, **functions}
    kept = tuple((name, function) for name, function in functions.items() if name in called)
    return replace(program, ranks=ranks, functions=kept)


class _Unknown:
    """A value that is no tensor of a known shape: an optimizer, or a result of an unknown value."""


_UNKNOWN = _Unknown()


class _FakeRun:
    """A run of one rank's instructions on fake tensors."""

    def __init__(
        self, rewriter: _Rewriter, mode: FakeTensorMode, inputs: Mapping[str, object]
    ) -> None:
        self.rewriter, self.mode = rewriter, mode
        self.table: dict[str, object] = {name: self._fake(value) for name, value in inputs.items()}

    def _fake(self, value: object) -> object:
        """Return a contiguous fake tensor for a `Buffer`, as a rank's inputs and messages are. A
        bounded buffer has no shape before the run."""
        if not isinstance(value, Buffer):
            return value
        if value.bounded or value.variable:
            return _UNKNOWN
        with self.mode:
            return torch.empty(value.shape, dtype=value.dtype, device=self.rewriter.device)

    def run(self, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        """Run the instructions, and yield them; a Call gets the rewritten function."""
        for at, item in enumerate(instructions):
            match item:
                case Call():
                    after = instructions[at + 1] if at + 1 < len(instructions) else None
                    item = self._call(item, after.values if isinstance(after, Free) else ())
                case Recv(value=value, buffer=buffer):
                    self.table[value] = self._fake(buffer)
                case Collective(outputs=outputs, out_buffers=buffers, on_host=on_host):
                    values = [_UNKNOWN] * len(outputs) if on_host else map(self._fake, buffers)
                    self.table.update(zip(outputs, values, strict=True))
                case Vote(value=value):
                    self.table[value] = self._fake(WORD)
                case Commit(outputs=names):
                    self.table.update((name, self._fake(WORD)) for name in names)
                case Free(values=values):
                    for value in values:
                        self.table.pop(value, None)
                case _:
                    pass
            yield item

    def _call(self, call: Call, freed: Sequence[str]) -> Call:
        inputs = [self.table.get(name, _UNKNOWN) for name in call.inputs]
        dying = [name in freed for name in call.inputs]
        name, results = self.rewriter.rewritten(call.fn, inputs, dying)
        results = [_UNKNOWN] * len(call.outputs) if results is None else results
        self.table.update(zip(call.outputs, results, strict=True))
        return replace(call, fn=name)


# -- one function ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Piece:
    """A piece of a function, shared by all pieces that differ only in names."""

    name: str
    source: PieceSource
    made: CompiledPiece | None = None
    reason: str = ""

    def compile(self, compile: Compile) -> None:
        data = compile(self.source)
        if isinstance(data, str):
            self.reason = data
        else:
            self.made = CompiledPiece(self.name, data)


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive lines of a function. ``piece``: if they can be compiled, with the names of its
    inputs and outputs."""

    lines: tuple[CodeLine, ...]
    piece: _Piece | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rewritten:
    """A function with its lines divided into parts. ``results``: its fake results. ``dying``: the
    inputs that no later instruction reads."""

    original: Function
    parts: tuple[_Part, ...]
    results: list[object] | None
    dying: frozenset[str]

    @property
    def name(self) -> str:
        return self.original.name

    def function(self) -> Function:
        """Return the function that ranks call: the compiled pieces, and the other lines."""
        original, body = self.original, self.original.body
        if body is None:
            return original
        bindings = dict(original.bindings) | {"laid_out": laid_out}
        last_reads = {n: at for at, part in enumerate(self.parts) for n in _names_read(part.lines)}
        lines: list[CodeLine] = []
        for at, part in enumerate(self.parts):
            dying = {n for n in self.dying if last_reads.get(n) == at and n not in body.outputs}
            if part.piece is not None and part.piece.made is not None:
                lines.append(_piece_call(part, part.piece.made, dying, bindings))
                continue
            comment = "" if part.piece is None else f"not compiled: {part.piece.reason}"
            lines += _with_drops(part.lines, dying, comment)
        if len(lines) <= MAX_LINES and tuple(lines) == body.lines:
            return original
        called = {line.called for line in lines}
        bindings = {n: v for n, v in bindings.items() if n != "laid_out" or n in called}
        rewritten = Body(body.inputs, tuple(lines), body.outputs, boxed=bool(self.dying))
        return Function.straight(self.name, rewritten, bindings, original.checks)


def _names_read(lines: Sequence[CodeLine]) -> set[str]:
    return {name for line in lines for name in line.reads}


def _piece_call(
    part: _Part, made: CompiledPiece, dying: set[str], bindings: dict[str, object]
) -> CodeLine:
    """Return the line that calls a compiled piece, and bind the piece. It gets the last reference
    to the values that die in it."""
    called = f"compiled_{sum(isinstance(value, CompiledPiece) for value in bindings.values())}"
    assert called not in bindings, "a name that is free"
    bindings[called] = made
    targets = "".join(f"{name}, " for name in part.outputs)
    boxed = f"[{', '.join(part.inputs)}]"
    dropped = {name for line in part.lines for name in line.drops} | dying
    gone = [name for name in part.inputs if name in dropped]
    text = f"{targets}= {called}({boxed})"
    if gone:
        text = f"given = {boxed}; del {', '.join(gone)}; {targets}= {called}(given)"
    lines = dict.fromkeys(line.source for line in part.lines if line.source is not None)
    return CodeLine(text, part.outputs, part.inputs, called, "", (), "", next(iter(lines), None))


def _with_drops(lines: Sequence[CodeLine], dying: set[str], comment: str) -> Iterator[CodeLine]:
    """Yield the lines; inputs in ``dying`` are dropped after their last use in them."""
    last = {name: at for at, line in enumerate(lines) for name in line.reads if name in dying}
    for at, line in enumerate(lines):
        dropped = tuple(name for name, place in last.items() if place == at)
        line = line._replace(drops=(*line.drops, *dropped)) if dropped else line
        yield line._replace(comment=comment) if comment and not at and not line.comment else line


class _Rewriter:
    """Rewrites the functions of a program; functions that differ only in names, once."""

    def __init__(self, functions: Sequence[tuple[str, Function]], device: torch.device) -> None:
        self.functions: dict[str, Function] = dict(functions)
        self.device = device
        self.by_key: dict[object, _Rewritten] = {}
        self.pieces: dict[object, _Piece] = {}
        self._keys: dict[str, object] = {}  # by name of a function
        self._names: set[str] = set()  # of rewritten functions

    def rewritten(
        self, name: str, inputs: Sequence[object], dying: Sequence[bool]
    ) -> tuple[str, list[object] | None]:
        """Return the name of the function to call in place of ``name`` for these fake inputs, and
        its fake results, None if they are unknown."""
        function = self.functions[name]
        if name not in self._keys:
            self._keys[name] = (_code_key(function), function.lines)
        key = (self._keys[name], tuple(map(_meta_key, inputs)), tuple(dying))
        if key not in self.by_key:
            unique, number = name, 0
            while unique in self._names or (number and unique in self.functions):
                unique, number = f"{name}_v{number}", number + 1
            self._names.add(unique)
            self.by_key[key] = self._divided(replace(function, name=unique), inputs, dying)
        return self.by_key[key].name, self.by_key[key].results

    def _divided(
        self, function: Function, inputs: Sequence[object], dying: Sequence[bool]
    ) -> _Rewritten:
        body = function.body
        if body is None:
            results = _results_of_wrapped(function, inputs)
            return _Rewritten(original=function, parts=(), results=results, dying=frozenset())
        values = dict(zip(body.inputs, inputs, strict=True))
        bindings = dict(function.bindings)
        shapes_only = {name: _for_shapes(value) for name, value in bindings.items()}
        compiles = [self._run_line(line, bindings, shapes_only, values) for line in body.lines]
        for at in reversed(range(len(compiles) - 1)):  # the next line reads the record
            compiles[at] &= compiles[at + 1] or not body.lines[at].called.startswith(_RECORDING)
        parts: list[_Part] = []
        for start, end in _runs(compiles):
            lines = body.lines[start:end]
            later = {*body.outputs, *_names_read(body.lines[end:])}
            part = self._part(function, lines, values, later) if compiles[start] else None
            parts.append(part or _Part(tuple(_with_layouts(lines, bindings, values))))
        return _Rewritten(
            original=function,
            parts=tuple(parts),
            results=[values.get(name, _UNKNOWN) for name in body.outputs],
            dying=frozenset(n for n, dies in zip(body.inputs, dying, strict=True) if dies),
        )

    def _run_line(
        self,
        line: CodeLine,
        bindings: Mapping[str, object],
        shapes_only: Mapping[str, object],
        values: dict[str, object],
    ) -> bool:
        """Run a line on fake values, and return whether it can be compiled."""
        read = [values.get(name, _UNKNOWN) for name in line.reads]
        names = compile(line.text, "", "exec").co_names
        bound = [bindings[name] for name in names if name in bindings]
        compiles = all(isinstance(value, FakeTensor) for value in read)
        compiles = compiles and _compiles(line, bound, self.device)
        if compiles:
            try:
                self._exec(line, bindings, values)
                return True
            except Exception:  # such as a read of a value
                pass
        values.update(dict.fromkeys(line.makes, _UNKNOWN))
        if line.makes and _UNKNOWN not in read:
            with suppress(Exception):
                self._exec(line, shapes_only, values)
        return False

    def _exec(
        self, line: CodeLine, bindings: Mapping[str, object], values: dict[str, object]
    ) -> None:
        """Execute a line on fake values. Raises an exception if the line reads a value."""
        try:
            exec(line.text, dict(bindings), values)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise
        except Exception:
            if self.device.type == "cpu":
                raise
            # without a GPU here some functions of torch refuse its tensors, fake ones too
            on_cpu = {name: _moved(values[name], _CPU) for name in line.reads}
            exec(
                line.text, {n: _CPU if v == self.device else v for n, v in bindings.items()}, on_cpu
            )
            values.update((name, _moved(on_cpu[name], self.device)) for name in line.makes)

    def _part(
        self,
        function: Function,
        lines: Sequence[CodeLine],
        values: Mapping[str, object],
        later: set[str],
    ) -> _Part | None:
        """Return the part of these lines as a piece, or None if it is too short."""
        bindings = dict(function.bindings)
        ops = [line for line in lines if _computes(line, bindings)]
        made = dict.fromkeys(name for line in lines for name in line.makes)
        outputs = tuple(name for name in made if name in later)
        reads = dict.fromkeys(name for line in lines for name in line.reads)
        read = tuple(name for name in reads if name not in made)
        if len(ops) < MIN_OPS or not outputs or not read:
            return None
        body = Body(read, tuple(line._replace(drops=()) for line in lines), outputs)
        inside = Function.straight(function.name, body, bindings)
        layouts = [tuple(_layout(values[n]) for n in names) for names in (read, outputs)]
        key = (_code_key(inside), *layouts)
        if key not in self.pieces:
            names = list(dict.fromkeys(_op_name(line, bindings) for line in ops))
            name = f"compiled({', '.join(names[:4])}{', ...' if names[4:] else ''})"
            source = PieceSource(function=inside, inputs=layouts[0], outputs=layouts[1])
            self.pieces[key] = _Piece(name, source)
        return _Part(tuple(lines), self.pieces[key], read, outputs)


_CPU = torch.device("cpu")


def _moved(value: object, device: torch.device) -> object:
    return Layout.of(value).zeros(device) if isinstance(value, Tensor) else value


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of equal flags."""
    start = 0
    for end in range(1, len(flags) + 1):
        if end == len(flags) or flags[end] != flags[start]:
            yield start, end
            start = end


# -- one line --------------------------------------------------------------------------------------


def _compiles(line: CodeLine, bound: Sequence[object], device: torch.device) -> bool:
    """Whether torch's compiler may compile a line. ``bound``: the globals that the line uses."""
    if not line.called:  # an operator, a method or an alias
        return "_(" not in line.text or line.in_place
    return all(_may_be_compiled(value, device) for value in bound)


def _may_be_compiled(value: object, device: torch.device) -> bool:
    module = getattr(value, "__module__", None) or "torch"  # torch's own functions have none
    if isinstance(value, Tensor) or module in READING_MODULES:
        return False
    op = overload_of(value)
    if op is not None:
        # on a CPU, ops that check indices keep their errors
        reads = device.type != "cuda" and op in CHECKS
        random = torch.Tag.nondeterministic_seeded in op.tags
        return op.namespace in _COMPILED_NAMESPACES and not (
            op._schema.is_mutable or random or reads
        )
    if not callable(value) or isinstance(value, type | torch.dtype):
        return True
    return f"{module}.".startswith(_COMPILED_MODULES) and not value.__name__.endswith("_")


def _with_layouts(
    lines: Sequence[CodeLine], bindings: Mapping[str, object], values: Mapping[str, object]
) -> Iterator[CodeLine]:
    """Yield the lines. After a call of a user's kernel or op a line gives its results the strides
    that the op declares, because compiled pieces are compiled for these strides."""
    for line in lines:
        yield line
        made = [values.get(name) for name in line.makes]
        tensors = [x for x in made if isinstance(x, Tensor)]
        if _is_users(bindings.get(line.called)) and tensors and len(tensors) == len(made):
            targets = "".join(f"{name}, " for name in line.makes)
            text = f"{targets}= laid_out(({targets}), {[x.stride() for x in tensors]})"
            yield CodeLine(text, line.makes, line.makes, "laid_out", source=line.source)


def _is_users(value: object) -> bool:
    if isinstance(value, OpOverload):
        return value.namespace not in _COMPILED_NAMESPACES
    module: str = getattr(value, "__module__", None) or "torch"
    return callable(value) and not f"{module}.".startswith(("dtensor.", "torch"))


def laid_out(values: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the values with these strides, copied if they have others."""
    return [
        x
        if x.stride() == stride
        else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
        for x, stride in zip(values, strides, strict=True)
    ]


def _for_shapes(value: object) -> object:
    """Return the op that a bound function runs, which has an implementation for fake tensors. Its
    packet chooses the overload, because overloads share functions."""
    op = overload_of(value) or op_of_kernel(value)
    return value if op is None else op.overloadpacket


def _computes(line: CodeLine, bindings: Mapping[str, object]) -> bool:
    """Whether a line is more than a view, a copy or an alias."""
    if not line.called:
        return line.in_place
    return bool(line.makes) and not is_view(overload_of(bindings.get(line.called)))


def _op_name(line: CodeLine, bindings: Mapping[str, object]) -> str:
    op = overload_of(bindings.get(line.called))
    name = line.called if op is None else op._schema.name.partition("::")[2]
    return name or line.op or "copy"


def _results_of_wrapped(function: Function, inputs: Sequence[object]) -> list[object] | None:
    """Return the results of a function without known lines if it is one of the project's, and takes
    no unknown value; else None."""
    wrapped = dict(function.bindings).get("wrapped")
    module: str = getattr(wrapped, "__module__", None) or ""
    if _UNKNOWN not in inputs and module.startswith("dtensor.runtime."):
        with suppress(Exception):
            return list(function.build()(*inputs))
    return None


# -- keys ------------------------------------------------------------------------------------------


def _code_key(function: Function) -> tuple[object, ...]:
    """Return a key that is equal for functions that differ only in the names of their values. Their
    bytecode is equal, because it refers to local variables by number."""
    built: Built = function.build()
    built = getattr(built, "boxed", built)
    if not isinstance(built, FunctionType):
        return (function.name,)
    code, bound = built.__code__, dict(function.bindings)
    called = (_bound_key(bound[name]) if name in bound else name for name in code.co_names)
    return (code.co_code, repr(code.co_consts), *called, function.checks)


def _bound_key(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        with suppress(TypeError):
            hash(value)
            return value
    return plain_key(value)


def _layout(value: object) -> Layout:
    assert isinstance(value, Tensor), "a piece has tensors alone"
    return Layout.of(value)


def _meta_key(value: object) -> object:
    return Layout.of(value) if isinstance(value, Tensor) else value
