"""Small generative models and their placements, shared by the tests of `dt.generator`.

    model = build("llama")                      # 2 layers, 64 wide, 96 words, no dropout, eval
    placed("llama", "tp2pp2")                   # the same, parallelized
    by_transformers(model, prompts, 8)          # greedy tokens of transformers' own generate
    Writer()                                    # a GPT by the protocol of docs/generation.md

Weights are drawn from a wider range than usual, so that texts do not repeat one word.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.generation.generator import Generator
from dtensor.api.generation.requests import Generated
from dtensor.api.model.parallel import ParallelModule

FAMILIES = ("llama", "qwen3", "gpt2", "gemma2")
MESHES: Mapping[str, Mapping[str, int]] = {
    "single": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2pp2": {"pp": 2, "tp": 2},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "tp2cp2": {"tp": 2, "cp": 2},
}
VOCAB = 96
_STAGES = {
    "gpt2": [["*wte*", "*wpe*", "*.h.0.*"], ["*.h.1.*", "*ln_f*", "lm_head*"]],
    "": [["*embed*", "*layers.0.*"], ["*layers.1.*", "model.norm*", "lm_head*"]],
}
_MEGATRON = {
    "*.{q,k,v}_proj.weight": dict(tp=dt.Row(unit=16)),
    "*.o_proj.weight": dict(tp=dt.Column(unit=16)),
    "*.{gate,up}_proj.weight": dict(tp=dt.Row()),
    "*.down_proj.weight": dict(tp=dt.Column()),
}
_PLACEMENTS: dict[str, dict[str, dict[str, dt.Placement]]] = {
    "gpt2": {
        "*.c_attn.weight": dict(tp=dt.Column(blocks=3, unit=16)),
        "*.attn.c_proj.weight": dict(tp=dt.Row(unit=16)),
        "*.mlp.c_fc.weight": dict(tp=dt.Column()),
        "*.mlp.c_proj.weight": dict(tp=dt.Row()),
    },
    "llama": {**_MEGATRON, "lm_head.weight": dict(tp=dt.Row())},
    "": {**_MEGATRON},
}


def build(family: str, length: int = 128) -> nn.Module:
    """Return the model in eval mode, always with the same weights."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        initializer_range=0.15,
    )  # fmt: skip
    decoder: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=length, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    match family:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder)).eval()
        case "qwen3":
            return hf.Qwen3ForCausalLM(hf.Qwen3Config(**decoder)).eval()
        case "gemma2":  # one layer with a window, one without, and masks that are added
            return hf.Gemma2ForCausalLM(hf.Gemma2Config(**decoder, sliding_window=6)).eval()
        case "gpt2":
            config = hf.GPT2Config(n_positions=128, n_embd=64, n_layer=2, n_head=4, **sizes)
            return hf.GPT2LMHeadModel(config).eval()
        case "mixtral":
            experts = dict(num_local_experts=4, num_experts_per_tok=2)
            return hf.MixtralForCausalLM(hf.MixtralConfig(**decoder, **experts)).eval()
        case _:
            raise KeyError(family)


def placed(family: str, where: str, model: nn.Module | None = None) -> ParallelModule:
    axes = MESHES[where]
    pins = _PLACEMENTS.get(family, _PLACEMENTS[""]) if "tp" in axes else {}
    stages = {"pp": _STAGES.get(family, _STAGES[""])} if "pp" in axes else None
    attention = {"cp": "gather"} if "cp" in axes else None
    mesh = dt.Mesh(**axes)
    return dt.parallelize(model or build(family), mesh, pins, stages=stages, attention=attention)


def by_transformers(model: Any, prompts: Sequence[Sequence[int]], num: int) -> list[list[int]]:
    found: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        found.append(whole[0, len(prompt) :].tolist())
    return found


class Writer(nn.Module):
    """tokens [b t] -> logits [b t v]; with a cache, the tokens follow the cached ones at
    ``pos``."""

    def __init__(self, vocab: int = 32, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(WriterBlock(width, heads, n) for n in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, cache: Any = None, pos: Tensor | None = None) -> Tensor:
        if pos is None:
            pos = torch.arange(tokens.shape[1])[None]
        x = self.embed(tokens) + self.places(pos)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x)


class WriterBlock(nn.Module):
    def __init__(self, width: int, heads: int, number: int) -> None:
        super().__init__()
        self.heads, self.number = heads, number
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        b, t, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        if cache is not None:
            k, v = cache.update(self.number, k, v)
        y = self.attend(q, k, v, cache)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Any) -> Tensor:
        if cache is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask())


def writer() -> Writer:
    torch.manual_seed(0)
    model = Writer().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def greedy(model: Writer, prompt: Sequence[int], num: int) -> list[int]:
    """Generate without a cache: recompute the whole text for each token."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(num):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def random_requests(num: int, rng: random.Random, vocab: int) -> list[dict[str, Any]]:
    return [
        dict(
            prompt=[rng.randrange(vocab) for _ in range(rng.randint(1, 20))],
            max_new_tokens=rng.randint(1, 10),
            temperature=rng.choice([0, 0.7, 1.3]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            seed=number,
        )
        for number in range(num)
    ]


def alone(gen: Generator, asked: dict[str, Any]) -> Generated:
    request = gen.submit(**asked)
    while not request.done:
        gen.step()
    return request.generated()
