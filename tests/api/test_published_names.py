"""Checkpoints of mixtures of experts: published folders, which have one tensor for each expert, are
read and written by transformers' table, and state moves between numbers of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.api.checkpoint.matching import matched
from dtensor.runtime.checkpoint import Checkpoint
from dtensor.runtime.checkpoint.saving import read_shard
from tests.extras import missing
from tests.training import assert_same_bits

HEADS: dict[str, Any] = dict(num_attention_heads=2, num_key_value_heads=2)
MOE: dict[str, dict[str, Any]] = {
    "Mixtral": dict(num_local_experts=5),
    "Qwen3Moe": dict(num_experts=5, moe_intermediate_size=8, head_dim=8),
    "DeepseekV3": dict(
        n_routed_experts=5, n_group=1, topk_group=1, moe_intermediate_size=8, q_lora_rank=8,
        first_k_dense_replace=1, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}  # fmt: skip
"""By family, a small configuration; 2 or 3 ranks do not divide the number of experts."""
EXPERTS = {"*.experts.*": dict(ep=dt.Shard(0))}
TOKENS = torch.arange(12).view(2, 6)


def moe(family: str, seed: int = 0) -> Any:
    transformers = pytest.importorskip("transformers", reason=missing("transformers"))
    sizes = dict(vocab_size=37, hidden_size=16, intermediate_size=12, num_hidden_layers=2)
    options = {**sizes, **HEADS, **MOE[family], "num_experts_per_tok": 2}
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**options)
    ).eval()


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True], ids=["published", "stacked"])
@pytest.mark.parametrize("family", MOE)
def test_published_names_of_experts_are_read_and_written(
    family: str, stacked: bool, tmp_path: Path
) -> None:
    module = moe(family)
    module.save_pretrained(tmp_path / "theirs", save_original_format=not stacked)
    expected = module(TOKENS).logits.detach()
    for ep in (1, 3):
        mesh = dt.Mesh(ep=ep)
        with torch.device("meta"):
            empty = moe(family)
        model = dt.parallelize(empty, mesh, EXPERTS, init=lambda: moe(family))
        logits = dt.compile(lambda model, tokens: model(tokens).logits, mesh)
        with dt.launch(mesh):
            dt.load(tmp_path / "theirs", model)
            torch.testing.assert_close(logits(model, TOKENS).full_tensor(), expected)
            dt.save(tmp_path / f"ours {ep}", model, format="hf")
        again = type(module).from_pretrained(tmp_path / f"ours {ep}").eval()
        assert_same_bits(dict(again.state_dict()), dict(module.state_dict()))
        assert again(TOKENS).logits.equal(expected)
        ours = Checkpoint.open(tmp_path / f"ours {ep}")
        assert any("experts.4." in name for name in ours.tensors)
        outside = dt.parallelize(moe(family, seed=1), mesh)
        dt.load(tmp_path / f"ours {ep}", outside)
        assert_same_bits(dict(outside.module.state_dict()), dict(module.state_dict()))


@pytest.mark.slow
def test_rank_reads_only_its_slices_of_its_experts(tmp_path: Path) -> None:
    moe("Mixtral").save_pretrained(tmp_path / "hf")
    saved = Checkpoint.open(tmp_path / "hf")
    values = matched(saved, dt.parallelize(moe("Mixtral"), dt.Mesh()), convert=False)
    stored = values["model.layers.1.mlp.experts.gate_up_proj"]
    for where in (((2, 4),), ((0, 24),), ((0, 16),)), (((2, 4),), ((0, 6), (12, 18)), ((0, 16),)):
        before = saved.bytes_read
        shard = read_shard(saved, stored.source, where, torch.float32)
        assert saved.bytes_read - before == shard.nbytes > 0


@pytest.mark.slow
def test_folder_without_all_experts_is_refused_and_ignored_names_are_not(tmp_path: Path) -> None:
    module = moe("DeepseekV3")
    safetensors = pytest.importorskip("safetensors.torch", reason=missing("safetensors"))
    module.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    full = safetensors.load_file(file)
    other = dt.parallelize(moe("DeepseekV3", seed=1), dt.Mesh())
    name = "model.layers.1.mlp.experts"
    for lacking, message in (
        (rf"{name}\.2\.", r"other shapes.*gate_up_proj: f32\[4,16,16\].*f32\[5,16,16\]"),
        (rf"{name}\.2\.up_proj", rf"{name}.gate_up_proj cannot be made of 9 .*complete"),
        (rf"{name}\.\d\.up_proj", rf"{name}.gate_up_proj cannot be made of 5 .*complete"),
        (rf"{name}\.\d\.", rf"other names.*only in the model: {name}.gate_up_proj"),
    ):
        safetensors.save_file({n: t for n, t in full.items() if not re.match(lacking, n)}, file)
        with pytest.raises(dt.PlanningError, match=rf"(?s){message}"):
            dt.load(tmp_path, other)
    stacked = {f"{name}.down_proj": torch.zeros(5, 16, 8)}
    safetensors.save_file({**full, **stacked}, file)
    with pytest.raises(dt.PlanningError, match=rf"only in the checkpoint: {name}.0.down_proj"):
        dt.load(tmp_path, other)
    next_token = {"model.layers.61.embed_tokens.weight": torch.zeros(37, 16)}
    safetensors.save_file({**full, **next_token}, file)
    dt.load(tmp_path, other)
    assert_same_bits(dict(other.module.state_dict()), dict(module.state_dict()))


@pytest.mark.slow
def test_state_of_experts_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    def run(ep: int, seed: int) -> tuple[Any, Any, Any]:
        model = dt.parallelize(moe("Mixtral", seed), dt.Mesh(ep=ep), EXPERTS)
        optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
        step = dt.train_step(
            model, lambda model, ids: model(input_ids=ids, labels=ids).loss, optimizer
        )
        return model, optimizer, step

    model, optimizer, step = run(3, 0)
    with dt.launch(model.mesh) as launch:
        step(TOKENS)
        dt.save(tmp_path / "1", model, optimizer)
        state = dt.gather_state_dict(model, optimizer)
        for ep in (2, 3):
            launch.switch(model, optimizer, dt.Mesh(ep=ep), EXPERTS)
            assert_same_bits(dt.gather_state_dict(model, optimizer), state)
        expected = float(step(TOKENS))
    for ep in (1, 2):
        model, optimizer, step = run(ep, 1)
        with dt.launch(model.mesh):
            dt.load(tmp_path / "1", model, optimizer)
            assert_same_bits(dt.gather_state_dict(model, optimizer), state)
            assert float(step(TOKENS)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_conversion_that_is_no_rearrangement_of_blocks_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = moe("Mixtral")
    from transformers import conversion_mapping as table
    from transformers.core_model_loading import Interleave, WeightConverter

    entry = WeightConverter("self_attn.q.weight", "self_attn.q_proj.weight", [Interleave(dim=0)])
    table.get_checkpoint_conversion_mapping("mixtral")  # makes the cache
    monkeypatch.setitem(table._checkpoint_conversion_mapping_cache, "MixtralForCausalLM", [entry])
    module.save_pretrained(tmp_path / "theirs")
    model = dt.parallelize(moe("Mixtral", seed=1), dt.Mesh())
    with pytest.raises(dt.PlanningError, match=r"(?s)0\.self_attn\.q_proj.*Interleave.*fix:"):
        dt.load(tmp_path / "theirs", model)
    fixed = type(module).from_pretrained(tmp_path / "theirs")
    fixed.save_pretrained(tmp_path / "fixed", save_original_format=False)
    dt.load(tmp_path / "fixed", model)
    assert_same_bits(dict(model.module.state_dict()), dict(module.state_dict()))
    dt.save(tmp_path / "ours", model, format="hf")  # under the model's own names
    again = type(module).from_pretrained(tmp_path / "ours")
    assert_same_bits(dict(again.state_dict()), dict(module.state_dict()))
