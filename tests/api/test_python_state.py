"""Ways in which what a step reads besides its arguments changes between steps: each is as in plain
PyTorch, or an error that names it; none is ignored."""

from __future__ import annotations

import contextvars
import copy
import enum
import functools
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
Made = tuple[nn.Module, Loss, Callable[[int], object]]
"""A model, its loss, and what is done before step 1, 2, ..."""

WAYS: dict[str, tuple[Callable[[], Made], str | None]] = {}


def way(refused: str | None = None) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """``refused``: what the error says; None: as in torch."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        WAYS[make.__name__] = (make, refused)
        return make

    return add


class Net(nn.Module):
    """Subclasses say what happens to the first layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = 1.0
        self.register_buffer("m", torch.zeros(16))

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.between(self.up(x))))


class Double(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * 2 - 1


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def net(between: Callable[[Any, Tensor], Tensor] | None = None) -> Any:
    own = {} if between is None else {"between": between}
    return type("Net", (Net,), {**own, "__module__": __name__})()


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    x = torch.randn(6, 8, generator=g, dtype=torch.float32)
    return x, torch.randint(0, 4, (6,), generator=g)


# -- closures, globals, defaults -------------------------------------------------------------------


@way()
def a_closure_cell() -> Made:
    beta = 1.0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) * beta

    def change(i: int) -> None:
        nonlocal beta
        beta = 1.0 + i

    return net(), loss, change


BETA = 1.0
TABLE = torch.ones(16)
SETTINGS: dict[str, Any] = {"beta": 1.0, "inner": {"gamma": [1.0, 2.0]}}
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
CHOSEN = functools.partial(torch.mul, other=2.0)


@way()
def a_global() -> Made:
    def change(i: int) -> None:
        globals()["BETA"] = 1.0 + i

    change(0)
    return net(), lambda m, x, y: cross_entropy(m, x, y) * BETA, change


def helper(x: Tensor) -> Tensor:
    return x * BETA


@way()
def a_global_in_a_helper() -> Made:
    def change(i: int) -> None:
        globals()["BETA"] = 1.0 + i

    change(0)
    return net(lambda self, h: helper(h)), cross_entropy, change


@way()
def a_default_argument() -> Made:
    def loss(model: nn.Module, x: Tensor, y: Tensor, beta: float = 1.0) -> Tensor:
        return cross_entropy(model, x, y) * beta

    def change(i: int) -> None:
        loss.__defaults__ = (1.0 + i,)

    return net(), loss, change


@way()
def a_keyword_default() -> Made:
    def loss(model: nn.Module, x: Tensor, y: Tensor, *, beta: float = 1.0) -> Tensor:
        return cross_entropy(model, x, y) * beta

    def change(i: int) -> None:
        assert loss.__kwdefaults__ is not None
        loss.__kwdefaults__["beta"] = 1.0 + i

    return net(), loss, change


@way()
def the_code_of_a_function() -> Made:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def doubled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) * 2

    def change(i: int) -> None:
        loss.__code__ = doubled.__code__

    return net(), loss, change


@way()
def a_helper_that_is_replaced() -> Made:
    def change(i: int) -> None:
        globals()["helper2"] = (lambda x: x * 2) if i % 2 else (lambda x: x * 3)

    change(0)
    return net(lambda self, h: helper2(h)), cross_entropy, change  # noqa: F821


@way()
def a_partial() -> Made:
    scale = {"by": 1.0}

    def loss(by: dict[str, float], model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) * by["by"]

    def change(i: int) -> None:
        scale["by"] = 1.0 + i

    return net(), functools.partial(loss, scale), change


@way()
def an_entry_of_a_nested_dict() -> Made:
    def change(i: int) -> None:
        SETTINGS["inner"]["gamma"][1] = 2.0 + i

    change(0)
    return net(), lambda m, x, y: cross_entropy(m, x, y) * SETTINGS["inner"]["gamma"][1], change


@way()
def the_environment() -> Made:
    def change(i: int) -> None:
        os.environ["DTENSOR_TEST_BETA"] = str(1.0 + i)

    change(0)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) * float(os.environ["DTENSOR_TEST_BETA"])

    return net(), loss, change


@way()
def a_context_variable() -> Made:
    def change(i: int) -> None:
        CONTEXT.set(1.0 + i)

    change(0)
    return net(), lambda m, x, y: cross_entropy(m, x, y) * CONTEXT.get(), change


# -- attributes and items --------------------------------------------------------------------------


@way()
def an_attribute_of_the_model() -> Made:
    model = net()
    return model, cross_entropy, lambda i: setattr(model, "scale", 1.0 + i)


@way()
def one_and_true_and_one_point_zero() -> Made:
    model = net(lambda self, h: h * (2.0 if self.scale is True else 1.0))
    values = [1, True, 1.0, True]
    model.scale = 1
    return model, cross_entropy, lambda i: setattr(model, "scale", values[i])


@way()
def minus_zero() -> Made:
    model = net(lambda self, h: h * (2.0 if str(self.scale) == "-0.0" else 1.0))
    model.scale = 0.0
    return model, cross_entropy, lambda i: setattr(model, "scale", -0.0 if i % 2 else 0.0)


@way()
def a_new_attribute_that_hides_the_class() -> Made:
    model = net(lambda self, h: h * self.factor)
    type(model).factor = 1.0
    return model, cross_entropy, lambda i: setattr(model, "factor", 1.0 + i)


@way()
def a_class_attribute() -> Made:
    model = net(lambda self, h: h * self.factor)
    type(model).factor = 1.0
    return model, cross_entropy, lambda i: setattr(type(model), "factor", 1.0 + i)


@way()
def an_attribute_found_by_a_computed_name() -> Made:
    model = net(lambda self, h: h * getattr(self, f"factor_{len('ab')}"))
    model.factor_2 = 1.0
    return model, cross_entropy, lambda i: setattr(model, "factor_2", 1.0 + i)


@way()
def an_attribute_that_getattr_may_miss() -> Made:
    model = net(lambda self, h: h * getattr(self, "late", 1.0))
    return model, cross_entropy, lambda i: setattr(model, "late", 1.0 + i)


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


@way()
def an_attribute_of_a_config() -> Made:
    model = net(lambda self, h: h * self.config.beta)
    model.config = Config()
    return model, cross_entropy, lambda i: setattr(model.config, "beta", 1.0 + i)


@way()
def a_config_in_an_argument() -> Made:
    model = net()
    model.config = Config()

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(m, x, y) * m.config.table[1]

    def change(i: int) -> None:
        model.config.table[1] = 1.0 + i

    return model, loss, change


@way()
def a_slot() -> Made:
    model = net(lambda self, h: h * self.config.beta)
    model.config = Slotted()
    return model, cross_entropy, lambda i: setattr(model.config, "beta", 1.0 + i)


@way()
def a_namespace() -> Made:
    space = types.SimpleNamespace(beta=1.0)
    return (
        net(),
        lambda m, x, y: cross_entropy(m, x, y) * space.beta,
        lambda i: setattr(space, "beta", 1.0 + i),
    )


@way()
def a_named_tuple_with_a_list() -> Made:
    pair = Pair(1.0, [1.0])

    def change(i: int) -> None:
        pair.b[0] = 1.0 + i

    return net(), lambda m, x, y: cross_entropy(m, x, y) * pair.b[0], change


@way()
def a_user_dict() -> Made:
    table: Any = UserDict(beta=1.0)

    def change(i: int) -> None:
        table["beta"] = 1.0 + i

    return net(), lambda m, x, y: cross_entropy(m, x, y) * table["beta"], change


@way()
def a_list_that_grows() -> Made:
    factors = [1.0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) * sum(factors)

    return net(), loss, lambda i: factors.append(1.0)


@way()
def a_deque() -> Made:
    factors = deque([1.0], maxlen=1)
    return (
        net(),
        lambda m, x, y: cross_entropy(m, x, y) * factors[0],
        lambda i: factors.append(1.0 + i),
    )


@way()
def a_set() -> Made:
    flags: set[str] = set()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) * (2.0 if "twice" in flags else 1.0)

    def change(i: int) -> None:
        (flags.add if i % 2 else flags.discard)("twice")

    return net(), loss, change


@way()
def an_enum() -> Made:
    model = net(lambda self, h: h * self.mode.value)
    model.mode = Mode.PLAIN
    return model, cross_entropy, lambda i: setattr(model, "mode", Mode(1 + i % 2))


@way()
def a_property() -> Made:
    model = net(lambda self, h: h * self.doubled)
    type(model).doubled = property(lambda self: 2 * self.scale)
    return model, cross_entropy, lambda i: setattr(model, "scale", 1.0 + i)


class Callable_:
    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


@way()
def an_object_that_is_called() -> Made:
    act = Callable_()
    model = net(lambda self, h: self.act(h))
    model.act = act
    return model, cross_entropy, lambda i: setattr(act, "by", 1.0 + i)


@way()
def a_numpy_array() -> Made:
    table = np.ones(16, dtype=np.float32)
    model = net(lambda self, h: h * torch.from_numpy(table))

    def change(i: int) -> None:
        table[:] = 1.0 + i

    return model, cross_entropy, change


@way()
def a_numpy_number() -> Made:
    model = net(lambda self, h: h * float(self.number))
    model.number = np.float64(1.0)
    return model, cross_entropy, lambda i: setattr(model, "number", np.float64(1.0 + i))


@way()
def a_module_of_python() -> Made:
    config = types.ModuleType("a_config_of_mine")
    config.beta = 1.0  # type: ignore[attr-defined]
    return (
        net(),
        lambda m, x, y: cross_entropy(m, x, y) * config.beta,
        lambda i: setattr(config, "beta", 1.0 + i),
    )


@way()
def pow_of_the_module_math() -> Made:
    config = {"beta": 1.0}  # torch's export puts another pow there while it runs
    return (
        net(),
        lambda m, x, y: cross_entropy(m, x, y) * math.pow(config["beta"], 2),
        lambda i: config.update(beta=1.0 + i),
    )


@way()
def the_learning_rate_read_by_the_loss() -> Made:
    model = net()
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    def change(i: int) -> None:
        other.param_groups[0]["lr"] = 1.0 + i

    return model, lambda m, x, y: cross_entropy(m, x, y) * other.param_groups[0]["lr"], change


# -- tensors that are caught -----------------------------------------------------------------------


@way()
def a_tensor_in_a_closure_changed_in_place() -> Made:
    mask = torch.ones(16)
    model = net(lambda self, h: h * mask)
    return model, cross_entropy, lambda i: mask.fill_(1.0 + i)


@way()
def a_tensor_in_a_closure_changed_through_numpy() -> Made:
    mask = torch.ones(16)
    model = net(lambda self, h: h * mask)

    def change(i: int) -> None:
        mask.numpy()[:] = 1.0 + i

    return model, cross_entropy, change


@way()
def a_tensor_in_a_closure_changed_through_data() -> Made:
    mask = torch.ones(16)
    model = net(lambda self, h: h * (mask * 2))
    return model, cross_entropy, lambda i: mask.data.mul_(2)


@way()
def a_tensor_whose_data_is_set() -> Made:
    mask = torch.ones(16)
    model = net(lambda self, h: h * mask)
    return model, cross_entropy, lambda i: setattr(mask, "data", torch.full((16,), 1.0 + i))


@way()
def another_tensor_in_a_closure() -> Made:
    mask = torch.ones(16)

    def change(i: int) -> None:
        nonlocal mask
        mask = torch.full((16,), 1.0 + i)

    return net(lambda self, h: h * mask), cross_entropy, change


@way()
def another_shape_in_a_closure() -> Made:
    mask = torch.ones(16)

    def change(i: int) -> None:
        nonlocal mask
        mask = torch.full((1,) if i % 2 else (16,), 1.0 + i)

    return net(lambda self, h: h * mask), cross_entropy, change


@way()
def a_tensor_as_an_attribute() -> Made:
    model = net(lambda self, h: h * self.table)
    model.table = torch.ones(16)
    return model, cross_entropy, lambda i: setattr(model, "table", torch.full((16,), 1.0 + i))


@way()
def a_global_tensor_in_a_list() -> Made:
    tables = [torch.ones(16), torch.ones(16)]
    model = net(lambda self, h: torch.stack([h * tables[0], h * tables[1]]).sum(0))

    def change(i: int) -> None:
        tables[1] = torch.full((16,), 1.0 + i)

    return model, cross_entropy, change


@way()
def a_large_tensor_changed_in_place() -> Made:
    table = torch.ones(600, 600)
    model = net(lambda self, h: h * table.sum() / 360000)
    return model, cross_entropy, lambda i: table.fill_(1.0 + i)


@way()
def a_large_tensor_replaced() -> Made:
    tables = {"it": torch.ones(600, 600)}
    model = net(lambda self, h: h * tables["it"].sum() / 360000)
    return model, cross_entropy, lambda i: tables.update(it=torch.full((600, 600), 1.0 + i))


@way()
def a_tensor_with_nans() -> Made:
    mask = torch.ones(16)
    mask[0] = float("nan")
    model = net(lambda self, h: h * mask.nan_to_num(2.0))

    def change(i: int) -> None:
        mask[1:] = 1.0 + i

    return model, cross_entropy, change


@way()
def the_sign_of_a_zero() -> Made:
    zero = torch.zeros(16)

    def change(i: int) -> None:
        zero.numpy()[:] = -0.0 if i == 1 else 0.0

    return net(lambda self, h: h * (1 / zero).clamp(-2, 2)), cross_entropy, change


# -- modules ---------------------------------------------------------------------------------------


@way()
def training_and_evaluation() -> Made:
    model = net(lambda self, h: h * (2.0 if self.training else 1.0))
    return model, cross_entropy, lambda i: model.train(i % 2 == 0)


@way()
def the_mode_of_one_part() -> Made:
    model = net(lambda self, h: F.relu(h) if self.up.training else h)
    return model, cross_entropy, lambda i: model.up.train(i % 2 == 0)


@way()
def an_attribute_of_a_layer_of_torch() -> Made:
    model = net(lambda self, h: self.norm(h))
    model.norm = nn.LayerNorm(16)
    return model, cross_entropy, lambda i: setattr(model.norm, "eps", 10.0**-i)


@way()
def a_part_that_is_swapped() -> Made:
    model = net(lambda self, h: self.act(h))
    model.act = nn.ReLU()
    acts = [nn.ReLU(), nn.Tanh(), nn.SiLU(), nn.ReLU()]
    return model, cross_entropy, lambda i: setattr(model, "act", acts[i])


@way()
def an_entry_of_a_module_list() -> Made:
    model = net(lambda self, h: self.acts[0](h))
    model.acts = nn.ModuleList([nn.ReLU()])
    acts = [nn.ReLU(), nn.Tanh(), nn.SiLU(), nn.ReLU()]

    def change(i: int) -> None:
        model.acts[0] = acts[i]

    return model, cross_entropy, change


@way()
def a_module_list_that_grows() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        for act in self.acts:
            h = act(h)
        return h

    model = net(between)
    model.acts = nn.ModuleList([nn.Tanh()])
    return model, cross_entropy, lambda i: model.acts.append(nn.Tanh())


@way()
def another_class() -> Made:
    model = net(lambda self, h: self.act(h))
    model.act = nn.ReLU()
    return model, cross_entropy, lambda i: setattr(model.act, "__class__", nn.SiLU)


@way()
def a_forward_that_is_patched() -> Made:
    model = net(lambda self, h: self.act(h))
    model.act = nn.ReLU()

    def change(i: int) -> None:
        model.act.forward = types.MethodType(lambda self, x: torch.tanh(x) * i, model.act)

    return model, cross_entropy, change


@way()
def parts_in_another_order() -> Made:
    """The same objects under the same names: what goes through them meets them otherwise."""

    def between(self: Any, h: Tensor) -> Tensor:
        for part in self.parts.values():
            h = part(h)
        return h

    model = net(between)
    model.parts = nn.ModuleDict({"relu": nn.ReLU(), "tanh": nn.Tanh(), "twice": Double()})

    def change(i: int) -> None:
        first = next(iter(model.parts))
        part = model.parts.pop(first)
        model.parts[first] = part

    return model, cross_entropy, change


ORDER: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "double": lambda h: h * 2 - 1}


@way()
def a_dict_in_another_order() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        for function in ORDER.values():
            h = function(h)
        return h

    def change(i: int) -> None:
        first = next(iter(ORDER))
        ORDER[first] = ORDER.pop(first)

    return net(between), cross_entropy, change


@way()
def a_forward_that_is_patched_on_its_class() -> Made:
    model = net()
    plain = type(model).between

    def change(i: int) -> None:
        type(model).between = lambda self, h: plain(self, h) * (1.0 + i)

    return model, cross_entropy, change


@way()
def a_hook_that_is_added() -> Made:
    model = net()

    def change(i: int) -> None:
        model.up.register_forward_hook(lambda module, args, out: out * 2.0)

    return model, cross_entropy, change


@way()
def a_hook_that_was_there_and_is_removed() -> Made:
    model = net()
    handle = model.up.register_forward_hook(lambda module, args, out: out * 2.0)
    return model, cross_entropy, lambda i: handle.remove()


@way()
def what_a_hook_reads() -> Made:
    model, by = net(), {"it": 1.0}
    model.up.register_forward_pre_hook(lambda module, args: (args[0] * by["it"],))
    return model, cross_entropy, lambda i: by.update(it=1.0 + i)


@way()
def a_hook_of_every_module() -> Made:
    model, handles = net(), []

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        return out * 2 if isinstance(module, nn.Linear) else None

    def change(i: int) -> None:
        if i == 1:
            handles.append(nn.modules.module.register_module_forward_hook(hook))
        if i == STEPS - 1:
            handles.pop().remove()

    return model, cross_entropy, change


@way()
def requires_grad() -> Made:
    model = net()
    return model, cross_entropy, lambda i: model.up.weight.requires_grad_(i % 2 == 0)


@way()
def a_function_of_torch_that_is_patched() -> Made:
    model = net(lambda self, h: F.silu(h))
    plain = F.silu

    def change(i: int) -> None:
        F.silu = (lambda x: torch.tanh(x) * 2) if i == 1 else plain

    return model, cross_entropy, change


@way()
def the_default_dtype() -> Made:
    model = net(lambda self, h: h * (1.0 if torch.tensor(1.0).dtype == torch.float32 else 2.0))

    def change(i: int) -> None:
        torch.set_default_dtype(torch.float64 if i == 1 else torch.float32)

    return model, cross_entropy, change


# -- what forward itself changes -------------------------------------------------------------------


@way()
def a_cache_of_a_number() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        if self.width is None:
            self.width = h.shape[-1]
        return h / self.width**0.5

    model = net(between)
    model.width = None
    return model, cross_entropy, lambda i: None


@way()
def a_first_call_that_differs() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            return h * 3.0
        return h

    model = net(between)
    model.ready = False
    return model, cross_entropy, lambda i: None


@way(refused=r"calls: 1 -> 2.*register_buffer")
def a_counter_that_is_an_attribute() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls

    model = net(between)
    model.calls = 0
    return model, cross_entropy, lambda i: None


@way(refused=r"seen \(closure of between\)")
def a_list_that_forward_appends_to() -> Made:
    seen: list[int] = []

    def between(self: Any, h: Tensor) -> Tensor:
        seen.append(len(seen))
        return h * len(seen)

    return net(between), cross_entropy, lambda i: None


@way(refused=r"count \(closure of loss\)")
def a_nonlocal_that_the_loss_counts() -> Made:
    count = 0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return cross_entropy(model, x, y) * count

    return net(), loss, lambda i: None


@way(refused=r"stores a tensor.*\n.*kept")
def activations_that_a_hook_keeps() -> Made:
    model, kept = net(), dict[str, Tensor]()
    model.up.register_forward_hook(lambda module, args, out: kept.update(up=out.detach()))
    return model, cross_entropy, lambda i: None


@way(refused="stores a tensor")
def a_tensor_that_forward_keeps() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        self.last = h
        return h

    return net(between), cross_entropy, lambda i: None


@way()
def a_buffer_changed_in_place() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        self.m.mul_(0.9).add_(0.1 * h.mean(0).detach())
        return h - self.m

    return net(between), cross_entropy, lambda i: None


@way()
def a_buffer_assigned_anew() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        self.m = 0.9 * self.m + 0.1 * h.mean(0).detach()
        return h - self.m

    return net(between), cross_entropy, lambda i: None


@way(refused="requires grad")
def a_buffer_assigned_with_its_gradient() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        self.m = 0.9 * self.m + 0.1 * h.mean(0)
        return h - self.m

    return net(between), cross_entropy, lambda i: None


@way(refused="stores a tensor")
def a_buffer_assigned_in_another_shape() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        self.m = h.detach().mean()
        return h - self.m

    return net(between), cross_entropy, lambda i: None


# -- random numbers and iterators ------------------------------------------------------------------


@way(refused="draws from Python's random")
def python_random() -> Made:
    return net(lambda self, h: h * random.random()), cross_entropy, lambda i: None


@way(refused="draws from numpy.random")
def numpy_random() -> Made:
    return net(lambda self, h: h * np.random.rand()), cross_entropy, lambda i: None


@way(refused=r"draws from rng \(closure of")
def a_generator_of_numpy() -> Made:
    rng = np.random.default_rng(0)
    return net(lambda self, h: h * rng.random()), cross_entropy, lambda i: None


@way(refused=r"draws from rng \(closure of")
def a_generator_of_python() -> Made:
    rng = random.Random(0)
    return net(lambda self, h: h * rng.random()), cross_entropy, lambda i: None


@way(refused="torch's generator")
def a_seed_that_forward_sets() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        torch.manual_seed(0)
        return h

    return net(between), cross_entropy, lambda i: None


@way(refused=r"counter \(closure of")
def an_iterator() -> Made:
    counter = itertools.count(1)
    return net(lambda self, h: h * next(counter)), cross_entropy, lambda i: None


@way(refused=r"numbers \(closure of")
def a_generator() -> Made:
    numbers = (float(i) for i in range(1, 100))
    return net(lambda self, h: h * next(numbers)), cross_entropy, lambda i: None


# -- hooks on gradients ----------------------------------------------------------------------------


@way(refused=r"hook on a gradient.*\n.*up.weight")
def a_hook_of_a_parameter() -> Made:
    model = net()
    model.up.weight.register_hook(lambda grad: grad * 2)
    return model, cross_entropy, lambda i: None


@way(refused=r"hook on a gradient.*\n.*up.weight")
def a_hook_of_a_parameter_added_later() -> Made:
    model = net()
    return model, cross_entropy, lambda i: model.up.weight.register_hook(lambda grad: grad * 2)


@way(refused=r"hook on a gradient.*\n.*up.weight")
def a_hook_after_accumulation() -> Made:
    model = net()
    model.up.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    return model, cross_entropy, lambda i: None


@way(refused=r"hook on a gradient.*\n.*up")
def a_backward_hook_of_a_module() -> Made:
    model = net()
    model.up.register_full_backward_hook(lambda m, i, o: (i[0],))
    return model, cross_entropy, lambda i: None


@way(refused="hook on a gradient")
def a_hook_of_an_activation() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        h.register_hook(lambda grad: grad * 2)
        return h

    return net(between), cross_entropy, lambda i: None


# -- harder to see ---------------------------------------------------------------------------------


@functools.lru_cache
def cached_factor(n: int) -> float:
    return n * BETA


@way()
def a_cached_function() -> Made:
    def change(i: int) -> None:
        globals()["BETA"] = 1.0 + i
        cached_factor.cache_clear()

    change(0)
    return net(lambda self, h: h * cached_factor(2)), cross_entropy, change


@way()
def a_function_in_a_table() -> Made:
    ops = {"act": torch.relu}
    acts = [torch.relu, torch.tanh, torch.sigmoid, torch.sin]
    return (
        net(lambda self, h: ops["act"](h)),
        cross_entropy,
        lambda i: ops.update(act=acts[i]),
    )


@way()
def the_closure_of_an_attribute() -> Made:
    by = 1.0
    model = net(lambda self, h: self.fn(h))
    model.fn = lambda h: h * by

    def change(i: int) -> None:
        nonlocal by
        by = 1.0 + i

    return model, cross_entropy, change


@way()
def a_static_method() -> Made:
    model = net(lambda self, h: self.f(h))
    type(model).f = staticmethod(lambda h: h)
    return (
        model,
        cross_entropy,
        lambda i: setattr(type(model), "f", staticmethod(lambda h: h * i)),
    )


@way()
def what_a_thread_has() -> Made:
    local = threading.local()
    local.beta = 1.0
    return (
        net(lambda self, h: h * local.beta),
        cross_entropy,
        lambda i: setattr(local, "beta", 1.0 + i),
    )


@way()
def a_dotted_path() -> Made:
    model = net(lambda self, h: h * operator.attrgetter("config.beta")(self))
    model.config = Config()
    return model, cross_entropy, lambda i: setattr(model.config, "beta", 1.0 + i)


@way()
def a_global_by_a_computed_name() -> Made:
    def change(i: int) -> None:
        globals()["BETA"] = 1.0 + i

    change(0)
    return net(lambda self, h: h * globals()["be".upper() + "TA"]), cross_entropy, change


class Forwarding:
    def __init__(self) -> None:
        self.held = {"beta": 1.0}

    def __getattr__(self, name: str) -> float:
        return self.__dict__["held"][name]


@way()
def an_attribute_that_is_looked_up_elsewhere() -> Made:
    config = Forwarding()
    return (
        net(lambda self, h: h * config.beta),
        cross_entropy,
        lambda i: config.held.update(beta=1.0 + i),
    )


class Doubling(dict[str, float]):
    def __getitem__(self, key: str) -> float:
        return dict.__getitem__(self, key) * 2


@way()
def a_dict_with_a_lookup_of_its_own() -> Made:
    table = Doubling(beta=1.0)
    return (
        net(lambda self, h: h * table["beta"]),
        cross_entropy,
        lambda i: table.update(beta=1.0 + i),
    )


@way()
def an_attribute_of_the_loss() -> Made:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) * loss.beta

    loss.beta = 1.0  # type: ignore[attr-defined]
    return net(), loss, lambda i: setattr(loss, "beta", 1.0 + i)


@way()
def a_module_imported_by_the_loss() -> Made:
    module = types.ModuleType("settings_of_a_test")
    module.BETA = 1.0  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        from settings_of_a_test import BETA  # type: ignore[import-not-found]

        return cross_entropy(model, x, y) * BETA

    return net(), loss, lambda i: setattr(module, "BETA", 1.0 + i)


@way()
def the_class_of_an_object() -> Made:
    kinds = [type(f"Kind{i}", (), {"beta": 1.0 + i, "__module__": __name__}) for i in range(STEPS)]
    config = kinds[0]()
    return (
        net(lambda self, h: h * config.beta),
        cross_entropy,
        lambda i: setattr(config, "__class__", kinds[i]),
    )


@way()
def an_attribute_of_a_metaclass() -> Made:
    meta = type("Meta", (type,), {"beta": 1.0, "__module__": __name__})
    config = meta("Config", (), {"__module__": __name__})
    return (
        net(lambda self, h: h * config.beta),
        cross_entropy,
        lambda i: setattr(meta, "beta", 1.0 + i),
    )


@way()
def bytes_that_change() -> Made:
    table = bytearray([1, 2])

    def change(i: int) -> None:
        table[0] = 1 + i

    return net(lambda self, h: h * table[0]), cross_entropy, change


@way()
def behind_a_weak_reference() -> Made:
    config = Config()
    reference = weakref.ref(config)
    model = net(lambda self, h: h * reference().beta)
    model.keeps = config
    return model, cross_entropy, lambda i: setattr(config, "beta", 1.0 + i)


@way()
def a_method_bound_to_a_dict() -> Made:
    table = {"beta": 1.0}
    get = table.get
    return (
        net(lambda self, h: h * get("beta")),
        cross_entropy,
        lambda i: table.update(beta=1.0 + i),
    )


@way()
def a_generator_function() -> Made:
    factors = [1.0, 2.0]

    def each() -> Iterator[float]:
        yield from factors

    def change(i: int) -> None:
        factors[0] = 1.0 + i

    return net(lambda self, h: h * sum(each())), cross_entropy, change


@way()
def a_class_method_over_a_registry() -> Made:
    class Registry:
        items: dict[str, float] = {"beta": 1.0}

        @classmethod
        def get(cls, key: str) -> float:
            return cls.items[key]

    return (
        net(lambda self, h: h * Registry.get("beta")),
        cross_entropy,
        lambda i: Registry.items.update(beta=1.0 + i),
    )


@way()
def code_that_was_typed() -> Made:
    space: dict[str, Any] = {"F": F, "BETA": 1.0, "__name__": "__main__"}
    exec("def loss(m, x, y): return F.cross_entropy(m(x), y) * BETA", space)
    return net(), space["loss"], lambda i: space.update(BETA=1.0 + i)


@way()
def what_a_decorated_method_reads() -> Made:
    def change(i: int) -> None:
        globals()["BETA"] = 1.0 + i

    change(0)
    model = net(lambda self, h: h * self.factor(h))
    type(model).factor = torch.no_grad()(lambda self, h: h.mean() * 0 + BETA)
    return model, cross_entropy, change


@way()
def a_teacher_in_a_closure() -> Made:
    teacher = nn.Linear(8, 4).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(model(x), wanted)

    return net(), loss, lambda i: teacher.weight.data.mul_(1.5)


@way()
def the_rate_of_a_dropout() -> Made:
    model = net(lambda self, h: self.drop(h))
    model.drop = nn.Dropout(0.0)
    return model, cross_entropy, lambda i: setattr(model.drop, "p", float(i % 2))


@way()
def a_module_list_that_shrinks() -> Made:
    def between(self: Any, h: Tensor) -> Tensor:
        for act in self.acts:
            h = act(h)
        return h

    model = net(between)
    model.acts = nn.ModuleList([nn.Tanh() for _ in range(5)])
    return model, cross_entropy, lambda i: model.acts.__delitem__(0)


# -- the table -------------------------------------------------------------------------------------


def in_torch(make: Callable[[], Made]) -> list[float]:
    torch.manual_seed(0)
    model, loss, change = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for i in range(STEPS):
        if i:
            change(i)
        optimizer.zero_grad()
        value = loss(model, *batch(i))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def in_dtensor(make: Callable[[], Made]) -> list[float]:
    torch.manual_seed(0)
    model, loss, change = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(dt.parallelize(model, MESH, {}), loss, optimizer)
    losses: list[float] = []
    with dt.launch(MESH):
        for i in range(STEPS):
            if i:
                change(i)
            losses.append(float(step(*batch(i))))
    return losses


SAMPLE = (  # of each kind of thing that may change
    *("a_closure_cell", "a_global_in_a_helper", "a_default_argument", "a_helper_that_is_replaced"),
    *("an_attribute_of_the_model", "one_and_true_and_one_point_zero", "a_slot"),
    *("a_list_that_grows",),
    *("a_tensor_in_a_closure_changed_in_place", "a_large_tensor_replaced", "the_sign_of_a_zero"),
    *("training_and_evaluation", "a_part_that_is_swapped", "a_forward_that_is_patched"),
    *("a_hook_that_is_added", "requires_grad", "a_cache_of_a_number", "a_first_call_that_differs"),
    *("a_counter_that_is_an_attribute", "a_tensor_that_forward_keeps", "python_random"),
    *("a_buffer_changed_in_place", "a_buffer_assigned_anew", "a_hook_of_a_parameter"),
    *("a_cached_function", "a_global_by_a_computed_name", "a_method_bound_to_a_dict"),
    *("code_that_was_typed", "the_rate_of_a_dropout", "the_learning_rate_read_by_the_loss"),
    *("pow_of_the_module_math", "parts_in_another_order"),
)


@pytest.mark.slow
@pytest.mark.sample(*SAMPLE)
@pytest.mark.filterwarnings("ignore:.*A step was captured for each")
@pytest.mark.parametrize("name", WAYS)
def test_it_is_as_in_torch_or_refused(name: str) -> None:
    make, refused = WAYS[name]
    if refused is not None:
        with pytest.raises(dt.PlanningError, match=f"(?s){refused}"):
            in_dtensor(make)
        return
    expected = in_torch(make)
    assert len(set(expected)) == STEPS
    assert in_dtensor(make) == pytest.approx(expected, rel=1e-5)


def test_there_are_at_least_forty_ways() -> None:
    assert len(WAYS) >= 40
    assert set(SAMPLE) <= set(WAYS)


# -- what is said ----------------------------------------------------------------------------------


def step_of(model: nn.Module, loss: Loss, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dt.train_step(dt.parallelize(model, MESH, {}), loss, optimizer, **options)


@pytest.mark.slow
def test_a_value_that_changes_at_each_step_is_said_to_cost_a_capture() -> None:
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


@pytest.mark.slow
def test_a_number_that_is_an_argument_is_named() -> None:
    step = step_of(net(), lambda model, x, y, beta: cross_entropy(model, x, y) * beta)
    with pytest.warns(UserWarning, match=r"the argument beta: 2.0 -> 3.0"):
        for i in range(4):
            step.plan(*batch(i), float(i))
    step.plan(*batch(0), torch.tensor(0.5))
    step.plan(*batch(0), torch.tensor(0.7))
    assert len(step.plans) == 5


@pytest.mark.slow
def test_an_equal_object_is_no_change() -> None:
    model = net(lambda self, h: h * self.config.beta * self.table[0] * sum(self.numbers))
    step = None
    for _ in range(3):
        model.config, model.table, model.numbers = Config(0.5), torch.ones(2), [1.0, 2.0]
        step = step or step_of(model, cross_entropy)
        step.plan(*batch(0))
    assert step is not None and len(step.plans) == 1


@pytest.mark.slow
def test_a_clock_is_said_to_be_read_once() -> None:
    step = step_of(net(lambda self, h: h * (time.time() % 7)), cross_entropy)
    with pytest.warns(UserWarning, match=r"reads the clock, once.*test_python_state.py:\d+"):
        step.plan(*batch(0))


@pytest.mark.slow
def test_a_step_that_is_captured_at_each_call_draws_as_torch_does() -> None:
    def between(self: Any, h: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.from_numpy(np.random.rand(16).astype(np.float32))
        return h * noise * random.choice([0.5, 2.0]) + self.calls % 2

    def losses(run: Callable[[nn.Module], Callable[..., Any]]) -> list[float]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        model = net(between)
        model.calls = 0
        step = run(model)
        found = [float(step(*batch(i))) for i in range(3)]
        assert model.calls == 3
        return found

    def in_plain_torch(model: nn.Module) -> Callable[..., Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    expected = losses(in_plain_torch)
    with dt.launch(MESH):
        found = losses(lambda model: step_of(model, cross_entropy, capture="each call"))
    assert found == pytest.approx(expected, rel=1e-5)


class ByClass(dict[str, float]):
    """Takes an object for its key, in methods of its own, and no default."""

    def __setitem__(self, key: object, value: float) -> None:
        super().__setitem__(type(key).__name__, value)

    def get(self, key: object) -> float:  # type: ignore[override]
        return super().get(type(key).__name__) or 1.0


SCALES = ByClass()


def test_a_dict_with_methods_of_its_own_is_read_as_a_dict() -> None:
    """A registry of transformers is one; an unexpected argument of its `get` was the error."""
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


def test_attributes_of_the_parallelized_model_are_the_modules() -> None:
    """As a user of plain torch sets them: on what `parallelize` has returned."""
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


def test_a_misspelt_capture() -> None:
    with pytest.raises(dt.PlanningError, match='capture=.*"once" or "each call"'):
        step_of(net(), cross_entropy, capture="every call")


@pytest.mark.slow
def test_a_refused_step_leaves_all_as_it_was() -> None:
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


def test_a_hook_before_the_optimizers_step_is_refused() -> None:
    model = net()
    step = step_of(model, cross_entropy)
    handle = step.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(dt.PlanningError, match="SGD has a hook before its step"):
        step.plan(*batch(0))
    handle.remove()
