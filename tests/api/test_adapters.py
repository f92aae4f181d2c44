"""Low-rank adapters beside frozen weights: the weights keep the placements that they have without
adapters, each adapter follows the split of its weight, and training matches plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from tests.huggingface import batch, loss_fn
from tests.training import train_torch

if TYPE_CHECKING:
    from peft import LoraConfig

# peft still reads an attribute that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def qwen() -> nn.Module:
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=32,
        tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return hf.Qwen2ForCausalLM(config).train()


def config(targets: list[str], **options: Any) -> LoraConfig:
    from peft import LoraConfig  # here: it takes seconds to import

    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options)


def peft(targets: list[str], **options: Any) -> nn.Module:
    from peft import get_peft_model

    torch.manual_seed(1)
    return get_peft_model(qwen(), config(targets, **options))  # type: ignore[arg-type]


def two_adapters() -> nn.Module:
    model: Any = peft(ALL)
    model.add_adapter("other", config(["q_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "other"])
    return model


class Beside(nn.Module):
    """An adapter written by hand, whose output is added to that of a frozen layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, linear.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(linear.out_features, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 2.0 * (x @ self.down.t() @ self.up.t())


class Added(Beside):
    """An adapter written by hand that is added to the frozen weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight + 2.0 * (self.up @ self.down)
        return nn.functional.linear(x, weight, self.linear.bias)


def by_hand(kind: type[Beside]) -> nn.Module:
    model = qwen().requires_grad_(False)
    torch.manual_seed(1)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in ALL:
            assert isinstance(module, nn.Linear)
            model.set_submodule(name, kind(module))
    return model


def placements(model: nn.Module) -> dt.placements.Placements:
    ids, labels = batch()
    return dt.placements.for_model(model, (), dict(input_ids=ids, labels=labels), size=2)


def of_base(model: nn.Module) -> dict[str, Any]:
    """Return the placements of the base weights, under the names that they have without
    adapters."""
    plain = {f"{name}.weight" for name in ("model.embed_tokens", "lm_head")}
    plain |= {f"model.layers.*.self_attn.{n}.weight" for n in ALL[:4]}
    plain |= {f"model.layers.*.mlp.{n}.weight" for n in ALL[4:]}
    found: dict[str, Any] = {}
    for name, stated in placements(model).items():
        for extra in ("base_model.model.", ".base_layer", ".linear"):
            name = name.replace(extra, "", 1)
        found[name] = stated
    return {name: stated for name, stated in found.items() if name in plain}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "peft": lambda: peft(ALL),
    "peft of some": lambda: peft(["q_proj", "down_proj"]),
    "peft of tables": lambda: peft([*ALL, "embed_tokens", "lm_head"]),
    "two adapters": two_adapters,
    "by hand": lambda: by_hand(Beside),
    "added to the weight": lambda: by_hand(Added),
    "dora": lambda: peft(ALL, use_dora=True),
}
ids, labels = batch()


@pytest.mark.slow
@pytest.mark.sample("peft", "by hand")
@pytest.mark.parametrize("kind", KINDS)
def test_adapter_training_matches_torch_and_leaves_frozen_weights_unchanged(kind: str) -> None:
    plain, model = KINDS[kind](), KINDS[kind]()
    optimizer = torch.optim.AdamW(trained(plain), lr=1e-2)
    expected = train_torch(plain, optimizer, [(ids, labels)] * 3, loss=loss_fn)
    before = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    mesh = dt.Mesh(tp=2)
    parallel = dt.parallelize(model, mesh, placements(model))
    step = dt.train_step(parallel, loss_fn, torch.optim.AdamW(trained(model), lr=1e-2))
    with dt.launch(mesh):
        losses = [float(step(ids, labels)) for _ in range(3)]
        state = dt.gather_state_dict(parallel)["model"]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[2] < losses[0]
    assert before and all(torch.equal(state[name], value) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dora"])
def test_adapters_do_not_change_placements_of_base_weights(kind: str) -> None:
    """DoRA is an exception in one case: it takes norms of whole rows, so a weight that is split by
    columns stays replicated."""
    expected = dict(placements(qwen()))
    assert len(expected) == 9 and of_base(KINDS[kind]()) == expected


@pytest.mark.slow
def test_derived_adapter_placements_follow_split_of_adapted_weight() -> None:
    """For a column-parallel weight `lora_B` is split, for a row-parallel weight `lora_A`; the other
    adapter of the pair is replicated."""
    found = placements(peft(["q_proj", "o_proj"]))
    at = "base_model.model.model.layers.*.self_attn."
    assert found[f"{at}q_proj.lora_B.default.weight"] == dict(tp=dt.Row())
    assert found[f"{at}o_proj.lora_A.default.weight"] == dict(tp=dt.Shard(1))
    whole = {f"{at}q_proj.lora_A.default.weight", f"{at}o_proj.lora_B.default.weight"}
    assert whole.isdisjoint(found) and whole <= set(found.reasons)
    assert found.reasons[f"{at}q_proj.lora_A.default.weight"] == (
        "it adapts base_layer, and fits its split"
    )


class Narrow(nn.Module):
    """A hidden layer that is narrower than its input and output, but no adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.down, self.up = (nn.Linear(*s) for s in ((16, 16), (16, 4), (4, 16)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.whole(x).softmax(-1)
        return self.up(torch.relu(self.down(x))).softmax(-1)


def test_for_model_splits_layer_with_narrow_hidden_dim() -> None:
    found = dt.placements.for_model(Narrow(), (torch.randn(3, 16),), size=2)
    assert found == {"down.weight": dict(tp=dt.Row()), "up.weight": dict(tp=dt.Shard(1))}
