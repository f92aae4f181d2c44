"""A step reads Python state besides its arguments, and that state changes between steps: the result
is that of plain PyTorch, or an error names the state; no change is ignored."""

from __future__ import annotations

import array
import contextvars
import copy
import enum
import functools
import io
import itertools
import math
import operator
import os
import random
import sys
import threading
import time
import types
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt

MESH = dt.Mesh(tp=2)
STEPS = 3

Loss = Callable[..., Tensor]
Between = Callable[[Any, Tensor], Tensor]
Change = Callable[[int], object]
Made = tuple[nn.Module, Loss, Change]
"""A model, its loss, and what is done before step 1, 2, ..."""


class Net(nn.Module):
    """A model whose subclasses define what happens to the first layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = 1.0
        self.register_buffer("m", torch.zeros(16))

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.between(self.up(x))))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def net(between: Between | None = None, **held: Any) -> Any:
    """Return a `Net` with ``held`` as attributes."""
    own = {} if between is None else {"between": between}
    model = type("Net", (Net,), {**own, "__module__": __name__})()
    for name, value in held.items():
        setattr(model, name, value)
    return model


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    x = torch.randn(6, 8, generator=g, dtype=torch.float32)
    return x, torch.randint(0, 4, (6,), generator=g)


def attribute(of: Any, name: str = "beta") -> Change:
    return lambda i: setattr(of, name, 1.0 + i)


def entry(of: Any, key: Any = 0) -> Change:
    return lambda i: of.__setitem__(key, 1.0 + i)


def nothing(i: int) -> None:
    pass


def times(factor: Callable[[], Any], change: Change) -> Made:
    """Return a loss multiplied by the value that is read; `change(0)` sets the value first."""
    change(0)
    return net(), lambda m, x, y: cross_entropy(m, x, y) * factor(), change


def layer(factor: Callable[[], Any], change: Change) -> Made:
    """Return a model whose activations are multiplied by the value that is read."""
    change(0)
    return net(lambda self, h: h * factor()), cross_entropy, change


def model(between: Between | None, change: Callable[[Any], Change], **held: Any) -> Made:
    made = net(between, **held)
    return made, cross_entropy, change(made)


# -- numbers that a step reads ---------------------------------------------------------------------

BETA = 1.0
ORDER: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "double": lambda h: h * 2 - 1}
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)


@dataclass
class Config:
    beta: float = 1.0
    table: list[float] = field(default_factory=lambda: [1.0, 1.0])


@dataclass(slots=True)
class Slotted:
    beta: float = 1.0


class Pair(NamedTuple):
    a: float
    b: list[float]


class Mode(enum.Enum):
    PLAIN = 1
    TWICE = 2


class Forwarding:
    def __init__(self) -> None:
        self.held = {"beta": 1.0}

    def __getattr__(self, name: str) -> float:
        return self.__dict__["held"][name]


class Doubling(dict[str, float]):
    def __getitem__(self, key: str) -> float:
        return dict.__getitem__(self, key) * 2


class Registry:
    items: dict[str, float] = {"beta": 1.0}

    @classmethod
    def get(cls, key: str) -> float:
        return cls.items[key]


class Scale:
    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


class Double(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * 2 - 1


def chain(self: Any, h: Tensor) -> Tensor:
    for part in self.parts.values() if isinstance(self.parts, nn.ModuleDict) else self.parts:
        h = part(h)
    return h


def set_global(i: int) -> None:
    globals()["BETA"] = 1.0 + i


def helper(x: Tensor) -> Tensor:
    return x * BETA


@functools.lru_cache
def cached_factor(n: int) -> float:
    return n * BETA


def set_global_behind_cache(i: int) -> None:
    set_global(i)
    cached_factor.cache_clear()


def replace_helper(i: int) -> None:
    globals()["helper2"] = (lambda x: x * 2) if i % 2 else (lambda x: x * 3)


def set_environment(i: int) -> None:
    os.environ["DTENSOR_TEST_BETA"] = str(1.0 + i)


def numbers() -> dict[str, tuple[Callable[[], Any], Change]]:
    """Return ways to read a number, and how the number changes."""
    config, slotted, space, pair = Config(), Slotted(), types.SimpleNamespace(), Pair(1.0, [1.0])
    table: dict[str, Any] = {"beta": 1.0, "inner": {"gamma": [1.0, 2.0]}}
    user, doubling, forwarding = UserDict[str, float](), Doubling(), Forwarding()
    get, flags, last = table.get, set[str](), deque([1.0], maxlen=1)
    module, array, data = (
        types.ModuleType("a_config"),
        np.ones(16, dtype=np.float32),
        bytearray([1, 2]),
    )
    local, reference, factors = threading.local(), weakref.ref(config), [1.0, 2.0]
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    meta = type("Meta", (type,), {"beta": 1.0, "__module__": __name__})
    of_meta = meta("Config", (), {"__module__": __name__})
    kinds = [type(f"Kind{i}", (), {"beta": 1.0 + i, "__module__": __name__}) for i in range(STEPS)]
    of_kind, held, cell, grown = kinds[0](), {"at": 1.0}, 1.0, list[float]()
    imported = types.ModuleType("settings_of_a_test")
    sys.modules[imported.__name__] = imported

    def set_cell(i: int) -> None:
        nonlocal cell
        cell = 1.0 + i

    def each() -> Iterator[float]:
        yield from factors

    def read_imported() -> float:
        from settings_of_a_test import beta  # type: ignore[import-not-found]

        return beta

    def read_own_attribute() -> float:
        return read_own_attribute.beta  # type: ignore[attr-defined]

    return {
        "a closure cell": (lambda: cell, set_cell),
        "a global by a computed name": (lambda: globals()["be".upper() + "TA"], set_global),
        "the environment": (lambda: float(os.environ["DTENSOR_TEST_BETA"]), set_environment),
        "a context variable": (lambda: CONTEXT.get(), lambda i: CONTEXT.set(1.0 + i)),
        "an entry of a nested dict": (
            lambda: table["inner"]["gamma"][1],
            entry(table["inner"]["gamma"], 1),
        ),
        "an attribute of a config": (lambda: config.beta, attribute(config)),
        "a list of a config": (lambda: config.table[1], entry(config.table, 1)),
        "a dotted path": (lambda: operator.attrgetter("beta")(config), attribute(config)),
        "a slot": (lambda: slotted.beta, attribute(slotted)),
        "a namespace": (lambda: space.beta, attribute(space)),
        "a named tuple with a list": (lambda: pair.b[0], entry(pair.b)),
        "a user dict": (lambda: user["beta"], entry(user, "beta")),
        "a dict with a lookup of its own": (lambda: doubling["beta"], entry(doubling, "beta")),
        "a method bound to a dict": (lambda: get("beta"), entry(table, "beta")),
        "a list that grows": (
            lambda: 1.0 + sum(grown),
            lambda i: grown.append(1.0) if i else grown.clear(),
        ),
        "a deque": (lambda: last[0], lambda i: last.append(1.0 + i)),
        "a set": (
            lambda: 2.0 if "twice" in flags else 1.0,
            lambda i: (flags.add if i % 2 else flags.discard)("twice"),
        ),
        "a module of Python": (lambda: module.beta, attribute(module)),
        "a module imported by the loss": (read_imported, attribute(imported)),
        # torch's export puts another pow into math while it runs
        "pow of the module math": (lambda: math.pow(held["at"], 2), entry(held, "at")),
        "a NumPy array": (lambda: torch.from_numpy(array).sum(), entry(array)),
        "bytes that change": (lambda: data[0], lambda i: data.__setitem__(0, 1 + i)),
        "the learning rate": (
            lambda: other.param_groups[0]["lr"],
            entry(other.param_groups[0], "lr"),
        ),
        "what a thread has": (lambda: local.beta, attribute(local)),
        "an attribute looked up elsewhere": (
            lambda: forwarding.beta,
            entry(forwarding.held, "beta"),
        ),
        "an attribute of a function": (read_own_attribute, attribute(read_own_attribute)),
        "the class of an object": (
            lambda: of_kind.beta,
            lambda i: setattr(of_kind, "__class__", kinds[i]),
        ),
        "an attribute of a metaclass": (lambda: of_meta.beta, attribute(meta)),
        "behind a weak reference": (lambda: reference().beta, attribute(config)),
        "a generator function": (lambda: sum(each()), entry(factors)),
        "a class method over a registry": (
            lambda: Registry.get("beta"),
            entry(Registry.items, "beta"),
        ),
        "a cached function": (lambda: cached_factor(2), set_global_behind_cache),
    }


WAYS: dict[str, Callable[[], Made]] = {
    name: functools.partial(layer if number % 2 else times, *own)
    for number, (name, own) in enumerate(numbers().items())
}

# -- values of tensors that Python reads -----------------------------------------------------------

EIGHT = [float(i) for i in range(8)]
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.item(),
    "complex of an op": lambda t: complex(t * 1).real,
    "format of an op": lambda t: float(f"{t * 1:.3f}"),
    "equal": lambda t: [torch.equal(t, torch.tensor(x)) for x in EIGHT].index(True),
    "float": float,
    "tolist": lambda t: t.tolist(),
    "repr": lambda t: float(repr(t)[7]),
    "format": lambda t: float(f"{t:.1f}"),
    "NumPy": lambda t: float(t.numpy()),
    "an array": lambda t: float(np.asarray(t)),
    "math": lambda t: math.sqrt(t),
    "a copy": lambda t: float(copy.deepcopy(t)),
    "range": lambda t: len(range(int(t))),
    "an index of a list": lambda t: EIGHT[int(t)],
    "alpha": lambda t: torch.add(torch.ones(()), torch.ones(()), alpha=t),
    "full": lambda t: torch.full((), t),
    "a tensor of tensors": lambda t: torch.tensor([[t], [t]]).sum(),
    "as_tensor": lambda t: torch.as_tensor([t, 2.0]).sum(),
}
DERIVED: dict[str, Callable[[Tensor], Any]] = {
    "truth of a difference": lambda t: 2.0 if t - 2 else 3.0,
    "arange": lambda t: torch.arange(t + 1).sum(),
    "a copy in whole numbers": lambda t: torch.ones(8)[: t.long()].sum(),
}
"""Reads of a tensor that an op has made, which are refused."""


def read(how: Callable[[Tensor], Any]) -> Made:
    t = torch.tensor(0.0)
    return times(lambda: how(t), lambda i: t.fill_(1.0 + i))


def in_a_dict() -> Made:
    held = {"t": torch.tensor(1.0)}
    return times(lambda: held["t"].item(), lambda i: held.update(t=torch.tensor(1.0 + i)))


def of_a_thread() -> Made:
    local = threading.local()
    return times(lambda: local.t.item(), lambda i: setattr(local, "t", torch.tensor(1.0 + i)))


WAYS |= {f"value, {name}": functools.partial(read, how) for name, how in READS.items()}
WAYS |= {"value, in a dict": in_a_dict, "value, of a thread": of_a_thread}

# -- tensors that are caught -----------------------------------------------------------------------


def caught(change: Callable[[dict[str, Tensor], int], object], *, size: int = 16) -> Made:
    """Return a model whose activations are multiplied by a tensor in a closure."""
    held = {"it": torch.ones(size)}
    made = layer(lambda: held["it"][:16], nothing)
    return (*made[:2], lambda i: change(held, i))


def not_a_number() -> Made:
    mask = torch.ones(16)
    mask[0] = float("nan")
    return layer(lambda: mask.nan_to_num(2.0), lambda i: mask[1:].fill_(1.0 + i))


def sign_of_zero() -> Made:
    zero = torch.zeros(16)

    def change(i: int) -> None:
        zero.numpy()[:] = -0.0 if i == 1 else 0.0

    return layer(lambda: (1 / zero).clamp(-2, 2), change)


def in_a_list() -> Made:
    tables = [torch.ones(16), torch.ones(16)]
    change = lambda i: tables.__setitem__(1, torch.full((16,), 1.0 + i))  # noqa: E731
    return layer(lambda: tables[0] + tables[1], change)


def teacher() -> Made:
    known = nn.Linear(8, 4).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = known(x)
        return F.mse_loss(model(x), wanted)

    return net(), loss, lambda i: known.weight.data.mul_(1.5)


def full(i: int, *shape: int) -> Tensor:
    return torch.full(shape, 1.0 + i)


WAYS |= {
    "a tensor changed in place": lambda: caught(lambda h, i: h["it"].fill_(1.0 + i)),
    "... through NumPy": lambda: caught(lambda h, i: h["it"].numpy().fill(1.0 + i)),
    "... through data": lambda: caught(lambda h, i: h["it"].data.mul_(2)),
    "... its data set": lambda: caught(lambda h, i: setattr(h["it"], "data", full(i, 16))),
    "... replaced": lambda: caught(lambda h, i: h.update(it=full(i, 16))),
    "... by another shape": lambda: caught(lambda h, i: h.update(it=full(i, 1 if i % 2 else 16))),
    "a large tensor in place": lambda: caught(lambda h, i: h["it"].fill_(1.0 + i), size=360000),
    "a large tensor replaced": lambda: caught(
        lambda h, i: h.update(it=full(i, 360000)), size=360000
    ),
    "a tensor as an attribute": lambda: model(
        lambda self, h: h * self.table,
        lambda m: lambda i: setattr(m, "table", full(i, 16)),
        table=torch.ones(16),
    ),
    "a tensor in a list": in_a_list,
    "a tensor with NaNs": not_a_number,
    "the sign of a zero": sign_of_zero,
    "a teacher in a closure": teacher,
}

# -- modules, classes and functions ----------------------------------------------------------------


def replaced_code() -> Made:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def doubled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) * 2

    return net(), loss, lambda i: setattr(loss, "__code__", doubled.__code__)


def default_argument() -> Made:
    def loss(model: nn.Module, x: Tensor, y: Tensor, beta: float = 1.0) -> Tensor:
        return cross_entropy(model, x, y) * beta

    return net(), loss, lambda i: setattr(loss, "__defaults__", (1.0 + i,))


def keyword_default() -> Made:
    def loss(model: nn.Module, x: Tensor, y: Tensor, *, beta: float = 1.0) -> Tensor:
        return cross_entropy(model, x, y) * beta

    return net(), loss, entry(loss.__kwdefaults__, "beta")


def partial() -> Made:
    scale = {"by": 1.0}

    def loss(by: dict[str, float], model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) * by["by"]

    return net(), functools.partial(loss, scale), entry(scale, "by")


def typed_code() -> Made:
    space: dict[str, Any] = {"F": F, "BETA": 1.0, "__name__": "__main__"}
    exec("def loss(m, x, y): return F.cross_entropy(m(x), y) * BETA", space)
    return net(), space["loss"], entry(space, "BETA")


def decorated() -> Made:
    made = net(lambda self, h: h * self.factor(h))
    type(made).factor = torch.no_grad()(lambda self, h: h.mean() * 0 + BETA)
    set_global(0)
    return made, cross_entropy, set_global


def class_attribute(change: Callable[[Any], Change], read: str = "factor") -> Made:
    made = net(lambda self, h: h * getattr(self, read))
    type(made).factor = 1.0
    type(made).doubled = property(lambda self: 2 * self.scale)
    return made, cross_entropy, change(made)


def patched_class() -> Made:
    made = net()
    plain = type(made).between
    patch = lambda by: lambda self, h: plain(self, h) * by  # noqa: E731
    return made, cross_entropy, lambda i: setattr(type(made), "between", patch(1.0 + i))


def function_of_torch() -> Made:
    plain = F.silu

    def change(i: int) -> None:
        F.silu = (lambda x: torch.tanh(x) * 2) if i == 1 else plain

    return model(lambda self, h: F.silu(h), lambda m: change)


def closure_of_an_attribute() -> Made:
    by = 1.0

    def change(i: int) -> None:
        nonlocal by
        by = 1.0 + i

    return model(lambda self, h: self.fn(h), lambda m: change, fn=lambda h: h * by)


def function_in_a_table() -> Made:
    ops, others = {"act": torch.relu}, [torch.relu, torch.tanh, torch.sigmoid]
    return model(lambda self, h: ops["act"](h), lambda m: lambda i: ops.update(act=others[i]))


def static_method() -> Made:
    made = net(lambda self, h: self.f(h))
    type(made).f = staticmethod(lambda h: h)
    return (
        made,
        cross_entropy,
        lambda i: setattr(type(made), "f", staticmethod(lambda h: h * i)),
    )


def hook_of_every_module() -> Made:
    handles: list[Any] = []

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        return out * 2 if isinstance(module, nn.Linear) else None

    def change(i: int) -> None:
        if i == 1:
            handles.append(nn.modules.module.register_module_forward_hook(hook))
        if i == STEPS - 1:
            handles.pop().remove()

    return net(), cross_entropy, change


def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2.0


def removed_hook() -> Made:
    made = net()
    handle = made.up.register_forward_hook(double)
    return made, cross_entropy, lambda i: handle.remove()


def state_of_a_hook() -> Made:
    made, by = net(), {"it": 1.0}
    made.up.register_forward_pre_hook(lambda module, args: (args[0] * by["it"],))
    return made, cross_entropy, entry(by, "it")


def default_dtype() -> Made:
    dtypes = [torch.float32, torch.float64, torch.float32]
    made = net(lambda self, h: h * (1.0 if torch.tensor(1.0).dtype == torch.float32 else 2.0))
    return made, cross_entropy, lambda i: torch.set_default_dtype(dtypes[i])


def rotate(parts: Any) -> Change:
    """Put the same objects under the same names in another order."""

    def change(i: int) -> None:
        first = next(iter(parts))
        part = parts.pop(first)
        parts[first] = part

    return change


def in_order(self: Any, h: Tensor) -> Tensor:
    for function in ORDER.values():
        h = function(h)
    return h


def patch_forward(act: Any) -> Change:
    forward = lambda i: types.MethodType(lambda self, x: torch.tanh(x) * i, act)  # noqa: E731
    return lambda i: setattr(act, "forward", forward(i))


def assign(name: str, *values: Any) -> Callable[[Any], Change]:
    return lambda m: lambda i: setattr(m, name, values[i])


def act(self: Any, h: Tensor) -> Tensor:
    return self.act(h)


ACTS = [nn.ReLU(), nn.Tanh(), nn.SiLU()]

WAYS |= {
    "a global in a helper": lambda: layer(lambda: helper(torch.ones(())), set_global),
    "a default argument": default_argument,
    "a keyword default": keyword_default,
    "the code of a function": replaced_code,
    "a helper that is replaced": lambda: layer(
        lambda: helper2(1.0),  # type: ignore[name-defined]  # noqa: F821
        replace_helper,
    ),
    "a partial": partial,
    "code that was typed": typed_code,
    "what a decorated method reads": decorated,
    "a function of torch": function_of_torch,
    "the closure of an attribute": closure_of_an_attribute,
    "a function in a table": function_in_a_table,
    "an attribute of the model": lambda: model(None, lambda m: attribute(m, "scale")),
    "1, True and 1.0": lambda: model(
        lambda self, h: h * (2.0 if self.scale is True else 1.0),
        assign("scale", 1, True, 1.0),
        scale=1,
    ),
    "minus zero": lambda: model(
        lambda self, h: h * (2.0 if str(self.scale) == "-0.0" else 1.0),
        assign("scale", 0.0, -0.0, 0.0),
        scale=0.0,
    ),
    "an attribute that hides the class": lambda: class_attribute(lambda m: attribute(m, "factor")),
    "a class attribute": lambda: class_attribute(lambda m: attribute(type(m), "factor")),
    "a property": lambda: class_attribute(lambda m: attribute(m, "scale"), "doubled"),
    "an attribute by a computed name": lambda: model(
        lambda self, h: h * getattr(self, f"factor_{len('ab')}"),
        lambda m: attribute(m, "factor_2"),
        factor_2=1.0,
    ),
    "an attribute that getattr may miss": lambda: model(
        lambda self, h: h * getattr(self, "late", 1.0), lambda m: attribute(m, "late")
    ),
    "an enum": lambda: model(
        lambda self, h: h * self.mode.value,
        assign("mode", Mode.PLAIN, Mode.TWICE, Mode.PLAIN),
        mode=Mode.PLAIN,
    ),
    "a NumPy number": lambda: model(
        lambda self, h: h * float(self.number),
        lambda m: lambda i: setattr(m, "number", np.float64(1.0 + i)),
        number=np.float64(1.0),
    ),
    "an object that is called": lambda: model(act, lambda m: attribute(m.act, "by"), act=Scale()),
    "a static method": static_method,
    "training and evaluation": lambda: model(
        lambda self, h: h * (2.0 if self.training else 1.0), lambda m: lambda i: m.train(i % 2 == 0)
    ),
    "the mode of one part": lambda: model(
        lambda self, h: F.relu(h) if self.up.training else h,
        lambda m: lambda i: m.up.train(i % 2 == 0),
    ),
    "an attribute of a layer of torch": lambda: model(
        act, lambda m: lambda i: setattr(m.act, "eps", 10.0**-i), act=nn.LayerNorm(16)
    ),
    "the rate of a dropout": lambda: model(
        act, lambda m: lambda i: setattr(m.act, "p", float(i % 2)), act=nn.Dropout(0.0)
    ),
    "a part that is swapped": lambda: model(act, assign("act", *ACTS), act=ACTS[0]),
    "an entry of a module list": lambda: model(
        lambda self, h: self.acts[0](h),
        lambda m: lambda i: m.acts.__setitem__(0, ACTS[i]),
        acts=nn.ModuleList([ACTS[0]]),
    ),
    "a module list that grows": lambda: model(
        chain, lambda m: lambda i: m.parts.append(nn.Tanh()), parts=nn.ModuleList([nn.Tanh()])
    ),
    "a module list that shrinks": lambda: model(
        chain,
        lambda m: lambda i: m.parts.__delitem__(0),
        parts=nn.ModuleList([nn.Tanh() for _ in range(5)]),
    ),
    "another class": lambda: model(
        act, lambda m: lambda i: setattr(m.act, "__class__", nn.SiLU), act=nn.ReLU()
    ),
    "a forward that is patched": lambda: model(act, lambda m: patch_forward(m.act), act=nn.ReLU()),
    "a forward that is patched on its class": patched_class,
    "parts in another order": lambda: model(
        chain,
        lambda m: rotate(m.parts),
        parts=nn.ModuleDict({"relu": nn.ReLU(), "tanh": nn.Tanh(), "twice": Double()}),
    ),
    "a dict in another order": lambda: model(in_order, lambda m: rotate(ORDER)),
    "a hook that is added": lambda: model(
        None, lambda m: lambda i: m.up.register_forward_hook(double)
    ),
    "a hook that is removed": removed_hook,
    "what a hook reads": state_of_a_hook,
    "a hook of every module": hook_of_every_module,
    "requires_grad": lambda: model(
        None, lambda m: lambda i: m.up.weight.requires_grad_(i % 2 == 0)
    ),
    "the default dtype": default_dtype,
}

# -- what forward itself changes -------------------------------------------------------------------


def cached_width(self: Any, h: Tensor) -> Tensor:
    if self.width is None:
        self.width = h.shape[-1]
    return h / self.width**0.5


def first_call(self: Any, h: Tensor) -> Tensor:
    if not self.ready:
        self.ready = True
        return h * 3.0
    return h


def buffer_in_place(self: Any, h: Tensor) -> Tensor:
    self.m.mul_(0.9).add_(0.1 * h.mean(0).detach())
    return h - self.m


def buffer_anew(self: Any, h: Tensor) -> Tensor:
    self.m = 0.9 * self.m + 0.1 * h.mean(0).detach()
    return h - self.m


def still(m: Any) -> Change:
    return nothing


WAYS |= {
    "a cache of a number": lambda: model(cached_width, still, width=None),
    "a first call that differs": lambda: model(first_call, still, ready=False),
    "a buffer changed in place": lambda: model(buffer_in_place, still),
    "a buffer assigned anew": lambda: model(buffer_anew, still),
}

# -- what is refused -------------------------------------------------------------------------------


def count_calls(self: Any, h: Tensor) -> Tensor:
    self.calls += 1
    return h * self.calls


def append_to_a_list() -> Made:
    seen: list[int] = []

    def between(self: Any, h: Tensor) -> Tensor:
        seen.append(len(seen))
        return h * len(seen)

    return model(between, still)


def count_in_a_closure() -> Made:
    count = 0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return cross_entropy(model, x, y) * count

    return net(), loss, nothing


def keep_activations() -> Made:
    made, kept = net(), dict[str, Tensor]()
    made.up.register_forward_hook(lambda module, args, out: kept.update(up=out.detach()))
    return made, cross_entropy, nothing


def keep_tensor(self: Any, h: Tensor) -> Tensor:
    self.last = h
    return h


def keep_gradient(self: Any, h: Tensor) -> Tensor:
    self.m = 0.9 * self.m + 0.1 * h.mean(0)
    return h - self.m


def keep_another_shape(self: Any, h: Tensor) -> Tensor:
    self.m = h.detach().mean()
    return h - self.m


def set_seed(self: Any, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h


def hook_activation(self: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def drawing(source: Any, draw: Callable[[Any], float]) -> Made:
    return layer(lambda: draw(source), nothing)


def hooked(register: Callable[[Any], object], *, late: bool = False) -> Made:
    made = net()
    if not late:
        register(made)
    return made, cross_entropy, (lambda i: register(made)) if late else nothing


def changed_in_c() -> dict[str, tuple[Callable[[], float], str]]:
    """Return functions of C that change an object, with the text of the refusal."""
    counts, octets, text = np.zeros(1), bytearray(1), io.StringIO("12345")
    numbers, left = array.array("d", [0.0]), deque(EIGHT)
    pop, part = left.popleft, functools.partial(list.pop, list(EIGHT))

    def delegates() -> Iterator[float]:
        yield from EIGHT

    eight = delegates()
    next(eight)
    return {
        "an array": (lambda: np.add(counts, 1, out=counts)[0], r"array\(\[1.*array\(\[2"),
        "a bytearray": (lambda: octets.__setitem__(0, octets[0] + 1) or octets[0], "octets"),
        "an array of Python's": (lambda: numbers.append(1.0) or len(numbers), "numbers"),
        "a text in memory": (lambda: float(text.read(1)), "text"),
        "a deque by a method": (lambda: pop(), "pop"),
        "a list by a partial": (lambda: part(), "part"),
        "a generator that delegates": (lambda: eight.send(None), "draws from eight"),
    }


DRAWN = r"draws from source \(closure of"
ADVANCED = r"source \(closure of"
HOOKED = r"hook on a gradient.*\n.*up"
REFUSED: dict[str, tuple[Callable[[], Made], str]] = {
    "a counter": (lambda: model(count_calls, still, calls=0), r"calls: 1 -> 2.*register_buffer"),
    "a list that forward appends to": (append_to_a_list, r"seen \(closure of between\)"),
    "a nonlocal that the loss counts": (count_in_a_closure, r"count \(closure of loss\)"),
    "activations that a hook keeps": (keep_activations, r"stores a tensor.*\n.*kept"),
    "a tensor that forward keeps": (lambda: model(keep_tensor, still), "stores a tensor"),
    "a buffer with its gradient": (lambda: model(keep_gradient, still), "requires grad"),
    "a buffer of another shape": (lambda: model(keep_another_shape, still), "stores a tensor"),
    "Python's random": (
        lambda: layer(lambda: random.random(), nothing),
        "draws from Python's random",
    ),
    "NumPy's random": (lambda: layer(lambda: np.random.rand(), nothing), "draws from numpy.random"),
    "a generator of NumPy": (
        lambda: drawing(np.random.default_rng(0), lambda rng: rng.random()),
        DRAWN,
    ),
    "a generator of Python": (lambda: drawing(random.Random(0), lambda rng: rng.random()), DRAWN),
    "a seed that forward sets": (lambda: model(set_seed, still), "torch's generator"),
    "an iterator": (lambda: drawing(itertools.count(1), next), ADVANCED),
    "pairs": (lambda: drawing(itertools.pairwise(EIGHT), lambda it: next(it)[1]), ADVANCED),
    "a reversed dict": (lambda: drawing(reversed(dict.fromkeys(EIGHT)), next), ADVANCED),
    "what a function gives": (lambda: drawing(iter(iter(EIGHT).__next__, 9.0), next), ADVANCED),
    **{
        f"{name} that a step changes": (functools.partial(layer, change, nothing), said)
        for name, (change, said) in changed_in_c().items()
    },
    **{
        f"value, {name}": (functools.partial(read, how), "depends on a tensor's value")
        for name, how in DERIVED.items()
    },
    "a generator function's": (lambda: drawing((float(i) for i in range(9)), next), ADVANCED),
    "a hook of a parameter": (
        lambda: hooked(lambda m: m.up.weight.register_hook(lambda grad: grad * 2)),
        HOOKED + ".weight",
    ),
    "a hook of a parameter, added later": (
        lambda: hooked(lambda m: m.up.weight.register_hook(lambda grad: grad * 2), late=True),
        HOOKED + ".weight",
    ),
    "a hook after accumulation": (
        lambda: hooked(
            lambda m: m.up.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
        ),
        HOOKED + ".weight",
    ),
    "a backward hook of a module": (
        lambda: hooked(lambda m: m.up.register_full_backward_hook(lambda m, i, o: (i[0],))),
        HOOKED,
    ),
    "a hook of an activation": (lambda: model(hook_activation, still), "hook on a gradient"),
}

# -- the tables ------------------------------------------------------------------------------------


def step_of(model: nn.Module, loss: Loss, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dt.train_step(dt.parallelize(model, MESH, {}), loss, optimizer, **options)


def plain_step(model: nn.Module, loss: Loss) -> Loss:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*args: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, *args)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def losses(make: Callable[[], Made], step_of: Callable[..., Any]) -> tuple[list[float], Any]:
    """Return the losses of all steps, and the step."""
    torch.manual_seed(0)
    made, loss, change = make()
    step, found = step_of(made, loss), list[float]()
    for i in range(STEPS):
        if i:
            change(i)
        found.append(float(step(*batch(i))))
    return found, step


SAMPLE = (  # of each kind of thing that may change
    *("what a thread has", *(name for name in WAYS if name.startswith("value"))),
    *("a closure cell", "a global in a helper", "a default argument", "a helper that is replaced"),
    *("an attribute of the model", "1, True and 1.0", "a slot", "a list that grows"),
    *("a tensor changed in place", "a large tensor replaced", "the sign of a zero"),
    *("training and evaluation", "a part that is swapped", "a forward that is patched"),
    *("a hook that is added", "requires_grad", "a cache of a number", "a first call that differs"),
    *("a buffer changed in place", "a buffer assigned anew", "parts in another order"),
    *("a cached function", "a global by a computed name", "a method bound to a dict"),
    *(
        "code that was typed",
        "the rate of a dropout",
        "the learning rate",
        "pow of the module math",
    ),
)


@pytest.mark.default("a buffer assigned anew", "value, item")
@pytest.mark.sample(*SAMPLE)
@pytest.mark.filterwarnings("ignore:.*A step was captured for each")
@pytest.mark.parametrize("name", WAYS)
def test_changed_python_state_gives_losses_of_torch(name: str) -> None:
    expected, _ = losses(WAYS[name], plain_step)
    assert len(set(expected)) == STEPS
    with dt.launch(MESH):
        found, _ = losses(WAYS[name], step_of)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.default("a hook of an activation", "an array that a step changes")
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_python_state_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(dt.PlanningError, match=f"(?s){message}"), dt.launch(MESH):
        losses(make, step_of)


# -- what is said ----------------------------------------------------------------------------------


def test_value_that_changes_at_each_step_warns_of_repeated_captures() -> None:
    model = net()
    step = step_of(model, cross_entropy)
    for i in range(3):
        model.scale = 1.0 + i
        step.plan(*batch(i))
    model.scale = 4.0
    with pytest.warns(
        UserWarning, match=r"(?s)scale: 3.0 -> 4.0.*last 4 values.*torch.tensor\("
    ) as w:
        step.plan(*batch(3))
    assert len(w) == 1 and w[0].filename == __file__
    model.scale = 2.0  # known
    step.plan(*batch(4))
    assert len(step.plans) == 4


def test_warning_names_number_argument_that_changes() -> None:
    step = step_of(net(), lambda model, x, y, beta: cross_entropy(model, x, y) * beta)
    with pytest.warns(UserWarning, match=r"the argument beta: 0.0 -> 3.0"):
        for i in range(4):
            step.plan(*batch(0), 0.0)
            step.plan(*batch(i), float(i))
    step.plan(*batch(0), torch.tensor(0.5))
    step.plan(*batch(0), torch.tensor(0.7))
    assert len(step.plans) == 5


def test_warning_names_closure_tensor_whose_value_is_read() -> None:
    t = torch.tensor(1.0)
    step = step_of(net(), lambda model, x, y: cross_entropy(model, x, y) * t.item())
    with pytest.warns(UserWarning, match=r"t \(closure of <lambda>\): 3.0 -> 4.0"):
        for i in range(4):
            step.plan(*batch(i))
            t.add_(1)
    t.fill_(1.0)
    step.plan(*batch(0))
    assert len(step.plans) == 4


def test_equal_replacement_objects_cause_no_new_capture() -> None:
    model = net(lambda self, h: h * self.config.beta * self.table[0] * sum(self.numbers))
    step = None
    for _ in range(3):
        model.config, model.table, model.numbers = Config(0.5), torch.ones(2), [1.0, 2.0]
        step = step or step_of(model, cross_entropy)
        step.plan(*batch(0))
    assert step is not None and len(step.plans) == 1


def test_reading_clock_warns_that_it_is_read_once() -> None:
    step = step_of(net(lambda self, h: h * (time.time() % 7)), cross_entropy)
    with pytest.warns(UserWarning, match=r"reads the clock, once.*test_python_state.py:\d+"):
        step.plan(*batch(0))


def test_capture_each_call_draws_random_numbers_as_torch() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.from_numpy(np.random.rand(16).astype(np.float32))
        return h * noise * random.choice([0.5, 2.0]) + self.calls % 2

    def run(step_of: Callable[..., Any]) -> list[float]:
        np.random.seed(0)
        random.seed(0)
        found, _ = losses(lambda: model(between, still, calls=0), step_of)
        return found

    expected = run(plain_step)
    with dt.launch(MESH):
        found = run(functools.partial(step_of, capture="each call"))
    assert found == pytest.approx(expected, rel=1e-5)


class ByClass(dict[str, float]):
    """A dict that stores a value under the class name of its key; its `get` takes no default."""

    def __setitem__(self, key: object, value: float) -> None:
        super().__setitem__(type(key).__name__, value)

    def get(self, key: object) -> float:  # type: ignore[override]
        return super().get(type(key).__name__) or 1.0


SCALES = ByClass()


def test_dict_subclass_with_own_methods_is_read_as_dict() -> None:
    """A registry in transformers is one; its `get` takes no unexpected arguments."""
    net = Net()
    SCALES[net] = 2.0
    model = dt.parallelize(net, MESH, {})
    step = dt.train_step(
        model,
        lambda model, x: model(x).square().mean() * SCALES.get(net),
        torch.optim.SGD(model.parameters(), lr=0.0),
    )
    x = torch.randn(3, 8)
    wanted = net(x).square().mean().item()
    with dt.launch(MESH):
        found = [float(step(x))]
        SCALES[net] = 3.0
        found.append(float(step(x)))
    assert found == pytest.approx([2 * wanted, 3 * wanted], rel=1e-5)


class WithDefault(dict[str, float]):
    def __getitem__(self, key: str) -> float:
        return self.get(key, 1.0)


def test_first_item_added_to_default_dict_subclass_is_noticed() -> None:
    scales = WithDefault()
    scaled_sum = dt.compile(lambda x: (x * scales["a"]).sum(), MESH)
    x = torch.ones(4)
    with dt.launch(MESH):
        found = [float(scaled_sum(x))]
        scales["a"] = 2.0
        found.append(float(scaled_sum(x)))
    assert found == [4.0, 8.0]


def test_attributes_set_on_parallelized_model_change_the_module() -> None:
    """As users of plain torch set them, on the object that `parallelize` returned."""
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    model: Any = dt.parallelize(net, MESH, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = dt.train_step(model, cross_entropy, optimizer)
    x, y = batch(0)
    with dt.launch(MESH):
        for scale, down in [(1.0, plain.down), (2.0, plain.down), (2.0, nn.Linear(16, 4))]:
            plain.scale = model.scale = scale
            plain.down, model.down = down, copy.deepcopy(down)
            assert float(step(x, y)) == pytest.approx(cross_entropy(plain, x, y).item(), rel=1e-5)
    assert net.scale == model.scale == 2.0 and model.down is net.down
    del model.scale
    assert not hasattr(net, "scale")
    assert model.mesh is MESH and copy.deepcopy(model).mesh == MESH


def test_capture_option_rejects_unknown_value() -> None:
    with pytest.raises(dt.PlanningError, match='capture=.*"once" or "each call"'):
        step_of(net(), cross_entropy, capture="every call")


def test_refused_step_leaves_python_state_unchanged() -> None:
    seen: list[int] = []

    def between(self: Any, h: Tensor) -> Tensor:
        seen.append(1)
        self.calls += 1
        self.config.table.append(0.0)
        return h * random.random()

    model = net(between)
    model.calls, model.config = 0, Config()
    state = random.getstate()
    with pytest.raises(dt.PlanningError, match="draws from Python's random"):
        step_of(model, cross_entropy).plan(*batch(0))
    assert (seen, model.calls, model.config.table) == ([], 0, [1.0, 1.0])
    assert random.getstate() == state


def test_optimizer_step_pre_hook_is_refused() -> None:
    model = net()
    step = step_of(model, cross_entropy)
    handle = step.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(dt.PlanningError, match="SGD has a hook before its step"):
        step.plan(*batch(0))
    handle.remove()
