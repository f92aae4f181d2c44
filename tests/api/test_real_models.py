"""Models of torch's own layers train as in plain torch, with the collectives that one would write
by hand. Convolutions with batch norm are in test_train.py."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.utils import parametrizations, rnn

import dtensor as dt
from tests.training import Placed, assert_trains_as_torch


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def trained(
    module: nn.Module, placed: Placed, batches: list[tuple[Tensor, Tensor]]
) -> Counter[str]:
    """Train and compare with plain torch; return the plan's collectives by phase."""
    run = assert_trains_as_torch(
        placed,
        batches,
        build=lambda: copy.deepcopy(module),
        make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        loss=loss_fn,
        clip=None,
        schedule=dt.GPipe(1),
        atol=1e-6,
    )
    return Counter(f"{c.phase} {c.key}" for c in run.step.plan(*batches[0]).collectives)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(12, 8)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        padded = tokens == 0
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padded).mean(1))


@pytest.mark.slow
def test_transformer_encoder_has_megatron_collectives_and_trains_as_torch() -> None:
    """Its fused projection is viewed as (3 e) and divided into three, so heads are split within
    each."""
    module = Encoder()
    batches = [(torch.randint(1, 12, (4, 5)), torch.randint(0, 4, (4,))) for _ in range(2)]
    batches[0][0][1, 3:] = 0
    placements = dt.placements.for_model(module, batches[0][:1], size=2)
    assert placements["encoder.layers.*.self_attn.in_proj_weight"] == dict(tp=dt.Row(blocks=3))
    assert placements["encoder.layers.*.self_attn.out_proj.weight"] == dict(tp=dt.Shard(1))
    del placements["embed.weight"]
    found = trained(module, Placed(axes=dict(tp=2), pins=placements), batches)
    # two a layer forward, two backward
    assert found == {"forward all_reduce@tp": 4, "backward all_reduce@tp": 4}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


def test_lstm_over_split_batch_trains_as_torch() -> None:
    """Also runs without gradients, where torch runs the LSTM as one op on some machines."""
    module, mesh, rows = Recurrent(), dt.Mesh(dp=2), dict(dp=dt.Row())
    batches = [(torch.randint(0, 12, (5, 3)), torch.randint(0, 4, (5,))) for _ in range(2)]
    with torch.no_grad():
        expected = module(batches[0][0])
    evaluate = dt.compile(lambda model, x: model(x), mesh)
    tokens = dt.distribute(batches[0][0], mesh, **rows)
    found = evaluate(dt.parallelize(module, mesh), tokens).full_tensor()
    torch.testing.assert_close(found, expected)
    assert torch.backends.mkldnn.enabled  # capture leaves torch as it was
    assert trained(module, Placed(axes=dict(dp=2), inputs=rows), batches) == {
        "forward all_reduce@dp": 1,
        "optimizer all_reduce@dp": 2,
    }


class Packed(nn.Module):
    """An LSTM over texts that are padded with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1).cpu()
        x = self.embed(tokens)
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, (h, _) = self.lstm(packed)
        padded, known = rnn.pad_packed_sequence(output, batch_first=True)
        return self.head(h.transpose(0, 1).flatten(1) + padded.sum(1) / known[:, None])


def test_packed_sequences_over_split_batch_train_as_torch_with_one_plan() -> None:
    """One plan serves all sequence lengths, because the lengths stay a tensor."""
    tokens = torch.randint(1, 12, (4, 3))
    first, second = tokens.clone(), tokens.clone()
    first[1, 2:], second[2, 1:] = 0, 0
    batches = [(x, torch.randint(0, 4, (4,))) for x in (first, second)]
    placed = Placed(axes=dict(dp=2), inputs=dict(dp=dt.Row()))
    assert trained(Packed(), placed, batches)["optimizer all_reduce@dp"] == 2


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(x, mask=mask).mean(1))


def test_transformer_with_constant_causal_mask_trains_as_torch() -> None:
    """Torch reads the mask's values to find whether it is causal."""
    module = Causal()
    batches = [(torch.randn(4, 3, 8), torch.randint(0, 4, (4,)))]
    trained(module, Placed(axes=dict(dp=2), inputs=dict(dp=dt.Row())), batches)


class Derived(nn.Module):
    """A forward-mode derivative through a norm, a loss and tensors that are created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        def f(x: Tensor) -> Tensor:
            scores = self.net(x) * torch.ones(4) + torch.zeros_like(x[:, :4])
            entropy = F.cross_entropy(scores, torch.arange(len(x)), reduction="none")
            return scores + entropy[:, None]

        return jvp(f, (x,), (torch.ones_like(x),))[1]


def test_model_with_forward_mode_derivatives_trains_as_torch() -> None:
    batches = [(torch.randn(4, 6), torch.randint(0, 4, (4,)))]
    trained(Derived(), Placed(axes=dict(dp=2), inputs=dict(dp=dt.Row())), batches)


def test_spectral_norm_and_weight_norm_train_as_torch() -> None:
    """Spectral norm writes a buffer that it has not read; the backward of weight norm is one op."""
    module = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(8, 4)),
    )
    batches = [(torch.randn(4, 6), torch.randint(0, 4, (4,))) for _ in range(2)]
    found = trained(module, Placed(axes=dict(dp=2), inputs=dict(dp=dt.Row())), batches)
    assert not any("all_gather" in kind for kind in found)
