"""Scoring: a row a sequence, numbers that no batching moves, facts beside the tokens they belong to, and the ceiling of a short reach."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from experiments.evaluate import baselines, score
from experiments.tasks.contract import IGNORE, Evaluation
from registry import UserError, tasks

TEST = Evaluation("length", 24)


class Output(NamedTuple):
    logits: torch.Tensor


class Reader(nn.Module):
    """Answers as the task's oracle does with `reach`, and wrongly where that finds nothing."""

    def __init__(self, task, reach):
        super().__init__()
        self.task, self.reach = task, reach

    def forward(self, tokens, scored):
        answers = torch.from_numpy(self.task.oracle(tokens.numpy(), self.reach))[scored].clamp(min=0)
        return Output(8.0 * nn.functional.one_hot(answers, self.task.vocab_size).float())


@pytest.fixture
def task():
    return tasks.build("mqar", length=24, pairs=3, keys=16, values=16)


@pytest.mark.parametrize("reach", [None, 10])
def test_any_batch_size_gives_the_same_numbers(task, reach):
    scores = [score(Reader(task, reach), task, "test", TEST, sequences=65, batch_tokens=24 * size) for size in (1, 7, 64, 65)]
    assert len({one.accuracy for one in scores}) == len({one.sequence_accuracy for one in scores}) == 1
    assert np.ptp([one.loss for one in scores]) < 1e-6
    assert all(one.table.equals(scores[0].table) for one in scores)
    assert (scores[0].accuracy == 1) == (reach is None)


def test_rows_hold_each_sequence_with_its_facts_beside_its_tokens(task):
    reach = 10
    table = score(Reader(task, reach), task, "test", TEST, sequences=20, batch_tokens=24 * 8).table
    assert table["index"].to_pylist() == list(range(20)) and set(table["split"].to_pylist()) == {"test"}
    for row in table.to_pylist():
        assert row["token_correct"] == [distance + 1 <= reach for distance in row["distance"]]
        assert row["tokens_correct"] == sum(row["token_correct"]) and row["tokens_scored"] == len(row["distance"]) == 3
        assert row["correct"] == all(row["token_correct"])
        examples = task.sample("test", 24, row["index"])
        assert row["distance"] == examples.meta["distance"][examples.targets != IGNORE].tolist()


def test_scoring_leaves_the_model_in_the_mode_it_was_in(task):
    for training in (True, False):
        model = Reader(task, None).train(training)
        score(model, task, "validation", TEST, sequences=2, batch_tokens=100)
        assert model.training is training


def test_the_ceiling_is_what_lies_in_reach_and_a_guess_for_the_rest(task):
    examples = task.batch("test", 24, 0, 200)
    distance = examples.meta["distance"][examples.targets != IGNORE]
    for reach in (1, 8, 30):
        seen = float(np.mean(distance <= reach))
        found = baselines(task, TEST, sequences=200, reach=reach)
        assert found["within_reach"] == pytest.approx(seen + (1 - seen) / 16)
    assert "within_reach" not in baselines(task, TEST, sequences=200, reach=None)
    assert found["chance"] == 1 / 16 and found["in_context"] == pytest.approx(1 / 3, abs=0.07)


def test_a_sequence_in_which_nothing_is_scored_is_no_row_and_neither_right_nor_wrong():
    sparse = tasks.build("repeated_segments", length=38, copied=0.01, lead=7)
    here = Evaluation("length", 38)
    asked = (sparse.batch("test", 38, 0, 64).targets != IGNORE).any(1)
    assert 0 < asked.sum() < 64
    right, wrong = (score(Reader(sparse, reach), sparse, "test", here, sequences=64, batch_tokens=38 * 5) for reach in (None, 0))
    assert right.table["index"].to_pylist() == np.flatnonzero(asked).tolist()
    assert right.sequence_accuracy == right.accuracy == 1
    assert wrong.sequence_accuracy < 0.2


def test_a_test_set_in_which_nothing_is_scored_has_no_score():
    sparse = tasks.build("repeated_segments", length=38, copied=0.01, lead=7)
    empty = int(np.flatnonzero(~(sparse.batch("test", 38, 0, 64).targets != IGNORE).any(1))[0])
    sparse.batch = lambda *args, **options: type(sparse).batch(sparse, "test", 38, empty, 1)
    with pytest.raises(UserError, match="nothing is scored in 1 test sequences of 38 tokens"):
        score(Reader(sparse, None), sparse, "test", Evaluation("length", 38), sequences=1, batch_tokens=38)
