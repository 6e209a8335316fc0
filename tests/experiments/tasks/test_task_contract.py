"""What holds for every registered task, whatever it asks."""

import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from experiments.tasks.contract import IGNORE, SPLITS, Examples, Task
from registry import ROOT, UnknownOption, tasks

TASKS = tasks.names()
EVALUATIONS = [
    pytest.param(name, evaluation, id=f"{name}-{evaluation.name}") for name in TASKS for evaluation in tasks.build(name).evaluations()
]

each_task = pytest.mark.parametrize("name", TASKS)
each_evaluation = pytest.mark.parametrize(("name", "evaluation"), EVALUATIONS)


def make(name, evaluation, count, split="test"):
    return tasks.build(name).batch(split, evaluation.length, 0, count, **evaluation.difficulty)


def digest(examples):
    parts = (examples.tokens, examples.targets, *(examples.meta[key] for key in sorted(examples.meta)))
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def assert_same(one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.targets, other.targets)
    assert one.meta.keys() == other.meta.keys()
    for key in one.meta:
        np.testing.assert_array_equal(one.meta[key], other.meta[key])


def accuracies(predicted, targets):
    """Of each sequence in which anything is scored, the share of scored places that were predicted."""
    scored = targets != IGNORE
    right, asked = ((predicted == targets) & scored).sum(axis=1), scored.sum(axis=1)
    assert (asked == 0).mean() < 0.002
    return right[asked > 0] / asked[asked > 0]


def assert_expected(found, expected):
    """Sequences are independent, so three standard errors of their mean is the margin."""
    margin = 3 * found.std(ddof=1) / np.sqrt(len(found)) + 1e-12
    assert abs(found.mean() - expected) <= margin, f"{found.mean():.4f} is not {expected:.4f} +- {margin:.4f}"


@each_evaluation
def test_the_oracle_answers_every_scored_token(name, evaluation):
    examples = make(name, evaluation, 1000)
    assert accuracies(tasks.build(name).oracle(examples.tokens), examples.targets).min() == 1


@each_task
def test_no_answer_needs_a_token_behind_its_question(name):
    task = tasks.build(name)
    tokens, targets, _ = task.batch("test", task.length, 0, 20)
    for place in range(task.length):
        answers = task.oracle(tokens[:, : place + 1])[:, place]
        scored = targets[:, place] != IGNORE
        np.testing.assert_array_equal(answers[scored], targets[scored, place])


@each_evaluation
def test_trivial_predictors_reach_exactly_what_is_expected_of_them(name, evaluation):
    task, examples = tasks.build(name), make(name, evaluation, 4000)
    expected = task.expected(evaluation.length, **evaluation.difficulty)
    assert expected.keys() == task.trivial().keys() | {"chance"}
    for kind, predict in task.trivial().items():
        assert_expected(accuracies(predict(examples.tokens), examples.targets), expected[kind])


@each_evaluation
def test_neither_the_commonest_answer_nor_a_copy_of_the_last_token_beats_chance(name, evaluation):
    task, examples = tasks.build(name), make(name, evaluation, 4000)
    chance = task.expected(evaluation.length, **evaluation.difficulty)["chance"]
    seen = make(name, evaluation, 1000, split="train").targets
    commonest = np.bincount(seen[seen != IGNORE]).argmax()
    for predicted in (np.full_like(examples.tokens, commonest), examples.tokens, np.roll(examples.tokens, 1, axis=1)):
        found = accuracies(predicted, examples.targets)
        assert found.mean() <= chance + 3 * found.std(ddof=1) / np.sqrt(len(found))


@each_task
@pytest.mark.parametrize("length", [64, 65, 127, 1024, 65536])
def test_a_sequence_has_the_length_that_was_asked_for(name, length):
    examples = tasks.build(name).sample("test", length, 3)
    assert examples.tokens.shape == examples.targets.shape == (1, length)


def test_a_task_that_falls_short_of_the_length_is_stopped():
    class Short(Task):
        def draws(self, length, **difficulty):
            return 1

        def generate(self, length, uniform, start, **difficulty):
            tokens = np.zeros((len(uniform), min(length, 40)), dtype=np.int64)
            return Examples(tokens, tokens, {})

    assert Short(length=40).sample("test", 40, 0).tokens.shape == (1, 40)
    with pytest.raises(ValueError, match=r"asked for 2 x 64 tokens and made \(2, 40\)"):
        Short(length=40).batch("test", 64, 0, 2)


@each_evaluation
def test_every_sequence_is_scored_somewhere_and_only_with_tokens_of_the_vocabulary(name, evaluation):
    task, (tokens, targets, meta) = tasks.build(name), make(name, evaluation, 300)
    assert tokens.dtype == targets.dtype == np.int64
    assert (targets != IGNORE).any(axis=1).all()
    for ids in (tokens, targets[targets != IGNORE]):
        assert ids.min() >= 0
        assert ids.max() < task.vocab_size
    for fact in meta.values():
        assert fact.shape in {(300,), targets.shape}
        if fact.ndim == 2:
            np.testing.assert_array_equal(fact == IGNORE, targets == IGNORE)


@each_task
def test_no_token_id_has_two_roles(name):
    owned = [token for ids in tasks.build(name).vocabulary.values() for token in ids]
    assert len(owned) == len(set(owned))


@each_evaluation
def test_any_split_into_batches_in_any_order_gives_the_same_examples(name, evaluation):
    task, whole = tasks.build(name), make(name, evaluation, 12)
    for start, count in ((7, 5), (0, 1), (1, 6)):
        here = slice(start, start + count)
        piece = task.batch("test", evaluation.length, start, count, **evaluation.difficulty)
        assert_same(piece, Examples(whole.tokens[here], whole.targets[here], {key: fact[here] for key, fact in whole.meta.items()}))
    alone = task.sample("test", evaluation.length, 9, **evaluation.difficulty)
    np.testing.assert_array_equal(alone.tokens, whole.tokens[9:10])


@each_task
def test_global_generators_are_neither_read_nor_moved(name):
    task, digests = tasks.build(name), []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the global generator is the point)
        torch.manual_seed(seed)
        before = (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
        digests.append(digest(task.training_batch(5, 16)))
        assert before == (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    assert digests[0] == digests[1]


def test_another_process_makes_the_same_examples():
    program = (
        "import hashlib; from registry import tasks\n"
        "for name in tasks.names(): print(hashlib.sha256(tasks.build(name).training_batch(3, 8).tokens.tobytes()).hexdigest())"
    )
    here = [hashlib.sha256(tasks.build(name).training_batch(3, 8).tokens.tobytes()).hexdigest() for name in TASKS]
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True)
        assert found.stdout.split() == here


@each_task
def test_splits_have_no_sequence_in_common_and_none_twice(name):
    task = tasks.build(name)
    rows = np.concatenate([task.batch(split, 2 * task.length, 0, 3000).tokens for split in SPLITS])  # 24 bits are too few
    assert len({row.tobytes() for row in rows}) == len(rows)


@each_task
def test_training_never_repeats_a_sequence(name):
    task = tasks.build(name)
    rows = [row.tobytes() for step in range(100) for row in task.training_batch(step, 16).tokens if len(row) >= 16]
    assert len(set(rows)) == len(rows)


@each_task
def test_the_data_seed_and_the_version_choose_the_data(name):
    usual, other, newer = tasks.build(name), tasks.build(name, data_seed=1), tasks.build(name)
    newer.version = usual.version + 1
    assert len({digest(task.batch("test", 64, 0, 4)) for task in (usual, other, newer)}) == 3


@each_task
def test_training_lengths_are_spread_evenly_between_their_bounds(name):
    task = tasks.build(name, min_length=60, length=67)
    lengths = [task.training_batch(step, 1).tokens.shape[1] for step in range(800)]
    counts = np.bincount(lengths, minlength=68)[60:]
    assert counts.sum() == 800
    assert ((counts - 100) ** 2 / 100).sum() < 24.3  # chi-square with 7 degrees of freedom, p = 0.001


@each_task
def test_min_length_must_lie_within_length(name):
    for wrong in (0, 65):
        with pytest.raises(ValueError, match=f"min_length must lie between 1 and length=64; got {wrong}"):
            tasks.build(name, length=64, min_length=wrong)


@each_task
def test_unknown_words_are_answered_with_the_nearest_valid_one(name):
    with pytest.raises(UnknownOption, match=f"task '{name}' has no option 'lenght'. Did you mean 'length'"):
        tasks.build(name, lenght=64)
    task = tasks.build(name)
    for difficulty in task.difficulties:
        with pytest.raises(UnknownOption, match=f"has no difficulty '{difficulty[:-1]}'. Did you mean '{difficulty}'"):
            task.batch("test", 64, 0, 1, **{difficulty[:-1]: 1})
    with pytest.raises(ValueError, match="split must be one of train, validation, test; got 'tset'"):
        task.batch("tset", 64, 0, 1)


@each_task
def test_a_negative_index_is_refused(name):
    with pytest.raises(ValueError, match="start=-1"):
        tasks.build(name).sample("test", 64, -1)


@each_task
def test_stating_the_difficulty_a_task_was_built_with_changes_nothing(name):
    task = tasks.build(name)
    stated = {key: getattr(task, key) for key in task.difficulties}
    assert_same(task.batch("test", 64, 0, 3), task.batch("test", 64, 0, 3, **stated))
    assert_same(task.batch("test", 64, 0, 3), task.batch("test", 64, 0, 3, **dict.fromkeys(task.difficulties)))


@each_task
def test_every_option_is_explained_and_every_fact_listed(name):
    described = tasks.describe(name)
    assert all(option["doc"] for option in described["options"])
    assert {"group", "metric", "chance", "difficulties"} <= described.keys()
