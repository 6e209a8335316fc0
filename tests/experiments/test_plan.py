"""Plans: what a grid expands to, what is dropped, what is refused."""

from __future__ import annotations

import pytest

import registry
from experiments.sweep.plan import expand, single
from registry import UserError
from variants.positions.contract import Scheme


def labels(words: list[str]) -> list[str]:
    return [" ".join(run.overrides) for run in expand(words).jobs]


def test_comma_lists_make_a_grid():
    assert labels(["variant=full,gqa", "seed=0,1", "task=mqar"]) == [
        "variant=full seed=0",
        "variant=full seed=1",
        "variant=gqa seed=0",
        "variant=gqa seed=1",
    ]


def test_a_range_is_a_list():
    assert labels(["seed=range(0,3)"]) == ["seed=0", "seed=1", "seed=2"]


def test_numbers_are_of_one_kind_from_command_line_and_file():
    runs = expand(["optimizer.lr=1e-3,1e-5,1"]).jobs
    assert [run.config["optimizer"]["lr"] for run in runs] == [1e-3, 1e-5, 1.0]


def test_quickstart_is_four_mixers_two_schemes_and_three_seeds():
    plan = expand(["experiment=quickstart"])
    assert len(plan.jobs) == 24 and plan.study == "quickstart" and not plan.dropped
    assert {run.config["variant"]["name"] for run in plan.jobs} == {"full", "gqa", "sliding_window", "linear"}
    windows = {run.config["variant"]["window"] for run in plan.jobs if run.config["variant"]["name"] == "sliding_window"}
    assert len(windows) == 1


def test_a_key_on_the_command_line_takes_the_place_of_the_experiments_choices():
    plan = expand(["experiment=quickstart", "variant=full", "seed=7,8"])
    assert len(plan.jobs) == 4
    assert {run.config["seed"] for run in plan.jobs} == {7, 8}


def test_an_override_that_is_not_swept_reaches_every_run():
    assert {run.config["trainer"]["steps"] for run in expand(["experiment=quickstart", "trainer.steps=3"]).jobs} == {3}


def test_a_run_is_named_the_same_by_sweep_and_by_train():
    swept = expand(["variant=gqa,full", "seed=1"]).jobs[0]
    assert single(["variant=gqa", "seed=1"]).run_id == swept.run_id


def test_folders_and_plugins_do_not_name_a_run():
    assert single(["runs_dir=/elsewhere", "study=other", "executor.processes=7"]).run_id == single([]).run_id
    assert single(["optimizer.lr=1e-4"]).run_id != single([]).run_id


def test_equal_combinations_are_one_run():
    assert len(expand(["seed=1,1"]).jobs) == 1


def test_a_combination_without_meaning_is_dropped_with_the_reason():
    with registry.positions.scope():

        @registry.positions.register("distance", hooks=("bias",))
        class Distance(Scheme):
            """A bias."""

        plan = expand(["variant=full,linear", "position=distance"])
    assert [run.config["variant"]["name"] for run in plan.jobs] == ["full"]
    ((overrides, reason),) = plan.dropped
    assert overrides == ("variant=linear",) and "does not have" in reason


@pytest.mark.parametrize(
    "words, said",
    [
        (["variant=full,liner"], "Did you mean 'linear'"),
        (["model.heads=2,3", "model.dim=16"], "model.heads=3: Full: heads=3 does not divide dim=16"),
        (["variant=full,sliding_window", "variant.window=8,16"], "variant has no key 'window'"),
        (["seed=a,b"], "seed"),
        (["experiment=quickstart", "variant=glob(*)"], "cannot sweep over"),
        (["task.length=8,16", "task.pairs=4"], "8"),
        (["position=rope,learned", "task.length=1024"], "position=learned: position.max_positions=2048 is too small"),
        (["trainer.steps=10,0"], "trainer.steps=0 trains nothing"),
    ],
)
def test_a_combination_that_is_a_mistake_stops_the_whole_plan(words, said):
    with pytest.raises(UserError) as caught:
        expand(words)
    assert said in str(caught.value)
