"""The loops of attention to selected blocks: a query at a time, its keys read where they lie.

Names: q, k, v, y as in attention, g their gradients; s logits, p weights, m the largest logit of a row, l its log-sum-exp. Query heads that
share a choice and a key head stand side by side in q (batch, groups, shared, time, width), so that a key is read once for all of them.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from variants.ops.loops import LOOPS, exp

#: Bits that are looked at together in the search for the score to reach.
DIGIT = 11


@njit(**LOOPS)
@no_type_check
def best(first, end, scores, chosen):
    """For rows first, ..., end - 1 the indices of the highest scores, ascending, then -1; of equal ones the first."""
    candidates, count = scores.shape[1], chosen.shape[1]
    kept = np.empty(count, scores.dtype)
    index = np.empty(count, np.int64)
    nothing = scores.dtype.type(-np.inf)
    for row in range(first, end):
        filled = 0
        for n in range(candidates):
            score = scores[row, n]
            if score == nothing or (filled == count and score <= kept[count - 1]):
                continue
            # Behind its equals, which came before it.
            at = min(filled, count - 1)
            while at > 0 and kept[at - 1] < score:
                kept[at], index[at] = kept[at - 1], index[at - 1]
                at -= 1
            kept[at], index[at] = score, n
            filled = min(filled + 1, count)
        for n in range(filled):
            value = index[n]
            at = n
            while at > 0 and chosen[row, at - 1] > value:
                chosen[row, at] = chosen[row, at - 1]
                at -= 1
            chosen[row, at] = value
        for n in range(filled, count):
            chosen[row, n] = -1


@njit(**LOOPS)
@no_type_check
def best_of_many(first, end, scores, bits, chosen, broken):
    """The same for counts that are no longer kept in order; the score to reach is found digit by digit, the highest first.

    bits: the scores, read as whole numbers. broken: set to 1 for a row in which something is no number.
    """
    candidates, count = scores.shape[1], chosen.shape[1]
    order, left, here = np.empty(candidates, bits.dtype), np.empty(candidates, bits.dtype), np.zeros(1 << DIGIT, np.int64)
    picked = np.empty(min(count, candidates) + 1, np.int64)
    width, one = 8 * scores.itemsize, bits.dtype.type(1)
    low = (one << (width - 1)) - one
    nothing = -low - one
    for row in range(first, end):
        seen, wrong = 0, 0
        for n in range(candidates):
            wrong += scores[row, n] != scores[row, n]
            seen += scores[row, n] > -np.inf
        broken[row] = wrong > 0
        for n in range(candidates):
            # Whole numbers that are ordered as the scores are, the same for both zeros, and the least one for what may not be chosen.
            b = bits[row, n]
            b = (b ^ low) + one if b < 0 else b
            order[n] = b if scores[row, n] > -np.inf else nothing
        least, equals = nothing + one, candidates
        if seen > count:
            need, kept, many, shift = count, order, candidates, width
            offset, least = 1 << (DIGIT - 1), bits.dtype.type(0)
            while shift > 0:
                digit = min(DIGIT, shift)
                shift -= digit
                mask = (1 << digit) - 1
                here[:] = 0
                for n in range(many):
                    here[((kept[n] >> shift) + offset) & mask] += 1
                value = mask
                while here[value] < need:
                    need -= here[value]
                    value -= 1
                least |= bits.dtype.type(value - offset) << shift
                size = 0
                for n in range(many):
                    left[size] = kept[n]
                    size += ((kept[n] >> shift) + offset) & mask == value
                kept, many, offset = left, size, 0
            equals = need
        filled = 0
        for n in range(candidates):  # without branches, which nothing could predict
            picked[filled] = n
            equal = (order[n] == least) & (equals > 0)
            filled += (order[n] > least) | equal
            equals -= equal
        for n in range(count):
            chosen[row, n] = picked[n] if n < filled else -1


@njit(**LOOPS)
@no_type_check
def forward(first, end, q, k, v, chosen, place, size, scale, y, lse):
    """Tasks first, ..., end - 1; a task is one (row, group, query)."""
    groups, shared, time, width = q.shape[1:]
    heads, slots = k.shape[1:3]
    out = v.shape[3]
    count = chosen.shape[3]
    s = np.empty((shared, count * size), q.dtype)
    own = np.empty((shared, width), q.dtype)
    total = np.empty((shared, out), q.dtype)
    zero = q.dtype.type(0)
    nothing = q.dtype.type(-np.inf)
    for task in range(first, end):
        row, rest = task // (groups * time), task % (groups * time)
        group, t = rest // time, rest % time
        head, choice = group * heads // groups, group * chosen.shape[1] // groups
        last = min(place[row, t], slots - 1)
        for i in range(shared):
            for c in range(width):
                own[i, c] = q[row, group, i, t, c] * scale
            for c in range(out):
                total[i, c] = zero
        keys = 0
        for n in range(count):
            block = chosen[row, choice, t, n]
            if block < 0:
                continue
            start = block * size
            for j in range(start, min(start + size, last + 1)):
                for i in range(shared):
                    dot = zero
                    for c in range(width):
                        dot += own[i, c] * k[row, head, j, c]
                    s[i, keys] = dot
                keys += 1
        for i in range(shared):
            m = nothing
            for j in range(keys):
                m = max(m, s[i, j])
            norm = zero
            for j in range(keys):
                p = exp(s[i, j] - m)
                s[i, j] = p
                norm += p
            lse[row, group, i, t] = m + np.log(norm) if keys else nothing
            inverse = 1 / norm if keys else zero
            for j in range(keys):
                s[i, j] *= inverse
        keys = 0
        for n in range(count):
            block = chosen[row, choice, t, n]
            if block < 0:
                continue
            start = block * size
            for j in range(start, min(start + size, last + 1)):
                for i in range(shared):
                    p = s[i, keys]
                    for c in range(out):
                        total[i, c] += p * v[row, head, j, c]
                keys += 1
        for i in range(shared):
            for c in range(out):
                y[row, group, i, t, c] = total[i, c]


@njit(**LOOPS)
@no_type_check
def backward(first, end, parts, q, k, v, chosen, place, size, scale, lse, delta, gy, gq, gk, gv):
    """Tasks first, ..., end - 1; a task is one (row, group, part of the queries), which adds to gk and gv of its own.

    delta: y . gy less the gradient by the log-sum-exp. gk, gv: (parts * groups / heads, batch, heads, slots, width).
    """
    groups, shared, time, width = q.shape[1:]
    heads, slots = k.shape[1:3]
    out = v.shape[3]
    count = chosen.shape[3]
    zero = q.dtype.type(0)
    own = np.empty((shared, width), q.dtype)
    got = np.empty((shared, width), q.dtype)
    came = np.empty((shared, out), q.dtype)
    for task in range(first, end):
        row, rest = task // (groups * parts), task % (groups * parts)
        group, part = rest // parts, rest % parts
        head, choice = group * heads // groups, group * chosen.shape[1] // groups
        place_of = (group % (groups // heads)) * parts + part
        for t in range(time * part // parts, time * (part + 1) // parts):
            last = min(place[row, t], slots - 1)
            for i in range(shared):
                for c in range(width):
                    own[i, c] = q[row, group, i, t, c]
                    got[i, c] = zero
                for c in range(out):
                    came[i, c] = gy[row, group, i, t, c]
            for n in range(count):
                block = chosen[row, choice, t, n]
                if block < 0:
                    continue
                start = block * size
                for j in range(start, min(start + size, last + 1)):
                    for i in range(shared):
                        dot = zero
                        for c in range(width):
                            dot += own[i, c] * k[row, head, j, c]
                        by_p = zero
                        for c in range(out):
                            by_p += came[i, c] * v[row, head, j, c]
                        p = exp(dot * scale - lse[row, group, i, t])
                        by_s = p * (by_p - delta[row, group, i, t]) * scale
                        for c in range(out):
                            gv[place_of, row, head, j, c] += p * came[i, c]
                        for c in range(width):
                            got[i, c] += by_s * k[row, head, j, c]
                            gk[place_of, row, head, j, c] += by_s * own[i, c]
            for i in range(shared):
                for c in range(width):
                    gq[row, group, i, t, c] = got[i, c]
