"""How a model is called with a KV cache: Hugging Face models unchanged, others by a protocol.

    forward = forward_of(model.module, length=256)     # runs the model once on fake tensors
    forward.layers                                     # {0: LayerShape(keys=(2, 16), ...), ...}
    logits = forward(module, tokens, cache, last)      # [b v], of each row's position last[i]

A user's module implements:

    def forward(self, tokens, cache=None, pos=None):   # int64[b t], int64[b t] -> logits[b t v]
        k, v = cache.update(layer, k, v)               # [b heads t dim] -> [b heads T dim]
        y = scaled_dot_product_attention(q, k, v, attn_mask=cache.mask())
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from dtensor.api.generation.kv_cache import Cache, LayerShape, causal
from dtensor.errors import PlanningError
from dtensor.frontend.call_lock import CALL_LOCK, capturing, is_capturing
from dtensor.frontend.capture.call_as_module import thread_local_parameters
from dtensor.frontend.capture.patches import PROCESS_FLAGS, load_compiler
from dtensor.frontend.capture.thread_patches import patch_attributes, patch_flags
from dtensor.frontend.graph import type_text
from dtensor.private_torch import FakeTensorMode, compile_lock
from dtensor.signals import immediate_handlers

PROTOCOL = "forward(tokens, cache, pos), as docs/generation.md has it"
_PROBE_LENGTH = 2  # positions


class Forward(Protocol):
    """A model's description, and the function that calls it with a cache."""

    @property
    def layers(self) -> Mapping[int, LayerShape]: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def eos(self) -> tuple[int, ...]:
        """The tokens that end a text, according to the model."""
        ...

    def __call__(self, model: nn.Module, tokens: Tensor, cache: Any, last: Tensor) -> Tensor:
        """Return the logits [b v] of row i at position ``last[i]``, for tokens int64[b t].
        ``last``: int64[b]; ignored if t is 1."""
        ...


def forward_of(module: nn.Module, length: int) -> Forward:
    """Return how the model is called for slots of ``length`` positions. Raises PlanningError, with
    the reason, for a model that cannot generate."""
    hf = sys.modules.get("transformers")
    if hf is not None and isinstance(module, hf.PreTrainedModel):
        return _huggingface(module, length)
    parameters = inspect.signature(type(module).forward).parameters
    if not {"cache", "pos"} <= set(parameters):
        parameter_names = ", ".join(list(parameters)[1:])
        raise PlanningError(
            f"{type(module).__name__} is no model of transformers, and its "
            f"forward({parameter_names}) takes no cache and pos.\n"
            f"fix: write {PROTOCOL}"
        )
    probe = _probe(module, _call_protocol)
    return ProtocolForward(probe.layers, probe.vocabulary)


# -- users' modules --------------------------------------------------------------------------------


def _logits_at(logits: Tensor, last: Tensor) -> Tensor:
    """Return the logits [b v] of row i at position last[i], from logits [b t v]."""
    b, t, _ = logits.shape
    if t == 1:
        return logits[:, 0]
    if b == 1:
        return logits.index_select(1, last)[:, 0]
    return logits.flatten(0, 1).index_select(0, torch.arange(b) * t + last)


def _call_protocol(model: Callable[..., Any], tokens: Tensor, cache: Any) -> Any:
    return model(tokens, cache=cache, pos=cache.pos)


@dataclass(frozen=True, slots=True)
class ProtocolForward:
    """A user's module, whose forward takes ``(tokens, cache, pos)``."""

    layers: Mapping[int, LayerShape]
    vocabulary: int
    eos: tuple[int, ...] = ()

    def __call__(self, model: nn.Module, tokens: Tensor, cache: Cache, last: Tensor) -> Tensor:
        return _logits_at(_call_protocol(model, tokens, cache), last)


# -- transformers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HuggingFaceForward:
    """A Hugging Face model for causal language modelling."""

    num_layers: int  # of the cache
    windows: Mapping[str, int | None]  # attention window (None: unlimited) by layer type, or of ""
    additive: torch.dtype | None  # if not None, masks of this dtype are added to scores
    one_row: bool  # whether the model can compute the logits of one position only
    takes_cache: str  # the parameter of its forward that takes the cache
    layers: Mapping[int, LayerShape] = field(default_factory=dict[int, LayerShape])
    vocabulary: int = 0
    eos: tuple[int, ...] = ()

    def __call__(self, model: nn.Module, tokens: Tensor, cache: Cache, last: Tensor) -> Tensor:
        """Return the logits [b v] at each row's last position. Compute only these if possible."""
        if self.one_row and tokens.shape[1] > 1:
            # of each row, the logits at the last positions of all rows
            logits = self.run(model, tokens, cache, logits_to_keep=last)
            return _logits_at(logits, torch.arange(tokens.shape[0]))
        return _logits_at(self.run(model, tokens, cache), last)

    def run(self, model: Callable[..., Any], tokens: Tensor, cache: Any, **more: Any) -> Tensor:
        """Call the model with the cache's positions and masks, and return its logits."""
        from transformers.cache_utils import Cache as HuggingFaceCache

        from dtensor.api.generation.huggingface_cache import layer

        masks = {kind: self._mask(cache.mask(window)) for kind, window in self.windows.items()}
        more[self.takes_cache] = HuggingFaceCache(
            layers=[layer(cache, i) for i in range(self.num_layers)]
        )
        return model(
            input_ids=tokens,
            position_ids=cache.pos,
            attention_mask=masks.get("", masks),
            use_cache=True,
            **more,
        ).logits

    def _mask(self, mask: Tensor) -> Tensor:
        """Return the mask as bool or, if the model's attention adds it to scores, as numbers."""
        if self.additive is None:
            return mask
        lowest = torch.finfo(self.additive).min
        return torch.zeros(mask.shape, dtype=self.additive).masked_fill(~mask, lowest)


def _huggingface(module: Any, length: int) -> Forward:
    """Return how a transformers.PreTrainedModel is called. Its cache must be keys and values of
    each position, and transformers must support it with caches of fixed length."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = type(module).__name__

    def error_for(why: str, fix: str) -> PlanningError:
        return PlanningError(f"{name} cannot be generated from: {why}.\nfix: {fix}")

    causal_models = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if module.config.is_encoder_decoder:
        why = "it is an encoder and a decoder, and the encoder's output is no cache of slots"
        raise error_for(why, "a decoder alone, as LlamaForCausalLM")
    if causal_models.isdisjoint(kind.__name__ for kind in type(module).__mro__):
        why = "it is none of transformers' models for causal language modelling"
        raise error_for(why, "the model's ...ForCausalLM class")
    num, windows = _windows(module, length, error_for)
    if module._is_stateful:
        raise error_for("it carries a state from token to token", "a model of attention alone")
    if not module._can_compile_fullgraph:
        why = "transformers itself does not run it with a cache of fixed length"
        raise error_for(why, "a model that has _can_compile_fullgraph")
    parameters = inspect.signature(module.forward).parameters
    for needed in ("position_ids", "attention_mask"):
        if needed not in parameters:
            raise error_for(f"its forward takes no {needed}", "another model")
    # transformers renamed the parameter in 5.24
    takes_cache = next((n for n in ("cache", "past_key_values") if n in parameters), None)
    if takes_cache is None:
        raise error_for("its forward takes no cache", "another model")
    config = module.config.get_text_config(decoder=True)
    _check_positions(config, length, error_for)
    kind = config._attn_implementation
    if kind not in ("sdpa", "eager"):
        why = f'its attention is "{kind}", which takes no mask that slots can state'
        raise error_for(why, 'model.set_attn_implementation("sdpa")')
    additive = module.dtype if kind == "eager" else None
    one_row = "logits_to_keep" in parameters
    forward = HuggingFaceForward(num, windows, additive, one_row, takes_cache)
    probe = _probe(module, forward.run)
    eos_id = module.generation_config.eos_token_id if module.can_generate() else None
    eos = [eos_id] if isinstance(eos_id, int) else list(eos_id or ())
    return replace(forward, layers=probe.layers, vocabulary=probe.vocabulary, eos=tuple(eos))


def _windows(
    module: Any, length: int, error_for: Callable[[str, str], PlanningError]
) -> tuple[int, dict[str, int | None]]:
    """Return the number of the cache's layers, and the attention window (None: unlimited) of each
    layer type, or of "" if all layers have the same. Raises an error for other kinds of layers."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, stated = get_layer_types_and_kwargs(module.config.get_text_config(decoder=True))
    supported_kinds = {"full_attention", "sliding_attention"}
    if other := sorted(set(kinds) - supported_kinds):
        why = f"its cache has layers of {', '.join(other)}, which is more than keys and values"
        raise error_for(why, "a model whose layers are full_attention or sliding_attention")
    windows = {s["sliding_window"] for s in stated if s.get("sliding_window")}
    if not windows or min(windows) >= length:
        return len(kinds), {"": None}
    if len(windows) > 1:
        raise error_for(f"its layers have windows of {sorted(windows)}", f"length={min(windows)}")
    window = windows.pop()
    if set(kinds) == supported_kinds:
        return len(kinds), {"full_attention": None, "sliding_attention": window}
    return len(kinds), {"": window}


def _check_positions(
    config: Any, length: int, error_for: Callable[[str, str], PlanningError]
) -> None:
    """Raises PlanningError if the model has fewer positions than ``length``, or if its rotary
    embedding depends on the longest text of a batch."""
    values = config.to_dict()
    for key in ("max_position_embeddings", "n_positions"):
        limit = values.get(key)
        if isinstance(limit, int) and 0 < limit < length:
            raise error_for(
                f"length={length} is more than its {key}, {limit}", f"length={limit}, or less"
            )
    rope = values.get("rope_parameters") or {}
    default = values.get("max_position_embeddings")
    for options in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        original = options.get("original_max_position_embeddings") or default
        kind = options.get("rope_type")
        if kind == "dynamic" or (kind == "longrope" and original and length > original):
            raise error_for(
                f"its rotary embedding ({kind}) changes for all slots with the longest of them",
                f"length={original}, or less" if kind == "longrope" else "another rope_type",
            )


# -- probing the model -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Probe:
    """Stands in for a cache, and records the shapes of the keys and values that the model passes.
    ``stack``: the names of the running modules."""

    stack: list[str]
    layers: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])
    vocabulary: int = 0
    pos: Tensor = field(init=False)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Record a layer's shape. Raises PlanningError for shapes or dtypes that do not fit."""
        for name, x in (("keys", k), ("values", v)):
            if x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != _PROBE_LENGTH:
                raise PlanningError(
                    f"cache.update({layer}, k, v) was given {name} of {type_text(x)} for "
                    f"tokens of i64[1,{_PROBE_LENGTH}].\n"
                    f"fix: give it [batch, heads, positions, head dim], as in "
                    f"x.view(b, t, heads, dim).transpose(1, 2)"
                )
        if k.dtype != v.dtype:
            raise PlanningError(f"keys are {k.dtype}, values {v.dtype}; fix: v.to(k.dtype)")
        if layer in self.layers:
            raise PlanningError(
                f"cache.update({layer}, ...) is called twice, in {self.layers[layer].module} and "
                f"{self.stack[-1]}.\nfix: number the layers 0, 1, ..."
            )
        keys, values = ((x.shape[1], x.shape[3]) for x in (k, v))
        self.layers[layer] = LayerShape(keys, values, k.dtype, self.stack[-1])
        return k, v

    def mask(self, window: int | None = None) -> Tensor:
        return causal(self.pos[0], window)[None, None]


def _probe(module: nn.Module, call: Callable[..., Any]) -> _Probe:
    """Run the model once on fake tensors, and return the record. Raises PlanningError if it does
    not run with a cache, or does not use the cache."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    names = {id(part): name for name, part in module.named_modules()}
    stack: list[str] = []
    probe = _Probe(stack)

    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(module, fakes, args, kwargs)

    load_compiler()
    exporting = patch_attributes(
        [(torch.compiler, f"_is_{state}_flag", True) for state in ("exporting", "compiling")]
    )  # as in a capture, because models read these flags
    with (
        CALL_LOCK,
        CALL_LOCK.also_holding(compile_lock()),
        capturing(),
        thread_local_parameters(list(module.modules())),
        patch_flags(PROCESS_FLAGS),
        exporting,
        fake,
        torch.no_grad(),
        evaluating(module),
        _track_modules(names, stack),
        immediate_handlers(),  # signals act as usual
    ):
        fakes = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in named.items()}
        tokens = torch.zeros(1, _PROBE_LENGTH, dtype=torch.int64)
        probe.pos = torch.arange(_PROBE_LENGTH)[None]
        try:
            logits = call(run, tokens, probe)
        except PlanningError:
            raise
        except Exception as error:
            raise PlanningError(
                f"{type(module).__name__} does not run with a cache of slots: "
                f"{type(error).__name__}: {error}\n"
                f"fix: {PROTOCOL}; of transformers, a model whose cache is keys and values"
            ) from error
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise PlanningError(
            f"forward of {type(module).__name__} gives {type_text(logits)} for tokens of "
            f"i64[1,{_PROBE_LENGTH}].\nfix: return logits of [batch, positions, vocabulary]"
        )
    if not probe.layers:
        raise PlanningError(
            f"forward of {type(module).__name__} gives its cache no keys and values, so it cannot "
            f"be generated from a token at a time.\nfix: {PROTOCOL}"
        )
    probe.vocabulary = logits.shape[2]
    return probe


@contextmanager
def _track_modules(names: Mapping[int, str], stack: list[str]) -> Iterator[None]:
    """Within the block, push the name of each module whose forward runs on ``stack``."""

    def enter(module: nn.Module, args: Any) -> None:
        if is_capturing():  # not for calls of another thread
            stack.append(names.get(id(module), ""))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if is_capturing():
            stack.pop()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within the block, put a module that is in train mode, and its submodules, in eval mode."""
    if not module.training:
        yield
        return
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
