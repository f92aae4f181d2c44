"""Repeated layers print once: what the folded text stands for is the full text, line by line.

`expanded` takes a folded text apart with no help from what made it: each title of a run claims so
many layers of so many lines of the full text, and every one of them must be the shown layer's but
for names, which go from layer to layer one to one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Folded:
    section: str
    layers: str
    count: int
    shown: str
    marked: int  # lines of the shown layer that communicate


def steps(text: str) -> list[str]:
    """The lines of steps, and titles of runs; columns one space apart."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if SECTION.match(line):
            inside = True
            found.append(line.split()[0])
        elif not line:
            inside = False
        elif inside and not line.startswith("      of ") and not line.startswith("         "):
            found.append(line)
    return found


def words(line: str) -> list[str]:
    return re.findall(r"[\w.@*-]+\(?|\S", line)  # an op's name is told from a value's


def is_name(word: str) -> bool:
    """Whether the word may differ from layer to layer: no number, type, axis, op or line."""
    return re.fullmatch(r"(?!(f|bf|i|u|c)\d+$|bool$)[a-z_]\w*(\.\w+)*", word) is not None


def renamed(shown: list[str], other: list[str]) -> bool:
    """Whether lines differ in names alone, each of which always has the same other one."""
    there: dict[str, str] = {}
    for lines in zip(shown, other, strict=True):
        a, b = (re.sub(r"op=\d+", "op=n", line) for line in lines)
        a, b = (re.sub(r"(sent|FLOP) x(\d+)", r"\1*\2", line) for line in (a, b))  # no name
        if len(words(a)) != len(words(b)) or a[:1] != b[:1]:
            return False
        for one, two in zip(words(a), words(b), strict=True):
            if one != two and not (is_name(one) and is_name(two)):
                return False
            if is_name(one) and there.setdefault(one, two) != two:
                return False
    return True


def expanded(plan: dt.Plan) -> list[Folded]:
    """The runs of the plan's folded text; AssertionError where it does not stand for the full."""
    with mock.patch("dtensor.sharding.plan.text.folded.MANY", 10**9):  # lines are steps
        folded, full = steps(str(plan)), steps(plan.text(full=True))
    found: list[Folded] = []
    section = ""
    while folded:
        line = folded.pop(0)
        title = TITLE.match(line)
        if title is None:
            section = section if line[1] == " " else line
            assert words(line) == words(full.pop(0)), line
            continue
        count, period = int(title[2]), int(title[3])
        shown = [folded.pop(0) for _ in range(period)]
        assert all(one[2:4] == "  " for one in shown)
        whole = [re.sub(rf"((?:FLOP|sent)(?: x\d+)?) x{count}\b", r"\1", one) for one in shown]
        layers = [[full.pop(0) for _ in range(period)] for _ in range(count)]
        assert sum([words(x) for x in layer] == [words(x) for x in whole] for layer in layers) == 1
        assert all(renamed(whole, layer) for layer in layers)
        costly = [one for one in layers[0] if re.search("FLOP|sent", one)]
        assert len(costly) == sum(f" x{count} " in f"{one} " for one in shown)
        marked = sum(one.startswith("*") for one in shown)
        found.append(Folded(section, title[1], count, title[4], marked))
    assert not full
    return found


def gpt_plan(layers: int, mesh: dt.Mesh, pins: Any = MEGATRON, **options: Any) -> dt.Plan:
    return plan_model(GPT(layers=layers), loss_fn, batch(), mesh, pins, name="gpt", **options)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(16, width, bias=False)
        self.down = nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Blocks(nn.Module):
    """``wire(number, x, first)`` is what each block reads."""

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


def forward_runs(plan: dt.Plan) -> list[str]:
    return [run.layers for run in expanded(plan) if run.section == "forward"]


# -- what is folded --------------------------------------------------------------------------------


@pytest.mark.slow
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
def test_a_folded_text_stands_for_the_full_one(options: dict[str, Any]) -> None:
    found = expanded(gpt_plan(4, dt.Mesh(tp=2), **options))
    assert {run.layers for run in found} == {"blocks.{0..3}"}
    assert {(run.count, run.shown) for run in found} == {(4, "blocks.0")}
    assert sum(run.marked for run in found) == 4  # two forward, two backward


@pytest.mark.slow
def test_stages_buckets_and_the_norm() -> None:
    plan = gpt_plan(
        6, dt.Mesh(pp=2, dp=2, tp=2), inputs=dict(dp=dt.Row()), stages=HALVES, microbatches=2,
        clip_grad_norm=1.0,
    )  # fmt: skip
    text, full = str(plan), plan.text(full=True)
    titles = [title[1] for title in map(TITLE.match, text.splitlines()) if title]
    assert titles == ["blocks.{0..2}"] * 4 + ["blocks.{3..5}"] * 4  # once, there, back, sums
    assert [run.layers for run in expanded(plan)] == titles
    assert sent(text) == sent(full)
    for end in ("schedule", "memory per rank", "communication per rank"):
        assert text.partition(f"\n{end}")[2] == full.partition(f"\n{end}")[2]


def sent(text: str) -> dict[tuple[str, ...], int]:
    """How often a step of each kind, type, size and line communicates, by stage and section."""
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


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_zero_gathers_and_scatters(level: int) -> None:
    rows = Placed(axes=dict(dp=2), inputs=dict(dp=dt.Row()))
    run = Run.of(rows, module=Blocks(*[32] * 6), loss=mean_square, zero={"dp": level}, clip=None)
    plan = run.step.plan(torch.empty(8, 16, device="meta"))
    assert expanded(plan)
    assert sent(str(plan)) == sent(plan.text(full=True))


@pytest.mark.slow
def test_recompute() -> None:
    tp2 = Placed(axes=dict(tp=2), pins=PINS)
    given = dict(loss=mean_square, recompute=["blocks.*"], clip=None)
    run = Run.of(tp2, module=Blocks(*[32] * 4), **given)
    assert expanded(run.step.plan(torch.empty(8, 16, device="meta")))


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
    """0, 1, 3, 4: the labels are of one pattern, and no run of numbers."""

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
def test_layers_are_folded_as_far_as_they_are_alike(case: str) -> None:
    model, pins, runs = CASES[case]
    assert forward_runs(blocks_plan(model, pins)) == runs


def test_a_layer_that_reads_something_else() -> None:
    """All its steps look alike; what it reads comes from further back."""
    odd = Blocks(*[32] * 6, wire=lambda number, x, first: first if number == 3 else x)
    assert not any("{0..5}" in layers for layers in forward_runs(blocks_plan(odd)))


def test_layers_that_read_two_back() -> None:
    class Skips(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            before = x
            for block in self.blocks:
                before, x = x, before + block(x)
            return x

    assert expanded(blocks_plan(Skips(*[32] * 6)))


def test_a_loop_without_numbers_is_not_folded() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x.sin()
        return x

    plan = dt.compile(fn, dt.Mesh(tp=2)).plan(torch.empty(4))
    assert str(plan) == plan.text() == plan.text(full=True)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_llama_of_32_layers() -> None:
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
