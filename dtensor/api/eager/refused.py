"""Ops that eager DTensors do not take, each with the reason and a fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from dtensor.api.eager.errors import op_name
from dtensor.api.eager.inplace import refused


def refuse_random(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    raise refused(
        op_name(target),
        "random ops are not supported yet: the numbers would depend on the placement",
        "model.eval() or p=0 for dropout; dt.distribute(torch.rand(...), mesh) for random tensors",
    )


def refuse_dynamic(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    raise refused(
        op_name(target),
        "its result is a number, or has a size, that depends on values, which only ranks know",
        "torch.where with a mask, or x.full_tensor() and the plain op",
    )


def refuse_fused(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    raise refused(op_name(target), "fused optimizers write many tensors", "fused=False")


def refuse_metadata(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    raise refused(
        op_name(target),
        "it changes a tensor's shape or storage in place",
        "the out-of-place op (x = x.t())",
    )


def refuse_writes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    raise refused(op_name(target), "it writes several of its operands", "dt.compile")
