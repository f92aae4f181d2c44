"""Tests of attention over a split sequence: bytes of each strategy, the choice, and errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft.run.transport import LocalTransport
from dtensor.errors import PlanningError

BATCH, TOKENS, WIDTH = 2, 32, 64


class Block(nn.Module):
    """Causal attention of ``heads`` query heads and ``groups`` key heads, with a residual."""

    def __init__(self, heads: int = 8, groups: int = 8) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // heads * groups, bias=False) for _ in range(2))

    def project(self, x: Tensor) -> list[Tensor]:
        pairs = ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        return [
            linear(x).view(*x.shape[:2], num, WIDTH // self.heads).transpose(1, 2)
            for linear, num in pairs
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.groups
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.attend(*self.project(x)).transpose(1, 2).flatten(2))


class Annotated(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(*(dt.annotate(x, "b h@cp t d") for x in (q, k, v)))


class Masked(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = q.mean(-1, keepdim=True).detach() + k.mean(-1).detach()[:, :, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Windowed(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        age = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(age >= 0) & (age < 8))


class WithBias(Block):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(TOKENS, TOKENS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


def step_of(
    module: nn.Module,
    mesh: dt.Mesh,
    attention: dict[str, str] | None,
    split: dt.Placement = dt.Shard(1),  # noqa: B008 - a frozen value
    **options: Any,
) -> Any:
    model = dt.parallelize(module, mesh, {}, attention=attention, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {axis: split for axis in mesh.axes if axis != "tp"}
    return dt.train_step(model, lambda model, x: model(x).square().mean(), optimizer, inputs=inputs)


X = torch.zeros(BATCH, TOKENS, WIDTH)


def closed_form(word: str, heads: int, groups: int, num: int) -> tuple[int, int]:
    """Return the bytes that a rank sends for attention, forward and backward."""
    tensor = BATCH * TOKENS * (WIDTH // heads) * 4  # of one head
    if word == "heads":
        sent = (2 * heads + 2 * max(groups, num)) * tensor * (num - 1) // num**2
        return sent, sent
    sent = 2 * groups * tensor * (num - 1) // num
    return sent, sent * (2 if word == "ring" else 1)


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("word", ["heads", "gather", "ring"])
def test_bytes_are_those_of_the_closed_forms(
    word: str, num: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = dt.Mesh(cp=num)
    step = step_of(Block(groups=groups), mesh, {"cp": word}, dt.Zigzag(1))
    planned: Counter[str] = Counter()
    for collective in step.plan(X).collectives:
        planned[collective.phase] += collective.bytes_sent * collective.times
    expected = closed_form(word, 8, groups, num)
    assert (planned["forward"], planned["backward"]) == expected

    sent: Counter[int] = Counter()
    begin = LocalTransport.begin

    def counted(self: LocalTransport, rank: int, start: Any) -> Any:
        begun = begin(self, rank, start)
        share = {"all_to_all": (num - 1) / num, "reduce_scatter": (num - 1) / num, "shift": 1}
        share["all_gather"] = num - 1

        def count(values: Any, *rest: Any) -> Any:
            nbytes = sum(value.nbytes for value in values)
            sent[rank] += int(nbytes * share.get(getattr(start, "kind", ""), 0))
            return begun(values, *rest)

        return count

    monkeypatch.setattr(LocalTransport, "begin", counted)
    with dt.launch(mesh):
        float(step(X))
    assert set(sent.values()) == {sum(expected)}


def test_annotations_of_heads_hold_in_place_of_attention() -> None:
    plan = step_of(Annotated(), dt.Mesh(cp=4), None).plan(X)
    kinds = Counter(c.kind for c in plan.collectives if c.phase != "optimizer")
    assert kinds == {"all_to_all": 8} and not plan.sequence


def test_auto_names_its_choice_and_the_alternatives() -> None:
    plan = step_of(Block(heads=4, groups=2), dt.Mesh(cp=3), None, dt.Zigzag(1)).plan(X)
    (choice,) = plan.sequence
    by_word = {alternative.word: alternative for alternative in choice.alternatives}
    assert "3 ranks, which do not divide the 4 heads" in by_word["heads"].refused
    assert by_word[choice.word].seconds == min(a.seconds for a in by_word.values() if not a.refused)
    head = str(plan).partition("inputs")[0]
    assert f"attention  {choice.word} on cp: " in head and "heads is not possible (" in head


class TokensFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("word", ["heads", "gather", "ring"])
def test_tokens_may_be_the_first_dim(word: str) -> None:
    step = step_of(TokensFirst(), dt.Mesh(cp=2), {"cp": word}, dt.Zigzag(0))
    plan = step.plan(X.transpose(0, 1).contiguous())
    expected = step_of(Block(), dt.Mesh(cp=2), {"cp": word}, dt.Zigzag(1)).plan(X)
    sent = [
        Counter((c.kind, c.phase, c.bytes_sent) for c in p.collectives) for p in (plan, expected)
    ]
    assert sent[0] == sent[1]


def test_gathered_keys_are_gathered_again_if_memory_needs_it() -> None:
    def plan(memory: float) -> dt.Plan:
        model = dt.parallelize(
            nn.Sequential(*(Block() for _ in range(4))), dt.Mesh(cp=4), attention={"cp": "gather"}
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dt.train_step(
            model, lambda model, x: model(x).square().mean(), optimizer,
            inputs=dict(cp=dt.Zigzag(1)), topology=dt.Topology(memory_bytes=memory),
        )  # fmt: skip
        return step.plan(torch.zeros(BATCH, 64 * TOKENS, WIDTH))

    kept = plan(80 * 2**30)
    again = plan(kept.totals.memory.total - 1)
    gathers = [c for c in again.collectives if c.kind == "all_gather" and c.phase == "backward"]
    assert len(gathers) == 8 and again.totals.memory.total < kept.totals.memory.total
    assert "the backward gathers keys again" in str(again)


def test_contiguous_causal_attention_proposes_the_zigzag() -> None:
    for word, fullest in (("gather", 1.75), ("ring", 1.75)):
        x = torch.zeros(1, 1024, WIDTH)
        text = str(step_of(Block(), dt.Mesh(cp=4), {"cp": word}).plan(x))
        assert f"has {fullest:.2f} times the mean FLOP of attention; fix:" in text.replace(
            "\n           ", " "
        )
        even = str(step_of(Block(), dt.Mesh(cp=4), {"cp": word}, dt.Zigzag(1)).plan(x))
        assert "fix: inputs" not in even
    for split in (dt.Shard(1), dt.Zigzag(1)):  # which balance a short window equally
        text = str(step_of(Windowed(), dt.Mesh(cp=4), {"cp": "ring"}, split).plan(X))
        assert "the fullest rank of cp has 1.12 times" in text and "fix: inputs" not in text


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("word", ["heads", "gather", "ring"])
def test_order_of_axes_does_not_change_the_strategy(word: str, groups: int) -> None:
    tp = {
        **{f"{name}.weight": dict(tp=dt.Row()) for name in "qkv"},
        "o.weight": dict(tp=dt.Column()),
    }
    plans = []
    for mesh in (dt.Mesh(tp=2, cp=2), dt.Mesh(cp=2, tp=2)):
        model = dt.parallelize(Block(groups=groups), mesh, tp, attention={"cp": word})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dt.train_step(
            model, lambda model, x: model(x).sum(), optimizer, inputs=dict(cp=dt.Zigzag(1))
        )
        plans.append(step.plan(X))
    sent = [Counter((c.kind, c.axis, c.bytes_sent) for c in p.collectives) for p in plans]
    assert sent[0] == sent[1]


def test_mask_tensor_in_a_ring_gathers_keys_with_a_notice() -> None:
    plan = step_of(Masked(), dt.Mesh(cp=2), {"cp": "ring"}).plan(X)
    assert {c.kind for c in plan.collectives if c.phase == "forward"} == {"all_gather"}
    assert "(gather for test_long_context.py:" in str(plan)


ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an unknown word": (
        Block, dict(attention={"cp": "rings"}),
        """attention['cp']='rings': it is "heads", "gather", "ring" or "auto\"""",
    ),
    "heads that the ranks do not divide": (
        lambda: Block(heads=4, groups=4), dict(num=8, attention={"cp": "heads"}),
        'or two axes of 4 and 2 ranks with "heads" and "ring"',
    ),
    "no sequence is split": (
        Block, dict(attention={"cp": "ring"}, split=dt.Shard(0)),
        "cp splits the sequence of no attention op",
    ),
    "no attention": (
        lambda: nn.Linear(WIDTH, WIDTH), dict(attention={"cp": "ring"}), "has no attention op",
    ),
    "a word beside annotations": (
        Annotated, dict(attention={"cp": "ring"}), "annotations state the split of attention",
    ),
    "a learned bias": (
        WithBias, dict(attention={"cp": "ring"}),
        "attention stays written out, because its mask depends on bias, which wants a gradient\n"
        """fix: attention={'cp': "gather"}""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_statements_that_cannot_hold_are_refused(case: str) -> None:
    make, options, text = ERRORS[case]
    num = options.get("num", 2)
    with pytest.raises(PlanningError) as caught:
        step_of(make(), dt.Mesh(cp=num), **{k: options[k] for k in options if k != "num"}).plan(X)
    assert text in str(caught.value)


class Cross(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, _, _ = self.project(x)
        _, k, v = self.project(x[:, : TOKENS // 2])
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(out.transpose(1, 2).flatten(2))


def test_ring_of_fewer_keys_than_queries_is_refused() -> None:
    with pytest.raises(PlanningError, match="there are 32 queries and 16 keys"):
        step_of(Cross(), dt.Mesh(cp=2), {"cp": "ring"}).plan(X)
    assert step_of(Cross(), dt.Mesh(cp=2), None).plan(X).sequence[0].word != "ring"


class Packed(Block):
    """Causal attention in a window of a document, to tokens that are no padding."""

    def forward(self, x: Tensor, documents: Tensor, is_token: Tensor) -> Tensor:
        q, k, v = self.project(x)
        age = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        visible = (age >= 0) & (age < 12) & is_token[:, None, None, :]
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return x + self.o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("num", [2, 3])
def test_options_of_attention_hold_under_each_strategy(num: int) -> None:
    torch.manual_seed(0)
    x, documents = torch.randn(BATCH, TOKENS, WIDTH), torch.arange(TOKENS).expand(BATCH, -1) // 20
    is_token = torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 5]])
    state = Packed().state_dict()

    def losses(mesh: dt.Mesh, word: str | None) -> list[float]:
        (block := Packed()).load_state_dict(state)
        model = dt.parallelize(block, mesh, attention={"cp": word} if word else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = dt.train_step(
            model, lambda model, *args: model(*args).square().mean(), optimizer,
            inputs=dict(cp=dt.Zigzag(1)) if word else {},
        )  # fmt: skip
        plan = step.plan(x, documents, is_token)
        assert "attention_masked" not in str(plan)
        if word == "ring":  # values of tokens travel in the message of the keys
            sent = [c.kind for c in plan.collectives if c.phase == "forward"]
            assert sent.count("shift") == num - 1
        with dt.launch(mesh):
            return [float(step(x, documents, is_token)) for _ in range(3)]

    expected = losses(dt.Mesh(), None)
    assert expected[0] - expected[2] > 1e-2
    for word in ("gather", "ring") if num == 3 else ("heads", "gather", "ring"):
        assert losses(dt.Mesh(cp=num), word) == pytest.approx(expected, abs=1e-5)


def test_auto_accepts_attention_that_stays_written_out() -> None:
    plan = step_of(WithBias(), dt.Mesh(cp=2), {"cp": "auto"}).plan(X)
    assert not plan.sequence


class OneQuery(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, _, _ = self.project(x.mean(1, keepdim=True))
        _, k, v = self.project(x)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_attention_of_one_query_gathers_its_keys() -> None:
    plan = step_of(OneQuery(), dt.Mesh(cp=2), None).plan(X)
    assert not plan.sequence and "all_gather" in {c.kind for c in plan.collectives}
