"""Tests sending custom ops to actors: op to kernel, to bytes, and back to an op, without actors."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from tests.daft.programs import function, program
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))
from dtensor.daft.ray.ranks.operators import KnownOps, Needed, OpOrigin, is_registered

ONE = "(Tensor x) -> Tensor"
CPU = torch.device("cpu")


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    """Return a kernel that closes over `by`, so two kernels can share their code."""

    def scale(x: Tensor) -> Tensor:
        return x * by

    return scale


def define(name: str, kernel: Callable[..., object], schema: str = "(Tensor x) -> Tensor") -> None:
    torch.library.define(f"test_operators::{name}", schema)
    torch.library.impl(f"test_operators::{name}", "default", kernel)


double, triple = scaled(2.0), scaled(3.0)
define("double", double)
define("triple", triple)
calls: list[str] = []


def many(x: Tensor, xs: list[Tensor], n: int, p: float, kind: torch.dtype, *, s: str) -> Tensor:
    calls.append(s)
    return x


define("many", many, "(Tensor x, Tensor[] xs, int n, float p, ScalarType kind, *, str s) -> Tensor")
define("sine", torch.sin)


def needed(*names: str, known: KnownOps | None = None, device: torch.device = CPU) -> Needed:
    ops = {name: getattr(torch.ops.test_operators, name).default for name in names}
    source = "def forward():\n    return ()"
    made = program([], functions=[function("f", source, **ops)])
    return Needed.of(made, device, known or KnownOps())


def origin(name: str, device: torch.device = CPU) -> OpOrigin:
    (found,) = needed(name, device=device).origins
    return found


def test_program_of_torch_ops_sends_no_kernels() -> None:
    source = "def forward(x):\n    return (add(x, x),)"
    add = function("f", source, add=torch.ops.aten.add.Tensor, relu=torch.relu)
    assert not Needed.of(program([], functions=[add]), CPU, KnownOps())


def test_kernel_of_custom_op_is_found_without_running_it() -> None:
    found = origin("many")
    assert calls == []
    assert found.module == __name__ and found.kernel is not None and found.reason == ""
    assert found.schema.startswith("test_operators::many(Tensor x, Tensor[] xs, int n")


def test_cuda_kernel_is_found_without_initializing_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller may have no GPU, and must not allocate memory on one."""

    def no_gpu() -> None:
        raise AssertionError("the controller asked for its GPU")

    monkeypatch.setattr(torch.cuda, "_lazy_init", no_gpu)
    define("on_both", scaled(2.0))
    torch.library.impl("test_operators::on_both", "cuda", scaled(5.0))
    for device, by in (("cpu", 2.0), ("cuda", 5.0)):
        found = origin("on_both", torch.device(device))
        assert found.reason == "" and found.kernel is not None
        assert torch.equal(pickle.loads(found.kernel)(torch.ones(2)), torch.full((2,), by))

    @torch.library.custom_op("test_operators::of_each", mutates_args=())
    def of_each(xs: list[Tensor], n: int) -> Tensor:
        return xs[0] + n

    def on_gpu(xs: list[Tensor], n: int) -> Tensor:
        return xs[0] - n

    of_each.register_kernel("cuda")(on_gpu)
    for device, value in (("cpu", 4.0), ("cuda", -2.0)):
        found = origin("of_each", torch.device(device))
        assert found.reason == "" and found.kernel is not None
        assert pickle.loads(found.kernel)([torch.ones(())], 3).item() == value


def test_gc_callback_is_not_mistaken_for_kernel() -> None:
    def callback(phase: str, info: dict[str, int]) -> None: ...

    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        found = origin("many")
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
    assert found.kernel is not None and pickle.loads(found.kernel).__name__ != "callback"
    assert gc.isenabled()


def test_kernel_is_sent_with_its_closure_and_replaces_older_kernel() -> None:
    """The op is provided under another name, because this process already has it."""
    named = {
        name: replace(
            origin(name),
            name="test_operators::copy",
            schema="test_operators::copy(Tensor x) -> Tensor",
            module=None,
        )
        for name in ("double", "triple")
    }
    assert not is_registered("test_operators::copy")
    for name, factor in (("double", 2), ("triple", 3), ("triple", 3)):
        assert replace(needed("double"), origins=(named[name],)).provide() == []
        found = torch.ops.test_operators.copy(torch.ones(2))
        assert torch.equal(found, torch.full((2,), float(factor)))


def test_kernel_that_is_no_python_function_is_reported() -> None:
    found = origin("sine")
    assert found.kernel is None and found.reason == "its kernel cannot be found"


def test_missing_op_is_reported_with_reason() -> None:
    lost = OpOrigin(
        name="test_operators::nowhere",
        schema="test_operators::nowhere(Tensor x) -> Tensor",
        module="test_operators_nowhere",
        kernel=None,
        reason="its kernel cannot be found",
        is_redefined=False,
    )
    ((name, why),) = replace(needed("double"), origins=(lost,)).provide()
    assert name == "test_operators::nowhere"
    assert why == (
        "its kernel cannot be found; ModuleNotFoundError: No module named 'test_operators_nowhere'"
    )


def test_ops_called_by_kernel_are_sent_with_it() -> None:
    define("outer", lambda x: torch.ops.test_operators.double(x) + x)
    names = [o.name for o in needed("outer").origins]
    assert names == ["test_operators::double", "test_operators::outer"]


def custom(factor: float) -> CustomOpDef:
    """Define an op with the same name again, as a reloaded module does."""
    return torch.library.custom_op(
        "test_operators::custom", lambda x: x * factor, mutates_args=(), schema=ONE
    )


def test_redefined_custom_op_replaces_its_kernel_on_actor() -> None:
    """A process that has the first has the second's kernel after it."""
    first = custom(2.0)
    known = KnownOps()
    (before,) = needed("custom", known=known).origins
    second = custom(3.0)
    program = needed("custom", known=known)
    (after,) = program.origins
    assert (before.is_redefined, after.is_redefined) == (False, True)
    assert torch.ops.test_operators.custom(torch.ones(1)).item() == 3.0
    custom(2.0)  # a process that still has the first kernel
    assert program.provide() == []
    assert torch.ops.test_operators.custom(torch.ones(1)).item() == 3.0
    lost = replace(program, origins=(replace(after, kernel=None, reason="why not"),))
    assert lost.provide() == [("test_operators::custom", "why not")]
    del first, second


def test_import_hooks_called_during_kernel_lookup_are_not_mistaken_for_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Editable installs add module finders, which run during the lookup."""
    asked: list[str] = []

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> None:
            asked.append(name)

    space: dict[str, Any] = {"kernel": double}
    source = "def wrapped(x):\n    import colorsys\n    return kernel(x)"
    exec(compile(source, torch.__file__, "exec"), space)  # as `torch._disable_dynamo` does
    define("wrapped", space["wrapped"])
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    found = origin("wrapped")
    assert asked == ["colorsys"] and found.kernel is not None and found.reason == ""


@pytest.mark.slow
def test_dtensor_ops_unpickle_in_fresh_process() -> None:
    import dtensor.sharding.ops.registered  # noqa: F401 - here

    ops = (torch.ops.dt.rope.default, torch.ops.dt.random_uniform, torch.ops.aten.add.Tensor)
    code = """
import pickle, sys
import torch
print(*pickle.load(sys.stdin.buffer))
import dtensor as dt
print(dt.kernel("dt::rope", "cuda"))
"""
    there = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(ops), capture_output=True, check=True
    )
    assert there.stdout.decode().splitlines()[0] == " ".join(map(str, ops))
