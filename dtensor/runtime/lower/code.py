"""Static local code: straight-line Python for one segment of one rank, as a daft Function.

    code = CodeBuilder(device)
    code.call(local_call, ("x", "w"), ("h",), "mlp.py:14: h = self.up(x)", made)
    code.function("mlp_F0", outputs=("h",))

gives

    def forward(x, w):
        h = aten_mm_default(x, w)
        return (h,)

Each line records the user's line; a value is dropped after its last use. A bias that is added to a
product, or a number that scales it, is applied in the product's memory if that has no other reader:
the same bits, and a tenth of a linear layer's time at width 256. On CUDA a product and its bias are
one `addmm`, as in eager torch: 16 bits are rounded once, after the bias. Two segments with the same
text and bindings are one function. An op with a registered kernel on the program's device
(dtensor/kernels/registry.py) calls that, and the line ends in its name. There are no other
decisions here.

Calling an overload of `torch.ops` costs 3 to 5 us, as its arguments are parsed by schema; the
function that torch generates for the same op costs 1 to 2, and dispatches to the same kernel. A
layer of width 64 runs in 100 such calls, so code binds these if there is one with the same
arguments in the same order (`QUICK`; a test compares them, op by op). One of the project's own ops
costs 5 to 15 us there, and is bound to its implementation (`PLAIN`): local code runs without
autograd. Other ops are called as captured.
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
from dtensor.daft.ir.code import Body, CodeLine, tuple_text
from dtensor.kernels.registry import (
    Made,
    check_apart,
    check_kept,
    check_made,
    kernel_of,
    versions,
)
from dtensor.private_torch import OpOverload, gelu, silu
from dtensor.sharding.ops.call import OpCall, Operand, RunNumber, slots_of
from dtensor.sharding.ops.library import PLAIN

_PLAIN = (int, bool, str, type(None))
ADDING, COPIES = "accumulate", "copies"
"""The comment of a line that calls no op."""


@dataclass(slots=True)
class CodeBuilder:
    """Collects lines; ``inputs`` are the values that are read before they are made.

    ``reserved``: names of values, which no function may take: in Python they would hide it.
    """

    device: torch.device
    reserved: Collection[str] = ()
    inputs: list[str] = field(default_factory=list)
    defined: dict[str, None] = field(default_factory=dict)
    lines: list[CodeLine] = field(default_factory=list)
    bindings: dict[str, object] = field(default_factory=dict)
    products: set[str] = field(default_factory=set)  # their memory has no other owner yet
    in_place: dict[int, tuple[str, CodeLine]] = field(default_factory=dict)
    # by line: the product, and the line that may change it in place
    with_bias: dict[int, tuple[str, CodeLine]] = field(default_factory=dict)
    # by line: the product of the line before, and the line that may replace both
    kernels: dict[str, None] = field(default_factory=dict)  # that run: ``rms_norm [triton ...]``

    def __bool__(self) -> bool:
        return bool(self.lines)

    def call(
        self,
        call: OpCall,
        operands: Sequence[str],
        results: Sequence[str | None],
        source: str | None,
        made: Callable[[], Made],
    ) -> None:
        """``results = call(operands)``, by the op's kernel on this device if it has one.

        ``made``: the local shapes and dtypes of the named results, which a user's kernel must
        return; and the kernel may not change its arguments.
        """
        args = [self.literal(a, operands) for a in call.args]
        args += [f"{k}={self.literal(v, operands)}" for k, v in call.kwargs]
        name = call.name if isinstance(call.target, OpOverload) else call.target.__name__
        kernel = kernel_of(call.target, self.device)
        called = quick(call, self.device) if kernel is None else kernel.function
        function = self.bind(re.sub(r"\W", "_", name), called)
        targets = ", ".join(name or "_" for name in results)
        comma = "," if call.multiple and len(results) == 1 else ""
        text = f"{targets}{comma} = {function}({', '.join(args)})"
        reads = (*operands, *slots_of(call))
        if self.device.type == "cuda":
            # Not at the top: few programs run on one.
            from dtensor.sharding.local.device_asserts import check_before

            if (check := check_before(call.target, call.args)) is not None:
                checked, given = self.bind("check", check[0]), ", ".join(args[check[1] :])
                self.line(f"{checked}({given})", reads, (), source, called=checked)
        named = [r for r in results if r is not None]
        if kernel is None and call.target in _PRODUCTS:
            self.products.update(named)
        method = _IN_PLACE.get(call.target) if kernel is None else None
        if method is not None and _into_first(call) and operands[0] in self.products:
            changed, op = f"{targets} = {args[0]}.{method}({args[1]})", _op_of(call)
            line = CodeLine(changed, tuple(named), reads, "", op, (), f"{op} in place", source)
            self.in_place[len(self.lines)] = operands[0], line
            if self.device.type == "cuda":
                self._with_bias(call, operands, line)
        by = "" if kernel is None else kernel.name
        if by:
            self.kernels[f"{_op_of(call)} [{by}]"] = None
        if kernel is None or kernel.ours:
            self.line(text, reads, named, source, called=function, op=by, comment=by)
            return
        before = next(n for n in map("before_{}".format, itertools.count()) if self.is_free(n))
        self.apply(versions, [operands], [before], source=source)
        self.line(text, reads, named, source, called=function, op=by, comment=by)
        self.apply(check_kept, [operands, before], (), kernel.name, source=source)
        self.apply(check_made, [named], (), kernel.name, made(), source=source)
        if not _is_view(call.target):
            self.apply(check_apart, [named, operands], (), kernel.name, source=source)

    def _with_bias(self, call: OpCall, operands: Sequence[str], added: CodeLine) -> None:
        """Where the line before is the matrix product, note one line for both."""
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

    def is_free(self, name: str) -> bool:
        return not (name in self.reserved or name in self.defined or name in self.bindings)

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
        """``results = function(*operands, *literals, layout)``.

        Operands in a sequence are given as one tuple. ``layout`` is bound, not written out.
        ``is_list``: the function returns a list of the results, however many.
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
        """See `CodeLine`."""
        for name in reads:
            if name not in self.defined and name not in self.inputs:
                self.inputs.append(name)
        self.defined.update(dict.fromkeys(makes))
        self.lines.append(
            CodeLine(text, tuple(makes), tuple(reads), called, op, (), comment, source)
        )

    def user_lines(self) -> str | None:
        """The user's first and last lines in it: the only facts about an actor that died here."""
        lines = list(dict.fromkeys(line.source for line in self.lines if line.source is not None))
        return " ... ".join(lines if len(lines) < 2 else (lines[0], lines[-1])) or None

    def kernel_names(self) -> str:
        """The ops with a kernel, each with its kernel's name: ``rms_norm [triton rms_norm]``."""
        return ", ".join(self.kernels)

    def bind(self, name: str, value: object) -> str:
        """A global of that name for ``value``; another name if that one is taken."""
        number = 0
        candidate = name
        while True:
            if candidate not in self.reserved:
                known = self.bindings.get(candidate, value)
                same = type(known) is type(value) and not callable(value) and known == value
                if known is value or same:
                    break
            number += 1
            candidate = f"{name}_{number}"
        self.bindings[candidate] = value
        return candidate

    def literal(self, value: object, operands: Sequence[str]) -> str:
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
            case _ if isinstance(value, _PLAIN):
                return repr(value)
            case OpOverload() if value in PLAIN and self.device.type != "meta":
                return self.bind("constant", PLAIN[value])  # which another function calls
            case _:
                return self.bind("constant", value)

    def function(self, name: str, outputs: Sequence[str]) -> Function:
        """The segment as a Function of ``inputs`` that returns ``outputs``."""
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
        return Function.straight(name, body, self.bindings)


@dataclass(slots=True)
class Functions:
    """The functions of a program, each text once."""

    found: dict[str, Function] = field(default_factory=dict)
    by_text: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, code: CodeBuilder, name: str, outputs: Sequence[str]) -> str:
        """The name under which the code is known; equal code keeps its first name."""
        built = code.function(name, outputs)
        key = (built.source, tuple((k, _key(v)) for k, v in built.bindings), built.lines)
        if key in self.by_text:
            return self.by_text[key]
        unique, number = name, 0
        while unique in self.found:
            number += 1
            unique = f"{name}_{number}"
        self.found[unique] = replace(built, name=unique)
        self.by_text[key] = unique
        return unique


def _op_of(call: OpCall) -> str:
    """``add`` of aten.add.Tensor."""
    return call.name.split(".")[1]


def _is_view(target: object) -> bool:
    """Whether the op's result shares its operand's memory."""
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    return any(each.alias_info is not None for each in returns)


def _key(value: object) -> object:
    """The identity of a binding: that of the object, or the value of plain data."""
    plain = isinstance(value, (torch.dtype, torch.device, tuple, *_PLAIN))
    return value if plain else id(value)


# -- faster functions for the same ops
# -----------------------------------------------------------------

_aten: Any = torch.ops.aten

_PRODUCTS = frozenset((_aten.mm.default, _aten.bmm.default))
_IN_PLACE: Mapping[object, str] = {
    _aten.add.Tensor: "add_",
    _aten.sub.Tensor: "sub_",
    _aten.mul.Tensor: "mul_",
    _aten.div.Tensor: "div_",
}


def _into_first(call: OpCall) -> bool:
    """Whether the result has the size and the memory layout of the first operand: the other one is
    a number, or has fewer dims."""
    if len(call.args) != 2 or call.kwargs or call.args[0] != Operand(0):
        return False
    fewer = all(len(m.shape) < len(call.operands[0].shape) for m in call.operands[1:])
    return fewer and call.result == call.operands[0]


_torch: Any = torch

_OF_TORCH = """_log_softmax _softmax _softmax_backward_data add.Tensor amax arange bmm cat clamp
    clone cos div.Tensor embedding exp le.Tensor mean.dim mm mul.Tensor native_layer_norm neg
    permute pow.Tensor_Scalar relu reshape rsqrt select.int sigmoid sin split_with_sizes squeeze.dim
    stack sub.Tensor sum.dim_IntList t tanh transpose.int unsqueeze where.self"""
"""Overloads for which there is a function of the op's name in ``torch``."""

QUICK: Mapping[object, Callable[..., Any]] = {
    **{
        getattr(getattr(_aten, name), overload or "default"): getattr(_torch, name)
        for name, _, overload in (each.partition(".") for each in _OF_TORCH.split())
    },
    _aten.expand.default: torch.Tensor.expand,
    _aten.gelu.default: gelu,
    _aten.index_copy_.default: torch.Tensor.index_copy_,
    _aten.scatter_.src: torch.Tensor.scatter_,
    _aten.silu.default: silu,
    _aten.view.default: torch.Tensor.view,
}


def quick(call: OpCall, device: torch.device) -> Callable[..., Any]:
    """The function that local code calls for ``call``: its target, or an equivalent one."""
    if call.target in PLAIN:  # on the meta device only shapes are needed
        return call.target if device.type == "meta" else PLAIN[call.target]
    # torch's function refuses a number where an overload takes it for a tensor
    first = call.args[0] if call.args else None
    taken = isinstance(first, Operand | tuple | list) or call.target is _aten.arange.default
    return QUICK.get(call.target, call.target) if taken else call.target


_BOUND: Mapping[int, object] = {
    id(fn): overload for bound in (QUICK, PLAIN) for overload, fn in bound.items()
}


def overload_of(target: object) -> OpOverload | None:
    """The op of a function in generated code; None if it is no op."""
    overload = _BOUND.get(id(target), target)
    return overload if isinstance(overload, OpOverload) else None
