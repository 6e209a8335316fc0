"""Runs that start from another run: its weights, its place in a plan, the gate, the search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from experiments.config import resolve
from experiments.evaluate import score
from experiments.runs.write import LAST
from experiments.sweep import launch
from experiments.sweep.plan import expand, single
from experiments.tasks.contract import Evaluation
from experiments.train import prepare, run_job
from registry import UserError

TINY = [
    *("task=repeated_segments", "task.length=16", "task.shortest=4", "task.longest=6", "task.symbols=6", "position=rope"),
    *("model.dim=16", "model.heads=2", "model.layers=1", "trainer.batch_size=4", "trainer.validate_every=5", "trainer.log_every=1"),
    *("trainer.validation_sequences=8", "trainer.stop_at=null", "evaluation.sequences=8", "evaluation.multiples=[1,2]"),
]
PARENT = "parent=['position=rope','trainer.steps=6','search.evaluations=0','task.length=16']"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(words that every run of the study has, the finished run to start from)."""
    words = [*TINY, f"runs_dir={tmp_path_factory.mktemp('runs')}", "study=s"]
    parent = single([*words, "trainer.steps=6"])
    run_job(parent.config)
    return words, parent


def result_of(job) -> dict[str, Any]:
    return json.loads((job.directory / "result.json").read_text())


def test_a_run_that_trains_no_further_scores_what_the_run_it_starts_from_scored(trained):
    words, parent = trained
    child = single([*words, f"start='{parent.run_id}'", "trainer.steps=0", "seed=7"])
    result = run_job(child.config)
    for name, value in result_of(parent)["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, abs=1e-12), name
    assert result["counts"] == {"steps": 0, "tokens": 0, "sequences": 0}


def test_another_scheme_gets_the_same_weights(trained):
    words, parent = trained
    task, model = prepare(single([*words, f"start='{parent.run_id}'", "trainer.steps=0", "position=pi"]).config)
    _, plain = prepare(single([*words, f"start='{parent.run_id}'", "trainer.steps=0", "seed=3"]).config)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    stored = torch.load(parent.directory / "checkpoints" / LAST, weights_only=True)["state_dict"]
    assert all(torch.equal(stored[f"model.{name}"], value) for name, value in plain.state_dict().items())
    here = Evaluation("length", 32)
    losses = [score(m, task, "test", here, sequences=8, batch_tokens=512).loss for m in (model, plain)]
    assert losses[0] != losses[1]


def test_training_goes_on_from_the_weights_and_resumes_bitwise(trained, tmp_path):
    words, parent = trained
    child = single([*words, f"start='{parent.run_id}'", "trainer.steps=4", "trainer.checkpoint_every=2", "position=pi"])

    def stop(step: int, total: int, text: str) -> None:
        if step >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(child.config, stop)
    resumed = run_job(child.config)
    straight = single([*words, f"start='{parent.run_id}'", "trainer.steps=4", "trainer.checkpoint_every=2", "position=pi", "study=s"])
    assert straight.run_id == child.run_id
    weights = torch.load(child.directory / "checkpoints" / LAST, weights_only=True)["state_dict"]
    (child.directory / "result.json").unlink()
    (child.directory / "checkpoints" / LAST).unlink()
    again = run_job(child.config)
    repeated = torch.load(child.directory / "checkpoints" / LAST, weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], repeated[name]) for name in weights)
    assert again["metrics"] == resumed["metrics"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["start=nowhere"], "no finished run of that name"),
        (["start='../s'"], "no finished run of that name"),
        (["trainer.steps=0"], "needs start="),
        (["search.evaluations=9", "position=longrope"], "start=, a trained rotary run"),
        (["evaluation.gate=1.5"], "accuracy from 0 to 1"),
        (["evaluation.gate=0.5", "evaluation.multiples=[2]"], "must hold 1"),
        (["evaluation.unit=0"], "evaluation.unit must be a number of tokens"),
        (["search.objective=men"], "Did you mean 'mean'"),
    ],
)
def test_what_there_is_nothing_to_start_from_is_refused(trained, words, said):
    with pytest.raises(UserError) as caught:
        prepare(single([*trained[0], *words]).config)
    assert said in str(caught.value)


def test_a_model_of_another_shape_is_refused_naming_the_weight(trained):
    words, parent = trained
    with pytest.raises(UserError, match="another model: its weight .* is .*, here it is"):
        prepare(single([*words, f"start='{parent.run_id}'", "task.symbols=7"]).config)
    with pytest.raises(UserError, match="absent"):
        prepare(single([*words, f"start='{parent.run_id}'", "variant.qk_norm=true"]).config)
    with pytest.raises(UserError, match=r"has model\.heads=2, here it is 4"):  # which no shape tells
        prepare(single([*words, f"start='{parent.run_id}'", "model.heads=4"]).config)


def test_a_damaged_checkpoint_is_named(trained, tmp_path):
    words, _ = trained
    words = [*words, f"runs_dir={tmp_path}"]
    parent = single([*words, "trainer.steps=1"])
    run_job(parent.config)
    (parent.directory / "checkpoints" / LAST).write_bytes(b"PK")
    with pytest.raises(UserError, match=r"last\.ckpt cannot be read"):
        prepare(single([*words, f"start='{parent.run_id}'"]).config)


def test_a_plan_holds_each_parent_once_and_first():
    plan = expand([*TINY, PARENT, "trainer.steps=0", "position=pi,ntk", "seed=0,1"])
    parents = [job for job in plan.jobs if job.config["start"] is None]
    assert [(job.config["position"]["name"], job.config["trainer"]["steps"], job.config["seed"]) for job in parents] == [
        ("rope", 6, 0),
        ("rope", 6, 1),
    ]
    assert len(plan.jobs) == 6
    for job in plan.jobs:
        if job.config["start"] is not None:
            own = next(parent for parent in parents if parent.config["seed"] == job.config["seed"])
            assert job.config["start"] == own.run_id and plan.jobs.index(own) < plan.jobs.index(job)
        assert "parent" not in job.config and "compare" not in job.config


def test_a_map_of_distances_is_evaluated_and_never_trained(trained):
    plan = expand([*TINY, PARENT, "trainer.steps=0,3", "position=rerope,pi", "seed=0"])
    ((overrides, reason),) = plan.dropped
    assert {*overrides} == {"trainer.steps=3", "position=rerope"} and "for its evaluation alone" in reason
    children = {(job.config["position"]["name"], job.config["trainer"]["steps"]) for job in plan.jobs[1:]}
    assert children == {("rerope", 0), ("pi", 0), ("pi", 3)}
    words, parent = trained
    with pytest.raises(UserError, match="trained with rope"):
        prepare(single([*words, "position=self_extend"]).config)
    exact = single([*words, f"start='{parent.run_id}'", "trainer.steps=0", "position=dual_chunk", "position.trained_length=64"])
    assert run_job(exact.config)["metrics"]["test/length/16/loss"] == pytest.approx(result_of(parent)["metrics"]["test/length/16/loss"])


def test_a_parent_may_have_a_parent():
    line = expand([*TINY, "trainer.steps=0", "parent=['trainer.steps=3',\"parent=['trainer.steps=9']\"]"]).jobs
    assert [job.config["trainer"]["steps"] for job in line] == [9, 3, 0]
    assert [job.config["start"] for job in line] == [None, line[0].run_id, line[1].run_id]


def test_a_parent_of_another_shape_stops_the_plan():
    with pytest.raises(UserError, match="another model"):
        expand([*TINY, "trainer.steps=0", "parent=['trainer.steps=3','task.symbols=7']"])
    with pytest.raises(UserError, match=r"has model\.heads=1"):
        expand([*TINY, "trainer.steps=0", "parent=['trainer.steps=3','model.heads=1']"])
    with pytest.raises(UserError, match="another study"):
        expand([*TINY, "trainer.steps=0", "parent=['trainer.steps=3','study=other']"])
    with pytest.raises(UserError, match="give one"):
        expand([*TINY, "start=abc", PARENT])


def test_a_sweep_runs_parents_before_what_starts_from_them(tmp_path):
    plan = expand([*TINY, f"runs_dir={tmp_path}", PARENT, "trainer.steps=0", "position=pi,rope", "evaluation.gate=0.999"])
    report = launch.sweep(plan.directory, plan.jobs[::-1], compare={"baseline": "position=rope"}, executor=plan.executor)
    assert len(report.having("finished")) == 3, str(report)
    gates = {json.dumps(result_of(job)["gate"]) for job in plan.jobs}
    (gate,) = map(json.loads, gates)  # the parent's accuracy, for all of them
    parent = next(job for job in plan.jobs if job.config["start"] is None)
    assert gate == {"needed": 0.999, "reached": result_of(parent)["metrics"]["test/length/16/accuracy"], "length": 16}
    assert json.loads((plan.directory / "study.json").read_text())["compare"] == {"baseline": "position=rope"}


def test_test_sets_are_counted_in_the_unit_and_not_in_the_new_length(trained):
    words, parent = trained
    longer = [*words, f"start='{parent.run_id}'", "task.length=32", "evaluation.unit=16", "trainer.steps=1"]
    result = run_job(single(longer).config)
    assert {name for name in result["metrics"] if name.endswith("perplexity")} == {f"test/length/{n}/perplexity" for n in (16, 32)}


def test_what_a_run_was_trained_on_is_the_unit_of_what_starts_from_it(trained):
    words, parent = trained
    assert single([*words, f"start='{parent.run_id}'", "task.length=32"]).config["evaluation"]["unit"] == 16
    child = expand([*TINY, PARENT, "trainer.steps=0", "task.length=32"]).jobs[-1]
    assert child.config["start"] and child.config["evaluation"]["unit"] == 16


def test_a_run_that_was_only_tested_can_be_started_from(trained):
    words, parent = trained
    tested = single([*words, f"start='{parent.run_id}'", "trainer.steps=0", "seed=21"])
    run_job(tested.config)
    again = run_job(single([*words, f"start='{tested.run_id}'", "trainer.steps=0", "seed=22"]).config)
    assert again["metrics"] == result_of(tested)["metrics"]


def test_a_gate_that_cannot_be_judged_is_refused(tmp_path):
    words = [*TINY, f"runs_dir={tmp_path}", "study=s"]
    parent = single([*words, "trainer.steps=1", "evaluation.multiples=[2]"])
    run_job(parent.config)
    with pytest.raises(UserError, match="where it was not tested"):
        prepare(single([*words, f"start='{parent.run_id}'", "trainer.steps=0", "evaluation.gate=0.9"]).config)


SEARCH = ["position=longrope", "position.trained_length=16", "position.factor=2", "trainer.steps=0"]
SEARCH += ["search.evaluations=12", "search.population=6", "search.sequences=2"]


def test_a_run_searches_tests_what_it_found_and_keeps_it_as_a_file(trained):
    words, parent = trained
    child = single([*words, f"start='{parent.run_id}'", *SEARCH])
    result = run_job(child.config)
    found, told = result["position"], result["search"]
    assert len(found["long_factors"]) == 4 and found["long_factors"] == sorted(found["long_factors"])
    assert told["evaluations"] == 12 == len(told["history"]) and told["perplexity"] == told["history"][-1]
    assert told["perplexity"] <= min(told["seeds"].values()) and told["held_out"].keys() == {*told["seeds"], "found"}
    file = child.directory / "position.yaml"
    assert yaml.safe_load(file.read_text()) == found
    tested = run_job(single([*words, f"start='{parent.run_id}'", f"position={file}", "trainer.steps=0"]).config)
    assert tested["metrics"] == result["metrics"]


def test_an_interrupted_search_ends_as_an_uninterrupted_one(trained, tmp_path):
    words, parent = trained
    straight = run_job(single([*words, f"start='{parent.run_id}'", *SEARCH, "search.seed=1"]).config)
    child = single([*words, f"start='{parent.run_id}'", *SEARCH, "search.seed=1", "seed=5"])

    def stop(step: int, total: int, text: str) -> None:
        if text.startswith("search") and step >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(child.config, stop)
    assert (child.directory / "checkpoints" / "search.json").exists()
    resumed = run_job(child.config)
    assert resumed["position"] == straight["position"] and resumed["search"] == straight["search"]


def test_the_search_never_sees_a_test_sequence(trained, monkeypatch):
    from experiments.longrope import run as searching

    words, parent = trained
    seen: list[int] = []
    real = searching.search

    def watched(space, seeds, score, **options):
        seen.append(score.tokens.shape[1])
        task = prepare(single([*words, f"start='{parent.run_id}'"]).config)[0]
        assert score.tokens.tolist() == task.batch("validation", 32, 0, 2).tokens.tolist()
        return real(space, seeds, score, **options)

    monkeypatch.setattr(searching, "search", watched)
    run_job(single([*words, f"start='{parent.run_id}'", *SEARCH, "search.seed=9"]).config)
    assert seen == [32]


def test_a_resolved_config_needs_no_plan():
    config = resolve(TINY)
    assert config["parent"] == [] and config["start"] is None and Path(config["runs_dir"]) == Path("runs")
