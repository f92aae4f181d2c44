"""Models of transformers with fewer KV heads than ranks give the results of one rank.

`dt.placements.for_model` places them; the numbers of query heads of two ranks differ by at most
one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.sharding.spec.placements import index_sets
from tests.api.generation import by_transformers
from tests.extras import missing
from tests.training import Placed, Run, assert_same_bits, assert_trains_as_torch, sgd

hf: Any = pytest.importorskip("transformers", reason=missing("transformers"))

CASES = [  # family, query heads, key heads, ranks
    ("Llama", 8, 2, 4),
    ("Llama", 8, 2, 3),
    ("Llama", 8, 2, 8),
    ("Qwen2", 14, 2, 4),
    ("Qwen2", 28, 4, 8),
    ("Qwen3", 6, 2, 6),
    ("Mistral", 8, 2, 5),
    ("Gemma2", 8, 2, 4),
    ("Gemma2", 4, 1, 3),
    ("Falcon", 8, 1, 2),
    ("Falcon", 8, 1, 4),
    ("Falcon", 7, 1, 3),
]
DEFAULT = ("Llama-8-2-4", "Falcon-8-1-4")


def build(family: str, heads: int, kv_heads: int) -> nn.Module:
    """Return a model of one layer with heads of size 8, always with the same weights."""
    sizes: dict[str, Any] = dict(
        hidden_size=8 * heads, num_hidden_layers=1, num_attention_heads=heads, vocab_size=96,
        max_position_embeddings=32, initializer_range=0.15,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    if family == "Falcon":  # a fused projection, and one key head
        sizes |= dict(bias=False, alibi=False, attention_dropout=0.0, hidden_dropout=0.0)
    else:
        sizes |= dict(intermediate_size=96, num_key_value_heads=kv_heads)
    if family in ("Qwen3", "Gemma2"):
        sizes["head_dim"] = 8
    if family in ("Mistral", "Gemma2"):
        sizes["sliding_window"] = 6
    torch.manual_seed(0)
    return getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**sizes))


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def batches() -> list[tuple[Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [(torch.randint(96, (2, 12), generator=drawn),) for _ in range(3)]


def derived(module: nn.Module, ranks: int) -> dt.placements.Placements:
    (ids,) = batches()[0]
    return dt.placements.for_model(module, (), dict(input_ids=ids, labels=ids), size=ranks)


@pytest.mark.default(*DEFAULT)
@pytest.mark.parametrize(("family", "heads", "kv_heads", "ranks"), CASES)
def test_model_with_fewer_kv_heads_than_ranks_trains_as_torch(
    family: str, heads: int, kv_heads: int, ranks: int
) -> None:
    pins = derived(build(family, heads, kv_heads), ranks)
    (row,) = (p["tp"] for n, p in pins.items() if n.endswith(("o_proj.weight", "n.dense.weight")))
    assert isinstance(row, dt.Shard)
    held = [sum(hi - lo for lo, hi in part) for part in index_sets(row, 8 * heads, ranks)]
    assert max(held) == 8 * -(-heads // ranks), held
    assert min(held) >= 8 * (heads // ranks), held
    assert_trains_as_torch(
        Placed(axes=dict(tp=ranks), pins=pins),
        batches(),
        build=lambda: build(family, heads, kv_heads),
        make=sgd,
        loss=loss_fn,
        limit=1e-5,
        atol=1e-5,
    )


@pytest.mark.default("Llama-8-2-4")
@pytest.mark.parametrize(("family", "heads", "kv_heads", "ranks"), CASES)
def test_model_with_fewer_kv_heads_than_ranks_generates_as_transformers(
    family: str, heads: int, kv_heads: int, ranks: int
) -> None:
    """Each rank caches the KV heads that its query heads use, and at least as many as any later
    rank."""
    module = build(family, heads, kv_heads).eval()
    prompts = [[3, 5, 7, 9, 11], [2, 4]]
    want = by_transformers(module, prompts, 10)
    model = dt.parallelize(module, dt.Mesh(tp=ranks), derived(module, ranks))
    with dt.launch(model.mesh):
        generator = dt.generator(model, slots=2, length=32)
        texts = generator(prompts, max_new_tokens=10)
        plan = generator.plan("decode")
    assert [list(text.tokens) for text in texts] == want
    specs = {i.label: i.spec for i in plan.inputs}
    row = next(s for n, s in specs.items() if n.endswith(("o_proj.weight", "n.dense.weight")))
    kept = [specs["kv_cache.k0"].local_shape({"tp": rank})[1] for rank in range(ranks)]
    used = [
        {
            at // 8 * kv_heads // heads
            for lo, hi in row.intervals(1, {"tp": rank})
            for at in range(lo, hi)
        }
        for rank in range(ranks)
    ]
    assert kept == [max(map(len, used[rank:])) for rank in range(ranks)]


@pytest.mark.slow
def test_training_with_fewer_kv_heads_on_ray_is_bitwise_equal_to_in_process() -> None:
    pins = derived(build("Llama", 8, 2), 4)
    runs: list[Any] = []
    for backend in ("inprocess", "ray"):
        run = Run.of(Placed(axes=dict(tp=4), pins=pins), module=build("Llama", 8, 2), loss=loss_fn)
        with dt.launch(run.mesh, backend=backend):
            runs.append((run.losses(batches()), run.state()))
    assert_same_bits(*runs)
