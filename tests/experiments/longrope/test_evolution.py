"""The search for factors: what it may propose, what it keeps, when it ends, and how it goes on after an interruption."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.longrope.evolution import Found, Settings, search
from experiments.longrope.space import Genome, Space, critical_pairs
from registry import UserError

repeatable = settings(deadline=None, derandomize=True, max_examples=20)
#: What the toy score wants: fast pairs as they are, slow ones stretched further than s = 4.
WANTED = (1.0, 1.0, 1.1, 1.7, 2.9, 3.8, 4.2, 4.77)
SPACE = Space(8, 4.0)
PI = (4.0,) * 8
NTK = tuple(4.0 ** (i / 7) for i in range(8))


def distance(genome: Genome) -> float:
    return sum((a - b) ** 2 for a, b in zip(genome.factors, WANTED, strict=False)) + genome.unscaled


def toy(genomes: Sequence[Genome]) -> list[float]:
    return [distance(genome) for genome in genomes]


class Recorded:
    """A score that remembers its calls."""

    def __init__(self, score: Callable[[Sequence[Genome]], list[float]] = toy):
        self.score = score
        self.calls: list[list[Genome]] = []

    def __call__(self, genomes: Sequence[Genome]) -> list[float]:
        self.calls.append(list(genomes))
        return self.score(genomes)

    @property
    def genomes(self) -> list[Genome]:
        return [genome for call in self.calls for genome in call]


def run(space: Space = SPACE, score: Any = toy, seeds: Sequence[Genome] | None = None, state: Path | None = None, **settings: Any) -> Found:
    seeds = [space.genome(PI[: space.pairs]), space.genome(NTK[: space.pairs])] if seeds is None else seeds
    return search(space, seeds, score, settings=Settings(**{"evaluations": 90} | settings), state=state)


def assert_lawful(genome: Genome, low: float, high: float, per_unit: int = 100) -> None:
    steps = [factor * per_unit for factor in genome.factors]
    assert all(abs(step - round(step)) < 1e-9 for step in steps), f"off the grid: {genome}"
    assert list(genome.factors) == sorted(genome.factors)
    assert low - 1e-9 <= genome.factors[0]
    assert genome.factors[-1] <= high + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_beats_the_seeds(seed):
    found = run(seed=seed, evaluations=250)
    assert found.score < 0.5 * min(found.seeds)
    assert found.score == distance(found.best)
    assert found.seeds == (distance(SPACE.genome(PI)), distance(SPACE.genome(NTK)))


@repeatable
@given(
    pairs=st.integers(1, 20),
    factor=st.sampled_from([1.0, 1.005, 1.5, 4.0, 32.0]),
    beyond=st.sampled_from([None, 1.0, 3.0]),
    per_unit=st.sampled_from([1, 20, 100]),
    unscaled=st.sampled_from([(0,), (0, 4, 16)]),
    seed=st.integers(0, 1000),
)
def test_every_candidate_lies_on_the_grid_in_bounds_and_in_order(pairs, factor, beyond, per_unit, unscaled, seed):
    space = Space(pairs, factor, beyond=beyond, step=1 / per_unit, unscaled=unscaled)
    score = Recorded(lambda genomes: [-sum(genome.factors) - genome.unscaled for genome in genomes])
    start = space.genome([factor] * pairs)
    search(space, [start], score, settings=Settings(evaluations=40, population=10, mutations=4, crossovers=6, seed=seed))
    for genome in score.genomes:
        assert_lawful(genome, 1, max(1, (1.25 if beyond is None else beyond) * factor), per_unit)
        assert genome.unscaled in unscaled


def test_no_candidate_is_scored_twice_and_a_generation_is_one_call():
    score = Recorded()
    found = run(score=score, evaluations=100, population=32, mutations=12, crossovers=12)
    assert [len(call) for call in score.calls] == [32, 24, 24, 20]
    assert len({(genome.factors, genome.unscaled) for genome in score.genomes}) == found.evaluations == 100


def test_candidates_that_differ_in_the_critical_pair_alone_are_one():
    assert Genome((1.0, 2.0), 0, critical=0) == Genome((1.0, 2.0), 0, critical=1)
    score = Recorded(lambda genomes: [0.0] * len(genomes))
    # At s = 1 with one choice for the factor, all critical pairs leave the same list.
    found = search(Space(4, 1.0, beyond=1.0, critical=(0, 1, 2)), [Genome((1.0,) * 4)], score)
    assert (found.evaluations, found.exhausted) == (1, True)


def test_the_best_is_never_lost_and_the_history_says_so():
    score = Recorded()
    found = run(score=score, evaluations=120)
    values = toy(score.genomes)
    assert list(found.history) == [min(values[: n + 1]) for n in range(len(values))]
    assert found.score == found.history[-1] == min(values)


def test_parents_are_the_best_of_all_generations():
    """Children of a generation that got worse do not displace their parents."""
    start = SPACE.genome(NTK)
    score = Recorded(lambda genomes: [0.0 if genome == start else 1.0 + distance(genome) for genome in genomes])
    run(score=score, seeds=[start], population=1, mutations=5, crossovers=0, parents=1, mutation_probability=0.01, evaluations=60)
    # A mutant of the seed with one gene in eight moved pushes others at most to its own value.
    for genome in score.genomes[1:]:
        moved = {factor for factor, before in zip(genome.factors, start.factors, strict=True) if factor != before}
        assert len(moved) == 1, "a mutant of a mutant"


def test_equal_seeds_give_equal_searches_whatever_the_global_generator_is_at():
    first = Recorded()
    np.random.seed(1)  # noqa: NPY002
    found = run(score=first, seed=3)
    second = Recorded()
    np.random.seed(2)  # noqa: NPY002
    assert run(score=second, seed=3) == found
    assert first.calls == second.calls
    assert run(seed=4).best != found.best
    drawn = np.random.random()  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    assert np.random.random() == drawn, "the search drew from the global generator"  # noqa: NPY002


def test_mutants_of_equal_factors_move_every_pair():
    score = Recorded()
    run(score=score, seeds=[SPACE.genome(PI)], population=60, evaluations=60)
    for pair in range(8):
        values = {genome.factors[pair] for genome in score.genomes}
        assert min(values) < 4 < max(values), f"pair {pair} stays at {values}"


def test_the_first_generation_holds_mutants_of_every_seed():
    low, high = SPACE.genome((1.0,) * 8), SPACE.genome((5.0,) * 8)
    score = Recorded()
    run(score=score, seeds=[low, high], population=22, evaluations=22, mutation_probability=0.01)
    near = [min((low, high), key=lambda seed: sum(abs(a - b) for a, b in zip(g.factors, seed.factors))) for g in score.genomes]  # noqa: B905
    assert score.genomes[:2] == [low, high]
    assert 5 <= near[2:].count(low) <= 15


def test_crossings_join_runs_of_two_parents():
    low, high = SPACE.genome((1.0,) * 8), SPACE.genome((5.0,) * 8)
    score = Recorded()
    run(score=score, seeds=[low, high], population=2, parents=2, mutations=0, crossovers=7, evaluations=9)
    # Of two constant parents there are seven others in order: first ones, then fives.
    assert {genome.factors for genome in score.genomes[2:]} == {(1.0,) * ones + (5.0,) * (8 - ones) for ones in range(1, 8)}


def test_where_runs_do_not_join_the_larger_factors_win_in_some_children_and_the_smaller_in_others():
    one, other = SPACE.genome((1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 5.0, 5.0)), SPACE.genome((3.0,) * 8)
    score = Recorded()
    run(score=score, seeds=[one, other], population=2, parents=2, mutations=0, crossovers=34, evaluations=36)
    found = {genome.factors for genome in score.genomes}
    assert (2.0,) * 4 + (3.0,) * 4 in found, "threes before twos give way"
    assert (3.0,) * 4 + (4.0,) * 4 in found, "threes behind fours give way"


def test_one_parent_has_children_too():
    found = run(seeds=[SPACE.genome(NTK)], population=1, parents=1, mutations=0, crossovers=6, evaluations=13)
    assert found.evaluations == 13


class Stop(Exception):
    pass


def stopping(generations: int) -> Callable[[int, int, float, Genome], None]:
    left = iter(range(generations, 0, -1))

    def on_generation(done: int, total: int, score: float, best: Genome) -> None:
        if next(left) == 1:
            raise Stop

    return on_generation


RESUMED = {
    "factors": (SPACE, toy),
    "first positions": (Space(8, 4.0, unscaled=(0, 2, 8)), toy),
    "a critical pair": (Space(8, 4.0, critical=(2, 3, 4)), toy),
    "lost candidates": (SPACE, lambda genomes: [math.nan if genome.factors[2] > 1.8 else distance(genome) for genome in genomes]),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_search_interrupted_after_any_generation_ends_as_if_it_had_not_been(name, tmp_path):
    space, score = RESUMED[name]
    seeds = [space.genome(PI), space.genome(NTK)]
    settings = Settings(evaluations=60, population=12, mutations=6, crossovers=6, seed=5)
    whole = search(space, seeds, score, settings=settings, state=tmp_path / "whole.json")
    assert whole == search(space, seeds, score, settings=settings)
    for generations in range(1, 5):
        state = tmp_path / f"{generations}.json"
        with pytest.raises(Stop):
            search(space, seeds, score, settings=settings, state=state, on_generation=stopping(generations))
        recorded = Recorded(score)
        assert repr(search(space, seeds, recorded, settings=settings, state=state)) == repr(whole)
        assert len(recorded.genomes) == 60 - 12 * generations, "what was scored before the interruption is not scored again"
        assert state.read_bytes() == (tmp_path / "whole.json").read_bytes()
    state = tmp_path / "each.json"
    for _ in range(4):
        with pytest.raises(Stop):
            search(space, seeds, score, settings=settings, state=state, on_generation=stopping(1))
    assert repr(search(space, seeds, score, settings=settings, state=state)) == repr(whole)


def test_an_interruption_amid_a_generation_loses_that_generation_alone(tmp_path):
    def failing(genomes: Sequence[Genome]) -> list[float]:
        if len(recorded.calls) == 3:
            raise KeyboardInterrupt
        return toy(genomes)

    recorded, state = Recorded(failing), tmp_path / "state.json"
    with pytest.raises(KeyboardInterrupt):
        run(score=recorded, state=state)
    rest = Recorded()
    assert run(score=rest, state=state) == run()
    assert rest.calls[0] == recorded.calls[2]


def test_a_search_that_ended_asks_for_nothing_more(tmp_path):
    found = run(state=tmp_path / "state.json")

    def never(genomes: Sequence[Genome]) -> list[float]:
        raise AssertionError(genomes)

    assert run(state=tmp_path / "state.json", score=never) == found


def test_the_state_is_strict_json_also_where_scores_are_not_numbers(tmp_path):
    run(score=lambda genomes: [math.inf for _ in genomes], state=tmp_path / "state.json", evaluations=40)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    saved = json.loads((tmp_path / "state.json").read_text(), parse_constant=refuse)
    assert {row["score"] for row in saved["scored"]} == {None}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"space": Space(8, 2.0, beyond=2.5)}, "space.beyond is None there and 2.5 here; space.factor is 4.0 there and 2.0 here"),
        ({"settings": Settings(seed=1)}, "settings.seed is 0 there and 1 here"),
        ({"settings": Settings(evaluations=300, parents=3)}, "settings.evaluations is 250 there and 300 here; settings.parents is 8"),
        ({"subject": {"objective": "mean", "length": 512}}, "subject.length is None there and 512 here"),
        ({"subject": {"objective": "needle"}}, "subject.objective is 'mean' there and 'needle' here"),
        ({"seeds": [SPACE.genome(PI)]}, "the seeds differ"),
    ],
)
def test_the_state_of_another_search_is_refused_by_what_differs(other, message, tmp_path):
    given: dict[str, Any] = {"space": SPACE, "seeds": [SPACE.genome(NTK)], "settings": Settings(), "subject": {"objective": "mean"}}
    search(score=toy, state=tmp_path / "state.json", **given)
    before = (tmp_path / "state.json").read_bytes()
    changed = given | other
    if "space" in other:
        changed["seeds"] = [other["space"].genome(NTK)]
    with pytest.raises(UserError, match=r"state.json is the state of another search") as caught:
        search(score=toy, state=tmp_path / "state.json", **changed)
    assert message in str(caught.value)
    assert (tmp_path / "state.json").read_bytes() == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2}', '{"scored": NaN}'])
def test_a_file_that_is_no_state_is_refused_and_left_alone(content, tmp_path):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state.json is not the state of a search"):
        run(state=tmp_path / "state.json")
    assert (tmp_path / "state.json").read_text() == content


@pytest.mark.parametrize(
    ("space", "members"),
    [
        (Space(1, 1.0, beyond=1.0), 1),
        (Space(3, 1.0, beyond=1.0, unscaled=(0, 1, 2)), 3),
        (Space(2, 1.0, beyond=1.02), 6),
        (Space(2, 1.0, beyond=1.1), 11 * 12 // 2),
        (Space(3, 4.0, beyond=1.0, step=1.0), 20),
        # 35 of the first critical pair, 15 of the second, and 5 of the third, of which 2 are among those of the second.
        (Space(3, 2.0, step=0.5, critical=(0, 1, 2)), 53),
    ],
)
def test_a_space_smaller_than_the_budget_is_scored_whole_and_the_search_ends(space, members):
    score = Recorded()
    found = run(space, score=score, seeds=[space.genome([1.0] * space.pairs)], evaluations=400)
    assert len(score.genomes) == len({*score.genomes}) == members
    assert (found.evaluations, found.exhausted) == (members, True)
    assert found.score == min(toy(score.genomes))


def test_a_budget_as_large_as_the_space_is_spent():
    space = Space(3, 4.0, beyond=1.0, step=1.0)
    found = run(space, evaluations=20)
    assert (found.evaluations, found.exhausted) == (20, False)


def test_at_factor_one_there_is_little_to_find_and_nothing_to_get_stuck_on():
    found = run(Space(64, 1.0), seeds=[Genome((1.0,) * 64)], score=lambda genomes: [0.0] * len(genomes), evaluations=200)
    assert (found.evaluations, found.score) == (200, 0.0)


def test_a_score_that_is_not_finite_is_the_worst():
    start = SPACE.genome(NTK)
    bad = {0: math.nan, 1: math.inf, 2: -math.inf}
    score = Recorded(lambda genomes: [1e9 if genome == start else bad[n % 3] for n, genome in enumerate(genomes)])
    found = run(score=score, seeds=[start], evaluations=40)
    assert (found.best, found.score, {*found.history}) == (start, 1e9, {1e9})
    lost = run(score=lambda genomes: [math.nan] * len(genomes), evaluations=40)
    assert lost.score == math.inf
    assert lost.evaluations == 40


def test_a_score_for_each_candidate_or_none():
    with pytest.raises(ValueError, match="zip"):
        run(score=lambda genomes: [0.0] * (len(genomes) - 1))


def test_progress_is_told_after_each_generation():
    told: list[tuple[int, int, float, Genome]] = []
    found = search(
        SPACE, [SPACE.genome(NTK)], toy, settings=Settings(evaluations=70, population=30), on_generation=lambda *news: told.append(news)
    )
    assert [news[:2] for news in told] == [(30, 70), (54, 70), (70, 70)]
    assert [news[2] for news in told] == [found.history[n - 1] for n in (30, 54, 70)]
    assert told[-1][2:] == (found.score, found.best)
    assert all(distance(best) == score for _, _, score, best in told)


def test_numbers_of_unscaled_positions_are_searched_too():
    space = Space(8, 4.0, unscaled=(0, 1, 4, 16))
    score = Recorded(lambda genomes: [distance(genome) - 2 * genome.unscaled for genome in genomes])
    found = run(space, score, evaluations=250)
    assert {genome.unscaled for genome in score.genomes} == {0, 1, 4, 16}
    assert found.best.unscaled == 16


@repeatable
@given(
    pairs=st.integers(2, 16),
    factor=st.sampled_from([1.0, 2.5, 4.0, 7.123]),
    beyond=st.sampled_from([None, 1.3]),
    choices=st.sets(st.integers(0, 15), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
def test_with_critical_pairs_the_tail_lies_above_the_factor_and_ntk_below_the_pair(pairs, factor, beyond, choices, seed):
    critical = tuple(sorted({choice % pairs for choice in choices}))
    space = Space(pairs, factor, beyond=beyond, critical=critical)
    score = Recorded(lambda genomes: [-sum(genome.factors) for genome in genomes])
    starts = [space.genome([factor] * pairs, critical=pair) for pair in critical]
    search(space, starts, score, settings=Settings(evaluations=40, population=12, mutations=5, crossovers=5, seed=seed))
    for genome in score.genomes:
        pair = genome.critical
        assert pair is not None
        assert pair in critical
        assert_lawful(Genome(genome.factors[pair:]), factor, max(factor + 0.01, (beyond or 2) * factor))
        assert_lawful(genome, 1, math.inf)
        for i in range(pair):
            assert genome.factors[i] == pytest.approx(genome.factors[pair] ** (i / pair), abs=0.005 + 1e-9)


def test_the_critical_pair_is_searched():
    space = Space(8, 4.0, critical=(1, 2, 3, 4, 5))
    score = Recorded(lambda genomes: [(genome.factors[2] - 4.3) ** 2 + (genome.factors[1] - 4.3**0.5) ** 2 for genome in genomes])
    found = run(space, score, seeds=[space.genome(PI, critical=5)])
    assert {genome.critical for genome in score.genomes} == {1, 2, 3, 4, 5}
    assert found.best.critical == 2


@pytest.mark.parametrize(
    ("width", "base", "trained_length", "theoretical"),
    # Those of DESIGN's tables: LongRoPE2 names the last two.
    [(64, 1e4, 256, 13), (64, 1e4, 512, 16), (32, 1e4, 256, 7), (64, 1e4, 2048, 21), (96, 1e4, 2048, 31), (128, 5e5, 8192, 35)],
)
def test_critical_pairs_end_with_the_first_that_never_turned_whole(width, base, trained_length, theoretical):
    turns = [trained_length / base ** (2 * i / width) / (2 * math.pi) for i in range(width // 2)]
    found = critical_pairs(width, base, trained_length)
    assert found == tuple(range(next(i for i, r in enumerate(turns) if r <= 10), theoretical + 1))
    assert turns[theoretical] <= 1 < turns[theoretical - 1]


@pytest.mark.parametrize(
    ("width", "trained_length", "expected"), [(32, 128, (2, 3, 4, 5, 6)), (32, 32, (0, 1, 2, 3)), (32, 6, (0,)), (8, 10**9, (3,))]
)
def test_critical_pairs_are_pairs_also_where_few_turned_or_all_did(width, trained_length, expected):
    assert critical_pairs(width, 1e4, trained_length) == expected


@repeatable
@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=8))
def test_the_member_near_any_factors_lies_above_them_and_is_its_own(factors):
    genome = SPACE.genome(factors)
    assert_lawful(genome, 1, 5)
    assert SPACE.genome(genome.factors) == genome
    for i, factor in enumerate(genome.factors):
        above = min(max(1.0, *factors[: i + 1]), 5.0)
        assert above - 1e-6 <= factor <= above + 0.01


def test_quotients_that_are_grid_steps_but_for_rounding_stay_there():
    assert SPACE.genome([1 + 1e-12, 1.1, 1.15, 2.3, 3 - 1e-12, 4.000000001, 4.35, 4.6]).factors == (1, 1.1, 1.15, 2.3, 3, 4, 4.35, 4.6)
    assert Space(1, 4.4).high == 550
    assert Space(1, 1.1, critical=(0,)).low == 110


def test_members_are_all_lists_in_order_under_each_number_of_unscaled_positions():
    space = Space(3, 1.0, beyond=1.02, unscaled=(0, 2))
    ordered = [factors for factors in itertools.product((1.0, 1.01, 1.02), repeat=3) if list(factors) == sorted(factors)]
    assert sorted((genome.factors, genome.unscaled) for genome in space.members()) == [(f, n) for f in ordered for n in (0, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 0}, "at least one pair; got pairs=0"),
        ({"factor": 0.5}, "factor stretches and must be at least 1; got 0.5"),
        ({"factor": math.nan}, "factor stretches and must be at least 1; got nan"),
        ({"beyond": 0.9}, "beyond is in units of factor and must be at least 1; got 0.9"),
        ({"step": 0.03}, "step must divide 1 into equal parts, as 0.01 does; got 0.03"),
        ({"step": 0.0}, "step must divide 1 into equal parts"),
        ({"unscaled": ()}, "unscaled needs different numbers of positions"),
        ({"unscaled": (0, -1)}, r"unscaled needs different numbers of positions, 0 for none; got \(0, -1\)"),
        ({"unscaled": (4, 4)}, "unscaled needs different numbers of positions"),
        ({"critical": ()}, "critical needs different pairs, one at least"),
        ({"critical": (1, 1)}, "critical needs different pairs, one at least"),
        ({"critical": (3, 8)}, r"critical pairs must lie between 0 and 7; got \(3, 8\)"),
    ],
)
def test_spaces_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Space(**{"pairs": 8, "factor": 4.0} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluations": 0}, "evaluations must be at least 1; got 0"),
        ({"parents": 0}, "parents must be at least 1; got 0"),
        ({"mutations": -1}, "mutations must be at least 0; got -1"),
        ({"seed": -1}, "seed must be at least 0; got -1"),
        ({"mutations": 0, "crossovers": 0}, "mutations and crossovers cannot both be 0"),
        ({"mutation_probability": 0.0}, "mutation_probability must lie above 0 and not above 1; got 0.0"),
        ({"mutation_probability": 1.1}, "mutation_probability must lie above 0 and not above 1; got 1.1"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Settings(**options)


@pytest.mark.parametrize(
    ("space", "seeds", "message"),
    [
        (SPACE, [Genome(NTK)], "seed 0 lies outside the space"),
        (SPACE, [SPACE.genome(NTK), Genome((1.0,) * 7 + (5.01,))], "seed 1 lies outside the space"),
        (SPACE, [Genome((2.0,) + (1.0,) * 7)], "seed 0 lies outside the space"),
        (SPACE, [Genome((1.0,) * 7)], "one factor for each of the 8 pairs; got 7"),
        (SPACE, [Genome((1.0,) * 8, unscaled=1)], "unscaled=1 .* not both among"),
        (SPACE, [Genome((1.0,) * 8, critical=1)], "critical=1 are not both among"),
        (Space(8, 4.0, critical=(2, 3)), [Genome((1.0,) * 8, critical=2)], "seed 0 lies outside the space"),
        (SPACE, [], "a search needs a seed"),
    ],
)
def test_seeds_outside_the_space_are_refused(space, seeds, message):
    with pytest.raises(UserError, match=message):
        search(space, seeds, toy)


def test_more_seeds_than_evaluations_are_refused_and_as_many_are_all_that_is_scored():
    seeds = [SPACE.genome([factor] * 8) for factor in (1.0, 2.0, 3.0)]
    with pytest.raises(UserError, match="an evaluation for each; got 3 and evaluations=2"):
        run(seeds=seeds, evaluations=2)
    assert run(seeds=seeds, evaluations=3).seeds == tuple(toy(seeds))
    assert run(seeds=[*seeds, seeds[0]], evaluations=3).seeds == tuple(toy([*seeds, seeds[0]]))
