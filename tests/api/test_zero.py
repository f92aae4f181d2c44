"""ZeRO: splitting stored values changes where they are and what is sent, but no result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.sharding.plan.steps import Redistribute
from tests.api import expert_layer
from tests.models import loss_fn
from tests.training import (
    MEGATRON,
    TWO_STAGES,
    MakeOptimizer,
    Placed,
    Run,
    adamw,
    assert_losses_close,
    assert_same_bits,
    assert_trains_as_torch,
    batches,
    make_model,
    sgd,
    train_torch,
)

ROWS = dict(dp=dt.Row())
DP2 = Placed(axes=dict(dp=2), inputs=ROWS)
DP4 = Placed(axes=dict(dp=4), inputs=ROWS)
BOTH = dict(dp=dt.Row(), ep=dt.Row())
DP2_EP2 = Placed(axes=dict(dp=2, ep=2), inputs=BOTH)
NO_LATENCY = dt.Topology(latency=0.0)


def run_of(level: int | str, placed: Placed = DP2, **options: Any) -> Run:
    zero = {axis: level for axis in ("dp", "ep") if axis in placed.axes}
    return Run.of(placed, zero=zero, **{"schedule": dt.GPipe(1), **options})


# -- bits ------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.5),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), t0=1, weight_decay=0.1),
}


class Uneven(nn.Module):
    """A model with shards of a few elements, and one of 8,407."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(37, 7)
        self.mid = nn.Linear(7, 1201, bias=False)
        self.down = nn.Linear(1201, 37)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mid(self.up(x).tanh()).tanh()) * self.scale


def square_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


@pytest.mark.default("adagrad-torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_levels_are_bitwise_equal_with_uneven_cuts(name: str, dtype: torch.dtype) -> None:
    """Sums are folded in rank order, whether split or not. Torch's own fused kernels, and its
    16-bit ops, round the last elements of a tensor differently. Without clipping, because the norm
    of shards is summed in another order."""
    torch.manual_seed(5)
    data = [(torch.randn(4, 37, dtype=dtype), torch.zeros(4, 37, dtype=dtype)) for _ in range(3)]
    placed = Placed(
        axes=dict(dp=2, tp=2),
        pins={"mid.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())},
        inputs=ROWS,
    )
    found: list[Any] = []
    for level in range(4):
        make = OPTIMIZERS[name]
        module = Uneven().to(dtype)
        run = run_of(level, placed, module=module, clip=None, make=make, loss=square_error)
        with dt.launch(run.mesh):
            found.append((run.step.gradients(*data[0]), run.losses(data), run.state()))
        assert_same_bits(found[level], found[0], f"level {level}")


@pytest.mark.default("inputs0")
@pytest.mark.parametrize("inputs", [BOTH, ROWS])
def test_zero_levels_over_two_axes_are_bitwise_equal_with_uneven_cuts(inputs: Any) -> None:
    """Without latency, gradients are scattered over one axis, reduced over the other, gathered."""
    data = [(torch.randn(4, 37), torch.zeros(4, 37)) for _ in range(2)]
    placed = Placed(axes=dict(dp=2, ep=2), inputs={"ep": dt.Replicate(), **inputs})
    found: list[Any] = []
    for level, topology in ((0, None), (0, NO_LATENCY), (1, None), (2, None), (3, None)):
        run = run_of(
            level, placed, module=Uneven(), clip=None, loss=square_error, topology=topology
        )
        with dt.launch(run.mesh):
            found.append((run.step.gradients(*data[0]), run.losses(data), run.state()))
        assert_same_bits(found[-1], found[0], f"level {level}")


@pytest.mark.slow
def test_zero_levels_with_same_sum_order_are_bitwise_equal() -> None:
    """Levels 2 and 3 sum over ranks and then over microbatches; levels 0 and 1 the other way
    round."""
    placed = Placed(axes=dict(pp=2, dp=2), inputs=ROWS, stages=TWO_STAGES)

    def bits(level: int, clip: float | None) -> Any:
        run = run_of(level, placed, schedule=dt.OneFOneB(2), clip=clip)
        with dt.launch(run.mesh):
            return run.losses(batches(3)), run.state()

    assert_same_bits(bits(3, 1.0), bits(2, 1.0))
    assert_same_bits(bits(1, None), bits(0, None))


# -- where numbers lie -----------------------------------------------------------------------------


class Odd(nn.Module):
    """A model with 7 rows, 3 columns, a scalar, and a dim that is smaller than the axis."""

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


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_splits_uneven_dim_that_balances_shards_best(level: int) -> None:
    run = run_of(level, DP4, module=Odd(), loss=square_error)
    plan = run.step.plan(torch.randn(8, 3), torch.randn(8, 3))
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


@pytest.mark.default("1")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_trains_with_fused_bias_split_in_blocks(level: int) -> None:
    """With tp, a rank's part of each of the three blocks of a fused bias is not contiguous."""
    pins = {**MEGATRON, "*.qkv.bias": dict(tp=dt.Row(blocks=3))}
    placed = Placed(axes=dict(dp=2, tp=2), pins=pins, inputs=ROWS)
    run = assert_trains_as_torch(placed, make=sgd, schedule=dt.GPipe(1), zero={"dp": level})
    stored = {i.label: str(i.stored) for i in run.step.plan(*batches(1)[0]).inputs}
    assert stored["blocks.0.attn.qkv.bias"] == "f32[3*16@(tp,dp)]"


SEQUENCE = dict(dp=dt.Row(), cp=dt.Shard(1))
PINS_ON_EP = {name: dict(ep=pin["tp"]) for name, pin in MEGATRON.items()}
OVER_TWO: dict[str, tuple[Placed, dict[str, Any]]] = {
    "1f1b": (
        Placed(axes=dict(pp=2, dp=2, ep=2), inputs=BOTH, stages=TWO_STAGES),
        dict(schedule=dt.OneFOneB(2)),
    ),
    "pinned": (
        Placed(axes=dict(dp=2, ep=2), pins=PINS_ON_EP, inputs=ROWS),
        dict(schedule=dt.GPipe(2)),
    ),
    "ranks that do not divide": (Placed(axes=dict(dp=3, ep=2), inputs=BOTH), {}),
    "ep is faster": (DP2_EP2, dict(topology=dt.Topology(bandwidth=dict(dp=25e9, ep=147e9)))),
    "recompute": (DP2_EP2, dict(recompute=["blocks.*"])),
    "sequence": (Placed(axes=dict(dp=2, cp=2), inputs=SEQUENCE), {}),
}


@pytest.mark.default("1f1b-1", "1f1b-3", "pinned-2", "sequence-3")
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("name", OVER_TWO)
def test_zero_over_two_axes_trains_as_torch(name: str, level: int) -> None:
    """With clipping, so the norm counts each element once."""
    placed, stated = OVER_TWO[name]
    axes = ("dp", "cp" if name == "sequence" else "ep")
    given = {"schedule": dt.GPipe(1), "zero": dict.fromkeys(axes, level), **stated}
    run = assert_trains_as_torch(placed, clip=0.3, **given)
    stored = {i.label: i.stored_axes for i in run.step.plan(*batches(1)[0]).inputs}
    assert stored["blocks.0.mlp.up.weight"] == (("dp",) if name == "pinned" else axes)
    assert stored["norm.weight"] == axes


OVER_SEVERAL: dict[str, tuple[Placed, dict[str, Any]]] = {
    "pp2 dp2 cp2": (
        Placed(axes=dict(pp=2, dp=2, cp=2), inputs=SEQUENCE, stages=TWO_STAGES),
        dict(schedule=dt.OneFOneB(2)),
    ),
    "tp2 dp2 cp2": (
        Placed(axes=dict(tp=2, dp=2, cp=2), pins=MEGATRON, inputs=SEQUENCE),
        dict(schedule=dt.GPipe(1)),
    ),
    "dp3 cp2": (Placed(axes=dict(dp=3, cp=2), inputs=SEQUENCE), dict(schedule=dt.GPipe(2))),
}


@pytest.mark.default("pp2 dp2 cp2-inprocess")
@pytest.mark.parametrize("backend", ["inprocess", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize("name", OVER_SEVERAL)
def test_gradients_scattered_over_one_axis_and_reduced_over_another_train_as_torch(
    name: str, backend: str
) -> None:
    """With clipping, and with a tied embedding over stages."""
    placed, stated = OVER_SEVERAL[name]
    run = assert_trains_as_torch(placed, clip=0.3, topology=NO_LATENCY, backend=backend, **stated)
    plan = run.step.plan(*batches(1)[0])
    buckets = [s for s in plan.steps if isinstance(s, Redistribute) and s.reduces_gradients]
    assert "all_gather" in {step.kind for step in buckets}


@pytest.mark.default("1")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_over_two_axes_stores_experts_over_data_axis_alone(level: int) -> None:
    run = assert_trains_as_torch(
        Placed(axes=dict(dp=2, ep=2), pins=expert_layer.EP, inputs=BOTH),
        [expert_layer.batch(seed) for seed in range(3)],
        build=expert_layer.Model,
        loss=expert_layer.loss_fn,
        clip=0.1,
        schedule=dt.GPipe(2),
        zero={"dp": level, "ep": level},
    )
    plan = run.step.plan(*expert_layer.batch())
    stored = {item.label: str(item.stored) for item in plan.inputs}
    assert stored["experts.up"] == "f32[4@ep,4@dp,6]"
    assert stored["gate.weight"] == "f32[4@(dp,ep),4]"


def half(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_fn(model, tokens, targets)[0]


@pytest.mark.slow
def test_zero3_under_autocast_gathers_16_bit_values() -> None:
    """The cast is done on the shard; the results are the same."""
    data = batches(2)
    found: list[Any] = []
    for level in (0, 2, 3):
        run = run_of(level, loss=half, clip=None)
        with dt.launch(run.mesh):
            found.append((run.step.gradients(*data[0]), run.losses(data), run.state()))
        assert_same_bits(found[-1], found[0], f"level {level}")
    sent = {
        c.dtype: c.bytes_sent
        for c in run.step.plan(*data[0]).collectives
        if c.kind == "all_gather" and c.name == "parameters_dp_4"
    }
    assert sent == {"bfloat16": 3072 + 16 * (3 + 1 + 4 + 1)}  # half of block 0, in 2 bytes


class Penalised(nn.Module):
    """A model with a penalty whose gradient is the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean() + 0.5 * self.a.weight.square().sum()


@pytest.mark.parametrize(("level", "microbatches"), [(1, 2), (2, 2), (3, 2), (3, 1)])
def test_zero_trains_gradient_independent_of_batch_as_torch(level: int, microbatches: int) -> None:
    assert_trains_as_torch(
        DP2,
        [(torch.randn(8, 8),) for _ in range(3)],
        build=Penalised,
        loss=lambda model, x: model(x),
        schedule=dt.GPipe(microbatches),
        clip=None,
        zero={"dp": level},
    )


# -- state in and out ------------------------------------------------------------------------------


@pytest.mark.slow
def test_zero_level_may_change_between_save_and_load() -> None:
    data = batches(8)
    plain = make_model()
    expected = train_torch(plain, adamw(plain), data, clip=1.0)
    found: list[float] = []
    state: dict[str, Any] | None = None
    for part, level in enumerate((0, 1, 3, 2)):
        run = run_of(level, (DP2, DP4, DP2_EP2, DP4)[part])
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


@pytest.mark.parametrize("level", [1, 3])
def test_zero_state_loaded_inside_launch_repeats_losses(level: int) -> None:
    data = batches(4)
    run = run_of(level)
    with dt.launch(run.mesh):
        run.losses(data[:2])
        state = run.state()
        losses = run.losses(data[2:])
        dt.load_state_dict(run.model, run.optimizer, state)
        assert run.losses(data[2:]) == losses
        run.state()


def test_evaluation_uses_zero3_shards_of_training() -> None:
    run = run_of(3)
    one = batches(1)[0]
    evaluate = dt.compile(lambda model, tokens: model(tokens), run.mesh)
    gathers = [c for c in evaluate.plan(run.model, one[0]).collectives if c.kind == "all_gather"]
    assert gathers and all(c.phase == "forward" for c in gathers)
    with dt.launch(run.mesh):
        float(run.step(*one))
        found = evaluate(run.model, one[0]).full_tensor()
        state = run.state()
    module = make_model()
    module.load_state_dict(state["model"])
    torch.testing.assert_close(found, module(one[0]), rtol=0, atol=1e-5)


# -- zero={"dp": "auto"} ---------------------------------------------------------------------------


def layers_run(level: int | str, memory: float) -> Run:
    """Return a run of four layers on a topology on which level 1 is fastest."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    topology = dt.Topology(memory_bytes=memory, launch_latency=0.0, latency=0.0)
    return run_of(level, module=module, loss=square_error, topology=topology)


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 64), torch.randn(8, 64)) for _ in range(count)]


@pytest.mark.parametrize(("level", "memory"), [(1, 80e9), (3, 1.0)])
def test_level_of_first_step_holds_for_all_programs(level: int, memory: float) -> None:
    """Before the step, an evaluation reads whole parameters; the step then moves them."""
    data, stated = pairs(3), layers_run(level, memory)
    with dt.launch(stated.mesh):
        expected = stated.losses(data)
        state = stated.state()
    run = layers_run("auto", memory)
    assert "zero={'dp': 'auto'}" in repr(run.model)
    evaluate = dt.compile(lambda model, x: model(x), run.mesh)
    x = data[0][0]
    with dt.launch(run.mesh):
        before = evaluate(run.model, x).full_tensor()
        losses = run.losses(data[:1])
        assert run.model.zero is not None and run.model.zero.level == level
        assert f"zero={{'dp': {level}}}" in repr(run.model)
        plan = evaluate.plan(run.model, x)
        assert plan.zero == run.model.zero == run.step.plan(*data[1]).zero
        assert not torch.equal(evaluate(run.model, x).full_tensor(), before)
        assert losses + run.losses(data[1:]) == expected
        assert_same_bits(run.state(), state)


def test_auto_level_is_chosen_after_switch_and_load() -> None:
    data, stated = pairs(4), layers_run(3, 1.0)
    with dt.launch(stated.mesh):
        stated.losses(data[:2])
        state = stated.state()
        expected = stated.losses(data[2:])
    run = layers_run("auto", 1.0)
    with dt.launch(run.mesh) as launch:
        dt.load_state_dict(run.model, run.optimizer, state)
        assert run.losses(data[2:3]) == expected[:1]
        launch.switch(run.model, run.optimizer, run.mesh, {}, zero={"dp": "auto"})
        assert run.model.zero is not None and run.model.zero.level == 3
        assert run.losses(data[3:]) == expected[1:]
        launch.switch(run.model, run.optimizer, dt.Mesh(dp=2, name="next"), {}, zero={"dp": "auto"})
        assert run.model.zero is not None and run.model.zero.level == 3


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"dp": 4}, "the level is 1"),
        ({"dp": True}, "the level is 1"),
        ({"dp": 1, "tp": 4}, r"not 4; fix: zero=\{'dp': 1, 'tp': 1\}"),
        ({"dp": 1, "tp": 3}, r"the levels differ.*\nfix: zero=\{'dp': 3, 'tp': 3\}"),
        ({"dp": 2, "pp": 2}, r"holds the pipeline's stages.*fix: zero=\{'dp': 2\}"),
        ({"dp": "atuo"}, r"""or "auto", not 'atuo'; fix: zero=\{'dp': 'auto'\}"""),
        ({"dp": "auto", "tp": 3}, r"the levels differ.*\nfix: zero=\{'dp': 'auto', 'tp': 'auto'\}"),
        ({"ep": 1}, "has no axis 'ep'"),
        ({"pp": 1}, "holds the pipeline's stages"),
    ],
)
def test_invalid_zero_argument_is_refused(zero: Mapping[str, int | str], message: str) -> None:
    mesh = dt.Mesh(pp=2, dp=2, tp=1)
    with pytest.raises(dt.PlanningError, match=message):
        dt.parallelize(make_model(), mesh, {}, stages=TWO_STAGES, zero=zero)


def test_zero_on_one_rank_has_no_effect() -> None:
    for mesh, zero in ((dt.Mesh(dp=1), {"dp": 3}), (dt.Mesh(dp=2, ep=1), {"dp": 0, "ep": 3})):
        assert dt.parallelize(make_model(), mesh, {}, zero=zero).zero is None
