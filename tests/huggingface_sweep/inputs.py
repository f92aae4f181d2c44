"""One batch for a model, derived from the parameter names of its forward and its configuration.

    batch(model, head)     # {"input_ids": i64[2, 12], "labels": i64[2, 12]}

The batch has the model's main input, the required arguments of forward, and labels if forward takes
them. The same model gives the same batch. Models of text and images get only text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

BATCH, TIME, SAMPLES, MEL_FRAMES = 3, 12, 2000, 64
TEXT = (
    "CausalLM",
    "Seq2SeqLM",
    "MaskedLM",
    "ImageTextToText",
    "MultimodalLM",
    "PreTraining",
    "SpeechSeq2Seq",
    "TokenClassification",
)
CLASSES = (
    "ImageClassification",
    "VideoClassification",
    "AudioClassification",
    "SequenceClassification",
)


_MORE = ("input_ids", "bbox", "pixel_values", "input_features")


class NoInput(Exception):
    """Raised if forward has a required argument that no name here stands for."""


def batches(model: nn.Module, head: str) -> Iterator[dict[str, Tensor]]:
    """Yield batches to try: with and without labels; with spectra and images in the other
    layout."""
    labels = _labels(model, head)
    names = inspect.signature(model.forward).parameters
    seen: list[dict[str, Tensor]] = []
    for other, more in ((False, False), (False, True), (True, False), (True, True)):
        plain = _inputs(model, other)
        if more:
            added = [n for n in _MORE if n in names and n not in plain]
            plain |= {n: _input(n, model, other) for n in added}
        if any(_equal(plain, s) for s in seen):
            continue
        seen.append(plain)
        if labels is not None:
            yield {**plain, "labels": labels}
        yield plain
        if "decoder_input_ids" in names and "decoder_input_ids" not in plain:
            yield {**plain, "decoder_input_ids": _ids(model.config)}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def fields(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Return the configuration and its nested configurations."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from fields(value)


def field(config: PreTrainedConfig, *names: str) -> Any:
    """Return the first of these fields that is set, here or in a nested configuration."""
    for part in fields(config):
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return None


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _ids(config: PreTrainedConfig, time: int = TIME) -> Tensor:
    """Return random ids without those that have a special meaning for the model."""
    vocab = field(config, "vocab_size", "text_vocab_size", "src_vocab_size") or 32
    special = set()
    for part in fields(config):
        for name, value in vars(part).items():
            if "token_i" in name:
                special |= set(value if isinstance(value, (list, tuple)) else [value])
    usual = torch.tensor([i for i in range(vocab) if i not in special])
    return usual[torch.randint(len(usual), (BATCH, time), generator=_generator())]


def _labels(model: nn.Module, head: str) -> Tensor | None:
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    if head in CLASSES:
        return torch.arange(BATCH) % model.config.num_labels
    if head == "TokenClassification":
        return _ids(model.config) % model.config.num_labels
    if head == "CTC":
        return _ids(model.config, 4).clamp(min=1)
    return _ids(model.config) if head in TEXT else None


def _inputs(model: nn.Module, other: bool) -> dict[str, Tensor]:
    parameters = inspect.signature(model.forward).parameters
    found: dict[str, Tensor] = {}
    main = model.main_input_name
    if main in parameters:
        found[main] = _input(main, model, other)
    for name, p in parameters.items():
        plain = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if name not in found and plain and p.default is p.empty:
            found[name] = _input(name, model, other)
    if not found:
        raise NoInput(f"no name of an input: {main}")
    return found


def _input(name: str, model: nn.Module, other: bool) -> Tensor:
    """``other``: spectra with time before frequency; videos in place of images, or vice versa."""
    config, g = model.config, _generator()
    image = field(config, "image_size", "img_size", "input_size") or 64
    sides = tuple(image) if isinstance(image, (list, tuple)) else (image, image)
    channels = field(config, "num_channels", "in_channels", "in_chans") or 3
    match name:
        case "input_ids" | "decoder_input_ids" | "context_input_ids":
            return _ids(config)
        case "pixel_values" | "images" | "pixel_values_videos":
            frames = field(config, "num_frames", "frames_per_clip")
            film = (frames is not None or name == "pixel_values_videos") != other
            shape = (BATCH, frames or 4) if film else (BATCH,)
            return torch.randn(*shape, channels, *sides[-2:], generator=g)
        case "input_values" | "audio_values" | "waveform" if not field(config, "num_mel_bins"):
            channel = (
                () if not field(config, "audio_channels") else (field(config, "audio_channels"),)
            )
            return torch.randn(BATCH, *channel, SAMPLES, generator=g)
        case "input_features" | "input_values" | "audio_features":
            bins = (
                field(config, "num_mel_bins", "input_feat_size", "input_dim", "feature_size") or 80
            )
            halved = field(config, "max_source_positions")  # by the convolutions before them
            frames = 2 * halved if halved else min(field(config, "max_length") or 64, MEL_FRAMES)
            shape = (BATCH, frames, bins) if other else (BATCH, bins, frames)
            return torch.randn(*shape, generator=g)
        case "attention_mask" | "decoder_attention_mask" | "input_features_mask":
            return torch.ones(BATCH, TIME, dtype=torch.long)
        case "bbox":
            low = torch.randint(0, 20, (BATCH, TIME, 2), generator=g)
            return torch.cat([low, low + 5], -1)
        case "inputs_embeds" | "hidden_states" | "x" | "encoder_hidden_states":
            return torch.randn(BATCH, TIME, field(config, "hidden_size", "d_model"), generator=g)
        case "past_values":
            time = field(config, "context_length", "prediction_length") or 32
            return torch.randn(BATCH, time, field(config, "num_input_channels") or 1, generator=g)
        case _:
            raise NoInput(f"forward needs {name}, for which there is no generic input")
