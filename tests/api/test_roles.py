"""The module roles `ColumnParallel` and `RowParallel`: which placements they resolve to, and what
is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, MLP, batch, loss_fn
from tests.plans import mean_square
from tests.training import MEGATRON, Run

ROLES: dict[str, Any] = {
    "*.attn.qkv": dict(tp=dt.ColumnParallel(blocks=3)),
    "*.attn.proj": dict(tp=dt.RowParallel()),
    "*.mlp.up": dict(tp=dt.ColumnParallel()),
    "*.mlp.down": dict(tp=dt.RowParallel()),
}


def specs(
    model: nn.Module, pins: Any, data: Any, loss: Any = mean_square, **axes: int
) -> dict[str, str]:
    placed = dt.parallelize(model, dt.Mesh(**(axes or dict(tp=2))), pins)
    step = dt.train_step(placed, loss, torch.optim.AdamW(model.parameters()))
    plan = step.plan(*data)
    return {i.label: str(i.spec) for i in plan.inputs if i.kind == "parameter"}


def test_roles_give_same_specs_as_megatron_placements() -> None:
    assert specs(GPT(), ROLES, batch(), loss_fn) == specs(GPT(), MEGATRON, batch(), loss_fn)


def test_column_parallel_splits_bias_and_row_parallel_replicates_it() -> None:
    x = (torch.zeros(8, 16),)
    found = specs(MLP(), {"up": dict(tp=dt.ColumnParallel())}, x)
    assert (found["up.weight"], found["up.bias"]) == ("f32[64@tp,16]", "f32[64@tp]")
    found = specs(MLP(), {"down": dict(tp=dt.RowParallel())}, x)
    assert (found["down.weight"], found["down.bias"]) == ("f32[16,64@tp]", "f32[16]")


class Kinds(nn.Module):
    """An embedding, a convolution, a transposed weight, and a weight with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.turned = Turned()
        self.adapted = Adapted()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)
        return self.adapted(self.turned(x))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 10))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 10))
        self.delta = nn.Parameter(torch.randn(4, 10))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 0.5 * self.delta)


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        (
            dt.ColumnParallel(),
            ["f32[12,8@tp]", "f32[6@tp,8,3]", "f32[6,10@tp]", "f32[4@tp,10]", "f32[4@tp,10]"],
        ),
        (
            dt.RowParallel(),
            ["f32[12@tp,8]", "f32[6,8@tp,3]", "f32[6@tp,10]", "f32[4,10@tp]", "f32[4,10@tp]"],
        ),
    ],
    ids=["column", "row"],
)
def test_role_splits_dim_by_use_of_weight_in_product(role: Any, expected: list[str]) -> None:
    found: list[str] = []
    ids = (torch.zeros(4, 5, dtype=torch.long),)
    for module in ("table", "conv", "turned", "adapted"):
        made = specs(Kinds(), {module: dict(tp=role)}, ids)
        found += [made[n] for n in made if n.startswith(f"{module}.") and "bias" not in n]
    assert found == expected


def test_role_of_tied_weight_follows_use_in_named_module() -> None:
    """The rows of the embedding are the output dim of the head."""
    rows = specs(GPT(), {"embed": dict(tp=dt.RowParallel())}, batch(), loss_fn)
    columns = specs(GPT(), {"head": dict(tp=dt.ColumnParallel())}, batch(), loss_fn)
    assert rows["embed.weight"] == columns["embed.weight"] == "f32[32@tp,16]"


def test_role_on_one_axis_combines_with_placement_on_another() -> None:
    pins = {"up": dict(tp=dt.ColumnParallel(), dp=dt.Replicate())}
    found = specs(MLP(), pins, (torch.zeros(8, 16),), dp=2, tp=2)
    assert found["up.weight"] == "f32[64@tp,16]"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (
            {"*.norm1": dict(tp=dt.ColumnParallel())},
            '"*.norm1" states a role of blocks.0.norm1, which has no weight with two dims.',
        ),
        (
            {"*.up.weight": dict(tp=dt.ColumnParallel())},
            'states a role and matches no module.\n  it matches parameters: blocks.0.mlp.up.weight:'
            ' f32[64,16], blocks.1.mlp.up.weight: f32[64,16]\nfix: write "*.up", the module',
        ),
        (
            {"blocks.*.mlp": dict(tp=dt.RowParallel())},
            "fix: name the modules that hold weights, such as blocks.0.mlp.up, blocks.0.mlp.down",
        ),
        ({"*.ups": dict(tp=dt.RowParallel())}, '"*.ups" states a role and matches no module.'),
        ({"*.up": dict(tp=dt.ColumnParallel)}, "fix: write tp=dt.ColumnParallel()"),
        ({"*.up": dict(tq=dt.RowParallel())}, "fix: tp=dt.RowParallel("),
        (
            {"*.qkv": dict(tp=dt.ColumnParallel(blocks=5))},
            "tp=Shard(0, blocks=5) does not fit blocks.0.attn.qkv.weight",
        ),
        ({"*.up": dict(tp=dt.RowParallel(), dp=3)}, '"*.up" names the axis "dp"'),
    ],
)  # fmt: skip
def test_invalid_roles_are_refused(pins: Any, message: str) -> None:
    with pytest.raises(dt.PlanningError) as error:
        specs(GPT(), pins, batch(), loss_fn)
    assert message in str(error.value)


def test_role_of_module_whose_weight_feeds_no_product_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.grid

    model = nn.Sequential(Scale())
    with pytest.raises(dt.PlanningError, match="needs a product that its weight feeds"):
        specs(model, {"0": dict(tp=dt.ColumnParallel())}, (torch.zeros(2, 4, 4),))


def test_role_as_input_placement_is_refused() -> None:
    run = Run.of("tp2")
    step = dt.train_step(
        run.model, loss_fn, run.optimizer, inputs=dict(tp=dt.RowParallel())  # type: ignore[dict-item]
    )  # fmt: skip
    with pytest.raises(dt.PlanningError, match="a role of a module's weight"):
        step.plan(*batch())
