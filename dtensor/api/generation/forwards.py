"""How a model is called with a cache of slots: Hugging Face's as they are, users' by a protocol.

    forward = forward_of(model.module, length=256)     # looks, with tensors that hold nothing
    forward.layers                                     # {0: LayerShape(keys=(2, 16), ...), ...}
    forward.vocabulary                                 # 32000
    logits = forward(module, tokens, cache, last)      # [b v], of each row's own position

A module of the user's takes them as they are:

    def forward(self, tokens, cache=None, pos=None):   # int64[b t], int64[b t] -> logits[b t v]
        ...
        k, v = cache.update(layer, k, v)               # [b heads t dim] -> [b heads T dim]
        y = scaled_dot_product_attention(q, k, v, attn_mask=cache.mask())

Of transformers the models for causal language modelling are taken whose cache is keys and values of
each position, and which transformers itself runs with caches of fixed length (so that nothing but
the mask says how long a text is). Windows of attention are masks over the whole length.

Invariants: what cannot be right is refused by name here, before anything is planned.
Not here: what a cache does (kv_cache.py), programs and slots (generator.py).
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
from dtensor.frontend.capture.call_as_module import held_per_thread
from dtensor.frontend.capture.patches import FLAGS, load_compiler
from dtensor.frontend.capture.thread_patches import answered_here, replaced
from dtensor.frontend.graph import type_text
from dtensor.private_torch import FakeTensorMode, compile_lock
from dtensor.signals import as_set

PROTOCOL = "forward(tokens, cache, pos), as docs/generation.md has it"
_PROBED = 2  # positions


class Forward(Protocol):
    """What is known of a model, and how it is called."""

    @property
    def layers(self) -> Mapping[int, LayerShape]: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a text, by the model's own word."""
        ...

    def __call__(self, model: nn.Module, tokens: Tensor, cache: Any, last: Tensor) -> Tensor:
        """Tokens int64[b t] -> logits[b v], row i at position ``last[i]``: int64[b], or of any
        shape where t is 1."""
        ...


def forward_of(module: nn.Module, length: int) -> Forward:
    """PlanningError for a model that cannot be generated from, with the reason."""
    hf = sys.modules.get("transformers")
    if hf is not None and isinstance(module, hf.PreTrainedModel):
        return _huggingface(module, length)
    parameters = inspect.signature(type(module).forward).parameters
    if not {"cache", "pos"} <= set(parameters):
        taken = ", ".join(list(parameters)[1:])
        raise PlanningError(
            f"{type(module).__name__} is no model of transformers, and its forward({taken}) takes "
            f"no cache and pos.\n"
            f"fix: write {PROTOCOL}"
        )
    met = _probe(module, _own)
    return OwnForward(met.layers, met.vocabulary)


# -- users' modules --------------------------------------------------------------------------------


def _at(logits: Tensor, last: Tensor) -> Tensor:
    """[b t v] -> [b v], of row i the position last[i]."""
    b, t, _ = logits.shape
    if t == 1:
        return logits[:, 0]
    if b == 1:
        return logits.index_select(1, last)[:, 0]
    return logits.flatten(0, 1).index_select(0, torch.arange(b) * t + last)


def _own(model: Callable[..., Any], tokens: Tensor, cache: Any) -> Any:
    return model(tokens, cache=cache, pos=cache.pos)


@dataclass(frozen=True, slots=True)
class OwnForward:
    """A module of the user's, which takes ``(tokens, cache, pos)`` itself."""

    layers: Mapping[int, LayerShape]
    vocabulary: int
    eos: tuple[int, ...] = ()

    def __call__(self, model: nn.Module, tokens: Tensor, cache: Cache, last: Tensor) -> Tensor:
        return _at(_own(model, tokens, cache), last)


# -- transformers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HuggingFaceForward:
    """``num_layers``: of the cache; ``windows``: by the type of a layer how far it sees (None: all)
    where a model takes a mask for each, else one of them under ""; ``additive``: masks are added to
    scores; ``one_row``: the model computes logits of one position where it is asked to;
    ``takes_cache``: the argument of its forward that takes the cache."""

    num_layers: int
    windows: Mapping[str, int | None]
    additive: torch.dtype | None
    one_row: bool
    takes_cache: str
    layers: Mapping[int, LayerShape] = field(default_factory=dict[int, LayerShape])
    vocabulary: int = 0
    eos: tuple[int, ...] = ()

    def __call__(self, model: nn.Module, tokens: Tensor, cache: Cache, last: Tensor) -> Tensor:
        if self.one_row and tokens.shape[1] > 1:
            kept = self.run(model, tokens, cache, logits_to_keep=last)  # those of all, of each
            return _at(kept, torch.arange(tokens.shape[0]))
        return _at(self.run(model, tokens, cache), last)

    def run(self, model: Callable[..., Any], tokens: Tensor, cache: Any, **more: Any) -> Tensor:
        from transformers.cache_utils import Cache as Kept

        from dtensor.api.generation.huggingface_cache import layer

        masks = {kind: self._mask(cache.mask(window)) for kind, window in self.windows.items()}
        more[self.takes_cache] = Kept(layers=[layer(cache, i) for i in range(self.num_layers)])
        return model(
            input_ids=tokens,
            position_ids=cache.pos,
            attention_mask=masks.get("", masks),
            use_cache=True,
            **more,
        ).logits

    def _mask(self, mask: Tensor) -> Tensor:
        if self.additive is None:
            return mask
        lowest = torch.finfo(self.additive).min
        return torch.zeros(mask.shape, dtype=self.additive).masked_fill(~mask, lowest)


def _huggingface(module: Any, length: int) -> Forward:
    """``module``: a transformers.PreTrainedModel."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = type(module).__name__

    def refused(why: str, fix: str) -> PlanningError:
        return PlanningError(f"{name} cannot be generated from: {why}.\nfix: {fix}")

    causal_models = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if module.config.is_encoder_decoder:
        why = "it is an encoder and a decoder, and the encoder's output is no cache of slots"
        raise refused(why, "a decoder alone, as LlamaForCausalLM")
    if causal_models.isdisjoint(kind.__name__ for kind in type(module).__mro__):
        why = "it is none of transformers' models for causal language modelling"
        raise refused(why, "the model's ...ForCausalLM class")
    num, windows = _windows(module, length, refused)
    if module._is_stateful:
        raise refused("it carries a state from token to token", "a model of attention alone")
    if not module._can_compile_fullgraph:
        why = "transformers itself does not run it with a cache of fixed length"
        raise refused(why, "a model that has _can_compile_fullgraph")
    parameters = inspect.signature(module.forward).parameters
    for needed in ("position_ids", "attention_mask"):
        if needed not in parameters:
            raise refused(f"its forward takes no {needed}", "another model")
    # transformers has renamed it in 5.24.
    takes_cache = next((n for n in ("cache", "past_key_values") if n in parameters), None)
    if takes_cache is None:
        raise refused("its forward takes no cache", "another model")
    config = module.config.get_text_config(decoder=True)
    _check_positions(config, length, refused)
    kind = config._attn_implementation
    if kind not in ("sdpa", "eager"):
        why = f'its attention is "{kind}", which takes no mask that slots can state'
        raise refused(why, 'model.set_attn_implementation("sdpa")')
    additive = module.dtype if kind == "eager" else None
    one_row = "logits_to_keep" in parameters
    looked = HuggingFaceForward(num, windows, additive, one_row, takes_cache)
    met = _probe(module, looked.run)
    known = module.generation_config.eos_token_id if module.can_generate() else None
    eos = [known] if isinstance(known, int) else list(known or ())
    return replace(looked, layers=met.layers, vocabulary=met.vocabulary, eos=tuple(eos))


def _windows(
    module: Any, length: int, refused: Callable[[str, str], PlanningError]
) -> tuple[int, dict[str, int | None]]:
    """The number of the cache's layers, and `HuggingFaceForward.windows`."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, stated = get_layer_types_and_kwargs(module.config.get_text_config(decoder=True))
    known = {"full_attention", "sliding_attention"}
    if other := sorted(set(kinds) - known):
        why = f"its cache has layers of {', '.join(other)}, which is more than keys and values"
        raise refused(why, "a model whose layers are full_attention or sliding_attention")
    windows = {s["sliding_window"] for s in stated if s.get("sliding_window")}
    if not windows or min(windows) >= length:
        return len(kinds), {"": None}
    if len(windows) > 1:
        raise refused(f"its layers have windows of {sorted(windows)}", f"length={min(windows)}")
    window = windows.pop()
    if set(kinds) == known:
        return len(kinds), {"full_attention": None, "sliding_attention": window}
    return len(kinds), {"": window}


def _check_positions(
    config: Any, length: int, refused: Callable[[str, str], PlanningError]
) -> None:
    values = config.to_dict()
    for key in ("max_position_embeddings", "n_positions"):
        most = values.get(key)
        if isinstance(most, int) and 0 < most < length:
            raise refused(
                f"length={length} is more than its {key}, {most}", f"length={most}, or less"
            )
    rope = values.get("rope_parameters") or {}
    for one in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        first = one.get("original_max_position_embeddings") or values.get("max_position_embeddings")
        kind = one.get("rope_type")
        if kind == "dynamic" or (kind == "longrope" and first and length > first):
            raise refused(
                f"its rotary embedding ({kind}) changes for all slots with the longest of them",
                f"length={first}, or less" if kind == "longrope" else "another rope_type",
            )


# -- one look at the model -------------------------------------------------------------------------


@dataclass(slots=True)
class _Probe:
    """Stands for a cache: what the model gives it is written down."""

    stack: list[str]
    layers: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])
    vocabulary: int = 0
    pos: Tensor = field(init=False)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for name, x in (("keys", k), ("values", v)):
            if x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != _PROBED:
                raise PlanningError(
                    f"cache.update({layer}, k, v) was given {name} of {type_text(x)} for "
                    f"tokens of i64[1,{_PROBED}].\n"
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
    """One forward on tensors that hold nothing."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    names = {id(part): name for name, part in module.named_modules()}
    stack: list[str] = []
    probe = _Probe(stack)

    def whole(*args: Any, **kwargs: Any) -> Any:
        return functional_call(module, held, args, kwargs)

    load_compiler()
    exporting = replaced(
        [(torch.compiler, f"_is_{what}_flag", True) for what in ("exporting", "compiling")]
    )  # as in the capture: models look
    with (
        CALL_LOCK,
        CALL_LOCK.and_then(compile_lock()),
        capturing(),
        held_per_thread(list(module.modules())),
        answered_here(FLAGS),
        exporting,
        fake,
        torch.no_grad(),
        evaluating(module),
        _noted(names, stack),
        as_set(),  # of signals
    ):
        held = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in named.items()}
        tokens = torch.zeros(1, _PROBED, dtype=torch.int64)
        probe.pos = torch.arange(_PROBED)[None]
        try:
            logits = call(whole, tokens, probe)
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
            f"i64[1,{_PROBED}].\nfix: return logits of [batch, positions, vocabulary]"
        )
    if not probe.layers:
        raise PlanningError(
            f"forward of {type(module).__name__} gives its cache no keys and values, so it cannot "
            f"be generated from a token at a time.\nfix: {PROTOCOL}"
        )
    probe.vocabulary = logits.shape[2]
    return probe


@contextmanager
def _noted(names: Mapping[int, str], stack: list[str]) -> Iterator[None]:
    """Within, ``stack`` ends in the name of the module whose forward runs."""

    def enter(module: nn.Module, args: Any) -> None:
        if is_capturing():  # and not what another thread calls
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
    """Within, a module in train mode is in eval mode, with all its parts; as before after."""
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
