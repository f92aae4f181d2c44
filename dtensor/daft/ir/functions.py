"""Local code as data: a `Function` is source text that an actor compiles once.

Example:

    square = Function(name="square", source="def forward(x):\\n    return (mul(x, x),)",
                      bindings=(("mul", torch.mul),), lines=(None, "net.py:3: y = x * x"))
    (y,) = square.build()(x)

Invariants: `forward` takes positional arguments and returns a tuple, one item per output of the
`Call`. A frame of the built code has the file name `<dtensor NAME>`, so that a traceback through
it leads to `lines`, the user's own. Pickles, with torch operators among the bindings too.

It does not optimise, trace, or check what the code does.
"""

from __future__ import annotations

import copyreg
import linecache
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch._ops import OpOverload, OpOverloadPacket

Built: TypeAlias = Callable[..., tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Python source that defines `forward`, with the globals (`bindings`) that it needs.

    `lines[i]` is the user's line ("gpt.py:41: x = self.up(x)") for line i + 1 of `source`.
    """

    name: str
    source: str
    bindings: tuple[tuple[str, object], ...] = ()
    lines: tuple[str | None, ...] = ()

    @staticmethod
    def of(fn: Callable[..., object], name: str | None = None) -> Function:
        """Wrap a callable that actors can import. It returns a tuple, as every `forward` does."""
        return Function(
            name=name if name is not None else fn.__qualname__,
            source="forward = wrapped",
            bindings=(("wrapped", fn),),
        )

    @property
    def filename(self) -> str:
        return f"<dtensor {self.name}>"

    def build(self) -> Built:
        code = compile(self.source, self.filename, "exec")
        text = self.source.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(self.source), None, text, self.filename)
        namespace: dict[str, object] = dict(self.bindings)
        exec(code, namespace)
        if "forward" not in namespace:
            raise ValueError(f"The source of function {self.name!r} does not define `forward`.")
        return cast(Built, namespace["forward"])

    def user_line(self, error: BaseException) -> str | None:
        """The user's line that `error` was raised under; None where the table has none."""
        found: str | None = None
        for frame in traceback.extract_tb(error.__traceback__):
            number = frame.lineno
            if frame.filename == self.filename and number and number <= len(self.lines):
                found = self.lines[number - 1]
        return found


# Operators do not pickle by themselves (their bound schema is a C++ object): they go by name.
def _overload(name: str, overload: str) -> object:
    return getattr(_packet(name), overload)


def _packet(name: str) -> object:
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op)


def _reduce_overload(op: OpOverload) -> tuple[object, ...]:
    name, _, overload = op.name().partition(".")
    return (_overload, (name, overload or "default"))


def _reduce_packet(op: OpOverloadPacket) -> tuple[object, ...]:
    return (_packet, (str(op).replace(".", "::", 1),))


copyreg.pickle(OpOverload, _reduce_overload)  # type: ignore[arg-type]
copyreg.pickle(OpOverloadPacket, _reduce_packet)  # type: ignore[arg-type]
