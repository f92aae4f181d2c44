"""Training, compile, collectives and attention with all ranks on one GPU, in process and in a Ray
actor, against plain torch.

Each test also runs on CPU tensors, so that it is exercised on machines without a GPU. With `-m gpu`
on such a machine, the GPU cases fail. On Ray all ranks share an actor, and so one GPU.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dtensor as dt
from dtensor.daft import Backend, Call, launch_cluster
from dtensor.daft.run import worker
from dtensor.daft.run.engine import Engine
from dtensor.runtime.optimizer.shard_optimizer import ShardOptimizer, Updated, absent
from dtensor.sharding.local.attention_kernels import (
    aligned,
    attention_math,
    attention_math_backward,
    causal_mask,
    rows_first,
)
from tests.daft.programs import Collectives, function, program, same_bits
from tests.training import (
    Run,
    assert_gradients_close,
    assert_losses_close,
    batches,
    gradients_of,
    make_model,
    sgd,
    train_torch,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACES = [
    pytest.param("inprocess", "cpu", id="inprocess-cpu"),
    pytest.param("inprocess", "cuda", marks=pytest.mark.gpu, id="inprocess-cuda"),
    pytest.param("ray", "cuda", marks=[pytest.mark.gpu, pytest.mark.ray], id="ray-cuda"),
]


# -- placements ------------------------------------------------------------------------------------


@pytest.mark.default("inprocess-cpu-tp2")
@pytest.mark.parametrize("placed", ["tp2", "dp2_tp2", "tp2_pp2"])
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_gpu_training_matches_torch(
    backend: Backend, device: str, placed: str, request: pytest.FixtureRequest
) -> None:
    """With SGD: AdamW would turn the rounding error of a zero gradient into a full step."""
    # torch.autograd's engine asks for a real GPU: beside simulated ones torch is on the CPU
    beside = "cpu" if request.config.getoption("simulated_gpus") else device
    data = batches(3, ignored=True) * 2
    run = Run.of(placed, make=sgd)
    with dt.launch(run.mesh, backend=backend, device=device, ranks_per_actor=run.mesh.size):
        gradients = run.step.gradients(*data[0])
        losses = run.losses(data)
        state = run.state()
    there = [tuple(tensor.to(beside) for tensor in one) for one in data]
    model = make_model().to(beside)
    assert_gradients_close(gradients, _cpu(gradients_of(model, there[0])), 1e-4)
    model.zero_grad()
    expected = train_torch(model, sgd(model), there, clip=1.0)
    assert_losses_close(losses, expected, 1e-4)
    assert expected[5] < expected[2]  # the same batch
    plain = _cpu(model.state_dict())
    assert set(state["model"]) == set(plain)
    for name, value in plain.items():
        assert state["model"][name].device.type == "cpu"
        torch.testing.assert_close(state["model"][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_compiled_function_on_gpu_matches_torch(backend: Backend, device: str) -> None:
    """The function creates a tensor, which must be on the rank's device."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        at = torch.arange(x.shape[0], dtype=torch.float32, device=x.device)
        return (x @ w).relu().softmax(-1) * at[:, None]

    x, w = torch.randn(6, 8), torch.randn(8, 4)
    mesh = dt.Mesh(tp=2)
    f = dt.compile(fn, mesh)
    with dt.launch(mesh, backend=backend, device=device, ranks_per_actor=2):
        split = dt.distribute(x, mesh, tp=dt.Column())
        for _ in range(2):
            found = f(split, dt.distribute(w, mesh, tp=dt.Row())).full_tensor()
    torch.testing.assert_close(found, fn(x.to(device), w.to(device)).cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_gpu_collectives_are_correct_and_results_return_on_cpu(
    backend: Backend, device: str
) -> None:
    case = Collectives(3, large=100)
    where = function("where", "def forward(x):\n    return (str(x.device.type),)")
    made = program(
        *[[Call("where", ("x",), ("y",))]] * 3,
        functions=[where],
        inputs=[("x",)] * 3,
        outputs=[("y",)] * 3,
    )
    with launch_cluster(3, backend=backend, device=device, ranks_per_actor=3) as cluster:
        results = cluster.run(cluster.load(case.program()), case.fed).get()
        found = cluster.run(cluster.load(made), [{"x": torch.ones(1)}] * 3).get()
    assert found == [{"y": device}] * 3
    for rank in range(3):
        for name, value in case.expected[rank].items():
            assert results[rank][name].device.type == "cpu"
            assert same_bits(results[rank][name], value), (rank, name)


class Made(TorchDispatchMode):
    """Record the ops that create a tensor on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        if any(isinstance(x, Tensor) and x.device.type == "cpu" for x in tree_leaves(out)):
            self.ops.add(str(func))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("placed", ["tp2", "dp2_tp2", "tp2_pp2"])
def test_step_creates_all_tensors_on_device_of_its_ranks(
    placed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses torch's meta device in place of a GPU: meta tensors have no values that could be copied
    to the CPU."""
    copy_to, run_engine, made = worker.copy_to, Engine.run, Made()

    def copy(value: object, device: torch.device) -> object:
        out = isinstance(value, Tensor) and value.is_meta and device.type == "cpu"
        return torch.zeros(value.shape, dtype=value.dtype) if out else copy_to(value, device)  # type: ignore[attr-defined]

    def traced(self: Engine, *given: Any, **options: Any) -> Any:
        with made:
            return run_engine(self, *given, **options)

    monkeypatch.setattr(worker, "copy_to", copy)
    monkeypatch.setattr(Engine, "run", traced)
    run = Run.of(placed, make=sgd)
    with dt.launch(run.mesh, device="meta"):
        run.losses(batches(2, ignored=True))
        run.step.gradients(*batches(1)[0])
    assert made.count > 1000 and made.ops == set()


def test_pickled_shard_optimizer_contains_no_state() -> None:
    """The state is stored in the actor's table of values; the unpickled optimizer continues with
    it."""
    names = tuple(("w", key) for key in ("step", "exp_avg", "exp_avg_sq"))
    what, options = Updated((("w",),), ("w",), names), ({"lr": 0.1},)
    optimizer, values = ShardOptimizer(torch.optim.AdamW), tuple(absent("cpu") for _ in names)
    shards, gradients = {"w": torch.ones(3)}, {"w": torch.arange(3.0)}
    optimizer.step(what, shards, options, gradients, values)
    arrived = pickle.loads(pickle.dumps(optimizer))
    assert arrived.buffer_by_name == {} and arrived.optimizer is None and arrived.values == {}
    there, state = {"w": shards["w"].clone()}, tuple(value.clone() for value in values)
    optimizer.step(what, shards, options, gradients, values)
    arrived.step(what, there, options, gradients, state)
    assert torch.equal(there["w"], shards["w"])
    assert all(map(torch.equal, state, values))


def _cpu(named: Any) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in named.items()}


# -- attention -------------------------------------------------------------------------------------

SHAPES = [  # b h g t s d
    (2, 4, 4, 8, 8, 16),
    (2, 4, 2, 7, 13, 8),  # groups; odd lengths, and more keys than queries
    (1, 6, 1, 33, 33, 4),
    (1, 2, 2, 65, 40, 6),  # rows of 24 bytes: the fallback on CUDA
    (3, 2, 2, 1, 5, 64),
]


def _inputs(shape: tuple[int, ...], layout: str, device: str) -> list[Tensor]:
    """Return q, k, v and grad. "fused": q, k and v are slices of one linear layer's result."""
    b, h, g, t, s, d = shape
    made: list[Tensor] = []
    for heads, length in ((h, t), (g, s), (g, s), (h, t)):
        x = torch.randn(b, heads, length, d)
        if layout == "fused":
            wide = torch.randn(b, length, heads * d + 5)
            x = wide[..., 3 : 3 + heads * d].unflatten(-1, (heads, d)).transpose(1, 2)
        elif layout == "transposed":
            x = torch.randn(b, heads, d, length).mT
        # copy_ keeps what .to() would lose: the strides of a slice.
        base = torch.empty_strided(
            (x.untyped_storage().nbytes() // 4,), (1,), device=device, dtype=x.dtype
        )
        there = base.as_strided(x.shape, x.stride(), x.storage_offset())
        made.append(there.copy_(x))
    return made


def _expected(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Compute attention by its definition, in float64 on the CPU."""
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in (q, k, v))
    ks, vs = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ ks.mT * scale
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    out = scores.softmax(-1) @ vs
    grads = torch.autograd.grad(out, (q, k, v), grad.cpu().double())
    return out.detach(), scores.logsumexp(-1).detach(), *grads


def _close(found: Tensor, expected: Tensor, limit: float = 2e-5) -> None:
    assert found.shape == expected.shape
    error = (found.cpu().double() - expected).abs().max().item()
    assert error <= limit * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["contiguous", "fused", "transposed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_attention_kernel_matches_reference_on_device(
    device: str, shape: tuple[int, ...], layout: str, is_causal: bool
) -> None:
    q, k, v, grad = _inputs(shape, layout, device)
    expected = _expected(q, k, v, grad, is_causal, 0.3)
    out, lse = torch.ops.dt.attention(q, k, v, is_causal, 0.3)
    assert out.device.type == device and out.stride() == torch.empty_like(q).stride()
    grads = torch.ops.dt.attention_backward(grad, q, k, v, out, lse, is_causal, 0.3)
    results = [(out, lse, *grads)]
    if shape[1] == shape[2]:  # what CUDA uses for float64 and for rows its kernel does not take
        mask = causal_mask(q, k) if is_causal else None
        out, lse = attention_math(q, k, v, mask, 0.3)
        grads = attention_math_backward(grad, q, k, v, out, lse, mask, 0.3)
        results.append((out, lse, *grads))
    for found in results:
        for a, b in zip(found, expected, strict=True):
            _close(a, b)


MASKS = ["lengths", "by query", "some see nothing", "bias", "by head"]


def _mask(kind: str, shape: tuple[int, ...], device: str) -> Tensor:
    b, h, _, t, s, _ = shape
    match kind:
        case "lengths":
            made = (torch.arange(s) < torch.arange(1, b + 1)[:, None] * s // b)[:, None, None]
        case "by query":
            made = torch.rand(b, 1, t, s) < 0.7
        case "some see nothing":
            made = (torch.rand(b, 1, t, s) < 0.7) & (torch.arange(t) % 2 == 0)[:, None]
        case "bias":
            made = torch.randn(t, s)
        case _:
            made = torch.randn(1, h, t, s).masked_fill(torch.rand(s) < 0.2, float("-inf"))
    return made.to(device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.slow), "fused"])
@pytest.mark.parametrize("shape", [*SHAPES, (4, 8, 2, 1, 40, 64)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_masked_attention_kernel_matches_float64_math(
    device: str, shape: tuple[int, ...], layout: str, mask: str
) -> None:
    """Rows that the mask excludes entirely give zeros."""
    torch.manual_seed(0)
    q, k, v, grad = _inputs(shape, layout, device)
    given = _mask(mask, shape, device)
    out, lse = torch.ops.dt.attention_masked(q, k, v, given, 0.3)
    assert out.stride() == torch.empty_like(q).stride() and bool(lse.isfinite().all())
    grads = torch.ops.dt.attention_masked_backward(grad, q, k, v, given, out, lse, 0.3)
    exact = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    added = given.cpu() if given.dtype == torch.bool else given.cpu().double()
    want = F.scaled_dot_product_attention(*exact, added, scale=0.3, enable_gqa=True)
    expected = torch.autograd.grad(want, exact, grad.cpu().double())
    for a, b in zip((out, *grads), (want, *expected), strict=True):
        _close(a, b.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_attention_matches_torch(
    device: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if device == "cuda" and request.config.getoption("simulated_gpus"):
        pytest.skip("torch.autograd of tensors on simulated GPUs: its engine asks for a real one")
    q, k, v, grad = (x.to(dtype) for x in _inputs((2, 4, 2, 37, 37, 32), "contiguous", device))
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = torch.ops.dt.attention(*mine, True, 32**-0.5)
    found = torch.autograd.grad(out, mine, grad)
    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(want, theirs, grad)
    for a, b in zip((out, *found), (want, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


def test_attention_inputs_are_copied_only_if_kernel_cannot_read_them() -> None:
    x = torch.randn(2, 3, 5, 8)
    assert aligned(x) is x
    kept = x.transpose(1, 2)
    assert aligned(kept) is kept
    for odd in (x.mT, torch.randn(2, 3, 5, 13)[..., :8], torch.randn(2, 3, 5, 16)[..., 1:9]):
        assert torch.equal(aligned(odd), odd) and aligned(odd).is_contiguous()


def test_unaligned_attention_output_is_copied_to_16_byte_boundary() -> None:
    """An output inside a larger buffer may start anywhere, but the backward kernel needs 16-byte
    alignment."""
    kept = torch.randn(2, 5, 3, 8)
    assert rows_first(kept.transpose(1, 2)).data_ptr() == kept.data_ptr()
    for first in (1, 4):
        buffer = torch.randn(240 + first)
        out = buffer[first:].view(2, 5, 3, 8).transpose(1, 2)
        laid = rows_first(out)
        assert torch.equal(laid, out) and laid.data_ptr() % 16 == 0
        assert laid.transpose(1, 2).is_contiguous()
