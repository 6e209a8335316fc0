"""The gate: runs whose checkpoint has not learned the task are counted, averaged nowhere, and told of in words."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from experiments.compare.compare import compare
from experiments.compare.gate import percent
from experiments.compare.page_data import page_data
from experiments.compare.tables import results_caption, terminal
from tests.experiments.compare.recorded import write_run

ACCURACY = "test/length/32/accuracy"
NOISE = "within its trained length (gate 90 %): differences between schemes would be noise"


def start(study: Path, variant: str, seed: int, reached: float, accuracy: float = 0.5) -> None:
    """A run from a checkpoint that reached so much; 0.9 is needed."""
    gate = {"needed": 0.9, "reached": reached, "length": 32}
    log = [{"step": 0, "tokens": 0, "seconds": 0.0, "loss": float(seed)}]
    write_run(study, variant=variant, seed=seed, metrics={ACCURACY: accuracy}, result={"gate": gate, "steps_to_solve": 9}, log=log)


def test_a_run_below_the_gate_is_counted_and_not_averaged(tmp_path: Path) -> None:
    for seed, (reached, accuracy) in enumerate([(0.97, 0.2), (0.9, 0.4), (0.899, 1.0)]):
        start(tmp_path, "full", seed, reached, accuracy)
    found = compare(tmp_path)
    (group,) = found.groups
    assert (group.cells[ACCURACY].n, group.cells[ACCURACY].mean) == (2, pytest.approx(0.3))
    assert (len(group.finished), len(group.runs), found.finished) == (2, 3, 2)
    assert group.solved is not None
    assert group.solved.n == 2
    document = json.loads(json.dumps(found.to_dict()))
    assert document["left_out"]["below the gate"] == document["groups"][0]["left_out"]["below the gate"] == 1
    assert "2 finished runs; left out: 1 below the gate." in results_caption(found)


def test_a_study_that_sets_no_gate_speaks_of_none(tmp_path: Path) -> None:
    write_run(tmp_path, metrics={ACCURACY: 0.5})
    write_run(tmp_path, seed=1, metrics={ACCURACY: 0.5}, result={"gate": None})
    assert "below the gate" not in compare(tmp_path).left_out
    start(tmp_path, "full", 2, 0.95)
    assert compare(tmp_path).left_out["below the gate"] == 0


@pytest.mark.parametrize(("reached", "said"), [((0.31, 0.31), "31 %"), ((0.31, 0.452), "31 to 45.2 %"), ((0.8999, 0.8999), "89.9 %")])
def test_a_group_that_is_wholly_below_the_gate_says_why_it_has_no_number(tmp_path: Path, reached: tuple[float, float], said: str) -> None:
    for seed in range(2):
        start(tmp_path, "full", seed, 0.97)
        start(tmp_path, "gqa", seed, reached[seed])
    write_run(tmp_path, variant="gqa", seed=2, status="failed", reason="boom")
    found = compare(tmp_path)
    cell = found.groups[1].cells[ACCURACY]
    assert (cell.n, cell.mean, cell.verdict) == (0, None, f"the checkpoint is right on only {said} {NOISE}")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal(found))
    shown = " ".join(console.export_text().split())
    assert f"No number for gqa: the checkpoint is right on only {said} {NOISE}." in shown


def test_a_group_is_not_compared_with_a_baseline_below_the_gate(tmp_path: Path) -> None:
    start(tmp_path, "full", 0, 0.31)
    start(tmp_path, "gqa", 0, 0.97)
    baseline, other = compare(tmp_path).groups
    assert baseline.cells[ACCURACY].verdict.startswith("the checkpoint is right on only 31 %")
    assert (other.cells[ACCURACY].difference, other.cells[ACCURACY].verdict) == (None, "the baseline's runs are all below the gate")


def test_the_page_counts_them_in_their_group_and_draws_no_mean_of_them(tmp_path: Path) -> None:
    start(tmp_path, "full", 0, 0.97)
    start(tmp_path, "full", 4, 0.31)
    data = page_data(tmp_path)
    (group,) = data["groups"]
    assert (group["finished"], group["runs"], group["left_out"], data["left_out"]) == (1, 2, {"below the gate": 1}, {"below the gate": 1})
    (curve,) = data["curves"]
    assert (curve["n"], curve["mean"]["values"]) == (1, [0.0])
    assert {run["name"] for run in curve["runs"]} == {"seed 0", "seed 4 (below the gate)"}
    listed = {run["seed"]: (run["status"], run["reason"]) for run in data["runs"]}
    assert listed == {"0": ("finished", ""), "4": ("below the gate", f"the checkpoint is right on only 31 % {NOISE}")}


def test_a_share_just_short_of_a_gate_does_not_read_as_the_gate() -> None:
    assert [percent(share) for share in (0.9, 0.89999, 0.57, 0.29, 1.0, 0.0)] == ["90", "89.9", "57", "29", "100", "0"]


def test_a_study_that_starts_from_checkpoints_varies_in_what_was_chosen_and_in_nothing_that_follows(tmp_path: Path) -> None:
    study = tmp_path / "extension"
    for seed in range(3):
        fresh = {"tests": {"gate": 0.9, "unit": None}, "parent": [], "start": None}
        checkpoint = write_run(study, position="rope", seed=seed, metrics={ACCURACY: 0.5}, **fresh).name
        for position, steps in itertools.product(("rope", "pi"), (0, 200)):
            children = {"tests": {"gate": 0.9, "unit": 32}, "parent": ["trainer.steps=1000"], "start": checkpoint}
            write_run(study, position=position, seed=seed, metrics={ACCURACY: 0.5}, trainer={"steps": steps}, **children)
    found = compare(study)
    assert found.by == ["position", "trainer.steps"]
    assert [group.cells[ACCURACY].n for group in found.groups] == [3] * 5
    assert found.averages_over == "n = 3 seeds"


def test_checkpoints_that_no_seed_tells_apart_are_an_axis(tmp_path: Path) -> None:
    for start_of in ("short", "long"):
        for seed in range(2):
            write_run(tmp_path, seed=seed, start=start_of, metrics={ACCURACY: 0.5})
    found = compare(tmp_path)
    assert (found.by, [group.by["start"] for group in found.groups]) == (["start"], ["long", "short"])
