"""Training compared with plain torch, in what tests/api/training_cases.py does not vary: gradients
on request, gradient norms in every dtype, frozen parameters, changing groups, buffers, caches,
batch structures, and several programs of one model."""

from __future__ import annotations

import copy
from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft
from tests import models
from tests.models import GPT, batch
from tests.training import (
    Placed,
    Run,
    adamw,
    assert_gradients_close,
    assert_losses_close,
    assert_same_bits,
    assert_states_close,
    assert_trains_as_torch,
    batches,
    gradients_of,
    make_model,
    sgd,
    train_torch,
)

DP = dt.Mesh(dp=2)
ROWS = dict(dp=dt.Row())


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def data(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, 8), torch.randint(0, 4, (n,))) for n in sizes]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


class Both:
    """One model twice: with a step over dp=2, and in plain torch."""

    def __init__(
        self, module: nn.Module, make: Callable[[nn.Module], Any] = sgd, zero: int = 0
    ) -> None:
        self.plain = copy.deepcopy(module)
        self.module = module
        self.model = dt.parallelize(module, DP, zero={"dp": zero} if zero else None)
        self.optimizers = make(module), make(self.plain)
        self.step = dt.train_step(self.model, loss_fn, self.optimizers[0], inputs=ROWS)

    def take(self, *batches: tuple[Tensor, Tensor]) -> None:
        found = [float(loss) for loss in [self.step(*one) for one in batches]]
        assert_losses_close(
            found, train_torch(self.plain, self.optimizers[1], batches, loss=loss_fn)
        )

    def assert_same_state(self) -> None:
        state = dt.gather_state_dict(self.model, self.optimizers[0])["model"]
        assert_states_close(state, self.plain.state_dict(), 1e-6)


# -- gradients and norms ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placed", "zero"), [("tp2_pp2", None), ("dp2_tp2", {"dp": 3})], ids=["tp2_pp2", "dp2_tp2"]
)
def test_step_gradients_of_batch_and_of_last_step_match_torch(
    placed: str, zero: dict[str, int] | None
) -> None:
    """Without clipping, the step returns no gradient norm."""
    run = Run.of(placed, keep_gradients=True, clip=None, zero=zero)
    one = batch(ignored=True)
    with dt.launch(run.mesh):
        with pytest.raises(dt.PlanningError, match="no gradients of a last step are kept"):
            run.step.gradients()
        asked = run.step.gradients(*one)
        assert run.step(*one).grad_norm is None
        assert_same_bits(run.step.gradients(), asked)
        run.state()
    assert_gradients_close(asked, gradients_of(make_model(), one))


def test_assert_gradients_close_detects_one_doubled_gradient() -> None:
    expected = gradients_of(make_model(), batch())
    for name in expected:
        planted = {n: 2 * g if n == name else g for n, g in expected.items()}
        with pytest.raises(AssertionError, match=name.replace(".", r"\.")):
            assert_gradients_close(planted, expected)


class Affine(nn.Module):
    def __init__(self, dtype: torch.dtype, of_bias: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 6, dtype=dtype, generator=generator))
        self.bias = nn.Parameter(torch.randn(6, dtype=of_bias, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def spread(model: nn.Module, x: Tensor) -> Tensor:
    """A loss for which gradients of complex parameters are purely imaginary."""
    y = model(x)
    return (y.imag if y.is_complex() else y).square().mean()


C64, C128, F32, F64 = torch.complex64, torch.complex128, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtype", "of_bias"), [(C64, C64), (C128, C128), (F64, F64), (F64, F32), (F32, F32)]
)
def test_gradient_clipping_matches_torch_in_every_dtype(
    dtype: torch.dtype, of_bias: torch.dtype
) -> None:
    """For complex gradients the norm uses absolute values; for float64 it is computed in
    float64."""
    torch.manual_seed(1)
    given = [(torch.randn(6, 8, dtype=F64).to(dtype),) for _ in range(3)]
    placed = Placed(axes=dict(dp=2, tp=3), pins={"weight": dict(tp=dt.Column())}, inputs=ROWS)
    run = Run.of(placed, module=Affine(dtype, of_bias), loss=spread, clip=0.1)
    with dt.launch(run.mesh):
        norms = [run.step(*one).grad_norm for one in given]
        found = run.state()["model"]
    plain = Affine(dtype, of_bias)
    optimizer = adamw(plain)
    is_exact = torch.finfo(dtype).bits == 64 and dtype == of_bias
    for one, norm in zip(given, norms, strict=True):
        optimizer.zero_grad()
        spread(plain, *one).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
        assert expected > 0.1  # it clips
        assert norm == pytest.approx(expected, rel=1e-15 if is_exact else 1e-6)
        optimizer.step()
    for name, value in plain.state_dict().items():
        near = (1e-15 if is_exact else 1e-6) * value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=0, atol=near)


def test_clipping_norm_covers_only_parameters_of_optimizer() -> None:
    """Other parameters keep their values."""
    model, plain = Affine(F32, F32), Affine(F32, F32)
    placed = dt.parallelize(model, dt.Mesh(), {})
    step = dt.train_step(placed, spread, torch.optim.SGD([model.bias], lr=0.1), clip_grad_norm=0.1)
    x = torch.ones(4, 8)
    with dt.launch(dt.Mesh()):
        norm = step(x).grad_norm
        state = dt.gather_state_dict(placed)["model"]
    assert norm == pytest.approx(gradients_of(plain, (x,), spread)["bias"].norm().item(), rel=1e-6)
    assert torch.equal(state["weight"], plain.weight)
    assert not torch.equal(state["bias"], plain.bias)


# -- parameters and optimizers ---------------------------------------------------------------------


@pytest.mark.default("3")
@pytest.mark.parametrize("zero", [0, 3])
def test_freezing_and_thawing_parameters_matches_torch(zero: int) -> None:
    """Parameters are frozen from the start, thawed, and others frozen later."""
    both = Both(mlp(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.05), zero)
    before = both.plain[0].weight.detach().clone()  # type: ignore[index]
    with dt.launch(DP):
        for frozen in ((0,), (), (2,)):
            for module in (both.module, both.plain):
                module.zero_grad()
                for i in (0, 2):
                    module[i].requires_grad_(i not in frozen)  # type: ignore[index]
            both.take(*data(4, 4))
            if frozen == (0,):
                state = dt.gather_state_dict(both.model)["model"]
                assert torch.equal(state["0.weight"], before)
        both.assert_same_state()


def test_param_groups_with_schedulers_and_added_group_match_torch() -> None:
    def grouped(module: nn.Module) -> torch.optim.Optimizer:
        last = module[2]  # type: ignore[index]
        return torch.optim.AdamW(
            [
                dict(params=[last.weight], lr=0.05, weight_decay=0.1),
                dict(params=[last.bias], lr=0.2, weight_decay=0.0, betas=(0.5, 0.9)),
            ]
        )

    both = Both(mlp(), grouped)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, [lambda e: 0.5**e, lambda e: 1 / (e + 1)])
        for o in both.optimizers
    ]
    with dt.launch(DP):
        for one in data(4, 4, 4):
            both.take(one)
            for scheduler in schedulers:
                scheduler.step()
        for module, optimizer in zip((both.module, both.plain), both.optimizers, strict=True):
            first = module[0]  # type: ignore[index]
            optimizer.add_param_group(dict(params=list(first.parameters()), lr=0.01))
        both.take(*data(4, 4))
        both.assert_same_state()


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.c(self.b(h).tanh()).tanh() + h + x


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "NAdam", "Adamax", "Rprop"])
def test_other_torch_optimizers_train_as_torch(kind: str) -> None:
    data = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_trains_as_torch(
        Placed(axes=dict(tp=2), pins={"*.weight": dict(tp=dt.Row())}),
        [(x, y) for x, y in data],
        build=Skip,
        make=lambda m: getattr(torch.optim, kind)(m.parameters(), lr=1e-2),
        loss=models.square_loss,
        clip=None,
        atol=1e-6,
    )


class Scaled(GPT):
    """A GPT whose head shares the embedding, with a fourth stage after it."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.last = nn.Parameter(torch.ones(32))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.last


@pytest.mark.default("axes1-0")
@pytest.mark.parametrize(
    ("axes", "level"), [(dict(pp=1), 0), (dict(pp=2), 0), (dict(pp=2, dp=2), 3)]
)
def test_parameter_tied_between_stages_of_one_rank_trains_as_torch(
    axes: dict[str, int], level: int
) -> None:
    """Four stages on two ranks: the embedding table and the head that shares it are on the first
    rank."""
    stages = {"pp": [["embed*", "positions*"], ["blocks*"], ["norm*", "head*"], ["last"]]}
    assert_trains_as_torch(
        Placed(axes=axes, stages=stages, inputs=ROWS if level else None),
        build=lambda: (torch.manual_seed(0), Scaled())[1],
        make=sgd,
        schedule=dt.GPipe(2),
        zero={"dp": level} if level else None,
    )


# -- buffers and caches ----------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_norm_over_split_batch_matches_one_device() -> None:
    """The batch need not divide; only one number per channel is summed. Evaluation between steps
    uses the statistics and is captured once."""
    both = Both(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.SyncBatchNorm(16),
            nn.Linear(16, 4),
        )
    )
    images = [(torch.randn(n, 2, 6, 6), torch.randint(0, 4, (n,))) for n in (4, 5, 4)]
    evaluate = dt.compile(lambda model, x: model(x), DP)
    # two sums a batch norm forward and the count of targets; one backward; the bucket and the loss
    assert Counter((c.phase, c.key) for c in both.step.plan(*images[0]).collectives) == {
        ("forward", "all_reduce@dp"): 5,
        ("backward", "all_reduce@dp"): 2,
        ("optimizer", "all_reduce@dp"): 2,
    }
    with dt.launch(DP):
        for image in images:
            both.take(image)
            both.model.eval()
            both.plain.eval()
            found = evaluate(both.model, images[0][0]).full_tensor()
            expected = both.plain(images[0][0]).detach()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            both.module.train()
            both.plain.train()
        both.assert_same_state()
    assert len(both.step.plans) == 2 and len(evaluate.plans) == 1


class Counting(nn.Module):
    """A model with buffers that forward changes: a counter, and a running mean in training."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.a(x - self.mean)


class Rotated(nn.Module):
    """A table of cosines as a buffer, as an attribute, or made at first use."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.up, self.head, self.kept = nn.Linear(8, 8), nn.Linear(8, 4), kept
        table = torch.arange(48.0).view(6, 8).cos()
        if kept.endswith("buffer"):
            self.register_buffer("cos", None if "lazy" in kept else table, persistent=False)
        else:
            self.cos = None if "lazy" in kept else table

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None:
            self.cos = torch.arange(48.0).view(6, 8).cos()
        return self.head((self.up(x)[:, None] * self.cos[:3]).sum(1))


def test_buffers_changed_in_forward_match_torch() -> None:
    both = Both(Counting())
    with dt.launch(DP):
        both.take(*data(4, 4, 4))
        both.assert_same_state()
    assert both.plain.seen == 3


@pytest.mark.parametrize("kept", ["buffer", "attribute", "lazy buffer", "lazy attribute"])
def test_cached_table_trains_as_torch_or_is_refused_with_fix(kept: str) -> None:
    both = Both(Rotated(kept))
    batches = data(4, 4)
    if "lazy" in kept:
        with pytest.raises(dt.PlanningError, match=r"stores a tensor(.|\n)*  cos\n(.|\n)*fill it"):
            both.step.plan(*batches[0])
        assert both.module.cos is None  # and no fake tensor
        both.module(batches[0][0])  # the fix
    with dt.launch(DP):
        both.take(*batches)
        both.assert_same_state()


# -- metrics and batches ---------------------------------------------------------------------------


def with_metrics(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    scores = model(x)
    right = scores.argmax(-1) == y
    metrics = {"accuracy": right.float().mean(), "right": right.sum(), "score": scores.mean()}
    return F.cross_entropy(scores, y), metrics


@pytest.mark.parametrize("how", ["dp and microbatches", "stages"])
def test_metrics_equal_those_of_whole_batch(how: str) -> None:
    module = mlp()
    (one,) = data(8)
    loss, metrics = with_metrics(module, *one)
    placed = Placed(axes=dict(dp=2), inputs=ROWS)
    if how == "stages":
        placed = Placed(axes=dict(pp=2), stages={"pp": [["0.*"], ["2.*"]]})
    run = Run.of(placed, module=module, loss=with_metrics, schedule=dt.GPipe(2))
    with dt.launch(run.mesh):
        found = run.step(*one)
        assert_losses_close([float(found)], [loss.item()])
        assert found.metrics == pytest.approx({k: v.item() for k, v in metrics.items()}, rel=1e-5)
        run.state()


class Named(NamedTuple):
    x: Tensor
    y: Tensor
    weights: Tensor | None = None


@dataclass
class Record:
    x: Tensor
    y: Tensor
    weights: Tensor | None = None


class Pair(UserDict[str, Tensor]):
    """A mapping that cannot be constructed from a dict."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x=x, y=y)


def of_mapping(model: nn.Module, batch: Any, scale: float | None = None) -> Tensor:
    loss = loss_fn(model, batch["x"], batch["y"])
    return loss if scale is None else loss * scale


def of_fields(model: nn.Module, batch: Any) -> Tensor:
    return loss_fn(model, batch.x, batch.y)


def of_keywords(model: nn.Module, x: Tensor, *, y: Tensor, mask: Tensor | None = None) -> Tensor:
    return loss_fn(model, x, y)


def test_step_accepts_batches_of_any_structure() -> None:
    module = mlp()
    model = dt.parallelize(module, DP)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    ((x, y),) = data(4)
    expected = loss_fn(module, x, y).item()
    for loss, args, kwargs, scale in (
        (of_mapping, (dict(x=x, y=y, z=None), None), {}, 1.0),
        (of_mapping, (dict(x=x, y=y),), dict(scale=2.0), 2.0),
        (of_fields, (Named(x, y),), {}, 1.0),
        (of_keywords, (x,), dict(y=y, mask=None), 1.0),
    ):
        step = dt.train_step(model, loss, optimizer, inputs=ROWS)
        specs = {i.label: str(i.spec) for i in step.plan(*args, **kwargs).inputs}
        assert {"f32[4@dp,8]", "i64[4@dp]"} <= set(specs.values())
        assert_losses_close([float(step(*args, **kwargs))], [expected * scale])


def test_tensors_in_unregistered_class_are_refused_with_fix() -> None:
    """Captured as constants, the tensors of an earlier batch would be used again."""
    module = mlp()
    step = dt.train_step(dt.parallelize(module, DP), of_fields, sgd(module))
    with pytest.raises(dt.PlanningError, match=r"is a Record(.|\n)*register_dataclass\(Record\)"):
        step(Record(*data(4)[0]))
    mapped = dt.train_step(step.model, of_mapping, step.optimizer)
    x, y = data(4)[0]
    with pytest.raises(dt.PlanningError, match=r"Pair\['x'\]: f32\[4,8\](.|\n)*dict\(\.\.\.\)"):
        mapped(Pair(x, y))
    torch.export.register_dataclass(Record)  # the fix
    expected = [loss_fn(module, x, y).item()]
    assert_losses_close([float(step(Record(x, y)))], expected)
    named = {f"batch.{field}": dict(dp=dt.Row()) for field in ("x", "y", "weights")}
    dt.train_step(step.model, of_fields, step.optimizer, inputs=named).plan(Record(x, y))
    dt.load_state_dict(step.model, None, dt.gather_state_dict(step.model))


@pytest.mark.parametrize("capture", ["once", "each call"])
def test_argument_that_requires_grad_is_refused(capture: str) -> None:
    """The gradient of the argument would be lost."""
    module = mlp()
    loss = lambda model, x, y, z: loss_fn(model, x * z, y)  # noqa: E731
    step = dt.train_step(dt.parallelize(module, DP), loss, sgd(module), capture=capture)
    z = torch.ones(8, requires_grad=True)
    with pytest.raises(dt.PlanningError, match=r"the argument z requires grad(.|\n)*z.detach\(\)"):
        step.plan(*data(4)[0], z)
    step.plan(*data(4)[0], z.detach())  # the fix


# -- several programs of one model -----------------------------------------------------------------


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


def test_evaluation_submitted_between_steps_sees_earlier_steps() -> None:
    """All calls are submitted before any result is read, so the stages work on several runs at
    once."""
    given, run = batches(3), Run.of("pp2", clip=None)
    tokens = given[0][0]
    evaluate = dt.compile(logits, run.mesh)
    with dt.launch(run.mesh) as session:
        calls = [(run.step(*one), evaluate(run.model, tokens)) for one in given]
        found = [(float(loss), outputs.full_tensor()) for loss, outputs in calls]
        run.state()
        handles = list(session.cluster._handles.values())  # type: ignore[attr-defined]
    module = make_model()
    optimizer = adamw(module)
    for one, (loss, outputs) in zip(given, found, strict=True):
        assert_losses_close([loss], train_torch(module, optimizer, [one]))
        torch.testing.assert_close(outputs, module(tokens), rtol=0, atol=1e-5)
    # The runtime's own programs: training writes the parameters, evaluation reads them.
    programs = {handle.program.name: handle.program for handle in handles}
    trains, evaluates = programs["loss_fn"], programs["logits"]
    between = daft.interference(trains, evaluates)
    assert between.actors == ("rank 0", "rank 1") and not between.commutes
    assert {conflict.kind for conflict in between.conflicts} == {"read-write"}
    assert all(c.first.writes and not c.second.writes for c in between.conflicts)
    assert daft.interference(evaluates, evaluates).commutes
    assert {c.kind for c in daft.interference(trains, trains).conflicts} == {"write-write"}


@pytest.mark.default("0")
@pytest.mark.parametrize("level", [0, 3])
def test_two_optimizers_of_one_model_alternate_as_in_torch(level: int) -> None:
    """Each step uses the parameters as the other step left them."""
    module, plain = make_model(), make_model()
    model = dt.parallelize(module, DP, {}, zero={"dp": level} if level else None)
    steps = [
        dt.train_step(model, models.loss_fn, make(module), inputs=ROWS, clip_grad_norm=clip)
        for make, clip in ((adamw, 0.5), (sgd, None))
    ]
    own = [make(plain) for make in (adamw, sgd)]
    with dt.launch(DP):
        for number, one in enumerate(batches(4)):
            at = number % 2
            expected = train_torch(plain, own[at], [one], clip=(0.5, None)[at])
            assert_losses_close([float(steps[at](*one))], expected)
