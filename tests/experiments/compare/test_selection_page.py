"""The page shows what was selected: a run at a time, a panel a layer, and only where a run tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.compare.page_data import page_data
from experiments.compare.report import write_report
from registry import UserError
from tests.experiments.compare.recorded import write_run
from tests.experiments.compare.test_report import HOSTILE, browser, opened

__all__ = ["browser"]

LAYERS = [
    {"layer": 0, "part": 0, "block": 8, "keys": 8, "percent": [[100, 0], [50, 100]]},
    {"layer": 2, "part": 1, "block": 1, "keys": 4, "percent": [[100, 0, 0, 0], [0, 25, 0, 100]]},
]
TOLD = {"length": 16, "index": 0, "queries": 8, "scored": [9, 15], "answers": [1, None], "layers": LAYERS}


def tell(run: Path, told: Any) -> None:
    (run / "selection.json").write_text(json.dumps(told))


def write_study(study: Path) -> None:
    for seed in range(2):
        write_run(study, seed=seed)
        tell(write_run(study, variant=HOSTILE, seed=seed), TOLD | {"length": 16 + seed})
    tell(write_run(study, variant=HOSTILE, seed=2, status="failed"), TOLD)


def test_maps_are_those_of_the_finished_runs_that_have_one(tmp_path: Path) -> None:
    write_study(tmp_path)
    found = page_data(tmp_path)["selections"]
    assert [(one["seed"], one["length"], one["layers"]) for one in found] == [("0", 16, LAYERS), ("1", 17, LAYERS)]
    assert page_data(tmp_path)["groups"][found[0]["group"]]["label"] == HOSTILE


@pytest.mark.parametrize(
    "told", [[], {}, TOLD | {"layers": 3}, TOLD | {"layers": [{"layer": 0}]}, TOLD | {"scored": [HOSTILE]}, TOLD | {"length": None}]
)
def test_a_damaged_map_is_passed_over(told: Any, tmp_path: Path) -> None:
    tell(write_run(tmp_path), told)
    assert page_data(tmp_path)["selections"] == []


def test_a_map_outside_the_study_is_not_read(tmp_path: Path) -> None:
    tell(tmp_path, TOLD)
    (write_run(tmp_path / "study") / "selection.json").symlink_to(tmp_path / "selection.json")
    with pytest.raises(UserError, match="leads out of the study's directory"):
        page_data(tmp_path / "study")


def test_a_run_is_chosen_and_each_layer_has_a_panel(browser: Any, tmp_path: Path) -> None:
    write_study(tmp_path / "study")
    with opened(browser, write_report(tmp_path / "study", tmp_path / "page.html"), width=1280) as page:
        assert page.locator("#selection-panels h3").all_inner_texts() == ["Layer 1: blocks of 8 tokens", "Layer 3: single tokens"]
        z, x0, dx, titles = page.evaluate(
            "(({data: [{z, x0, dx}], layout}) => [z, x0, dx, [layout.xaxis.title.text, layout.yaxis.title.text]])"
            "(document.getElementById('selection-1'))"
        )
        assert (z, x0, dx, titles) == (LAYERS[1]["percent"], 2, 4, ["key (token)", "query (token)"])
        marks = "document.getElementById('selection-0').data.slice(1).map(({x, y}) => [x, y])"
        assert page.evaluate(marks) == [[[9, 15], [9, 15]], [[1], [9]]], "crosses at scored tokens, a ring where an answer is known"
        ranges = "(({xaxis, yaxis}) => [xaxis.range, yaxis.range])(document.getElementById('selection-0').layout)"
        assert page.evaluate(ranges) == [[0, 16], [16, 0]]
        page.select_option("#selection-run", "1")
        assert page.evaluate(ranges) == [[0, 17], [17, 0]]
        caption = page.locator("#selection-caption").inner_text()
        assert (
            f"({HOSTILE}, seed 1) over test sequence 0" in caption and "A row averages 8 tokens, a column 8 tokens or 4 tokens" in caption
        )
        assert page.complaints == [] and page.evaluate("window.hacked") is None
        assert page.locator("#selection-panels svg.main-svg").count() > 0


def test_without_a_map_the_section_is_absent(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "study")
    with opened(browser, write_report(tmp_path / "study", tmp_path / "page.html"), width=1280) as page:
        assert page.complaints == []
        assert page.locator("#selection").is_hidden() and page.locator("nav a[href='#selection']").is_hidden()
