"""Models made of torch's own layers, trained under placements: the numbers are plain torch's, and
the collectives are those that one would write by hand. Convolutions with batch norm are in
test_train.py."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import dtensor as dt
from tests.training import Placed, assert_trains_as_torch


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def trained(
    module: nn.Module, placed: Placed, batches: list[tuple[Tensor, Tensor]]
) -> Counter[str]:
    """Train beside plain torch, and return the plan's collectives by phase."""
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
def test_torchs_transformer_encoder_has_megatrons_collectives() -> None:
    """Its fused projection is viewed as (3 e), and each of the 3 is taken: heads split within."""
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


def test_an_lstm_over_a_split_batch() -> None:
    """Also without gradients, where torch runs it as one op on some machines."""
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


def test_norms_of_weights() -> None:
    """Spectral norm writes a buffer that it has not read; weight norm's backward is one op."""
    module = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(8, 4)),
    )
    batches = [(torch.randn(4, 6), torch.randint(0, 4, (4,))) for _ in range(2)]
    found = trained(module, Placed(axes=dict(dp=2), inputs=dict(dp=dt.Row())), batches)
    assert not any("all_gather" in kind for kind in found)
