"""The comparison page: what it holds, and, in a browser, what it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experiments.compare.compare import compare
from experiments.compare.page_data import page_data
from experiments.compare.report import write_report
from tests.experiments.compare.recorded import write_run

CHROMIUM = Path("/usr/bin/chromium")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
HOSTILE = "</script><script>window.hacked=1</script><!--<img src=x onerror=window.hacked=1><a href='javascript:hacked'>${x}{{data}}"
LENGTHS = (32, 64, 128)


def write_study(study: Path) -> None:
    """Three variants, one of them with a hostile name, by two positions and two seeds; one run failed, one diverged."""
    for i, variant in enumerate(("full", "sliding_window", HOSTILE)):
        for j, position in enumerate(("none", "rope")):
            for seed in range(2):
                accuracy = {length: round(0.9 - 0.2 * i - 0.1 * j - length / 1000 + seed / 50, 6) for length in LENGTHS}
                status = {(1, 0, 0): "failed", (1, 0, 1): "diverged"}.get((i, j, seed), "finished")
                write_run(
                    study,
                    variant=variant,
                    position=position,
                    seed=seed,
                    status=status,
                    reason=HOSTILE if status != "finished" else "",
                    metrics={f"test/length/{length}/accuracy": value for length, value in accuracy.items()}
                    | {"test/load/64/accuracy": 0.5},
                    result={"baselines": {"length/32": {"chance": 0.03, "within_reach": 0.4}}},
                    log=[
                        {"step": s, "tokens": 64 * s, "seconds": s / 10, "train/loss": 3 - s / 200, "train/accuracy": s / 400}
                        for s in range(0, 400, 50)
                    ],
                    evaluation=evaluation(),
                )


def evaluation() -> pa.Table:
    """Two sequences of each length; the near token is right, the far one is not."""
    columns: dict[str, Any] = {"length": [length for length in LENGTHS for _ in range(2)]}
    count = len(columns["length"])
    columns |= {"split": ["test"] * count, "axis": ["length"] * count, "index": list(range(count)), "correct": [False] * count}
    columns |= {
        "tokens_scored": [2] * count,
        "tokens_correct": [1] * count,
        "loss": [0.7] * count,
        "token_correct": [[True, False]] * count,
    }
    return pa.table(columns | {"distance": [[8, 32]] * count, "depth": [0.25, 0.75] * len(LENGTHS)})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study that the browser looks at."""
    directory: Path = tmp_path_factory.mktemp("runs") / "a <b>study&amp;"
    write_study(directory)
    return directory


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium."""
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}: `apt install chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def page(browser: Any, study: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page, opened from disk and drawn; `page.complaints` has every request and every error."""
    with opened(browser, write_report(study, tmp_path_factory.mktemp("report") / "page.html"), width=1280) as shown:
        yield shown


class opened:  # noqa: N801 (used like a function)
    """A context with the page drawn at some width."""

    def __init__(self, browser: Any, path: Path, width: int):
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.complaints = []
        self.page.on("console", lambda message: self.page.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.page.complaints.append(str(error)))
        self.page.on("request", lambda request: self.page.complaints.append(request.url) if request.url != path.as_uri() else None)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready=true]", timeout=30_000)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.page.close()


def test_the_page_is_one_file_that_asks_the_network_for_nothing(page: Any) -> None:
    page.select_option("#x", "seconds")
    page.select_option("#x", "steps")
    assert page.complaints == []


def test_the_table_shows_the_numbers_of_compare(page: Any, study: Path) -> None:
    comparison = compare(study)
    for i, group in enumerate(comparison.groups):
        for metric, cell in group.cells.items():
            shown = page.locator(f'#results-table [data-group="{i}"][data-metric="{metric}"]').inner_text()
            assert shown == ("\N{EN DASH}" if cell.mean is None else f"{cell.mean:.3f}")


def test_missing_groups_and_lost_runs_are_shown(page: Any) -> None:
    row = page.locator("#results-table tbody tr", has_text="sliding_window · none")
    assert "0/2" in row.inner_text()
    assert "1 failed\n1 diverged" in row.inner_text()
    assert "10 of 12 runs finished (left out: 1 failed, 1 diverged)" in page.locator("#summary").inner_text()
    assert page.locator("#runs-table tbody tr").count() == 12


def test_differences_show_pairs_and_a_verdict(page: Any, study: Path) -> None:
    metric = "test/length/128/accuracy"
    page.select_option("#metric", metric)
    cells = [group.cells[metric] for group in compare(study).groups]
    rows = page.locator("#differences-table tbody tr").all_inner_texts()
    for cell, row in zip(cells, rows, strict=True):
        assert cell.verdict in row
        assert cell.difference is None or f"{cell.difference:+.3f}".replace("-", "\N{MINUS SIGN}") in row


def test_a_users_words_are_shown_and_never_run(page: Any, study: Path) -> None:
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, body a[href^=javascript]").count() == 0
    assert page.locator("h1").inner_text() == study.name
    assert page.title() == f"{study.name} · attnlab"
    assert f"{HOSTILE} · rope" in [text.strip() for text in page.locator("#results-table tbody th").all_inner_texts()]
    assert HOSTILE in page.locator("#runs-table").inner_text()
    for chart in ("length-chart", "curve-chart", "slice-chart", "cost-chart"):
        assert page.locator(f"#{chart} svg").count() > 0
        names = page.evaluate(f"document.getElementById('{chart}').data.map((trace) => trace.name ?? '')")
        assert not any("<" in name for name in names)


def test_hiding_a_group_changes_the_charts_and_no_number(page: Any) -> None:
    table = page.locator("#results-table").inner_text()
    drawn = "document.getElementById('curve-chart').data.length"
    before = page.evaluate(drawn)
    page.locator("#legend input").first.uncheck()
    assert page.evaluate(drawn) < before
    assert page.locator("#results-table").inner_text() == table
    page.locator("#legend input").first.check()
    assert page.evaluate(drawn) == before


def test_labels_that_look_like_numbers_are_spaced_as_labels(page: Any) -> None:
    page.select_option("#slice", "distance")
    axis = page.evaluate("(({type, _categories}) => [type, _categories])(document.getElementById('slice-chart')._fullLayout.xaxis)")
    assert axis == ["category", ["8", "32"]]


def test_lengths_are_on_a_logarithmic_axis_with_the_trained_one_marked(page: Any) -> None:
    layout = page.evaluate(
        "(({xaxis, shapes}) => [xaxis.type, xaxis.ticktext, shapes.map((s) => s.x0)])(document.getElementById('length-chart').layout)"
    )
    assert layout == ["log", ["32", "64", "128"], [32]]
    page.select_option("#axis", "load")
    assert page.evaluate("document.getElementById('length-chart').layout.xaxis.ticktext") == ["64"]
    page.select_option("#axis", "length")


def test_what_is_gained_stands_against_what_it_costs(page: Any, study: Path) -> None:
    points = "document.getElementById('cost-chart').data.map((point) => [point.name, point.x[0], point.y[0]])"
    title = "document.getElementById('cost-chart').layout.xaxis.title.text"
    groups = [group for group in compare(study).groups if group.finished and HOSTILE not in group.label]
    assert page.evaluate(title) == "state bytes at 32", "the length of training first"
    for metric, cost in (
        ("test/length/64/accuracy", "state_bytes.64"),
        ("test/length/64/accuracy", "read_bytes.64"),
        ("test/length/128/accuracy", "parameters"),
    ):
        page.select_option("#gain", metric)
        page.select_option("#cost", cost)
        shown = {name: (x, y) for name, x, y in page.evaluate(points)}
        for group in groups:
            assert shown[group.label] == (group.costs[cost], pytest.approx(group.cells[metric].mean))
        assert len(shown) == len([group for group in compare(study).groups if group.cells[metric].mean is not None])
    page.locator("#legend input").first.uncheck()
    assert len(page.evaluate(points)) == len(shown) - 1
    page.locator("#legend input").first.check()


def test_costs_that_older_runs_do_not_tell_are_left_out(browser: Any, tmp_path: Path) -> None:
    costs = {"parameters": 10, "state_bytes": {"32": 512}}
    for seed in range(2):
        write_run(tmp_path / "study", variant="old", seed=seed, result={"costs": costs})
        write_run(tmp_path / "study", variant="new", seed=seed, result={"costs": {**costs, "read_bytes": {"32": 128, "256": 160}}})
    with opened(browser, write_report(tmp_path / "study", tmp_path / "page.html"), width=1280) as page:
        assert page.complaints == []
        heads = page.locator("#costs-table thead th").all_inner_texts()
        rows = page.locator("#costs-table tbody tr").all()
        told = [dict(zip(heads, row.locator("th, td").all_inner_texts(), strict=True)) for row in rows]
    read = {row["group"].strip(): (row["bytes read a token at 32"], row["bytes read a token at 256"]) for row in told}
    assert read == {"old": ("\N{EN DASH}",) * 2, "new": ("128", "160")}


def test_tables_are_tables_for_those_who_do_not_see_them(page: Any) -> None:
    for name in ("results", "differences", "costs", "runs"):
        table = page.locator(f"#{name}-table")
        assert table.locator("caption").inner_text()
        assert table.locator("thead th:not([scope=col])").count() == 0
        assert table.locator("tbody tr").count() == table.locator("tbody th[scope=row]").count() > 0


def test_a_telephone_shows_the_page_without_scrolling_sideways(browser: Any, study: Path, tmp_path: Path) -> None:
    with opened(browser, write_report(study, tmp_path / "page.html"), width=390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("document.getElementById('length-chart').querySelector('svg').clientWidth") <= 390


def test_a_study_in_which_nothing_finished_still_has_a_page(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "study", status="failed", reason="boom")
    with opened(browser, write_report(tmp_path / "study", tmp_path / "page.html"), width=1280) as page:
        assert page.complaints == []
        assert "boom" in page.locator("#runs-table").inner_text()
        assert page.locator("#charts").is_hidden()


def test_no_word_of_a_user_can_leave_the_data_element(study: Path, tmp_path: Path) -> None:
    text = write_report(study, tmp_path / "page.html").read_text()
    inlined = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert inlined is not None
    assert "<" not in inlined[1]
    data = json.loads(inlined[1])
    assert HOSTILE in {group["by"]["variant"] for group in data["groups"]}
    assert text.count("<script") == 5


def test_a_curve_keeps_every_point_and_its_spike(tmp_path: Path) -> None:
    log = [{"step": s, "tokens": s, "seconds": s / 9, "loss": 1e6 if s == 7123 else 1.0} for s in range(14000)]
    write_run(tmp_path, log=log)
    (curve,) = page_data(tmp_path)["curves"]
    assert len(curve["mean"]["values"]) == len(curve["runs"][0]["values"]) == 14000
    assert curve["mean"]["values"][7123] == curve["runs"][0]["values"][7123] == 1e6


def test_a_mean_curve_ends_where_the_first_finished_run_does(tmp_path: Path) -> None:
    for seed, (last, status) in enumerate([(30, "finished"), (50, "finished"), (10, "failed")]):
        log = [{"step": s, "tokens": s, "seconds": s * (seed + 1.0), "loss": float(seed)} for s in range(0, last + 1, 10)]
        write_run(tmp_path, seed=seed, status=status, log=log)
    (curve,) = page_data(tmp_path)["curves"]
    assert (curve["n"], curve["mean"]["steps"], curve["mean"]["values"]) == (2, [0, 10, 20, 30], [0.5] * 4)
    assert (curve["mean"]["low"][0], curve["mean"]["high"][0], curve["mean"]["seconds"][1]) == (0.0, 1.0, 15.0)
    assert {run["name"]: run["steps"][-1] for run in curve["runs"]} == {"seed 0": 30, "seed 1": 50, "seed 2 (failed)": 10}


def test_combinations_without_meaning_are_listed_with_their_reason(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "study.json").write_text(
        json.dumps({"dropped": [{"overrides": ["variant=mamba", "position=alibi"], "reason": "no logits"}]})
    )
    assert page_data(tmp_path)["not_applicable"] == [{"overrides": "variant=mamba position=alibi", "reason": "no logits"}]


def test_a_report_replaces_the_old_one_whole(study: Path, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "page.html"
    write_report(study, path)
    path.write_text("old")
    assert write_report(study, path) == path
    assert path.read_text().endswith("</html>\n")
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
