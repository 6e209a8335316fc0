"""Statistics against independent oracles: enumeration in exact arithmetic, scipy, and published numbers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.compare.statistics import holm, mean_interval, seeds_needed, sign_flip, smallest_p, success_rate, verdict

tenths = st.lists(st.integers(-10, 10), min_size=1, max_size=9)


@settings(deadline=None)  # a loaded machine is slow, not wrong
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_the_interval_is_students(values: list[float]) -> None:
    found = mean_interval(values)
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    quantile = -stats.t(df=len(values) - 1).isf(0.975)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert found.low == pytest.approx(np.mean(values) - quantile * error, abs=1e-9)
    assert found.high == pytest.approx(np.mean(values) + quantile * error, abs=1e-9)


def test_three_seeds_give_the_quantile_of_two_degrees_of_freedom() -> None:
    # 4.303 stands in every printed t table; the standard error of 1, 2, 3 is 1 / sqrt(3).
    assert mean_interval([1.0, 2.0, 3.0]).high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)


def test_one_seed_gives_no_interval() -> None:
    assert mean_interval([0.5]) == (0.5, None, None)


def test_the_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


@settings(deadline=None)  # a loaded machine is slow, not wrong
@given(tenths)
def test_the_sign_flip_test_is_exact_where_assignments_tie(values: list[int]) -> None:
    exact = [Fraction(value, 10) for value in values]
    sums = [
        abs(sum((s * v for s, v in zip(signs, exact, strict=True)), Fraction())) for signs in itertools.product((1, -1), repeat=len(values))
    ]
    observed = abs(sum(exact, Fraction()))
    share = sum(total >= observed for total in sums) / len(sums)
    assert sign_flip([value / 10 for value in values]) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("n", [2, 5, 9])
def test_the_sign_flip_test_agrees_with_scipys_permutation_test(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.3, 1, n)
    oracle = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=2**n)
    assert sign_flip(differences.tolist()) == pytest.approx(oracle.pvalue, abs=1e-12)


@pytest.mark.parametrize(("n", "p"), [(3, 0.25), (4, 0.125), (5, 0.0625), (6, 0.031), (8, 0.008)])
def test_the_smallest_p_of_few_seeds_is_the_published_one(n: int, p: float) -> None:
    assert round(sign_flip([0.1 * (i + 1) for i in range(n)]), 3 if n > 5 else 4) == p
    assert smallest_p(n) == sign_flip([1.0] * n)


def test_many_seeds_are_sampled_reproducibly_and_never_give_zero() -> None:
    values = np.random.default_rng(0).normal(0.5, 1, 40).tolist()
    normal = 2 * stats.norm.sf(abs(np.sum(values)) / math.sqrt(np.sum(np.square(values))))
    assert sign_flip(values) == sign_flip(values) == pytest.approx(normal, abs=0.01)
    assert sign_flip([1.0] * 40) == 2.0**-16


def test_holm_gives_the_worked_example_of_r() -> None:
    # p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@settings(deadline=None)  # a loaded machine is slow, not wrong
@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.2))
def test_holm_rejects_what_stepping_down_rejects(p_values: list[float], level: float) -> None:
    ordered = sorted(p_values)
    passed = 0
    while passed < len(ordered) and ordered[passed] * (len(ordered) - passed) <= level:
        passed += 1
    assert sorted(holm(p_values))[:passed] == [p for p in sorted(holm(p_values)) if p <= level]


def test_holm_of_nothing_is_nothing() -> None:
    assert holm([]) == []


@pytest.mark.parametrize(("successes", "n"), [(0, 3), (3, 3), (2, 3), (7, 10)])
def test_the_solve_rate_has_the_clopper_pearson_interval(successes: int, n: int) -> None:
    rate = success_rate(successes, n)
    assert rate.low == pytest.approx(stats.beta.ppf(0.025, successes, n - successes + 1) if successes else 0.0)
    assert rate.high == pytest.approx(stats.beta.ppf(0.975, successes + 1, n - successes) if successes < n else 1.0)


def test_three_of_three_solved_may_still_be_one_in_three() -> None:
    assert success_rate(3, 3).low == pytest.approx(0.025 ** (1 / 3))


def test_three_seeds_cannot_be_significant_and_the_verdict_says_so() -> None:
    assert verdict(-0.9, 0.25, 3) == "cannot be significant at 0.05 with n=3 seeds (needs 6)"


def test_the_correction_counts_among_what_the_seeds_can_show() -> None:
    assert verdict(-0.9, 0.0625, 6, comparisons=2).startswith("cannot be significant at 0.05 with n=6 seeds over 2 comparisons (needs 7)")
    assert seeds_needed(2) == 7


@pytest.mark.parametrize(("difference", "p", "words"), [(0.1, 0.2, "not distinguishable"), (0.1, 0.04, "above"), (-0.1, 0.04, "below")])
def test_enough_seeds_get_a_verdict(difference: float, p: float, words: str) -> None:
    assert words in verdict(difference, p, 8)
