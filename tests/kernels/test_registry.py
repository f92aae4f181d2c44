"""Tests the kernel registry: registered user kernels run under every backend until unregistered,
and unsuitable kernels are refused.
"""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import Call, DaftError
from dtensor.daft.errors import ProgramError
from dtensor.kernels import register, registry
from dtensor.runtime.lower.program import lower
from dtensor.sharding.ops.library import PLAIN

MESH = dt.Mesh(tp=2)


def doubled(self: Tensor) -> Tensor:
    """Return twice the relu, so that the numbers show which kernel ran."""
    return torch.relu(self) * 2


def wrong_shape(self: Tensor) -> Tensor:
    return torch.relu(self)[:1]


def wrong_dtype(self: Tensor) -> Tensor:
    return torch.relu(self).double()


def act(x: Tensor) -> Tensor:
    return F.relu(x)


X = torch.randn(6, 4)


def relu_of(fn: Any = None) -> Tensor:
    return (fn or dt.compile(act, MESH))(X).full_tensor()


# -- which one runs --------------------------------------------------------------------------------


def test_user_kernel_runs_until_using_block_ends() -> None:
    fn = dt.compile(act, MESH)
    with dt.launch(MESH):
        assert torch.equal(relu_of(fn), X.relu())
        with dt.kernel("aten::relu", "cpu").using(doubled):
            assert torch.equal(relu_of(fn), X.relu() * 2)
            with dt.kernel("aten::relu", "cpu").using(None):
                assert torch.equal(relu_of(fn), X.relu())
            with dt.kernel("aten::relu", "cuda").using(None):
                assert torch.equal(relu_of(fn), X.relu() * 2)
        assert torch.equal(relu_of(fn), X.relu())


def test_using_block_that_raises_unregisters_kernel() -> None:
    with pytest.raises(ZeroDivisionError), dt.kernel("aten::relu", "cpu").using(doubled):
        raise ZeroDivisionError
    assert "the op itself" in repr(dt.kernel("aten::relu", "cpu"))


def test_kernel_decorator_returns_registered_function() -> None:
    before = registry.current()
    with dt.kernel("aten::relu", "cpu").using(None):
        assert dt.kernel(torch.ops.aten.relu.default, "cpu")(doubled) is doubled
        assert "doubled" in repr(dt.kernel("aten.relu.default", "cpu"))
        with dt.launch(MESH):
            assert torch.equal(relu_of(), X.relu() * 2)
    assert registry.current() is before


def test_eager_dtensor_ops_run_user_kernel() -> None:
    with dt.launch(MESH):
        x = dt.distribute(X, MESH, tp=dt.Shard(0))
        assert torch.equal(x.relu().full_tensor(), X.relu())
        with dt.kernel("aten::relu", "cpu").using(doubled):
            assert torch.equal(x.relu().full_tensor(), X.relu() * 2)
        assert torch.equal(x.relu().full_tensor(), X.relu())


def test_user_kernel_runs_in_backward_of_training() -> None:
    """threshold_backward is relu's backward, so the gradients are those of the kernel."""

    def twice(grad_output: Tensor, self: Tensor, threshold: float) -> Tensor:
        return torch.where(self > threshold, 2 * grad_output, 0)

    model = dt.parallelize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), MESH, {})
    step = dt.train_step(
        model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with dt.launch(MESH):
        before = step.gradients(X)
        with dt.kernel("aten::threshold_backward", "cpu").using(twice):
            after = step.gradients(X)
    for name, grad in before.items():
        assert torch.equal(after[name], 2 * grad) and grad.any(), name


@pytest.mark.ray
def test_user_kernels_are_sent_to_ray_actors() -> None:
    """Actors import one kernel by name; the other is a local function and is sent by value."""
    factor = 3.0

    def tripled(self: Tensor) -> Tensor:
        return torch.relu(self) * factor

    fn = dt.compile(act, MESH)
    with dt.launch(MESH, backend="ray"):
        for kernel, times in ((doubled, 2), (tripled, 3)):
            with dt.kernel("aten::relu", "cpu").using(kernel):
                assert torch.equal(relu_of(fn), X.relu() * times)
        assert torch.equal(relu_of(fn), X.relu())


@pytest.mark.ray
def test_unpicklable_kernel_is_refused_with_fix() -> None:
    import threading

    lock = threading.Lock()

    def locked(self: Tensor) -> Tensor:
        with lock:
            return torch.relu(self)

    fn = dt.compile(act, MESH)
    with dt.launch(MESH, backend="ray"):
        with (
            dt.kernel("aten::relu", "cpu").using(locked),
            pytest.raises(ProgramError, match=r"locked, which does not pickle: (.|\n)*fix: "),
        ):
            relu_of(fn)
        assert torch.equal(relu_of(fn), X.relu())


# -- programs and traces name it -------------------------------------------------------------------


def test_program_and_trace_name_kernel_and_plan_does_not_change() -> None:
    fn = dt.compile(act, MESH)
    plan = fn.plan(X)
    text = str(plan)
    plain = lower(plan, None)
    with dt.kernel("aten::relu", "cpu").using(doubled), dt.launch(MESH):
        program = lower(fn.plan(X), None)
        assert str(fn.plan(X)) == text
        spans = [span.name for span in dt.trace(fn, X).spans]
    call = next(i for i in program.ranks[0].instructions if isinstance(i, Call))
    name = f"{doubled.__module__}.doubled"
    assert str(call.label).endswith(f": relu [{name}]") and str(call.label) in spans
    function = dict(program.functions)[call.fn]
    assert any(line.endswith(f"  # {name}") for line in function.source.splitlines())
    assert not any("doubled" in f.source for _, f in plain.functions)


# -- what does not fit -----------------------------------------------------------------------------


def test_kernel_result_of_wrong_shape_or_dtype_raises() -> None:
    for kernel, found in ((wrong_shape, r"float32 \[1, 4\]"), (wrong_dtype, r"float64 \[6, 4\]")):
        with (
            dt.launch(MESH),
            dt.kernel("aten::relu", "cpu").using(kernel),
            pytest.raises(DaftError, match=rf"{kernel.__name__} returned torch.{found}"),
        ):
            relu_of()


def in_place(self: Tensor) -> Tensor:
    return self.relu_().clone()


def test_kernel_that_writes_its_argument_raises() -> None:
    with (
        dt.launch(MESH),
        dt.kernel("aten::relu", "cpu").using(in_place),
        pytest.raises(DaftError, match="in_place changed its argument 0"),
    ):
        relu_of()


def test_kernel_that_returns_its_argument_raises() -> None:
    with (
        dt.launch(MESH),
        dt.kernel("aten::relu", "cpu").using(ok),
        pytest.raises(DaftError, match="ok returned as result 0 a tensor that shares the memory"),
    ):
        relu_of()


def test_kernel_of_view_op_may_return_view() -> None:
    with dt.launch(MESH), dt.kernel("aten::t", "cpu").using(transposed):
        assert torch.equal(dt.compile(lambda x: x.t() + 1, MESH)(X).full_tensor(), X.t() + 1)


def transposed(self: Tensor) -> Tensor:
    return self.transpose(0, 1)


def ok(self: Tensor) -> Tensor:
    return self


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: dt.kernel("aten::rely", "cpu"), "no op aten::rely.*aten::relu"),
        (lambda: dt.kernel("aten::add", "cpu"), "no op aten::add.*overloads: aten::add.Scalar"),
        (lambda: dt.kernel("relu", "cpu"), "no op relu"),
        (lambda: dt.kernel("aten::relu", "gpu"), '"cpu" or "cuda"'),
        (lambda: dt.kernel("aten::relu", torch.device("cpu")), '"cpu" or "cuda"'),  # type: ignore
        (lambda: dt.kernel(torch.relu, "cpu"), "not an op or its name"),  # type: ignore
        (lambda: dt.kernel("aten::relu_", "cpu"), "changes its arguments"),
        (lambda: dt.kernel("aten::relu", "cpu")(3), "not a function"),  # type: ignore
        (lambda: dt.kernel("aten::relu", "cpu")(torch.relu), "not a Python function"),
        (lambda: dt.kernel("aten::relu", "cpu")(lambda: None), "too many positional"),
        (lambda: dt.kernel("aten::relu", "cpu")(lambda x: x), "'x'.*def relu\\(self\\)"),
        (lambda: dt.kernel("aten::mm", "cpu")(lambda mat2, self: self), "their order differs"),
        (lambda: dt.kernel("aten::gelu", "cpu")(ok), "approximate.*approximate='none'"),
        (
            lambda: dt.kernel("aten::gelu", "cpu")(lambda self, *, approximate: self),
            "missing a required",
        ),
        (
            lambda: dt.kernel("aten::gelu", "cpu")(lambda self, *, approximate="tanh": self),
            "'tanh' by default, and 'none' in the op",
        ),
    ],
)
def test_unsuitable_kernel_is_refused_at_registration(make: Any, fact: str) -> None:
    before = registry.current()
    with pytest.raises(dt.PlanningError, match=f"(?s){fact}"):
        make()
    assert registry.current() is before


# -- ops of the project's own ----------------------------------------------------------------------


def test_plain_implementations_accept_arguments_of_op_and_pickle() -> None:
    assert len(PLAIN) > 15
    for op, run in PLAIN.items():
        arguments = op._schema.arguments  # type: ignore
        takes = inspect.signature(run).bind
        for some in (arguments, [a for a in arguments if not a.has_default_value()]):
            positional = [a.name for a in some if not a.kwarg_only]
            takes(*positional, **{a.name: None for a in some if a.kwarg_only})
        assert pickle.loads(pickle.dumps(run)) is run
        assert inspect.isfunction(run)


def test_built_in_kernels_accept_arguments_of_op() -> None:
    from dtensor.kernels.built_in import TRITON, torch_kernels, triton_kernels

    assert set(triton_kernels()) == TRITON
    known = set(torch._C._dispatch_get_all_op_names())
    built_in = {**triton_kernels(), **torch_kernels()}
    found = sorted(known & set(built_in))
    assert {"dt::ce_stats", "dt::ce_backward", "dt::dropout_add", "dt::attention"} <= {*found}
    for name in found:
        register._check_signature(register._op_named(name), built_in[name])


WITHOUT_TRITON = """
import sys, warnings, torch
sys.modules["triton"] = None  # as if it were not installed
from dtensor.kernels.registry import kernel_of
from dtensor.sharding.ops import attention, norms

def found(op, device="cuda"):
    kernel = kernel_of(op, torch.device(device))
    return kernel and kernel.name

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    assert found(torch.ops.aten.add.Tensor) is None
    assert found(torch.ops.dt.rms_norm.default, "cpu") is None
    assert found(torch.ops.dt.attention.default) == "torch attention"
    assert not warned
    assert found(torch.ops.dt.rms_norm.default) is None
    assert found(torch.ops.dt.rms_norm_backward.default) is None
(one,) = warned
assert "run torch's ops instead of the built-in kernels" in str(one.message)
assert "fix: pip install 'dtensor[kernels]'" in str(one.message)
"""


@pytest.mark.slow
def test_without_triton_ops_run_with_warning_and_torch_kernels_stay() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)


def test_cuda_program_names_chosen_kernels() -> None:
    """Lowering needs no GPU."""
    model = dt.parallelize(nn.Linear(8, 6, bias=False), MESH, {"weight": {"tp": dt.Row()}})
    step = dt.train_step(
        model,
        lambda m, x, y: F.cross_entropy(F.dropout(m(x), 0.5), y),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    plan = step.plan(torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))
    for device, wanted in (("cpu", set()), ("cuda", {"ce_stats", "ce_backward", "dropout"})):
        program = lower(plan, None, device=torch.device(device))
        lines = [line for _, f in program.functions for line in f.source.splitlines()]
        named = {line.rpartition("  # triton ")[2] for line in lines if "  # triton " in line}
        assert named >= wanted and bool(named) == bool(wanted), (device, named)
        labels = [str(i.label) for i in program.ranks[0].instructions if isinstance(i, Call)]
        found = [label for label in labels if "ce_stats [triton ce_stats]" in label]
        assert bool(found) == (device == "cuda")


@pytest.mark.slow
def test_cpu_program_imports_no_kernel_modules() -> None:
    """Torch's capture imports Triton itself if it is installed."""
    code = """
import sys, torch, dtensor as dt
mesh = dt.Mesh(tp=2)
dt.kernel("aten::relu", "cpu")(lambda self: torch.relu(self))
with dt.launch(mesh):
    dt.compile(lambda x: torch.relu(x), mesh)(torch.ones(4)).full_tensor()
loaded = {name for name in sys.modules if name.startswith("dtensor.kernels.")}
assert loaded == {"dtensor.kernels.registry", "dtensor.kernels.register"}, loaded
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
