"""Rules of reductions, and of ops that need a dim whole.

    sum(1)       "d0 d1 -> d0"             linear; d1 split: the results are summed
    amax(1)      "d0 d1 -> d0"             d1 split: their maximum is taken
    softmax(1)   "d0 d1! -> d0 d1!"        d1 whole
    mean(1)      "d0 d1 -> d0"             localised: the local sum over the global count

Invariants: a rank that holds nothing of a reduced dim gives the reduction's identity.
"""

from __future__ import annotations

import math

import torch

from dtensor.sharding import localops
from dtensor.sharding.call import Local, Localizer, OpCall
from dtensor.sharding.placements import ReduceOp
from dtensor.sharding.rule import Rule
from dtensor.sharding.rules.build import Groups, make, names, resolve_dims, retarget
from dtensor.sharding.rules.pointwise import nowhere
from dtensor.sharding.rules.registry import Builder, no_rule

_SUM: Groups = ((0,),)


def _terms(call: OpCall, dims: tuple[int, ...], keepdim: bool, whole: bool) -> str:
    """``d0 d1 -> d0``: ``dims`` reduced, and whole where the reduction cannot be split."""
    factors = names(len(call.operands[0].shape), dims if whole else ())
    kept = [f for i, f in enumerate(factors) if i not in dims]
    if keepdim:
        kept = ["1" if i in dims else f for i, f in enumerate(factors)]
    outputs = ", ".join(" ".join(kept) for _ in call.results)
    return f"{' '.join(factors)} -> {outputs}"


def reduction(reduce: ReduceOp | None, *, dim_at: int = 1, keepdim_at: int = 2) -> Builder:
    """``op(x, dim?, keepdim?)``; ``reduce=None``: the reduced dims must be whole.

    ``keepdim_at=0``: the op takes no dims and reduces all.
    """

    def build(call: OpCall) -> Rule:
        rank = len(call.operands[0].shape)
        dims = resolve_dims(call.arg(dim_at, "dim") if keepdim_at else None, rank)
        keepdim = bool(keepdim_at > 0 and call.arg(keepdim_at, "keepdim", False))
        text = _terms(call, dims, keepdim, whole=reduce is None)
        match reduce:
            case "sum":
                return make(call, text, linear=_SUM)
            case "max" | "min":
                return make(call, text, reduce=reduce, localize=_identity(reduce))
            case None:
                return make(call, text)

    return build


def _identity(reduce: ReduceOp) -> Localizer:
    def localize(call: OpCall, local: Local) -> OpCall:
        if math.prod(local.operand_shape(0)) > 0 or math.prod(call.operands[0].shape) == 0:
            return call
        dtype = call.operands[0].dtype
        value = _lowest(dtype) if reduce == "max" else _highest(dtype)
        return retarget(call, localops.filled, call.args[0], local.result_shape(), value)

    return localize


def _lowest(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _mean(call: OpCall) -> Rule:
    shape = call.operands[0].shape
    of_all = call.name == "aten.mean.default"
    dims = tuple(range(len(shape))) if of_all else resolve_dims(call.arg(1, "dim"), len(shape))
    keepdim = False if of_all else bool(call.arg(2, "keepdim", False))
    count = math.prod(shape[d] for d in dims)
    dtype: torch.dtype | None = dict(call.kwargs).get("dtype")

    def localize(call: OpCall, local: Local) -> OpCall:
        return retarget(call, localops.mean_over, call.args[0], dims, keepdim, count, dtype)

    text = _terms(call, dims, keepdim, whole=False)
    return make(call, text, linear=_SUM, localize=localize)


def along(position: int, *, linear: Groups = (), default: int | None = None) -> Builder:
    """Ops on tensors of one rank that need the dim at ``position`` whole in each of them.

    Other dims are shared where all tensors have one size there, and whole where not.
    """

    def build(call: OpCall) -> Rule:
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
                alike = all(m.shape[d] == size for m in metas)
                own = f"t{number}d{d}!" if not alike else f"d{d}!"
                dims.append(f"d{d}" if alike and d not in whole else own)
            terms.append(" ".join(dims))
        inputs, outputs = terms[: len(call.operands)], terms[len(call.operands) :]
        return make(call, f"{', '.join(inputs)} -> {', '.join(outputs)}", linear=linear)

    return build


def _gather(call: OpCall) -> Rule:
    """x's dim is whole; the index splits freely along it, and elsewhere with x."""
    x, index = call.operands[0].shape, call.operands[1].shape
    at = call.args[1] % len(x) if x else 0
    source = [f"x{d}!" if d == at or x[d] != index[d] else f"d{d}" for d in range(len(x))]
    places = [f"i{d}" if d == at else f"d{d}" for d in range(len(index))]
    places = [f if d == at or x[d] == index[d] else f"i{d}!" for d, f in enumerate(places)]
    text = f"{' '.join(source)}, {' '.join(places)} -> {' '.join(places)}"
    return make(call, text, linear=_SUM)


def _mse_loss(call: OpCall) -> Rule:
    reduction = call.arg(2, "reduction", 1)
    if reduction == 0:
        return make(call, "..., ... -> ...", linear=nowhere(call))
    return make(call, "..., ... -> ", localize=_mse_localizer if reduction == 1 else None)


def _mse_localizer(call: OpCall, local: Local) -> OpCall:
    return retarget(call, localops.mse_loss_over, *call.args[:2], _count(call, 0))


def _mse_loss_backward(call: OpCall) -> Rule:
    reduction = call.arg(3, "reduction", 1)
    if reduction == 0:
        return make(call, "..., ..., ... -> ...", linear=((0,), (1, 2)))
    localize = _mse_backward_localizer if reduction == 1 else None
    return make(call, ", ..., ... -> ...", linear=((0,), (1, 2)), localize=localize)


def _mse_backward_localizer(call: OpCall, local: Local) -> OpCall:
    return retarget(call, localops.mse_loss_backward_over, *call.args[:3], _count(call, 1))


def _count(call: OpCall, start: int) -> int:
    """The number of elements of two operands broadcast against each other."""
    shapes = [meta.shape for meta in call.operands[start : start + 2]]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return math.prod(b if a == 1 else a for a, b in zip(*padded, strict=True))


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
    "aten.linalg_vector_norm.default": reduction(None, dim_at=2, keepdim_at=3),
    "aten.softmax.int": along(1),
    "aten._softmax.default": along(1),
    "aten._safe_softmax.default": along(1),
    "aten.log_softmax.int": along(1),
    "aten._log_softmax.default": along(1),
    "aten._softmax_backward_data.default": along(2, linear=_BACKWARD),
    "aten._log_softmax_backward_data.default": along(2, linear=_BACKWARD),
    "aten.cumsum.default": along(1, linear=_SUM),
    "aten.cumprod.default": along(1),
    "aten.flip.default": along(1, linear=_SUM),
    "aten.sort.default": along(1, default=-1),
    "aten.sort.stable": along(2, default=-1),
    "aten.argsort.default": along(1, default=-1),
    "aten.topk.default": along(2, default=-1),
    "aten.gather.default": _gather,
    "aten.scatter_add.default": along(1, linear=((0, 2),)),
    "aten.scatter.src": along(1, linear=((0, 2),)),
    "aten.scatter.value": along(1),
    "aten.mse_loss.default": _mse_loss,
    "aten.mse_loss_backward.default": _mse_loss_backward,
}
