"""Parity: one bit of state."""

import numpy as np
import pytest

from experiments.tasks.contract import ABSENT
from experiments.tasks.parity import Parity
from registry import tasks


def test_each_answer_is_the_parity_of_all_bits_so_far():
    task = Parity()
    tokens, targets, meta = task.batch("test", 40, 7, 20)
    assert set(np.unique(tokens)) == set(task.vocabulary["bit"]) and set(np.unique(targets)) == set(task.vocabulary["answer"])
    for row in range(20):
        ones = 0
        for at in range(40):
            ones += int(tokens[row, at] == task.vocabulary["bit"][1])
            assert targets[row, at] == task.vocabulary["answer"][ones % 2] and meta["place"][row, at] == at + 1


def test_one_flipped_bit_flips_every_later_answer_and_no_earlier_one():
    task = Parity()
    tokens, targets, _ = task.batch("test", 30, 0, 8)
    flipped = tokens.copy()
    flipped[:, 11] = 1 - flipped[:, 11]
    np.testing.assert_array_equal(task.oracle(flipped)[:, :11], targets[:, :11])
    assert (task.oracle(flipped)[:, 11:] != targets[:, 11:]).all()


def test_with_reach_only_answers_whose_first_bit_is_in_sight_are_told():
    task = Parity()
    tokens, targets, _ = task.batch("test", 30, 0, 8)
    found = task.oracle(tokens, reach=9)
    np.testing.assert_array_equal(found[:, :10], targets[:, :10])
    assert (found[:, 10:] == ABSENT).all()


def test_training_lengths_vary_and_sequences_do_not_repeat():
    task = tasks.build("parity")
    lengths = {task.training_batch(step, 1).tokens.shape[1] for step in range(300)}
    assert lengths == set(range(2, 25))


def test_a_length_of_nothing_is_refused():
    with pytest.raises(ValueError, match="min_length must lie between 1 and length=1"):
        tasks.build("parity", length=1)
