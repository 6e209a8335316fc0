"""Slices and the grid of depth and length: accuracies by what the evaluation tells of a sequence or of a scored token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experiments.compare.page_data import page_data
from experiments.compare.slices import bins
from tests.experiments.compare.recorded import write_run

ACCURACY = "test/length/32/accuracy"


def evaluation(rows: list[tuple[int, list[tuple[float, bool]]]], axis: str = "length") -> pa.Table:
    """A sequence for each row: its length, and of each scored token the depth and whether it is right."""
    right = [[hit for _, hit in tokens] for _, tokens in rows]
    columns: dict[str, Any] = {"split": ["test"] * len(rows), "axis": [axis] * len(rows), "length": [length for length, _ in rows]}
    columns |= {"index": list(range(len(rows))), "correct": [all(hits) for hits in right], "tokens_scored": [len(hits) for hits in right]}
    columns |= {"tokens_correct": [sum(hits) for hits in right], "loss": [0.5] * len(rows), "token_correct": right}
    return pa.table(columns | {"depth": [[depth for depth, _ in tokens] for _, tokens in rows]})


def means(panel: dict[str, Any]) -> list[list[float | None]]:
    """A panel's numbers, a list for each depth."""
    return [[cell and cell["mean"] for cell in row] for row in panel["cells"]]


def test_slices_are_accuracies_of_tokens(tmp_path: Path) -> None:
    write_run(tmp_path, evaluation=evaluation([(32, [(0.25, True), (0.75, False)]), (64, [(0.25, True)])]), metrics={ACCURACY: 0.5})
    slices = {(one["name"], one["length"]): one for one in page_data(tmp_path)["slices"]}
    assert slices["depth", 32]["bins"] == ["0.25", "0.75"]
    assert [place["mean"] for place in slices["depth", 32]["groups"][0]] == [1.0, 0.0]


def test_tasks_may_tell_the_same_fact_of_a_sequence_and_of_each_token(tmp_path: Path) -> None:
    of_tokens = evaluation([(32, [(0.25, True), (0.75, False)])])
    of_sequences = evaluation([(32, [(0.0, True), (0.0, False)]), (32, [(0.0, True)])])
    of_sequences = of_sequences.set_column(of_sequences.column_names.index("depth"), "depth", pa.array([0.25, 0.5]))
    for task, table in (("mqar", of_tokens), ("passkey", of_sequences)):
        write_run(tmp_path, task={"name": task, "length": 32}, evaluation=table, metrics={ACCURACY: 0.5})
    told = page_data(tmp_path)
    (depths,) = [one for one in told["slices"] if one["name"] == "depth"]
    assert depths["bins"] == ["0.25", "0.5", "0.75"]
    found = {
        group["label"]: [cell and cell["mean"] for cell in cells] for group, cells in zip(told["groups"], depths["groups"], strict=True)
    }
    assert found == {"mqar": [1.0, None, 0.0], "passkey": [0.5, 1.0, None]}


def test_a_grid_has_a_row_for_each_depth_and_a_column_for_each_length(tmp_path: Path) -> None:
    rows = [(32, [(0.0, True), (1.0, True)]), (32, [(0.0, False), (1.0, True)]), (64, [(0.0, False), (0.5, True)])]
    write_run(tmp_path, evaluation=evaluation(rows), metrics={ACCURACY: 0.5}, tests={"unit": 16})
    grid = page_data(tmp_path)["grid"]
    assert (grid["lengths"], grid["bins"]) == ([32, 64], ["0.0", "0.5", "1.0"])
    (panel,) = grid["groups"]
    assert (panel["trained"], means(panel)) == ([16], [[0.5, 0.0], [None, 1.0], [1.0, None]])


def test_a_cell_is_the_mean_over_the_runs_whose_numbers_count(tmp_path: Path) -> None:
    gate = {"needed": 0.9, "reached": 0.95}
    for seed, hits in enumerate([[True, True, False, False], [True, False, False, False]]):
        table = evaluation([(32, [(0.5, hit) for hit in hits])])
        write_run(tmp_path, seed=seed, evaluation=table, metrics={ACCURACY: 0.5}, result={"gate": gate})
    table = evaluation([(32, [(0.5, True)])])
    write_run(tmp_path, seed=2, evaluation=table, metrics={ACCURACY: 0.5}, result={"gate": gate | {"reached": 0.1}})
    write_run(tmp_path, variant="gqa", status="failed")
    full, gqa = page_data(tmp_path)["grid"]["groups"]
    assert full["cells"] == [[{"mean": 0.375, "low": 0.25, "high": 0.5}]]
    assert gqa["cells"] == [[None]]


def test_many_depths_share_their_tenths_over_all_lengths(tmp_path: Path) -> None:
    rows = [(length, [(place / (length - 1), place < length / 2) for place in range(length)]) for length in (8, 16)]
    write_run(tmp_path, evaluation=evaluation(rows), metrics={ACCURACY: 0.5})
    grid = page_data(tmp_path)["grid"]
    assert grid["bins"] == [f"≤ {tenth / 10}" for tenth in range(1, 11)]
    assert [(row[0], row[-1]) for row in means(grid["groups"][0])][:2] == [(1.0, 1.0), (1.0, 1.0)]


def test_a_depth_of_the_whole_sequence_makes_a_grid_as_well(tmp_path: Path) -> None:
    table = evaluation([(32, [(0.5, True), (0.5, False)]), (32, [(0.5, True), (0.5, True)])])
    table = table.drop(["depth"]).append_column("depth", pa.array([0.25, 0.75]))
    write_run(tmp_path, evaluation=table, metrics={ACCURACY: 0.5})
    grid = page_data(tmp_path)["grid"]
    assert (grid["bins"], means(grid["groups"][0])) == (["0.25", "0.75"], [[0.5], [1.0]])


@pytest.mark.parametrize(("depth", "axis"), [(3.0, "length"), (-1.0, "length"), (0.5, "load")])
def test_what_is_no_depth_in_a_longer_sequence_makes_no_grid(tmp_path: Path, depth: float, axis: str) -> None:
    write_run(tmp_path, evaluation=evaluation([(32, [(0.5, True), (depth, True)])], axis), metrics={ACCURACY: 0.5})
    assert page_data(tmp_path)["grid"] is None


def test_many_facts_are_binned_and_few_are_not() -> None:
    assert [bins([1, 5, 9])(fact) for fact in (1, 5, 9)] == ["1", "5", "9"]
    octaves = bins(list(range(1, 101)))
    assert [octaves(fact) for fact in (1, 2, 3, 4, 5, 64, 65)] == ["≤ 1", "≤ 2", "≤ 4", "≤ 4", "≤ 8", "≤ 64", "≤ 128"]
    tenths = bins([i / 100 for i in range(101)])
    assert [tenths(fact) for fact in (0.0, 0.05, 0.1, 0.11, 0.7, 1.0)] == ["≤ 0.1", "≤ 0.1", "≤ 0.1", "≤ 0.2", "≤ 0.7", "≤ 1.0"]
    assert [bins([1 / 7, 3 / 7])(fact) for fact in (1 / 7, 3 / 7)] == ["0.1429", "0.4286"]
