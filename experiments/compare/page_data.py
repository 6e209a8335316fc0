"""What the comparison page shows, gathered and averaged: the groups of a comparison, their curves, slices and spectra, and every run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.compare.compare import compare_runs, test_metrics
from experiments.compare.gate import gate_words
from experiments.compare.groups import BELOW_GATE, TEST, Comparison, Group, outcome, trained_length
from experiments.compare.keys import Keys, label, same_axis, spell
from experiments.compare.measures import measure
from experiments.compare.selection import selections
from experiments.compare.slices import depth_grid, facts, slices
from experiments.compare.spectra import spectra
from experiments.compare.statistics import LEVEL
from experiments.compare.tables import differences_caption, results_caption, telling, title, to_csv, to_latex
from experiments.runs import read

#: What can be drawn against the length, whatever is compared.
CHARTED = ("accuracy", "perplexity")


def page_data(
    study_dir: Path | str,
    by: str | Iterable[str] | None = None,
    metric: str | Iterable[str] | None = None,
    baseline: str | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that the page shows, as strict JSON."""
    runs = read.runs(study_dir)
    comparison = compare_runs(Path(study_dir).resolve().name, runs, by, metric, baseline)
    charted = [name for of in CHARTED for name in test_metrics(runs, of)]
    drawn = compare_runs(comparison.study, runs, comparison.by, charted or None, comparison.baseline)
    found = facts(study_dir)
    return {
        "study": comparison.study,
        "made": datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
        "by": comparison.by,
        "baseline": label(comparison.baseline),
        "averages_over": comparison.averages_over,
        "captions": {"results": results_caption(comparison), "differences": differences_caption(comparison)},
        "level": LEVEL,
        "finished": comparison.finished,
        "left_out": {status: count for status, count in comparison.left_out.items() if count},
        "metrics": [_metric(name) for name in comparison.metrics],
        "charted": [_metric(name) for name in charted],
        "trained": sorted({length for run in runs if (length := trained_length(run)) is not None}),
        "groups": [
            {**_group(group, comparison.groups), "cells": _cells(more) | _cells(group)}
            for group, more in zip(comparison.groups, drawn.groups, strict=True)
        ],
        "curves": _curves(study_dir, comparison.groups),
        "slices": slices(found, comparison.groups),
        "grid": depth_grid(found, comparison.groups),
        "spectra": spectra(comparison.groups),
        "selections": selections(study_dir, comparison.groups),
        "runs": _run_list(runs, comparison),
        "not_applicable": [{"overrides": overrides, "reason": reason} for overrides, reason in read.not_applicable(study_dir)],
        "csv": to_csv(comparison),
        "latex": to_latex(comparison),
    }


def _metric(name: str) -> dict[str, Any]:
    match = TEST.fullmatch(name)
    place = {"axis": match["axis"], "length": int(match["length"]), "measure": match["measure"]} if match else {}
    kind = measure(name)
    return {"name": name, "title": title(name), "better": kind.better, "ratio": kind.ratio, **place}


def _group(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    return {
        "label": group.label,
        "by": {key: spell(value) for key, value in group.by.items()},
        "compared_with": next((i for i, other in enumerate(groups) if other.by == group.compared_with), None),
        "runs": len(group.runs),
        "finished": len(group.finished),
        "left_out": {status: count for status, count in group.left_out.items() if count},
        "solved": group.solved and group.solved._asdict(),
        "steps_to_solve": group.steps_to_solve,
        "costs": dict(group.costs),
    }


def _cells(group: Group) -> dict[str, Any]:
    return {metric: {**asdict(cell), "told": telling(cell)} for metric, cell in group.cells.items()}


def _curves(study_dir: Path | str, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For each group and logged name: every run's curve, and the mean, least and greatest over the finished runs.

    The mean is taken at the steps that all of them have: where one has stopped, a mean over the rest would jump.
    """
    curves: dict[tuple[str, str], dict[int, tuple[int | None, float | None, float]]] = {}
    for row in read.metrics(study_dir).to_pylist():
        curves.setdefault((row["run_id"], row["name"]), {})[row["step"]] = (row["tokens"], row["seconds"], row["value"])
    found = []
    for index, group in enumerate(groups):
        for name in sorted({name for run in group.runs for run_id, name in curves if run_id == run.run_id}):
            singles = [(run, curves[run.run_id, name]) for run in group.runs if (run.run_id, name) in curves]
            finished = [curve for run, curve in singles if outcome(run) == "finished"]
            steps = sorted(set.intersection(*map(set, finished))) if finished else []
            at = [[curve[step] for curve in finished] for step in steps]
            mean = {
                "steps": steps,
                "tokens": [_mean([tokens for tokens, _, _ in points]) for points in at],
                "seconds": [_mean([seconds for _, seconds, _ in points]) for points in at],
                "values": [_mean([value for _, _, value in points]) for points in at],
                "low": [_short(min(value for _, _, value in points)) for points in at],
                "high": [_short(max(value for _, _, value in points)) for points in at],
            }
            single = [
                {
                    "name": f"seed {spell(run.config.get('seed'))}" + (f" ({outcome(run)})" if outcome(run) != "finished" else ""),
                    "steps": list(curve),
                    "tokens": [tokens for tokens, _, _ in curve.values()],
                    "seconds": [_short(seconds) for _, seconds, _ in curve.values()],
                    "values": [_short(value) for _, _, value in curve.values()],
                }
                for run, curve in singles
            ]
            found.append({"group": index, "name": name, "n": len(finished), "mean": mean, "runs": single})
    return found


def _run_list(runs: Sequence[read.Run], comparison: Comparison) -> list[dict[str, Any]]:
    group_of = {run.run_id: index for index, group in enumerate(comparison.groups) for run in group.runs}
    keys = Keys([run for run in runs if run.config])
    told = [key for key in comparison.by if "." not in key]
    differing = [key for key in keys.differing() if key not in comparison.by and not (key.endswith(".name") and same_axis(key, told))]
    rows = []
    for run in runs:
        values = {key: keys.value(run, key) for key in differing} if run.config else {}
        rows.append(
            {
                "run_id": run.run_id,
                "group": group_of.get(run.run_id),
                "seed": spell(run.config.get("seed")),
                "status": outcome(run),
                "reason": gate_words([run]) if outcome(run) == BELOW_GATE else run.reason,
                "differs": ", ".join(f"{key}={spell(value)}" for key, value in values.items() if value is not None),
                "steps": run.result.get("counts", {}).get("steps"),
                "seconds": run.result.get("costs", {}).get("seconds"),
                "stopped": run.result.get("stopped"),
            }
        )
    return sorted(rows, key=lambda row: (row["group"] is None, row["group"], row["seed"]))


def _mean(values: Sequence[int | float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _short(fmean(known)) if known else None


def _short(value: int | float | None) -> float | None:
    """Six digits are more than a curve shows, and keep the file small."""
    return None if value is None else float(f"{value:.6g}")
