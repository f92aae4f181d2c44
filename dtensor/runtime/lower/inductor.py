"""Local code by torch's compiler: chains of elementwise ops, norms and sums as one kernel each.

    compiled = fused(program, fed)        # what `launch(local="inductor")` runs

    h = mm(x, w)                          h = mm(x, w)
    b = add(h, bias)                      g, = fused_0(h, bias)
    g = gelu(b); del b                    y = mm(g, v)
    y = mm(g, v)

`fed` are the shapes that each rank is given. Each rank's list is run once on fake tensors, which
tells the shapes and strides of every line; a run of lines with two kernels or more, none of them a
product, is compiled once on the controller, and once for equal ones. Its artifact goes to the ranks
within the program, and each loads the same one, so that all modes and backends have the same bits;
between this and generated code they agree to a tolerance. The first compilation of a kernel takes
seconds, later ones are found in torch's cache on disk. A host without that cache compiles the
artifact's sources, so each host needs a C++ compiler.

Invariants: a kernel is called with the strides it was made for, or raises. Everything else of a
program stays: instructions, messages, what lives how long. Not here: GPUs, programs with
`detect_nan`, whose checks are of single ops.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dtensor.daft import (
    Call,
    Collective,
    Free,
    Function,
    Instruction,
    Program,
    RankProgram,
    Recv,
    Vote,
)
from dtensor.daft.ir.instructions import WORD, Buffer
from dtensor.daft.run.stamps import body_of
from dtensor.private_torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    compiled_artifact,
    standalone_compile,
    unset_fake_temporarily,
)
from dtensor.runtime.lower.code import tuple_text
from dtensor.runtime.lower.lines import overload_of, parts_of

_VIEWS = frozenset(
    """expand permute reshape select slice split split_with_sizes squeeze t transpose unsqueeze
    view""".split()  # noqa: SIM905
)
_SUMS = frozenset(
    """_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data amax amin
    gelu_backward mean native_group_norm native_layer_norm native_layer_norm_backward
    sigmoid_backward silu_backward sum tanh_backward threshold_backward
    var_mean""".split()  # noqa: SIM905
)
"""Ops that are not elementwise, or not known to be, and fuse with those that are."""
LEAST_KERNELS = 2
"""Of a run of lines that is worth a kernel of its own."""

_LINE = re.compile(r"([\w, ]+) = (\w+)\(")
_NAME = re.compile(r"[A-Za-z_]\w*")


def fused(program: Program, fed: Sequence[Mapping[str, object]]) -> Program:
    """The program with its chains compiled. ``fed``: by rank, its inputs and state: of a tensor its
    `Buffer`, of anything else the value."""
    maker = _ChainMaker(dict(program.functions))
    ranks: list[RankProgram] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for own, given in zip(program.ranks, fed, strict=True):
            walk = _FakeRun(maker, mode, given)
            ranks.append(replace(own, instructions=tuple(map(walk.step, own.instructions))))
    called = {i.fn for own in ranks for i in own.instructions if isinstance(i, Call)}
    functions = tuple((name, fn) for name, fn in maker.functions.items() if name in called)
    return replace(program, ranks=tuple(ranks), functions=functions)


# -- what ranks load -------------------------------------------------------------------------------

_loaded: dict[str, Callable[..., Any]] = {}


class FusedChain:
    """A compiled chain, as bytes and loaded. ``name``: the ops it stands for."""

    def __init__(self, name: str, data: bytes) -> None:
        self.__name__ = name
        self.data = data
        key = hashlib.sha256(data).hexdigest()
        if key not in _loaded:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "artifact"
                path.write_bytes(data)
                _loaded[key] = compiled_artifact().load(path=str(path), format="binary")
        self._run = _loaded[key]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._run(*tensors))

    def __reduce__(self) -> tuple[object, ...]:
        return FusedChain, (self.__name__, self.data)


# -- shapes and strides of each line ---------------------------------------------------------------


class _Unknown:
    """What is no tensor of a known shape: an optimizer, and what is made of it."""


_UNKNOWN = _Unknown()


class _FakeRun:
    """One rank's list, in thought."""

    def __init__(
        self, maker: _ChainMaker, mode: FakeTensorMode, given: Mapping[str, object]
    ) -> None:
        self.maker, self.mode = maker, mode
        self.table: dict[str, object] = {name: self._fake(value) for name, value in given.items()}

    def _fake(self, value: object) -> object:
        """Contiguous, as what a rank is given and what it receives."""
        if isinstance(value, Buffer):
            with self.mode:
                return torch.empty(value.shape, dtype=value.dtype)
        return value

    def step(self, item: Instruction) -> Instruction:
        """The instruction, of a call with the function that it calls now."""
        match item:
            case Call():
                return self._call(item)
            case Recv(value=value, buffer=buffer):
                self.table[value] = self._fake(buffer)
            case Collective(outputs=outputs, out_buffers=buffers):
                self.table.update(zip(outputs, map(self._fake, buffers), strict=True))
            case Vote(value=value):
                self.table[value] = self._fake(WORD)
            case Free(values=values):
                for value in values:
                    self.table.pop(value, None)
            case _:
                pass
        return item

    def _call(self, call: Call) -> Call:
        function = self.maker.functions[call.fn]
        given = [self.table.get(name, _UNKNOWN) for name in call.inputs]
        if not body_of(function) or any(value is _UNKNOWN for value in given):
            self.table.update(dict.fromkeys(call.outputs, _UNKNOWN))
            return call
        try:
            name, made = self.maker.variant(call.fn, given)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.table.update(dict.fromkeys(call.outputs, _UNKNOWN))
            return call
        self.table.update(zip(call.outputs, made, strict=True))
        return replace(call, fn=name)


@dataclass(slots=True)
class _Statement:
    """``text``: without what it deletes; ``op``: of a call of torch's op."""

    text: str
    deleted: tuple[str, ...]
    comment: str
    made: tuple[str, ...]
    op: OpOverload | None
    source: str | None

    @property
    def whole(self) -> str:
        gone = f"; del {', '.join(self.deleted)}" if self.deleted else ""
        return self.text + gone + (f"  # {self.comment}" if self.comment else "")

    @property
    def read(self) -> list[str]:
        return _NAME.findall(self.text.partition(" = ")[2])

    @property
    def fuses(self) -> bool:
        return self.op is not None and (self.is_kernel or _short(self.op) in _VIEWS)

    @property
    def is_kernel(self) -> bool:
        if self.op is None or self.op.namespace != "aten" or self.op._schema.is_mutable:
            return False
        if torch.Tag.nondeterministic_seeded in self.op.tags:
            return False
        return torch.Tag.pointwise in self.op.tags or _short(self.op) in _SUMS


def _short(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


def _lines(function: Function) -> list[_Statement]:
    bindings = dict(function.bindings)
    found: list[_Statement] = []
    for number, line in enumerate(body_of(function), 1):
        text, deleted, comment = parts_of(line)
        matched = _LINE.match(text)
        made = tuple(_NAME.findall(matched[1])) if matched else ()
        found.append(
            _Statement(
                text=text,
                deleted=deleted,
                comment=comment,
                made=made,
                op=overload_of(bindings.get(matched[2])) if matched else None,
                source=function.lines[number] if number < len(function.lines) else None,
            )
        )
    return found


def _runs(lines: Sequence[_Statement]) -> Iterator[tuple[int, int]]:
    """From where to where lines are that fuse, and those that do not one by one."""
    at = 0
    while at < len(lines):
        end = at + 1
        while lines[at].fuses and end < len(lines) and lines[end].fuses:
            end += 1
        yield at, end
        at = end


@dataclass(slots=True)
class _ChainMaker:
    """``functions``: those of the program, and those that were made of them."""

    functions: dict[str, Function]
    variants: dict[tuple[object, ...], tuple[str, list[object]]] = field(default_factory=dict)
    artifacts: dict[tuple[object, ...], tuple[FusedChain, list[Any]]] = field(default_factory=dict)

    def variant(self, name: str, given: Sequence[object]) -> tuple[str, list[object]]:
        """The function for such inputs, and what it makes of them."""
        key = (name, *map(_meta, given))
        if key not in self.variants:
            function = self.functions[name]
            values = dict(zip(_parameters(function), given, strict=True))
            built, made = self._rewritten(function, values)
            variant, number = name, 0
            while built is not None and variant in self.functions:
                variant, number = f"{name}_fused{number}", number + 1
            if built is not None:
                self.functions[variant] = replace(built, name=variant)
            self.variants[key] = variant, made
        return self.variants[key]

    def _rewritten(
        self, function: Function, values: dict[str, object]
    ) -> tuple[Function | None, list[object]]:
        """With a call in the place of each run of lines, None where there is none; and what it
        makes. ``values``: what it is given, by name."""
        lines = _lines(function)
        returned = _NAME.findall(function.source.splitlines()[-1].removeprefix("    return"))
        new: list[tuple[str, str | None]] = []
        bindings = dict(function.bindings)
        for at, end in _runs(lines):
            run = lines[at:end]
            inside = dict.fromkeys(name for line in run for name in line.made if name != "_")
            later = {name for line in lines[end:] for name in _NAME.findall(line.text)}
            outputs = [name for name in inside if name in later or name in returned]
            read = dict.fromkeys(name for line in run for name in line.read if name in values)
            # numbers are fed anew at each run, and a kernel has them written in
            tensors = [name for name in read if isinstance(values[name], FakeTensor)]
            kernels = sum(line.is_kernel for line in run)
            if kernels < LEAST_KERNELS or not outputs or len(tensors) < len(read):
                for line in run:
                    exec(line.text, dict(function.bindings), values)
                    new.append((line.whole, line.source))
                continue
            number = len(bindings) - len(function.bindings)
            called = f"fused_{number}"
            assert called not in bindings and called not in values, "a name that is free"
            given = [values[name] for name in tensors]
            bindings[called], made = self._compiled(function, run, tensors, given, outputs)
            values.update(zip(outputs, made, strict=True))
            targets = "".join(f"{name}, " for name in outputs)
            gone = [n for line in run for n in line.deleted if n not in inside or n in outputs]
            tail = f"; del {', '.join(gone)}" if gone else ""
            new.append((f"{targets}= {called}({', '.join(tensors)}){tail}", run[0].source))
        made = [values[name] for name in returned]
        if len(bindings) == len(function.bindings):
            return None, made
        head = function.source.splitlines()[0]
        body = [head, *(f"    {text}" for text, _ in new), f"    return {tuple_text(returned)}"]
        built = replace(
            function,
            source="\n".join(body) + "\n",
            bindings=tuple(sorted(bindings.items(), key=lambda item: item[0])),
            lines=(None, *(source for _, source in new), None),
        )
        return built, made

    def _compiled(
        self,
        function: Function,
        run: Sequence[_Statement],
        tensors: Sequence[str],
        given: Sequence[Any],
        outputs: Sequence[str],
    ) -> tuple[FusedChain, list[Any]]:
        """What is called for a run of lines, and what it makes."""
        names = [*tensors, *dict.fromkeys(name for line in run for name in line.made)]
        plain = {name: f"v{number}" for number, name in enumerate(names)}
        text = "\n".join(line.text for line in run)
        bound = [value for name, value in function.bindings if name in _NAME.findall(text)]
        key = (
            _NAME.sub(lambda found: plain.get(found[0], found[0]), text),
            tuple(plain[name] for name in outputs),
            tuple(map(_meta, given)),
            tuple(map(id, bound)),
        )
        if key not in self.artifacts:
            source = [f"def forward({', '.join(tensors)}):", *(f"    {x.text}" for x in run)]
            whole = "\n".join([*source, f"    return {tuple_text(outputs)}"])
            chain = replace(function, source=whole + "\n").build()
            ops = ", ".join(_short(line.op) for line in run if line.is_kernel and line.op)
            compiled = FusedChain(f"fused({ops})", _artifact(chain, given))
            self.artifacts[key] = compiled, _made(compiled, given)
        return self.artifacts[key]


def _made(compiled: FusedChain, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What it gives, on fake tensors: run once, as its strides may be others than the lines'."""
    with unset_fake_temporarily():
        real = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in given]
        found = [(x.shape, x.stride(), x.dtype) for x in compiled(*real)]
    return [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in found]


def _artifact(chain: Callable[..., Any], given: Sequence[Any]) -> bytes:
    """Of a chain compiled for tensors of these shapes and strides."""
    from torch.fx.experimental.proxy_tensor import make_fx

    compile_alone, config = standalone_compile()
    graph = make_fx(chain)(*given)
    # one thread: how many there are changes the bits of a sum
    with config.patch({"cpp.threads": 1}), tempfile.TemporaryDirectory() as folder:
        made: Any = compile_alone(
            graph, list(given), dynamic_shapes="from_example_inputs", options={}
        )
        path = Path(folder) / "artifact"
        made.save(path=str(path), format="binary")
        return path.read_bytes()


def _parameters(function: Function) -> list[str]:
    return _NAME.findall(function.source.splitlines()[0].partition("(")[2])


def _meta(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset()
    return value
