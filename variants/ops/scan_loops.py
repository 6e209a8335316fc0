"""The loops of the selective scan that numba compiles: channels in the vector registers, once for each dtype, kept on disk.

In a loop over lanes `math.exp` would call libm once a number. `_exp32` is a polynomial with an error below 2 units in the last place, as in
Cephes (Moshier): x = k ln 2 + r, and 2^k is put together from its bits.

Names: d steps, r rates, w what is written (step times x), b and c how it is written and read, a decays, h states, g gradients by them.
"""

import math
from typing import Any, no_type_check

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from variants.ops.chunks import LOWEST

#: Channels of a task, a multiple of any vector register; tokens between two states that are kept, whose inside fits the caches.
LANES, SEGMENT = 32, 32

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
def _exp(x):
    """exp(x) in the precision of x."""


@overload(_exp)
@no_type_check
def _exp_of_type(x):
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


@njit(**LOOPS)
@no_type_check
def forward(first, end, x, step, rate, write, read, starts, initial, y, last, borders, signed):
    """Tasks first, ..., end - 1. With signed = 1 a decay is 2 exp - 1, with 0 it is exp."""
    time, channels = x.shape[1:]
    size = rate.shape[0]
    groups = (channels + LANES - 1) // LANES
    less, factor = x.dtype.type(signed), x.dtype.type(1 + signed)
    # Lanes beyond the last channel have rates, states and inputs of 0.
    h, r = np.zeros((size, LANES), x.dtype), np.zeros((size, LANES), x.dtype)
    d, w, out = np.zeros(LANES, x.dtype), np.zeros(LANES, x.dtype), np.zeros(LANES, x.dtype)
    for task in range(first, end):
        row, start = task // groups, task % groups * LANES
        width = min(LANES, channels - start)
        if width < LANES:
            h[:], r[:], d[:], w[:] = 0, 0, 0, 0
        for n in range(size):
            for lane in range(width):
                r[n, lane] = rate[n, start + lane]
                h[n, lane] = initial[row, n, start + lane]
        for segment in range((time + SEGMENT - 1) // SEGMENT):
            begin = segment * SEGMENT
            for n in range(size):
                for lane in range(width):
                    borders[row, segment, n, start + lane] = h[n, lane]
            for t in range(begin, min(begin + SEGMENT, time)):
                if starts[row, t]:
                    for n in range(size):
                        for lane in range(LANES):
                            h[n, lane] = 0
                for lane in range(width):
                    d[lane] = step[row, t, start + lane]
                    w[lane] = d[lane] * x[row, t, start + lane]
                for lane in range(LANES):
                    out[lane] = 0
                for n in range(size):
                    b, c = write[row, t, n], read[row, t, n]
                    for lane in range(LANES):
                        a = _exp(d[lane] * r[n, lane]) * factor - less
                        new = a * h[n, lane] + w[lane] * b
                        h[n, lane] = new
                        out[lane] += c * new
                for lane in range(width):
                    y[row, t, start + lane] = out[lane]
        for n in range(size):
            for lane in range(width):
                last[row, n, start + lane] = h[n, lane]


@njit(**LOOPS)
@no_type_check
def backward(
    first,
    end,
    x,
    step,
    rate,
    write,
    read,
    starts,
    borders,
    grad_y,
    grad_last,
    by_x,
    by_step,
    by_rate,
    by_write,
    by_read,
    by_initial,
    signed,
):
    """Tasks first, ..., end - 1: segments from the last to the first, the states and decays of each computed again.

    With g_t the gradient by h_t: g_t = grad_y_t read_t + a_{t+1} g_{t+1}, and that by the exponent of a_t is g_t h_{t-1} (a_t + signed).
    """
    time, channels = x.shape[1:]
    size = rate.shape[0]
    groups = (channels + LANES - 1) // LANES
    zero, one, less, factor = x.dtype.type(0), x.dtype.type(1), x.dtype.type(signed), x.dtype.type(1 + signed)
    g, r, total = np.zeros((size, LANES), x.dtype), np.zeros((size, LANES), x.dtype), np.zeros((size, LANES), x.dtype)
    h, a = np.zeros((SEGMENT + 1, size, LANES), x.dtype), np.zeros((SEGMENT, size, LANES), x.dtype)
    d, w, gy = np.zeros((SEGMENT, LANES), x.dtype), np.zeros((SEGMENT, LANES), x.dtype), np.zeros((SEGMENT, LANES), x.dtype)
    by_w, by_d = np.zeros(LANES, x.dtype), np.zeros(LANES, x.dtype)
    for task in range(first, end):
        row, group = task // groups, task % groups
        start = group * LANES
        width = min(LANES, channels - start)
        if width < LANES:
            g[:], r[:], h[0], d[:], w[:], gy[:] = 0, 0, 0, 0, 0, 0
        total[:] = 0
        for n in range(size):
            for lane in range(width):
                r[n, lane] = rate[n, start + lane]
                g[n, lane] = grad_last[row, n, start + lane]
        for segment in range((time + SEGMENT - 1) // SEGMENT - 1, -1, -1):
            begin = segment * SEGMENT
            tokens = min(SEGMENT, time - begin)
            for n in range(size):
                for lane in range(width):
                    h[0, n, lane] = borders[row, segment, n, start + lane]
            for i in range(tokens):
                t = begin + i
                kept = zero if starts[row, t] else one
                for lane in range(width):
                    d[i, lane] = step[row, t, start + lane]
                    w[i, lane] = d[i, lane] * x[row, t, start + lane]
                    gy[i, lane] = grad_y[row, t, start + lane]
                for n in range(size):
                    b = write[row, t, n]
                    for lane in range(LANES):
                        decay = (_exp(d[i, lane] * r[n, lane]) * factor - less) * kept
                        a[i, n, lane] = decay
                        h[i + 1, n, lane] = decay * h[i, n, lane] + w[i, lane] * b
            for i in range(tokens - 1, -1, -1):
                t = begin + i
                shift = zero if starts[row, t] else less
                for lane in range(LANES):
                    by_w[lane] = by_d[lane] = 0
                for n in range(size):
                    b, c = write[row, t, n], read[row, t, n]
                    by_b = by_c = zero
                    for lane in range(LANES):
                        grad = g[n, lane] + gy[i, lane] * c
                        by_c += gy[i, lane] * h[i + 1, n, lane]
                        by_b += grad * w[i, lane]
                        by_w[lane] += grad * b
                        decay = a[i, n, lane]
                        by_exponent = grad * h[i, n, lane] * (decay + shift)
                        by_d[lane] += by_exponent * r[n, lane]
                        total[n, lane] += by_exponent * d[i, lane]
                        g[n, lane] = decay * grad
                    by_write[group, row, t, n] = by_b
                    by_read[group, row, t, n] = by_c
                for lane in range(width):
                    by_x[row, t, start + lane] = by_w[lane] * d[i, lane]
                    by_step[row, t, start + lane] = by_d[lane] + by_w[lane] * x[row, t, start + lane]
        for n in range(size):
            for lane in range(width):
                by_rate[row, n, start + lane] = total[n, lane]
                by_initial[row, n, start + lane] = g[n, lane]
