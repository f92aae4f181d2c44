"""Describe an optimizer class that is not torch's, so that ranks can create objects of it.

    kind = OptimizerKind.of(lion)                       # lion: the user's optimizer
    kind = replace(kind, entries={"step": StateEntry(number=True, python=int)})
    optimizer = kind.make([{"lr": 1e-4, "params": [flat]}], attributes={"step_count": 3})

`make` does not call `__init__`: it copies the attributes of the user's object. Plain data
(numbers, text, one-element tensors, containers of these) is sent again for each step, because a
step may change it. Functions, classes and objects with plain data are constant; methods are bound
to the new object. Tensors and optimizers raise PlanningError. Any other attribute, such as a model
or a generator, may hold tensors, so it is left out: the step raises PlanningError if it reads it.
Plain data in ``optimizer.state`` under a text key is an attribute named "state['k']".
"""

from __future__ import annotations

import ast
import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
import torch.optim.optimizer as torch_optimizer

from dtensor.errors import PlanningError

HOOKS = frozenset(
    f"_optimizer_{what}_hooks"
    for what in (
        *("step_pre", "step_post", "state_dict_pre", "state_dict_post"),
        *("load_state_dict_pre", "load_state_dict_post"),
    )
)
TORCH_ATTRIBUTES = HOOKS | {
    *("state", "param_groups", "defaults", "_zero_grad_profile_name", "_opt_called"),
    *("_warned_capturable_if_run_uncaptured", "_patch_step_function", "grad_scale", "found_inf"),
}
"""Attributes that torch or one of its schedulers sets on an optimizer."""

_PLAIN_TYPES = (Number, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_FUNCTION_TYPES = (FunctionType, BuiltinFunctionType, type, functools.partial)
TABLE_DTYPES = {bool: torch.uint8, int: torch.int64, float: torch.float64}
"""Dtype in the ranks' tables of state entries that are Python numbers, by their Python type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """The form of one entry of a parameter's state, such as "exp_avg".

    ``number``: the entry is one number of ``shape`` per parameter; otherwise it has the parameter's
    shape. ``python``: the type of a Python number. ``dtypes``: pairs of the updated tensor's dtype
    and the entry's. ``late``: the entry may be missing or None although other entries exist.
    ``packed``: the entry is the whole state of a parameter (owned/packed_state.py).
    """

    number: bool
    python: type | None = None
    shape: tuple[int, ...] = ()
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    late: bool = False
    packed: bool = False

    def dtype(self, updated: torch.dtype) -> torch.dtype:
        """Return the entry's dtype in a rank's table. ``updated``: the updated tensor's dtype."""
        if self.python is not None:
            return TABLE_DTYPES[self.python]
        return dict(self.dtypes).get(updated, updated)

    def from_table(self, value: torch.Tensor) -> Any:
        """Return the optimizer's form of the value in a rank's table."""
        return value if self.python is None else self.python(value.item())

    def sample(self) -> Any:
        """Return an example of the entry for a parameter with one element."""
        if self.python is not None:
            return self.python(1)
        dtype = self.dtype(torch.float32)
        return torch.ones(self.shape, dtype=dtype) if self.number else torch.zeros(1, dtype=dtype)

    def to_table(self, value: Any) -> torch.Tensor:
        """Return the tensor for a rank's table, from the optimizer's form of the entry."""
        if self.python is None:
            return value
        return torch.tensor(value, dtype=TABLE_DTYPES[self.python])


class Unread:
    """Stands for an attribute that is not given to other objects. A step that reads it raises
    PlanningError. ``was_read`` records this, since the step may catch the error."""

    def __init__(self, why: str) -> None:
        self.why, self.was_read = why, False

    def _refuse(self, *_: object) -> NoReturn:
        self.was_read = True
        raise PlanningError(self.why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copy and pickle look for
            raise AttributeError(name)
        self._refuse()

    def __reduce__(self) -> tuple[Any, ...]:
        return unread, (self.why,)

    __bool__ = __call__ = __iter__ = __next__ = __len__ = __getitem__ = __contains__ = _refuse
    __enter__ = __exit__ = _refuse


@functools.cache
def unread(why: str) -> Unread:
    """Return the object for an attribute that is left out, the same one for each ``why``."""
    return Unread(why)


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerKind:
    """An optimizer class, and the attributes that the ranks' objects share with the user's.

    ``fixed``: constant attributes. ``methods``: functions that `make` binds to the new object.
    ``entries``: the form of a parameter's state, by key.
    """

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    methods: Mapping[str, Callable[..., Any]]
    entries: Mapping[str, StateEntry] = field(default_factory=dict[str, StateEntry])

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerKind:
        """Return the kind of the user's optimizer. Raises PlanningError if an attribute cannot be
        given to another object."""
        fixed: dict[str, Any] = {}
        methods: dict[str, Callable[..., Any]] = {}
        for name, value in own_attributes(optimizer).items():
            if isinstance(value, MethodType) and value.__self__ is optimizer:
                methods[name] = value.__func__
            elif not is_plain(value):
                fixed[name] = _fixed_value(optimizer, f"its attribute {name}", value)
        for name, value in text_entries(optimizer).items():
            if not is_plain(value):
                why = _refusal(optimizer, value)
                _refuse_attribute(optimizer, f"its {name}", why or "is a function")
        for number, group in enumerate(optimizer.param_groups):
            for name, value in options_of(group).items():
                if not is_plain(value):
                    _check_fixed(optimizer, f"{name!r} of its group {number}", value)
        # torch adds "differentiable" when a state is loaded; the kind is as before
        stated = {"differentiable": False, **optimizer.defaults}
        defaults = {k: v for k, v in stated.items() if is_plain(v) or callable(v)}
        return OptimizerKind(type(optimizer), copy_plain(defaults), fixed, methods)

    def check_fixed(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise PlanningError if steps of this kind's objects have read an attribute that is left
        out, or have changed an object that is an attribute of ``optimizer``."""
        for name, value in self.fixed.items():
            if isinstance(value, Unread) and value.was_read:
                raise PlanningError(value.why)
            if not isinstance(value, Unread) and not plain_equal(value, vars(optimizer)[name]):
                _refuse_attribute(optimizer, f"its attribute {name}", "is changed by a step")

    def equals(self, other: OptimizerKind) -> bool:
        """Return whether both kinds make equal objects; the forms of their states are not
        compared."""
        return (
            self.cls is other.cls
            and plain_equal(self.defaults, other.defaults)
            and plain_equal(self.fixed, other.fixed)
            and plain_equal(self.methods, other.methods)
        )

    def new_options(self, options: Mapping[str, Any], changed: Set[str]) -> dict[str, Any]:
        """Return a group's options as they are before the first step. ``changed``: the options that
        a step changes."""
        return {
            key: copy_plain(self.defaults[key] if key in changed else value)
            for key, value in options.items()
            if key not in changed or key in self.defaults
        }

    def make(
        self, groups: Sequence[dict[str, Any]], attributes: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """Create an optimizer without state of parameters. ``groups`` include their ``params``.
        The optimizer keeps the arguments without a copy and may write to them."""
        optimizer = self.cls.__new__(self.cls)
        own, by_text = split_attributes(attributes)
        vars(optimizer).update({**self.fixed, **own})
        for name, function in self.methods.items():
            setattr(optimizer, name, MethodType(function, optimizer))
        state = defaultdict[Any, Any](dict, by_text)
        defaults = copy_plain(self.defaults)
        has = {"defaults": defaults, "state": state, "param_groups": list(groups)}
        torch.optim.Optimizer.__setstate__(optimizer, has)
        return optimizer


# -- plain data ------------------------------------------------------------------------------------


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of the object that torch did not set, including a replaced ``step``."""
    attributes = {
        name: value for name, value in vars(optimizer).items() if name not in TORCH_ATTRIBUTES
    }
    if "step" in attributes and _unwrap_torch(attributes["step"]) is unwrapped_step(
        type(optimizer)
    ):
        del attributes["step"]
    return attributes


def unwrapped_step(cls: type) -> Any:
    """Return the class's step without torch's wrappers."""
    return _unwrap_torch(getattr(cls, "step", None))


def _unwrap_torch(step: Any) -> Any:
    """Remove the wrappers that torch and its schedulers put around a step."""
    while isinstance(step, FunctionType) and step.__code__.co_filename in _WRAPPERS:
        step = getattr(step, "__wrapped__", None)
    return step


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's step without the hooks that are registered for all optimizers."""
    step: Any = type(optimizer).step
    if "step" in vars(optimizer) or not getattr(step, "hooked", False):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)


_WRAPPERS = (torch.optim.lr_scheduler.__file__, torch_optimizer.__file__)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that are plain data, with the state under text keys. A step may change
    them."""
    attributes = {**own_attributes(optimizer), **text_entries(optimizer)}
    return {name: value for name, value in attributes.items() if is_plain(value)}


def text_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries of ``optimizer.state`` under text keys, by "state['key']"."""
    state: Any = optimizer.state
    by_text = getattr(state, "by_text", state)  # a lazy state has them apart
    return {f"state[{key!r}]": value for key, value in by_text.items() if isinstance(key, str)}


def split_attributes(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes of the object, and the entries of its state by their text keys."""
    entries = {name: value for name, value in attributes.items() if name.startswith("state[")}
    own = {name: value for name, value in attributes.items() if name not in entries}
    return own, {ast.literal_eval(name[6:-1]): value for name, value in entries.items()}


def stray_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> str:
    """Return "keeps ...", a text about a state entry that is of none of the parameters and no plain
    data under a text key; "" if there is none."""
    known = {id(parameter) for parameter in parameters}
    for key, value in optimizer.state.items():
        if id(key) in known or (isinstance(key, str) and is_plain(value)):
            continue
        name = (
            f"a tensor of shape {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
        )
        why = ", with more than numbers and text" if isinstance(key, str) else ""
        return f"keeps a state that is of no parameter under {name}{why}"
    return ""


def is_plain(value: Any) -> bool:
    """Return whether the value is a number, text, a one-element tensor, or a container of these."""
    match value:
        case torch.Tensor():
            return value.numel() == 1 and not isinstance(value, torch.nn.Parameter)
        case tuple() | list() | set() | frozenset() | deque():
            return all(map(is_plain, value))
        case dict() if type(value) in (dict, OrderedDict):
            return all(map(is_plain, value)) and all(map(is_plain, value.values()))
        case _:
            return isinstance(value, _PLAIN_TYPES)


def is_number(value: Any) -> bool:
    """Return whether the value is a number or a tensor of one element."""
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def copy_plain(value: Any, shared: dict[int, Any] | None = None) -> Any:
    """Copy plain data; return other values unchanged.

    An object that occurs twice (a list in several groups) is copied once. ``shared`` extends this
    to several calls: a dict that the caller passes to each of them.
    """
    shared = {} if shared is None else shared
    if id(value) in shared:
        return shared[id(value)][1]
    match value:
        case torch.Tensor():
            copy_of_value = value.detach().clone()
        case dict():
            copy_of_value = type(value)((k, copy_plain(v, shared)) for k, v in value.items())
        case tuple() if type(value) is tuple:
            return tuple(copy_plain(v, shared) for v in value)
        case list():
            copy_of_value = [copy_plain(v, shared) for v in value]
        case set() | frozenset() | deque() | tuple():
            copy_of_value = copy.deepcopy(value)
        case _:
            return value
    shared[id(value)] = value, copy_of_value  # the original is kept, so that its id is not reused
    return copy_of_value


def plain_equal(a: Any, b: Any) -> bool:
    """Return whether plain data is equal (NaN equals NaN). Other values are compared by
    identity."""
    match a:
        case torch.Tensor():
            if not isinstance(b, torch.Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
                return False
            return bool(torch.equal(a, b) or (a.isnan() & b.isnan()).all())
        case dict():
            return (
                type(a) is type(b)
                and a.keys() == b.keys()
                and all(plain_equal(a[k], b[k]) for k in a)
            )
        case tuple() | list() | deque():
            return type(a) is type(b) and len(a) == len(b) and all(map(plain_equal, a, b))
        case _ if not is_plain(a):
            is_alike = type(a) is type(b) and _is_plain_object(a) and _is_plain_object(b)
            return a is b or (is_alike and plain_equal(vars(a), vars(b)))
        case _:
            return type(a) is type(b) and bool(a == b or (a != a and b != b))


def kind_of_value(value: Any) -> object:
    """Return the part of an option's value that may select other code in a step.

    For a float or a large int this is the type and sign, so that a new learning rate does not
    require a new probe; for most other values it is the value itself.
    """
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
            cells = (c.cell_contents for c in value.__closure__ or () if _has_value(c))
            return value.__code__, id(value.__globals__), *map(kind_of_value, cells)
        case functools.partial():
            return kind_of_value((value.func, *value.args, *value.keywords.items()))
        case _ if _is_plain_object(value):
            return type(value), kind_of_value(vars(value))
        case _:
            return value if type(value).__hash__ else id(value)


def _fixed_value(optimizer: torch.optim.Optimizer, what: str, value: Any) -> Any:
    """Return what other objects have in place of an attribute that is not plain data."""
    if isinstance(value, (torch.Tensor, torch.optim.Optimizer, *_FUNCTION_TYPES)):
        _check_fixed(optimizer, what, value)
        return value
    if _is_plain_object(value):
        copy_of_value = object.__new__(type(value))
        vars(copy_of_value).update(copy_plain(vars(value)))
        return copy_of_value
    return unread(_text_of_refusal(optimizer, what, _refusal(optimizer, value)))


def _is_plain_object(value: Any) -> bool:
    """Return whether the value is an object of a Python class whose attributes are plain data."""
    cls: type = type(value)
    is_python = cls.__new__ is object.__new__ and not isinstance(value, (type, Unread))
    return is_python and hasattr(value, "__dict__") and is_plain(vars(value))


def _check_fixed(optimizer: torch.optim.Optimizer, what: str, value: Any) -> None:
    """Raise PlanningError unless ``value`` is a function or class that does not refer to the
    optimizer, to tensors or to another optimizer."""
    why = _refusal(optimizer, value)
    if why:
        _refuse_attribute(optimizer, what, why)


def _refuse_attribute(optimizer: torch.optim.Optimizer, what: str, why: str) -> NoReturn:
    raise PlanningError(_text_of_refusal(optimizer, what, why))


def _text_of_refusal(optimizer: torch.optim.Optimizer, what: str, why: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot be made on the ranks: {what} {why}.\n"
        f"fix: use an optimizer whose attributes are numbers, text and functions"
    )


def _refusal(optimizer: torch.optim.Optimizer, value: Any, visited: tuple[Any, ...] = ()) -> str:
    """Return why the value cannot be given to another object, or "" if it can."""
    if isinstance(value, torch.optim.Optimizer):
        return f"is another optimizer, a {type(value).__name__}, which has a state of its own"
    if isinstance(value, torch.Tensor):
        return f"is a tensor of shape {list(value.shape)}"
    if not isinstance(value, _FUNCTION_TYPES):
        return f"is a {type(value).__name__}, which may hold tensors"
    parts: tuple[Any, ...] = ()
    if isinstance(value, functools.partial):
        parts = value.func, *value.args, *value.keywords.values()
    cells = getattr(value, "__closure__", None) or ()
    for referent in (*parts, *(cell.cell_contents for cell in cells if _has_value(cell))):
        if referent is optimizer:
            return "is a function that refers to the object itself"
        is_harmless = is_plain(referent) or any(
            referent is visited_value for visited_value in (value, *visited)
        )
        if not is_harmless and (why := _refusal(optimizer, referent, (value, *visited))):
            return f"is a function that refers to a value that {why}"
    return ""


def _has_value(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
