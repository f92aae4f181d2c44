"""16-bit training: autocast equals torch's, sums over ranks and microbatches are float32, and
messages carry 16 bits."""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.errors import PlanningError
from dtensor.frontend.capture.cuda_casts import cuda_casts
from tests.api.precision import (
    BF16,
    STAGES,
    build,
    distance,
    exact_gradients,
    gpt,
    loss_of,
    under_autocast,
)
from tests.models import batch
from tests.training import (
    MEGATRON,
    assert_losses_close,
    assert_same_bits,
    batches,
    gradients_of,
    sgd,
    train_torch,
)

F32 = torch.float32


# -- autocast ------------------------------------------------------------------------------------


def only_forward(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.view(-1))


@pytest.mark.default("under_autocast")
@pytest.mark.parametrize("loss", [under_autocast, only_forward])
def test_autocast_on_one_rank_is_bitwise_equal_to_torch(loss: Any) -> None:
    """Compares gradients, and parameters after three steps. The loss is only close, because dtensor
    computes it with its own op."""
    data = batches(3)
    run = build(dt.Mesh(), dtype=None, loss=loss)
    with dt.launch(run.mesh):
        gradients = run.step.gradients(*data[0])
        losses = run.losses(data)
        state = run.state()
    assert_same_bits(gradients, gradients_of(gpt(None), data[0], loss))
    plain = gpt(None)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)  # as on the ranks
    assert_losses_close(losses, train_torch(plain, optimizer, data, loss=loss))
    assert_same_bits(state["model"], dict(plain.state_dict()))


def moments(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return a loss of torch's ops alone: the loss of `normed` has a cross entropy, which dt
    computes by another formula, so that its float32 bits depend on the CPU."""
    logits = model(tokens)
    cubes = F.layer_norm(logits, logits.shape[-1:]).pow(3).mean()
    return cubes + logits.softmax(-1).square().sum(-1).mean()


def test_cuda_autocast_list_on_cpu_is_bitwise_equal_to_torch_casts() -> None:
    """On CPU tensors, torch's own CUDA autocast region would do nothing."""

    def under(device: str) -> Any:
        def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(device, dtype=BF16):
                return moments(model, tokens, targets)

        return loss

    (one,) = batches(1)
    run = build(dt.Mesh(), dtype=None, loss=under("cuda"))
    with dt.launch(run.mesh):
        gradients = run.step.gradients(*one)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        with cuda_casts():
            expected = gradients_of(gpt(None), one, moments)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert_same_bits(gradients, expected)
    other = gradients_of(gpt(None), one, under("cpu"))
    assert any(not torch.equal(gradients[name], other[name]) for name in gradients)


def by_device(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=BF16):
        return torch.softmax(model(x), -1).float().square().mean()


def test_plan_states_device_of_its_autocast_list() -> None:
    module = nn.Linear(4, 4)
    model = dt.parallelize(module, dt.Mesh())
    step = dt.train_step(model, by_device, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.randn(2, 4)

    def list_of(plan: dt.Plan) -> list[str]:
        return [line for line in plan.text(full=True).splitlines() if line.startswith("autocast")]

    assert list_of(step.plan(x)) == list_of(step.plan(x, device="cpu"))
    assert list_of(step.plan(x)) == ["autocast    list of cpu, bf16"]
    assert list_of(step.plan(x, device="cuda")) == ["autocast    list of cuda, bf16"]
    assert "autocast    list of cuda, bf16" in str(step.plan(x, device="cuda"))
    with pytest.raises(PlanningError, match='device="gpu"|device=.gpu.'):
        step.plan(x, device="gpu")
    with dt.launch(dt.Mesh()):
        step(x).tensor()
        with pytest.raises(PlanningError, match="a plan within a launch is for its device"):
            step.plan(x, device="cuda")


def test_argument_named_device_is_passed_to_function() -> None:
    def forward(x: Tensor, device: str) -> Tensor:
        return torch.ones(3, device=device) * x

    plan = dt.compile(forward, dt.Mesh()).plan(torch.ones(3), device="cpu")
    assert [str(o.spec) for o in plan.outputs] == ["f32[3]"]


def test_autocast_around_call_makes_separate_program() -> None:
    one = batch()
    run = build(dt.Mesh(), dtype=None)
    inner = build(dt.Mesh(), dtype=None, loss=under_autocast)
    with dt.launch(run.mesh):
        plain = float(run.step(*one))
        dt.load_state_dict(run.model, None, {"model": gpt(None).state_dict()})
        with torch.autocast("cpu", dtype=BF16):
            cast = float(run.step(*one))
        dt.load_state_dict(run.model, None, {"model": gpt(None).state_dict()})
        again = float(run.step(*one))
        stated = float(inner.step(*one))
        run.state(), inner.state()
    assert plain == again != cast == stated


def test_compiled_and_eager_calls_follow_surrounding_autocast() -> None:
    mesh = dt.Mesh(tp=2)
    x = dt.distribute(torch.randn(4, 8), mesh, tp=dt.Column())
    w = dt.distribute(torch.randn(8, 4), mesh, tp=dt.Row())
    product = dt.compile(lambda a, b: a @ b, mesh)
    with torch.autocast("cpu", dtype=BF16), dt.implicit_redistribution("allow"):
        assert product(x, w).dtype == (x @ w).dtype == BF16
    assert product(x, w).dtype == (x @ w).dtype == F32


# -- sums ----------------------------------------------------------------------------------------


class Ones(nn.Module):
    """A model in which the gradient of w is the sum of the rows of x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, dtype=BF16))
        self.one = nn.Parameter(torch.ones((), dtype=BF16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.one * self.w).sum()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


# 256 + 1 is 256 in bf16: one rounding of a running sum loses a row, all of them lose seven.
ROWS = torch.tensor([[256.0]] + [[1.0]] * 7).expand(8, 8).to(BF16)


@pytest.mark.parametrize(
    ("dp", "microbatches", "zero"),
    [(1, 8, 0), *((dp, m, z) for dp, m in ((8, 1), (2, 4)) for z in (0, 1, 2, 3))],
)
def test_gradient_sums_of_16_bit_values_are_float32(dp: int, microbatches: int, zero: int) -> None:
    run = build(
        dt.Mesh(dp=dp),
        module=Ones(),
        zero=zero,
        make=lambda m: torch.optim.SGD([m.w], lr=1.0),
        loss=total,
        schedule=dt.GPipe(microbatches),
        master_weights=True,
    )
    with dt.launch(run.mesh):
        gradient = run.step.gradients(ROWS)["w"]
        float(run.step(ROWS))
        state = run.state()
    assert gradient.dtype == F32 and gradient.tolist() == [263.0] * 8
    assert state["optimizer"]["state"][0]["master_param"].tolist() == [-263.0] * 8
    assert state["model"]["w"].tolist() == [-264.0] * 8  # to even


def test_without_masters_gradient_sum_is_rounded_once() -> None:
    run = build(dt.Mesh(dp=2), module=Ones(), make=sgd, loss=total, schedule=dt.GPipe(4))
    with dt.launch(run.mesh):
        gradient = run.step.gradients(ROWS)["w"]
    assert gradient.dtype == BF16 and gradient.tolist() == [264.0] * 8


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_sums_kept_in_bf16_are_bitwise_equal_to_torch_loop(dtype: torch.dtype) -> None:
    """Torch's own sums in .grad are rounded in this way if a parameter is bf16."""
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16, bias=False, dtype=dtype) for _ in range(3))
    module, x = nn.Sequential(*layers), torch.randn(32, 16, dtype=dtype)
    sums: dict[str, Tensor] = {}
    for one in x.chunk(4):
        for name, gradient in gradients_of(deepcopy(module), (one,), squares).items():
            before = sums.get(name)
            sums[name] = (gradient if before is None else before.float() + gradient).to(BF16)
    if dtype == BF16:
        by_torch = deepcopy(module)
        for one in x.chunk(4):
            squares(by_torch, one).backward()
        assert_same_bits({name: p.grad for name, p in by_torch.named_parameters()}, sums)
    options: dict[str, Any] = dict(make=sgd, loss=squares, schedule=dt.GPipe(4), accumulate="bf16")
    run = build(dt.Mesh(), module=module, **options)
    assert "rounded to bf16" in str(run.step.plan(x))
    with dt.launch(run.mesh):
        gradients = run.step.gradients(x)
    assert_same_bits(gradients, {name: value.to(dtype) for name, value in sums.items()})


@pytest.mark.parametrize(
    ("dp", "zero", "total_of_w"),
    [
        (1, 0, 256.0),  # each 1 is lost
        (2, 0, 260.0),  # 256 of rank 0, and 4 of rank 1
        (2, 1, 260.0),
        (2, 2, 262.0),  # 257, which is 256, then 2 three times
        (2, 3, 262.0),
    ],
)
def test_sums_over_ranks_are_float32_if_sums_over_microbatches_are_bf16(
    dp: int, zero: int, total_of_w: float
) -> None:
    sizes: list[int] = []
    for accumulate in ("float32", "bf16"):
        run = build(
            dt.Mesh(dp=dp),
            module=Ones(),
            zero=zero,
            make=lambda m: torch.optim.SGD([m.w], lr=1.0),
            loss=total,
            schedule=dt.GPipe(8 // dp),
            master_weights=True,
            accumulate=accumulate,
        )
        plan = run.step.plan(ROWS)
        plan.verify()
        sizes.append(plan.memory[0].gradients)
    with dt.launch(run.mesh):
        float(run.step(ROWS))
        state = run.state()
    assert state["optimizer"]["state"][0]["master_param"].tolist() == [-total_of_w] * 8
    # at level 0, the sum over ranks is float32 and whole
    assert sizes[1] == (sizes[0] if (dp, zero) == (2, 0) else sizes[0] // 2)


def test_tied_gradients_kept_in_bf16_are_summed_in_float32() -> None:
    module, (tokens, targets) = gpt(F32), batch(0, 8)
    options: dict[str, Any] = dict(
        stages=STAGES, schedule=dt.OneFOneB(4), accumulate="bf16", make=sgd
    )
    run = build(dt.Mesh(pp=2, dp=2), module=module, **options)
    expected = gradients_of(deepcopy(module), (tokens, targets), loss_of)
    with dt.launch(run.mesh):
        gradients = run.step.gradients(tokens, targets)
        assert math.isfinite(float(run.step(tokens, targets)))
    for name, value in gradients.items():
        largest = expected[name].abs().max()
        assert value.dtype == F32 and (value - expected[name]).abs().max() < 0.02 * largest


def test_sums_of_float64_gradients_are_not_kept_in_bf16() -> None:
    run = build(dt.Mesh(), dtype=torch.float64, schedule=dt.GPipe(2), accumulate="bf16")
    message = r"at most 32 bits, and the gradient of .* is f64.*\nfix: leave accumulate= out"
    with pytest.raises(dt.PlanningError, match=message):
        run.step.plan(*batch(0))


def test_loss_of_16_bits_is_summed_in_float32() -> None:
    """The loss that the user reads has 16 bits, as in torch."""
    run = build(dt.Mesh(), module=Ones(), make=sgd, loss=total, schedule=dt.GPipe(8))
    run.module.w.data.fill_(1.0)  # type: ignore[union-attr]
    plan = run.step.plan(ROWS)
    (result,) = [o for o in plan.outputs if o.kind == "result"]
    with dt.launch(run.mesh):
        loss = run.step(ROWS).tensor()
        run.state()
    assert result.spec.dtype == F32
    assert loss.dtype == BF16 and loss.item() == 8 * 264  # 2104 is 2112 in bf16


MANY: dict[str, dict[str, Any]] = {
    "8 microbatches": dict(mesh=dt.Mesh(), schedule=dt.GPipe(8)),
    "8 ranks, 8 microbatches": dict(mesh=dt.Mesh(dp=8), schedule=dt.GPipe(8)),
    "8 ranks at zero 3": dict(mesh=dt.Mesh(dp=8), zero=3, schedule=dt.GPipe(8)),
    "rows of weights": dict(mesh=dt.Mesh(tp=4), pins=MEGATRON),
    "both": dict(mesh=dt.Mesh(dp=2, tp=4), pins=MEGATRON, schedule=dt.GPipe(4)),
    "tied stages": dict(mesh=dt.Mesh(pp=2, dp=2), stages=STAGES, schedule=dt.GPipe(8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", [loss_of, under_autocast])
def test_gradients_on_many_ranks_are_as_exact_as_on_one(loss: Any) -> None:
    """Compares with float64. Splitting the batch makes more of the sums float32; splitting a
    product adds one rounding per rank, a few per cent of the total 16-bit error."""
    one = batch(size=64)
    exact = exact_gradients(one)
    dtype = BF16 if loss is loss_of else None
    plain = gpt(dtype)
    single = distance(gradients_of(plain, one, loss), exact)
    for name, case in MANY.items():
        run = build(**case, dtype=dtype, loss=loss, master_weights=dtype is not None)
        with dt.launch(run.mesh):
            found = distance(run.step.gradients(*one), exact)
        # a batch that one kernel sums in 16 bits costs most where parameters have 16, too
        limit = 0.5 if dtype == BF16 and "tp" not in run.mesh.shape else 1.1
        assert 1e-4 < found < limit * single, name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("loss", [loss_of, under_autocast])
def test_gradients_of_16_bits_are_as_exact_as_torchs_on_every_device(
    device: str, loss: Any
) -> None:
    """The program is the same; kernels of a GPU add in another order."""
    one = batch(size=64)
    dtype = BF16 if loss is loss_of else None
    exact = exact_gradients(one)
    run = build(dt.Mesh(dp=2), dtype=dtype, loss=loss, zero=3, master_weights=dtype is not None)
    with dt.launch(run.mesh, device=device):
        gradients = run.step.gradients(*one)
        run.losses([one])
        state = run.state()["optimizer"]["state"]
    single = distance(gradients_of(gpt(dtype), one, loss), exact)
    assert 1e-4 < distance(gradients, exact) < 1.2 * single
    assert all(entry["exp_avg"].dtype == F32 for entry in state.values())


# -- wires ---------------------------------------------------------------------------------------


def sent(run: Any, *one: Tensor) -> Counter[tuple[str, str]]:
    """Return the bytes sent over dp by (kind, dtype), without scalars."""
    found: Counter[tuple[str, str]] = Counter()
    for c in run.step.plan(*one).collectives:
        if c.bytes_sent > 16:
            found[c.kind, c.dtype] += c.bytes_sent * c.times
    return found


def is_bias(name: str) -> bool:
    return name.endswith("bias") and "norm" not in name


def test_values_of_16_bits_are_sent_as_16_bits() -> None:
    """With dp=2, a rank sends half of what is scattered and its half of what is gathered. Gradients
    of biases are sums over rows, and each rank's part of such a sum is float32."""
    one = batch()
    numel = sum(p.numel() for p in gpt().parameters())
    sums = sum(p.numel() for n, p in gpt().named_parameters() if is_bias(n))
    for zero in (1, 2, 3):
        whole = {
            ("reduce_scatter", "bfloat16"): numel - sums,
            ("reduce_scatter", "float32"): 2 * sums,
            ("all_gather", "bfloat16"): numel,
        }
        if zero == 3:  # in the backward once more, but for the biases and the positions
            again = [n for n, p in gpt().named_parameters() if p.dim() > 1 and "pos" not in n]
            shapes = dict(gpt().named_parameters())
            norms = [n for n in shapes if "norm" in n]
            whole["all_gather", "bfloat16"] += sum(shapes[n].numel() for n in (*again, *norms))
        masters = build(dt.Mesh(dp=2), zero=zero, master_weights=True)
        assert sent(masters, *one) == whole, zero
    # not split: a sum over ranks leaves in 16 bits and comes back in 32
    expected = {
        ("all_reduce", "bfloat16"): 3 * (numel - sums),
        ("all_reduce", "float32"): 4 * sums,
    }
    assert sent(build(dt.Mesh(dp=2)), *one) == expected
    accumulated = build(dt.Mesh(dp=2), schedule=dt.GPipe(2))
    assert sent(accumulated, *one) == {("all_reduce", "float32"): 4 * numel}


def test_autocast_halves_bytes_sent_by_linear_layers() -> None:
    one = batch()
    half = build(dt.Mesh(dp=2), dtype=None, loss=under_autocast, zero=3)
    full = build(dt.Mesh(dp=2), dtype=None, zero=3)
    inside = [(n, p) for n, p in gpt().named_parameters() if "attn" in n or "mlp" in n]
    layer = {n: p.numel() for n, p in inside if not is_bias(n)}
    here, there = sent(half, *one), sent(full, *one)
    assert here["reduce_scatter", "bfloat16"] == sum(layer.values())
    saved = there["reduce_scatter", "float32"] - here["reduce_scatter", "float32"]
    assert saved == 2 * sum(layer.values())
    assert here["all_gather", "bfloat16"] > 0


def test_weight_used_twice_is_gathered_once_per_phase() -> None:
    def twice(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return model(model(x).relu()).float().square().mean()

    run = build(dt.Mesh(dp=2), module=nn.Linear(8, 8, bias=False), loss=twice, zero=3, make=sgd)
    gathers = [c for c in run.step.plan(torch.randn(4, 8)).collectives if c.kind == "all_gather"]
    assert [(c.phase, c.dtype, c.bytes_sent) for c in gathers] == [
        ("forward", "bfloat16", 64),
        ("backward", "bfloat16", 64),
    ]
