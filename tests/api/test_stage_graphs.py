"""Stages that are no chain: skip connections, an encoder and a decoder with tied embeddings, two
branches at once. Loss and gradients are those of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT, batch, loss_fn
from tests.training import assert_gradients_close, gradients_of

D, VOCAB = 8, 11


class Skips(nn.Module):
    """Like a U-Net: what goes down is joined on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(D, D), nn.Linear(D, D)
        self.middle = nn.Linear(D, D)
        self.up2, self.up1 = nn.Linear(2 * D, D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.down1(x))
        b = torch.tanh(self.down2(a))
        c = torch.tanh(self.middle(b))
        y = torch.tanh(self.up2(torch.cat([c, b], -1)))
        return self.up1(torch.cat([y, a], -1))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.left(x)) * torch.tanh(self.right(x)))


class EncoderDecoder(nn.Module):
    """The encoder's result is used by every decoder layer; one embedding for both and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 2, D, 0.0, batch_first=True) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(D, 2, D, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        y = self.embed(target)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(y)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def next_token(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(source, target).flatten(0, 1), target.roll(-1, 1).flatten())


def vectors() -> tuple[Tensor, ...]:
    return (torch.randn(8, D),)


def tokens() -> tuple[Tensor, ...]:
    return torch.randint(0, VOCAB, (8, 6)), torch.randint(0, VOCAB, (8, 5))


def gpt_loss(model: nn.Module, given: Tensor, targets: Tensor) -> Tensor:
    return loss_fn(model, given, targets)[0]


def gpt_batch() -> tuple[Tensor, ...]:
    return batch(size=8)


TWO = [["down*", "middle*"], ["up*"]]
FOUR = [["down1*"], ["down2*", "middle*"], ["up2*"], ["up1*"]]
THREE = [["down1*", "down2*"], ["middle*", "up2*"], ["up1*"]]
GPT_TWO = [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*", "norm*", "head*"]]
GPT_THREE = [["embed*", "positions*", "blocks.0.*"], ["blocks.1.*"], ["norm*", "head*"]]
TWO_CODERS = [["embed*", "encoder*"], ["decoder*", "head*"]]
CODERS = [["embed*", "encoder.0*"], ["encoder.1*", "decoder.0*"], ["decoder.1*", "head*"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "loss_fn", "data", "stages", "ranks", "schedule"),
    [
        (Skips, square, vectors, TWO, 2, dt.OneFOneB(4)),
        (Skips, square, vectors, FOUR, 2, dt.ZBV(4)),  # a value is sent to two stages
        (Skips, square, vectors, FOUR, 2, dt.Interleaved1F1B(4)),
        (EncoderDecoder, next_token, tokens, CODERS, 3, dt.ZBH1(4)),
        (EncoderDecoder, next_token, tokens, TWO_CODERS, 2, dt.OneFOneB(2)),
        (Skips, square, vectors, THREE, 3, dt.OneFOneB(4)),
        (GPT, gpt_loss, gpt_batch, GPT_TWO, 2, dt.OneFOneB(2)),  # tied: one parameter, two stages
        (GPT, gpt_loss, gpt_batch, GPT_THREE, 3, dt.ZBH1(4)),
        (Branches, square, vectors, [["left*"], ["right*"], ["out*"]], 3, dt.GPipe(2)),
    ],
)
def test_gradients_are_plain_torchs(
    make: Callable[[], nn.Module],
    loss_fn: Callable[..., Tensor],
    data: Callable[[], tuple[Tensor, ...]],
    stages: Sequence[Sequence[str]],
    ranks: int,
    schedule: dt.Schedule,
) -> None:
    module, given = make(), data()
    plain = copy.deepcopy(module)
    mesh = dt.Mesh(pp=ranks)
    model = dt.parallelize(module, mesh, {}, stages={"pp": stages})
    step = dt.train_step(model, loss_fn, torch.optim.SGD(module.parameters()), schedule=schedule)
    with dt.launch(mesh):
        found = step.gradients(*given)
        loss = float(step(*given))
    assert loss == pytest.approx(loss_fn(plain, *given).item(), rel=1e-5)
    assert_gradients_close(found, gradients_of(plain, given, loss_fn))


def test_a_tied_head_runs_on_the_stage_of_its_own_name() -> None:
    """Though the stage before, where its input is, holds the weight as well."""
    module = GPT()
    stages = [["embed*", "positions*", "blocks.*", "norm*"], ["head*"]]
    model = dt.parallelize(module, dt.Mesh(pp=2), {}, stages={"pp": stages})
    step = dt.train_step(model, gpt_loss, torch.optim.SGD(module.parameters()))
    plan = step.plan(*gpt_batch())
    assert {op.stage for op in plan.flow.ops if op.module == "head"} == {1}
    assert next(i.stages for i in plan.inputs if i.label == "embed.weight") == (0, 1)
    assert [c.kind for c in plan.collectives if c.phase == "optimizer"] == ["all_reduce"] * 2
