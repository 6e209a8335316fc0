"""Multi-query associative recall."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.tasks.contract import ABSENT, IGNORE
from experiments.tasks.mqar import MultiQueryRecall
from registry import UnknownOption, tasks


def read(task, tokens, place, reach):
    """Brute force, from the last `reach` + 1 tokens alone: the values that follow an earlier appearance of the token at `place`."""
    seen = tokens[max(0, place - reach) : place + 1].tolist()
    return {after for before, after in itertools.pairwise(seen) if before == seen[-1] and after in task.vocabulary["value"]}


@st.composite
def recall_tasks(draw):
    pairs = draw(st.integers(1, 6))
    placement = draw(st.sampled_from(["uniform", "power"]))
    length = draw(st.integers(pairs * (3 if placement == "uniform" else 4), 40))
    keys, values = draw(st.integers(pairs, 12)), draw(st.integers(pairs, 12))
    return MultiQueryRecall(length=length, pairs=pairs, keys=keys, values=values, noise=draw(st.integers(0, 3)), placement=placement)


@settings(max_examples=60, deadline=None)
@given(task=recall_tasks(), start=st.integers(0, 10**6))
def test_each_key_is_bound_once_asked_once_and_has_one_answer(task, start):
    tokens, targets, meta = task.batch("train", task.length, start, 4)
    key, value = task.vocabulary["key"], task.vocabulary["value"]
    for row in range(4):
        context = tokens[row, : 2 * task.pairs]
        asked = np.flatnonzero(targets[row] != IGNORE)
        assert len(set(context[::2])) == len(set(context[1::2])) == task.pairs
        assert all(k in key for k in context[::2]) and all(v in value for v in context[1::2])
        assert sorted(tokens[row, asked]) == sorted(context[::2])
        assert asked.min() >= 2 * task.pairs
        assert not any(token in key or token in value for token in np.delete(tokens[row], asked)[2 * task.pairs :])
        for place in asked:
            assert read(task, tokens[row], place, task.length) == {targets[row, place]}
            answered_at = place - meta["distance"][row, place]
            assert tokens[row, answered_at] == targets[row, place]
            assert answered_at == 2 * meta["pair"][row, place] + 1


@pytest.mark.parametrize("pairs", [1, 5, 8])
def test_filler_never_collides_and_as_many_tokens_are_scored_as_there_are_pairs(pairs):
    task = MultiQueryRecall(length=256, pairs=pairs, keys=24, values=23, noise=16)
    assert task.vocab_size == 64
    tokens, targets, _ = task.batch("test", 256, 0, 1000)
    assert ((targets != IGNORE).sum(axis=1) == pairs).all()
    rest = np.where(targets == IGNORE, tokens, task.vocabulary["noise"].start)[:, 2 * pairs :]
    assert set(np.unique(rest)) == set(task.vocabulary["noise"])


@settings(max_examples=40, deadline=None)
@given(task=recall_tasks(), reach=st.integers(0, 40))
def test_with_a_reach_the_oracle_is_right_exactly_where_the_pair_is_within_it(task, reach):
    tokens, targets, meta = task.batch("test", task.length, 0, 8)
    answers = task.oracle(tokens, reach)
    for row, place in np.argwhere(targets != IGNORE):
        within = meta["distance"][row, place] + 1 <= reach
        assert answers[row, place] == (targets[row, place] if within else ABSENT)
        assert read(task, tokens[row], place, reach) == ({targets[row, place]} if within else set())


def test_with_the_values_of_the_context_exchanged_the_old_answers_are_right_by_chance_alone():
    task = MultiQueryRecall(length=64, pairs=8)
    tokens, targets, _ = task.batch("test", 64, 0, 4000)
    shuffled = tokens.copy()
    shuffled[:, 1:16:2] = np.random.default_rng(0).permuted(tokens[:, 1:16:2], axis=1)
    scored = targets != IGNORE
    found = ((task.oracle(shuffled) == targets) & scored).sum(axis=1) / 8
    assert abs(found.mean() - 1 / 8) < 3 * found.std() / np.sqrt(len(found))


def test_an_answer_one_place_early_or_late_is_wrong():
    task = MultiQueryRecall(length=64, pairs=8)
    tokens, targets, _ = task.batch("test", 64, 0, 200)
    answers, scored = task.oracle(tokens), targets != IGNORE
    assert [(np.roll(answers, shift, axis=1) == targets)[scored].any() for shift in (-1, 0, 1)] == [False, True, False]


def test_uniform_queries_stand_anywhere_behind_the_context_whatever_their_pair():
    task = MultiQueryRecall(length=40, pairs=4)
    _, _, meta = task.batch("train", 40, 0, 20_000)
    for pair in range(4):
        places = np.nonzero(meta["pair"] == pair)[1]
        counts = np.bincount(places, minlength=40)
        assert counts[:8].sum() == 0
        assert stats.chisquare(counts[8:]).pvalue > 1e-3


def zoology_queries(count, length, pairs, rng):
    """Places of the queries as Zoology draws them, straight from the paper's recipe."""
    space = (length - 2 * pairs) // 2
    share = 0.01 * np.arange(1, space + 1) ** (0.01 - 1)
    gaps = [rng.choice(space, size=pairs, replace=False, p=share / share.sum()) for _ in range(count)]
    return 2 * pairs + 2 * np.array(gaps)


def test_power_placement_is_zoologys():
    task = MultiQueryRecall(length=64, pairs=4, placement="power")
    _, _, meta = task.batch("train", 64, 0, 10_000)
    rows, places = np.nonzero(meta["pair"] != IGNORE)
    ours = np.empty((10_000, 4), dtype=int)
    ours[rows, meta["pair"][rows, places]] = places
    theirs = zoology_queries(10_000, 64, 4, np.random.default_rng(1))
    assert set(np.unique(ours)) == set(range(8, 64, 2))
    for pair in range(4):  # each pair has a distribution of its own: those drawn first stand nearer to the context
        table = [np.bincount(queries[:, pair] // 2, minlength=32)[4:] for queries in (ours, theirs)]
        assert stats.chi2_contingency(table).pvalue > 1e-3
    first = [(queries[:, 0] < queries[:, 3]).sum() for queries in (ours, theirs)]
    assert stats.chi2_contingency([first, [10_000 - n for n in first]]).pvalue > 1e-3


def test_zoologys_figure_two_can_be_configured():
    for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64)):
        task = tasks.build("mqar", length=length, pairs=pairs, keys=4095, values=4096, noise=0, placement="power")
        assert task.vocab_size == 8192
        assert task.vocabulary["key"] == range(1, 4096)
        assert task.vocabulary["value"] == range(4096, 8192)
        tokens, targets, _ = task.batch("train", length, 0, 50)
        assert (tokens[:, 2 * pairs :][targets[:, 2 * pairs :] == IGNORE] == 0).all()


def test_uniform_slots_spread_the_distances_that_power_slots_keep_short():
    within = {}
    for placement in ("uniform", "power"):
        task = MultiQueryRecall(length=256, pairs=16, placement=placement)
        distance = task.batch("test", 256, 0, 2000).meta["distance"]
        within[placement] = (distance[distance != IGNORE] <= 64).mean()
    assert within["uniform"] == pytest.approx(0.22, abs=0.02)
    assert within["power"] == pytest.approx(0.60, abs=0.02)


@pytest.mark.parametrize(("placement", "tokens_a_pair"), [("uniform", 3), ("power", 4)])
def test_pairs_that_do_not_fit_are_refused_with_the_numbers(placement, tokens_a_pair):
    shortest = 5 * tokens_a_pair
    full = MultiQueryRecall(length=shortest, pairs=5, placement=placement)
    assert (full.sample("test", shortest, 0).targets != IGNORE).sum() == 5
    message = f"pairs=5 with placement={placement} need length >= {shortest}; got length={shortest - 1}"
    for options in ({"length": shortest - 1}, {"length": 64, "min_length": shortest - 1}):
        with pytest.raises(ValueError, match=message):
            MultiQueryRecall(pairs=5, placement=placement, **options)
    with pytest.raises(ValueError, match=message):
        full.batch("test", shortest - 1, 0, 1)
    with pytest.raises(ValueError, match="pairs=5 with"):
        full.batch("test", 3, 0, 1)


@pytest.mark.parametrize("options", [{"pairs": 0}, {"pairs": 9, "keys": 8}, {"pairs": 9, "values": 8}, {"keys": 0}, {"noise": -1}])
def test_sizes_that_cannot_be_are_refused_with_the_numbers(options):
    wrong = options.get("noise", options.get("pairs", options.get("keys")))
    with pytest.raises(ValueError, match=str(wrong)):
        MultiQueryRecall(length=64, **options)


def test_a_misspelt_placement_is_answered_with_the_nearest():
    with pytest.raises(UnknownOption, match="Did you mean 'power'"):
        tasks.build("mqar", placement="powr")


def test_length_and_load_are_two_axes():
    found = [(e.name, dict(e.difficulty)) for e in MultiQueryRecall(length=64, pairs=8, keys=40, values=64).evaluations()]
    assert found == [
        ("length/64", {}),
        ("length/128", {}),
        ("length/256", {}),
        ("length/512", {}),
        ("load/128", {"pairs": 16}),
        ("load/256", {"pairs": 32}),
    ]


def test_load_asks_as_many_questions_as_it_binds_pairs():
    task = MultiQueryRecall(length=64, pairs=8)
    for evaluation in task.evaluations():
        pairs = evaluation.difficulty.get("pairs", 8)
        targets = task.batch("test", evaluation.length, 0, 20, **evaluation.difficulty).targets
        assert ((targets != IGNORE).sum(axis=1) == pairs).all()
        assert task.expected(evaluation.length, **evaluation.difficulty)["in_context"] == 1 / pairs


def test_the_first_version_still_makes_the_sequences_it_made():
    examples = MultiQueryRecall(length=24, pairs=3, keys=8, values=8, noise=4).batch("test", 24, 5, 2)
    assert hashlib.sha256(examples.tokens.tobytes() + examples.targets.tobytes()).hexdigest()[:16] == "72f8924350584f5c"
