"""Local code by torch's compiler: chains of elementwise ops, norms and sums as one kernel each.

    compiled = fused(program, fed)        # the program that `launch(local="inductor")` runs

    h = mm(x, w)                          h = mm(x, w)
    b = add(h, bias)                      g, = fused_0(h, bias)
    g = gelu(b); del b                    y = mm(g, v)
    y = mm(g, v)

`fed` are the shapes of each rank's inputs. Each rank's list runs once on fake tensors, for the
shapes and strides of every line; a run of lines with two kernels or more, none of them a product,
is compiled once on the controller, and once for equal ones. Its artifact goes to the ranks within
the program, and each loads the same one, so that all modes and backends have the same bits; between
this and generated code they agree to a tolerance. The first compilation of a kernel takes seconds,
later ones are found in torch's cache on disk. A host without that cache compiles the artifact's
sources, so each host needs a C++ compiler.

Invariants: a kernel is called with the strides it was made for, or raises. Everything else of a
program stays: instructions, messages, live ranges. Not here: GPUs, programs with `detect_nan`,
which checks single ops.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
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
from dtensor.daft.ir.code import Body, CodeLine
from dtensor.daft.ir.instructions import WORD, Buffer
from dtensor.daft.ir.program import Built
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
from dtensor.runtime.lower.code import overload_of

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
"""Number of kernels in a run of lines that makes a fused one worthwhile."""


def fused(program: Program, fed: Sequence[Mapping[str, object]]) -> Program:
    """The program with its chains compiled. ``fed``: by rank, its inputs and state: a `Buffer` for
    a tensor, else the value."""
    maker = _ChainMaker(dict(program.functions))
    ranks: list[RankProgram] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for rank_program, given in zip(program.ranks, fed, strict=True):
            walk = _FakeRun(maker, mode, given)
            ranks.append(
                replace(rank_program, instructions=tuple(map(walk.step, rank_program.instructions)))
            )
    called = {
        i.fn for rank_program in ranks for i in rank_program.instructions if isinstance(i, Call)
    }
    functions = tuple((name, fn) for name, fn in maker.functions.items() if name in called)
    return replace(program, ranks=tuple(ranks), functions=functions)


# -- the chains that ranks load
# -------------------------------------------------------------------------------

_loaded: dict[str, Callable[..., Any]] = {}


class FusedChain:
    """A compiled chain, as bytes and loaded. ``name``: the ops that it replaces."""

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
    """A value other than a tensor of a known shape: an optimizer, and results of it."""


_UNKNOWN = _Unknown()


class _FakeRun:
    """A run of one rank's list on fake tensors."""

    def __init__(
        self, maker: _ChainMaker, mode: FakeTensorMode, given: Mapping[str, object]
    ) -> None:
        self.maker, self.mode = maker, mode
        self.table: dict[str, object] = {name: self._fake(value) for name, value in given.items()}

    def _fake(self, value: object) -> object:
        """A contiguous fake tensor, like the inputs and the messages of a rank."""
        if isinstance(value, Buffer):
            with self.mode:
                return torch.empty(value.shape, dtype=value.dtype)
        return value

    def step(self, item: Instruction) -> Instruction:
        """The instruction; a call gets its new function."""
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
        if not function.statements or any(value is _UNKNOWN for value in given):
            self.table.update(dict.fromkeys(call.outputs, _UNKNOWN))
            return call
        try:
            name, results = self.maker.variant(call.fn, given)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.table.update(dict.fromkeys(call.outputs, _UNKNOWN))
            return call
        self.table.update(zip(call.outputs, results, strict=True))
        return replace(call, fn=name)


def _short(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


def _is_kernel(op: OpOverload) -> bool:
    if op.namespace != "aten" or op._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return torch.Tag.pointwise in op.tags or _short(op) in _SUMS


def _fuses(op: OpOverload | None) -> bool:
    return op is not None and (_is_kernel(op) or _short(op) in _VIEWS)


def _runs(ops: Sequence[OpOverload | None]) -> Iterator[tuple[int, int]]:
    """The ranges of lines that fuse, and single lines that do not."""
    at = 0
    while at < len(ops):
        end = at + 1
        while _fuses(ops[at]) and end < len(ops) and _fuses(ops[end]):
            end += 1
        yield at, end
        at = end


@dataclass(slots=True)
class _ChainMaker:
    """``functions``: those of the program, and their fused variants."""

    functions: dict[str, Function]
    variants: dict[tuple[object, ...], tuple[str, list[object]]] = field(default_factory=dict)
    artifacts: dict[tuple[object, ...], tuple[FusedChain, list[Any]]] = field(default_factory=dict)

    def variant(self, name: str, given: Sequence[object]) -> tuple[str, list[object]]:
        """The function for such inputs, and its results."""
        key = (name, *map(_meta, given))
        if key not in self.variants:
            function = self.functions[name]
            assert function.body is not None, "a function with known lines"
            values = dict(zip(function.body.inputs, given, strict=True))
            built, results = self._rewritten(function, function.body, values)
            variant, number = name, 0
            while built is not None and variant in self.functions:
                variant, number = f"{name}_fused{number}", number + 1
            if built is not None:
                self.functions[variant] = replace(built, name=variant)
            self.variants[key] = variant, results
        return self.variants[key]

    def _rewritten(
        self, function: Function, body: Body, values: dict[str, object]
    ) -> tuple[Function | None, list[object]]:
        """The function with a call in place of each run of lines, None if there is none; and its
        results. ``values``: its inputs, by name."""
        bindings = dict(function.bindings)
        ops = [overload_of(bindings.get(x.called)) if x.makes else None for x in body.lines]
        new: list[CodeLine] = []
        for at, end in _runs(ops):
            run = body.lines[at:end]
            inside = dict.fromkeys(name for line in run for name in line.makes)
            later = {*body.outputs, *(name for line in body.lines[end:] for name in line.reads)}
            outputs = tuple(name for name in inside if name in later)
            read = dict.fromkeys(name for line in run for name in line.reads if name in values)
            # numbers are new inputs at each run, and a kernel would have them as constants
            tensors = tuple(name for name in read if isinstance(values[name], FakeTensor))
            kernels = [op for op in ops[at:end] if op is not None and _is_kernel(op)]
            if len(kernels) < LEAST_KERNELS or not outputs or len(tensors) < len(read):
                for line in run:
                    exec(line.text, dict(function.bindings), values)
                new += run
                continue
            number = len(bindings) - len(function.bindings)
            called = f"fused_{number}"
            assert called not in bindings and called not in values, "a name that is free"
            given = [values[name] for name in tensors]
            chain = Body(tensors, tuple(line._replace(drops=()) for line in run), outputs)
            alone = Function.straight(function.name, chain, dict(function.bindings)).build()
            bindings[called], results = self._compiled(alone, given, kernels)
            values.update(zip(outputs, results, strict=True))
            text = f"{''.join(f'{name}, ' for name in outputs)}= {called}({', '.join(tensors)})"
            gone = tuple(n for line in run for n in line.drops if n not in inside or n in outputs)
            new.append(CodeLine(text, outputs, tensors, called, "", gone, "", run[0].source))
        results = [values[name] for name in body.outputs]
        if len(bindings) == len(function.bindings):
            return None, results
        rewritten = Body(body.inputs, tuple(new), body.outputs)
        return Function.straight(function.name, rewritten, bindings), results

    def _compiled(
        self, chain: Built, given: Sequence[Any], kernels: Sequence[OpOverload]
    ) -> tuple[FusedChain, list[Any]]:
        """The compiled chain for a run of lines, and its results."""
        key = (*_equal_but_for_names(chain), *map(_meta, given))
        if key not in self.artifacts:
            ops = ", ".join(map(_short, kernels))
            compiled = FusedChain(f"fused({ops})", _artifact(chain, given))
            self.artifacts[key] = compiled, _made(compiled, given)
        return self.artifacts[key]


def _made(compiled: FusedChain, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Its results on fake tensors: run once, as its strides may differ from the lines'."""
    with unset_fake_temporarily():
        real = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in given]
        layouts = [(x.shape, x.stride(), x.dtype) for x in compiled(*real)]
    return [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in layouts]


def _artifact(chain: Callable[..., Any], given: Sequence[Any]) -> bytes:
    """The artifact of a chain compiled for tensors of these shapes and strides."""
    from torch.fx.experimental.proxy_tensor import make_fx

    compile_alone, config = standalone_compile()
    graph = make_fx(chain)(*given)
    # one thread: how many there are changes the bits of a sum
    with config.patch({"cpp.threads": 1}), tempfile.TemporaryDirectory() as folder:
        artifact: Any = compile_alone(
            graph, list(given), dynamic_shapes="from_example_inputs", options={}
        )
        path = Path(folder) / "artifact"
        artifact.save(path=str(path), format="binary")
        return path.read_bytes()


def _equal_but_for_names(chain: Built) -> tuple[object, ...]:
    """A key that is equal for functions that do the same under other names of values: Python
    numbers these, and names the called functions and the constants."""
    assert isinstance(chain, FunctionType), "the result of `Function.build`"
    code, bound = chain.__code__, chain.__globals__
    called = (id(bound[name]) if name in bound else name for name in code.co_names)
    return (code.co_code, repr(code.co_consts), *called)


def _meta(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset()
    return value
