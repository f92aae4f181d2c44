"""Tests that a plan prints repeated layers once, for as many layers as are alike, and that the
folded text accounts for all communication.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from tests.extras import missing
from tests.models import GPT, batch, loss_fn
from tests.plans import MEGATRON, mean_square, plan_model
from tests.training import Placed, Run

MANY = 200
TITLE = re.compile(r"  (\S.*)    x(\d+), (\d+) steps? each; of ([^,]+)")
SECTION = re.compile(r"(once a step|forward|backward|optimizer) .*per rank")
HALVES = {"pp": [["embed*", "positions*", "blocks.[0-2].*"], ["blocks.[3-5].*", "norm.*", "head*"]]}


def titles(plan: dt.Plan, section: str = "") -> list[str]:
    """Return the runs of layers in the plan's text, after checking that it communicates what the
    full text does."""
    with mock.patch("dtensor.sharding.plan.text.folded.MAX_STEP_LINES", 10**9):  # count lines
        text = str(plan)
    assert sent(text) == sent(plan.text(full=True))
    lines = text[text.index(f"\n{section}") :].split("\n\n")[0] if section else text
    return [title[1] for title in map(TITLE.match, lines.splitlines()) if title]


def gpt_plan(layers: int, mesh: dt.Mesh, **options: Any) -> dt.Plan:
    return plan_model(GPT(layers=layers), loss_fn, batch(), mesh, MEGATRON, name="gpt", **options)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(16, width, bias=False)
        self.down = nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Blocks(nn.Module):
    """A chain of blocks. ``wire(number, x, first)`` returns the input of each block."""

    def __init__(self, *widths: int, wire: Callable[[int, Tensor, Tensor], Tensor] | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, widths))
        self.wire = wire or (lambda number, x, first: x)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for number, block in enumerate(self.blocks):
            x = x + block(self.wire(number, x, first))
        return x


PINS: Mapping[str, Any] = {"*up.weight": dict(tp=dt.Row()), "*down.weight": dict(tp=dt.Column())}


def blocks_plan(model: nn.Module, pins: Any = PINS, **options: Any) -> dt.Plan:
    return plan_model(model, mean_square, (torch.randn(8, 16),), dt.Mesh(tp=2), pins, **options)


# -- what is folded --------------------------------------------------------------------------------


@pytest.mark.default("plain")
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(clip_grad_norm=1.0),
        dict(microbatches=2),
        dict(microbatches=2, train=False),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_folded_plan_text_names_repeated_layers_as_range(options: dict[str, Any]) -> None:
    assert set(titles(gpt_plan(4, dt.Mesh(tp=2), **options))) == {"blocks.{0..3}"}


@pytest.mark.slow
def test_folded_plan_text_keeps_stages_and_totals_of_full_text() -> None:
    plan = gpt_plan(
        6, dt.Mesh(pp=2, dp=2, tp=2), inputs=dict(dp=dt.Row()), stages=HALVES, microbatches=2,
        clip_grad_norm=1.0,
    )  # fmt: skip
    text, full = str(plan), plan.text(full=True)
    # once, forward, backward, gradient sums
    assert titles(plan) == ["blocks.{0..2}"] * 4 + ["blocks.{3..5}"] * 4
    for end in ("schedule", "memory per rank", "communication per rank"):
        assert text.partition(f"\n{end}")[2] == full.partition(f"\n{end}")[2]


def sent(text: str) -> dict[tuple[str, ...], int]:
    """Return how often steps of each kind, type, size and line communicate, by stage and
    section."""
    found: dict[tuple[str, ...], int] = {}
    where, times = "", 1
    for line in text.splitlines():
        if re.match(r"stage \d+ of|[a-z]", line):
            where = where + line[:12] if SECTION.match(line) else line[:12]
        if title := TITLE.match(line):
            times = int(title[2])
        elif line.startswith(("* ", "  ")) and not line[2:].startswith("  "):
            times = 1
        if line.startswith("*"):
            kind = re.search(r"= (\w+)\(", line)
            size = re.search(r"([\d.]+ \w?i?B) sent", line)
            assert kind and size
            key = (where, kind[1], size[1], line.rpartition("  ")[2] if ".py" in line else "")
            found[key] = found.get(key, 0) + times
    return found


@pytest.mark.default("3")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_gathers_and_scatters_are_folded_with_their_layers(level: int) -> None:
    rows = Placed(axes=dict(dp=2), inputs=dict(dp=dt.Row()))
    run = Run.of(rows, module=Blocks(*[32] * 6), loss=mean_square, zero={"dp": level}, clip=None)
    plan = run.step.plan(torch.empty(8, 16, device="meta"))
    assert titles(plan)


# -- what is not -----------------------------------------------------------------------------------


class Dropped(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(x + block(x), 0.1)
        return x


class Cast(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


class OneCast(Blocks):
    def __init__(self) -> None:
        super().__init__(*[32] * 5)
        self.blocks[2] = Cast().double()


class Gaps(Blocks):
    """Layers numbered 0, 1, 3, 4: the labels have one pattern but no contiguous range."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 3, 4):
            x = x + self.blocks[number](x)
        return x


WHOLE = {"blocks.2.*": dict(tp=dt.Replicate()), **PINS}
APART = ["blocks.{0..1}", "blocks.{3..4}"]
CASES: dict[str, tuple[nn.Module, Mapping[str, Any], list[str]]] = {
    "random numbers that count on": (Dropped(32, 32, 32), PINS, ["blocks.{0..2}"]),
    "all read the first": (
        Blocks(*[32] * 6, wire=lambda number, x, first: first),
        PINS,
        ["blocks.{0..5}"],
    ),
    "a layer of another width": (Blocks(32, 32, 64, 32, 32), PINS, APART),
    "a layer that is placed otherwise": (Blocks(*[32] * 5), WHOLE, APART),
    "a layer of another dtype": (OneCast(), PINS, APART),
    "numbers that do not go up alike": (Gaps(*[32] * 5), PINS, APART),
}


@pytest.mark.parametrize("case", CASES)
def test_only_equal_consecutive_layers_are_folded(case: str) -> None:
    model, pins, expected = CASES[case]
    assert titles(blocks_plan(model, pins), "forward") == expected


def test_layer_that_reads_earlier_value_is_not_folded() -> None:
    """All steps of the layer look like those of its neighbours, but its input comes from an
    earlier layer."""
    odd = Blocks(*[32] * 6, wire=lambda number, x, first: first if number == 3 else x)
    assert not any("{0..5}" in layers for layers in titles(blocks_plan(odd), "forward"))


def test_loop_of_plain_ops_is_not_folded() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x.sin()
        return x

    plan = dt.compile(fn, dt.Mesh(tp=2)).plan(torch.empty(4))
    assert str(plan) == plan.text() == plan.text(full=True)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plan_text_of_32_layer_llama_is_short_and_counts_all_collectives() -> None:
    hf = pytest.importorskip("transformers", reason=missing("transformers"))
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=32, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=96, pad_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
        ids = torch.zeros(4, 16, dtype=torch.long)
    row, column = dict(tp=dt.Row()), dict(tp=dt.Column())
    placed = {f"*.{name}_proj.weight": row for name in ("[qkv]", "gate", "up")}
    placed |= {f"*.{name}_proj.weight": column for name in ("o", "down")}

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    parallel = dt.parallelize(model, dt.Mesh(tp=2), placed)
    step = dt.train_step(parallel, loss, torch.optim.AdamW(model.parameters()))
    plan = step.plan(ids)
    text = str(plan)
    assert len(text.splitlines()) <= MANY
    assert "model.layers.{0..31} x32" in text
    assert sum(sent(text).values()) == len(plan.collectives) == 32 * 4
    assert len(plan.summary().splitlines()) <= 25
    for value in (plan, step, step.plans.latest, plan.flow, plan.steps[100]):
        assert len(repr(value)) < 300
