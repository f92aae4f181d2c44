"""A failing step, call or op leaves all state unchanged and does not affect later steps.

Each case trains six steps, the third on bad data. The losses of steps four to six, weights,
optimizer state, buffers and the step number must be bitwise equal to a run that skips the third
batch.
"""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step.loss import Loss
from dtensor.daft import TaskError

RAISES, WIDENS = 1e6, -1e6
"""Values that make `picky` raise, and return another dtype than it declares."""


@torch.library.custom_op("bad_data::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    if (x == RAISES).any():
        raise ValueError("picky does not like this")
    return x.double() if (x == WIDENS).any() else x.clone()


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


picky.register_autograd(lambda ctx, grad: grad)
dt.rule("bad_data::picky.default", "... -> ...")


class Net(nn.Module):
    """x [b 8] -> logits [b 4]."""

    def __init__(self, *, own_op: bool = False, dropout: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if norm else None
        self.own_op, self.dropout = own_op, dropout

    def forward(self, x: Tensor) -> Tensor:
        h = picky(x) if self.own_op else x
        h = F.gelu(self.up(h))
        h = h if self.norm is None else self.norm(h)
        return self.down(F.dropout(h, 0.5) if self.dropout else h)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    axes: Mapping[str, int]
    pins: Mapping[str, Mapping[str, dt.Placement]] = field(default_factory=dict)
    stages: Mapping[str, Sequence[Sequence[str]]] | None = None
    zero: Mapping[str, int] | None = None
    microbatches: int = 1


PLACED = {
    "tp2": Placed(
        axes=dict(tp=2), pins={"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
    ),
    "pp2": Placed(axes=dict(pp=2), stages={"pp": [["up*"], ["down*"]]}, microbatches=2),
    "dp2_zero3": Placed(axes=dict(dp=2), zero=dict(dp=3)),
    "pp2_tp2": Placed(axes=dict(pp=2, tp=2), stages={"pp": [["up*"], ["down*"]]}, microbatches=2),
}

Batch = tuple[Tensor, Tensor]


def bad_label(x: Tensor, y: Tensor) -> Batch:
    y = y.clone()
    y[-1] = 77
    return x, y


def bad_value(value: float) -> Callable[[Tensor, Tensor], Batch]:
    def made(x: Tensor, y: Tensor) -> Batch:
        x = x.clone()
        x[-1] = value
        return x, y

    return made


FAULTS: dict[str, tuple[Callable[[Tensor, Tensor], Batch], str]] = {
    "label": (bad_label, "IndexError: Target 77 is out of bounds"),
    "op": (bad_value(RAISES), "ValueError: picky does not like this"),
    "dtype": (bad_value(WIDENS), r"(RuntimeError|Undeclared): (.|\n)*([dD]ouble|float64)"),
}


def good(number: int) -> Batch:
    torch.manual_seed(number)
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


@dataclass(slots=True)
class Trained:
    losses: list[float]
    state: dict[str, Any]
    errors: list[TaskError] = field(default_factory=list)


def train(
    placed: Placed,
    data: Sequence[Batch],
    *,
    ahead: bool = False,
    clip: float | None = None,
    keep_gradients: bool = False,
    launch: Mapping[str, Any] = {},
    **options: bool,
) -> Trained:
    """Return the losses of the batches that did not fail. ``ahead``: read losses only at the
    end."""
    torch.manual_seed(0)
    dt.manual_seed(3)
    module = Net(**options)
    model = dt.parallelize(
        module, dt.Mesh(**placed.axes), placed.pins, stages=placed.stages, zero=placed.zero
    )
    step = dt.train_step(
        model,
        loss_fn,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        inputs=dict(dp=dt.Row()) if "dp" in placed.axes else None,
        schedule=dt.OneFOneB(microbatches=placed.microbatches),
        clip_grad_norm=clip,
        keep_gradients=keep_gradients,
    )
    losses: list[Loss | float] = []
    errors: list[TaskError] = []
    with dt.launch(model.mesh, **launch):
        for batch in data:
            for _ in range(2):  # a call that raises what an earlier one failed of has done nothing
                try:
                    loss = step(*batch)
                    break
                except TaskError as error:
                    errors.append(error)
            try:
                losses.append(loss if ahead else float(loss))
            except TaskError as error:
                errors.append(error)
        found: list[float] = []
        for loss in losses:
            try:
                found.append(float(loss))
            except TaskError as error:
                if error not in errors:
                    errors.append(error)
        state = dt.gather_state_dict(model, step.optimizer)
        if keep_gradients:
            state["gradients"] = step.gradients()
    return Trained(found, state, errors)


def same(a: object, b: object) -> bool:
    """Whether nested containers are bitwise equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def check(placed: str, fault: str, **options: Any) -> Trained:
    spoil, expected = FAULTS[fault]
    batches = [good(i) for i in range(6)]
    bad = [*batches[:2], spoil(*batches[2]), *batches[3:]]
    options = dict(options, own_op=fault in ("op", "dtype"))
    never = train(PLACED[placed], [*batches[:2], *batches[3:]], **options)
    found = train(PLACED[placed], bad, **options)
    assert len(never.losses) == 5 and not never.errors
    assert found.losses == never.losses
    assert found.state["step"] == 5
    assert same(found.state, never.state)
    (error,) = found.errors
    assert re.search(expected, str(error)), str(error)
    assert "at test_bad_data.py:" in str(error) and "instruction " in str(error)
    assert len(str(error).splitlines()) <= 30
    assert len("".join(traceback.format_exception(error)).splitlines()) <= 30
    return found


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step look unfinished until it is read, so that another step is always pending."""
    monkeypatch.setattr(Loss, "done", lambda self: False)


MATRIX = list(itertools.product(["tp2", "pp2", "dp2_zero3"], FAULTS, [None, 0.1]))


@pytest.mark.default("tp2-label-None")
@pytest.mark.parametrize(("placed", "fault", "clip"), MATRIX)
def test_failed_step_changes_nothing_when_each_loss_is_read(
    placed: str, fault: str, clip: float | None
) -> None:
    check(placed, fault, clip=clip)


@pytest.mark.default("tp2-label-None")
@pytest.mark.parametrize(("placed", "fault", "clip"), MATRIX)
def test_failed_step_changes_nothing_when_steps_run_ahead(
    placed: str, fault: str, clip: float | None, unread: None
) -> None:
    check(placed, fault, clip=clip, ahead=True)


def test_failed_step_changes_nothing_on_pp_and_tp_mesh() -> None:
    check("pp2_tp2", "label", clip=0.1)


def test_failed_step_changes_nothing_when_losses_never_report_done(unread: None) -> None:
    check("tp2", "label", ahead=True)


@pytest.mark.default("pp2")
@pytest.mark.parametrize("placed", ["tp2", "pp2"])
def test_failed_step_changes_nothing_in_interpreted_mode(placed: str) -> None:
    check(placed, "label", launch=dict(mode="interpreted"))


@pytest.mark.default("True")
@pytest.mark.parametrize("ahead", [False, True])
def test_failed_step_changes_nothing_with_dropout_and_batch_norm_buffer(
    ahead: bool, unread: None
) -> None:
    check("tp2", "label", dropout=True, norm=True, ahead=ahead)


def test_kept_gradients_after_failed_step_are_from_last_good_step() -> None:
    batches = [good(i) for i in range(3)]
    never = train(PLACED["tp2"], batches[:2], keep_gradients=True)
    found = train(PLACED["tp2"], [*batches[:2], bad_label(*batches[2])], keep_gradients=True)
    assert same(found.state, never.state) and len(found.errors) == 1


def test_param_group_added_before_failed_step_remains_for_next_step() -> None:
    """The learning-rate scheduler is the user's and is not rolled back."""

    def trained(bad: bool) -> tuple[list[float], dict[str, Any], float]:
        torch.manual_seed(0)
        module = Net()
        opt = torch.optim.SGD([module.up.weight, module.up.bias], lr=0.1)
        model = dt.parallelize(module, dt.Mesh(tp=2), PLACED["tp2"].pins)
        step = dt.train_step(model, loss_fn, opt)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        losses: list[float] = []
        with dt.launch(model.mesh):
            losses.append(float(step(*good(0))))
            opt.add_param_group({"params": list(module.down.parameters()), "lr": 0.3})
            if bad:
                with pytest.raises(TaskError, match="Target 77"):
                    float(step(*bad_label(*good(1))))
            losses += [float(step(*good(k))) for k in (2, 3)]
            scheduler.step()
            losses.append(float(step(*good(4))))
            return losses, dt.gather_state_dict(model, opt), opt.param_groups[0]["lr"]

    assert same(trained(True), trained(False))
    assert trained(True)[2] == 0.05


def test_two_unread_failed_steps_raise_one_after_the_other() -> None:
    torch.manual_seed(0)
    module = Net()
    model = dt.parallelize(module, dt.Mesh(tp=2), PLACED["tp2"].pins)
    step = dt.train_step(model, loss_fn, torch.optim.SGD(module.parameters(), lr=0.1))
    with dt.launch(model.mesh):
        step(*bad_label(*good(0)))
        with pytest.raises(TaskError, match="Target 77") as caught:
            step(*good(0))
        assert caught.value.__notes__ == ["an earlier step failed; the one called now has not run."]
        bad = step(*bad_label(*good(0)))
        with pytest.raises(TaskError, match="Target 77"):
            dt.gather_state_dict(model)
        assert "step" not in dt.gather_state_dict(model)
        with pytest.raises(TaskError, match="Target 77"):
            float(bad)
        with pytest.raises(TaskError, match="Target 77"):
            dt.trace(step, *bad_label(*good(0)))
        float(step(*good(0)))
        assert dt.gather_state_dict(model)["step"] == 1


@pytest.mark.parametrize("backend", ["inprocess", pytest.param("ray", marks=pytest.mark.ray)])
def test_failed_compiled_call_and_eager_op_do_not_change_later_results(
    backend: Any, request: pytest.FixtureRequest
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_session")
    mesh = dt.Mesh(tp=2)
    table, ids = torch.randn(6, 4), [torch.tensor([k, 5 - k]) for k in range(3)]

    def masked(backend: Any, bad: bool) -> list[Tensor]:
        dt.manual_seed(5)
        fn = dt.compile(lambda t, i: F.dropout(F.embedding(i, t), 0.5), mesh)
        found: list[Tensor] = []
        with dt.launch(mesh, backend=backend):
            rows = dt.distribute(table, mesh, tp=dt.Row())
            found.append(fn(rows, ids[0]).full_tensor())
            if bad:
                with pytest.raises(TaskError, match=r"(?s)index 9 .*test_bad_data.py:\d+"):
                    (fn(rows, torch.tensor([9, 1])) + 1).full_tensor()
                with pytest.raises(TaskError, match=r"(?s)index 7 .*test_bad_data.py:\d+"):
                    wrong = torch.index_select(rows, 0, dt.distribute(torch.tensor([7]), mesh))
                    wrong.redistribute(tp=dt.Replicate()).neg().full_tensor()
                with pytest.raises(TaskError, match="index 8 "):
                    wrong = torch.index_select(rows, 0, dt.distribute(torch.tensor([8]), mesh))
                    dt.transfer(wrong, dt.Mesh(dp=2)).full_tensor()
            found += [fn(rows, one).full_tensor() for one in ids[1:]]
        return found

    expected = masked("inprocess", bad=False)
    assert same(dict(enumerate(masked(backend, bad=True))), dict(enumerate(expected)))


def test_failed_optimizer_update_error_says_what_is_lost() -> None:
    torch.manual_seed(0)
    module = Net()
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    model = dt.parallelize(module, dt.Mesh(tp=2), PLACED["tp2"].pins)
    step = dt.train_step(model, loss_fn, opt)
    with dt.launch(model.mesh):
        for k in range(3):
            float(step(*good(k)))
        dt.gather_state_dict(model, opt)
        float(step(*good(3)))
        opt.param_groups[0]["lr"] = "fast"
        failing = step(*good(4))
        with pytest.raises(TaskError, match="update.*TypeError") as caught:
            float(failing)
        (note,) = caught.value.__notes__
        assert note == (
            "the state on the ranks is lost; the last was gathered, of step 3, 2 before this one"
        )
        assert len("".join(traceback.format_exception(caught.value)).splitlines()) <= 30
        opt.param_groups[0]["lr"] = 0.1
        with pytest.raises(TaskError) as later:
            step(*good(5))
        assert later.value is caught.value and len(caught.value.__notes__) == 1


# -- on Ray ----------------------------------------------------------------------------------------

RAY = dict(backend="ray", deadline_s=3600.0)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("placed", "fault", "options"),
    [
        ("tp2", "label", dict(clip=0.1)),
        ("tp2", "label", dict(ahead=True, dropout=True, norm=True)),
        ("pp2", "label", dict(ahead=True)),
        ("dp2_zero3", "label", dict(ahead=True, clip=0.1)),
        ("pp2", "op", dict(ahead=True)),
        ("dp2_zero3", "dtype", dict()),
    ],
    ids=str,
)
def test_failed_step_on_ray_changes_nothing_and_names_same_rank_as_in_process(
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
    placed: str,
    fault: str,
    options: dict[str, Any],
) -> None:
    if options.get("ahead"):
        monkeypatch.setattr(Loss, "done", lambda self: False)
    found = check(placed, fault, launch=RAY, **options)
    here = check(placed, fault, **options)
    assert found.losses == here.losses
    assert found.errors[0].failure.rank == here.errors[0].failure.rank
