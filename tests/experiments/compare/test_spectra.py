"""The spectra of rotary schemes, against tables written out in fp64 and the numbers of research."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.compare.page_data import page_data
from experiments.compare.spectra import critical_pair
from tests.experiments.compare.recorded import write_run

L = 128


def write(study: Path, position: Mapping[str, Any] | str, **arguments: Any) -> Path:
    """A run of a checkpoint trained on L tokens, with heads of 32, tested up to 8 L."""
    metrics = {f"test/length/{length}/accuracy": 0.5 for length in (L, 8 * L)}
    return write_run(study, position=position, tests={"unit": L}, **{"metrics": metrics, **arguments})


def drawn(study: Path) -> dict[str, dict[str, Any]]:
    """The lines by their labels."""
    found = page_data(study)["spectra"]
    json.dumps(found, allow_nan=False)
    return {line["label"]: line for line in found["lines"]}


def rope(width: int = 32, base: float = 10000.0) -> list[float]:
    """Radians a token."""
    return [base ** (-2 * i / width) for i in range(width // 2)]


def test_wavelengths_and_factors_are_those_of_the_scheme_against_rope(tmp_path: Path) -> None:
    write(tmp_path, "rope")
    write(tmp_path, {"name": "pi", "factor": 4.0})
    write(tmp_path, {"name": "ntk", "factor": 4.0})
    lines = drawn(tmp_path)
    assert lines["rope"]["wavelengths"] == pytest.approx([2 * math.pi / theta for theta in rope()])
    assert lines["pi"]["wavelengths"] == pytest.approx([8 * math.pi / theta for theta in rope()])
    assert lines["ntk"]["factors"] == pytest.approx([4 ** (2 * i / 30) for i in range(16)])
    assert (lines["rope"]["factors"], lines["pi"]["factors"]) == (pytest.approx([1.0] * 16), pytest.approx([4.0] * 16))


def test_the_marks_are_the_trained_and_the_target_length_and_the_critical_pair(tmp_path: Path) -> None:
    write(tmp_path, {"name": "pi", "factor": 4.0, "base": 500.0})
    write(tmp_path, "none")
    found = page_data(tmp_path)["spectra"]
    t = math.ceil(16 * math.log(L / (2 * math.pi)) / math.log(500))
    assert (found["trained"], found["targets"], found["factors"], found["critical"]) == ([L], [4 * L], [4.0], [t])
    (plain,) = found["plain"]
    assert plain["base"] == 500
    assert plain["wavelengths"] == pytest.approx([2 * math.pi / theta for theta in rope(base=500.0)])


PUBLISHED = {(64, 1e4, 256): 13, (64, 1e4, 512): 16, (32, 1e4, 256): 7, (64, 1e4, 2048): 21, (128, 1e4, 4096): 46, (96, 1e4, 2048): 31}
NONE = {(32, 10.0, 4096): None, (32, 1e4, 6): None, (32, 1.0, 256): None}


@pytest.mark.parametrize(("setting", "pair"), [*PUBLISHED.items(), ((128, 5e5, 8192), 35), *NONE.items()])
def test_the_critical_pair_is_the_published_one(setting: tuple[int, float, int], pair: int | None) -> None:
    assert critical_pair(*setting) == pair


def test_a_run_that_searched_shows_what_it_found_a_line_for_each_seed(tmp_path: Path) -> None:
    config = {"name": "longrope", "factor": 4.0, "trained_length": L}
    for seed in (1, 0):
        factors = [1 + 0.25 * seed + i / 10 for i in range(16)]
        write(tmp_path, config, seed=seed, result={"position": {**config, "long_factors": factors, "unscaled": 4 * seed}})
    write(tmp_path, "rope", seed=0)
    lines = drawn(tmp_path)
    assert list(lines) == ["longrope (seed 0)", "longrope (seed 1)", "rope"]
    for seed in (0, 1):
        line = lines[f"longrope (seed {seed})"]
        assert line["factors"] == pytest.approx([1 + 0.25 * seed + i / 10 for i in range(16)])
        assert (line["unscaled"], line["temperature"]) == (4 * seed, pytest.approx(math.sqrt(1 + math.log(4) / math.log(L))))


def test_a_scheme_that_looks_at_the_length_is_shown_at_the_longest_tested(tmp_path: Path) -> None:
    dynamic = {"name": "dynamic_ntk", "trained_length": L}
    write(tmp_path / "far", dynamic)
    line = drawn(tmp_path / "far")["dynamic_ntk"]
    assert line["tested"] == 8 * L
    assert line["factors"] == pytest.approx([8 ** (2 * i / 30) for i in range(16)])
    write(tmp_path / "near", dynamic, metrics={f"test/length/{L}/accuracy": 0.5})
    assert page_data(tmp_path / "near")["spectra"] is None, "within the trained length it is rope"


def test_a_pair_that_stands_still_has_no_number(tmp_path: Path) -> None:
    write(tmp_path, {"name": "p_rope", "proportion": 0.75})
    line = drawn(tmp_path)["p_rope"]
    assert (line["factors"][11:13], line["wavelengths"][12:]) == ([1.0, None], [None] * 4)


def test_lines_of_one_scheme_are_told_apart_by_their_groups(tmp_path: Path) -> None:
    config = {"name": "longrope", "factor": 4.0, "trained_length": L}
    for steps in (0, 100):
        found = {**config, "long_factors": [1 + (steps + 1) * i / 100 for i in range(16)]}
        write(tmp_path / "arms", config, trainer={"steps": steps}, result={"position": found})
    assert list(drawn(tmp_path / "arms")) == ["trainer.steps=0 · longrope", "trainer.steps=100 · longrope"]
    for position in ("rope", {"name": "pi", "factor": 2.0}):
        for variant in ("full", "mla"):
            write(tmp_path / "widths", position, variant=variant)
    assert list(drawn(tmp_path / "widths")) == ["full · pi", "full · rope", "mla · pi", "mla · rope"]


def test_groups_of_one_spectrum_share_a_line(tmp_path: Path) -> None:
    for steps in (0, 100):
        for position in ("rope", "xpos", {"name": "pi", "factor": 2.0}):
            write(tmp_path, position, trainer={"steps": steps})
    lines = drawn(tmp_path)
    assert {label: len(line["groups"]) for label, line in lines.items()} == {"pi": 2, "rope, xpos": 4}


FULL = [({}, 16), ({"head_dim": 12}, 6), ({"impl": "flash_attn"}, 16)]
PLUGIN = [({}, 16), ({"head_dim": 20}, 10), ({"head_dim": None}, 16)]


@pytest.mark.parametrize(
    ("variant", "pairs"),
    [
        *(({"name": "full", **options}, pairs) for options, pairs in FULL),
        *(({"name": "mla", "rope_dim": width}, pairs) for width, pairs in ((8, 4), (None, 8))),
        *(({"name": "from_a_plugin", **options}, pairs) for options, pairs in PLUGIN),
    ],
)
def test_the_width_that_turns_is_the_variants(tmp_path: Path, variant: dict[str, Any], pairs: int) -> None:
    write(tmp_path, {"name": "pi", "factor": 2.0}, variant=variant)
    assert len(drawn(tmp_path)["pi"]["factors"]) == pairs


@pytest.mark.parametrize("positions", [["none", "alibi"], ["rope", "none"], ["xpos"]])
def test_a_study_in_which_no_scheme_departs_from_rope_has_no_spectrum(tmp_path: Path, positions: list[str]) -> None:
    for position in positions:
        write(tmp_path, position)
    assert page_data(tmp_path)["spectra"] is None


def test_a_scheme_that_cannot_be_built_here_is_left_out_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, {"name": "pi", "factor": 2.0})
    write(tmp_path, {"name": "from_a_plugin", "speed": 3})
    write(tmp_path, {"name": "longrope", "long_factors": [1.0, 2.0]})
    found = page_data(tmp_path)["spectra"]
    assert [line["label"] for line in found["lines"]] == ["pi"]
    reasons = {one["label"]: one["reason"] for one in found["left_out"]}
    assert "the plug-in that has it is not loaded" in reasons["from_a_plugin"]
    assert "long_factors needs one number for each of the 16 pairs; got 2" in reasons["longrope"]


def test_runs_whose_numbers_do_not_count_draw_no_line(tmp_path: Path) -> None:
    write(tmp_path, {"name": "pi", "factor": 2.0})
    write(tmp_path, {"name": "ntk", "factor": 2.0}, status="failed")
    write(tmp_path, {"name": "yarn", "factor": 2.0}, result={"gate": {"needed": 0.9, "reached": 0.2}})
    assert list(drawn(tmp_path)) == ["pi"]
