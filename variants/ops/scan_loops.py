"""The loops of the selective scan: channels in the vector registers, time one token after another.

Names: d steps, r rates, w what is written (step times x), b and c how it is written and read, a decays, h states, g gradients by them.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from variants.ops.loops import LOOPS, exp

#: Channels of a task, a multiple of any vector register; tokens between two states that are kept, whose inside fits the caches.
LANES, SEGMENT = 32, 32


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
                        a = exp(d[lane] * r[n, lane]) * factor - less
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
                        decay = (exp(d[i, lane] * r[n, lane]) * factor - less) * kept
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
