"""Statistics for few seeds: what a handful of runs can say, and what it cannot.

With five seeds a t interval covers its nominal 95 %; a percentile or BCa bootstrap covers about 81 %, and 1.96 standard errors 86 %. So
intervals are t intervals, and a difference is tested exactly, by flipping the signs of its paired values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.05
POWERLESS = "cannot be significant"
#: Up to here every assignment of signs is tried (65,536 of them); above, as many are drawn.
EXACT_SEEDS = 17


class Interval(NamedTuple):
    """A mean with a confidence interval, in the unit of the values; `low` and `high` are None where one value gives no interval."""

    mean: float
    low: float | None
    high: float | None


class Rate(NamedTuple):
    """`successes` of `n`, with an interval for the probability."""

    successes: int
    n: int
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean and two-sided 95 % t interval. It is not clipped to the range of the metric. Raises ValueError for no values."""
    if not values:
        raise ValueError("the mean of no values")
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Interval(mean, None, None)
    margin = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - margin, mean + margin)


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p of the hypothesis that paired differences are symmetric around 0: the share of sign assignments with as large a |sum|.

    Exact up to EXACT_SEEDS values; beyond, from a fixed random sample that counts the observed assignment among its own.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n <= EXACT_SEEDS:
        # The last sign stays: turning all of them around gives the same |sum|.
        signs = 1 - 2 * (np.arange(2 ** max(n - 1, 0))[:, None] >> np.arange(n) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], size=(2 ** (EXACT_SEEDS - 1), n))
        signs[0] = 1
    # Assignments that are equal on paper must not be parted by the order of a sum.
    tolerance = 1e-12 * np.abs(values).sum()
    return float(np.mean(np.abs(signs @ values) >= abs(values.sum()) - tolerance))


def smallest_p(n: int) -> float:
    """The smallest two-sided p that `n` pairs can reach in the sign-flip test."""
    return min(1.0, 2.0 ** (1 - n))


def seeds_needed(comparisons: int = 1) -> int:
    """The fewest pairs with which the strongest of so many comparisons can be significant."""
    n = 1
    while smallest_p(n) * comparisons >= LEVEL:
        n += 1
    return n


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p values, in the given order, that may be compared with the level all together."""
    corrected = [0.0] * len(p_values)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = worst
    return corrected


def success_rate(successes: int, n: int) -> Rate:
    """The 95 % Clopper-Pearson interval. Raises ValueError unless 0 <= successes <= n and n > 0."""
    interval = stats.binomtest(successes, n).proportion_ci(1 - LEVEL, method="exact")
    return Rate(successes, n, float(interval.low), float(interval.high))


def verdict(difference: float, p: float, n: int, comparisons: int = 1) -> str:
    """In words: what `n` paired seeds say of a difference whose Holm-corrected p, over so many comparisons, is `p`."""
    if smallest_p(n) * comparisons >= LEVEL:
        among = f" over {comparisons} comparisons" if comparisons > 1 else ""
        return f"{POWERLESS} at {LEVEL} with n={n} seed{'s' * (n != 1)}{among} (needs {seeds_needed(comparisons)})"
    if p >= LEVEL:
        return f"not distinguishable from the baseline (p={p:.2g})"
    return f"{'above' if difference > 0 else 'below'} the baseline (p={p:.2g})"
