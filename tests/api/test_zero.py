"""ZeRO: what is stored split changes where numbers lie and what is sent, and no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, batch, loss_fn
from tests.training import (
    MEGATRON,
    TWO_STAGES,
    MakeOptimizer,
    Run,
    adamw,
    assert_gradients_close,
    assert_losses_close,
    assert_same_bits,
    batches,
    gradients_of,
    make_model,
    sgd,
    train_torch,
)

Data = list[tuple[Tensor, Tensor]]
BATCH = dict(dp=dt.Row())


def build(
    level: int,
    axes: dict[str, int],
    *,
    module: nn.Module | None = None,
    pins: Any = None,
    stages: Any = None,
    schedule: dt.Schedule | None = None,
    clip: float | None = 1.0,
    make: MakeOptimizer = adamw,
    loss: Any = loss_fn,
    keep_gradients: bool = False,
) -> Run:
    module = make_model() if module is None else module
    mesh = dt.Mesh(**axes)
    zero = {"dp": level} if level else None
    model = dt.parallelize(module, mesh, pins or {}, stages=stages, zero=zero)
    optimizer = make(module)
    step = dt.train_step(
        model,
        loss,
        optimizer,
        inputs=BATCH,
        schedule=schedule or dt.GPipe(1),
        clip_grad_norm=clip,
        keep_gradients=keep_gradients,
    )
    return Run(mesh=mesh, module=module, model=model, optimizer=optimizer, step=step)


CASES: dict[str, dict[str, Any]] = {
    "dp2": dict(axes=dict(dp=2)),
    "dp4": dict(axes=dict(dp=4)),
    "dp2_tp2": dict(axes=dict(dp=2, tp=2), pins=MEGATRON),
    "tp2_dp2_mb2": dict(axes=dict(tp=2, dp=2), pins=MEGATRON, schedule=dt.GPipe(2)),
    "pp2_dp2": dict(axes=dict(pp=2, dp=2), stages=TWO_STAGES, schedule=dt.OneFOneB(2)),
}


@pytest.mark.slow
@pytest.mark.sample("dp2-3", "dp4-3", "dp2_tp2-1", "dp2_tp2-2", "tp2_dp2_mb2-3", "pp2_dp2-3")
@pytest.mark.parametrize(
    ("case", "level"), [(c, n) for c in CASES for n in (1, 2, 3) if n == 3 or c != "tp2_dp2_mb2"]
)
def test_twenty_steps_and_gradients(case: str, level: int) -> None:
    data = batches(4) * 5
    run = build(level, **CASES[case])
    run.step.plan(*data[0]).verify()
    with dt.launch(run.mesh):
        gradients = run.step.gradients(*data[0])
        losses = run.losses(data)
        state = run.state()["model"]
    assert_gradients_close(gradients, gradients_of(make_model(), data[0]))
    plain = make_model()
    assert_losses_close(losses, train_torch(plain, adamw(plain), data, clip=1.0))
    for name, value in plain.state_dict().items():
        if not name.endswith("qkv.bias"):  # a key's bias has no gradient but noise: AdamW scales it
            torch.testing.assert_close(state[name], value, rtol=0, atol=5e-5)


def result_of(level: int, steps: int = 4, **case: Any) -> tuple[list[float], dict, dict]:
    run = build(level, **case)
    data = batches(steps)
    with dt.launch(run.mesh):
        gradients = run.step.gradients(*data[0])
        losses = run.losses(data)
        state = run.state()
    return losses, gradients, state


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dp2", "dp4", "dp2_tp2"])
def test_levels_agree_to_the_bit(case: str) -> None:
    """Each sum is folded in rank order whether it is split or not, and AdamW is elementwise.

    Without clipping: the norm of shards is summed in another order than that of whole gradients.
    """
    first = result_of(0, clip=None, **CASES[case])
    for level in (1, 2, 3):
        assert_same_bits(result_of(level, clip=None, **CASES[case]), first, f"level {level}")


CLASSES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "stated": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, t0=1, weight_decay=0.1),
}


class Uneven(nn.Module):
    """Shards of a few elements, and one of 8,407."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(37, 7)
        self.mid = nn.Linear(7, 1201, bias=False)
        self.down = nn.Linear(1201, 37)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mid(self.up(x).tanh()).tanh()) * self.scale


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_no_update_depends_on_where_a_parameter_is_cut(name: str, dtype: torch.dtype) -> None:
    """torch's kernels, and its ops on 16 bits, round otherwise in the last elements of a tensor."""
    torch.manual_seed(5)
    data = [(torch.randn(4, 37, dtype=dtype), torch.zeros(4, 37, dtype=dtype)) for _ in range(3)]
    pins = {"mid.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
    found: list[Any] = []
    for level in range(4):
        torch.manual_seed(0)
        run = build(
            level,
            dict(dp=2, tp=2),
            module=Uneven().to(dtype),
            pins=pins,
            clip=None,
            make=lambda module: CLASSES[name](module.parameters()),
            loss=squares,
        )
        with dt.launch(run.mesh):
            found.append((run.losses(data), run.state()))
        assert_same_bits(found[level], found[0], f"level {level}")


@pytest.mark.slow
def test_levels_that_reduce_alike_agree_with_clipping_and_microbatches() -> None:
    """2 and 3 sum over ranks, then over microbatches; 0 and 1 the other way round."""
    case = CASES["pp2_dp2"]
    assert_same_bits(result_of(3, **case), result_of(2, **case))
    case = {**case, "clip": None}
    assert_same_bits(result_of(1, **case), result_of(0, **case))


# -- shapes that do not divide ---------------------------------------------------------------------


class Odd(nn.Module):
    """7 rows, 3 columns, a scalar, and a dim that is smaller than the axis."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 7)
        self.down = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh() * self.frozen) * self.scale + self.shift


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def pairs(count: int) -> Data:
    torch.manual_seed(3)
    return [(torch.randn(8, 3), torch.randn(8, 3)) for _ in range(count)]


def odd() -> nn.Module:
    torch.manual_seed(1)
    return Odd()


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("schedule", [dt.GPipe(1), dt.GPipe(2)], ids=str)
def test_sizes_that_do_not_divide(level: int, schedule: dt.Schedule) -> None:
    data = pairs(6)
    module = odd()
    run = build(level, dict(dp=4), module=module, loss=squares, schedule=schedule)
    plan = run.step.plan(*data[0])
    stored = {i.label: str(i.stored) for i in plan.inputs if i.kind == "parameter"}
    assert stored == {
        "up.weight": "f32[7@dp,3]",  # 2 of 7 rows, not 1 of 3 columns: 6 and 7 elements
        "up.bias": "f32[7@dp]",
        "down.weight": "f32[3,7@dp]",
        "scale": "None",
        "shift": "None",
        "frozen": "f32[7@dp]",
    }
    assert "whole: scale, shift" in str(plan)
    with dt.launch(run.mesh):
        losses = run.losses(data)
        state = run.state()
    plain = odd()
    assert_losses_close(losses, train_torch(plain, adamw(plain), data, clip=1.0, loss=squares))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state["model"][name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_slice_that_is_no_view() -> None:
    """A fused bias under tp: a rank's part of each of the three blocks is a place of its own."""
    pins = {**MEGATRON, "*.qkv.bias": dict(tp=dt.Row(blocks=3))}
    data = batches(3) * 2
    plain = make_model()
    expected = train_torch(plain, sgd(plain), data, clip=1.0)
    for level in (1, 2, 3):
        run = build(level, dict(dp=2, tp=2), pins=pins, make=sgd)
        stored = {i.label: str(i.stored) for i in run.step.plan(*data[0]).inputs}
        assert stored["blocks.0.attn.qkv.bias"] == "f32[3*16@(tp,dp)]"
        with dt.launch(run.mesh):
            assert_losses_close(run.losses(data), expected)
            run.state()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_parameter_tied_between_stages_of_one_rank(level: int) -> None:
    """Four stages on two ranks: the table and the head that shares it are both on the first."""
    data = batches(4)
    torch.manual_seed(0)
    plain = Late()
    expected = train_torch(plain, sgd(plain), data, clip=1.0)
    torch.manual_seed(0)
    stages = {"pp": [["embed*", "positions*"], ["blocks*"], ["norm*", "head*"], ["last"]]}
    run = build(
        level,
        dict(pp=2, dp=2),
        module=Late(),
        stages=stages,
        schedule=dt.GPipe(2),
        make=sgd,
    )
    with dt.launch(run.mesh):
        assert_losses_close(run.losses(data), expected)
        run.state()


class Late(GPT):
    """A GPT whose head shares the embedding, with a fourth stage behind it."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.last = nn.Parameter(torch.ones(32))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.last


# -- state in and out ------------------------------------------------------------------------------


@pytest.mark.slow
def test_levels_change_between_save_and_load() -> None:
    data = batches(8)
    plain = make_model()
    expected = train_torch(plain, adamw(plain), data, clip=1.0)
    found: list[float] = []
    state: dict[str, Any] | None = None
    for part, level in enumerate((0, 1, 3, 2)):
        run = build(level, dict(dp=(2, 4, 2, 4)[part]))
        if state is not None:
            dt.load_state_dict(run.model, run.optimizer, state)
        with dt.launch(run.mesh):
            found += run.losses(data[2 * part : 2 * part + 2])
            state = run.state()
    assert_losses_close(found, expected)
    assert state is not None
    restored = make_model()
    optimizer = adamw(restored)
    restored.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])  # torch's own format, whole
    first = state["optimizer"]["state"][0]["exp_avg"]
    assert first.shape == next(iter(restored.parameters())).shape


def half(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_fn(model, tokens, targets)[0]


@pytest.mark.slow
def test_casts_come_before_gathers() -> None:
    """Under autocast a shard is cast and its 16 bits are sent; the numbers are the same."""
    data = batches(2)
    runs = [build(n, dict(dp=2), loss=half, clip=None, schedule=dt.GPipe(2)) for n in (2, 3)]
    sent = {
        c.dtype: c.bytes_sent
        for c in runs[1].step.plan(*data[0]).collectives
        if c.kind == "all_gather" and c.name == "parameters_dp_4"
    }
    assert sent == {"bfloat16": 3072 + 16 * (3 + 1 + 4 + 1)}  # half of block 0, in 2 bytes
    losses: list[list[float]] = []
    for run in runs:
        with dt.launch(run.mesh):
            losses.append(run.losses(data))
            run.state()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("level", [1, 3])
def test_loading_within_a_launch(level: int) -> None:
    data = batches(4)
    run = build(level, dict(dp=2))
    with dt.launch(run.mesh):
        run.losses(data[:2])
        state = run.state()
        losses = run.losses(data[2:])
        dt.load_state_dict(run.model, run.optimizer, state)
        again = run.losses(data[2:])
        run.state()
    assert again == losses


def test_gradients_of_the_last_step() -> None:
    run = build(3, dict(dp=2), keep_gradients=True)
    one = batch()
    with dt.launch(run.mesh):
        asked = run.step.gradients(*one)
        float(run.step(*one))
        assert_same_bits(run.step.gradients(), asked)
        run.state()


@pytest.mark.slow
def test_evaluation_reads_what_training_stores() -> None:
    run = build(3, dict(dp=2))
    one = batch()

    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens)

    evaluate = dt.compile(logits, run.mesh)
    plan = evaluate.plan(run.model, one[0])
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    assert gathers and all(c.phase == "forward" for c in gathers)
    with dt.launch(run.mesh):
        float(run.step(*one))
        found = evaluate(run.model, one[0]).full_tensor()
        state = run.state()
    module = make_model()
    module.load_state_dict(state["model"])
    torch.testing.assert_close(found, module(one[0]), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_parameter_that_is_unfrozen_later() -> None:
    data = pairs(4)
    results: list[list[float]] = []
    for parallel in (False, True):
        module = odd()
        module.up.requires_grad_(False)  # type: ignore[union-attr]
        run = build(3, dict(dp=2), module=module, loss=squares, clip=None)
        if not parallel:
            losses = train_torch(module, run.optimizer, data[:2], loss=squares)
            module.up.requires_grad_(True)  # type: ignore[union-attr]
            results.append(losses + train_torch(module, run.optimizer, data[2:], loss=squares))
            continue
        with dt.launch(run.mesh):
            losses = run.losses(data[:2])
            module.up.requires_grad_(True)  # type: ignore[union-attr]
            results.append(losses + run.losses(data[2:]))
            run.state()
    assert_losses_close(results[1], results[0])


class Penalised(nn.Module):
    """Its weight is a result's whole input: the gradient of the penalty is the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean() + 0.5 * self.a.weight.square().sum()


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("schedule", [dt.GPipe(1), dt.GPipe(2)], ids=str)
def test_a_gradient_that_does_not_depend_on_the_batch(level: int, schedule: dt.Schedule) -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    data = [(torch.randn(8, 8),) for _ in range(3)]
    run = build(level, dict(dp=2), module=Penalised(), loss=penalty, schedule=schedule, clip=None)
    plain = Penalised()
    with dt.launch(run.mesh):
        losses = run.losses(data)
        run.state()
    assert_losses_close(losses, train_torch(plain, adamw(plain), data, loss=penalty))


# -- backends and refusals -------------------------------------------------------------------------


@pytest.mark.ray
def test_ray_gives_the_bits_of_one_process(ray_session: None) -> None:
    data = batches(2)
    results = []
    for backend in ("inprocess", "ray"):
        run = build(3, dict(dp=2), schedule=dt.GPipe(2))
        with dt.launch(run.mesh, backend=backend):  # type: ignore[arg-type]
            results.append((run.losses(data), run.state()))
    assert_same_bits(results[1], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["interpreted", "compiled"])
def test_modes_agree(mode: Any) -> None:
    data = batches(2)
    run = build(3, dict(dp=2), clip=None)
    with dt.launch(run.mesh, mode=mode):
        losses = run.losses(data)
        run.state()
    assert losses == result_of(0, axes=dict(dp=2), clip=None, steps=2)[0]
