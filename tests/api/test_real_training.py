"""What a real training loop does beside the step: modes, caches, frozen parameters, groups,
metrics, batches of every shape, all against the same loop in plain torch."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.training import assert_losses_close, train_torch

DP = dt.Mesh(dp=2)
ROWS = dict(dp=dt.Row())


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def with_metrics(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    scores = model(x)
    right = scores.argmax(-1) == y
    metrics = {"accuracy": right.float().mean(), "right": right.sum(), "score": scores.mean()}
    return F.cross_entropy(scores, y), metrics


def data(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, 8), torch.randint(0, 4, (n,))) for n in sizes]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Both:
    """The same model twice: with a step over dp=2, and in plain torch."""

    def __init__(self, module: nn.Module, make: Callable[[nn.Module], Any] | None = None) -> None:
        def default(module: nn.Module) -> torch.optim.Optimizer:
            return sgd(module.parameters())

        make = make or default
        self.plain = copy.deepcopy(module)
        self.module = module
        self.model = dt.parallelize(module, DP)
        self.optimizers = make(module), make(self.plain)
        self.step = dt.train_step(self.model, loss_fn, self.optimizers[0], inputs=ROWS)

    def take(self, *batches: tuple[Tensor, Tensor]) -> None:
        found = [float(loss) for loss in [self.step(*one) for one in batches]]
        assert_losses_close(
            found, train_torch(self.plain, self.optimizers[1], batches, loss=loss_fn)
        )

    def same_state(self) -> None:
        state = dt.gather_state_dict(self.model, self.optimizers[0])
        torch.testing.assert_close(state["model"], self.plain.state_dict(), rtol=1e-5, atol=1e-6)


# -- modes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_norm_over_a_split_batch() -> None:
    """One device's statistics, also where the batch does not divide, by sums of one number per
    channel; evaluation between steps sees what they made, and is captured once."""
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
    plan = both.step.plan(*images[0])
    kinds = {(c.phase, c.key): 0 for c in plan.collectives}
    for c in plan.collectives:
        kinds[c.phase, c.key] += 1
    # two sums a batch norm forward and the count of targets; one backward; the bucket and the loss
    assert kinds == {
        ("forward", "all_reduce@dp"): 5,
        ("backward", "all_reduce@dp"): 2,
        ("optimizer", "all_reduce@dp"): 2,
    }
    with dt.launch(DP):
        for image in images:
            both.take(image)
            both.model.eval()
            both.plain.eval()
            with torch.no_grad():
                expected = both.plain(images[0][0])
            found = evaluate(both.model, images[0][0]).full_tensor()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            both.module.train()
            both.plain.train()
        both.same_state()
    assert len(both.step.plans) == 2 and len(evaluate.plans) == 1


@pytest.mark.slow
def test_batch_norm_that_stays_in_eval_mode_takes_microbatches() -> None:
    module = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 4))
    both = Both(module)
    step = dt.train_step(both.model, loss_fn, both.optimizers[0], inputs=ROWS, schedule=dt.GPipe(2))
    (batch,) = data(8)
    with pytest.raises(dt.PlanningError, match="batch_norm.* mixes rows of the batch"):
        step.plan(*batch)
    both.module[1].eval()
    both.plain[1].eval()
    with dt.launch(DP):
        expected = train_torch(both.plain, both.optimizers[1], [batch], loss=loss_fn)
        assert_losses_close([float(step(*batch))], expected)
        both.same_state()


@pytest.mark.slow
def test_an_attribute_that_forward_reads_is_read_again() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 4), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    both = Both(Scaled())
    with dt.launch(DP):
        both.take(*data(4, 4))
        assert len(both.step.plans) == 1
        both.module.scale = both.plain.scale = 3.0
        both.take(*data(4))
        both.same_state()


# -- caches ----------------------------------------------------------------------------------------


class Rotated(nn.Module):
    """A table of cosines as models keep it: a buffer, an attribute, or made when first needed."""

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


@pytest.mark.parametrize("kept", ["buffer", "attribute", "lazy buffer", "lazy attribute"])
def test_a_cached_table(kept: str) -> None:
    both = Both(Rotated(kept))
    batches = data(4, 4)
    if "lazy" in kept:
        with pytest.raises(dt.PlanningError, match=r"stores a tensor(.|\n)*  cos\n(.|\n)*fill it"):
            both.step.plan(*batches[0])
        assert both.module.cos is None  # and no fake tensor
        both.module(batches[0][0])  # the fix
    with dt.launch(DP):
        both.take(*batches)
        both.same_state()


# -- parameters and groups -------------------------------------------------------------------------


@pytest.mark.slow
def test_frozen_parameters() -> None:
    """Frozen from the start, thawed, and others frozen later: each step trains what torch does."""
    both = Both(mlp(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.05))
    with dt.launch(DP):
        for frozen in ((0,), (), (2,)):
            for module in (both.module, both.plain):
                module.zero_grad()
                for i in (0, 2):
                    module[i].requires_grad_(i not in frozen)
            both.take(*data(4, 4))
        both.same_state()


def test_groups_with_schedulers_and_a_group_added_later() -> None:
    def grouped(module: nn.Module) -> torch.optim.Optimizer:
        last = module[2]
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
            optimizer.add_param_group(dict(params=list(module[0].parameters()), lr=0.01))
        both.take(*data(4, 4))
        both.same_state()


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dp and microbatches", "stages"])
def test_metrics_are_those_of_the_whole_batch(how: str) -> None:
    module = mlp()
    (batch,) = data(8)
    loss, metrics = with_metrics(module, *batch)
    mesh, stages, inputs = DP, None, ROWS
    if how == "stages":
        mesh, stages, inputs = dt.Mesh(pp=2), {"pp": [["0.*"], ["2.*"]]}, None
    step = dt.train_step(
        dt.parallelize(module, mesh, stages=stages),
        with_metrics,
        sgd(module.parameters()),
        inputs=inputs,
        schedule=dt.GPipe(2),
    )
    with dt.launch(mesh):
        found = step(*batch)
        assert_losses_close([float(found)], [loss.item()])
        assert found.metrics == pytest.approx({k: v.item() for k, v in metrics.items()}, rel=1e-5)
        dt.gather_state_dict(step.model, step.optimizer)


def test_a_loss_has_no_backward() -> None:
    both = Both(mlp())
    with dt.launch(DP):
        loss = both.step(*data(4)[0])
        with pytest.raises(TypeError, match="has run forward, backward and the optimizer already"):
            loss.backward()
        dt.gather_state_dict(both.model, both.optimizers[0])


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_last_batch_of_another_size() -> None:
    both = Both(mlp())
    with dt.launch(DP):
        both.take(*data(4, 3, 4, 3, 1))
        both.same_state()
    assert len(both.step.plans) == 3


@pytest.mark.slow
def test_a_last_batch_that_microbatches_do_not_divide() -> None:
    """Its microbatches are of other sizes, its loss that of the whole batch."""
    both = Both(mlp())
    step = dt.train_step(both.model, loss_fn, both.optimizers[0], inputs=ROWS, schedule=dt.GPipe(2))
    batches = data(8, 6, 4, 1)
    with dt.launch(DP):
        found = [float(step(*batch)) for batch in batches]
        expected = train_torch(both.plain, both.optimizers[1], batches, loss=loss_fn)
        assert_losses_close(found, expected)
        both.same_state()


class Named(NamedTuple):
    x: Tensor
    y: Tensor
    weights: Tensor | None = None


@dataclass
class Record:
    x: Tensor
    y: Tensor


class Pair(UserDict[str, Tensor]):
    """A mapping that is not made of a dict."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x=x, y=y)


def of_mapping(model: nn.Module, batch: Any, scale: float | None = None) -> Tensor:
    loss = loss_fn(model, batch["x"], batch["y"])
    return loss if scale is None else loss * scale


def of_fields(model: nn.Module, batch: Any) -> Tensor:
    return loss_fn(model, batch.x, batch.y)


def of_keywords(model: nn.Module, x: Tensor, *, y: Tensor, mask: Tensor | None = None) -> Tensor:
    return loss_fn(model, x, y)


@pytest.mark.slow
def test_batches_in_any_structure() -> None:
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


def test_tensors_out_of_sight_are_refused() -> None:
    """As constants, those of an earlier batch would be used again."""
    module = mlp()
    step = dt.train_step(dt.parallelize(module, DP), of_fields, sgd(module.parameters()))
    with pytest.raises(dt.PlanningError, match=r"is a Record(.|\n)*register_dataclass\(Record\)"):
        step(Record(*data(4)[0]))
    mapped = dt.train_step(step.model, of_mapping, step.optimizer)
    x, y = data(4)[0]
    with pytest.raises(dt.PlanningError, match=r"Pair\['x'\]: f32\[4,8\](.|\n)*dict\(\.\.\.\)"):
        mapped(Pair(x, y))
    torch.export.register_dataclass(Record)  # the fix
    expected = [loss_fn(module, x, y).item()]
    assert_losses_close([float(step(Record(x, y)))], expected)
    dt.load_state_dict(step.model, None, dt.gather_state_dict(step.model))
