"""What every task draws from: uniform numbers by counter, distinct choices, vocabularies."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tasks.contract import _uniform, among, choose_distinct, latest, pick, roles


@given(start=st.integers(0, 10**9), count=st.integers(1, 6), draws=st.integers(1, 9))
def test_a_row_depends_on_its_number_alone(start, count, draws):
    together = _uniform("stream", start, count, draws)
    alone = [_uniform("stream", start + row, 1, draws)[0] for row in range(count)]
    np.testing.assert_array_equal(together, alone)


def test_rows_never_share_a_number():
    for draws in (1, 3, 4, 5, 8):
        numbers = _uniform("stream", 0, 500, draws)
        assert len(np.unique(numbers)) == numbers.size


def test_streams_share_no_number():
    assert not np.intersect1d(_uniform("one", 0, 500, 8), _uniform("another", 0, 500, 8)).size


def test_numbers_are_uniform_and_below_one():
    numbers = _uniform("stream", 0, 40_000, 5)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    expected = numbers.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * np.sqrt(2 * 63)


def test_the_largest_uniform_number_still_picks_a_member():
    largest = np.array([[1 - 2.0**-53]])
    for size in (1, 2, 3, 64, 4095, 8192, 10**6 + 3):
        assert pick(largest, range(5, 5 + size))[0, 0] == 5 + size - 1
        assert choose_distinct(largest, size)[0, 0] == size - 1


@pytest.mark.parametrize(("population", "chosen"), [(1, 1), (4, 1), (4, 3), (4, 4), (5, 2)])
def test_every_ordered_choice_of_distinct_numbers_is_equally_likely(population, chosen):
    ranks = list(product(*(range(population - i) for i in range(chosen))))  # one cell of equal volume each
    uniform = (np.array(ranks) + 0.5) / (population - np.arange(chosen))
    choices = {tuple(row) for row in choose_distinct(uniform, population).tolist()}
    assert len(choices) == len(ranks)
    assert all(len(set(choice)) == chosen and set(choice) <= set(range(population)) for choice in choices)


@given(data=st.data(), population=st.integers(1, 200))
def test_distinct_numbers_are_what_drawing_from_a_shrinking_urn_gives(data, population):
    uniform = data.draw(st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1, max_size=min(population, 40)))
    urn = list(range(population))
    drawn = [urn.pop(int(u * len(urn))) for u in uniform]
    assert choose_distinct(np.array([uniform]), population)[0].tolist() == drawn


def test_more_distinct_numbers_than_there_are_is_refused():
    with pytest.raises(ValueError, match="cannot choose 5 distinct of 4"):
        choose_distinct(np.zeros((2, 5)), 4)


def test_roles_follow_one_another_without_a_gap():
    vocabulary = roles(pad=1, key=3, value=0, noise=2)
    assert [token for ids in vocabulary.values() for token in ids] == list(range(6))
    with pytest.raises(ValueError, match="-2 ids for noise"):
        roles(pad=1, noise=-2)


def test_latest_names_the_newest_masked_token_and_nothing_before_the_first():
    tokens = np.array([[7, 8, 9, 8, 7], [8, 7, 7, 9, 9]])
    newest, places = latest(tokens, among(tokens, range(8, 10)))
    np.testing.assert_array_equal(newest, [[-1, 8, 9, 8, 8], [8, 8, 8, 9, 9]])
    np.testing.assert_array_equal(places, [[-1, 1, 2, 3, 3], [0, 0, 0, 3, 4]])
