"""Tests that extra values of a checkpoint are restored unchanged, or refused with their path."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint.extra import decoded, encoded


def back(value: Any) -> Any:
    tree, tensors = encoded(value, "extra")
    return decoded(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal and of one type at every level; floats are compared by
    bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) for pair in zip(a.items(), b.items()) for x, y in zip(*pair)
        )
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "x"], "b": {}, "c": []},
    "int keys": {0: "a", (1, 2): "b", "0": "c", None: 1, True: 2, 1.5: 3},
    "order": {"b": 1, "a": 2},
    "dollar": {"$": "tuple", "of": [1]},
    "tuples": ((), (1, (2.0, [3]))),
    "sets": [{3, 1, 2}, frozenset({"b", "a"}), set()],
    "Counter": Counter({3: 2, 5: 1}),
    "OrderedDict": OrderedDict([("b", 1), (2, 3)]),
    "deque": [deque([1, 2], maxlen=3), deque()],
    "floats": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1, 1e308],
    "ints": [10**40, -(2**63)],
    "complex": [1 + 2j, complex(math.inf, -0.0)],
    "bytes": b"\x00\xff",
    "text": ["\ud800", "é\n\0", ""],
    "random": random.Random(1).getstate(),
    "numpy": [np.float64(0.1), np.int32(3), np.bool_(True), np.random.RandomState(1).get_state()],
    "arrays": [np.arange(6).reshape(2, 3), np.zeros((0, 2), np.float16), np.array(1.0)],
    "torch": [torch.float32, torch.Size([2, 3]), torch.get_rng_state(), torch.tensor(1.0)],
}


@pytest.mark.parametrize("name", VALUES)
def test_extra_value_round_trips(name: str):
    assert same(back(VALUES[name]), VALUES[name])


def test_scheduler_and_optimizer_state_round_trips():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for scheduler in (
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    ):
        state = scheduler.state_dict()
        assert same(back(state), state)
    state = optimizer.state_dict()
    assert same(back(state), state)


def test_extra_values_are_copied_and_shared_tensors_stay_shared():
    x = torch.zeros(3)
    values = {"a": x, "b": [x], "c": [1]}
    tree, tensors = encoded(values, "extra")
    x += 1
    values["c"].append(2)
    read = decoded(tree, tensors)
    assert read["a"].equal(torch.zeros(3)) and read["a"] is read["b"][0] and read["c"] == [1]
    assert len(tensors) == 1


class Colour(IntEnum):
    red = 1


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    "value, words",
    [
        ({"sched": {"fn": lambda x: x}}, r"extra\['sched'\]\['fn'\] is a builtins.function"),
        ([1, (2, object())], r"extra\[1\]\[1\] is a builtins.object"),
        ({"a": Colour.red}, r"extra\['a'\] is a .*Colour"),
        ({"a": Point(1)}, r"extra\['a'\] is a .*Point.*\nfix: a plain tuple"),
        ({"a": defaultdict(list)}, r"extra\['a'\] is a collections.defaultdict.*\nfix: dict\("),
        ({"p": nn.Parameter(torch.ones(2))}, r"extra\['p'\] is a .*Parameter.*\nfix: its .detach"),
        ({"t": torch.ones(2, requires_grad=True)}, r"extra\['t'\] is a tensor that requires grad"),
        ({"t": torch.ones(2, device="meta")}, r"extra\['t'\] is a tensor without data"),
        ({"t": torch.ones(2).to_sparse()}, r"extra\['t'\] is a tensor .* not dense"),
        ({torch.ones(1): 1}, "a tensor cannot be a key"),
        ({Colour.red: 1}, "the key extra"),
        ({"a": np.array(["x"])}, r"extra\['a'\] is of NumPy's dtype <U1"),
        ({"a": np.array([None])}, r"extra\['a'\] is of NumPy's dtype object"),
        ({"a": nn.Linear(1, 1)}, r"extra\['a'\] is a torch.nn"),
        (range(3), "extra is a builtins.range"),
    ],
)
def test_unsupported_extra_value_is_refused_with_its_path(value: Any, words: str):
    with pytest.raises(PlanningError, match=f"(?s){words}"):
        encoded(value, "extra")


def test_extra_value_that_contains_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(PlanningError, match="or holds itself"):
        encoded(loop, "extra")


def test_decoding_refuses_trees_that_encode_did_not_write():
    for tree in (
        {"$": "os.system", "of": "x"},
        {"$": "numpy", "of": "", "dtype": "O", "shape": []},
    ):
        with pytest.raises(ValueError, match="not a (value|dtype) of a checkpoint"):
            decoded(tree, {})
