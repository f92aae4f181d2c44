"""Rules of reductions, and of ops that need a dim whole.

    sum(1)       "d0 d1 -> d0"             linear; d1 split: the ranks' results are summed
    amax(1)      "d0 d1 -> d0"             d1 split: the result is the ranks' maximum
    softmax(1)   "d0 d1! -> d0 d1!"        d1 is whole
    mean(1)      "d0 d1 -> d0"             each rank divides its sum by the global count

Invariant: a rank that holds nothing of a reduced dim returns the reduction's identity.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from dtensor.sharding.local import local_forms
from dtensor.sharding.ops.call import Local, Localizer, OpCall
from dtensor.sharding.rules.build import Groups, dim_names, make, resolve_dims, retarget
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.losses import elementwise_loss

_SUM: Groups = ((0,),)
ByElement = Literal["sum", "max", "min"]


def _terms(call: OpCall, dims: tuple[int, ...], keepdim: bool, whole: bool) -> str:
    """Return the pattern ``d0 d1 -> d0``, in which ``dims`` are reduced, and whole if ``whole``."""
    factors = dim_names(len(call.operands[0].shape), dims if whole else ())
    output = [f for i, f in enumerate(factors) if i not in dims]
    if keepdim:
        output = ["1" if i in dims else f for i, f in enumerate(factors)]
    outputs = ", ".join(" ".join(output) for _ in call.results)
    return f"{' '.join(factors)} -> {outputs}"


def reduction(
    reduce: ByElement | None,
    *,
    dim_at: int = 1,
    keepdim_at: int = 2,
    default: int | None = None,
    linear: Groups = _SUM,
) -> Builder:
    """Return a builder for ``op(x, dim?, keepdim?)``.

    ``reduce``: combines the parts of the reduced dims; None: they must be whole. ``dim_at`` and
    ``keepdim_at``: positions of the arguments; ``keepdim_at=0``: the op always reduces all dims.
    ``default``: the dim if the call states none, None for all. ``linear``: used only for sums.
    """

    def build(call: OpCall) -> Rule:
        """Return the rule of the reduction over the call's dims, "d0 d1 -> d0" over dim 1."""
        rank = len(call.operands[0].shape)
        dims = resolve_dims(call.arg(dim_at, "dim", default) if keepdim_at else None, rank)
        keepdim = bool(keepdim_at > 0 and call.arg(keepdim_at, "keepdim", False))
        text = _terms(call, dims, keepdim, whole=reduce is None)
        match reduce:
            case "sum":
                return make(call, text, linear=linear)
            case "max" | "min":
                return make(call, text, reduce=reduce, localize=_identity_if_empty(reduce))
            case None:
                return make(call, text)

    return build


def _identity_if_empty(reduce: ByElement) -> Localizer:
    """Return a localizer that fills in the identity on a rank that holds nothing to reduce."""

    def localize(call: OpCall, local: Local) -> OpCall:
        """Return a call that creates the identity if the rank's piece of a non-empty dim is empty;
        otherwise the call itself."""
        keeps_rows = -1 in local.result_sizes()
        local_shape = local.operand_sizes(0) if keeps_rows else local.operand_shape(0)
        shapes = zip(local_shape, call.operands[0].shape, strict=True)
        if not any(local_size == 0 < size for local_size, size in shapes):
            return call
        dtype = call.result.dtype
        args = (call.args[0], local.result_shape(), _identity(reduce, dtype), dtype)
        return retarget(call, local_forms.filled, *args)

    return localize


def _identity(reduce: ByElement, dtype: torch.dtype) -> float | bool:
    """Return the identity of a maximum or minimum: the smallest or largest value of the dtype."""
    if dtype == torch.bool:
        return reduce == "min"
    if dtype.is_floating_point:
        return -math.inf if reduce == "max" else math.inf
    return torch.iinfo(dtype).min if reduce == "max" else torch.iinfo(dtype).max


def _vector_norm(call: OpCall) -> Rule:
    """Return the rule of linalg_vector_norm. Orders 0 and 1 are sums, infinite orders maxima or
    minima. Other orders need whole dims; a user can write them with pow and sum."""
    order: float = call.arg(1, "ord", 2)
    reductions: dict[float, ByElement] = {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}
    return reduction(reductions.get(order), dim_at=2, keepdim_at=3, linear=())(call)


def _mean(call: OpCall) -> Rule:
    """Return the rule of a mean, in which each rank divides its sum by the global count."""
    shape = call.operands[0].shape
    of_all = call.name == "aten.mean.default"
    dims = tuple(range(len(shape))) if of_all else resolve_dims(call.arg(1, "dim"), len(shape))
    keepdim = False if of_all else bool(call.arg(2, "keepdim", False))
    count = math.prod(shape[d] for d in dims)
    dtype: torch.dtype | None = dict(call.kwargs).get("dtype")

    def localize(call: OpCall, local: Local) -> OpCall:
        return retarget(call, local_forms.mean_over, call.args[0], dims, keepdim, count, dtype)

    text = _terms(call, dims, keepdim, whole=False)
    return make(call, text, linear=_SUM, localize=localize)


def along_dim(position: int, *, linear: Groups = (), default: int | None = None) -> Builder:
    """Return a builder for ops whose tensors have the same number of dims and need one dim whole.
    The argument at ``position`` is this dim. Another dim is one factor if all tensors have the same
    size there; otherwise it is whole."""

    def build(call: OpCall) -> Rule:
        """Return the rule "d0 d1! -> d0 d1!" for dim 1. A dim in which sizes differ gets a separate
        whole factor for each tensor, ``t0d2!``."""
        metas = [*call.operands, *(m for m in call.results if m is not None)]
        rank = max(len(m.shape) for m in metas)
        if any(len(m.shape) != rank for m in metas):
            raise no_rule(call, "its tensors differ in their number of dims")
        dim = call.arg(position, "dim", default)
        whole = set(resolve_dims(dim, rank))
        terms: list[str] = []
        for number, meta in enumerate(metas):
            dims: list[str] = []
            for d, size in enumerate(meta.shape):
                is_shared = all(m.shape[d] == size for m in metas)
                whole_factor = f"t{number}d{d}!" if not is_shared else f"d{d}!"
                dims.append(f"d{d}" if is_shared and d not in whole else whole_factor)
            terms.append(" ".join(dims))
        inputs, outputs = terms[: len(call.operands)], terms[len(call.operands) :]
        return make(call, f"{', '.join(inputs)} -> {', '.join(outputs)}", linear=linear)

    return build


def _segments(call: OpCall) -> Rule:
    """Return the rule of segment_reduce. Its lengths divide one dim of x into segments, for each
    index of the dims before that dim."""
    _refuse_offsets(call)
    x, lengths = (meta.shape for meta in call.operands)
    before, rows, after = _terms_around(len(lengths) - 1, len(x))
    text = f"{before} {rows} {after}, {before} s! -> {before} o! {after}"
    is_sum = call.args[1] == "sum" and not dict(call.kwargs).get("initial")
    return make(call, text, linear=_SUM if is_sum else (), localize=_unsafe_if_empty)


def _unsafe_if_empty(call: OpCall, local: Local) -> OpCall:
    """Skip torch's check of the lengths on a rank without lengths, where the check fails."""
    if math.prod(local.operand_shape(1)):
        return call
    return retarget(call, call.target, *call.args, **{**dict(call.kwargs), "unsafe": True})


def _segments_backward(call: OpCall) -> Rule:
    """Return the rule of (grad, result, x, lengths) -> gradient of x; segments are whole."""
    _refuse_offsets(call)
    x, lengths = call.operands[2].shape, call.operands[3].shape
    before, rows, after = _terms_around(len(lengths) - 1, len(x))
    out, source = f"{before} o! {after}", f"{before} {rows} {after}"
    return make(call, f"{out}, {out}, {source}, {before} s! -> {source}", linear=_SUM)


def _refuse_offsets(call: OpCall) -> None:
    if dict(call.kwargs).get("offsets") is not None:
        raise no_rule(call, "torch reads outside the tensor where offsets do; give lengths")


def _terms_around(dim: int, rank: int) -> tuple[str, str, str]:
    """Return the terms of the dims before ``dim``, of ``dim`` (whole), and of the dims after."""
    dims = dim_names(rank, (dim,))
    return " ".join(dims[:dim]), dims[dim], " ".join(dims[dim + 1 :])


_BACKWARD: Groups = ((0,),)

RULES: dict[str, Builder] = {
    "aten.sum.default": reduction("sum", keepdim_at=0),
    "aten.sum.dim_IntList": reduction("sum"),
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.amax.default": reduction("max"),
    "aten.amin.default": reduction("min"),
    "aten.max.default": reduction("max", keepdim_at=0),
    "aten.min.default": reduction("min", keepdim_at=0),
    "aten.any.default": reduction("max", keepdim_at=0),
    "aten.any.dim": reduction("max"),
    "aten.any.dims": reduction("max"),
    "aten.all.default": reduction("min", keepdim_at=0),
    "aten.all.dim": reduction("min"),
    "aten.all.dims": reduction("min"),
    "aten.argmax.default": reduction(None),
    "aten.argmin.default": reduction(None),
    "aten.max.dim": reduction(None),
    "aten.min.dim": reduction(None),
    "aten.logsumexp.default": reduction(None),
    "aten.prod.dim_int": reduction(None),
    "aten.var.correction": reduction(None, keepdim_at=3),
    "aten.var_mean.correction": reduction(None, keepdim_at=3),
    "aten.std.correction": reduction(None, keepdim_at=3),
    "aten.std_mean.correction": reduction(None, keepdim_at=3),
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.count_nonzero.default": reduction("sum", linear=()),
    "aten.count_nonzero.dim_IntList": reduction("sum", linear=()),
    "aten.nansum.default": reduction("sum", linear=()),
    "aten.prod.default": reduction(None, keepdim_at=0),
    "aten.softmax.int": along_dim(1),
    "aten._softmax.default": along_dim(1),
    "aten._safe_softmax.default": along_dim(1),
    "aten.log_softmax.int": along_dim(1),
    "aten._log_softmax.default": along_dim(1),
    "aten._softmax_backward_data.default": along_dim(2, linear=_BACKWARD),
    "aten._log_softmax_backward_data.default": along_dim(2, linear=_BACKWARD),
    "aten.cumsum.default": along_dim(1, linear=_SUM),
    "aten.cumprod.default": along_dim(1),
    "aten.flip.default": along_dim(1, linear=_SUM),
    "aten.segment_reduce.default": _segments,
    "aten._segment_reduce_backward.default": _segments_backward,
    "aten.mse_loss.default": elementwise_loss(2),
    "aten.mse_loss_backward.default": elementwise_loss(3, backward=True, linear=((0,), (1, 2))),
}
