"""Random masks, uniform and normal numbers, and integers, with the same bits on every device.

    keep_mask(Place.whole((4, 8)), Key(0, 0, 0), 0.1, device)   # True with probability 0.9
    normal(place, key, torch.float32, device)

All are functions of (place, key) alone and use only operations that IEEE 754 rounds exactly; log
and similar functions give different last bits on other devices. So normal numbers are computed by
Wichura's rational approximations of the inverse distribution (Algorithm AS 241, Applied Statistics
37, 1988), with `_log` in the tails. Uniform numbers are in [0, 1) and have as many bits as the
dtype. Normal numbers of dtypes below float64 have 32 random bits, so |z| < 6.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtensor.sharding.ops.philox import Key, Place, words

_NUM_BITS_OF_DTYPE = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def keep_mask(place: Place, key: Key, p: float, device: torch.device) -> Tensor:
    """Return a mask that is True with probability 1 - p, to a resolution of 2**-32."""
    drop = round(p * 2**32)
    return _fill(place, key, torch.bool, device, 1, lambda word: word[0] >= drop)


def uniform(place: Place, key: Key, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uniform random numbers in [0, 1)."""
    bits = _num_bits(dtype)
    scale = 2.0**-bits
    if bits <= 32:
        return _fill(
            place, key, dtype, device, 1, lambda word: (word[0] >> (32 - bits)).to(dtype) * scale
        )
    return _fill(
        place, key, dtype, device, 2, lambda word: _leading_bits(word, bits).to(dtype) * scale
    )


def normal(place: Place, key: Key, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normal random numbers with mean 0 and standard deviation 1."""
    _num_bits(dtype)
    if dtype != torch.float64:
        return _fill(
            place,
            key,
            dtype,
            device,
            1,
            lambda word: inverse_normal((word[0] + 0.5) * 2.0**-32, _SINGLE),
        )
    return _fill(
        place,
        key,
        dtype,
        device,
        2,
        lambda word: inverse_normal((_leading_bits(word, 52) + 0.5) * 2.0**-52),
    )


def truncated(
    place: Place, key: Key, low: float, high: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return normal random numbers between the quantiles of the probabilities ``low`` and ``high``:
    0 and 0.5 give negative numbers."""
    width = (high - low) * 2.0**-32
    return _fill(
        place,
        key,
        dtype,
        device,
        1,
        lambda word: inverse_normal((word[0] + 0.5) * width + low, _SINGLE),
    )


def integers(
    place: Place, key: Key, low: int, high: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return random integers in low:high, with a bias of at most (high - low) / 2**62."""
    if high <= low:
        raise ValueError(f"random integers in {low}:{high}: the range is empty")
    return _fill(
        place, key, dtype, device, 2, lambda word: _leading_bits(word, 62) % (high - low) + low
    )


def _num_bits(dtype: torch.dtype) -> int:
    """Return the number of random bits of a uniform number. Raises ValueError for other dtypes."""
    if dtype not in _NUM_BITS_OF_DTYPE:
        raise ValueError(
            f"random numbers of {dtype}; they are made in {', '.join(map(str, _NUM_BITS_OF_DTYPE))}"
        )
    return _NUM_BITS_OF_DTYPE[dtype]


def _leading_bits(word: Sequence[Tensor], bits: int) -> Tensor:
    """Return the leading ``bits`` of two 32-bit words, as an int64 number."""
    return ((word[0] << 32) | word[1]) >> (64 - bits) & ((1 << bits) - 1)


def _fill(
    place: Place,
    key: Key,
    dtype: torch.dtype,
    device: torch.device,
    per_element: int,
    value: Callable[[list[Tensor]], Tensor],
) -> Tensor:
    """Return the rank's local tensor of random numbers: ``value(words)`` of the ``per_element``
    random words of each element."""
    result = torch.empty(place.local_shape, dtype=dtype, device=device)
    if result.numel() == 0:
        return result
    matrix = result.view(-1, result.shape[-1] if result.dim() else 1)
    for chunk, elements in words(place, key, device, per_element):
        target = matrix[chunk.rows, chunk.columns]
        # a block is the ``num`` consecutive columns whose numbers come from one counter
        num, blocks = len(elements), elements[0][0].shape[1]
        aligned = chunk.skip == 0 and target.shape[1] == num * blocks
        padded = target if aligned else target.new_empty(target.shape[0], num * blocks)
        split = padded.view(padded.shape[0], blocks, num)
        for number, word in enumerate(elements):
            split[..., number] = value(word)
        if not aligned:
            target.copy_(padded[:, chunk.skip : chunk.skip + target.shape[1]])
    return result


# -- the inverse of the normal distribution ------------------------------------------------------

_Table = tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# (numerator, denominator) for the middle, the tail and the far tail; constant terms first
_SINGLE: _Table = (
    (
        (3.3871327179e00, 5.0434271938e01, 1.5929113202e02, 5.9109374720e01),
        (1.0, 1.7895169469e01, 7.8757757664e01, 6.7187563600e01),
    ),
    (
        (1.4234372777e00, 2.7568153900e00, 1.3067284816e00, 1.7023821103e-01),
        (1.0, 7.3700164250e-01, 1.2021132975e-01),
    ),
    (
        (6.6579051150e00, 3.0812263860e00, 4.2868294337e-01, 1.7337203997e-02),
        (1.0, 2.4197894225e-01, 1.2258202635e-02),
    ),
)
_DOUBLE: _Table = (
    (
        _numbers(
            """3.3871328727963666080e0 1.3314166789178437745e2 1.9715909503065514427e3
            1.3731693765509461125e4 4.5921953931549871457e4 6.7265770927008700853e4
            3.3430575583588128105e4 2.5090809287301226727e3"""
        ),
        _numbers(
            """1.0 4.2313330701600911252e1 6.8718700749205790830e2
            5.3941960214247511077e3 2.1213794301586595867e4 3.9307895800092710610e4
            2.8729085735721942674e4 5.2264952788528545610e3"""
        ),
    ),
    (
        _numbers(
            """1.42343711074968357734e0 4.63033784615654529590e0 5.76949722146069140550e0
            3.64784832476320460504e0 1.27045825245236838258e0 2.41780725177450611770e-1
            2.27238449892691845833e-2 7.74545014278341407640e-4"""
        ),
        _numbers(
            """1.0 2.05319162663775882187e0 1.67638483018380384940e0
            6.89767334985100004550e-1 1.48103976427480074590e-1 1.51986665636164571966e-2
            5.47593808499534494600e-4 1.05075007164441684324e-9"""
        ),
    ),
    (
        _numbers(
            """6.65790464350110377720e0 5.46378491116411436990e0 1.78482653991729133580e0
            2.96560571828504891230e-1 2.65321895265761230930e-2 1.24266094738807843860e-3
            2.71155556874348757815e-5 2.01033439929228813265e-7"""
        ),
        _numbers(
            """1.0 5.99832206555887937690e-1 1.36929880922735805310e-1
            1.48753612908506148525e-2 7.86869131145613259100e-4 1.84631831751005468180e-5
            1.42151175831644588870e-7 2.04426310338993978564e-15"""
        ),
    ),
)


def inverse_normal(u: Tensor, table: _Table = _DOUBLE) -> Tensor:
    """Return the inverse of the standard normal distribution at u, float64 in (0, 1): a ratio of
    polynomials in q = u - 1/2 if |q| <= 0.425, else in r = sqrt(-log(min(u, 1 - u)))."""
    q = u - 0.5
    result = q * _ratio(0.180625 - q * q, table[0])
    outside = q.abs() > 0.425
    if not u.is_cpu:  # the host would wait for the number of elements outside
        return torch.where(outside, _tails(q, u, table), result)
    at = outside.nonzero(as_tuple=True)
    result[at] = _tails(q[at], u[at], table)
    return result


def _tails(q: Tensor, u: Tensor, table: _Table) -> Tensor:
    """Return the results of `inverse_normal` for |q| > 0.425."""
    r = (-_log(torch.where(q < 0, u, 1.0 - u))).sqrt()
    z = _ratio(r - 1.6, table[1])
    z = torch.where(r > 5.0, _ratio(r - 5.0, table[2]), z)
    return torch.where(q < 0, -z, z)


def _ratio(x: Tensor, terms: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """Return the ratio of two polynomials in x with these coefficients."""
    return _polynomial(x, terms[0]) / _polynomial(x, terms[1])


def _polynomial(x: Tensor, terms: Sequence[float]) -> Tensor:
    """Return the polynomial with the coefficients ``terms``, the constant first, by Horner's
    method. Multiply and add are separate kernels, because a fused kernel would round only once."""
    total = torch.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        total.mul_(x).add_(term)
    return total


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive float64 numbers, to a relative 1e-15:
    log(m 2^e) = e log(2) + 2 atanh(s), with s = (m - 1) / (m + 1)."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = torch.where(small, exponent - 1, exponent).to(x.dtype)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(s * s, [2.0 / (2 * k + 1) for k in range(11)])
    return exponent * math.log(2.0) + s * series
