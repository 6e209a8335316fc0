"""The page of a study of context extension, in a browser: perplexities, the grid of depth and length, and the spectra."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.compare.page_data import page_data
from experiments.compare.report import write_report
from experiments.compare.tables import FACTOR, TIMES, factor
from registry import positions
from tests.experiments.compare.recorded import write_run
from tests.experiments.compare.test_report import HOSTILE, browser, opened
from tests.experiments.compare.test_slices import evaluation
from variants.positions.scaling import Interpolation

__all__ = ["browser"]

LENGTHS = (128, 256, 512, 1024)
LONGROPE = {"name": "longrope", "factor": 4.0, "trained_length": 128}
STRETCHED = ("pi", "ntk", "ntk_by_parts", "yarn", "llama3")
POSITIONS = ["rope", "xpos", "alibi", "none", "p_rope", LONGROPE, HOSTILE, *({"name": name, "factor": 4.0} for name in STRETCHED)]


def write_study(study: Path) -> None:
    """Twelve schemes, untuned and tuned, by two seeds; the checkpoint of one scheme is below the gate."""
    for i, position in enumerate(POSITIONS):
        for steps in (0, 100):
            for seed in range(2):
                perplexity = {length: 1 + (i + 1) * length / 128 / (1 + steps / 100) + seed / 10 for length in LENGTHS}
                metrics = {f"test/length/{length}/perplexity": value for length, value in perplexity.items()}
                metrics |= {f"test/length/{length}/accuracy": 1 / value for length, value in perplexity.items()}
                result: dict[str, Any] = {"gate": {"needed": 0.9, "reached": 0.31 if position == "xpos" else 0.95, "length": 128}}
                if position is LONGROPE:
                    result["position"] = {**LONGROPE, "long_factors": [1 + (i + seed) / 8 for i in range(16)]}
                rows = [(length, [(tenth / 19, (tenth + i) % 3 > 0) for tenth in range(20)]) for length in LENGTHS]
                write_run(
                    study,
                    position=position,
                    seed=seed,
                    metrics=metrics,
                    result=result,
                    evaluation=evaluation(rows),
                    tests={"unit": 128},
                    trainer={"steps": steps},
                    task={"name": "judged", "length": 512},
                )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study that the browser looks at."""
    directory: Path = tmp_path_factory.mktemp("runs") / "extension"
    write_study(directory)
    return directory


@pytest.fixture(scope="module")
def data(study: Path) -> dict[str, Any]:
    """What the page is given, compared by perplexity."""
    return page_data(study, metric=[f"test/length/{length}/perplexity" for length in LENGTHS])


@pytest.fixture(scope="module")
def page(browser: Any, data: dict[str, Any], study: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page, opened from disk and drawn."""
    path = tmp_path_factory.mktemp("report") / "page.html"
    write_report(study, path, metric=[metric["name"] for metric in data["metrics"]])
    with opened(browser, path, width=1400) as shown:
        yield shown


def layout(page: Any, chart: str, what: str) -> Any:
    return page.evaluate(f"document.getElementById('{chart}-chart').layout.{what}")


def traces(page: Any, chart: str) -> dict[str, dict[str, Any]]:
    """What a chart draws, by name."""
    found = page.evaluate(
        f"document.getElementById('{chart}-chart').data.map(({{name, x, y, mode, line}}) => ({{name, x, y, mode, line}}))"
    )
    return {trace["name"]: trace for trace in found}


def test_the_page_complains_of_nothing_and_runs_no_users_word(page: Any) -> None:
    assert page.complaints == []
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, body a[href^=javascript]").count() == 0


def test_perplexities_are_drawn_where_they_are_compared_on_a_logarithmic_axis_from_one(page: Any, data: dict[str, Any]) -> None:
    assert page.input_value("#measure") == "perplexity"
    assert layout(page, "length", "yaxis.type") == "log"
    bottom, top = layout(page, "length", "yaxis.range")
    most = max(cell["max"] or 1 for group in data["groups"] for cell in (group["cells"][metric["name"]] for metric in data["metrics"]))
    assert -0.1 < bottom <= 0
    assert math.log10(most) < top < math.log10(most) + 0.2
    drawn = traces(page, "length")
    for group in data["groups"]:
        expected = [group["cells"][f"test/length/{length}/perplexity"]["mean"] for length in LENGTHS]
        assert drawn[html.escape(group["label"], quote=False)]["y"] == pytest.approx(expected)


def test_the_reader_may_choose_accuracy_instead(page: Any, data: dict[str, Any]) -> None:
    page.select_option("#measure", "accuracy")
    assert layout(page, "length", "yaxis.type") == "linear"
    group = data["groups"][0]
    expected = [group["cells"][f"test/length/{length}/accuracy"]["mean"] for length in LENGTHS]
    assert traces(page, "length")[html.escape(group["label"], quote=False)]["y"] == pytest.approx(expected)
    page.select_option("#measure", "perplexity")


def test_the_trained_length_is_the_checkpoints_and_not_the_tunings(page: Any) -> None:
    assert layout(page, "length", "shapes.map((shape) => shape.x0)") == [128]


def test_tables_show_perplexities_as_factors_and_say_that_lower_is_better(page: Any, data: dict[str, Any]) -> None:
    assert page.locator("#results-table caption").inner_text() == "Test perplexity; lower is better"
    assert page.locator("#differences-table caption").inner_text().endswith("; lower is better")
    metric = data["metrics"][0]["name"]
    page.select_option("#metric", metric)
    rows = page.locator("#differences-table tbody tr").all_inner_texts()
    compared = 0
    for group, row in zip(data["groups"], rows, strict=True):
        cell = group["cells"][metric]
        if cell["difference"] is not None:
            compared += 1
            shown = row.split("\t")
            assert shown[2].startswith(factor(cell["mean"])), row
            assert shown[5].startswith(TIMES + factor(cell["difference"])), row
            assert shown[5].endswith(FACTOR + factor(cell["difference_high"] / cell["difference"])), row
    assert compared == 20


def test_groups_below_the_gate_are_counted_and_say_why(page: Any) -> None:
    row = page.locator("#results-table tbody tr", has_text="xpos · trainer.steps=0").inner_text()
    assert "0/2" in row
    assert "2 below the gate" in row
    verdict = page.locator("#differences-table tbody tr", has_text="xpos · trainer.steps=0").inner_text()
    assert "right on only 31 % within its trained length (gate 90 %)" in verdict
    assert "4 below the gate" in page.locator("#summary").inner_text()
    assert page.locator("#runs-table tbody tr", has_text="below the gate").count() == 4


def test_the_grid_shows_the_numbers_of_every_group_with_the_trained_length_marked(page: Any, data: dict[str, Any]) -> None:
    assert page.locator("#grid table").count() == len(data["groups"]) == 24
    for i, panel in enumerate(data["grid"]["groups"]):
        shown = page.locator(f'#grid table[data-group="{i}"]')
        rows = [row.split("\t") for row in shown.locator("tbody").inner_text().strip().splitlines()]
        assert [row[0] for row in rows] == data["grid"]["bins"]
        expected = [[f"{cell['mean']:.2f}" if cell else "\N{EN DASH}" for cell in cells] for cells in panel["cells"]]
        assert [row[1:] for row in rows] == expected
        assert shown.locator("thead .last").all_inner_texts() == ["128"]
        assert shown.locator("caption").inner_text().strip() == data["groups"][i]["label"]


def test_the_spectra_are_drawn_with_their_marks(page: Any, data: dict[str, Any]) -> None:
    lines = {line["label"]: line for line in data["spectra"]["lines"]}
    assert {"rope", "pi", "yarn"} <= set(lines)
    assert sum(label.startswith("longrope") for label in lines) == 2
    slow, factors = traces(page, "wavelength"), traces(page, "factor")
    for label, line in lines.items():
        assert slow[label]["y"] == pytest.approx(line["wavelengths"])
        assert factors[label]["y"] == pytest.approx(line["factors"])
    assert slow["rope, base 10000"]["y"] == pytest.approx(lines["rope"]["wavelengths"])
    assert layout(page, "wavelength", "yaxis.type") == "log"
    shapes = layout(
        page, "wavelength", "shapes.map(({x0, x1, y0, y1, xref, yref}) => xref === 'paper' ? ['level', y0, y1] : ['pair', x0, x1])"
    )
    assert sorted(shapes) == [["level", 128, 128], ["level", 512, 512], ["pair", 6, 6]]
    cells = page.locator("#factors-table tbody tr", has_text="ntk_by_parts").locator("td").all_text_contents()
    assert cells[2:] == [f"{factor:.2f}" for factor in lines["ntk_by_parts"]["factors"]]


def test_a_scheme_that_is_not_registered_here_is_named_with_the_reason(page: Any) -> None:
    note = page.locator("#spectra-left-out").inner_text()
    assert f"Frequencies of {HOSTILE} are not shown" in note
    assert "not loaded" in note


def test_a_group_that_is_not_drawn_leaves_every_chart(page: Any) -> None:
    page.get_by_role("button", name="none", exact=True).click()
    assert page.locator("#grid table").count() == 0
    assert list(traces(page, "wavelength")) == ["rope, base 10000"]
    assert traces(page, "factor") == traces(page, "length") == {}
    page.locator("#legend label", has_text="yarn · trainer.steps=0").locator("input").check()
    assert (page.locator("#grid table").count(), list(traces(page, "factor")), list(traces(page, "length"))) == (
        1,
        ["yarn"],
        ["yarn · trainer.steps=0"],
    )
    page.get_by_role("button", name="all", exact=True).click()
    assert page.locator("#grid table").count() == page.locator("#legend input:checked").count() == 24


def test_every_group_has_a_look_of_its_own_in_the_legend(page: Any) -> None:
    looks = page.locator("#legend label svg").evaluate_all("(all) => all.map((one) => one.innerHTML)")
    assert len(set(looks)) == len(looks) == 24
    # Colours alone do not tell twelve schemes apart for every eye.
    marks = page.locator("#legend label path").evaluate_all("(all) => all.map((one) => one.getAttribute('d'))")
    assert len(set(marks)) == 8


def test_no_label_lies_over_another(page: Any) -> None:
    texts = "[...document.querySelectorAll('#{}-chart :is(.annotation-text, .xtick text, .ytick text)')]"
    for chart in ("length", "wavelength", "factor"):
        boxes = page.evaluate(texts.format(chart) + ".map((text) => text.getBoundingClientRect().toJSON())")
        assert len(boxes) > 5
        for i, a in enumerate(boxes):
            for b in boxes[:i]:
                apart = a["right"] <= b["left"] or b["right"] <= a["left"] or a["bottom"] <= b["top"] or b["bottom"] <= a["top"]
                assert apart, (chart, a, b)


def test_a_telephone_shows_it_without_scrolling_sideways(browser: Any, study: Path, tmp_path: Path) -> None:
    with opened(browser, write_report(study, tmp_path / "page.html"), width=390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        for table in page.locator("#grid table").all():
            assert table.evaluate("(table) => [...table.querySelectorAll('td')].every((cell) => cell.scrollWidth <= cell.clientWidth)")
        first = page.locator("#results-table tbody th").first.bounding_box()
        assert first["width"] < 0.6 * 390, "the names must leave room for the numbers"


def test_the_name_of_a_scheme_is_no_markup_in_the_spectra(browser: Any, tmp_path: Path) -> None:
    with positions.scope():

        @positions.register(HOSTILE, hooks=("rotate",))
        class Odd(Interpolation):
            """Interpolation under a name that would run."""

        write_run(tmp_path / "study", position={"name": HOSTILE, "factor": 2.0})
        path = write_report(tmp_path / "study", tmp_path / "page.html")
    with opened(browser, path, width=1280) as page:
        assert page.complaints == []
        for chart in ("wavelength", "factor"):
            assert html.escape(HOSTILE, quote=False) in traces(page, chart)
        assert page.locator("#factors-table th[scope=row]").all_text_contents() == [HOSTILE]
        assert page.evaluate("window.hacked") is None


def test_what_has_nothing_to_show_is_hidden(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "study", metrics={"test/length/32/accuracy": 0.5})
    with opened(browser, write_report(tmp_path / "study", tmp_path / "page.html"), width=1280) as page:
        assert page.complaints == []
        assert page.locator("#length-chart").is_visible()
        assert page.locator("#measure option").all_inner_texts() == ["accuracy"]
        for hidden in ("grid-figure", "wavelength-figure", "factor-figure", "factors", "slice-figure", "curve-figure"):
            assert page.locator(f"#{hidden}").is_hidden(), hidden
