"""`dt.kernel`: register the function that runs for an op on a type of device.

    @dt.kernel("dt::rms_norm", "cuda")
    def mine(x, weight, eps, offset, inner, out): ...  # x[4,512,1024]: a local tensor

    with dt.kernel("mylib::scale", "cpu").using(faster): ...      # only within the block
    dt.kernel("dt::rms_norm", "cuda")(None)            # use the op itself

Invariants: registering a function whose signature does not match the op raises an error. Each call
checks that the kernel returns the op's shapes and dtypes, and does not change its arguments.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from dtensor.errors import PlanningError, check_callable, check_kind, check_word
from dtensor.kernels.registry import Kernel, Registered, current, kernel_of, use
from dtensor.op_names import op_packet
from dtensor.private_torch import OpOverload, dispatch_get_all_op_names

Function = TypeVar("Function", bound=Callable[..., Any] | None)

DEVICES = ("cpu", "cuda")


class KernelSlot:
    """The kernel of one op on one type of device, which can be replaced (see `kernel`)."""

    def __init__(self, op: OpOverload, device: str) -> None:
        self._op, self._device = op, device

    def __call__(self, function: Function) -> Function:
        """Use ``function``, or the op itself if it is None. Returns ``function``, as a
        decorator."""
        checked = self._checked(function)
        use(Registered({**current().kernels, (self._op, self._device): checked}))
        return function

    @contextmanager
    def using(self, function: Callable[..., Any] | None) -> Iterator[None]:
        """Use ``function`` within the block, then the previous kernel again."""
        before = current()
        self(function)
        try:
            yield
        finally:
            use(before)

    def __repr__(self) -> str:
        registered = kernel_of(self._op, torch.device(self._device))
        what = registered.name if registered is not None else "the op itself"
        return f"<kernel of {self._op} on {self._device}: {what}>"

    def _checked(self, function: Callable[..., Any] | None) -> Kernel | None:
        if function is None:
            return None
        check_callable("the kernel", function, "write @dt.kernel(op, device) above a function")
        _check_signature(self._op, function)
        return Kernel(function=function, name=_name(function), ours=False)


def kernel(op: str | OpOverload, device: str) -> KernelSlot:
    """Return the kernel slot of an op; call it with a function, or use it as a decorator.

    Args:
        op: "dt::rms_norm", "aten::add.Tensor", or an OpOverload.
        device: the type of device that the function is for, "cpu" or "cuda".

    The function takes the op's arguments by the op's names, with local tensors, and returns new
    tensors of the op's shapes and dtypes. It must not change its arguments. On Ray it is sent to
    the actors by name if they can import it, else by value.

    Raises PlanningError for an unknown op or device, for an op that changes its arguments, and for
    a function that does not accept the op's arguments.
    """
    check_kind("the op", op, str | OpOverload, "an op or its name", '"dt::rms_norm"')
    check_word("device", device, DEVICES)
    overload = op if isinstance(op, OpOverload) else _op_named(op)
    if overload._schema.is_mutable:
        raise PlanningError(
            f"{overload} changes its arguments, and ops of programs must not: {overload._schema}\n"
            f"fix: register a kernel for the op that returns its result"
        )
    return KernelSlot(overload, device)


def _name(function: Callable[..., Any]) -> str:
    """Return the full name of a function, `mymodule.scale`, or of another callable's class."""
    named = function if inspect.isfunction(function) else type(function)
    return f"{named.__module__}.{named.__qualname__}".removeprefix("__main__.")


def _op_named(name: str) -> OpOverload:
    """Return the op of a name such as "dt::rms_norm", or as torch prints it,
    "dt.rms_norm.default"."""
    full_name = name if "::" in name else name.replace(".", "::", 1)
    full_name = full_name.removesuffix(".default")
    base, _, overload = full_name.partition(".")
    with suppress(AttributeError):  # registers the op with torch if it is one of dtensor's
        packet = op_packet(base)
    known = dispatch_get_all_op_names()
    if full_name in known:
        return getattr(packet, overload or "default")
    overloads = [n for n in known if n.startswith(f"{full_name}.") and not n.endswith("out")]
    near = sorted(overloads) or difflib.get_close_matches(full_name, known, 3, cutoff=0.5)
    raise PlanningError(
        f"there is no op {name}.\n"
        + f"  {'its overloads' if overloads else 'nearest names'}: {', '.join(near) or 'none'}\n"
        + "fix: name one of these, or first import the module that registers the op"
    )


# -- the signature of a kernel ---------------------------------------------------------------------


def _check_signature(op: OpOverload, function: Callable[..., Any]) -> None:
    """Raise PlanningError unless ``function`` accepts the op's arguments, by position and by name,
    with the op's defaults."""
    arguments: Sequence[Any] = op._schema.arguments
    if not inspect.isfunction(function):  # actors receive functions, and functions have signatures
        raise _signature_error(op, function, "it is not a Python function")
    signature = inspect.signature(function)
    positional = {a.name: None for a in arguments if not a.kwarg_only}
    named = {a.name: None for a in arguments if a.kwarg_only}
    with_defaults = {a.name for a in arguments if a.has_default_value()}  # torch leaves them out
    required = {name: None for name in named if name not in with_defaults}
    try:
        signature.bind(*positional, **named)
        signature.bind(**positional, **named)
        signature.bind(*(name for name in positional if name not in with_defaults), **required)
    except TypeError as error:
        raise _signature_error(op, function, str(error)) from None
    order = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if order[: len(positional)] != list(positional)[: len(order)]:
        raise _signature_error(op, function, "their order differs")
    for a in arguments:
        parameter = signature.parameters.get(a.name)
        if parameter is None or parameter.default is parameter.empty or not a.has_default_value():
            continue
        if _as_list(parameter.default) != _as_list(a.default_value):
            reason = (
                f"{a.name} is {parameter.default!r} by default, and {a.default_value!r} in the op"
            )
            raise _signature_error(op, function, reason)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _signature_error(op: OpOverload, function: Callable[..., Any], reason: str) -> PlanningError:
    """Return the error for a kernel that does not accept the op's arguments."""
    written: list[str] = []
    for a in op._schema.arguments:
        if a.kwarg_only and "*" not in written:
            written.append("*")
        written.append(f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name)
    return PlanningError(
        f"the kernel {_name(function)} does not take the arguments of {op.name()}: {reason}.\n"
        f"  {op._schema}\n"
        f"fix: def {op.name().partition('::')[2].replace('.', '_')}({', '.join(written)})"
    )
