"""Every experiment in configs/ runs: each run of its grid, for two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import configs
from experiments.config import resolve
from experiments.sweep import launch
from experiments.sweep.plan import expand
from experiments.words import changed, spell

EXPERIMENTS = sorted(file.stem for file in (Path(configs.__file__).parent / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs_for_two_steps(name, tmp_path):
    words = [
        f"experiment={name}",
        f"runs_dir={tmp_path}",
        "seed=0",
        "trainer.steps=2",
        "trainer.batch_size=2",
        "trainer.validation_sequences=2",
    ]
    words += ["evaluation.sequences=2", "evaluation.multiples=[1]"]
    parent = resolve([f"experiment={name}"])["parent"]
    if parent:  # both what is only tested, and what trains on
        words[words.index("trainer.steps=2")] = "trainer.steps=0,2"
        words += [f"parent={spell(changed(parent, ['trainer.steps=2', 'trainer.batch_size=2']))}", "search.sequences=1"]
    plan = expand(words)
    report = launch.sweep(plan.directory, plan.jobs, dropped=plan.dropped, executor=plan.executor)
    assert plan.jobs and len(report.having("finished")) == len(plan.jobs), str(report)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_its_command_on_top(name):
    _, command, *_ = (Path(configs.__file__).parent / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert command == f"# attnlab sweep experiment={name}"
