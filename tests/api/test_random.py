"""Random ops: masks and losses are the same on every mesh, for any number of microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.sharding.ops.call import run_number_names
from dtensor.sharding.plan.dataflow import Dataflow
from tests.models import DropoutGPT, batch, loss_fn

PINS: dict[str, Any] = {
    "*.qkv.*": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "*.up.*": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}
STAGES = {"pp": [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*", "norm*", "head*"]]}


SPLITS = dict(dp=dt.Row(), cp=dt.Shard(1))


def train(mesh: dt.Mesh, microbatches: int = 1, steps: int = 20) -> list[float]:
    dt.manual_seed(3)
    torch.manual_seed(0)
    model = dt.parallelize(
        DropoutGPT(0.2),
        mesh,
        PINS if "tp" in mesh.shape else {},
        stages=STAGES if "pp" in mesh.shape else None,
    )
    step = dt.train_step(
        model,
        loss_fn,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        inputs={axis: p for axis, p in SPLITS.items() if axis in mesh.shape} or None,
        schedule=dt.OneFOneB(microbatches=microbatches),
    )
    return [float(step(*batch(i, size=12))) for i in range(steps)]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return train(dt.Mesh())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        (dt.Mesh(tp=2), 1),
        (dt.Mesh(dp=2), 2),
        (dt.Mesh(dp=3), 1),
        (dt.Mesh(dp=2, tp=2), 1),
        (dt.Mesh(cp=3), 1),
        (dt.Mesh(cp=2, tp=2), 1),
        (dt.Mesh(dp=2, cp=2), 2),
        (dt.Mesh(pp=2), 1),
        (dt.Mesh(pp=2), 2),
        (dt.Mesh(pp=2), 4),
        (dt.Mesh(), 4),
    ],
    ids=str,
)
def test_dropout_losses_of_20_steps_are_same_on_every_mesh(
    mesh: dt.Mesh, microbatches: int, reference: list[float]
) -> None:
    found = train(mesh, microbatches)
    assert max(abs(a - b) for a, b in zip(reference, found, strict=True)) <= 2e-6


@pytest.mark.slow
def test_same_seed_repeats_losses_and_dropout_changes_them(reference: list[float]) -> None:
    again = train(dt.Mesh(), steps=3)
    assert again == reference[:3]
    torch.manual_seed(0)
    model = dt.parallelize(DropoutGPT(0.2).eval(), dt.Mesh())
    step = dt.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0))
    first = float(step(*batch(0, size=12)))
    assert abs(first - reference[0]) > 1e-3
    assert first == float(step(*batch(0, size=12)))


# -- masks, bit by bit ---------------------------------------------------------------------------


class Masks(nn.Module):
    """A model in which the gradient of ``w`` is the dropout mask, element by element."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 12)
        self.head = nn.Linear(12, 12, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(12))

    def forward(self, ids: Tensor) -> Tensor:
        return F.dropout(self.head(F.dropout(self.embed(ids), 0.5)), 0.25)


def summed(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).sum()


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        (dt.Mesh(tp=2), 1),
        (dt.Mesh(dp=2), 1),
        (dt.Mesh(dp=3), 1),
        (dt.Mesh(dp=2, tp=2), 1),
        (dt.Mesh(pp=2), 1),
        (dt.Mesh(pp=2), 2),
        (dt.Mesh(pp=2), 4),
        (dt.Mesh(), 4),
    ],
    ids=str,
)
def test_dropout_masks_are_bitwise_equal_on_every_mesh(mesh: dt.Mesh, microbatches: int) -> None:
    def gradient(mesh: dt.Mesh, microbatches: int) -> Tensor:
        dt.manual_seed(9)
        model = dt.parallelize(
            Masks(8),
            mesh,
            {"head.weight": dict(tp=dt.Row())} if "tp" in mesh.shape else {},
            stages={"pp": [["embed*"], ["head*"]]} if "pp" in mesh.shape else None,
        )
        step = dt.train_step(
            model,
            summed,
            torch.optim.SGD(model.parameters(), lr=0.1),
            inputs=dict(dp=dt.Row()) if "dp" in mesh.shape else None,
            schedule=dt.GPipe(microbatches=microbatches),
        )
        return step.gradients(torch.arange(8))["embed.weight"]

    expected = gradient(dt.Mesh(), 1)
    torch.testing.assert_close(expected.unique(), torch.tensor([0, 2 / 0.75]))
    assert torch.equal(gradient(mesh, microbatches), expected)


@pytest.mark.default("shape2")
@pytest.mark.parametrize("shape", [(6, 9), (5, 7), (2, 3, 4)])
def test_compiled_random_ops_are_bitwise_equal_on_split_tensors(shape: tuple[int, ...]) -> None:
    def draw(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.dropout(x, 0.5),
            x + torch.randn_like(x),
            x + torch.rand(shape),
            torch.bernoulli(x.sigmoid()),
            x * torch.randint(-3, 9, shape),
            x.clone().uniform_(1, 2) * x,
            x * torch.normal(x, 2.0),
            torch.bernoulli(x, 0.3) * x,
            x.clone().exponential_(2.0) * x,
        )

    x = torch.linspace(0.5, 2, torch.Size(shape).numel()).view(shape)
    dt.manual_seed(1)
    expected = [y.full_tensor() for y in dt.compile(draw, dt.Mesh())(x)]
    placed: list[tuple[dt.Mesh, dict[str, Any]]] = [
        (dt.Mesh(a=2), dict(a=dt.Row())),
        (dt.Mesh(a=2), dict(a=dt.Column())),
        (dt.Mesh(a=3, b=2), dict(a=dt.Column(), b=dt.Row())),
        (dt.Mesh(a=2, b=2), dict(a=dt.Column(), b=dt.Column())),
    ]
    for mesh, placement in placed:
        fn = dt.compile(draw, mesh, out=placement)
        given = dt.distribute(x, mesh, **placement)
        assert "splits" in str(fn.plan(given))
        found = [y.full_tensor() for y in fn(given)]
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), number
    assert set(expected[0].div(x).unique().tolist()) == {0.0, 2.0}
    assert expected[4].div(x).round().unique().numel() > 4


def test_rank_draws_only_its_part_of_dropout_mask() -> None:
    mesh = dt.Mesh(tp=2)
    plan = dt.compile(lambda x: F.dropout(x), mesh).plan(dt.spec("f32[8,6@tp]", mesh))
    assert "dt.dropout(x, 0.5, op=0)" in str(plan)
    assert "f32[8,6@tp], bool[8,6@tp]" in str(plan)


# -- seeds, steps, calls -------------------------------------------------------------------------


def test_random_calls_differ_and_repeat_after_manual_seed() -> None:
    noise = dt.compile(lambda x: torch.randn_like(x), dt.Mesh())
    x = torch.zeros(4, 5)
    dt.manual_seed(7)
    first, second = noise(x).full_tensor(), noise(x).full_tensor()
    assert not torch.equal(first, second)
    dt.manual_seed(7)
    assert torch.equal(noise(x).full_tensor(), first)
    assert torch.equal(noise(x).full_tensor(), second)
    dt.manual_seed(8)
    assert not torch.equal(noise(x).full_tensor(), first)


def test_compiled_functions_with_different_names_draw_different_numbers() -> None:
    def one(x: Tensor) -> Tensor:
        return torch.randn_like(x)

    def other(x: Tensor) -> Tensor:
        return torch.randn_like(x)

    x = torch.zeros(4, 5)
    dt.manual_seed(0)
    a, b = (dt.compile(f, dt.Mesh())(x).full_tensor() for f in (one, other))
    assert not torch.equal(a, b)


def test_manual_seed_rejects_non_integer() -> None:
    with pytest.raises(dt.PlanningError, match="a seed is an integer"):
        dt.manual_seed(0.5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_step_number_in_saved_state_resumes_random_numbers() -> None:
    def start() -> tuple[dt.ParallelModule, Any, dt.TrainStep]:
        torch.manual_seed(0)
        model = dt.parallelize(DropoutGPT(0.2), dt.Mesh(tp=2), PINS)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, opt, dt.train_step(model, loss_fn, opt)

    dt.manual_seed(4)
    model, opt, step = start()
    for i in range(2):
        step(*batch(i))
    state = dt.gather_state_dict(model, opt)
    third = float(step(*batch(2)))
    other, opt, step = start()
    dt.load_state_dict(other, opt, state)
    assert float(step(*batch(2))) == third


def numbers(flow: Dataflow) -> list[object]:
    return [dict(op.call.kwargs)["op"] for op in flow.ops if run_number_names(op.call)]


@pytest.mark.slow
def test_recapture_keeps_random_op_numbers() -> None:
    model = DropoutGPT(0.2)
    small, large = (
        dataflow(capture(loss_fn, (model, *batch(size=n)), grads="loss")) for n in (4, 6)
    )
    assert numbers(small) == numbers(large) == list(range(7))


# -- gradients and distributions -----------------------------------------------------------------


def test_dropout_gradient_is_scaled_mask() -> None:
    """Each kept element has the gradient 1/(1-p), each dropped element 0."""
    x = torch.ones(40, 50, requires_grad=True)
    y, kept = torch.ops.dt.dropout(x, 0.3, at_seed=1, at_step=2, op=3)
    (y * torch.arange(50.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(50.0) * kept * (1 / 0.7))
    assert abs(float(kept.float().mean()) - 0.7) < 0.05
    all_dropped, _ = torch.ops.dt.dropout(x, 1.0, at_seed=1, at_step=2, op=3)
    assert float(all_dropped.detach().abs().max()) == 0


@pytest.mark.parametrize(
    ("dropout", "shape"),
    [
        (lambda x: F.dropout1d(x, 0.4), (300, 20, 3)),
        (lambda x: F.dropout2d(x, 0.4), (300, 20, 3, 2)),
        (lambda x: F.dropout3d(x, 0.4), (300, 20, 2, 2, 2)),
        (lambda x: F.feature_alpha_dropout(x, 0.4, True), (300, 20, 3)),
        (lambda x: F.dropout(x.clone(), 0.4, inplace=True), (300, 20)),
        (lambda x: torch.native_dropout(x, 0.4, True)[0], (300, 20)),
        (lambda x: F.alpha_dropout(x, 0.4, True), (300, 20)),
    ],
)
def test_dropout_variants_behave_as_in_torch(dropout: Any, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    got = dt.compile(dropout, dt.Mesh())(x).full_tensor()
    torch.manual_seed(0)
    expected = dropout(x)
    torch.testing.assert_close(got.unique(), expected.unique())
    assert float(got.mean()) == pytest.approx(float(expected.mean()), abs=0.08)
    if x.dim() > 2:
        assert torch.equal(got, got[..., :1].expand(shape) if x.dim() == 3 else _spread(got))


def _spread(x: Tensor) -> Tensor:
    return x.flatten(2)[..., :1].view(*x.shape[:2], *[1] * (x.dim() - 2)).expand(x.shape)


@pytest.mark.default("causal")
@pytest.mark.parametrize("kind", ["causal", "bool mask", "float mask", "gqa"])
def test_attention_dropout_drops_and_scales_weights(kind: str) -> None:
    """With p near 0 the result is torch's attention without dropout."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 6, 3), torch.randn(2, 4, 6, 3)
    options: dict[str, Any] = {}
    match kind:
        case "causal":
            options = {"is_causal": True, "scale": 0.3}
        case "bool mask":
            options = {"attn_mask": torch.rand(5, 6) > 0.4}
        case "float mask":
            options = {"attn_mask": torch.randn(5, 6)}
        case _:
            k, v = k[:, :2], v[:, :2]
            options = {"enable_gqa": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **options)

    f = dt.compile(attend, dt.Mesh(tp=2))
    torch.testing.assert_close(
        f(q, k, v, 1e-12).full_tensor(), attend(q, k, v, 0.0), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(f(q, k, v, 0.5).full_tensor(), attend(q, k, v, 0.0), atol=1e-2)


def test_dropout_in_eval_mode_does_nothing() -> None:
    x = torch.randn(3, 4)
    f = dt.compile(lambda x: F.dropout(x.clone(), 0.5, training=False, inplace=True), dt.Mesh())
    assert torch.equal(f(x).full_tensor(), x)
