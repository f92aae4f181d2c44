"""Which patterns of Hugging Face models are recognised, and why others are not:
tests/golden/recognised.

After an intended change, regenerate the files and review the diff:

    python -m tests.api.test_recognised
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import bound
from dtensor.sharding.plan.text.recognised import recognised_text
from tests.frontend.eager import check

GOLDEN = Path(__file__).parent.parent / "golden" / "recognised"
TIME = 16
WORDS = dict(vocab_size=128, pad_token_id=None, bos_token_id=None, eos_token_id=None)
SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, **WORDS,
)  # fmt: skip


def hf() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf().LlamaForCausalLM(hf().LlamaConfig(**SIZES)),
    "llama_bf16": lambda: hf().LlamaForCausalLM(hf().LlamaConfig(**SIZES)).bfloat16(),
    "qwen3": lambda: hf().Qwen3ForCausalLM(hf().Qwen3Config(**SIZES, head_dim=16)),
    "mistral": lambda: hf().MistralForCausalLM(hf().MistralConfig(**SIZES)),
    "mistral_short_window": lambda: hf().MistralForCausalLM(
        hf().MistralConfig(**SIZES, sliding_window=TIME // 2)
    ),
    "gemma": lambda: hf().GemmaForCausalLM(hf().GemmaConfig(**SIZES, head_dim=16)),
    "gemma2": lambda: hf().Gemma2ForCausalLM(hf().Gemma2Config(**SIZES, head_dim=16)),
    "gemma3": lambda: hf().Gemma3ForCausalLM(hf().Gemma3TextConfig(**SIZES, head_dim=16)),
    "gpt2": lambda: hf().GPT2LMHeadModel(
        hf().GPT2Config(n_positions=64, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.0, **WORDS)
    ),
    "bert": lambda: hf().BertForMaskedLM(
        hf().BertConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            attention_probs_dropout_prob=0.0,
            **WORDS,
        )
    ),
    "deepseek_v3": lambda: hf().DeepseekV3ForCausalLM(
        hf().DeepseekV3Config(
            **SIZES | dict(num_key_value_heads=4),
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=1,
        )
    ),
    "gpt_oss": lambda: hf().GptOssForCausalLM(
        hf().GptOssConfig(
            **SIZES, head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "t5": lambda: hf().T5ForConditionalGeneration(
        hf().T5Config(
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            vocab_size=128,
            decoder_start_token_id=0,
        )
    ),
}


def loss_fn(model: nn.Module, ids: Tensor, padding: Tensor | None = None) -> Tensor:
    return model(input_ids=ids, labels=ids, attention_mask=padding).loss


def recognised(name: str) -> str:
    """Return the table without line numbers of transformers, which change with its version."""
    graph = capture(loss_fn, (MODELS[name]().train(), torch.zeros(2, TIME).long()), grads="loss")
    return re.sub(r"  +\S+\.py:\d+", "", recognised_text(graph.recognised)) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_recognised_patterns_equal_golden_file(name: str) -> None:
    assert recognised(name) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.slow
def test_plan_lists_recognised_ops() -> None:
    model = MODELS["llama"]()
    placed = dt.parallelize(model, dt.Mesh(tp=2), {"*mlp.up_proj.weight": dict(tp=dt.Row())})
    step = dt.train_step(placed, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    plan = step.plan(torch.zeros(2, TIME).long())
    text = plan.recognised()
    assert text.startswith("recognised\n")
    assert re.search(r"dt.attention +model.layers.\*.self_attn +x2 +sdpa_attention.py:\d+", text)
    assert sum("dt.attention(" in line for line in plan.text(full=True).splitlines()) == 2


WINDOW = TIME // 4
OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softcap": (
        "Gemma2",
        dict(attn_logit_softcapping=2.0),
        dict(softcap=2.0, window=[WINDOW - 1, 0]),
    ),
    "sinks": (
        "GptOss",
        dict(num_local_experts=2, num_experts_per_tok=1),
        dict(softcap=0.0, window=[WINDOW - 1, 0]),
    ),
    "padding": ("Gemma2", {}, {}),
    "dropout": ("Gemma2", dict(attention_dropout=0.1), {}),
    "stated": ("Llama", dict(attn_implementation="eager"), {}),
}


@pytest.mark.default("sinks")
@pytest.mark.parametrize("case", OPTIONS)
def test_attention_that_transformers_writes_out_is_one_op_with_its_options(case: str) -> None:
    """It stays as written with dropout, with padding whose queries would see no key, and if the
    user states the implementation."""
    name, options, expected = OPTIONS[case]
    sizes = SIZES | dict(num_hidden_layers=1, head_dim=16)
    if name != "Llama":
        sizes |= dict(sliding_window=WINDOW, layer_types=["sliding_attention"])
    torch.manual_seed(0)
    model = getattr(hf(), f"{name}ForCausalLM")(getattr(hf(), f"{name}Config")(**sizes, **options))
    padding = torch.ones(2, TIME) if case == "padding" else None
    args = model.train(), torch.randint(128, (2, TIME)), padding
    graph = (check if expected else capture)(loss_fn, args, grads="loss")
    calls = [bound(n) for n in graph.nodes if n.target is torch.ops.dt.attention.default]
    assert [{name: a[name] for name in expected} for a in calls] == [expected] * bool(expected)
    assert all((a["sinks"] is not None) == (case == "sinks") for a in calls)
    assert torch.ops.dt.written_attention.default not in {n.target for n in graph.nodes}


def decode(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """Decode one token for each slot; slot i attends to its cache up to pos[i]."""
    seen = torch.arange(k.shape[2])[None] <= pos[:, None]
    return nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None, None], enable_gqa=True)


SLOW_LINKS = dt.Topology(latency=1e-5, bandwidth=1e8, flops=1e11, memory_bandwidth=1e10)
SLOTS, HEADS, CACHE = dt.Shard(0), dt.Shard(1), dt.Shard(2)
PLACED: dict[str, tuple[tuple[dt.Placement, ...], int, set[str]]] = {
    "slots": ((SLOTS, SLOTS, SLOTS, SLOTS), 256, {"all_gather"}),
    "heads": ((HEADS, HEADS, HEADS, dt.Replicate()), 256, {"all_gather"}),
    # its cache split, the op is written out: numbers of a row are reduced, and the sum of values
    "cache": ((dt.Replicate(), CACHE, CACHE, dt.Replicate()), 2**13, {"all_reduce"}),
}


@pytest.mark.default("heads")
@pytest.mark.parametrize("case", PLACED)
def test_decode_step_does_not_gather_kv_cache(case: str) -> None:
    placements, length, kinds = PLACED[case]
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 8, 1, 16), torch.randn(4, 2, length, 16), torch.randn(4, 2, length, 16)
    pos = torch.randint(length // 2, length, (4,))
    mesh = dt.Mesh(tp=2)
    fn = dt.compile(decode, mesh, topology=SLOW_LINKS)
    with dt.launch(mesh):
        args = [
            dt.distribute(x, mesh, tp=placement)
            for x, placement in zip((q, k, v, pos), placements, strict=True)
        ]
        plan, out = fn.plan(*args), fn(*args).full_tensor()
    assert "dt.attention_masked" in plan.recognised()
    assert {c.kind for c in plan.collectives} == kinds
    assert sum(c.bytes_sent for c in plan.collectives) <= 4 * q.numel() * q.itemsize
    want = decode(q, k, v, pos)
    assert float((out - want).abs().max()) <= 1e-6


def test_plan_without_patterns_says_so() -> None:
    plan = dt.compile(lambda x: x * 2, dt.Mesh(tp=1)).plan(torch.ones(2))
    assert plan.recognised() == "nothing of this program is a pattern that is looked for"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in MODELS:
        (GOLDEN / f"{each}.txt").write_text(recognised(each))
