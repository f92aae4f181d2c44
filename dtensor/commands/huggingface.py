"""A model of Hugging Face's from its configuration alone; nothing is downloaded.

    config = configuration("llama", {"num_hidden_layers": 4})    # or a config.json, or its folder
    made = model_of(config, "llama", None, torch.bfloat16, meta=True)
    made.model, made.head                                        # a LlamaForCausalLM, "causal-lm"
    batch(config, made.head, rows=8, length=128, meta=True)      # input_ids, labels; in words

Invariants: of transformers only the auto configurations and the one modelling module are imported:
all of it takes many times as long. A field that the configuration does not have is refused, where
transformers would take any. Models of text and of pictures are known; for others, a function.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtensor.api.model.stating.patterns import nearest
from dtensor.errors import PlanningError

# The first of these that a type has is what it is for, unless its configuration says.
_HEADS: Mapping[str, str] = {
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
LENGTH = 128
_NEVER = "nothing is downloaded here"


@dataclass(frozen=True, slots=True, kw_only=True)
class FromConfiguration:
    """A model and which of `_HEADS` it is."""

    model: nn.Module
    head: str


def configuration(what: str, fields: Mapping[str, Any]) -> Any:
    """The configuration of a type, a file or a folder, with these fields set."""
    path = Path(what)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _read(file, fields)
    if path.is_dir():
        raise PlanningError(f"the folder {what} has no config.json.\nfix: give the file itself")
    if what.endswith(".json"):
        raise PlanningError(f"there is no file {what}; fix: the path of a config.json")
    auto = _auto()
    known = sorted(auto.CONFIG_MAPPING_NAMES)
    if what in known:
        return _default(auto, what, fields)
    if "/" in what:
        raise PlanningError(
            f"{what} is no file or folder here; if it is a model of the hub: {_NEVER}.\n"
            f"fix: give a folder with its config.json, which is a small file, or the model's "
            f"type, as llama or gpt2"
        )
    near = nearest(what, known) or nearest(what.replace("-", "").replace(".", "_").lower(), known)
    raise PlanningError(
        f"{what!r} is no model type of transformers, and no file.\n"
        f"fix: {', '.join(near) if near else 'gpt2, llama, ..., a config.json'}, or "
        f"module.py:function"
    )


def model_of(
    config: Any, what: str, head: str | None, dtype: torch.dtype | None, *, meta: bool
) -> FromConfiguration:
    """The model that the configuration, or ``head``, names; random numbers where not ``meta``."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.utils import logging

    logging.set_verbosity_error()
    if head is not None and head not in _HEADS:
        near = nearest(head, _HEADS)
        raise PlanningError(
            f"--head {head} is none; there are {', '.join(_HEADS)}.\n"
            f"fix: {near[0] if near else 'leave it out'}"
        )
    kind = config.model_type
    names = {each: getattr(modeling_auto, table).get(kind) for each, table in _HEADS.items()}
    named = (config.architectures or [None])[0]
    chosen = next(
        (
            each
            for each, cls in names.items()
            if cls is not None
            and (each == head if head is not None else named in (None, *_one(cls)))
        ),
        None,
    )
    if chosen is None:
        there = [each for each, cls in names.items() if cls is not None]
        wanted = f"--head {head}" if head is not None else str(named or "a training step")
        fix = f"--head {there[0]}, or " if there else ""
        raise PlanningError(
            f"{what}: of the type {kind} nothing is known here for {wanted}.\n"
            f"fix: {fix}module.py:function, which returns (model, loss_fn, *batch)"
        )
    (first, *_) = _one(names[chosen])
    module = model_type_to_module_name(kind)
    modelling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config.use_cache = False
    made_in = dtype or getattr(config, "dtype", None) or torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(made_in)
    try:
        with torch.device("meta") if meta else nullcontext():
            model = getattr(modelling, first)(config)
    except PlanningError:
        raise
    except Exception as error:
        raise PlanningError(
            f"{what}: {first} cannot be made of this configuration: {_plain(error)}.\n"
            f"fix: check the fields that --set changes"
        ) from error
    finally:
        torch.set_default_dtype(before)
    return FromConfiguration(model=model.train(), head=chosen)


def batch(
    config: Any, head: str, *, rows: int, length: int | None, meta: bool
) -> tuple[dict[str, Tensor], str]:
    """Random inputs with labels, and how many there are in words. ``length``: of a row of text;
    None: LENGTH, or as many positions as there are."""

    def ids(high: int, *shape: int) -> Tensor:
        if meta:
            return torch.empty(shape, dtype=torch.long, device="meta")
        return torch.randint(max(high, 1), shape)

    if head == "image-classification":
        side, channels = _first(config, "image_size", 224), _first(config, "num_channels", 3)
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        pixels = torch.empty if meta else torch.randn
        shape = (rows, channels, *sides[-2:])
        inputs = {"pixel_values": pixels(shape, device="meta" if meta else "cpu")}
        words = f"{rows} pictures of {' x '.join(map(str, sides[-2:]))}"
        return {**inputs, "labels": ids(config.num_labels, rows)}, words
    length = _length(config, length)
    vocab = _first(config, "vocab_size", None)
    if not isinstance(vocab, int):
        raise PlanningError(
            f"the type {config.model_type} states no vocab_size, and so is not of text alone.\n"
            f"fix: module.py:function, which returns (model, loss_fn, *batch)"
        )
    tensors = {"input_ids": ids(vocab, rows, length)}
    match head:
        case "sequence-classification":
            tensors["labels"] = ids(config.num_labels, rows)
        case "token-classification":
            tensors["labels"] = ids(config.num_labels, rows, length)
        case _:
            tensors["labels"] = ids(vocab, rows, length)
    return tensors, f"{rows} x {length} tokens"


# -- configurations --------------------------------------------------------------------------------


def _auto() -> Any:
    try:
        from transformers.models.auto import configuration_auto
    except ImportError as error:
        raise PlanningError(
            f"models by their type need transformers, which cannot be imported: {error}.\n"
            f"fix: pip install 'transformers>=5,<6', or module.py:function for a model of yours"
        ) from error
    return configuration_auto


def _read(file: Path, fields: Mapping[str, Any]) -> Any:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PlanningError(
            f"{file} cannot be read as JSON: {error}; fix: a config.json"
        ) from error
    kind = data.get("model_type") if isinstance(data, dict) else None
    auto = _auto()
    if not isinstance(kind, str) or kind not in auto.CONFIG_MAPPING_NAMES:
        near = nearest(str(kind), auto.CONFIG_MAPPING_NAMES)
        raise PlanningError(
            f"{file}: its model_type is {kind!r}, which this transformers does not know.\n"
            f"fix: {near[0] if near else 'a config.json of a known type'}; a model with code of "
            f"its own goes by module.py:function"
        )
    config = _made(auto, kind, data, str(file))
    if not fields:
        return config
    for name, value in fields.items():
        _set(data, _known(config, name), value)
    number = data.get("num_hidden_layers")
    kinds = data.get("layer_types")
    if isinstance(kinds, list) and isinstance(number, int) and len(kinds) > number:
        data["layer_types"] = kinds[:number]  # one for each layer
    return _made(auto, kind, data, str(file))


def _default(auto: Any, kind: str, fields: Mapping[str, Any]) -> Any:
    config = _made(auto, kind, {}, kind)
    if not fields:
        return config
    plain = {_known(config, name): value for name, value in fields.items() if "." not in name}
    head = _made(auto, kind, plain, kind)
    deep = {name: value for name, value in fields.items() if "." in name}
    if not deep:
        return head
    data = head.to_dict()
    for name, value in deep.items():
        _set(data, _known(config, name), value)
    return _made(auto, kind, data, kind)


def _made(auto: Any, kind: str, data: Mapping[str, Any], what: str) -> Any:
    cls = auto.CONFIG_MAPPING[kind]
    try:
        return cls.from_dict(dict(data))
    except Exception as error:  # of many classes, and of the hub's own kinds
        raise PlanningError(
            f"{what}: {_plain(error)}.\nfix: check the fields that --set changes"
        ) from error


def _known(config: Any, name: str) -> str:
    """The configuration's own name of a field, dots between nested ones. PlanningError for none."""
    first, dot, rest = name.partition(".")
    first = type(config).attribute_map.get(first, first)
    known = config.to_dict()
    if dot and isinstance(known.get(first), dict):
        return f"{first}.{_known(getattr(config, first), rest)}"
    if dot or first not in known:
        every = [*known, *type(config).attribute_map]
        near = nearest(name, every)
        raise PlanningError(
            f"--set {name}: a configuration of {config.model_type} has no such field.\n"
            f"fix: {', '.join(near) if near else ', '.join(sorted(every)[:12])}"
        )
    return first


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    first, dot, rest = name.partition(".")
    if dot:
        _set(data.setdefault(first, {}), rest, value)
    else:
        data[first] = value


def _length(config: Any, length: int | None) -> int:
    most = _first(config, "max_position_embeddings", None)
    known = isinstance(most, int) and most > 0
    if length is None:
        return min(LENGTH, most) if known else LENGTH
    if known and most < length:
        raise PlanningError(
            f"--length {length} is more than the {most} positions of {config.model_type}.\n"
            f"fix: --length {most}, or --set max_position_embeddings={length}"
        )
    return length


def _first(config: Any, name: str, default: Any) -> Any:
    """A field of the configuration, or of its part for text."""
    for part in (config, getattr(config, "text_config", None)):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _one(cls: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (cls,) if isinstance(cls, str) else tuple(cls)


def _plain(error: Exception) -> str:
    """The last line of what transformers says, which is the one that says it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")
