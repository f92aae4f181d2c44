"""Makes a Hugging Face model and a batch from a configuration, without a download.

    config = configuration("llama", {"num_hidden_layers": 4})    # or a config.json, or its folder
    model, head = model_of(config, "llama", None, torch.bfloat16, meta=True)
    model, head                                                  # a LlamaForCausalLM, "causal-lm"
    random_batch(config, head, rows=8, length=128, meta=True)    # input_ids and labels, and a text

Models of text and of images are supported. Only the auto configurations and the modelling module of
the model are imported; importing all of transformers takes many times as long. A field that the
configuration does not have is an error; transformers would accept it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtensor.api.model.stating.patterns import nearest
from dtensor.errors import PlanningError

_HEADS: Mapping[str, str] = {
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
"""For each head, the table of transformers that has its class for each model type. The default head
is the first head that the model type has, unless the configuration names an architecture."""
LENGTH = 128


def configuration(model: str, fields: Mapping[str, Any]) -> Any:
    """Return the configuration of a model type, a file or a folder, with these fields set."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _read(file, fields)
    if path.is_dir():
        raise PlanningError(f"the folder {model} has no config.json.\nfix: give the file itself")
    if model.endswith(".json"):
        raise PlanningError(f"there is no file {model}; fix: the path of a config.json")
    auto = _import_auto()
    types = sorted(auto.CONFIG_MAPPING_NAMES)
    if model in types:
        return _default(auto, model, fields)
    if "/" in model:
        raise PlanningError(
            f"{model} is no file or folder here; if it is a model of the hub: nothing is "
            f"downloaded here.\n"
            f"fix: give a folder with its config.json, which is a small file, or the model's "
            f"type, as llama or gpt2"
        )
    near = nearest(model, types) or nearest(model.replace("-", "").replace(".", "_").lower(), types)
    raise PlanningError(
        f"{model!r} is no model type of transformers, and no file.\n"
        f"fix: {', '.join(near) if near else 'gpt2, llama, ..., a config.json'}, or "
        f"module.py:function"
    )


def model_of(
    config: Any, name: str, head: str | None, dtype: torch.dtype | None, *, meta: bool
) -> tuple[nn.Module, str]:
    """Return the model of the configuration, with random parameters unless ``meta``, and its head.

    ``name``: the model in error messages; ``head``: None for the head of the configuration's
    architecture, or else the default of the model type.
    """
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
    model_type = config.model_type
    classes: dict[str, tuple[str, ...]] = {}  # by head; the first class of a head is its usual one
    for each, table in _HEADS.items():
        cls = getattr(modeling_auto, table).get(model_type)
        if cls is not None:
            classes[each] = (cls,) if isinstance(cls, str) else tuple(cls)
    architecture = (config.architectures or [None])[0]
    chosen = next(
        (
            each
            for each, names in classes.items()
            if (each == head if head is not None else architecture in (None, *names))
        ),
        None,
    )
    if chosen is None:
        wanted = f"--head {head}" if head is not None else str(architecture or "a training step")
        fix = f"--head {next(iter(classes))}, or " if classes else ""
        raise PlanningError(
            f"{name}: of the type {model_type} nothing is known here for {wanted}.\n"
            f"fix: {fix}module.py:function, which returns (model, loss_fn, *batch)"
        )
    class_name = classes[chosen][0]
    module = model_type_to_module_name(model_type)
    modelling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config.use_cache = False
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype or getattr(config, "dtype", None) or torch.float32)
    try:
        with torch.device("meta") if meta else nullcontext():
            model = getattr(modelling, class_name)(config)
    except PlanningError:
        raise
    except Exception as error:
        raise PlanningError(
            f"{name}: {class_name} cannot be made of this configuration: {_last_line(error)}.\n"
            f"fix: check the fields that --set changes"
        ) from error
    finally:
        torch.set_default_dtype(previous_dtype)
    return model.train(), chosen


def random_batch(
    config: Any, head: str, *, rows: int, length: int | None, meta: bool
) -> tuple[dict[str, Tensor], str]:
    """Return random inputs with labels, and a text about their size. ``length``: the tokens of a
    row; None: `LENGTH`, or the number of positions of the model if that is less."""

    def random_ids(high: int, *shape: int) -> Tensor:
        if meta:
            return torch.empty(shape, dtype=torch.long, device="meta")
        return torch.randint(max(high, 1), shape)

    if head == "image-classification":
        size, channels = _field(config, "image_size", 224), _field(config, "num_channels", 3)
        height, width = tuple(size)[-2:] if isinstance(size, list | tuple) else (size, size)
        make = torch.empty if meta else torch.randn
        pixels = make((rows, channels, height, width), device="meta" if meta else "cpu")
        inputs = {"pixel_values": pixels, "labels": random_ids(config.num_labels, rows)}
        return inputs, f"{rows} pictures of {height} x {width}"
    length = _length(config, length)
    vocab = _field(config, "vocab_size", None)
    if not isinstance(vocab, int):
        raise PlanningError(
            f"the type {config.model_type} states no vocab_size, and so is not of text alone.\n"
            f"fix: module.py:function, which returns (model, loss_fn, *batch)"
        )
    inputs = {"input_ids": random_ids(vocab, rows, length)}
    match head:
        case "sequence-classification":
            inputs["labels"] = random_ids(config.num_labels, rows)
        case "token-classification":
            inputs["labels"] = random_ids(config.num_labels, rows, length)
        case _:
            inputs["labels"] = random_ids(vocab, rows, length)
    return inputs, f"{rows} x {length} tokens"


# -- configurations --------------------------------------------------------------------------------


def _import_auto() -> Any:
    """Import transformers' `configuration_auto`. Raises PlanningError if that fails."""
    try:
        from transformers.models.auto import configuration_auto
    except ImportError as error:
        raise PlanningError(
            f"models by their type need transformers, which cannot be imported: {error}.\n"
            f"fix: pip install 'transformers>=5,<6', or module.py:function for a model of yours"
        ) from error
    return configuration_auto


def _read(file: Path, fields: Mapping[str, Any]) -> Any:
    """Return the configuration of a config.json with these fields set."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PlanningError(
            f"{file} cannot be read as JSON: {error}; fix: a config.json"
        ) from error
    model_type = data.get("model_type") if isinstance(data, dict) else None
    auto = _import_auto()
    if not isinstance(model_type, str) or model_type not in auto.CONFIG_MAPPING_NAMES:
        near = nearest(str(model_type), auto.CONFIG_MAPPING_NAMES)
        raise PlanningError(
            f"{file}: its model_type is {model_type!r}, which this transformers does not know.\n"
            f"fix: {near[0] if near else 'a config.json of a known type'}; a model with code of "
            f"its own goes by module.py:function"
        )
    config = _make_config(auto, model_type, data, str(file))
    if not fields:
        return config
    for name, value in fields.items():
        _set(data, _canonical_name(config, name), value)
    num_layers = data.get("num_hidden_layers")
    layer_types = data.get("layer_types")
    if isinstance(layer_types, list) and isinstance(num_layers, int):
        data["layer_types"] = layer_types[:num_layers]  # one for each layer
    return _make_config(auto, model_type, data, str(file))


def _default(auto: Any, model_type: str, fields: Mapping[str, Any]) -> Any:
    """Return the default configuration of the model type with these fields set. Nested fields, as
    ``text_config.hidden_size``, are set after the others."""
    config = _make_config(auto, model_type, {}, model_type)
    if not fields:
        return config
    top_level = {
        _canonical_name(config, name): value for name, value in fields.items() if "." not in name
    }
    with_top_level = _make_config(auto, model_type, top_level, model_type)
    nested = {name: value for name, value in fields.items() if "." in name}
    if not nested:
        return with_top_level
    data = with_top_level.to_dict()
    for name, value in nested.items():
        _set(data, _canonical_name(config, name), value)
    return _make_config(auto, model_type, data, model_type)


def _make_config(auto: Any, model_type: str, data: Mapping[str, Any], source: str) -> Any:
    cls = auto.CONFIG_MAPPING[model_type]
    try:
        return cls.from_dict(dict(data))
    except Exception as error:  # transformers and huggingface_hub raise many classes
        raise PlanningError(
            f"{source}: {_last_line(error)}.\nfix: check the fields that --set changes"
        ) from error


def _canonical_name(config: Any, name: str) -> str:
    """Return the name under which the configuration stores a field, with dots for nested fields.
    Raises PlanningError if there is no such field."""
    first, dot, nested_name = name.partition(".")
    first = type(config).attribute_map.get(first, first)
    data = config.to_dict()
    if dot and isinstance(data.get(first), dict):
        return f"{first}.{_canonical_name(getattr(config, first), nested_name)}"
    if dot or first not in data:
        all_names = [*data, *type(config).attribute_map]
        near = nearest(name, all_names)
        raise PlanningError(
            f"--set {name}: a configuration of {config.model_type} has no such field.\n"
            f"fix: {', '.join(near) if near else ', '.join(sorted(all_names)[:12])}"
        )
    return first


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a field, or a nested field if the name has dots."""
    first, dot, nested_name = name.partition(".")
    if dot:
        _set(data.setdefault(first, {}), nested_name, value)
    else:
        data[first] = value


def _length(config: Any, length: int | None) -> int:
    """Return the tokens of a row. Raises PlanningError if the model has fewer positions."""
    positions = _field(config, "max_position_embeddings", None)
    is_limited = isinstance(positions, int) and positions > 0
    if length is None:
        return min(LENGTH, positions) if is_limited else LENGTH
    if is_limited and positions < length:
        raise PlanningError(
            f"--length {length} is more than the {positions} positions of {config.model_type}.\n"
            f"fix: --length {positions}, or --set max_position_embeddings={length}"
        )
    return length


def _field(config: Any, name: str, default: Any) -> Any:
    """Return a field of the configuration, or of its ``text_config``."""
    for part in (config, getattr(config, "text_config", None)):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _last_line(error: Exception) -> str:
    """Return the last line of the error: transformers writes the reason there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")
