"""What DTensors do above autograd: moves that are differentiable, functions that are kept whole.

    y = x.redistribute(tp=Replicate())     gradients go back to x's placement
    F.scaled_dot_product_attention(q, k, v, is_causal=True)      dt.attention, as in dt.compile
    F.cross_entropy(logits, targets)       dt's ops, which take a split vocabulary

The two functions are rewritten by the code that rewrites them in a captured graph
(frontend/capture/canonical.py); the calls that it does not cover are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor.api.eager.graph import fake, fakes
from dtensor.api.eager.ops import like_spec, whole
from dtensor.api.eager.run import Call, cells_of, execute
from dtensor.api.eager.values import Cell, contiguous_strides, layout_of
from dtensor.errors import PlanningError
from dtensor.frontend.capture.canonical import canonicalise
from dtensor.frontend.marks import is_capturing
from dtensor.sharding.ops.call import Operand
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.api.eager.tensor import DTensor

aten = torch.ops.aten


class Redistribute(torch.autograd.Function):
    """The same value at another spec; its gradient at the operand's, where that is not pending."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, target: TensorSpec) -> DTensor:  # type: ignore[override]
        before = x.spec
        ctx.back = like_spec(before)
        if before == target:
            value = x.value()
            layout = layout_of(value.spec, contiguous_strides(value.spec.shape))
            return whole(Cell(value.session, layout, value))
        ran = execute(None, (x,), {}, pinned=target.sharding, told=True)
        (cell,) = cells_of(ran)
        assert cell is not None
        return whole(cell)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        return Redistribute.apply(grad, ctx.back), None


class FullTensor(torch.autograd.Function):
    """The global value as a plain tensor; its gradient is distributed again."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.back = like_spec(x.spec)
        ctx.session = x.session
        return x.full_value()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:  # type: ignore[override]
        from dtensor.api.eager.tensor import DTensor, fresh_name
        from dtensor.sharding.spec.shards import shard_of

        spec, session = ctx.back, ctx.session
        name = fresh_name()
        ranks = range(spec.mesh.size)
        session.put([{name: shard_of(grad, spec, spec.mesh.coordinates(r))} for r in ranks])
        return DTensor(spec, session, name)


# -- functions that are kept whole --------------------------------------------------------------

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_rewritten: dict[Any, fx.GraphModule | None] = {}


def torch_function(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if is_capturing():
        raise PlanningError(
            "a DTensor is used in a compiled function but was not passed to it.\n"
            "fix: pass it as an argument, as in dt.compile(fn, mesh)(x, w)"
        )
    rewrite = _WHOLE.get(func)
    with torch._C.DisableTorchFunctionSubclass():
        if rewrite is None:
            return func(*args, **kwargs)
        return rewrite(*args, **kwargs)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    target = aten.scaled_dot_product_attention.default
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    kwargs: dict[str, Any] = dict(scale=scale, enable_gqa=enable_gqa)
    done = _run_rewritten(target, args, kwargs)
    if done is not None:
        return done
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    rest = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if size_average is None and reduce is None and reduction in _REDUCTIONS:
        args = (input, target, weight, _REDUCTIONS[reduction], ignore_index, label_smoothing)
        done = _run_rewritten(aten.cross_entropy_loss.default, args, {})
        if done is not None:
            return done
    return F.cross_entropy(input, target, *rest)


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """A layer of torch's: with a mask, its attention is torch's plain math."""
    if kwargs.get("attn_mask") is None and kwargs.get("key_padding_mask") is None:
        return F.multi_head_attention_forward(*args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return F.multi_head_attention_forward(*args, **kwargs)


_WHOLE: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _multi_head,
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
}


def _run_rewritten(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the canonical form of the call gives; None where the call has none."""
    call = Call()
    shape = tuple(call.key(v) for v in (*args, *kwargs.values()))
    tensors = call.operands
    metas = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
    key = (target, shape, metas)
    if key not in _rewritten:
        given = tuple(call.structure(a) for a in args)
        named = {k: call.structure(v) for k, v in kwargs.items()}
        _rewritten[key] = _rewrite(target, given, named, metas)
    module = _rewritten[key]
    return None if module is None else module(*tensors)


def _rewrite(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], metas: tuple[Any, ...]
) -> fx.GraphModule | None:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for i, (shape, strides, dtype) in enumerate(metas):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = fake(shape, strides, dtype)
        nodes.append(node)

    def place(value: Any) -> Any:
        return nodes[value.index] if isinstance(value, Operand) else value

    node = graph.call_function(
        target, tuple(place(a) for a in args), {k: place(v) for k, v in kwargs.items()}
    )
    with fakes():
        node.meta["val"] = target(
            *fx.map_arg(node.args, lambda n: n.meta["val"]),
            **fx.map_arg(node.kwargs, lambda n: n.meta["val"]),
        )
    graph.output(node)
    module = fx.GraphModule(torch.nn.Module(), graph)
    canonicalise(module)
    same = any(n.target is target for n in module.graph.nodes)
    return None if same else module
