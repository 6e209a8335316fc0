"""The table writer: one comparison in three notations, each of which says what it averages."""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from experiments.compare.compare import compare
from experiments.compare.groups import Comparison
from experiments.compare.tables import escape_latex, quantity, terminal, to_csv, to_latex
from tests.experiments.compare.recorded import write_run

ACCURACY = "test/length/32/accuracy"


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Two variants by three seeds, one run failed; the window has a ceiling."""
    study = tmp_path / "quick_start"
    for seed in range(3):
        write_run(study, seed=seed, metrics={ACCURACY: 0.9 + seed / 30}, result={"steps_to_solve": 300})
        window = {"name": "sliding_window", "window": 8}
        reach = {"length/32": {"within_reach": 0.41}}
        state = "failed" if seed == 2 else "finished"
        write_run(study, variant=window, seed=seed, status=state, metrics={ACCURACY: 0.4 + seed / 100}, result={"baselines": reach})
    return compare(study)


def printed(comparison: Comparison, width: int = 140) -> str:
    """What the terminal shows."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal(comparison))
    return console.export_text()


def test_the_terminal_shows_means_intervals_ceilings_and_counts(comparison: Comparison) -> None:
    text = printed(comparison)
    # Half the interval of 0.9, 0.9333, 0.9667: 4.302653 * 0.0333333 / sqrt(3).
    for expected in ("0.933 ±0.083", "≤0.410", "3/3", "2/3", "300", "never", "5k", "n = 2 to 3 seeds", "left out: 1 failed"):
        assert expected in text, expected


def test_no_number_is_cut_short_in_eighty_columns(tmp_path: Path) -> None:
    value = {f"test/{axis}/{length}/accuracy": 0.1 + length / 1000 for axis in ("length", "load") for length in (32, 64, 128, 256)}
    for variant, position, seed in itertools.product(("full", "sliding_window"), ("none", "rope"), range(3)):
        metrics = {name: mean + seed / 100 + 0.1 * (variant == "full") for name, mean in value.items()}
        write_run(tmp_path, variant=variant, position=position, seed=seed, metrics=metrics)
    comparison = compare(tmp_path)
    words = printed(comparison, width=80).split()
    for group in comparison.groups:
        assert {group.by["variant"], group.by["position"]} <= set(words)
        assert {f"{cell.mean:.3f}" for cell in group.cells.values()} <= set(words)


def test_the_terminal_says_which_differences_cannot_be_significant(comparison: Comparison) -> None:
    text = " ".join(printed(comparison).split())
    assert "-0.512 ±0.148" in text
    assert "Without p: cannot be significant at 0.05 with n=2 seeds (needs 6)." in text
    assert "p=" not in text


def test_a_p_that_could_be_small_is_shown_and_starred(tmp_path: Path) -> None:
    for seed in range(8):
        write_run(tmp_path, variant="full", seed=seed, metrics={ACCURACY: 0.9})
        write_run(tmp_path, variant="gqa", seed=seed, metrics={ACCURACY: 0.1 + seed / 100})
    assert "p=0.0078*" in printed(compare(tmp_path))


def test_square_brackets_in_a_users_words_are_not_markup(tmp_path: Path) -> None:
    write_run(tmp_path / "[red]study", variant="[bold]mine[/bold]", metrics={ACCURACY: 0.5})
    text = printed(compare(tmp_path / "[red]study"))
    assert "[bold]mine[/bold]" in text
    assert "[red]study" in text


def test_the_spreadsheet_loses_no_digit_and_no_group(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [row["variant"] for row in rows] == ["full", "sliding_window"]
    for row, group in zip(rows, comparison.groups, strict=True):
        cell = group.cells[ACCURACY]
        assert (float(row["mean"]), float(row["low"]), int(row["n"])) == (cell.mean, cell.low, cell.n)
    assert (rows[1]["left_out"], rows[1]["difference"]) == ("1", str(comparison.groups[1].cells[ACCURACY].difference))


def test_a_spreadsheet_cannot_be_made_to_run_a_users_words(tmp_path: Path) -> None:
    write_run(tmp_path, variant="=HYPERLINK(1)", metrics={ACCURACY: 0.5})
    write_run(tmp_path, variant="full", optimizer={"lr": -1.5}, metrics={ACCURACY: 0.5})
    rows = list(csv.DictReader(io.StringIO(to_csv(compare(tmp_path, by=["variant", "optimizer.lr"])))))
    assert {(row["variant"], row["optimizer.lr"]) for row in rows} == {("'=HYPERLINK(1)", "0.003"), ("full", "-1.5")}


def test_the_table_for_a_paper_is_escaped_and_says_what_it_averages(comparison: Comparison) -> None:
    text = to_latex(comparison)
    assert r"sliding\_window & 2/3 & 0.405 $\pm$0.064 $\leq$0.410" in text
    assert r"\caption{quick\_start: Mean $\pm$ half a 95 \% t interval; n = 2 to 3 seeds." in text
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    widths = {line.count("&") for line in text.splitlines() if line.endswith(r"\\")}
    assert widths == {6}


def test_every_special_character_of_latex_is_escaped() -> None:
    assert escape_latex(r"\&%$#_{}~^") == r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (12.0, "12"), (999.6, "1k"), (98432, "98.4k"), (1.234e6, "1.23M"), (7.4e11, "740G")]
)
def test_quantities_have_three_digits(value: float | None, text: str) -> None:
    assert quantity(value) == text
