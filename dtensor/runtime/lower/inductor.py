"""Fusion of local code by torch's compiler, for `launch(local="inductor")` on CPUs.

    compiled = fused(program, inputs_by_rank)        # inputs are given by their shapes

    h = mm(x, w)                          h = mm(x, w)
    b = add(h, bias)                      g, = fused_0(h, bias)
    g = gelu(b); del b                    y = mm(g, v)
    y = mm(g, v)

Each rank's list runs once on fake tensors. A chain of lines with two kernels or more, none of them
a product, is compiled on the controller; ranks load the artifact, so all have the same bits. A host
without torch's disk cache compiles the artifact's C++ sources.
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

_VIEW_OPS = frozenset(
    """expand permute reshape select slice split split_with_sizes squeeze t transpose unsqueeze
    view""".split()  # noqa: SIM905
)
_UNTAGGED_OPS = frozenset(
    """_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data amax amin
    gelu_backward mean native_group_norm native_layer_norm native_layer_norm_backward
    sigmoid_backward silu_backward sum tanh_backward threshold_backward
    var_mean""".split()  # noqa: SIM905
)
"""Ops without torch's tag for elementwise ops that fuse with elementwise ops."""
MIN_KERNELS = 2
"""The least number of kernels in a chain of lines that is compiled."""


def fused(program: Program, inputs_by_rank: Sequence[Mapping[str, object]]) -> Program:
    """Return the program with its chains compiled. ``inputs_by_rank``: for each rank, its inputs
    and state by name, a `Buffer` for a tensor, else the value."""
    compiler = _ChainCompiler(dict(program.functions))
    ranks: list[RankProgram] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for rank_program, inputs in zip(program.ranks, inputs_by_rank, strict=True):
            fake_run = _FakeRun(compiler, mode, inputs)
            ranks.append(
                replace(
                    rank_program, instructions=tuple(map(fake_run.run, rank_program.instructions))
                )
            )
    called = {
        i.fn for rank_program in ranks for i in rank_program.instructions if isinstance(i, Call)
    }
    functions = tuple((name, fn) for name, fn in compiler.functions.items() if name in called)
    return replace(program, ranks=tuple(ranks), functions=functions)


# -- the chains that ranks load --------------------------------------------------------------------

_loaded: dict[str, Callable[..., Any]] = {}


class FusedChain:
    """A compiled chain; pickled as the ``data`` of its artifact. ``name``: the ops that it
    replaces. It raises if it is called with other strides than it was compiled for."""

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
    """A value that is no tensor of a known shape: an optimizer, or a result of an unknown value."""


_UNKNOWN = _Unknown()


class _FakeRun:
    """A run of one rank's instructions on fake tensors."""

    def __init__(
        self, compiler: _ChainCompiler, mode: FakeTensorMode, inputs: Mapping[str, object]
    ) -> None:
        self.compiler, self.mode = compiler, mode
        self.table: dict[str, object] = {name: self._fake(value) for name, value in inputs.items()}

    def _fake(self, value: object) -> object:
        """Return a contiguous fake tensor for a `Buffer`, as a rank's inputs and messages are. A
        bounded buffer has no shape before the run."""
        if isinstance(value, Buffer):
            if value.bounded:
                return _UNKNOWN
            with self.mode:
                return torch.empty(value.shape, dtype=value.dtype)
        return value

    def run(self, item: Instruction) -> Instruction:
        """Run an instruction, and return it; a Call gets the fused variant of its function."""
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
        function = self.compiler.functions[call.fn]
        inputs = [self.table.get(name, _UNKNOWN) for name in call.inputs]
        if not function.statements or any(value is _UNKNOWN for value in inputs):
            self.table.update(dict.fromkeys(call.outputs, _UNKNOWN))
            return call
        try:
            name, results = self.compiler.variant(call.fn, inputs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.table.update(dict.fromkeys(call.outputs, _UNKNOWN))
            return call
        self.table.update(zip(call.outputs, results, strict=True))
        return replace(call, fn=name)


def _op_name(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


def _is_kernel(op: OpOverload) -> bool:
    if op.namespace != "aten" or op._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return torch.Tag.pointwise in op.tags or _op_name(op) in _UNTAGGED_OPS


def _fuses(op: OpOverload | None) -> bool:
    return op is not None and (_is_kernel(op) or _op_name(op) in _VIEW_OPS)


def _runs(ops: Sequence[OpOverload | None]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive lines that fuse, and other lines one by one."""
    at = 0
    while at < len(ops):
        end = at + 1
        while _fuses(ops[at]) and end < len(ops) and _fuses(ops[end]):
            end += 1
        yield at, end
        at = end


@dataclass(slots=True)
class _ChainCompiler:
    """Compiles chains, once for equal ones. ``functions``: of the program, with their variants."""

    functions: dict[str, Function]
    variants: dict[tuple[object, ...], tuple[str, list[object]]] = field(default_factory=dict)
    artifacts: dict[tuple[object, ...], tuple[FusedChain, list[Any]]] = field(default_factory=dict)

    def variant(self, name: str, inputs: Sequence[object]) -> tuple[str, list[object]]:
        """Return the name of the variant for fake inputs, compiling it if it is new, and the fake
        results."""
        key = (name, *map(_meta_key, inputs))
        if key not in self.variants:
            function = self.functions[name]
            assert function.body is not None, "a function with known lines"
            values = dict(zip(function.body.inputs, inputs, strict=True))
            built, results = self._with_chains(function, function.body, values)
            variant, number = name, 0
            while built is not None and variant in self.functions:
                variant, number = f"{name}_fused{number}", number + 1
            if built is not None:
                self.functions[variant] = replace(built, name=variant)
            self.variants[key] = variant, results
        return self.variants[key]

    def _with_chains(
        self, function: Function, body: Body, values: dict[str, object]
    ) -> tuple[Function | None, list[object]]:
        """Return the function with each chain replaced by one call, or None if it has no chain, and
        its fake results. ``values``: its inputs by name."""
        bindings = dict(function.bindings)
        ops = [overload_of(bindings.get(x.called)) if x.makes else None for x in body.lines]
        lines: list[CodeLine] = []
        for at, end in _runs(ops):
            run = body.lines[at:end]
            inside = dict.fromkeys(name for line in run for name in line.makes)
            later = {*body.outputs, *(name for line in body.lines[end:] for name in line.reads)}
            outputs = tuple(name for name in inside if name in later)
            read = dict.fromkeys(name for line in run for name in line.reads if name in values)
            # numbers change at each run, and a compiled chain would have them as constants
            tensors = tuple(name for name in read if isinstance(values[name], FakeTensor))
            kernels = [op for op in ops[at:end] if op is not None and _is_kernel(op)]
            if len(kernels) < MIN_KERNELS or not outputs or len(tensors) < len(read):
                for line in run:
                    exec(line.text, dict(function.bindings), values)
                lines += run
                continue
            number = len(bindings) - len(function.bindings)
            called = f"fused_{number}"
            assert called not in bindings and called not in values, "a name that is free"
            inputs = [values[name] for name in tensors]
            chain = Body(tensors, tuple(line._replace(drops=()) for line in run), outputs)
            chain_function = Function.straight(
                function.name, chain, dict(function.bindings)
            ).build()
            bindings[called], results = self._compile(chain_function, inputs, kernels)
            values.update(zip(outputs, results, strict=True))
            text = f"{''.join(f'{name}, ' for name in outputs)}= {called}({', '.join(tensors)})"
            dropped = tuple(
                n for line in run for n in line.drops if n not in inside or n in outputs
            )
            lines.append(CodeLine(text, outputs, tensors, called, "", dropped, "", run[0].source))
        results = [values[name] for name in body.outputs]
        if len(bindings) == len(function.bindings):
            return None, results
        rewritten = Body(body.inputs, tuple(lines), body.outputs)
        return Function.straight(function.name, rewritten, bindings), results

    def _compile(
        self, chain: Built, inputs: Sequence[Any], kernels: Sequence[OpOverload]
    ) -> tuple[FusedChain, list[Any]]:
        """Return the compiled chain, and its results on fake tensors."""
        key = (*_equal_but_for_names(chain), *map(_meta_key, inputs))
        if key not in self.artifacts:
            ops = ", ".join(map(_op_name, kernels))
            compiled = FusedChain(f"fused({ops})", _artifact(chain, inputs))
            self.artifacts[key] = compiled, _fake_results(compiled, inputs)
        return self.artifacts[key]


def _fake_results(compiled: FusedChain, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of a compiled chain as fake tensors. The chain runs once to find them: its
    strides may differ from the strides of the lines that it replaces."""
    with unset_fake_temporarily():
        real = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
        layouts = [(x.shape, x.stride(), x.dtype) for x in compiled(*real)]
    return [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in layouts]


def _artifact(chain: Callable[..., Any], inputs: Sequence[Any]) -> bytes:
    """Return the artifact of a chain, compiled for tensors of these shapes and strides."""
    from torch.fx.experimental.proxy_tensor import make_fx

    compile_alone, config = standalone_compile()
    graph = make_fx(chain)(*inputs)
    # one thread, because the number of threads changes the bits of a sum
    with config.patch({"cpp.threads": 1}), tempfile.TemporaryDirectory() as folder:
        artifact: Any = compile_alone(
            graph, list(inputs), dynamic_shapes="from_example_inputs", options={}
        )
        path = Path(folder) / "artifact"
        artifact.save(path=str(path), format="binary")
        return path.read_bytes()


def _equal_but_for_names(chain: Built) -> tuple[object, ...]:
    """Return a key that is equal for functions that differ only in the names of their values. Their
    bytecode is equal, because it refers to local variables by number."""
    assert isinstance(chain, FunctionType), "the result of `Function.build`"
    code, bound = chain.__code__, chain.__globals__
    called = (id(bound[name]) if name in bound else name for name in code.co_names)
    return (code.co_code, repr(code.co_consts), *called)


def _meta_key(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset()
    return value
