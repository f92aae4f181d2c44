"""GPT-2, Llama and BERT of Hugging Face, unmodified, under derived placements.

Loss and gradients match plain torch under every placement, Ray is bitwise equal to in-process, and
the collectives are those of Megatron's layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import dtensor as dt
from tests.extras import missing
from tests.plans import kinds
from tests.training import assert_same_bits

pytest.importorskip("transformers", reason=missing("transformers"))

from tests.huggingface import MODELS, STAGES, batch, build, derived, loss_fn, reference

MESHES: dict[str, dict[str, int]] = {
    "tp2": dict(tp=2),
    "dp2": dict(dp=2),
    "tp3": dict(tp=3),
    "dp2_tp2": dict(dp=2, tp=2),
    "pp2_tp2": dict(pp=2, tp=2),
    "zero3": dict(dp=2),
}


def make_step(name: str, mesh: str, fn: Callable[..., Tensor] = loss_fn) -> dt.TrainStep:
    model, axes = build(name), MESHES[mesh]
    tp = axes.get("tp")
    placed = dt.parallelize(
        model,
        dt.Mesh(**axes),
        derived(name, tp) if tp else {},
        stages=STAGES[name] if "pp" in axes else None,
        zero=dict(dp=3) if mesh == "zero3" else None,
    )
    return dt.train_step(
        placed,
        fn,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        inputs=dict(dp=dt.Row()) if "dp" in axes else None,
        schedule=dt.OneFOneB(microbatches=2 if "pp" in axes else 1),
    )


def outcome(name: str, mesh: str, **launch: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of one step and its gradients."""
    step = make_step(name, mesh)
    with dt.launch(step.model.mesh, **launch):
        found = step.gradients(*batch())
        loss = float(step(*batch()))
        dt.gather_state_dict(step.model, step.optimizer)
    return loss, found


def is_zero(name: str) -> bool:
    """Whether the exact gradient is zero: a bias of the keys shifts each row of scores equally,
    which softmax ignores. Its computed gradient is only rounding error, without a scale."""
    return name.endswith("attention.self.key.bias")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_loss_and_gradients_match_torch(name: str, mesh: str) -> None:
    loss, found = outcome(name, mesh)
    expected_loss, expected = reference(name)
    assert loss == pytest.approx(expected_loss, abs=2e-6)
    assert set(found) == set(expected)
    for parameter, gradient in expected.items():
        scale = gradient.abs().max().item()
        if is_zero(parameter):
            scale = expected[parameter.replace("key", "query")].abs().max().item()
            assert gradient.abs().max() < 1e-6 * scale
        error = (found[parameter] - gradient).abs().max().item()
        assert error <= 1e-5 * scale, f"{parameter}: {error:.3e} of {scale:.3e}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_collectives_are_megatrons(name: str) -> None:
    """Forward: one all-reduce for each row-parallel product, the embedding, and three numbers per
    token of the cross entropy over the split vocabulary. Backward: one for the input of each pair
    of layers and of the cross entropy."""
    plan = make_step(name, "tp2").plan(*batch())
    layers, pairs = 2, 2
    forward = layers * pairs + 1 + 1
    assert kinds(plan, "forward") == Counter({"all_reduce@tp": forward})
    assert kinds(plan, "backward") == Counter({"all_reduce@tp": layers * pairs + 1})
    assert kinds(plan, "optimizer") == Counter()


@pytest.mark.default("gpt2")
@pytest.mark.parametrize("name", MODELS)
def test_one_value_is_transferred_between_stages_in_each_direction(name: str) -> None:
    plan = make_step(name, "pp2_tp2").plan(*batch())
    crossing = [c for c in plan.collectives if c.kind == "transfer"]
    assert [c.phase for c in crossing] == ["forward", "backward"]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "mesh"), [("gpt2", "tp2"), ("llama", "zero3"), ("bert", "pp2_tp2")]
)
def test_hugging_face_on_ray_is_bitwise_equal_to_in_process(
    name: str, mesh: str, ray_session: None
) -> None:
    expected_loss, expected = outcome(name, mesh)
    loss, found = outcome(name, mesh, backend="ray")
    assert loss == expected_loss
    assert_same_bits(found, expected)


# -- padding ---------------------------------------------------------------------------------------


def padded_loss(model: nn.Module, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the loss without the positions of padding, whose queries attend to nothing."""
    seen = labels.masked_fill(mask == 0, -100)
    return model(input_ids=ids, attention_mask=mask, labels=seen).loss


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "dp2_tp2", "pp2_tp2", "zero3"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_attention_is_one_op_and_matches_torch(name: str, mesh: str) -> None:
    """With padding on the left and on the right; attention with a mask is split in the same way as
    without."""
    ids, labels = batch()
    mask = torch.ones_like(ids)
    mask[0, 9:] = mask[1, :5] = mask[-1, 1:] = 0
    model = build(name)
    expected_loss = padded_loss(model, ids, labels, mask)
    expected_loss.backward()
    step = make_step(name, mesh, padded_loss)
    plan = step.plan(ids, labels, mask)
    words = plan.recognised().split()
    assert "dt.attention" in words and not {"dt.attention_masked", "written"} & {*words}
    with dt.launch(step.model.mesh):
        found = step.gradients(ids, labels, mask)
        loss = float(step(ids, labels, mask))
    assert loss == pytest.approx(expected_loss.item(), abs=2e-6)
    if mesh == "tp2":
        plain = make_step(name, mesh).plan(*batch())
        assert kinds(plan, "backward") == kinds(plain, "backward")
        assert kinds(plan, "forward") == kinds(plain, "forward")
    for parameter, weight in model.named_parameters():
        assert weight.grad is not None
        scale = weight.grad.abs().max().item()
        if is_zero(parameter):
            scale = 1.0
        error = (found[parameter] - weight.grad).abs().max().item()
        assert error <= 1e-5 * scale, f"{parameter}: {error:.3e} of {scale:.3e}"


# -- what is derived -------------------------------------------------------------------------------


def test_derived_gpt2_placements_text() -> None:
    assert_expected_inline(
        str(derived("gpt2", None)),
        """\
{
    # column: 8 heads, 8 wide, each attended alone; 3 projections in one
    "transformer.h.*.attn.c_attn.weight": dict(tp=dt.Column(blocks=3, unit=8)),
    # row: it contracts the dim that c_attn splits
    "transformer.h.*.attn.c_proj.weight": dict(tp=dt.Row(unit=8)),
    # column: elementwise ops lead to c_proj
    "transformer.h.*.mlp.c_fc.weight": dict(tp=dt.Column()),
    # row: it contracts the dim that c_fc splits
    "transformer.h.*.mlp.c_proj.weight": dict(tp=dt.Row()),
    # vocabulary: the loss is computed on its parts, and the embedding reads it by its rows
    "transformer.wte.weight": dict(tp=dt.Row()),
    # whole: transformer.wpe.weight
    #   a table whose rows are not chosen by an argument
}""",
    )


def test_derived_llama_placements_text_for_three_ranks() -> None:
    assert_expected_inline(
        str(derived("llama", 3)),
        """\
{
    # vocabulary: rows of other ranks give zeros, and one sum joins them
    "model.embed_tokens.weight": dict(tp=dt.Row()),
    # column: 8 heads, 8 wide, each attended alone
    "model.layers.*.self_attn.q_proj.weight": dict(tp=dt.Row(unit=8)),
    # row: it contracts the dim that q_proj splits
    "model.layers.*.self_attn.o_proj.weight": dict(tp=dt.Column(unit=8)),
    # column with up_proj: elementwise ops lead to down_proj
    "model.layers.*.mlp.gate_proj.weight": dict(tp=dt.Row()),
    # column with gate_proj: elementwise ops lead to down_proj
    "model.layers.*.mlp.up_proj.weight": dict(tp=dt.Row()),
    # row: it contracts the dim that gate_proj and up_proj split
    "model.layers.*.mlp.down_proj.weight": dict(tp=dt.Column()),
    # vocabulary: the loss is computed on its parts
    "lm_head.weight": dict(tp=dt.Row()),
    # whole: model.layers.*.self_attn.k_proj.weight
    #   each rank has all 4 heads, and takes those of its query heads
    # whole: model.layers.*.self_attn.v_proj.weight
    #   each rank has all 4 heads, and takes those of its query heads
}""",
    )


def test_derived_llama_placements_replicate_kv_if_fewer_heads_than_ranks() -> None:
    placements = derived("llama", 8)
    attention = {pattern for pattern in placements if "attn" in pattern}
    assert attention == {f"model.layers.*.self_attn.{name}_proj.weight" for name in "qo"}
    assert placements.reasons["model.layers.*.self_attn.k_proj.weight"] == (
        "each rank has all 4 heads, and takes those of its query heads"
    )
    assert [pattern for pattern in derived("llama", 4) if "k_proj" in pattern]


def test_derived_bert_placements_text() -> None:
    text = re.sub(r" \(modeling_bert.py:\d+\)", "", str(derived("bert", 2)))
    assert_expected_inline(
        text,
        """\
{
    # column with key and value: 8 heads, 8 wide, each attended alone
    "bert.encoder.layer.*.attention.self.query.weight": dict(tp=dt.Row()),
    # column with query and value: 8 heads, 8 wide, each attended alone
    "bert.encoder.layer.*.attention.self.key.weight": dict(tp=dt.Row()),
    # column with query and key: 8 heads, 8 wide, each attended alone
    "bert.encoder.layer.*.attention.self.value.weight": dict(tp=dt.Row()),
    # row: it contracts the dim that self.query and self.key and self.value split
    "bert.encoder.layer.*.attention.output.dense.weight": dict(tp=dt.Column()),
    # column: elementwise ops lead to output.dense
    "bert.encoder.layer.*.intermediate.dense.weight": dict(tp=dt.Row()),
    # row: it contracts the dim that intermediate.dense splits
    "bert.encoder.layer.{0..1}.output.dense.weight": dict(tp=dt.Column()),
    # vocabulary: the loss is computed on its parts, and the embedding reads it by its rows
    "bert.embeddings.word_embeddings.weight": dict(tp=dt.Row()),
    # whole: bert.embeddings.position_embeddings.weight
    #   a table whose rows are not chosen by an argument
    # whole: bert.embeddings.token_type_embeddings.weight
    #   a table whose rows are not chosen by an argument
    # whole: cls.predictions.transform.dense.weight
    #   aten.native_layer_norm.default cannot split its output dim
}""",
    )


def test_conv1d_and_linear_layers_take_same_roles() -> None:
    """GPT-2's Conv1D weights are (in, out), Llama's Linear weights (out, in)."""
    stated: dict[str, dict[str, Any]] = {
        "gpt2": {
            "*.c_attn": dict(tp=dt.ColumnParallel(blocks=3)),
            "*.c_fc": dict(tp=dt.ColumnParallel()),
            "*.c_proj": dict(tp=dt.RowParallel()),
            "*.wte": dict(tp=dt.RowParallel()),
        },
        "llama": {
            "*.{q,k,v,gate,up}_proj": dict(tp=dt.ColumnParallel()),
            "*.{o,down}_proj": dict(tp=dt.RowParallel()),
            "*.embed_tokens": dict(tp=dt.RowParallel()),
            "lm_head": dict(tp=dt.ColumnParallel()),
        },
    }
    for name, roles in stated.items():
        model = build(name)
        placed = dt.parallelize(model, dt.Mesh(tp=2), roles)
        step = dt.train_step(placed, loss_fn, torch.optim.AdamW(model.parameters()))
        expected = make_step(name, "tp2").plan(*batch())
        found = step.plan(*batch())
        assert [str(c) for c in found.collectives] == [str(c) for c in expected.collectives]
        assert {i.label: i.spec for i in found.inputs} == {i.label: i.spec for i in expected.inputs}
