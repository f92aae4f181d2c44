"""Sample calls of the ops that work element by element, POINTWISE, and of their long tail, SPECIAL
(dtensor.sharding.rules.tables.special)."""

from __future__ import annotations

import torch

from dtensor.sharding.rules.tables import special
from tests.certify.samples.draw import Draw, Sample, call, each, of


def _maybe_infinite(d: Draw) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    return call(d("a b").floor() / d.ints("a b", 2))


_TWO = of("a b", "a b"), of("a b c", "b 1")
_DIVIDED = of("+a b", "+b"), of("+a b", "+")
_UNARY = """
    neg clone detach alias lift_fresh_copy positive contiguous zeros_like lift_fresh ones_like
    empty_like exp exp2 expm1 sin cos tan tanh sigmoid relu gelu silu leaky_relu hardtanh elu
    softplus abs sign sgn square erf floor ceil round trunc"""
_COMPARED = "eq.Tensor ne.Tensor logical_and.default logical_or.default logical_xor.default"

POINTWISE: dict[str, list[Sample]] = {
    **each(_UNARY, of("a b"), of(""), overload="default"),
    **each("sqrt rsqrt log log2 log10 log1p reciprocal", of("+a b"), overload="default"),
    **each("isnan isinf nan_to_num", _maybe_infinite, overload="default"),
    **each("sub.Tensor rsub.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", *_TWO),
    **each("maximum.default minimum.default atan2.default", *_TWO),
    "aten.add.Tensor": [
        *(*_TWO, of("a b", "a b", alpha=2.5), of("a b", 1.0), of("a b", ""), of("a b:8", "b:8")),
    ],
    "aten.mul.Tensor": [*_TWO, of("a b", 2.0), of("a b", "")],
    **each("div.Tensor floor_divide.default remainder.Tensor fmod.Tensor", *_DIVIDED),
    **each("pow.Tensor_Tensor", *_DIVIDED),
    **each(
        "sub rsub mul div lt le gt ge floor_divide remainder fmod",
        *(of("a b", 2.0), of("a b:1:9", 2)),
        overload="Scalar",
    ),
    "aten.add.Scalar": [of("a b", 2.0), of("a b:1:9", 2), of("a b", 0)],
    **each(_COMPARED, of("a b:3", "a b:3"), of("a b:3", "b:3")),
    **each("eq.Scalar ne.Scalar", of("a b:3", 1)),
    **each("bitwise_and bitwise_or bitwise_xor", of("a b:8", 3), overload="Scalar"),
    **each(
        "bitwise_and bitwise_or bitwise_xor",
        *(of("?a b", "?b"), of("a b:8", "a b:8")),
        overload="Tensor",
    ),
    "aten.logical_not.default": [of("a b:2")],
    "aten.bitwise_not.default": [of("?a b")],
    "aten.full_like.default": [of("a b", 3.0)],
    "aten._to_copy.default": [
        of("a b", dtype=torch.float32),
        of("a b", dtype=torch.int64),
        of("?a b", dtype=torch.float64),
        of("a b:5", dtype=torch.float64),
    ],
    "aten.pow.Tensor_Scalar": [of("a b", 2), of("a b", 1)],
    "aten.pow.Scalar": [of(2.0, "a b")],
    "aten.clamp.default": [of("a b", -0.5, 0.5), of("a b", 0.0)],
    "aten.clamp.Tensor": [of("a b", "b", None)],
    **each("clamp_min.default clamp_max.default", of("a b", 0.0)),
    **each("clamp_min.Tensor clamp_max.Tensor silu_backward.default", of("a b", "a b")),
    **each("copy.default", of("a b", "a b")),
    "aten.div.Tensor_mode": [
        of("a b", "+b", rounding_mode="floor"),
        of("a b", 2.0, rounding_mode="trunc"),
    ],
    "aten.div.Scalar_mode": [of("a b", 2.0, rounding_mode="floor")],
    "aten.where.self": [of("?a b", "a b", "a b"), of("?a 1", "b", "")],
    "aten.where.ScalarSelf": [of("?a b", 1.0, "a b")],
    "aten.where.ScalarOther": [of("?a b", "a b", 0.0), of("?a b", "a b", 3.0)],
    "aten.where.Scalar": [of("?a b", 1.0, 0.0)],
    "aten.masked_fill.Scalar": [of("a b", "?a b", 0), of("a b", "?b", -1.5)],
    "aten.masked_fill.Tensor": [of("a b", "?b", "")],
    "aten.addcmul.default": [of("a b", "a b", "b", value=0.5)],
    "aten.addcdiv.default": [of("a b", "a b", "+b")],
    "aten.gelu_backward.default": [of("a b", "a b"), of("a b", "a b", approximate="tanh")],
    "aten.tanh_backward.default": [lambda d: call(d("a b"), d("a b").tanh())],
    "aten.sigmoid_backward.default": [lambda d: call(d("a b"), d("a b").sigmoid())],
    "aten.threshold_backward.default": [of("a b", "a b", 0)],
    "aten.leaky_relu_backward.default": [of("a b", "a b", 0.1, False)],
    "aten.hardtanh_backward.default": [of("a b", "a b", -1.0, 1.0)],
    "aten.elu_backward.default": [of("a b", 1.0, 1.0, 1.0, False, "a b")],
    "aten.softplus_backward.default": [of("a b", "a b", 1.0, 20.0)],
    "dt.annotate.default": [lambda d: call(d("a b"), "a b@tp")],
    "dt.annotate_backward.default": [lambda d: call(d("a b"), "a b@tp")],
}


def _polynomial(name: str) -> Sample:
    if name.endswith("x_scalar"):
        return of(0.5, "a b:4")
    if name.endswith("n_scalar"):
        return lambda d: call(d("a b").tanh(), 3)
    return lambda d: call(d("a b").tanh(), d.ints("b", 4))


_SPECIAL_UNARY = """
    alias_copy detach_copy deg2rad rad2deg resolve_neg zero _neg_view _neg_view_copy atan asinh cosh
    sinh sinc erfc i0 frac signbit isposinf isneginf special_airy_ai special_bessel_j0
    special_bessel_j1 special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_spherical_bessel_j0"""
_POSITIVE = """
    digamma lgamma special_bessel_y0 special_bessel_y1 special_entr special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1"""
_SPECIAL_BINARY = """
    copysign.Tensor fmax.default fmin.default heaviside.default hypot.default nextafter.default
    logaddexp.default logaddexp2.default"""
_POSITIVE_BINARY = """
    igamma.default igammac.default xlogy.Tensor special_xlog1py.default float_power.Tensor_Tensor"""
_SHIFTS = "bitwise_left_shift bitwise_right_shift"

SPECIAL: dict[str, list[Sample]] = {
    **{name: [_polynomial(name)] for name in special.RULES if "_polynomial_" in name},
    **each(_SPECIAL_UNARY, of("a b"), of(""), overload="default"),
    **each(
        "angle conj_physical resolve_conj isfinite",
        *(of("a b"), of(""), of("~a b")),
        overload="default",
    ),
    **each("_conj _conj_copy _conj_physical", of("~a b"), overload="default"),
    **each("view_as_real view_as_real_copy", of("~a b"), overload="default"),
    **each("view_as_complex view_as_complex_copy", of("a b 2"), overload="default"),
    **each(_POSITIVE, of("+a b"), overload="default"),
    # their domains: -1 to 1, 0 to 1
    **each("acos asin atanh erfinv", lambda d: call(d("a b").tanh()), overload="default"),
    **each("logit special_ndtri", lambda d: call(d("a b").sigmoid()), overload="default"),
    "aten.acosh.default": [lambda d: call(d.positive("a b") + 1)],
    "aten.mvlgamma.default": [lambda d: call(d.positive("a b") + 1, 2)],
    "aten.polygamma.default": [of(1, "+a b")],
    "aten.round.decimals": [of("a b", decimals=2)],
    "aten.frexp.Tensor": [of("a b")],
    "aten.fill.Scalar": [of("a b", 2.0)],
    "aten.fill.Tensor": [of("a b", "")],
    **each(_SPECIAL_BINARY, *_TWO),
    **each(_POSITIVE_BINARY, of("+a b", "+b")),
    **each("gcd.default lcm.default", of("a b:9", "b:9")),
    **each(f"{_SHIFTS} __lshift__ __rshift__", of("a b:9", "b:3"), overload="Tensor"),
    **each(_SHIFTS, of("a b:9", 2), overload="Tensor_Scalar"),
    **each("__lshift__ __rshift__", of("a b:9", 2), overload="Scalar"),
    **each(_SHIFTS, of(5, "a b:3"), overload="Scalar_Tensor"),
    **each("bitwise_and bitwise_or bitwise_xor", of(5, "a b:8"), overload="Scalar_Tensor"),
    "aten.copysign.Scalar": [of("a b", -1.0)],
    "aten.ldexp.Tensor": [of("a b", "b:3")],
    "aten.lerp.Scalar": [of("a b", "a b", 0.3)],
    "aten.lerp.Tensor": [of("a b", "b", "+a b")],
    "aten.complex.default": [of("a b", "b")],
    "aten.polar.default": [of("+a b", "b")],
    **each("xlogy.Scalar_Self special_xlog1py.self_scalar", of(2.0, "+a b")),
    **each("xlogy.Scalar_Other special_xlog1py.other_scalar", of("a b", 2.0)),
    "aten.special_zeta.default": [lambda d: call(d.positive("a b") + 1, d.positive("b"))],
    "aten.special_zeta.self_scalar": [of(2.0, "+a b")],
    "aten.special_zeta.other_scalar": [lambda d: call(d.positive("a b") + 1, 2.0)],
    "aten.float_power.Tensor_Scalar": [of("+a b", 1.5)],
    "aten.remainder.Scalar_Tensor": [of(5.0, "+a b")],
    "aten.isin.Tensor_Scalar": [of("a b:3", 1)],
    "aten.isin.Tensor_Tensor": [of("a b:9", "c 2:9"), of("a b:9", "c:9", invert=True)],
    "aten.isin.Scalar_Tensor": [of(3, "a b:9")],
}
