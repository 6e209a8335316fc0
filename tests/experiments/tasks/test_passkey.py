"""Passkey: one needle, any depth."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.tasks.contract import ABSENT, IGNORE
from experiments.tasks.passkey import DEPTHS, Passkey

NOISES = (None, 5)


def passkeys():
    return st.builds(
        lambda length, values, noise: Passkey(length=length, min_length=5, values=values, noise=noise),
        st.integers(5, 40),
        st.integers(1, 9),
        st.sampled_from(NOISES),
    )


@settings(max_examples=60, deadline=None)
@given(task=passkeys(), start=st.integers(0, 10**6))
def test_the_answer_follows_the_only_other_marker_and_meta_says_where(task, start):
    tokens, targets, meta = task.batch("train", task.length, start, 4)
    marker, last = task.vocabulary["marker"].start, task.length - 1
    for row in range(4):
        first, second = np.flatnonzero(tokens[row] == marker)
        assert second == last
        assert np.flatnonzero(targets[row] != IGNORE).tolist() == [last]
        assert tokens[row, first + 1] == targets[row, last]
        assert targets[row, last] in task.vocabulary["value"]
        assert meta["distance"][row] == last - (first + 1)
        assert meta["depth"][row] == first / (last - 3)
        assert second - first >= 3


def test_noise_looks_like_values_unless_it_has_ids_of_its_own():
    like = Passkey(values=16).batch("test", 32, 0, 500)
    assert set(np.unique(like.tokens)) == set(Passkey(values=16).vocabulary["value"]) | {1}
    own = Passkey(values=16, noise=5)
    tokens, targets, _ = own.batch("test", 32, 0, 500)
    is_value = (tokens >= own.vocabulary["value"].start) & (tokens < own.vocabulary["value"].stop)
    assert (is_value.sum(axis=1) == 1).all()
    np.testing.assert_array_equal(tokens[is_value], targets[:, -1])


@pytest.mark.parametrize("noise", NOISES)
def test_values_and_noise_are_spread_evenly(noise):
    task = Passkey(values=8, noise=noise)
    tokens, targets, _ = task.batch("train", 20, 0, 8000)
    assert stats.chisquare(np.bincount(targets[:, -1])[task.vocabulary["value"].start :]).pvalue > 1e-3
    ids = task.vocabulary["value" if noise is None else "noise"]
    assert stats.chisquare(np.bincount(tokens[tokens >= ids.start])[ids.start :]).pvalue > 1e-3


def test_training_depths_are_spread_evenly_over_every_legal_place():
    _, _, meta = Passkey(length=20).batch("train", 20, 0, 17_000)
    places = np.rint(meta["depth"] * 16).astype(int)
    assert stats.chisquare(np.bincount(places, minlength=17)).pvalue > 1e-3


@pytest.mark.parametrize("start", [0, 5])
def test_evaluations_give_every_depth_the_same_number_of_sequences_in_turn(start):
    task = Passkey()
    for evaluation in task.evaluations():
        depth = task.batch("test", evaluation.length, start, 90, **evaluation.difficulty).meta["depth"]
        np.testing.assert_array_equal(np.rint(depth * 8), (start + np.arange(90)) % 9)
        assert np.abs(depth - np.rint(depth * 8) / 8).max() < 0.501 / (evaluation.length - 4)
    assert [e.name for e in task.evaluations()] == ["length/32", "length/64", "length/128", "length/256"]


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 10), (1.0, 20), (0.26, 5)])
def test_a_depth_can_be_fixed(depth, place):
    tokens = Passkey().batch("test", 24, 0, 6, depth=depth).tokens
    assert (tokens[:, place] == Passkey().vocabulary["marker"].start).all()
    tokens = Passkey(depth=depth, length=24, min_length=24).training_batch(0, 6).tokens
    assert (tokens[:, place] == 1).all()


@settings(max_examples=60, deadline=None)
@given(task=passkeys(), reach=st.integers(0, 40))
def test_with_a_reach_the_oracle_is_right_exactly_where_what_it_needs_is_within_it(task, reach):
    tokens, targets, meta = task.batch("test", task.length, 0, 8)
    needed = meta["distance"] + (1 if task.noise is None else 0)
    np.testing.assert_array_equal(task.oracle(tokens, reach)[:, -1], np.where(needed <= reach, targets[:, -1], ABSENT))


@pytest.mark.parametrize("noise", NOISES)
def test_with_another_value_behind_the_marker_the_old_answers_are_right_by_chance_alone(noise):
    task = Passkey(values=16, noise=noise)
    tokens, targets, meta = task.batch("test", 32, 0, 6000)
    rows, places = np.arange(6000), 31 - meta["distance"]
    exchanged = tokens.copy()
    exchanged[rows, places] = np.roll(targets[:, -1], 1)
    right = task.oracle(exchanged)[:, -1] == targets[:, -1]
    assert abs(right.mean() - 1 / 16) < 3 * right.std() / np.sqrt(6000)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("difficulty", [{}, {"depth": 1.0}, {"depth": 0.0}, {"depth": [0.0, 1.0]}])
def test_trivial_predictors_reach_what_is_expected_at_any_depth(noise, difficulty):
    task = Passkey(values=16, noise=noise)
    tokens, targets, _ = task.batch("test", 12, 0, 9000, **difficulty)
    expected = task.expected(12, **difficulty)
    for kind, predict in task.trivial().items():
        right = predict(tokens)[:, -1] == targets[:, -1]
        assert abs(right.mean() - expected[kind]) <= 3 * right.std() / np.sqrt(9000) + 1e-12


def test_the_value_is_never_next_to_the_question():
    assert Passkey().batch("test", 32, 0, 9, depth=1.0).meta["distance"].tolist() == [2] * 9


def test_a_passkey_of_a_kind_of_its_own_needs_no_match_and_says_so():
    assert Passkey(noise=5).expected(32)["last_seen"] == 1
    assert max(Passkey().expected(32).values()) < 0.05


@pytest.mark.parametrize("depth", [-0.1, 1.1, [0.5, 2.0], []])
def test_a_depth_outside_the_sequence_is_refused(depth):
    with pytest.raises(ValueError, match="depth must lie between 0 and 1; got"):
        Passkey().batch("test", 32, 0, 1, depth=depth)


def test_sizes_that_cannot_be_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="length >= 5; got length=4"):
        Passkey(min_length=4)
    with pytest.raises(ValueError, match="got length=4"):
        Passkey().batch("test", 4, 0, 1)
    with pytest.raises(ValueError, match="values=0"):
        Passkey(values=0)
    with pytest.raises(ValueError, match="noise=0"):
        Passkey(noise=0)
    with pytest.raises(ValueError, match="-1 ids for noise"):
        Passkey(noise=-1)


def test_the_first_version_still_makes_the_sequences_it_made():
    examples = Passkey(values=8).batch("test", 16, 5, 2, depth=DEPTHS)
    assert hashlib.sha256(examples.tokens.tobytes() + examples.targets.tobytes()).hexdigest()[:16] == "65d3c62133f9d55a"
