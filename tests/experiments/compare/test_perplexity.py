"""Perplexities: averaged as losses, compared by ratios, better when lower; and which measure a task is compared by."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.compare.compare import compare
from experiments.compare.groups import Cell
from experiments.compare.tables import FACTOR, TIMES, factor, terminal, title, to_csv, to_latex
from registry import UserError, tasks
from tests.experiments.compare.recorded import write_run

PERPLEXITY = "test/length/32/perplexity"
#: The two-sided 95 % quantile of Student's t with two degrees of freedom, from a printed table.
T2 = 4.302653


def cells(study: Path, **arguments: Any) -> list[Cell]:
    """The groups' cells of one perplexity."""
    return [group.cells[PERPLEXITY] for group in compare(study, metric=PERPLEXITY, **arguments).groups]


def test_a_mean_of_perplexities_is_exp_of_the_mean_loss_and_so_is_its_interval(tmp_path: Path) -> None:
    for seed, value in enumerate([2.0, 4.0, 8.0]):
        write_run(tmp_path, seed=seed, metrics={PERPLEXITY: value})
    (cell,) = cells(tmp_path)
    half = T2 * math.log(2) / math.sqrt(3)
    assert (cell.n, cell.mean, cell.min, cell.max) == pytest.approx((3, 4.0, 2.0, 8.0))
    assert (cell.low, cell.high) == pytest.approx((4 * math.exp(-half), 4 * math.exp(half)), rel=1e-6)


def test_the_runs_of_one_seed_are_averaged_as_losses_too(tmp_path: Path) -> None:
    for lr, value in ((0.1, 2.0), (0.2, 32.0)):
        write_run(tmp_path, optimizer={"lr": lr}, metrics={PERPLEXITY: value})
    (cell,) = cells(tmp_path, by="variant")
    assert (cell.n, cell.mean) == (1, pytest.approx(8.0))


def test_a_difference_of_perplexities_is_the_ratio_to_the_baseline_paired_by_seed(tmp_path: Path) -> None:
    for seed, (full, gqa) in {0: (10.0, 5.0), 1: (3.0, 3.0), 2: (2.0, 4.0)}.items():
        write_run(tmp_path, variant="full", seed=seed, metrics={PERPLEXITY: full})
        write_run(tmp_path, variant="gqa", seed=seed, metrics={PERPLEXITY: gqa})
    write_run(tmp_path, variant="full", seed=3, metrics={PERPLEXITY: 1e6})  # has no partner, so it tells nothing of the ratio
    _, cell = cells(tmp_path)
    half = T2 * math.log(2) / math.sqrt(3)
    assert (cell.compared_as, cell.pairs, cell.difference) == ("ratio", 3, pytest.approx(1.0))
    assert (cell.difference_low, cell.difference_high) == pytest.approx((math.exp(-half), math.exp(half)), rel=1e-6)


@pytest.mark.parametrize(("value", "words"), [(3.0, "below the baseline (p=0.0078)"), (5.0, "above the baseline (p=0.0078)")])
def test_the_verdict_says_on_which_side_of_the_baseline_a_perplexity_lies(tmp_path: Path, value: float, words: str) -> None:
    for seed in range(8):
        write_run(tmp_path, variant="full", seed=seed, metrics={PERPLEXITY: 4.0})
        write_run(tmp_path, variant="gqa", seed=seed, metrics={PERPLEXITY: value + seed / 100})
    assert cells(tmp_path)[1].verdict == words


def test_an_interval_beyond_what_json_can_hold_is_cut(tmp_path: Path) -> None:
    for variant, last in (("full", 2.0), ("gqa", 1e300)):
        for seed, value in enumerate([1.0, last]):
            write_run(tmp_path, variant=variant, seed=seed, metrics={PERPLEXITY: value})
    document = json.dumps(compare(tmp_path, metric=PERPLEXITY).to_dict(), allow_nan=False)
    assert json.loads(document)["groups"][1]["mean"] == pytest.approx(1e150)


def test_a_perplexity_that_cannot_be_is_refused_by_the_name_of_its_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics={PERPLEXITY: 0.0})
    with pytest.raises(UserError, match=f"{run.name} says {PERPLEXITY} = 0; a perplexity is never below 1"):
        compare(tmp_path, metric=PERPLEXITY)


@pytest.mark.parametrize(
    ("metric", "better", "compared_as"),
    [
        ("test/length/32/accuracy", "higher", "difference"),
        ("test/length/32/sequence_accuracy", "higher", "difference"),
        ("validation/loss", "lower", "difference"),
        (PERPLEXITY, "lower", "ratio"),
        ("something", None, "difference"),
    ],
)
def test_every_cell_says_which_way_is_better_and_what_its_difference_is(
    tmp_path: Path, metric: str, better: str | None, compared_as: str
) -> None:
    write_run(tmp_path, metrics={metric: 2.0})
    (row,) = compare(tmp_path, metric=metric).to_dict()["groups"]
    assert (row["better"], row["compared_as"]) == (better, compared_as)
    assert title(metric).endswith(" ↓") == (better == "lower")


def test_the_tables_say_that_lower_is_better_and_what_stands_for_a_difference(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, variant="full", seed=seed, metrics={PERPLEXITY: 4.0 * 2**seed})
        write_run(tmp_path, variant="gqa", seed=seed, metrics={PERPLEXITY: 2.0 * 2**seed})
    comparison = compare(tmp_path, metric=PERPLEXITY)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(terminal(comparison))
    shown = " ".join(console.export_text().split())
    # Half the interval of ln 4 and ln 8 is 12.7062 ln(2) / 2: a factor of 81.74.
    for expected in (
        "32 perplexity ↓",
        f"5.657 {FACTOR}81.7",
        f"{TIMES}0.500 {FACTOR}1.000",
        "↓: lower is better.",
        "Ratio to variant=full",
        "exp of the mean loss",
    ):
        assert expected in shown, expected
    assert r"perplexity $\downarrow$" in to_latex(comparison)
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [(row["better"], row["compared_as"]) for row in rows] == [("lower", "ratio")] * 2


def test_tables_of_accuracies_say_nothing_of_perplexities(tmp_path: Path) -> None:
    for variant in ("full", "gqa"):
        write_run(tmp_path, variant=variant, metrics={"test/length/32/accuracy": 0.5})
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(terminal(compare(tmp_path)))
    shown = console.export_text()
    assert "Difference to variant=full" in shown
    assert not any(word in shown for word in ("↓", "erplexit", "Ratio", TIMES))


def test_a_task_is_compared_by_the_measure_that_it_declares(tmp_path: Path) -> None:
    metrics = {f"test/length/{length}/{measure}": 2.0 for length in (64, 32) for measure in ("accuracy", "loss", "perplexity")}
    write_run(tmp_path / "a", task={"name": "told", "length": 32}, metrics=metrics)
    write_run(tmp_path / "b", task={"name": "mqar", "length": 32}, metrics=metrics)
    write_run(tmp_path / "c", task={"name": "told", "length": 32}, metrics={"test/length/32/accuracy": 1.0})
    with tasks.scope():

        @tasks.register("told", metric="perplexity")
        class Told:
            """Judged by perplexity."""

        assert compare(tmp_path / "a").metrics == ["test/length/32/perplexity", "test/length/64/perplexity"]
        assert compare(tmp_path / "b").metrics == ["test/length/32/accuracy", "test/length/64/accuracy"]
        assert compare(tmp_path / "c").metrics == ["test/length/32/accuracy"], "its runs have no perplexity"
    assert compare(tmp_path / "a").metrics == ["test/length/32/accuracy", "test/length/64/accuracy"], "an unknown task"


FACTORS = {1.0: "1.000", 1.0341: "1.034", 9.9996: "10.00", 12.5: "12.50", 118.66: "118.7", 1234.5: "1234", 12345.0: "12.3k"}
FACTORS |= {1e20: "1e+20", 0.5: "0.500", 0.01234: "0.0123", 0.0: "0.000"}


@pytest.mark.parametrize(("value", "text"), FACTORS.items())
def test_factors_have_four_digits_or_so(value: float, text: str) -> None:
    assert factor(value) == text
