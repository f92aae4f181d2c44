"""Mark the attention of transformers' models that is written out, so that it can be recognised.

    attention(module, q, k, v, mask, scaling=s, softcap=c, s_aux=sinks)      in a capture:
        written = eager_attention_forward(...)                    the function of the model's file
        dt.written_attention(written, q, k, v, mask, sinks, s, c) -> written

Models with softcap (Gemma-2) or sinks (GPT-OSS) have no other function than the one in their file.
recognise/ replaces a marked attention by `dt.attention` if its mask has terms; otherwise it stays
as written. A function is marked if its result for an example is attention with these options.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dtensor.sharding.ops.library import LIBRARY, define

_NAME = "eager_attention_forward"
_PACKAGES = ("transformers.models.", "transformers_modules.")
_OPERANDS = ("module", "query", "key", "value", "attention_mask")
_OPTIONS = ("scaling", "dropout", "softcap", "s_aux", "sliding_window")

_Function = Callable[..., Any]
_Kind = tuple[bool, bool]
"""Whether an attention has a softcap, and whether it has sinks."""

# This op is in exported graphs only; canonical.py removes it.
define(
    "written_attention(Tensor written, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, "
    "float scale, float softcap) -> Tensor",
    lambda written, *_: written.clone(),
    lambda written, *_: torch.empty_like(written),
)
torch.library.register_autograd(
    "dt::written_attention", lambda _, grad: (grad, *[None] * 7), lib=LIBRARY
)


def attention_patches() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the patches of transformers' registry: owner, name, and replacement of an original."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if not hasattr(modeling, "AttentionInterface"):
        return []
    functions = [
        vars(module).get(_NAME)
        for name, module in list(sys.modules.items())
        if name.startswith(_PACKAGES)
    ]
    kinds = {f: kinds for f in functions if isinstance(f, FunctionType) and (kinds := _kinds(f))}
    return [(modeling.AttentionInterface, "get_interface", partial(_with_marks, kinds))]


def _with_marks(kinds: Mapping[Any, frozenset[_Kind]], get_interface: _Function) -> _Function:
    """Wrap the registry's `get_interface`; ``default`` is the function in the model's file."""

    def get_marked(self: Any, implementation: str | None, default: _Function) -> _Function:
        theirs = get_interface(self, implementation, default)
        is_ours = theirs is default and theirs in kinds
        return partial(_marked, theirs, kinds[theirs]) if is_ours else theirs

    return get_marked


def _marked(theirs: _Function, kinds: frozenset[_Kind], *args: Any, **kwargs: Any) -> Any:
    """Return the result of the model's function, marked if it is attention with these operands."""
    result = theirs(*args, **kwargs)
    a = inspect.signature(theirs).bind(*args, **kwargs).arguments
    a = {**a, **a.pop("kwargs", {})}
    scale, softcap, sinks = (a.get(name) for name in ("scaling", "softcap", "s_aux"))
    module, q, k, v, mask = (a.get(name) for name in _OPERANDS)
    if (
        not {"softcap", "s_aux"} & kwargs.keys()
        or (softcap is not None, sinks is not None) not in kinds
        or (sinks is not None and sinks is not getattr(module, "sinks", None))
        or scale is None
        or a.get("dropout")
        or any(a[name] is not None for name in _own_options(theirs) & a.keys())
        or any(isinstance(x, Tensor) and x.dim() != 4 for x in (q, k, v, mask))
    ):
        return result
    written, *others = result
    op = torch.ops.dt.written_attention
    return op(written, q, k, v, mask, sinks, scale, softcap or 0.0), *others


@cache
def _own_options(function: _Function) -> frozenset[str]:
    """Return the names of parameters that `_kinds` does not try."""
    return frozenset(inspect.signature(function).parameters) - {*_OPERANDS, *_OPTIONS, "kwargs"}


@cache
def _kinds(function: _Function) -> frozenset[_Kind]:
    """Return the kinds of attention that a function computes right for an example."""
    if tuple(inspect.signature(function).parameters)[:5] != _OPERANDS:
        return frozenset()
    kinds = ((False, False), (True, False), (False, True), (True, True))
    return frozenset(kind for kind in kinds if _is_attention(function, *kind))


def _is_attention(function: _Function, has_softcap: bool, has_sinks: bool) -> bool:
    """Return whether the function computes attention of 2 rows, 4 heads in 2 groups, 3 tokens."""
    numbers = torch.arange(2 * 4 * 3 * 5, dtype=torch.float64, device="cpu").mul(2.6).sin()
    q = numbers.float().view(2, 4, 3, 5) * 2
    k, v = q[:, 1:3].flip(-1), q[:, :2].flip(2)
    mask = torch.full((3, 3), torch.finfo(torch.float32).min, device="cpu").triu(1)[None, None]
    sinks = q[0, :, 0, 0] if has_sinks else None
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    scores = 0.7 * (scores / 0.7).tanh() if has_softcap else scores
    logits = scores + mask
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None, None].expand(2, 4, 3, 1)], -1)
    weights = logits.softmax(-1)[..., :3]
    ours = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    module = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=5, scaling=0.3)
    options: dict[str, Any] = {"scaling": 0.3, "dropout": 0.0}
    if has_softcap:
        options["softcap"] = 0.7
    if has_sinks:
        options["s_aux"] = module.sinks = sinks
    try:
        with torch.no_grad():
            theirs, *_ = function(module, q, k, v, mask.expand(2, 1, 3, 3), **options)
    except Exception:
        return False
    return isinstance(theirs, Tensor) and theirs.shape == ours.shape and ours.allclose(theirs)
