"""What compiled loops share: how numba compiles them, and an exponential for loops over lanes.

numba compiles a loop once for each dtype and keeps it on disk. In a loop over lanes `math.exp` would call libm once a number; `exp` is a
polynomial in fp32, with an error below 2 units in the last place, as in Cephes (Moshier): x = k ln 2 + r, and 2^k is put together from its
bits. In fp64 it is libm's.
"""

import math
from typing import Any, no_type_check

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from variants.ops.chunks import LOWEST

# numba compiles a function itself, and none that checks types around it: hence no_type_check.
#
# Additions may be done in another order (a sum over lanes is one in the registers), but never where an exponential is computed: there the
# order is what makes it precise. Nothing assumes that there is no NaN.
PRECISE: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy", "cache": True}
LOOPS: dict[str, Any] = {"fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy", "cache": True, "nogil": True}

LEAST = np.float32(LOWEST)
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(math.log2(math.e)), np.float32(0.693359375), np.float32(math.log(2) - 0.693359375)
C2, C3, C4 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
C5, C6, C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
SMALLEST, HALF_ROOT = np.float32(2**-126), np.int32(0x3F3504F3)
ONE, EXPONENT_BIAS, MANTISSA_BITS = np.float32(1), np.int32(127), np.int32(23)


@intrinsic
@no_type_check
def _float_of_bits(typing, bits):
    """An int32 read as the float32 of the same bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(**PRECISE)
@no_type_check
def _exp32(x):
    """exp(x) for x <= 0, and exp(LOWEST) for what is below that; NaN stays NaN."""
    x = max(x, LEAST)
    k = np.rint(x * LOG2_E)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = ((((C7 * r + C6) * r + C5) * r + C4) * r + C3) * r + C2
    return (p * (r * r) + r + ONE) * _float_of_bits((np.int32(k) + EXPONENT_BIAS) << MANTISSA_BITS)


@no_type_check
def exp(x):
    """exp(x) in the precision of x."""


@overload(exp)
@no_type_check
def _exp_of_type(x):
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


@intrinsic
@no_type_check
def _bits_of_float(typing, x):
    """The bits of a float32 read as an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(**PRECISE)
@no_type_check
def _log32(x):
    """log(x) for normal x > 0, and that of the least normal number for what is below."""
    bits = _bits_of_float(max(x, SMALLEST))
    # x = 2^k (1 + r) with 1 + r between the roots of 1/2 and 2.
    k = (bits - HALF_ROOT) >> MANTISSA_BITS
    r = _float_of_bits(bits - (k << MANTISSA_BITS)) - ONE
    p = np.float32(7.0376836292e-2)
    p = p * r + np.float32(-1.1514610310e-1)
    p = p * r + np.float32(1.1676998740e-1)
    p = p * r + np.float32(-1.2420140846e-1)
    p = p * r + np.float32(1.4249322787e-1)
    p = p * r + np.float32(-1.6668057665e-1)
    p = p * r + np.float32(2.0000714765e-1)
    p = p * r + np.float32(-2.4999993993e-1)
    p = p * r + np.float32(3.3333331174e-1)
    squared = r * r
    high = np.float32(k)
    return (p * r * squared + high * LN2_LOW - np.float32(0.5) * squared) + r + high * LN2_HIGH


@no_type_check
def log(x):
    """log(x) in the precision of x, for x > 0."""


@overload(log)
@no_type_check
def _log_of_type(x):
    if x == types.float32:
        return lambda x: _log32(x)
    return lambda x: math.log(x)
