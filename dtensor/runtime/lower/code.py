"""Local code: straight-line Python for one segment of one rank, as a daft Function.

    code = CodeBuilder(device)
    code.call(local_call, ("x", "w"), ("h",), "mlp.py:14: h = self.up(x)", result_types)
    code.function("mlp_F0", outputs=("h",))    # def forward(x, w): h = aten_mm_default(x, w) ...

Each line records the user's line; a value is dropped after its last use. A bias or a factor is
applied to a product in place if no other op reads the product. On CUDA, a product and its bias are
one `addmm`, as in eager torch. An op with a registered kernel on the device calls the kernel. Other
ops call the function that torch generates for them (`QUICK`), if there is one: 1 to 2 us per call
instead of the 3 to 5 us of an overload of `torch.ops`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtensor.daft import Function
from dtensor.daft.ir.code import Body, Check, CodeLine, tuple_text
from dtensor.kernels.registry import (
    Made,
    check_apart,
    check_kept,
    check_made,
    kernel_of,
    versions,
)
from dtensor.private_torch import OpOverload, gelu, silu
from dtensor.sharding.ops.call import OpCall, Operand, RunNumber, run_number_names
from dtensor.sharding.ops.library import PLAIN

_LITERAL_TYPES = (int, bool, str, type(None))
ADDING, COPIES = "accumulate", "copies"
"""The comments of lines that call no op."""


@dataclass(slots=True)
class CodeBuilder:
    """Collects the lines of one segment."""

    device: torch.device
    reserved: Collection[str] = ()  # names of values; a function with such a name would be hidden
    compiled: bool = False  # torch's compiler compiles the code
    inputs: list[str] = field(default_factory=list)  # values that are read before they are defined
    defined: dict[str, None] = field(default_factory=dict)
    lines: list[CodeLine] = field(default_factory=list)
    bindings: dict[str, object] = field(default_factory=dict)  # functions and constants, by name
    products: set[str] = field(default_factory=set)  # results of matrix products
    in_place: dict[int, tuple[str, CodeLine]] = field(default_factory=dict)
    # by number of a line: a product that it reads, and a variant that changes the product in place
    with_bias: dict[int, tuple[str, CodeLine]] = field(default_factory=dict)
    # by number of a line: the product of the line before, and one line that replaces both
    kernels: dict[str, None] = field(default_factory=dict)  # that are called: ``rms_norm [triton]``
    checks: list[Check] = field(default_factory=list)  # that the code makes on the device
    faults: str = ""  # the name of the row in which they record the first fault

    def __bool__(self) -> bool:
        return bool(self.lines)

    def call(
        self,
        call: OpCall,
        operands: Sequence[str],
        results: Sequence[str | None],
        source: str | None,
        result_types: Callable[[], Made],
    ) -> None:
        """Add the line ``results = call(operands)``, with the op's kernel on this device if it has
        one. A user's kernel is checked: it may not change its arguments, and must return the local
        shapes and dtypes that ``result_types`` returns for the named results."""
        args = [self.literal(a, operands) for a in call.args]
        args += [f"{k}={self.literal(v, operands)}" for k, v in call.kwargs]
        name = call.name if isinstance(call.target, OpOverload) else call.target.__name__
        kernel = kernel_of(call.target, self.device, compiled=self.compiled)
        called = quick(call, self.device) if kernel is None else kernel.function
        function = self.bind(re.sub(r"\W", "_", name), called)
        targets = ", ".join(name or "_" for name in results)
        comma = "," if call.multiple and len(results) == 1 else ""
        text = f"{targets}{comma} = {function}({', '.join(args)})"
        reads = (*operands, *run_number_names(call))
        named = [r for r in results if r is not None]
        if kernel is None and call.target in _PRODUCTS:
            self.products.update(named)
        method = _IN_PLACE_METHODS.get(call.target) if kernel is None else None
        if method is not None and _fits_first_operand(call) and operands[0] in self.products:
            changed, op = f"{targets} = {args[0]}.{method}({args[1]})", _op_name(call)
            line = CodeLine(
                *(changed, tuple(named), reads, "", op, (), f"{op} in place", source), in_place=True
            )
            self.in_place[len(self.lines)] = operands[0], line
            if self.device.type == "cuda":
                self._with_bias(call, operands, line)
        kernel_name = "" if kernel is None else kernel.name
        if kernel_name:
            self.kernels[f"{_op_name(call)} [{kernel_name}]"] = None
        if kernel is None or kernel.ours:
            self.line(
                text, reads, named, source, called=function, op=kernel_name, comment=kernel_name
            )
            return
        before = self.unused("before")
        self.apply(versions, [operands], [before], source=source)
        self.line(text, reads, named, source, called=function, op=kernel_name, comment=kernel_name)
        self.apply(check_kept, [operands, before], (), kernel.name, source=source)
        self.apply(check_made, [named], (), kernel.name, result_types(), source=source)
        if not is_view(call.target):
            self.apply(check_apart, [named, operands], (), kernel.name, source=source)

    def _with_bias(self, call: OpCall, operands: Sequence[str], added: CodeLine) -> None:
        """Record one addmm for the product and its bias, if the line before is the product."""
        before = self.lines[-1]
        made_by = overload_of(self.bindings.get(before.called))
        is_product = made_by is _aten.mm.default and before.makes == (operands[0],)
        if not is_product or call.target is not _aten.add.Tensor:
            return
        row = call.operands[1] if len(call.operands) == 2 else None
        if row is None or len(row.shape) != 1 or row.dtype != call.result.dtype:
            return
        function, op = self.bind("addmm", torch.addmm), "addmm"
        reads = (operands[1], *before.reads)
        text = f"{', '.join(added.makes)} = {function}({', '.join(reads)})"
        line = CodeLine(text, added.makes, reads, function, op, (), "", added.source)
        self.with_bias[len(self.lines)] = operands[0], line

    def is_unused(self, name: str) -> bool:
        return not (name in self.reserved or name in self.defined or name in self.bindings)

    def unused(self, name: str) -> str:
        """Return ``name``, with a number if it is used."""
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        return next(n for n in itertools.chain((name,), numbered) if self.is_unused(n))

    def add_check(self, check: Check) -> tuple[str, int]:
        """Add a check that the code makes on the device. Return the name of the row in which the
        code records its fault, and its number there."""
        self.checks.append(check)
        self.faults = self.faults or self.unused("faults")
        return self.faults, len(self.checks)

    def apply(
        self,
        function: Callable[..., object],
        operands: Sequence[str | Sequence[str]],
        results: Sequence[str],
        *literals: object,
        layout: object = None,
        is_list: bool = False,
        source: str | None = None,
    ) -> None:
        """Add the line ``results = function(*operands, *literals, layout)``.

        A sequence of operands becomes one tuple. ``layout`` becomes a bound constant.
        ``is_list``: the function returns a list, even of one result.
        """
        args = [o if isinstance(o, str) else tuple_text(o) for o in operands]
        args += [self.literal(v, ()) for v in literals]
        called = self.bind(function.__name__, function)
        args += [] if layout is None else [self.bind("layout", layout)]
        reads = [name for o in operands for name in ([o] if isinstance(o, str) else o)]
        targets = ", ".join(results) + "," * is_list
        text = f"{called}({', '.join(args)})"
        text = f"{targets} = {text}" if results else text
        self.line(text, reads, results, source, called=called)

    def line(
        self,
        text: str,
        reads: Sequence[str],
        makes: Sequence[str],
        source: str | None = None,
        *,
        called: str = "",
        op: str = "",
        comment: str = "",
    ) -> None:
        """Add a line; see `CodeLine`."""
        for name in reads:
            if name not in self.defined and name not in self.inputs:
                self.inputs.append(name)
        self.defined.update(dict.fromkeys(makes))
        self.lines.append(
            CodeLine(text, tuple(makes), tuple(reads), called, op, (), comment, source)
        )

    def user_lines(self) -> str | None:
        """Return the user's first and last lines. If an actor dies in the code, nothing else tells
        where."""
        lines = list(dict.fromkeys(line.source for line in self.lines if line.source is not None))
        return " ... ".join(lines if len(lines) < 2 else (lines[0], lines[-1])) or None

    def kernel_names(self) -> str:
        """Return the ops with a kernel, each with the kernel's name: ``rms_norm [triton]``."""
        return ", ".join(self.kernels)

    def bind(self, name: str, value: object) -> str:
        """Bind ``value`` to a global of the code and return the global's name: ``name``, with a
        number if it is taken."""
        number = 0
        candidate = name
        while True:
            if candidate not in self.reserved:
                bound = self.bindings.get(candidate, value)
                equal = type(bound) is type(value) and not callable(value) and bound == value
                if bound is value or equal:
                    break
            number += 1
            candidate = f"{name}_{number}"
        self.bindings[candidate] = value
        return candidate

    def literal(self, value: object, operands: Sequence[str]) -> str:
        """Return the text of an argument: an operand's name, a literal, or a bound constant."""
        match value:
            case Operand(index):
                return operands[index]
            case tuple() | list():
                items = [self.literal(v, operands) for v in value]  # pyright: ignore
                return f"[{', '.join(items)}]"
            case RunNumber():
                return value.name
            case float():
                return (
                    repr(value)
                    if value == value and abs(value) != float("inf")
                    else (f'float("{value}")')
                )
            case torch.device():
                return self.bind("device", self.device)
            case torch.dtype() | torch.memory_format() | torch.layout():
                return self.bind(str(value).replace(".", "_"), value)
            case _ if isinstance(value, _LITERAL_TYPES):
                return repr(value)
            case OpOverload() if value in PLAIN and self.device.type != "meta":
                # which another function calls
                kernel = kernel_of(value, self.device, compiled=self.compiled)
                return self.bind("constant", kernel.function if kernel else PLAIN[value])
            case _:
                return self.bind("constant", value)

    def function(self, name: str, outputs: Sequence[str]) -> Function:
        """Return the segment as a Function of ``inputs`` that returns ``outputs``."""
        last: dict[str, int] = {}
        read = Counter(name for line in self.lines for name in line.reads)
        kept = set(outputs)
        numbered: dict[int, CodeLine] = dict(enumerate(self.lines))
        for number, (product, line) in self.with_bias.items():
            if product not in kept and read[product] == 1:
                del numbered[number - 1]
                numbered[number] = line
        for number, line in numbered.items():
            last.update(dict.fromkeys(line.reads, number))
        lines: list[CodeLine] = []
        for number, line in numbered.items():
            dead = tuple(
                n
                for n in dict.fromkeys(line.reads)
                if last[n] == number and n not in kept and n in self.defined
            )
            product, changed = self.in_place.get(number, ("", line))
            inside = product in dead and read[product] == 1
            line = changed if inside else line
            lines.append(line._replace(drops=dead) if dead else line)
        body = Body(tuple(self.inputs), tuple(lines), tuple(outputs))
        return Function.straight(name, body, self.bindings, tuple(self.checks))


@dataclass(slots=True)
class Functions:
    """The functions of a program. Segments with equal text and bindings share a function."""

    by_name: dict[str, Function] = field(default_factory=dict)
    by_text: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, code: CodeBuilder, name: str, outputs: Sequence[str]) -> str:
        """Add a segment's function, and return its name. Equal code keeps its first name."""
        built = code.function(name, outputs)
        key = (built.source, tuple((k, plain_key(v)) for k, v in built.bindings), built.lines)
        if key in self.by_text:
            return self.by_text[key]
        unique, number = name, 0
        while unique in self.by_name:
            number += 1
            unique = f"{name}_{number}"
        self.by_name[unique] = replace(built, name=unique)
        self.by_text[key] = unique
        return unique


def _op_name(call: OpCall) -> str:
    """Return ``add`` for aten.add.Tensor."""
    return call.name.split(".")[1]


def is_view(target: object) -> bool:
    """Whether the op's result shares its operand's memory."""
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    return any(each.alias_info is not None for each in returns)


def plain_key(value: object) -> object:
    """Return the key by which bindings are compared: plain data by value, other objects by id."""
    plain = isinstance(value, (torch.dtype, torch.device, tuple, *_LITERAL_TYPES))
    return value if plain else id(value)


READING_MODULES = frozenset(
    f"dtensor.{name}"
    for name in (
        *("sharding.ops.experts", "sharding.local.expert_rows"),
        *("sharding.local.grouped_matmul", "runtime.lower.experts"),
    )
)
"""The modules of functions that read numbers of rows on the host, unless these are recorded for the
tensor. These functions are not compiled, because results of compiled code have no such record, and
are not captured in CUDA graphs."""


# -- faster functions for the same ops -------------------------------------------------------------

_aten: Any = torch.ops.aten

_PRODUCTS = frozenset((_aten.mm.default, _aten.bmm.default))
_IN_PLACE_METHODS: Mapping[object, str] = {
    _aten.add.Tensor: "add_",
    _aten.sub.Tensor: "sub_",
    _aten.mul.Tensor: "mul_",
    _aten.div.Tensor: "div_",
}


def _fits_first_operand(call: OpCall) -> bool:
    """Whether the op can write its result to the first operand: both have the same shape and
    strides, and the other operand is a number or has fewer dims."""
    if len(call.args) != 2 or call.kwargs or call.args[0] != Operand(0):
        return False
    fewer = all(len(m.shape) < len(call.operands[0].shape) for m in call.operands[1:])
    return fewer and call.result == call.operands[0]


_torch: Any = torch

_TORCH_FUNCTIONS = """_log_softmax _softmax _softmax_backward_data add.Tensor amax arange bmm cat
    clamp clone cos div.Tensor embedding exp le.Tensor mean.dim mm mul.Tensor native_layer_norm neg
    permute pow.Tensor_Scalar relu reshape rsqrt select.int sigmoid sin split_with_sizes squeeze.dim
    stack sub.Tensor sum.dim_IntList t tanh transpose.int unsqueeze where.self"""
"""Overloads for which ``torch`` has a function of the op's name, with the same arguments."""

QUICK: Mapping[object, Callable[..., Any]] = {
    **{
        getattr(getattr(_aten, name), overload or "default"): getattr(_torch, name)
        for name, _, overload in (each.partition(".") for each in _TORCH_FUNCTIONS.split())
    },
    _aten.expand.default: torch.Tensor.expand,
    _aten.gelu.default: gelu,
    _aten.index_copy_.default: torch.Tensor.index_copy_,
    _aten.scatter_.src: torch.Tensor.scatter_,
    _aten.silu.default: silu,
    _aten.view.default: torch.Tensor.view,
}


def quick(call: OpCall, device: torch.device) -> Callable[..., Any]:
    """Return the function that local code calls for ``call``: its target, or a faster function that
    does the same. An op of the project is called by its implementation: code runs without autograd,
    so the 5 to 15 us of its dispatch are saved."""
    if call.target in PLAIN:  # on the meta device only shapes are needed
        return call.target if device.type == "meta" else PLAIN[call.target]
    # an overload accepts a number in place of the first tensor; torch's function does not
    first = call.args[0] if call.args else None
    taken = isinstance(first, Operand | tuple | list) or call.target is _aten.arange.default
    return QUICK.get(call.target, call.target) if taken else call.target


_OVERLOADS: Mapping[int, object] = {
    id(fn): overload for bound in (QUICK, PLAIN) for overload, fn in bound.items()
}


def overload_of(target: object) -> OpOverload | None:
    """Return the op that a function in generated code runs, or None if it runs no op."""
    overload = _OVERLOADS.get(id(target), target)
    return overload if isinstance(overload, OpOverload) else None
