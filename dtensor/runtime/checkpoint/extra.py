"""Encode the values that users add to a checkpoint (`extra=`) as JSON, types included.

    encoded({"epoch": 3, (0, 1): {1, 2}}, "extra")
    # {"$": "dict", "of": [["epoch", 3], [{"$": "tuple", "of": [0, 1]}, {"$": "set", ...}]]}, {}

Values of JSON stay as they are; other types of the tables below become an object whose key "$"
names the type. Another type raises an error when the save begins. Tensors are returned by number
and stored like other tensors.

Invariants: decoded(*encoded(x)) has the values, types, key order and float bits of x. Decoding
imports and calls nothing that a file names. A tensor that occurs twice in x is decoded as one
tensor."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint.records import DTYPES_BY_NAME

_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "torch.Size": torch.Size}
_MAPPINGS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_MAX_DEPTH = 100


def encoded(value: Any, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the value as a JSON tree, and copies on the CPU of its tensors by number.

    ``where``: the name of the value in errors. Raises PlanningError for a value of another type.
    """
    coder = _Coder()
    return coder.encode(value, where, 0), coder.tensors


def decoded(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value of a tree. Raises ValueError if `encoded` cannot have made the tree."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case list():
            return [decoded(item, tensors) for item in tree]
        case {"$": str(kind), **rest}:
            return _decode_tagged(kind, rest, tensors)
        case dict():
            return {key: decoded(item, tensors) for key, item in tree.items()}
    raise ValueError(f"not a value of a checkpoint: {tree!r}")


class _Coder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.numbers: dict[int, str] = {}
        self.tensors_alive: list[torch.Tensor] = []  # keeps the ids in `numbers` valid

    def encode(self, value: Any, where: str, depth: int) -> Any:
        """Return the JSON tree of a value; ``where``: its path in errors; ``depth``: its
        nesting."""
        if depth > _MAX_DEPTH:
            raise PlanningError(
                f"{where[:200]} is nested more than {_MAX_DEPTH} deep, or holds itself"
            )
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "of": str(value)}
        if kind is complex:
            return {
                "$": "complex",
                "of": self._encode_items([value.real, value.imag], where, depth),
            }
        if kind is bytes:
            return {"$": "bytes", "of": base64.b64encode(value).decode()}
        if kind is list:
            return self._encode_items(value, where, depth)
        for name, known_type in _SEQUENCES.items():
            if kind is known_type:
                items = self._encode_items(list(value), where, depth)
                return {
                    "$": name,
                    "of": items if name in ("tuple", "torch.Size") else sorted(items, key=repr),
                }
        if kind is deque:
            items = self._encode_items(list(value), where, depth)
            return {"$": "deque", "of": items, "maxlen": value.maxlen}
        for name, known_type in _MAPPINGS.items():
            if kind is known_type:
                return self._mapping(name, value, where, depth)
        if kind is torch.dtype:
            return {"$": "torch.dtype", "of": str(value).removeprefix("torch.")}
        if kind is torch.Tensor:
            return {"$": "tensor", "of": self._tensor(value, where)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._numpy(value, where)
        raise PlanningError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
            f"restore.\nfix: {_suggestion(value)}"
        )

    def _encode_items(self, items: list[Any], where: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(items)]

    def _mapping(self, name: str, value: Mapping[Any, Any], where: str, depth: int) -> Any:
        pairs: list[list[Any]] = []
        for key, item in value.items():
            item_path = f"{where}[{key!r}]"
            if isinstance(key, torch.Tensor):
                raise PlanningError(
                    f"{item_path}: a tensor cannot be a key of a checkpoint's values"
                )
            pairs.append(
                [
                    self.encode(key, f"the key {item_path}", depth + 1),
                    self.encode(item, item_path, depth + 1),
                ]
            )
        if name == "dict" and "$" not in value and all(type(key) is str for key in value):
            return dict(pairs)
        return {"$": name, "of": pairs}

    def _tensor(self, value: torch.Tensor, where: str) -> str:
        """Copy a tensor to the CPU and return its number; the same tensor has one number."""
        if value.requires_grad or value.layout != torch.strided or value.is_quantized:
            raise PlanningError(
                f"{where} is a tensor that requires grad, or is not dense: it would not come back "
                f"as that.\nfix: {where}.detach(), or .to_dense()"
            )
        if value.is_meta or value.dtype not in DTYPES_BY_NAME.values():
            raise PlanningError(f"{where} is a tensor without data, or of dtype {value.dtype}")
        if id(value) not in self.numbers:
            self.tensors_alive.append(value)
            number = self.numbers[id(value)] = str(len(self.tensors))
            self.tensors[number] = value.cpu().clone()
        return self.numbers[id(value)]

    def _numpy(self, value: Any, where: str) -> Any:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc" or not array.dtype.isnative:
            raise PlanningError(
                f"{where} is of NumPy's dtype {array.dtype}.\nfix: {where}.tolist()"
            )
        text = base64.b64encode(array.tobytes()).decode()
        kind = "ndarray" if isinstance(value, np.ndarray) else "numpy"
        return {"$": kind, "of": text, "dtype": array.dtype.str, "shape": list(array.shape)}


def _decode_tagged(kind: str, rest: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value of an object whose key "$" is ``kind``."""
    of = rest["of"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decoded(item, tensors) for item in of)
    if kind in _MAPPINGS:
        mapping = _MAPPINGS[kind]()
        for key, item in of:
            mapping[decoded(key, tensors)] = decoded(item, tensors)
        return mapping
    match kind:
        case "float":
            return _FLOATS[of]
        case "complex":
            return complex(*(decoded(item, tensors) for item in of))
        case "bytes":
            return base64.b64decode(of, validate=True)
        case "deque":
            return deque((decoded(item, tensors) for item in of), rest["maxlen"])
        case "torch.dtype":
            return DTYPES_BY_NAME[of]
        case "tensor":
            return tensors[of]
        case "ndarray" | "numpy":
            dtype = np.dtype(str(rest["dtype"]))
            if dtype.kind not in "biufc":
                raise ValueError(f"not a dtype of a checkpoint: {dtype}")
            array = np.frombuffer(base64.b64decode(of, validate=True), dtype).copy()
            array = array.reshape(rest["shape"])
            return array if kind == "ndarray" else array[()]
    raise ValueError(f"not a value of a checkpoint: {kind}")


def _suggestion(value: Any) -> str:
    """Return the fix for a value of an unsupported type."""
    if isinstance(value, torch.nn.Parameter):
        return "its .detach().clone(), or leave it to the model"
    if isinstance(value, torch.Tensor):
        return "a plain tensor, such as its .full_tensor()"
    if callable(value):
        return "leave it out and make it again after loading; save its counts as numbers"
    if isinstance(value, Mapping):
        return "dict(...) of it"
    if isinstance(value, tuple | list | set):
        return "a plain tuple, list or set of it"
    return "its state as numbers, text and containers, such as its state_dict()"
