"""The loops of a lightning indexer: scores of all slots, and what it learns from those that were chosen.

Names as in `variants.ops.indexer`; tables, widths and heads as in `variants.ops.lane_loops`.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from variants.ops.lane_loops import STRETCH, listed, next_ones
from variants.ops.lanes import LANES, gather, largest, products, scatter
from variants.ops.loops import LOOPS, exp, log

#: Queries of a tile, whose scores are all kept.
QUERIES = 32


@njit(**LOOPS)
@no_type_check
def score(first, end, fits, weight, place, start, scores):
    """Rows first, ..., end - 1: scores[row, start + s] = sum_h weight[h] max(0, fits[h, s]), -inf behind `place`.

    fits: (pieces, heads, queries, slots); a row is one (piece, query).
    """
    heads, queries, slots = fits.shape[1:]
    zero, nothing = scores.dtype.type(0), scores.dtype.type(-np.inf)
    for row in range(first, end):
        piece, t = row // queries, row % queries
        found = scores[piece, t, start : start + slots]
        found[:] = zero
        for h in range(heads):
            factor, fit = weight[piece, h, t], fits[piece, h, t]
            for n in range(slots):
                found[n] += factor * max(zero, fit[n])
        for n in range(max(0, place[piece, t] + 1 - start), slots):
            found[n] = nothing


@njit(**LOOPS)
@no_type_check
def diverge(
    first, end, parts, q, k, heads, lse, shared, index_q, index_k, weight, chosen, valid, scale, index_scale, loss, by_q, by_k, by_weight
):
    """Tasks first, ..., end - 1; a task is one (row, part of the queries), which adds to by_k of its own.

    shared: query heads that share keys, before they were filled up. index_q: (batch, index_heads, time, width).
    """
    groups, filled, time, width = q.shape[1:]
    index_heads, index_width = index_q.shape[1], index_q.shape[3]
    total = len(k) // (len(q) * heads * width)
    most = chosen.shape[2]
    step = (most + 7) // 4 * 4
    stretch = max(256, STRETCH // (heads * width + index_width))
    slots, places = np.empty((QUERIES, most), np.int32), np.empty(step, np.int64)
    count, taken = np.empty(QUERIES, np.int64), np.empty(QUERIES, np.int64)
    rows, asked = np.empty((QUERIES, groups * filled * width), q.dtype), np.empty((QUERIES, index_heads * index_width), q.dtype)
    got = np.empty((QUERIES, index_heads * index_width), q.dtype)
    shares, scores, fits = (
        np.empty((QUERIES, step), q.dtype),
        np.empty((QUERIES, step), q.dtype),
        np.empty((QUERIES, index_heads * step), q.dtype),
    )
    s, spare = np.empty(4 * step, q.dtype), np.empty(LANES, q.dtype)
    zero, one = q.dtype.type(0), q.dtype.type(1)
    part_of = one / q.dtype.type(groups * shared)
    for task in range(first, end):
        row, part = task // parts, task % parts
        stop = time * (part + 1) // parts
        for start in range(time * part // parts, stop, QUERIES):
            queries = min(QUERIES, stop - start)
            for t in range(queries):
                count[t] = listed(chosen[row, start + t], 1, total - 1, slots[t]) if valid[row, start + t] else 0
                taken[t] = 0
                shares[t], scores[t] = zero, zero
                for i in range(groups * filled):
                    for c in range(width):
                        rows[t, i * width + c] = q[row, i // filled, i % filled, start + t, c] * scale
                for i in range(index_heads):
                    for c in range(index_width):
                        asked[t, i * index_width + c] = index_q[row, i, start + t, c] * index_scale
                        got[t, i * index_width + c] = zero
            for border in range(stretch, total + stretch, stretch):
                for t in range(queries):
                    at = taken[t]
                    n = next_ones(slots[t], at, count[t], border if border < total else total, places)
                    if n == 0:
                        continue
                    taken[t] += n
                    for four in range(0, groups * filled, 4):
                        group = four // filled
                        base = (row * heads + group * heads // groups) * total * width
                        products(rows[t, four * width :], k, base, width, places, n, s, step)
                        for i in range(min(4, shared - four % filled)):
                            norm = lse[row, group, four % filled + i, start + t]
                            for j in range(n):
                                shares[t, at + j] += exp(s[i * step + j] - norm)
                    for four in range(0, index_heads, 4):
                        fit = fits[t, four * step + at :]
                        products(asked[t, four * index_width :], index_k, row * total * index_width, index_width, places, n, fit, step)
                        for i in range(4):
                            factor = weight[row, four + i, start + t]
                            for j in range(n):
                                scores[t, at + j] += factor * max(zero, fit[i * step + j])
            for t in range(queries):
                n = count[t]
                taken[t] = 0
                for i in range(index_heads):
                    by_weight[row, i, start + t] = zero
                if n == 0:
                    continue
                share, score = shares[t], scores[t]
                top = largest(score, 0, n, spare)
                norm, mass, told = zero, zero, zero
                for j in range(n):
                    score[j] -= top
                    share[j] *= part_of
                for j in range(n):
                    norm += exp(score[j])
                    mass += share[j]
                rest = np.log(norm)
                for j in range(n):
                    told += share[j] * (log(share[j]) - score[j] + rest) if share[j] > zero else zero
                loss[task] += told
                inverse = mass / norm
                for j in range(n):
                    score[j] = exp(score[j]) * inverse - share[j]
                for i in range(index_heads):
                    factor, found = weight[row, i, start + t], zero
                    fit = fits[t, i * step : i * step + n]
                    for j in range(n):
                        found += score[j] * max(zero, fit[j])
                    for j in range(n):
                        fit[j] = score[j] * factor if fit[j] > zero else zero
                    by_weight[row, i, start + t] = found
            for border in range(stretch, total + stretch, stretch):
                for t in range(queries):
                    at = taken[t]
                    n = next_ones(slots[t], at, count[t], border if border < total else total, places)
                    if n == 0:
                        continue
                    taken[t] += n
                    for four in range(0, index_heads, 4):
                        fit, base = fits[t, four * step + at :], row * total * index_width
                        gather(fit, step, index_k, base, index_width, places, n, got[t, four * index_width :])
                        scatter(fit, step, asked[t, four * index_width :], by_k[part], base, index_width, places, n)
            for t in range(queries):
                for i in range(index_heads):
                    for c in range(index_width):
                        by_q[row, i, start + t, c] = got[t, i * index_width + c] * index_scale
