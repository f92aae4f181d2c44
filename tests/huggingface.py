"""Small Hugging Face models with random weights; nothing is downloaded.

model = build("llama")              # 2 layers, 64 wide, 8 heads in 4 groups, 96 words
loss_fn(model, ids, labels)         # the model's own loss
derived("llama", 2)                 # dt.placements.for_model, cached by size
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import dtensor as dt

MODELS = ("gpt2", "llama", "bert")
VOCAB, WIDTH, HEADS, TIME = 96, 64, 8, 16
STAGES: dict[str, Mapping[str, Sequence[Sequence[str]]]] = {
    "gpt2": {"pp": [["*wte*", "*wpe*", "*.h.0.*"], ["*.h.1.*", "*ln_f*", "lm_head*"]]},
    "llama": {"pp": [["*embed*", "*layers.0.*"], ["*layers.1.*", "model.norm*", "lm_head*"]]},
    "bert": {"pp": [["*embeddings*", "*layer.0.*"], ["*layer.1.*", "cls*"]]},
}


def build(name: str) -> nn.Module:
    """Return the model in training mode without dropout, always with the same weights."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    sizes = dict(vocab_size=VOCAB, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    match name:
        case "gpt2":
            config = hf.GPT2Config(
                n_positions=32, n_embd=WIDTH, n_layer=2, n_head=HEADS,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes,
            )  # fmt: skip
            return hf.GPT2LMHeadModel(config).train()
        case "llama":
            config = hf.LlamaConfig(
                hidden_size=WIDTH, intermediate_size=160, num_hidden_layers=2,
                num_attention_heads=HEADS, num_key_value_heads=4, max_position_embeddings=32,
                **sizes,
            )  # fmt: skip
            return hf.LlamaForCausalLM(config).train()
        case "bert":
            config = hf.BertConfig(
                hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=HEADS, max_position_embeddings=32,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes,
            )  # fmt: skip
            return hf.BertForMaskedLM(config).train()
        case _:
            raise KeyError(name)


def loss_fn(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels).loss


def batch() -> tuple[Tensor, Tensor]:
    """Return four rows; the first two contain ignored targets."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCAB, (2, 4, TIME), generator=generator)
    labels = labels.clone()
    labels[0, :5] = labels[1, 7:9] = -100
    return ids, labels


@functools.cache
def derived(name: str, size: int | None) -> dt.placements.Placements:
    ids, labels = batch()
    return dt.placements.for_model(build(name), (), dict(input_ids=ids, labels=labels), size=size)


@functools.cache
def reference(name: str) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of plain torch."""
    model = build(name)
    loss = loss_fn(model, *batch())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
