"""A small configuration of any family, made by the names of its fields.

    config = small(CONFIG_MAPPING["mixtral"])
    config.hidden_size, config.num_hidden_layers, config.num_local_experts    # 64, 2, 4

Numbers of the default configuration, and of nested ones, are replaced by smaller ones if the
field's name tells what they are (a width, a number of layers, token ids, ...). The class is called
again with these, so that it derives the other fields. Fields with "drop", "jitter" or
"mask_..._prob" become 0, so that results can be compared. No family is named here, and nothing is
downloaded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from transformers import PreTrainedConfig

LAYERS, HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCAB, POSITIONS, IMAGE = (
    2,
    4,
    2,
    16,
    64,
    128,
    128,
    64,
    64,
)
"""What a large configuration is cut down to; what is smaller stays."""


def _most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def _same(value: int) -> int:
    return value


# The first pattern that is found in a field's name says what becomes of a positive number.
_NUMBERS: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"num_feat_extract_layers|num_encoder_blocks|num_stages|stage_num", _same),
    (r"_interval$|_period$|every_n", _most(LAYERS)),
    (r"first_k_dense_replace|num_dense_layers", _most(1)),
    (r"num_kv_shared_layers|num_nextn_predict|insert_layer|_layer_offset", lambda _: 0),
    (r"max_window_layers|layer_(start|end)_index", _most(1)),
    (r"layer_group_size|(attn|expert)_every|sparse_step", _most(LAYERS)),
    (r"layers$|n_layer$|_layer$|depth$|num_blocks$|block_per_row", _most(LAYERS)),
    (r"hidden_groups|self_attends", _most(LAYERS)),
    (r"heads$|n_head$|n_heads$", _most(HEADS)),
    (r"rope_head_dim|rotary_dim|head_rope", _most(HEAD // 2)),
    (r"head_dim|d_head|d_kv|dim_head|head_size|kv_channels|qk_dim|head_width", _most(HEAD)),
    (r"per_tok|top_?k$|index_topk", _most(2)),
    (r"n_group$|topk_group|expert_group|mamba_n_groups", lambda _: 1),
    (r"shared_experts?$", _most(1)),
    (r"experts?$|zero_expert", _most(4)),
    (r"vocab|num_embeddings|codebook_size|hash_buckets", _most(VOCAB)),
    (r"lora_rank|_rank$|dt_rank|time_step_rank", _most(HEAD)),
    (r"position_buckets|num_buckets|max_distance|_bins$", _same),
    (r"position|n_ctx|context_len|max_seq_len|max_length|model_max", _most(POSITIONS)),
    (r"intermediate|ffn|_ff$|dff$|inner|mlp_(dim|hidden)", _most(INNER)),
    (r"feed_?forward|dim_ff|linear_units", _most(INNER)),
    (r"window_size", _most(2)),
    (r"sliding|attention_window|local_attention|chunk_size|window_len|block_size", _most(8)),
    (r"image_size|img_size", _most(IMAGE)),
    (r"patch_size", _most(8)),
    (r"num_frames", _most(4)),
    (r"num_queries|num_proposals|num_denoising|num_latents|query_tokens|latent_query", _most(8)),
    (r"mel_bins|sampling_rate|sample_rate|kernel|stride|_tokens$|token_id|_index$", _same),
    (
        r"hidden|d_model|n_embd|embed|width|dim$|_size$|channels|features?$|d_latents|n_inner|"
        r"num_filters|filters$|units$|_planes$|groups$",
        _most(HIDDEN),
    ),
)  # fmt: skip
_LISTS: tuple[tuple[str, Callable[[Sequence[int]], list[int]]], ...] = (
    (r"index|indices|idxs|layer_ids|hook_ids", lambda v: sorted({min(x, LAYERS - 1) for x in v})),
    (r"depths|blocks|layers$|repeats|^depth$|numb_of", lambda v: [min(x, 1) for x in v]),
    (r"block_sizes", lambda v: [min(x, 1) for x in v]),
    (r"heads", lambda v: [min(x, 2) for x in v]),
    (r"image_size|img_size", lambda v: [min(x, IMAGE) for x in v]),
    (r"hidden|dims?$|channels|embed|width|filters", lambda v: [min(x, 32) for x in v]),
    (r"window", lambda v: [min(x, 2) for x in v]),
    (r"patch_size", lambda v: [min(x, 8) for x in v]),
)  # fmt: skip
_GROUPS = r"kv_heads|key_value_heads|value_groups"
_TOKEN = r"token_id$|token_index$|^(boi|eoi|boa|eoa)_|_token$"
_RANDOM = r"drop|jitter|mask_(time|feature)_prob|noise_std"

_COMMON = ("pad_token_id", "bos_token_id", "eos_token_id")
How = Literal["declared", "derived", "layers"]
HOW: tuple[How, ...] = ("declared", "derived", "layers")


def small(cls: type[PreTrainedConfig], how: How) -> PreTrainedConfig:
    """Return a small configuration of the class. ``how``: which fields change: those with their own
    default, also those that the class derives, or only layers and tokens."""
    ids = iter(range(VOCAB - 1, 0, -1))  # of tokens beyond the vocabulary, each another
    return cls(**_changed(cls(), how, ids))


def _changed(config: PreTrainedConfig, how: How, ids: Iterator[int]) -> dict[str, Any]:
    """Return the arguments that make ``config`` small."""
    changed: dict[str, Any] = {}
    narrow = how != "layers"
    common = {f.name for f in dataclasses.fields(PreTrainedConfig)} - set(_COMMON)
    for declared in dataclasses.fields(config):
        name, value = declared.name, vars(config).get(declared.name)
        if name in common:
            continue
        if declared.default is None and how != "derived" and type(value) is int:
            continue
        match value:
            case PreTrainedConfig():
                changed[name] = type(value)(**_changed(value, how, ids))
            case bool() | None:
                if name == "apply_spec_augment":
                    changed[name] = False
            case dict() if narrow and "mrope_section" in value:
                half, parts = HEAD // 2, len(value["mrope_section"])
                sections = [half - (parts - 1) * (half // 4), *[half // 4] * (parts - 1)]
                changed[name] = {**value, "mrope_section": sections}
            case float() | int() if re.search(_RANDOM, name):
                changed[name] = type(value)(0)
            case int() if re.search(_TOKEN, name):
                changed[name] = next(ids) if value >= VOCAB else value
            case int() if value > 0 and re.search(_GROUPS, name):
                # as many as heads where every head has its own
                alone = value in (vars(config).get(n) for n in ("num_attention_heads", "num_heads"))
                if narrow:
                    changed[name] = min(value, HEADS if alone else GROUPS)
            case int() if value > 0:
                changed[name] = _number(name, value, narrow)
            case [int(), *_] if re.search(_TOKEN, name):
                changed[name] = [next(ids) if v >= VOCAB else v for v in value]
            case [*_] if value and all(type(v) is int for v in value):
                change = next((f for p, f in _LISTS if re.search(p, name)), None)
                if change is not None and (narrow or "layers" in name):
                    changed[name] = type(value)(change(value))
            case _:
                pass
    return {
        k: v for k, v in changed.items() if isinstance(v, PreTrainedConfig) or v != vars(config)[k]
    }


_ALWAYS = re.compile(
    r"layers$|n_layer$|vocab|experts?$|image_size|first_k_dense|num_frames|kv_shared|insert_layer"
)


def _number(name: str, value: int, narrow: bool) -> int:
    if not narrow and not _ALWAYS.search(name):
        return value
    return next((change(value) for p, change in _NUMBERS if re.search(p, name)), value)
