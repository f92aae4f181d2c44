"""Placements that do not line up with the program: activations are redistributed, or parameters are
gathered before use (`parallelize(misaligned="gather")`).

Any placement that fits its parameter runs and gives torch's numbers. The parameter, its gradient
and its optimizer state are stored as placed, and the plan states what is communicated, why, and at
what cost.
"""
# ruff: noqa: E501  (plans stand as they are printed)

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import dtensor as dt
from dtensor.sharding.plan.steps import Update
from dtensor.sharding.spec.spec import make_spec
from tests.api.misaligned_programs import Case, random_shard
from tests.models import MLP, loss_fn
from tests.training import (
    MEGATRON,
    TWO_STAGES,
    assert_same_bits,
    batches,
    make_model,
    sgd,
    train_torch,
)

X = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))
PINS = {"q.weight": dict(tp=dt.Row())}
TP4 = dt.Mesh(tp=4)


class Heads(nn.Module):
    """x [b t 16] to 22 heads of size 16 and back; 352 rows over 4 ranks are 5.5 heads each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(16, 352, bias=False)
        self.o = nn.Linear(352, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q(x).view(*x.shape[:2], 22, 16)
        return self.o(heads.softmax(-1).flatten(2))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def step_of(
    mesh: dt.Mesh,
    pins: Mapping[str, Any] = PINS,
    *,
    module: nn.Module | None = None,
    misaligned: str = "gather",
    make: Any = sgd,
    loss: Any = mean_square,
    zero: Mapping[str, int] | None = None,
    stages: Any = None,
    **options: Any,
) -> tuple[dt.ParallelModule, Any, dt.TrainStep]:
    module = Heads() if module is None else module
    model = dt.parallelize(module, mesh, pins, misaligned=misaligned, zero=zero, stages=stages)
    optimizer = make(module)
    return model, optimizer, dt.train_step(model, loss, optimizer, **options)


# -- what is planned -------------------------------------------------------------------------------


def test_plan_states_which_parameters_are_gathered_and_why() -> None:
    _, _, step = step_of(TP4)
    plan = step.plan(X)
    text = re.sub(r"\.py:\d+", ".py:N", str(plan))
    head, _, rest = text.partition("\nforward")
    assert_expected_inline(
        head,
        """\
plan mean_square    mesh(tp=4)    stage 0 of 1    all ranks identical
axis tp    splits nothing: no pin opens a factor
stored  q.weight as Shard(0) on tp, which does not line up: aten.reshape.default sees it as 22 x 16
        (test_misaligned.py:N); gathered before use; pinned by q.weight

inputs
  q.weight  f32[352@tp,16]  parameter, used as f32[352,16]
  o.weight  f32[16,352]     parameter
  o.bias    f32[16]         parameter
  x         f32[8,4,16]     argument
""",
    )
    lines = rest.splitlines()
    (at,) = (i for i, line in enumerate(lines) if "all_gather(" in line)
    assert_expected_inline(
        "\n".join(re.sub("  +", "  ", line) for line in lines[at : at + 2]),
        """\
* parameters_tp  = all_gather(1 parameter, tp)  one bucket of 22.0 KiB  16.5 KiB sent  test_misaligned.py:N
  of q.weight""",
    )
    assert_expected_inline(
        re.sub(r"\.py:\d+", ".py:N", plan.explain("q.weight")),
        """\
q_weight: f32[352@tp,16]
  parameter q.weight
  on tp: stored as Shard(0), pinned by q.weight, which does not line up: aten.reshape.default sees it as 22 x 16; gathered before use    test_misaligned.py:N
  all_gather on tp within parameters_tp, 16.5 KiB sent: q_weight_gathered, the parameter q.weight""",
    )


def test_misaligned_plan_memory_and_messages_are_those_of_stored_shards() -> None:
    stated = step_of(TP4, make=torch_adamw)[2].plan(X)
    whole = step_of(TP4, {}, make=torch_adamw)[2].plan(X)
    nbytes = 352 * 16 * 4
    saved = nbytes * 3 // 4
    (ours,), (other,) = stated.memory, whole.memory
    assert other.parameters - ours.parameters == saved
    assert other.gradients - ours.gradients == saved
    assert other.optimizer - ours.optimizer == 2 * saved
    assert [(c.kind, c.axis, c.bytes_sent, c.phase) for c in stated.collectives] == [
        ("all_gather", "tp", saved, "forward")  # its input needs no gradient, so once
    ]
    assert "test_misaligned.py:" in stated.collectives[0].source
    assert stated.opened == whole.opened == (("tp", ()),)
    assert stated.cost.seconds > whole.cost.seconds
    (update,) = [s for s in stated.steps if isinstance(s, Update) and s.parameter == "q.weight"]
    assert str(update.spec) == "f32[352@tp,16]"


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_gradients_of_gathered_parameter_are_scattered_in_each_backward() -> None:
    """Batch rows and the parameter are split over one axis, as with ZeRO level 3."""
    pins = {"q.weight": dict(dp=dt.Row())}
    options: dict[str, Any] = dict(inputs=dict(dp=dt.Row()), schedule=dt.GPipe(microbatches=2))
    plan = step_of(dt.Mesh(dp=4), pins, **options)[2].plan(X)
    nbytes = 352 * 16 * 4 * 3 // 4
    assert [
        (c.kind, c.bytes_sent, c.times, c.phase)
        for c in plan.collectives
        if c.phase != "optimizer" and c.bytes_sent > 100
    ] == [
        ("all_gather", nbytes, 2, "forward"),
        ("reduce_scatter", nbytes, 2, "backward"),
    ]
    assert "grad_q_weight_scattered_total = accumulate" in re.sub(" +", " ", str(plan))


# -- what is computed ------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_misaligned_placement_trains_as_torch_with_gather() -> None:
    data = batches(2)
    reference = make_model()
    losses = train_torch(reference, sgd(reference), data, loss=loss_fn, clip=1.0)
    weights = {n: p.shape for n, p in make_model().named_parameters() if p.dim() == 2}
    refused = 0
    for seed in range(40):
        draw = random.Random(seed)
        mesh = dt.Mesh(tp=draw.choice([2, 3, 4]))
        pins = {
            name: dict(tp=random_shard(draw, weights[name]))
            for name in draw.sample(sorted(weights), draw.choice([1, 2]))
        }
        given: dict[str, Any] = dict(loss=loss_fn, clip_grad_norm=1.0)
        try:
            step_of(mesh, pins, module=make_model(), misaligned="error", **given)[2].plan(*data[0])
            continue
        except dt.PlanningError as error:
            assert "does not line up with the program's use" in str(error)
            assert 'or parallelize(..., misaligned="gather")' in str(error)
        refused += 1
        model, optimizer, step = step_of(mesh, pins, module=make_model(), **given)
        inputs = {item.label: item for item in step.plan(*data[0]).inputs}
        for name, stated in pins.items():
            wanted = make_spec(inputs[name].spec.shape, torch.float32, mesh, stated)
            assert inputs[name].held.placements == wanted.placements
            assert inputs[name].state.placements == wanted.placements
        with dt.launch(mesh):
            found = [float(step(*one)) for one in data]
            state = dt.gather_state_dict(model, optimizer)["model"]
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6, msg=f"seed {seed}")
        torch.testing.assert_close(state, reference.state_dict(), rtol=1e-4, atol=1e-5)
    assert refused >= 8


def trained(
    mesh: dt.Mesh, pins: Mapping[str, Any], misaligned: str = "gather", steps: int = 3, **given: Any
) -> dict[str, Any]:
    model, optimizer, step = step_of(mesh, pins, misaligned=misaligned, **given)
    with dt.launch(mesh):
        losses = [float(step(X)) for _ in range(steps)]
        return {"losses": losses, **dt.gather_state_dict(model, optimizer)}


@pytest.mark.default("1")
@pytest.mark.parametrize("microbatches", [1, 4])
def test_misaligned_gather_is_bitwise_equal_to_replicated_parameter(microbatches: int) -> None:
    given: dict[str, Any] = dict(schedule=dt.GPipe(microbatches=microbatches))
    replicated = trained(TP4, {"q.weight": dict(tp=dt.Replicate())}, "error", **given)
    assert_same_bits(trained(TP4, PINS, **given), replicated)


SHARDS = dict(tp=dt.Shard(0, blocks=(100, 252), unit=2))
TRAINED = {
    "dp first": (dt.Mesh(dp=2, tp=2), dict(dp=dt.Row(), tp=dt.Row()), {}),
    "zero 3": (
        dt.Mesh(dp=2, tp=2),
        SHARDS,
        dict(inputs=dict(dp=dt.Row()), zero={"dp": 3}, schedule=dt.GPipe(microbatches=2)),
    ),
    "zero 3 on its axis": (dt.Mesh(tp=4), SHARDS, dict(zero={"tp": 3})),
    "recompute": (dt.Mesh(tp=4), SHARDS, dict(recompute=["q"])),
}


@pytest.mark.default("dp first")
@pytest.mark.parametrize("name", TRAINED)
def test_misaligned_gather_trains_as_torch_with_other_options(name: str) -> None:
    mesh, shards, given = TRAINED[name]
    expected = Heads()
    losses = train_torch(expected, sgd(expected), [(X,)] * 3, loss=mean_square, clip=0.1)
    found = trained(mesh, {"q.weight": shards}, clip_grad_norm=0.1, **given)
    torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["model"], expected.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.default("stages0")
@pytest.mark.parametrize("stages", [TWO_STAGES, "auto"])
def test_misaligned_tied_parameter_on_two_stages_trains_as_torch(stages: Any) -> None:
    """The placement cuts heads of 4 in halves and splits the tied embedding and head in blocks."""
    pins = {
        **MEGATRON,
        "embed.weight": dict(tp=dt.Row(blocks=(12, 20), unit=2)),
        "*.qkv.weight": dict(tp=dt.Row(blocks=(10, 38))),
    }
    data = batches(3)
    expected = make_model()
    losses = train_torch(expected, sgd(expected), data, clip=1.0)
    mesh = dt.Mesh(pp=2, tp=2)
    model, optimizer, step = step_of(
        mesh,
        pins,
        module=make_model(),
        stages=stages,
        loss=loss_fn,
        clip_grad_norm=1.0,
        schedule=dt.OneFOneB(microbatches=2),
    )
    with dt.launch(mesh):
        found = [float(step(*one)) for one in data]
        state = dt.gather_state_dict(model, optimizer)["model"]
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, expected.state_dict(), rtol=1e-4, atol=1e-5)
    stored = {i.label: str(i.held) for i in step.plan(*data[0]).inputs}
    assert stored["blocks.1.attn.qkv.weight"] == "f32[(10+38)@tp,16]"


def test_misaligned_state_loads_bitwise_under_any_placement() -> None:
    before = trained(TP4, PINS, make=torch_adamw, steps=2)
    whole, found = [], []
    for pins, misaligned, into in (({}, "error", whole), (PINS, "gather", found)):
        model, optimizer, step = step_of(TP4, pins, misaligned=misaligned, make=torch_adamw)
        dt.load_state_dict(model, optimizer, before)
        with dt.launch(TP4):
            into.append(float(step(X)))
            into.append(dt.gather_state_dict(model, optimizer))
    assert_same_bits(found, whole)


def test_several_programs_share_stored_misaligned_parameter() -> None:
    """Steps and evaluation gather it; a program with which the placement lines up computes on the
    shards."""
    model, optimizer, step = step_of(TP4, keep_gradients=True)
    evaluate = dt.compile(lambda model, x: model(x), TP4)
    project = dt.compile(lambda model, x: model.q(x), TP4)
    expected = Heads()
    mean_square(expected, X).backward()
    with dt.launch(TP4):
        for _ in range(2):
            torch.testing.assert_close(evaluate(model, X).full_tensor(), expected(X))
            torch.testing.assert_close(project(model, X).full_tensor(), expected.q(X))
        gradients = step.gradients(X)
        step(X)
        kept = step.gradients()
        dt.gather_state_dict(model, optimizer)
    assert "all_gather(1 parameter, tp)" in str(evaluate.plan(model, X))
    assert "axis tp    splits q.weight" in str(project.plan(model, X))
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(kept[name], gradients[name])


def test_misaligned_buffer_written_by_forward_matches_torch() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(6, 6)
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            y = self.w(x)
            self.get_buffer("seen").add_(y.detach().view(-1, 2, 3).sum(0).flatten())
            return y + self.get_buffer("seen").view(2, 3).flatten()

    x = torch.randn(4, 6)
    torch.manual_seed(0)
    expected = Counting()
    torch.manual_seed(0)
    mesh = dt.Mesh(tp=4)
    model, optimizer, step = step_of(mesh, {"seen": dict(tp=dt.Row())}, module=Counting())
    losses = train_torch(expected, sgd(expected), [(x,)] * 3, loss=mean_square)
    with dt.launch(mesh):
        found = [float(step(x)) for _ in range(3)]
        state = dt.gather_state_dict(model, optimizer)["model"]
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(state, expected.state_dict())


# -- what is said ----------------------------------------------------------------------------------


def test_misaligned_rejects_unknown_option() -> None:
    match = 'misaligned=\'gathr\': it is "redistribute", "error" or "gather"'
    with pytest.raises(dt.PlanningError, match=match):
        dt.parallelize(MLP(), TP4, {}, misaligned="gathr")


def test_aligned_placement_is_used_without_gather() -> None:
    pins = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
    x = torch.empty(8, 16)
    texts = [
        str(step_of(TP4, pins, module=MLP(), misaligned=word)[2].plan(x))
        for word in ("gather", "error")
    ]
    assert texts[0] == texts[1] and "stored" not in texts[0]


# -- activations that are redistributed ------------------------------------------------------------


class Grouped(nn.Module):
    """12 features in 3 groups; over 2 ranks, a split of the features cuts the second group."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 12), nn.GroupNorm(3, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


def test_misaligned_activation_is_gathered_before_group_norm_with_fix() -> None:
    pins = {"a.weight": dict(tp=dt.Row())}
    x = torch.randn(6, 8)
    mesh = dt.Mesh(tp=2)
    plan = step_of(mesh, pins, module=Grouped(), misaligned="redistribute")[2].plan(x)
    assert [(c.key, c.bytes_sent) for c in plan.collectives] == [("all_gather@tp", 144)]
    (item,) = [item for item in plan.inputs if item.label == "a.weight"]
    assert str(item.held) == str(item.state) == "f32[12@tp,8]"
    head = re.sub(r":\d+", ":N", str(plan).partition("\n\ninputs")[0])
    assert_expected_inline(
        head.partition("\n")[2],
        """\
axis tp    splits a.weight dim 0 (12), with a.bias; opened by a.weight
ends    a.weight as Shard(0) on tp, which does not line up: aten.native_group_norm.default sees it
        as 3 x 4 (test_misaligned.py:N); the activation is redistributed before it, 144 B sent a
        step; pinned by a.weight; fix: tp=Shard(0, unit=4), which lines up""",
    )
    assert "its split ends where aten.native_group_norm.default sees it" in plan.explain("a.weight")
    aligned = {"a.weight": dict(tp=dt.Row(unit=4))}
    text = str(step_of(mesh, aligned, module=Grouped(), misaligned="error")[2].plan(x))
    assert "ends " not in text


class Gated(nn.Module):
    """The two halves of 12 features are multiplied; over 2 ranks, a split in one block separates
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.glu(self.a(x)))


def test_gated_halves_line_up_with_two_blocks() -> None:
    x = torch.randn(6, 8)
    pins = {"a.weight": dict(tp=dt.Row()), "b.weight": dict(tp=dt.Column())}
    text = str(step_of(dt.Mesh(tp=2), pins, module=Gated(), misaligned="redistribute")[2].plan(x))
    assert "aten.glu.default sees it as 2 x 6" in text
    assert (
        " ".join(text.split()).count(
            "72 B sent a step; pinned by a.weight; fix: tp=Shard(0, blocks=2)"
        )
        == 1
    )
    pins["a.weight"] = dict(tp=dt.Row(blocks=2))
    plan = step_of(dt.Mesh(tp=2), pins, module=Gated(), misaligned="error")[2].plan(x)
    assert [c.key for c in plan.collectives] == ["all_reduce@tp"]


@pytest.mark.default("0", "5", "10", "19")
@pytest.mark.parametrize("seed", range(60))
def test_random_programs_under_random_placements_match_torch(seed: int) -> None:
    """Programs of slices, splits, pads, group norms and views. No placement is refused."""
    case = Case.of(seed)
    try:
        case.check()
    except Exception as error:
        raise AssertionError(str(case)) from error
