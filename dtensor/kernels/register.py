"""`dt.kernel`: the function that runs for an op on a type of device.

    @dt.kernel("dt::rms_norm", "cuda")
    def mine(x, weight, eps, offset, inner, out): ...  # x[4,512,1024]: what a rank has of it

    with dt.kernel("mylib::scale", "cpu").using(faster): ...      # within the block alone
    dt.kernel("dt::rms_norm", "cuda")(None)            # none: the op itself

Invariants: what does not take the op's arguments is an error when it is registered; that it returns
the op's shapes and dtypes, and changes nothing, is checked at each call. Not here: what it is used
for (registry.py).
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
    """The place of a kernel, for one op on one type of device: see `kernel`."""

    def __init__(self, op: OpOverload, device: str) -> None:
        self._op, self._device = op, device

    def __call__(self, function: Function) -> Function:
        """Use ``function`` from now on; None: the op itself. Returns it, as a decorator does."""
        checked = self._checked(function)
        use(Registered({**current().kernels, (self._op, self._device): checked}))
        return function

    @contextmanager
    def using(self, function: Callable[..., Any] | None) -> Iterator[None]:
        """Use ``function`` within the block; after it what was used before."""
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
    """The place of a kernel: call it with a function, or decorate one, to register that.

    Args:
        op: "dt::rms_norm", "aten::add.Tensor", or the OpOverload itself.
        device: the type of device that the function is for: "cpu" or "cuda".

    The function takes the op's arguments under the op's names, local tensors among them, and gives
    its results: new tensors of the op's shapes and dtypes. It may not change what it is given. On
    Ray it is sent to the actors: by name where they can import it, else by value.

    Raises PlanningError where there is no such op or device, where the op changes its arguments,
    and where the function does not take them.
    """
    check_kind("the op", op, str | OpOverload, "an op or its name", '"dt::rms_norm"')
    check_word("device", device, DEVICES)
    overload = op if isinstance(op, OpOverload) else _op_named(op)
    if overload._schema.is_mutable:
        raise PlanningError(
            f"{overload} changes its arguments, which no op of a program does: {overload._schema}\n"
            f"fix: register a kernel for the op that returns its result"
        )
    return KernelSlot(overload, device)


def _name(function: Callable[..., Any]) -> str:
    """`mymodule.scale`; of another callable its class's."""
    named = function if inspect.isfunction(function) else type(function)
    return f"{named.__module__}.{named.__qualname__}".removeprefix("__main__.")


def _op_named(name: str) -> OpOverload:
    """ "dt::rms_norm", or as torch prints it: "dt.rms_norm.default"."""
    wanted = name if "::" in name else name.replace(".", "::", 1)
    wanted = wanted.removesuffix(".default")
    base, _, overload = wanted.partition(".")
    with suppress(AttributeError):  # so that torch knows it, if it is one of dtensor's
        packet = op_packet(base)
    known = dispatch_get_all_op_names()
    if wanted in known:
        return getattr(packet, overload or "default")
    overloads = [n for n in known if n.startswith(f"{wanted}.") and not n.endswith("out")]
    near = sorted(overloads) or difflib.get_close_matches(wanted, known, 3, cutoff=0.5)
    raise PlanningError(
        f"there is no op {name}.\n"
        + f"  {'its overloads' if overloads else 'nearest names'}: {', '.join(near) or 'none'}\n"
        + "fix: name one of these, or import the module that registers the op before"
    )


# -- does it take the op's arguments ---------------------------------------------------------------


def _check_signature(op: OpOverload, function: Callable[..., Any]) -> None:
    arguments: Sequence[Any] = op._schema.arguments
    if not inspect.isfunction(function):  # what actors get, and what has a signature
        raise _unfit(op, function, "it is no function of Python's")
    signature = inspect.signature(function)
    placed = {a.name: None for a in arguments if not a.kwarg_only}
    named = {a.name: None for a in arguments if a.kwarg_only}
    left_out = {a.name for a in arguments if a.has_default_value()}  # torch leaves them out
    required = {name: None for name in named if name not in left_out}
    try:
        signature.bind(*placed, **named)
        signature.bind(**placed, **named)
        signature.bind(*(name for name in placed if name not in left_out), **required)
    except TypeError as error:
        raise _unfit(op, function, str(error)) from None
    order = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if order[: len(placed)] != list(placed)[: len(order)]:
        raise _unfit(op, function, "their order is another")
    for a in arguments:
        parameter = signature.parameters.get(a.name)
        if parameter is None or parameter.default is parameter.empty or not a.has_default_value():
            continue
        if _plain(parameter.default) != _plain(a.default_value):
            reason = (
                f"{a.name} is {parameter.default!r} by default, and {a.default_value!r} in the op"
            )
            raise _unfit(op, function, reason)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _unfit(op: OpOverload, function: Callable[..., Any], reason: str) -> PlanningError:
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
