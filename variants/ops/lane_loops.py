"""Loops over single tokens that several query heads share: a row of a key is read once for four heads, and lies in registers meanwhile.

Names as in `gather_loops`. A tile of queries looks at one stretch of slots after another, so that its keys and values stay in the second
cache until all queries of the tile have read what they chose of it. All widths are multiples of 2 LANES, all heads of 4, filled up with 0:
q (batch, groups, shared, time, width), flat tables k (batch * heads * slots * width).
"""

from typing import no_type_check

import numpy as np
from numba import njit

from variants.ops.lanes import LANES, gather, largest, products, scatter
from variants.ops.loops import LOOPS, exp

#: Queries of a tile, and numbers of the tables that a stretch of slots is made of (1 MB in fp32).
QUERIES, STRETCH = 128, 2**18


@njit(**LOOPS)
@no_type_check
def listed(chosen, size, last, slots):
    """Write the slots of the chosen blocks, up to the last one that is seen; how many."""
    count = 0
    if size == 1:
        for block in chosen:
            slots[count] = block
            count += 0 <= block <= last
        return count
    for block in chosen:
        if block >= 0:
            for j in range(block * size, min(block * size + size, last + 1)):
                slots[count] = j
                count += 1
    return count


@njit(**LOOPS)
@no_type_check
def next_ones(slots, start, count, end, places):
    """Copy the slots before `end` that come next; how many."""
    n = 0
    while start + n < count and slots[start + n] < end:
        places[n] = slots[start + n]
        n += 1
    return n


@njit(**LOOPS)
@no_type_check
def forward(first, end, q, k, v, heads, chosen, place, size, scale, y, lse):
    """Tasks first, ..., end - 1; a task is one (row, group, tile of queries)."""
    groups, shared, time, width = q.shape[1:]
    out = y.shape[4]
    total = len(k) // (len(q) * heads * width)
    tiles = (time + QUERIES - 1) // QUERIES
    most = chosen.shape[3] * size
    step = (most + 3) // 4 * 4
    stretch = max(256, STRETCH // (width + out))
    slots, places = np.empty((QUERIES, most), np.int32), np.empty(step, np.int64)
    count, taken = np.empty(QUERIES, np.int64), np.empty(QUERIES, np.int64)
    rows, sums = np.empty((QUERIES, shared * width), q.dtype), np.empty((QUERIES, shared * out), q.dtype)
    top, norm = np.empty((QUERIES, shared), q.dtype), np.empty((QUERIES, shared), q.dtype)
    s, spare = np.empty(4 * step, q.dtype), np.empty(LANES, q.dtype)
    zero, nothing = q.dtype.type(0), q.dtype.type(-np.inf)
    for task in range(first, end):
        row, rest = task // (groups * tiles), task % (groups * tiles)
        group, start = rest // tiles, rest % tiles * QUERIES
        base, choice = row * heads + group * heads // groups, group * chosen.shape[1] // groups
        queries = min(QUERIES, time - start)
        for t in range(queries):
            count[t] = listed(chosen[row, choice, start + t], size, min(place[row, start + t], total - 1), slots[t])
            taken[t] = 0
            for i in range(shared):
                top[t, i], norm[t, i] = nothing, zero
                for c in range(width):
                    rows[t, i * width + c] = q[row, group, i, start + t, c] * scale
            for c in range(shared * out):
                sums[t, c] = zero
        for border in range(stretch, total + stretch, stretch):
            for t in range(queries):
                n = next_ones(slots[t], taken[t], count[t], border if border < total else total, places)
                if n == 0:
                    continue
                taken[t] += n
                for four in range(0, shared, 4):
                    products(rows[t, four * width :], k, base * total * width, width, places, n, s, step)
                    for i in range(4):
                        m = max(top[t, four + i], largest(s, i * step, n, spare))
                        factor = exp(top[t, four + i] - m)
                        found = zero
                        for j in range(i * step, i * step + n):
                            s[j] = exp(s[j] - m)
                        for j in range(i * step, i * step + n):
                            found += s[j]
                        top[t, four + i] = m
                        norm[t, four + i] = norm[t, four + i] * factor + found
                        for c in range((four + i) * out, (four + i + 1) * out):
                            sums[t, c] *= factor
                    gather(s, step, v, base * total * out, out, places, n, sums[t, four * out :])
        for t in range(queries):
            for i in range(shared):
                lse[row, group, i, start + t] = top[t, i] + np.log(norm[t, i]) if count[t] else nothing
                inverse = 1 / norm[t, i] if count[t] else zero
                for c in range(out):
                    y[row, group, i, start + t, c] = sums[t, i * out + c] * inverse


@njit(**LOOPS)
@no_type_check
def backward(first, end, parts, q, k, v, heads, chosen, place, size, scale, lse, delta, gy, gq, gk, gv):
    """Tasks first, ..., end - 1; a task is one (row, group, part of the queries), which adds to gk and gv of its own.

    delta: y . gy less the gradient by the log-sum-exp. gk, gv: (parts * groups / heads, numbers of the table).
    """
    groups, shared, time, width = q.shape[1:]
    out = gy.shape[4]
    total = len(k) // (len(q) * heads * width)
    most = chosen.shape[3] * size
    step = (most + 3) // 4 * 4
    stretch = max(256, STRETCH // 2 // (width + out))
    slots, places = np.empty((QUERIES, most), np.int32), np.empty(step, np.int64)
    count, taken = np.empty(QUERIES, np.int64), np.empty(QUERIES, np.int64)
    rows, got = np.empty((QUERIES, shared * width), q.dtype), np.empty((QUERIES, shared * width), q.dtype)
    came = np.empty((QUERIES, shared * out), q.dtype)
    s, by_s = np.empty(4 * step, q.dtype), np.empty(4 * step, q.dtype)
    zero = q.dtype.type(0)
    for task in range(first, end):
        row, rest = task // (groups * parts), task % (groups * parts)
        group, part = rest // parts, rest % parts
        base, choice = row * heads + group * heads // groups, group * chosen.shape[1] // groups
        copy = (group % (groups // heads)) * parts + part
        stop = time * (part + 1) // parts
        for start in range(time * part // parts, stop, QUERIES):
            queries = min(QUERIES, stop - start)
            for t in range(queries):
                count[t] = listed(chosen[row, choice, start + t], size, min(place[row, start + t], total - 1), slots[t])
                taken[t] = 0
                for i in range(shared):
                    for c in range(width):
                        rows[t, i * width + c] = q[row, group, i, start + t, c] * scale
                        got[t, i * width + c] = zero
                    for c in range(out):
                        came[t, i * out + c] = gy[row, group, i, start + t, c]
            for border in range(stretch, total + stretch, stretch):
                for t in range(queries):
                    n = next_ones(slots[t], taken[t], count[t], border if border < total else total, places)
                    if n == 0:
                        continue
                    taken[t] += n
                    for four in range(0, shared, 4):
                        r, g = rows[t, four * width :], came[t, four * out :]
                        products(r, k, base * total * width, width, places, n, s, step)
                        products(g, v, base * total * out, out, places, n, by_s, step)
                        for i in range(4):
                            norm, less = lse[row, group, four + i, start + t], delta[row, group, four + i, start + t]
                            for j in range(i * step, i * step + n):
                                p = exp(s[j] - norm)
                                by_s[j] = p * (by_s[j] - less)
                                s[j] = p
                        scatter(s, step, g, gv[copy], base * total * out, out, places, n)
                        scatter(by_s, step, r, gk[copy], base * total * width, width, places, n)
                        gather(by_s, step, k, base * total * width, width, places, n, got[t, four * width :])
            for t in range(queries):
                for i in range(shared):
                    for c in range(width):
                        gq[row, group, i, start + t, c] = got[t, i * width + c] * scale
