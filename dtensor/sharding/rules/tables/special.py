"""Rules of the long tail of elementwise ops: activations, special functions, complex numbers.

    lgamma            "... -> ..."            hypot        "..., ... -> ..."
    lerp(a, b, w)     "..., ..., ... -> ..."  linear in {a, b}
    view_as_real      "... -> ... c!"         linear in {a}: the parts of a complex sum are sums
    isin(x, y)        "..., y! -> ..."        every element against all of y
    glu               "a (q! h) b -> a h b"   its halves split together

The table differs from that of pointwise.py only in how often its ops are met. Invariants: as there.
Complex conjugates are made, not noted lazily: what ranks send one another has no conjugate bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.sharding.ops.call import Local, OpCall
from dtensor.sharding.rules.build import Groups, make, names, pattern, retarget, whole_dims
from dtensor.sharding.rules.registry import Builder
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.localizers import contiguous
from dtensor.sharding.rules.tables.pointwise import (
    Linearity,
    first,
    first_two,
    jointly,
    nowhere,
    pointwise,
)

aten = torch.ops.aten
_LINEAR: Groups = ((0,),)

# fill(x, value): the value of x does not matter
second = jointly((0, "self"), (1, "value"))

_LINEARITY: dict[Linearity, str] = {
    first: """
        hardswish_backward.default hardsigmoid_backward.default mish_backward.default
        softshrink_backward.default hardshrink_backward.default log_sigmoid_backward.default
        native_dropout_backward.default _prelu_kernel_backward.default
        alias_copy.default detach_copy.default deg2rad.default rad2deg.default
        resolve_conj.default resolve_neg.default ldexp.Tensor zero.default
        _conj_physical.default conj_physical.default polar.default xlogy.Scalar_Other
        special_xlog1py.other_scalar bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
        __lshift__.Tensor __lshift__.Scalar""",
    first_two: "lerp.Tensor lerp.Scalar complex.default",
    second: "fill.Tensor",
    nowhere: """
        celu.default selu.default hardswish.default hardsigmoid.default mish.default
        softshrink.default hardshrink.default threshold.default _prelu_kernel.default
        log_sigmoid_forward.default
        acos.default acosh.default asin.default asinh.default atan.default atanh.default
        cosh.default sinh.default sinc.default angle.default erfc.default erfinv.default
        digamma.default lgamma.default mvlgamma.default polygamma.default i0.default
        logit.default frac.default round.decimals signbit.default isfinite.default
        isposinf.default isneginf.default
        fill.Scalar
        copysign.Tensor copysign.Scalar fmax.default fmin.default gcd.default lcm.default
        heaviside.default hypot.default igamma.default igammac.default nextafter.default
        logaddexp.default logaddexp2.default frexp.Tensor
        xlogy.Tensor xlogy.Scalar_Self
        bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Tensor
        bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor
        bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
        __rshift__.Tensor __rshift__.Scalar
        remainder.Scalar_Tensor float_power.Tensor_Tensor float_power.Tensor_Scalar
        isin.Tensor_Scalar
        special_airy_ai.default special_bessel_j0.default special_bessel_j1.default
        special_bessel_y0.default special_bessel_y1.default special_entr.default
        special_erfcx.default special_i0e.default special_i1.default special_i1e.default
        special_log_ndtr.default special_ndtri.default
        special_modified_bessel_i0.default special_modified_bessel_i1.default
        special_modified_bessel_k0.default special_modified_bessel_k1.default
        special_scaled_modified_bessel_k0.default special_scaled_modified_bessel_k1.default
        special_spherical_bessel_j0.default
        special_xlog1py.default special_xlog1py.self_scalar
        special_zeta.default special_zeta.self_scalar special_zeta.other_scalar""",
}

_POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he
    laguerre_polynomial_l legendre_polynomial_p"""


def _made_by(target: Callable[..., Any]) -> Builder:
    """For what torch only notes: the op that makes it."""

    def localize(call: OpCall, local: Local) -> OpCall:
        return retarget(call, target, call.args[0])

    return pattern("... -> ...", linear=_LINEAR, localize=localize)


def _halves(shape: tuple[int, ...], dim: int) -> tuple[str, str]:
    """The dims of what is gated, and of one half."""
    whole, half = names(len(shape)), names(len(shape))
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


# the view needs its last dim to lie together
_COMPLEX = pattern("... c! -> ...", linear=_LINEAR, localize=contiguous())
_REAL = pattern("... -> ... c!", linear=_LINEAR)
_CONJ, _NEGATIVE = _made_by(aten._conj_physical.default), _made_by(aten.neg.default)

RULES: dict[str, Builder] = {
    **{
        f"aten.{name}": pointwise(linearity)
        for linearity, ops in _LINEARITY.items()
        for name in ops.split()
    },
    **{
        f"aten.special_{name}.{overload}": pointwise(nowhere)
        for name in _POLYNOMIALS.split()
        for overload in ("default", "x_scalar", "n_scalar")
    },
    "aten._conj.default": _CONJ,
    "aten._conj_copy.default": _CONJ,
    "aten._neg_view.default": _NEGATIVE,
    "aten._neg_view_copy.default": _NEGATIVE,
    "aten.view_as_real.default": _REAL,
    "aten.view_as_real_copy.default": _REAL,
    "aten.view_as_complex.default": _COMPLEX,
    "aten.view_as_complex_copy.default": _COMPLEX,
    "aten.glu.default": _glu,
    "aten.glu_backward.default": _glu_backward,
    "aten.isin.Tensor_Tensor": _isin,
    "aten.isin.Scalar_Tensor": _isin_scalar,
}
