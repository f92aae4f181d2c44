"""Rules of linear algebra and of Fourier transforms.

    cores("2 -> 2 1 2")        "... m! n! -> ... a! b!, ... c!, ... d! e!"     svd
    solve_triangular           "... n! n!, ... n! k -> ... n! k"               linear in {b}
    linalg_checked             "... d0 d1, ... -> ... d0 d1"                   linear in {x}
    _fft_r2c(x, [1])           "d0 d1! -> d0 n1!"                              linear in {a}

The matrices of a factorization are whole; their batch dims split freely. `cores` states how many
trailing dims of each operand and result are whole. Columns of a right-hand side are solved
independently, so they split. An op whose result size depends on values has no rule.
"""

from __future__ import annotations

import math

import torch

import dtensor.sharding.ops.attention  # noqa: F401  # pyright: ignore[reportUnusedImport] - the op
from dtensor.sharding.ops.call import Local, Meta, OpCall
from dtensor.sharding.rules.build import (
    Groups,
    broadcast_term,
    dim_names,
    make,
    pattern,
    resolve_dims,
    retarget,
    whole_dims,
)
from dtensor.sharding.rules.registry import Builder, no_rule
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import contiguous


def cores(text: str, *, linear: Groups = ()) -> Builder:
    """Return a builder for ops on batches. ``text`` states how many trailing dims of each operand
    and each result are whole: ``"2 1 -> 2 0"``. A call may leave out the last operands.
    """
    left, right = ([int(n) for n in side.split()] for side in text.split("->"))

    def build(call: OpCall) -> Rule:
        """Return the rule ``... a00! a01! -> ... r00! r01!``; whole dims follow the batch dims."""
        operands = zip(call.operands, left, strict=False)
        inputs = [_core_term(f"a{i}", meta, count) for i, (meta, count) in enumerate(operands)]
        batch = max(
            (len(meta.shape) - n for meta, n in zip(call.operands, left, strict=False)), default=0
        )
        results = zip(call.results, right, strict=True)
        outputs = [
            _core_term(f"r{i}", meta, count, batch) for i, (meta, count) in enumerate(results)
        ]
        text = f"{', '.join(inputs)} -> {', '.join(outputs)}"
        # Kernels factorize the transpose if the strides are transposed, or refuse other strides.
        return make(call, text, linear=linear, localize=contiguous())

    return build


def _core_term(prefix: str, meta: Meta | None, count: int, batch: int | None = None) -> str:
    """Return the term of a tensor whose last ``count`` dims are whole. ``batch``: the number of
    batch dims of a result; a result that the call did not request has another number of dims."""
    if meta is None:
        return ""
    rank = len(meta.shape)
    if batch is not None and rank != batch + count:  # not requested: an empty tensor
        assert math.prod(meta.shape) == 0 or rank == 0, "a result of another rank"
        return whole_dims(f"{prefix}d", rank)
    return f"... {whole_dims(f'{prefix}d', count)}"


def _left(call: OpCall) -> bool:
    """Return whether the call solves A X = B, column by column, and not X A = B, row by row."""
    return bool(dict(call.kwargs).get("left", True))


def _solve_triangular(call: OpCall) -> Rule:
    rhs = "... n! k" if _left(call) else "... k n!"
    return make(call, f"... n! n!, {rhs} -> {rhs}", linear=((1,),))


def _lu_solve(call: OpCall) -> Rule:
    rhs = "... n! k" if _left(call) else "... k n!"
    return make(call, f"... n! n!, ... n!, {rhs} -> {rhs}", linear=((2,),))


def _solve(call: OpCall) -> Rule:
    """Return the rule of _linalg_solve_ex, whose results are X, LU, pivots and info. The columns
    are whole, because all of them share one LU."""
    a, b = (meta.shape for meta in call.operands)
    is_vector = len(b) == 1 or (len(a) - 1 == len(b) and b == a[:-1])
    rhs = "... b0!" if is_vector else "... b0! b1!"
    out = "... x0!" if is_vector else "... x0! x1!"
    text = f"... n! n!, {rhs} -> {out}, ... n! n!, ... n!, ..."
    return make(call, text, localize=contiguous())  # with other strides, LU is of the transpose


def _multiply_q(call: OpCall) -> Rule:
    """Return the rule of ormqr(a, tau, c): Q c, column by column, or c Q, row by row."""
    c = "... x! k" if call.arg(3, "left", True) else "... k x!"
    return make(call, f"... a! b!, ... t!, {c} -> {c}", linear=((2,),))


def _pinv(call: OpCall) -> Rule:
    """Return the rule of a pseudoinverse; its optional operands are tolerances of batch dims."""
    limits = ", ".join("..." for _ in call.operands[1:])
    return make(call, f"... m! n!{', ' * bool(limits)}{limits} -> ... n! m!")


def _cross(call: OpCall) -> Rule:
    """Return the rule of a cross product, whose dim of three components is whole."""
    wide = call.result.shape
    rank = len(wide)
    if any(len(meta.shape) != rank for meta in call.operands):
        raise no_rule(call, "its tensors differ in their number of dims")
    dims = dim_names(rank, (call.arg(2, "dim", -1) % rank,))
    terms = [broadcast_term(dims, meta.shape, wide) for meta in call.operands]
    return make(call, f"{', '.join(terms)} -> {' '.join(dims)}", linear=((0,), (1,)))


def _checked(call: OpCall) -> Rule:
    """Return the rule of (x, info) -> x, which raises where a flag in ``info`` is set. Each rank
    checks its own matrices, or its own elements if each element has a flag."""
    x, info = call.operands[:2]
    matrix_dims = " ".join(dim_names(len(x.shape) - len(info.shape)))
    return make(call, f"... {matrix_dims}, ... -> ... {matrix_dims}", linear=((0,),))


def _transform(call: OpCall) -> Rule:
    """Return the rule of a Fourier transform, whose transformed dims are whole."""
    rank = len(call.operands[0].shape)
    whole = resolve_dims(call.args[1], rank) if call.args[1] else ()
    before = dim_names(rank, whole)
    after = [f"n{d}!" if d in whole else f for d, f in enumerate(before)]
    text = f"{' '.join(before)} -> {' '.join(after)}"
    return make(call, text, linear=((0,),), localize=_zeros_if_empty)


def _zeros_if_empty(call: OpCall, local: Local) -> OpCall:
    """Return zeros on a rank without elements: FFT libraries refuse empty tensors."""
    if math.prod(local.operand_shape(0)) or math.prod(call.result.shape) == 0:
        return call
    sizes, dtype = list(local.result_shape()), call.result.dtype
    return retarget(call, torch.ops.aten.new_zeros.default, call.args[0], sizes, dtype=dtype)


RULES: dict[str, Builder] = {
    "aten.cholesky.default": cores("2 -> 2"),
    "aten.cholesky_inverse.default": cores("2 -> 2"),
    "aten.cholesky_solve.default": pattern("... n! k, ... n! n! -> ... n! k", linear=((0,),)),
    "aten.geqrf.default": cores("2 -> 2 1"),
    "aten.linalg_cholesky_ex.default": cores("2 -> 2 0"),
    "aten.linalg_cross.default": _cross,
    "aten._linalg_det.default": cores("2 -> 0 2 1"),
    "aten._linalg_eigh.default": cores("2 -> 1 2"),
    "aten._linalg_slogdet.default": cores("2 -> 0 0 2 1"),
    "aten._linalg_solve_ex.default": _solve,
    "aten._linalg_svd.default": cores("2 -> 2 1 2"),
    "aten.linalg_eig.default": cores("2 -> 1 2"),
    "aten.linalg_eigvals.default": cores("2 -> 1"),
    "aten._linalg_eigvals.default": cores("2 -> 1"),
    "aten.linalg_householder_product.default": cores("2 1 -> 2"),
    "aten.linalg_inv_ex.default": cores("2 -> 2 0"),
    "aten.linalg_ldl_factor_ex.default": cores("2 -> 2 1 0"),
    "aten.linalg_ldl_solve.default": pattern(
        "... n! n!, ... n!, ... n! k -> ... n! k", linear=((2,),)
    ),
    "aten.linalg_solve_triangular.default": _solve_triangular,
    "aten.triangular_solve.default": cores("2 2 -> 2 2"),
    "aten.linalg_lu.default": cores("2 -> 2 2 2"),
    "aten.linalg_lu_factor_ex.default": cores("2 -> 2 1 0"),
    "aten.linalg_lu_solve.default": _lu_solve,
    "aten.linalg_matrix_exp.default": cores("2 -> 2"),
    "aten.linalg_pinv.atol_rtol_tensor": _pinv,
    "aten.linalg_qr.default": cores("2 -> 2 2"),
    "aten.lu_unpack.default": cores("2 1 -> 2 2 2"),
    "aten.ormqr.default": _multiply_q,
    "aten._fft_r2c.default": _transform,
    "aten._fft_c2c.default": _transform,
    "aten._fft_c2r.default": _transform,
    "dt.checked.default": _checked,
    "dt.linalg_checked.default": _checked,
}
