"""Rules of rarer elementwise ops: activations, special functions, complex numbers.

    lgamma            "... -> ..."            hypot        "..., ... -> ..."
    lerp(a, b, w)     "..., ..., ... -> ..."  linear in {a, b}
    view_as_real      "... -> ... c!"         linear in {a}
    isin(x, y)        "..., y! -> ..."        each element is compared with all of y
    glu               "a (q! h) b -> a h b"   the two halves split together

pointwise.py has the common elementwise ops. Ranks compute complex conjugates and negatives at once,
where torch only sets a bit of the tensor, because messages carry no such bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import (
    Groups,
    dim_names,
    full_names,
    make,
    pattern,
    retarget,
    whole_dims,
)
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import contiguous
from dtensor.sharding.rules.tables.pointwise import (
    Linearity,
    first,
    first_two,
    linear_in_none,
    linear_jointly,
    pointwise,
)

aten: Any = torch.ops.aten
_LINEAR: Groups = ((0,),)

# fill(x, value) is linear in both: the result does not depend on x
second: Linearity = linear_jointly((0, "self"), (1, "value"))

_LINEARITY: dict[Linearity, str] = {
    first: """
        hardswish_backward hardsigmoid_backward mish_backward softshrink_backward
        hardshrink_backward log_sigmoid_backward native_dropout_backward _prelu_kernel_backward
        alias_copy detach_copy deg2rad rad2deg resolve_conj resolve_neg ldexp.Tensor zero
        _conj_physical conj_physical polar xlogy.Scalar_Other special_xlog1py.other_scalar
        bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar __lshift__.Tensor
        __lshift__.Scalar""",
    first_two: "lerp.Tensor lerp.Scalar complex",
    second: "fill.Tensor",
    linear_in_none: """
        celu selu hardswish hardsigmoid mish softshrink hardshrink threshold _prelu_kernel
        log_sigmoid_forward acos acosh asin asinh atan atanh cosh sinh sinc angle erfc erfinv
        digamma lgamma mvlgamma polygamma i0 logit frac round.decimals signbit isfinite isposinf
        isneginf fill.Scalar copysign.Tensor copysign.Scalar fmax fmin gcd lcm heaviside hypot
        igamma igammac nextafter logaddexp logaddexp2 frexp.Tensor xlogy.Tensor xlogy.Scalar_Self
        bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Tensor
        bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor
        bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
        __rshift__.Tensor __rshift__.Scalar remainder.Scalar_Tensor float_power.Tensor_Tensor
        float_power.Tensor_Scalar isin.Tensor_Scalar special_airy_ai special_bessel_j0
        special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx
        special_i0e special_i1 special_i1e special_log_ndtr special_ndtri
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_xlog1py
        special_xlog1py.self_scalar special_zeta special_zeta.self_scalar
        special_zeta.other_scalar""",
}

_POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he
    laguerre_polynomial_l legendre_polynomial_p"""


def _computed_by(target: Callable[..., Any]) -> Builder:
    """Return a builder for a lazy view of torch (a conjugate or negative), which ranks replace by
    the op ``target`` that computes it."""

    def localize(call: OpCall, local: Local) -> OpCall:
        return retarget(call, target, call.args[0])

    return pattern("... -> ...", linear=_LINEAR, localize=localize)


def _halves(shape: tuple[int, ...], dim: int) -> tuple[str, str]:
    """Return the terms of glu's operand, whose ``dim`` is two halves, and of one half."""
    whole, half = dim_names(len(shape)), dim_names(len(shape))
    at = dim % len(shape)
    whole[at], half[at] = "(q! h)", "h"
    return " ".join(whole), " ".join(half)


def _glu(call: OpCall) -> Rule:
    whole, half = _halves(call.operands[0].shape, call.arg(1, "dim", -1))
    return make(call, f"{whole} -> {half}", sizes={"q": 2})


def _glu_backward(call: OpCall) -> Rule:
    whole, half = _halves(call.operands[1].shape, call.args[2])
    return make(call, f"{half}, {whole} -> {whole}", linear=_LINEAR, sizes={"q": 2})


def _isin(call: OpCall) -> Rule:
    tests = whole_dims("t", len(call.operands[1].shape))
    return make(call, f"..., {tests} -> ...", localize=contiguous())


def _isin_scalar(call: OpCall) -> Rule:
    tests = whole_dims("t", len(call.operands[0].shape))
    return make(call, f"{tests} -> ", localize=contiguous())


# view_as_complex needs a last dim of stride 1
_VIEW_AS_COMPLEX = pattern("... c! -> ...", linear=_LINEAR, localize=contiguous())
_VIEW_AS_REAL = pattern("... -> ... c!", linear=_LINEAR)
_CONJ, _NEGATIVE = _computed_by(aten._conj_physical.default), _computed_by(aten.neg.default)

RULES: dict[str, Builder] = {
    **{
        name: pointwise(linearity)
        for linearity, ops in _LINEARITY.items()
        for name in full_names(ops)
    },
    **{
        f"aten.special_{name}.{overload}": pointwise(linear_in_none)
        for name in _POLYNOMIALS.split()
        for overload in ("default", "x_scalar", "n_scalar")
    },
    "aten._conj.default": _CONJ,
    "aten._conj_copy.default": _CONJ,
    "aten._neg_view.default": _NEGATIVE,
    "aten._neg_view_copy.default": _NEGATIVE,
    "aten.view_as_real.default": _VIEW_AS_REAL,
    "aten.view_as_real_copy.default": _VIEW_AS_REAL,
    "aten.view_as_complex.default": _VIEW_AS_COMPLEX,
    "aten.view_as_complex_copy.default": _VIEW_AS_COMPLEX,
    "aten.glu.default": _glu,
    "aten.glu_backward.default": _glu_backward,
    "aten.isin.Tensor_Tensor": _isin,
    "aten.isin.Scalar_Tensor": _isin_scalar,
}
