"""`detect_nan` reports the first op that gives NaN or Inf, with its rank, line and operands, and
does not report masks of -inf."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft import TaskError
from dtensor.errors import PlanningError
from tests.huggingface import build, derived
from tests.training import Run, batches

INF = float("inf")
LOWEST = torch.finfo(torch.float32).min
Middle = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def step_of(middle: Middle, **options: Any) -> dt.TrainStep:
    torch.manual_seed(0)
    mesh = dt.Mesh(dp=2, tp=2)
    pins = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
    model = dt.parallelize(Net(middle), mesh, pins)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = dict(detect_nan=True, schedule=dt.GPipe(microbatches=2)) | options
    return dt.train_step(model, loss_fn, optimizer, inputs=dict(dp=dt.Row()), **options)


def losses_of(step: dt.TrainStep, *data: Tensor) -> list[float]:
    with dt.launch(step.model.mesh):
        losses = [float(step(x)) for x in data]
        dt.gather_state_dict(step.model)
    return losses


def error(step: dt.TrainStep, *data: Tensor) -> str:
    with pytest.raises(TaskError) as caught:
        losses_of(step, *data)
    return str(caught.value)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
MAKE: dict[str, tuple[Middle, str, str]] = {
    "log of a negative number": (lambda h: torch.log(h), "aten.log.default gives NaN", "torch.log"),
    "0 by 0": (lambda h: (h - h) / (h - h), "aten.div.Tensor gives NaN", "/"),
    "overflow": (lambda h: torch.exp(h * 1000), "aten.exp.default gives Inf", "torch.exp"),
    "in the backward": (lambda h: torch.sqrt(h * 0), "aten.div.Tensor gives Inf", "torch.sqrt"),
    "all masked": (
        lambda h: h.masked_fill(h < 99, -INF).softmax(-1),
        "aten._softmax.default gives NaN",
        "softmax",
    ),
}


@pytest.mark.parametrize("case", MAKE)
def test_detect_nan_names_first_op_with_rank_line_and_operands(case: str) -> None:
    middle, fact, line = MAKE[case]
    text = error(step_of(middle), X)
    assert re.match(r"rank \d \(stage 0\), instruction \d+", text)
    assert f"NotFinite: {fact} in step 0: " in text
    assert re.search(r"has \d+ (NaN|Inf) of \d+, the first at \[\d,\d+\] of this rank's part", text)
    assert re.search(rf"\n  at test_detect_nan.py:\d+: .*{re.escape(line)}", text)
    assert re.search(r"\n  \w+: f32\[1,\d+\]", text)


def test_detect_nan_says_if_batch_or_weight_already_has_nan_or_inf() -> None:
    bad = X.clone()
    bad[3, 2] = float("nan")
    text = error(step_of(F.relu), X, bad)
    assert re.search(
        r"aten.mm.default gives NaN in step 1(.|\n)*x_sliced: .* holds 1 NaN alr", text
    )
    step = step_of(F.relu)
    with torch.no_grad():
        step.model.module.get_parameter("down.weight")[0, 0] = INF
    text = error(step, X)
    assert re.search(r"gives (Inf|NaN) in step 0(.|\n)* holds \d+ Inf already", text)


MASKS: dict[str, Middle] = {
    "fill": lambda h: h.masked_fill(h < 0, -INF).softmax(-1),
    "where": lambda h: torch.where(h < 0, torch.tensor(-INF), h).softmax(-1),
    "add": lambda h: (h + torch.full((16, 16), -INF).triu(1)[:4]).softmax(-1),
    "lowest": lambda h: torch.softmax(h + 2 * torch.full((16, 16), LOWEST).triu(1)[:4], -1),
    "max": lambda h: h - h.masked_fill(h < 0, -INF).amax(-1, keepdim=True),
}


@pytest.mark.parametrize("mask", MASKS)
def test_detect_nan_ignores_inf_used_as_mask(mask: str) -> None:
    schedule = dt.GPipe(microbatches=1)
    found = losses_of(step_of(MASKS[mask], schedule=schedule), X)
    assert found == losses_of(step_of(MASKS[mask], schedule=schedule, detect_nan=False), X)


def test_detect_nan_set_to_nan_ignores_inf() -> None:
    """The loss equals the loss without the check."""

    def middle(h: Tensor) -> Tensor:
        return (h + torch.log((h > 0).float())).softmax(-1)

    assert "aten.log.default gives Inf" in error(step_of(middle), X)
    assert losses_of(step_of(middle, detect_nan="nan"), X) == losses_of(
        step_of(middle, detect_nan=False), X
    )
    assert "gives NaN" in error(step_of(lambda h: torch.log(h), detect_nan="nan"), X)


def test_detect_nan_rejects_unknown_option() -> None:
    with pytest.raises(PlanningError, match="detect_nan='inf': it is True, False or "):
        step_of(F.relu, detect_nan="inf")


@pytest.mark.default("tp2_pp2")
@pytest.mark.parametrize("placed", ["tp2_pp2", "dp2_tp2"])
def test_detect_nan_does_not_change_bits_of_healthy_model(placed: str) -> None:
    """A GPT with attention, pipelines and microbatches."""
    data = batches(3)
    found: list[list[float]] = []
    for detect in (False, True):
        run = Run.of(placed, detect_nan=detect)
        with dt.launch(run.mesh):
            found.append(run.losses(data))
            run.state()
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_detect_nan_accepts_attention_masks_of_hugging_face_models(name: str) -> None:
    """With padding, some rows attend to nothing."""
    torch.manual_seed(0)
    ids = torch.randint(96, (4, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = mask[2, 1:] = mask[3, :7] = 0
    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(build(name), mesh, derived(name, 2))

    def masked_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=ids).loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, masked_loss, optimizer, detect_nan=True)
    with dt.launch(mesh):
        losses = [float(step(ids, mask)) for _ in range(2)]
        dt.gather_state_dict(model)
    assert losses[1] < losses[0]


def test_detect_nan_in_compiled_function_names_rank_and_op() -> None:
    mesh = dt.Mesh(tp=2)
    x = dt.distribute(torch.tensor([[1.0, 4.0], [-1.0, 9.0]]), mesh, tp=dt.Row())
    plain, checked = dt.compile(torch.sqrt, mesh), dt.compile(torch.sqrt, mesh, detect_nan=True)
    assert torch.isnan(plain(x).full_tensor()).sum() == 1
    with pytest.raises(TaskError, match=r"rank 1(.|\n)*sqrt.default gives NaN in step 0"):
        checked(x).full_tensor()
