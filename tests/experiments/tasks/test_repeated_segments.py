"""Repeated segments: copies in random text, scored where nothing but a look back can tell."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.tasks.contract import ABSENT, IGNORE
from experiments.tasks.repeated_segments import RepeatedSegments, next_tokens
from registry import tasks


def segmented():
    return st.builds(
        lambda symbols, shortest, more, lead, copied: RepeatedSegments(
            length=8 * shortest + 2 * more,
            symbols=symbols,
            shortest=shortest,
            longest=shortest + more,
            lead=min(lead, shortest - 1),
            copied=copied,
        ),
        st.integers(2, 40),
        st.integers(2, 9),
        st.integers(0, 9),
        st.integers(1, 4),
        st.floats(0.1, 1.0),
    )


@settings(max_examples=60, deadline=None)
@given(task=segmented(), length=st.integers(18, 90), start=st.integers(0, 10**6))
def test_a_scored_token_is_told_by_what_followed_its_lead_each_time_before(task, length, start):
    length = max(length, 2 * task.longest)
    tokens, targets, meta = task.batch("test", length, start, 3)
    for row in range(3):
        text = tokens[row].tolist()
        for at in range(length):
            if targets[row, at] == IGNORE:
                assert all(values[row, at] == IGNORE for values in meta.values())
                continue
            gram = text[at - task.lead + 1 : at + 1]
            earlier = [end for end in range(task.lead - 1, at) if text[end - task.lead + 1 : end + 1] == gram]
            assert earlier and {text[end + 1] for end in earlier} == {targets[row, at]} == {text[at + 1]}
            answer = at - meta["distance"][row, at]
            assert answer == earlier[-1] + 1 and 0 <= meta["distance"][row, at] <= at
            assert meta["depth"][row, at] == pytest.approx(answer / at)
            assert task.lead < meta["place"][row, at] <= task.longest


def test_copies_come_from_before_and_their_tokens_are_scored():
    task = RepeatedSegments()
    tokens, targets, meta = task.batch("train", 512, 0, 64)
    scored = targets != IGNORE
    assert 0.3 < scored.mean() < 0.45
    assert {*np.unique(meta["place"][scored])} == {*range(task.lead + 1, task.longest + 1)}
    assert (meta["distance"][scored] > 256).mean() > 0.03  # some are far
    assert np.quantile(meta["depth"][scored], 0.05) < 0.3 and np.quantile(meta["depth"][scored], 0.95) > 0.9
    np.testing.assert_array_equal(targets[scored], next_tokens(tokens)[scored])


def test_the_share_of_copies_follows_its_option():
    shares = [(RepeatedSegments(copied=copied).batch("test", 512, 0, 64).targets != IGNORE).mean() for copied in (0.1, 0.5, 1.0)]
    assert shares[0] < 0.6 * shares[1] and shares[1] < 0.9 * shares[2]


def test_training_scores_every_next_token_or_the_repeated_ones_alone():
    everything, repeated = (RepeatedSegments(train_on=which) for which in ("all", "repeated"))
    tokens, targets, _ = everything.training_batch(3, 4)
    np.testing.assert_array_equal(targets[:, :-1], tokens[:, 1:])
    assert (targets[:, -1] == IGNORE).all()
    np.testing.assert_array_equal(repeated.training_batch(3, 4).tokens, tokens)
    np.testing.assert_array_equal(repeated.training_batch(3, 4).targets, repeated.batch("train", 128, 12, 4).targets)
    for task in (everything, repeated):  # what is validated and tested is the same
        np.testing.assert_array_equal(task.batch("validation", 128, 0, 4).targets, repeated.batch("validation", 128, 0, 4).targets)


def test_with_reach_the_oracle_reads_answer_and_lead_in_sight_and_nothing_else():
    task = RepeatedSegments(lead=3)
    tokens, targets, meta = task.batch("test", 200, 0, 50)
    scored = targets != IGNORE
    for reach in (0, 3, 20, 60, 199):
        found = task.oracle(tokens, reach=reach)
        in_sight = meta["distance"] + task.lead <= reach  # the first token of the lead, before the answer
        np.testing.assert_array_equal(found[scored & in_sight], targets[scored & in_sight])
        assert (found[scored & ~in_sight] == ABSENT).all()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"symbols": 1}, "symbols must be at least 2"),
        ({"copied": 0.0}, "copied must lie above 0"),
        ({"copied": 1.1}, "copied must lie above 0"),
        ({"lead": 0}, "0 < lead < shortest"),
        ({"lead": 8}, "0 < lead < shortest"),
        ({"longest": 7}, "shortest <= longest"),
        ({"length": 37}, "length >= 2 \\* longest = 38"),
    ],
)
def test_options_without_meaning_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        tasks.build("repeated_segments", **options)
