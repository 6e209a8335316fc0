"""Comparing a study: groups, pairs, baselines, and what is left out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from experiments.compare.compare import compare
from experiments.compare.groups import Comparison, Group
from registry import UserError
from tests.experiments.compare.recorded import write_run

ACCURACY = "test/length/32/accuracy"


def group(comparison: Comparison, **by: Any) -> Group:
    """The one group with these values."""
    (found,) = [one for one in comparison.groups if all(one.by[key] == value for key, value in by.items())]
    return found


def test_equal_values_of_different_seeds_all_count(tmp_path: Path) -> None:
    for seed, value in enumerate([0.0, 0.0, 1.0]):
        write_run(tmp_path, seed=seed, metrics={ACCURACY: value})
    cell = compare(tmp_path).groups[0].cells[ACCURACY]
    assert (cell.n, cell.mean, cell.min, cell.max) == pytest.approx((3, 1 / 3, 0.0, 1.0))


def test_a_groups_numbers_come_from_all_its_runs_whatever_else_is_compared(tmp_path: Path) -> None:
    value = {(width, seed): (width * 7 + seed * 3) % 11 / 11 for width in range(40) for seed in range(10)}
    for (width, seed), accuracy in value.items():
        write_run(tmp_path, seed=seed, metrics={ACCURACY: accuracy, "other": 1.0}, model={"dim": width})
    whole = compare(tmp_path)
    assert whole.by == ["model.dim"]
    assert [one.by["model.dim"] for one in whole.groups] == list(range(40))
    for one in whole.groups:
        cell, raw = one.cells[ACCURACY], [value[one.by["model.dim"], seed] for seed in range(10)]
        assert (cell.n, cell.max) == (10, max(raw))
        assert cell.mean == pytest.approx(fmean(raw), abs=1e-12)
    for other in (compare(tmp_path, baseline={"model.dim": 7}), compare(tmp_path, metric=[ACCURACY, "other"])):
        for one in other.groups:
            assert one.cells[ACCURACY].mean == group(whole, **one.by).cells[ACCURACY].mean


def test_only_finished_runs_are_averaged_and_the_others_are_counted(tmp_path: Path) -> None:
    for seed in range(8):
        write_run(tmp_path, seed=seed, metrics={ACCURACY: 0.5})
    write_run(tmp_path, seed=8, status="failed", reason="boom")
    write_run(tmp_path, seed=9, status="running")  # nobody holds a claim on it: it was killed
    write_run(tmp_path, variant="gqa", seed=0, status="diverged", reason="loss is not finite")
    found = compare(tmp_path)
    full, gqa = group(found, variant="full"), group(found, variant="gqa")
    assert (full.cells[ACCURACY].n, len(full.runs), full.left_out["failed"], full.left_out["interrupted"]) == (8, 10, 1, 1)
    assert (gqa.cells[ACCURACY].n, gqa.cells[ACCURACY].mean, gqa.cells[ACCURACY].verdict) == (0, None, "no finished run")
    assert found.left_out == {"planned": 0, "running": 0, "failed": 1, "diverged": 1, "interrupted": 1}
    assert found.finished == 8


def test_a_run_without_the_metric_is_missing_from_its_mean_alone(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, metrics={ACCURACY: 0.5})
    write_run(tmp_path, seed=1, metrics={ACCURACY: None})
    one = compare(tmp_path).groups[0]
    assert (one.cells[ACCURACY].n, one.cells[ACCURACY].mean, len(one.finished)) == (1, 0.5, 2)


def test_options_of_one_variant_are_part_of_its_name_and_no_axis(tmp_path: Path) -> None:
    for variant in (
        {"name": "full"},
        {"name": "sliding_window", "window": 8, "sinks": 0},
        {"name": "sliding_window", "window": 16, "sinks": 0},
    ):
        for position, seed in itertools.product(("rope", "none"), range(2)):
            write_run(tmp_path, variant=variant, position=position, seed=seed, metrics={ACCURACY: 0.5})
    found = compare(tmp_path)
    assert found.by == ["variant", "position"]
    assert [one.by["variant"] for one in found.groups] == [
        name for name in ("full", "sliding_window window=8", "sliding_window window=16") for _ in "ab"
    ]


def test_a_setting_that_the_variant_decides_is_no_axis(tmp_path: Path) -> None:
    for variant, dim in (("full", 64), ("linear", 72)):
        for seed, lr in itertools.product(range(2), (0.001, 0.003)):
            write_run(tmp_path, variant=variant, seed=seed, metrics={ACCURACY: 0.5}, model={"dim": dim}, optimizer={"lr": lr})
    assert compare(tmp_path).by == ["variant", "optimizer.lr"]


def test_other_seeds_repeat_a_run_and_are_no_axis(tmp_path: Path) -> None:
    for data_seed in range(3):
        write_run(tmp_path, metrics={ACCURACY: 0.5}, task={"name": "mqar", "length": 32, "data_seed": data_seed})
    found = compare(tmp_path)
    assert (len(found.groups), found.groups[0].cells[ACCURACY].n) == (1, 3)


def test_where_a_run_was_carried_out_is_no_axis(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, metrics={ACCURACY: 0.5}, executor={"name": "local"})
    write_run(tmp_path, seed=1, metrics={ACCURACY: 0.5}, executor={"name": "slurm"})
    assert compare(tmp_path).by == ["variant"]


def test_a_difference_is_paired_by_seed(tmp_path: Path) -> None:
    for seed, (full, gqa) in {0: (0.1, 0.2), 1: (0.5, 0.7), 2: (0.9, 1.2)}.items():
        write_run(tmp_path, variant="full", seed=seed, metrics={ACCURACY: full})
        write_run(tmp_path, variant="gqa", seed=seed, metrics={ACCURACY: gqa})
    write_run(tmp_path, variant="full", seed=3, metrics={ACCURACY: 100.0})  # has no partner, so it tells nothing of the difference
    cell = group(compare(tmp_path), variant="gqa").cells[ACCURACY]
    assert (cell.pairs, cell.difference) == pytest.approx((3, 0.2))
    # The t interval of 0.1, 0.2, 0.3: half a width of 4.302653 * 0.1 / sqrt(3).
    assert cell.difference_high == pytest.approx(0.2 + 0.2484138, abs=1e-6)
    assert (cell.p, cell.verdict) == (0.25, "cannot be significant at 0.05 with n=3 seeds (needs 6)")


def test_a_group_is_compared_with_the_baseline_that_agrees_on_the_other_keys(tmp_path: Path) -> None:
    value = {("full", "none"): 0.5, ("full", "rope"): 0.9, ("gqa", "none"): 0.4, ("gqa", "rope"): 0.8, ("linear", "alibi"): 0.1}
    for (variant, position), accuracy in value.items():
        write_run(tmp_path, variant=variant, position=position, metrics={ACCURACY: accuracy})
    found = compare(tmp_path)
    assert found.baseline == {"variant": "full"}
    assert group(found, variant="gqa", position="none").cells[ACCURACY].difference == pytest.approx(-0.1)
    assert group(found, variant="gqa", position="rope").cells[ACCURACY].difference == pytest.approx(-0.1)
    assert [one.cells[ACCURACY].verdict for one in found.groups if one.by["variant"] == "full"] == ["baseline", "baseline"]
    alone = group(found, variant="linear").cells[ACCURACY]
    assert (alone.difference, alone.verdict) == (None, "no baseline agrees on the other keys")


@pytest.mark.parametrize("baseline", ["gqa", "variant=gqa", "variant.name=gqa", {"variant": "gqa"}])
def test_a_baseline_can_be_named_in_any_usual_way(tmp_path: Path, baseline: Any) -> None:
    for variant, accuracy in (("full", 0.9), ("gqa", 0.5)):
        write_run(tmp_path, variant=variant, metrics={ACCURACY: accuracy})
    found = compare(tmp_path, baseline=baseline)
    assert group(found, variant="full").cells[ACCURACY].difference == pytest.approx(0.4)
    assert found.groups[0].by["variant"] == "gqa"


@pytest.mark.parametrize("baseline", ["optimizer.lr=1e-5", "optimizer.lr=0.00001", {"optimizer.lr": 1e-5}])
def test_a_number_in_a_baseline_may_be_spelt_in_any_way(tmp_path: Path, baseline: Any) -> None:
    for lr in (1e-5, 3e-5):
        write_run(tmp_path, optimizer={"lr": lr}, metrics={ACCURACY: lr})
    assert compare(tmp_path, baseline=baseline).groups[0].by == {"optimizer.lr": 1e-5}


@pytest.mark.parametrize("baseline", ["variant.pattern=[mamba2*3,full]", "variant.pattern=['mamba2*3', \"full\"]"])
def test_a_list_is_written_and_named_without_quotes(tmp_path: Path, baseline: str) -> None:
    for seed in range(2):
        for pattern in (["mamba2*3", "full"], ["full"]):
            write_run(tmp_path, variant={"name": "hybrid", "pattern": pattern}, seed=seed, metrics={ACCURACY: 0.5})
    found = compare(tmp_path, by="variant.pattern", baseline=baseline)
    assert {group.label for group in found.groups} == {"variant.pattern=[mamba2*3,full]", "variant.pattern=[full]"}
    assert [group.label for group in found.groups if group.cells[ACCURACY].verdict == "baseline"] == ["variant.pattern=[mamba2*3,full]"]


def test_one_fixed_baseline_serves_all_groups_when_it_names_every_key(tmp_path: Path) -> None:
    for variant, position in itertools.product(("full", "gqa"), ("none", "rope")):
        write_run(tmp_path, variant=variant, position=position, metrics={ACCURACY: 0.5 + 0.1 * (position == "rope")})
    found = compare(tmp_path, baseline="variant=full,position=none")
    assert group(found, variant="gqa", position="rope").cells[ACCURACY].difference == pytest.approx(0.1)
    assert sum(one.cells[ACCURACY].verdict == "baseline" for one in found.groups) == 1


def test_seeds_are_the_unit_where_a_group_holds_several_runs_of_each(tmp_path: Path) -> None:
    for variant, position, seed in itertools.product(("full", "gqa"), ("none", "rope"), range(3)):
        accuracy = 0.2 * seed + 0.1 * (position == "rope") + 0.05 * (variant == "gqa")
        write_run(tmp_path, variant=variant, position=position, seed=seed, metrics={ACCURACY: accuracy})
    found = compare(tmp_path, by="variant.name")
    cell = group(found, **{"variant.name": "gqa"}).cells[ACCURACY]
    assert (cell.n, cell.pairs, cell.mean, cell.difference) == pytest.approx((3, 3, 0.3, 0.05))
    assert found.averages_over == "n = 3 seeds, each averaged over position first"


def test_pairs_are_made_within_what_a_group_averages_over(tmp_path: Path) -> None:
    write_run(tmp_path, variant="full", position="none", metrics={ACCURACY: 0.2})
    write_run(tmp_path, variant="full", position="rope", metrics={ACCURACY: 0.8})
    write_run(tmp_path, variant="gqa", position="rope", metrics={ACCURACY: 0.7})
    assert group(compare(tmp_path, by="variant"), variant="gqa").cells[ACCURACY].difference == pytest.approx(-0.1)


def test_the_options_of_a_variant_do_not_keep_its_runs_from_being_paired(tmp_path: Path) -> None:
    for position, full in (("none", 0.5), ("rope", 0.9)):
        write_run(tmp_path, variant="full", position=position, metrics={ACCURACY: full})
        for window in (8, 16):
            variant = {"name": "sliding_window", "window": window}
            write_run(tmp_path, variant=variant, position=position, metrics={ACCURACY: full - window / 80})
    cell = group(compare(tmp_path, by="variant.name"), **{"variant.name": "sliding_window"}).cells[ACCURACY]
    assert cell.difference == pytest.approx(-0.15)


def test_a_seed_that_shares_nothing_with_the_baselines_is_no_pair(tmp_path: Path) -> None:
    write_run(tmp_path, variant="full", position="none", metrics={ACCURACY: 0.5})
    write_run(tmp_path, variant="full", position="rope", seed=1, metrics={ACCURACY: 0.5})
    write_run(tmp_path, variant="gqa", position="rope", metrics={ACCURACY: 0.5})
    cell = group(compare(tmp_path, by="variant"), variant="gqa").cells[ACCURACY]
    assert (cell.mean, cell.difference, cell.verdict) == (0.5, None, "no seed in common with the baseline")


def test_p_is_corrected_over_the_groups_compared(tmp_path: Path) -> None:
    for seed in range(8):
        write_run(tmp_path, variant="full", seed=seed, metrics={ACCURACY: 0.5})
        write_run(tmp_path, variant="gqa", seed=seed, metrics={ACCURACY: 0.4 - 0.01 * seed})
        write_run(tmp_path, variant="linear", seed=seed, metrics={ACCURACY: 0.5 + 0.1 * (-1) ** seed})
    found = compare(tmp_path)
    gqa, linear = (group(found, variant=name).cells[ACCURACY] for name in ("gqa", "linear"))
    assert (gqa.p_uncorrected, gqa.p) == (2 / 256, 4 / 256)
    assert gqa.verdict == "below the baseline (p=0.016)"
    assert linear.verdict.startswith("not distinguishable")


def test_solve_rate_and_median_steps_count_the_runs_that_never_solved(tmp_path: Path) -> None:
    for seed, steps in enumerate([300, 500, None]):
        write_run(tmp_path, seed=seed, metrics={ACCURACY: 0.5}, result={"steps_to_solve": steps})
    one = compare(tmp_path).groups[0]
    assert one.solved is not None
    assert (one.solved.successes, one.solved.n, one.steps_to_solve) == (2, 3, 500)
    write_run(tmp_path, seed=3, metrics={ACCURACY: 0.5}, result={"steps_to_solve": None})
    assert compare(tmp_path).groups[0].steps_to_solve is None


def test_ceiling_and_trivial_predictors_stand_beside_the_accuracy(tmp_path: Path) -> None:
    known = {"length/32": {"chance": 0.03, "in_context": 0.25, "within_reach": 0.41}}
    write_run(tmp_path, metrics={ACCURACY: 0.4, "test/length/32/loss": 2.0}, result={"baselines": known})
    found = compare(tmp_path, metric=[ACCURACY, "test/length/32/loss"]).groups[0].cells
    assert (found[ACCURACY].ceiling, found[ACCURACY].trivial) == (0.41, {"chance": 0.03, "in_context": 0.25})
    assert found["test/length/32/loss"].ceiling is None


def test_the_default_metrics_are_the_accuracies_in_the_order_of_the_lengths(tmp_path: Path) -> None:
    names = ["test/load/64/accuracy", "test/length/256/accuracy", "test/length/64/accuracy", "test/length/64/loss", "validation/accuracy"]
    write_run(tmp_path, metrics=dict.fromkeys(names, 0.5))
    assert compare(tmp_path).metrics == ["test/length/64/accuracy", "test/length/256/accuracy", "test/load/64/accuracy"]


def test_the_json_is_strict_and_has_the_stable_keys(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, variant="full", seed=seed, metrics={ACCURACY: 0.9})
        write_run(tmp_path, variant="gqa", seed=seed, metrics={ACCURACY: 0.7})
    document = json.loads(json.dumps(compare(tmp_path).to_dict(), allow_nan=False))
    stable = {"by", "metric", "n", "mean", "low", "high", "difference", "difference_low", "difference_high", "p", "verdict"}
    assert all(stable <= set(row) for row in document["groups"])
    assert [(row["by"], row["mean"]) for row in document["groups"]] == [
        ({"variant": "full"}, 0.9),
        ({"variant": "gqa"}, pytest.approx(0.7)),
    ]
    assert document["left_out"]["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "variant.nam"}, "'variant.nam'.*Did you mean 'variant.name'"),
        ({"metric": "test/length/32/acuracy"}, "Did you mean 'test/length/32/accuracy'"),
        ({"baseline": "variant=ful"}, "no group is like the baseline variant=ful.*full"),
        ({"baseline": "optimiser.lr=1"}, "Did you mean 'optimizer.lr'"),
    ],
)
def test_a_word_that_the_study_does_not_know_is_answered_with_the_nearest(tmp_path: Path, arguments: dict[str, str], message: str) -> None:
    write_run(tmp_path, metrics={ACCURACY: 0.5})
    with pytest.raises(UserError, match=message):
        compare(tmp_path, **arguments)


def test_a_baseline_that_fits_several_groups_is_refused(tmp_path: Path) -> None:
    for window in (8, 16):
        write_run(tmp_path, variant={"name": "sliding_window", "window": window}, metrics={ACCURACY: 0.5})
    with pytest.raises(UserError, match=r"several groups.*window=8; sliding_window window=16"):
        compare(tmp_path, baseline="variant.name=sliding_window")
    assert compare(tmp_path, baseline="sliding_window window=16").groups[0].by == {"variant": "sliding_window window=16"}


def test_a_study_in_which_nothing_began_says_so(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"runs": {"abc": {"overrides": ["seed=0"]}}}))
    with pytest.raises(UserError, match=r"no run that began \(1 planned\)"):
        compare(tmp_path)


def test_a_study_without_a_finished_run_still_counts_what_became_of_them(tmp_path: Path) -> None:
    write_run(tmp_path, status="failed", reason="boom")
    found = compare(tmp_path)
    assert (found.metrics, found.left_out["failed"], found.averages_over) == ([], 1, "n = 0 seeds")
