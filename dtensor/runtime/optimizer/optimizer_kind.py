"""The description of an optimizer class that passed a probe: its construction and its state.

    kind = OptimizerKind.of(lion)                       # of the user's object
    kind = replace(kind, entries={"step": StateEntry(number=True, python=int)})
    own = kind.make([{"lr": 1e-4, "params": [flat]}], attributes={"step_count": 3})

Another object of a class is not constructed with guessed arguments: it gets the attributes that
`__init__` has left on the user's object. These are plain data (numbers, text, containers of them,
tensors of one element), which is sent at each step, as a step may change it; functions and classes,
which stay; and methods of the object, which are bound to the new one. Any other attribute is
refused by name: it may hold tensors, or another optimizer, or draw.

Not here: the test whether a class is elementwise (elementwise/), the state on a rank
(shard_optimizer.py).
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import torch.optim.optimizer as torchs

from dtensor.errors import PlanningError

HOOKS = frozenset(
    f"_optimizer_{what}_hooks"
    for what in (
        *("step_pre", "step_post", "state_dict_pre", "state_dict_post"),
        *("load_state_dict_pre", "load_state_dict_post"),
    )
)
OF_TORCH = HOOKS | {
    *("state", "param_groups", "defaults", "_zero_grad_profile_name", "_opt_called"),
    *("_warned_capturable_if_run_uncaptured", "_patch_step_function", "grad_scale", "found_inf"),
}
"""Attributes of an optimizer that torch, or one of its schedulers, has put there."""

_ATOMS = (Number, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type, functools.partial)
PYTHON = {bool: torch.uint8, int: torch.int64, float: torch.float64}
"""A Python number of a parameter's state is such a tensor in the tables of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """The form of a key of a parameter's state.

    ``number``: one number for a parameter, of ``shape``; else an element for each of the
    parameter's. ``python``: it is a Python number of this type. ``dtypes``: the dtype of the
    updated tensor to its own. ``late``: it may be missing, or None, where other keys exist.
    """

    number: bool
    python: type | None = None
    shape: tuple[int, ...] = ()
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    late: bool = False

    def dtype(self, updated: torch.dtype) -> torch.dtype:
        """The dtype of the value in a table; ``updated``: the dtype of the updated tensor."""
        if self.python is not None:
            return PYTHON[self.python]
        return dict(self.dtypes).get(updated, updated)

    def given(self, value: torch.Tensor) -> Any:
        """The entry of a state, from a table's value."""
        return value if self.python is None else self.python(value.item())

    def begun(self) -> Any:
        """A sample entry for a parameter of one element."""
        if self.python is not None:
            return self.python(1)
        dtype = self.dtype(torch.float32)
        return torch.ones(self.shape, dtype=dtype) if self.number else torch.zeros(1, dtype=dtype)

    def stored(self, value: Any) -> torch.Tensor:
        """A table's value, from the entry of a state."""
        if self.python is None:
            return value
        return torch.tensor(value, dtype=PYTHON[self.python])


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerKind:
    """A class and the facts that its objects here share. ``fixed``: constant attributes;
    ``methods``: functions that are bound to an object; ``entries``: of a parameter's state."""

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    methods: Mapping[str, Callable[..., Any]]
    entries: Mapping[str, StateEntry] = field(default_factory=dict[str, StateEntry])

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerKind:
        """The kind of an object. PlanningError for an attribute that another object cannot have."""
        fixed: dict[str, Any] = {}
        methods: dict[str, Callable[..., Any]] = {}
        for name, value in own_attributes(optimizer).items():
            if isinstance(value, MethodType) and value.__self__ is optimizer:
                methods[name] = value.__func__
            elif not is_plain(value):
                _check_fixed(optimizer, f"its attribute {name}", value)
                fixed[name] = value
        for number, group in enumerate(optimizer.param_groups):
            for name, value in options_of(group).items():
                if not is_plain(value):
                    _check_fixed(optimizer, f"{name!r} of its group {number}", value)
        defaults = {k: v for k, v in optimizer.defaults.items() if is_plain(v) or callable(v)}
        return OptimizerKind(type(optimizer), copied(defaults), fixed, methods)

    def alike(self, other: OptimizerKind) -> bool:
        """Whether objects of both kinds are made from equal values."""
        return (
            self.cls is other.cls
            and same(self.defaults, other.defaults)
            and same(self.fixed, other.fixed)
            and same(self.methods, other.methods)
        )

    def make(
        self, groups: Sequence[dict[str, Any]], attributes: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """An object with these groups, which have their ``params``, and without state. It owns its
        arguments, and may write to them."""
        optimizer = self.cls.__new__(self.cls)
        vars(optimizer).update(self.fixed)
        vars(optimizer).update(attributes)
        for name, function in self.methods.items():
            setattr(optimizer, name, MethodType(function, optimizer))
        state = defaultdict[torch.Tensor, dict[str, Any]](dict)
        defaults = copied(self.defaults)
        has = {"defaults": defaults, "state": state, "param_groups": list(groups)}
        torch.optim.Optimizer.__setstate__(optimizer, has)
        return optimizer


# -- plain data ------------------------------------------------------------------------------------


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of the object that are not torch's. They include a step that differs from the
    class's."""
    attributes = {name: value for name, value in vars(optimizer).items() if name not in OF_TORCH}
    if "step" in attributes and _without_torchs(attributes["step"]) is unwrapped(type(optimizer)):
        del attributes["step"]
    return attributes


def unwrapped(cls: type) -> Any:
    """The class's step, without torch's wrappers."""
    return _without_torchs(getattr(cls, "step", None))


def _without_torchs(step: Any) -> Any:
    """A step, without the wrappers of torch or of its schedulers."""
    while isinstance(step, FunctionType) and step.__code__.co_filename in _WRAPPERS:
        step = getattr(step, "__wrapped__", None)
    return step


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Call its step, without the hooks that a program has for all optimizers."""
    step: Any = type(optimizer).step
    if "step" in vars(optimizer) or not getattr(step, "hooked", False):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)


_WRAPPERS = (torch.optim.lr_scheduler.__file__, torchs.__file__)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that are data, which a step may change."""
    return {name: value for name, value in own_attributes(optimizer).items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether it is a number, text, a tensor of one element, or a container of such."""
    match value:
        case torch.Tensor():
            return value.numel() == 1 and not isinstance(value, torch.nn.Parameter)
        case tuple() | list() | set() | frozenset() | deque():
            return all(map(is_plain, value))
        case dict() if type(value) in (dict, OrderedDict):
            return all(map(is_plain, value)) and all(map(is_plain, value.values()))
        case _:
            return isinstance(value, _ATOMS)


def copied(value: Any, shared: dict[int, Any] | None = None) -> Any:
    """A copy of plain data; other values are returned as they are. A container that holds one list
    twice, as groups that have it from the defaults, gets one copy of it twice; with ``shared`` also
    over several calls."""
    shared = {} if shared is None else shared
    if id(value) in shared:
        return shared[id(value)][1]
    match value:
        case torch.Tensor():
            copy_of_value = value.detach().clone()
        case dict():
            copy_of_value = type(value)((k, copied(v, shared)) for k, v in value.items())
        case tuple() if type(value) is tuple:
            return tuple(copied(v, shared) for v in value)
        case list():
            copy_of_value = [copied(v, shared) for v in value]
        case set() | frozenset() | deque() | tuple():
            copy_of_value = copy.deepcopy(value)
        case _:
            return value
    shared[id(value)] = value, copy_of_value  # the original is kept, so that its id is not reused
    return copy_of_value


def same(a: Any, b: Any) -> bool:
    """Whether plain data is equal, NaN to NaN; other values are compared by identity."""
    match a:
        case torch.Tensor():
            if not isinstance(b, torch.Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
                return False
            return bool(torch.equal(a, b) or (a.isnan() & b.isnan()).all())
        case dict():
            return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        case tuple() | list() | deque():
            return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        case _ if not is_plain(a):
            return a is b
        case _:
            return type(a) is type(b) and bool(a == b or (a != a and b != b))


def kind_of_value(value: Any) -> object:
    """The property of a value on which a class may decide: a number's type and sign, else the
    value."""
    match value:
        case bool() | str() | None:
            return value
        case torch.Tensor():
            return "tensor", value.dtype, kind_of_value(float(value)) if is_plain(value) else None
        case int() if abs(value) < 2**16:
            return int, value
        case int() | float():
            return type(value), value > 0, value < 0
        case dict():
            return dict, tuple((str(k), kind_of_value(v)) for k, v in value.items())
        case tuple() | list() | deque():
            return type(value), tuple(map(kind_of_value, value))
        case set() | frozenset():
            return type(value), tuple(sorted(map(str, value)))
        case FunctionType():
            cells = (c.cell_contents for c in value.__closure__ or () if _is_filled(c))
            return value.__code__, id(value.__globals__), *map(kind_of_value, cells)
        case functools.partial():
            return kind_of_value((value.func, *value.args, *value.keywords.items()))
        case _:
            return value if type(value).__hash__ else id(value)


def _check_fixed(optimizer: torch.optim.Optimizer, what: str, value: Any) -> None:
    """PlanningError unless it is a function or a class without a reference to the object."""
    why = _why_not(optimizer, value)
    if why:
        raise PlanningError(
            f"{type(optimizer).__name__} cannot be made on the ranks: {what} {why}.\n"
            f"fix: use an optimizer whose attributes are numbers, text and functions"
        )


def _why_not(optimizer: torch.optim.Optimizer, value: Any, seen: tuple[Any, ...] = ()) -> str:
    if isinstance(value, torch.optim.Optimizer):
        return f"is another optimizer, a {type(value).__name__}, which has a state of its own"
    if isinstance(value, torch.Tensor):
        return f"is a tensor of shape {list(value.shape)}"
    if not isinstance(value, _FUNCTIONS):
        return f"is a {type(value).__name__}, which may hold tensors"
    parts: tuple[Any, ...] = ()
    if isinstance(value, functools.partial):
        parts = value.func, *value.args, *value.keywords.values()
    cells = getattr(value, "__closure__", None) or ()
    for held in (*parts, *(cell.cell_contents for cell in cells if _is_filled(cell))):
        if held is optimizer:
            return "is a function that refers to the object itself"
        known = is_plain(held) or any(held is other for other in (value, *seen))
        if not known and (why := _why_not(optimizer, held, (value, *seen))):
            return f"is a function that refers to a value that {why}"
    return ""


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
