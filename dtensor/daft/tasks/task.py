"""A task: one call of a method of an actor, as the process that hosts the actor carries it out.

    task = Task(actor="a", name="execute", issued=("train.py:31 in main: y = a.execute(x)",))
    task.run(Subject(model), encode(((x,), {})).message, [])        # the message of the result

Invariants: a task ends in a message, whatever happens: the result's, or a failure with where the
controller issued the task and where the method failed. A task that is given a failure does not
run: its result is that failure, so the root cause goes on and no cascade. Arguments and results
are copies; a method may change what it is given. One kernel thread and no autocast of the
caller's: the same bits in every backend and mode.

A few tasks are not methods but `OPERATIONS`: what futures and groups need done where values are.

    OPERATIONS["fold"](REDUCTIONS["sum"], [grads0, grads1])      # leaf by leaf, in this order

Values are pytrees. `piece` and `join` cut one into pieces and put them together again, so that a
large all_reduce costs each member 2 (n-1)/n of the value instead of n-1 times; a fold acts on each
element by itself, so that cutting changes no bit. They know nothing of actors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtensor.daft.errors import Failure, TaskError
from dtensor.daft.ir.instructions import Buffer
from dtensor.daft.raised import Raised, interrupts, reason_of, trace_of, traceback_of
from dtensor.daft.run.engine import local_execution
from dtensor.daft.tasks.values import (
    Encoded,
    ValuePickler,
    decode,
    encode,
    encode_failure,
    is_failure,
)
from dtensor.numerics import Reduction
from dtensor.private_torch import pytree

CREATE = "__init__"
MAX_FAILURES = 100

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class Subject:
    """An actor's object where it lives; what failed here first, for whoever asks."""

    instance: object = None
    unborn: Tensor | None = None
    failures: list[Failure] = field(default_factory=list[Failure])


def returns(*buffers: Buffer) -> Callable[[F], F]:
    """Declare the tensors of a method's result, in order: they are checked, and bound the memory.

        @daft.returns(daft.Buffer((8, 16), torch.float32))
        def execute(self, x): ...

    `buffers`: a shape and a dtype each. A result that differs is a TaskError of the call.
    A method without it may return what it likes; a compiled step's memory is then not known.
    """

    def declare(method: F) -> F:
        vars(method)["daft_returns"] = buffers
        return method

    return declare


def declared(cls: type, name: str) -> tuple[Buffer, ...] | None:
    for base in cls.__mro__:
        if name in vars(base):
            member = vars(base)[name]
            target = getattr(member, "__func__", member)
            return getattr(target, "__dict__", {}).get("daft_returns")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`name` is of a method, or of an operation that needs no object."""

    actor: str
    name: str
    issued: tuple[str, ...]
    operation: bool = False
    returns: tuple[Buffer, ...] | None = None
    pickler: type[ValuePickler] = ValuePickler

    @property
    def title(self) -> str:
        return f"{self.actor}.{self.name}"

    def create(
        self,
        subject: Subject,
        get_class: Callable[[], type],
        arguments: Tensor,
        inputs: Sequence[Tensor],
    ) -> None:
        """Make the actor's object; a failure stays with it, and is what its methods give."""
        made: list[object] = []

        def keep(*args: Any, **kwargs: Any) -> None:
            made.append(get_class()(*args, **kwargs))

        message = self._run(subject, keep, arguments, inputs, ())
        if is_failure(message):
            subject.unborn = message
        else:
            (subject.instance,) = made

    def run(
        self,
        subject: Subject,
        arguments: Tensor,
        inputs: Sequence[Tensor],
        owned: Sequence[int] = (),
    ) -> Tensor:
        """The message of the result. `owned`: the inputs that nobody reads after this."""
        if subject.unborn is not None:
            return subject.unborn
        if self.operation:
            method: Callable[..., object] = OPERATIONS[self.name]
        else:
            method = functools.partial(_call, subject.instance, self.name)
        return self._run(subject, method, arguments, inputs, owned)

    def _run(
        self,
        subject: Subject,
        method: Callable[..., object],
        arguments: Tensor,
        inputs: Sequence[Tensor],
        owned: Sequence[int],
    ) -> Tensor:
        for message in inputs:
            if is_failure(message):
                return message
        with user_execution():
            try:
                values = [decode(m, copy=i not in owned) for i, m in enumerate(inputs)]
                args, kwargs = decode(arguments, values)
                del values
                encoded = encode(method(*args, **kwargs), self.pickler)
                self._check(encoded)
            except BaseException as error:
                if interrupts(error):
                    raise
                failure = self._failure(error)
                if len(subject.failures) < MAX_FAILURES:
                    subject.failures.append(failure)
                return encode_failure(TaskError(failure))
        return encoded.message

    def _check(self, encoded: Encoded) -> None:
        if encoded.placeholders:
            raise TypeError(
                f"{self.title} returned a future or a handle, which belongs to the controller.\n"
                f"  Fix: return tensors and plain data."
            )
        if self.returns is None:
            return
        made = tuple(Buffer(shape, dtype) for dtype, shape in encoded.tensors)
        if made != self.returns:
            raise ValueError(
                f"{self.title} returned other tensors than it declares.\n"
                f"  declared: {', '.join(map(str, self.returns))}\n"
                f"  returned: {', '.join(map(str, made))}"
            )

    def _failure(self, error: BaseException) -> Failure:
        # the first frame is `_run` itself; an operation has no line of the user's
        trace = traceback_of(error)
        if trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        return Failure(
            rank=None,
            actor=self.actor,
            text=self.name,
            reason=reason_of(error),
            issued=self.issued,
            traceback=trace_of(error, trace),
            raised=Raised(error).detached(),
        )


def _call(instance: object, name: str, *args: Any, **kwargs: Any) -> object:
    return getattr(instance, name)(*args, **kwargs)


@contextmanager
def user_execution() -> Generator[None]:
    """One kernel thread and no autocast, as programs run; but a method may use autograd."""
    with local_execution(), torch.enable_grad():
        yield


# -- tasks of daft's own ---------------------------------------------------------------------------


def value(given: object) -> object:
    """What it is given: a copy, where the actor is."""
    return given


def item(given: Any, key: object) -> object:
    return given[key]


def fold(op: Reduction, parts: Sequence[object]) -> object:
    """The parts' leaves, folded; tensors as `numerics.fold` does, numbers in the same order."""
    leaves, specs = zip(*map(_flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        different = "\n".join(f"  member {i}: {spec}" for i, spec in enumerate(specs))
        raise ValueError(f"The members' values differ in structure.\n{different}")
    return pytree.tree_unflatten(
        [_fold_leaf(op, column) for column in zip(*leaves, strict=True)], specs[0]
    )


def piece(op: Reduction, given: object, index: int, num: int) -> tuple[list[Any], object]:
    """Piece `index` of `num`: of each tensor its elements, of anything else all on piece 0."""
    leaves, _ = _flatten(given)
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            _check_fold(op, leaf)
            kept.append(leaf.detach().reshape(-1, op.unit).tensor_split(num)[index])
        else:
            kept.append(leaf if index == 0 else 0)
    return kept, _form(given)


def fold_piece(op: Reduction, parts: Sequence[tuple[list[Any], object]]) -> list[Any]:
    """The fold of everyone's piece; the forms tell whether the whole values fit together."""
    forms = [form for _, form in parts]
    if any(form != forms[0] for form in forms):
        different = "\n".join(f"  member {i}: {form}" for i, form in enumerate(forms))
        raise ValueError(f"The members' values differ in shape, dtype or structure.\n{different}")
    columns = zip(*(kept for kept, _ in parts), strict=True)
    return [_fold_leaf(op, column) for column in columns]


def join(given: object, pieces: Sequence[list[Any]]) -> object:
    """A value like `given`, of the folded pieces."""
    leaves, spec = _flatten(given)
    joined: list[Any] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            joined.append(torch.cat([kept[i] for kept in pieces]).reshape(leaf.shape))
        else:
            joined.append(pieces[0][i])
    return pytree.tree_unflatten(joined, spec)


OPERATIONS: Mapping[str, Callable[..., object]] = {
    "value": value,
    "item": item,
    "fold": fold,
    "piece": piece,
    "fold_piece": fold_piece,
    "join": join,
}


def _flatten(given: object) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(given)


def _check_fold(op: Reduction, tensor: Tensor) -> None:
    if not op.takes(tensor.shape, tensor.dtype):
        raise ValueError(f"{op.name!r} reduces {op.wants}, got {tensor.dtype}{list(tensor.shape)}.")


def _form(given: object) -> object:
    leaves, spec = _flatten(given)
    return [
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in leaves
    ], str(spec)


def _fold_leaf(op: Reduction, column: Sequence[Any]) -> object:
    first = column[0]
    if all(isinstance(part, Tensor) for part in column):
        if any(part.shape != first.shape or part.dtype != first.dtype for part in column):
            raise ValueError(
                f"The members' tensors differ: "
                f"{[f'{part.dtype}{list(part.shape)}' for part in column]}."
            )
        _check_fold(op, first)
        with torch.no_grad():
            return op.of(column)
    numbers = all(isinstance(part, int | float) and not isinstance(part, bool) for part in column)
    if not numbers or op.numbers is None:
        raise TypeError(
            f"Tensors {'alone' if op.numbers is None else 'and numbers'} can be reduced by "
            f"{op.name!r}, got {[type(part).__name__ for part in column]}."
        )
    return functools.reduce(op.numbers, column)
