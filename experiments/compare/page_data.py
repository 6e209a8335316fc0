"""What the comparison page shows, gathered and averaged: the groups of a comparison, their curves and slices, and every run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.compare.compare import compare_runs
from experiments.compare.groups import TEST, Comparison, Group
from experiments.compare.keys import Keys, label, same_axis, spell
from experiments.compare.statistics import LEVEL
from experiments.compare.tables import differences_caption, results_caption, telling, title, to_csv, to_latex
from experiments.runs import read

#: Up to so many different values of a fact have a place each on a chart; more are binned.
DISTINCT = 12


def page_data(
    study_dir: Path | str,
    by: str | Iterable[str] | None = None,
    metric: str | Iterable[str] | None = None,
    baseline: str | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that the page shows, as strict JSON."""
    runs = read.runs(study_dir)
    comparison = compare_runs(Path(study_dir).resolve().name, runs, by, metric, baseline)
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
        "trained": sorted({length for run in runs if isinstance(length := run.settings.get("task.length"), int)}),
        "groups": [_group(group, comparison.groups) for group in comparison.groups],
        "curves": _curves(study_dir, comparison.groups),
        "slices": _slices(study_dir, comparison.groups),
        "runs": _run_list(runs, comparison),
        "not_applicable": [{"overrides": overrides, "reason": reason} for overrides, reason in read.not_applicable(study_dir)],
        "csv": to_csv(comparison),
        "latex": to_latex(comparison),
    }


def _metric(name: str) -> dict[str, Any]:
    match = TEST.fullmatch(name)
    place = {"axis": match["axis"], "length": int(match["length"]), "measure": match["measure"]} if match else {}
    return {"name": name, "title": title(name), **place}


def _group(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    return {
        "label": group.label,
        "by": {key: spell(value) for key, value in group.by.items()},
        "compared_with": next((i for i, other in enumerate(groups) if other.by == group.compared_with), None),
        "runs": len(group.runs),
        "finished": len(group.finished),
        "left_out": {status: count for status, count in group.left_out.items() if count},
        "cells": {metric: {**asdict(cell), "told": telling(cell)} for metric, cell in group.cells.items()},
        "solved": group.solved and group.solved._asdict(),
        "steps_to_solve": group.steps_to_solve,
        "costs": dict(group.costs),
        "state_bytes": {name.removeprefix("state_bytes."): v for name, v in group.costs.items() if name.startswith("state_bytes.")},
    }


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
            finished = [curve for run, curve in singles if run.status == "finished"]
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
                    "name": f"seed {spell(run.config.get('seed'))}" + (f" ({run.status})" if run.status != "finished" else ""),
                    "steps": list(curve),
                    "tokens": [tokens for tokens, _, _ in curve.values()],
                    "seconds": [_short(seconds) for _, seconds, _ in curve.values()],
                    "values": [_short(value) for _, _, value in curve.values()],
                }
                for run, curve in singles
            ]
            found.append({"group": index, "name": name, "n": len(finished), "mean": mean, "runs": single})
    return found


def _slices(study_dir: Path | str, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Accuracy by every fact that the evaluation holds of a sequence or of a scored token, for each evaluation set."""
    columns = read.evaluations(study_dir, "SELECT column_name, column_type FROM (DESCRIBE evaluation)").to_pylist()
    slices = []
    for column in columns:
        name, kind = column["column_name"], column["column_type"]
        if name in read.EVALUATION_COLUMNS or kind.endswith("[][]") or kind.startswith(("STRUCT", "MAP")):
            continue
        quoted = '"' + name.replace('"', '""') + '"'
        facts = f"{quoted} AS fact, tokens_correct AS hits, tokens_scored AS scored"
        if kind.endswith("[]"):
            facts = f"unnest({quoted}) AS fact, unnest(token_correct)::INTEGER AS hits, 1 AS scored"
        rows = read.evaluations(
            study_dir,
            f"""SELECT run_id, axis, length, fact, sum(hits)::DOUBLE AS hits, sum(scored)::DOUBLE AS scored
                FROM (SELECT run_id, axis, length, {facts} FROM evaluation WHERE split = 'test')
                WHERE fact IS NOT NULL AND hits IS NOT NULL GROUP BY ALL""",
        ).to_pylist()
        for axis, length in sorted({(row["axis"], row["length"]) for row in rows}, key=lambda place: (place[0] != "length", *place)):
            here = [row for row in rows if (row["axis"], row["length"]) == (axis, length)]
            slices.append({"name": name, "axis": axis, "length": length, **_binned(here, groups)})
    return slices


def _binned(rows: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> dict[str, Any]:
    """Bins of a fact, and for each group its accuracy in each: mean, least and greatest over its finished runs."""
    place = bins(sorted({row["fact"] for row in rows}))
    counts: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        count = counts.setdefault((row["run_id"], place(row["fact"])), [0.0, 0.0])
        count[0] += row["hits"]
        count[1] += row["scored"]
    names = list(dict.fromkeys(place(fact) for fact in sorted({row["fact"] for row in rows})))
    accuracies = []
    for group in groups:
        by_bin = []
        for name in names:
            found = [counts[run.run_id, name] for run in group.finished if (run.run_id, name) in counts]
            values = [hits / scored for hits, scored in found if scored]
            by_bin.append({"mean": fmean(values), "low": min(values), "high": max(values)} if values else None)
        accuracies.append(by_bin)
    return {"bins": names, "groups": accuracies}


def bins(facts: Sequence[Any]) -> Callable[[Any], str]:
    """What to call the bin of a fact, given all there are in order: itself; of many, tenths of [0, 1] or powers of two."""
    numbers = all(isinstance(fact, int | float) for fact in facts)
    if not numbers or len(facts) <= DISTINCT:
        return spell
    if facts[0] >= 0 and facts[-1] <= 1:
        return lambda fact: f"≤ {max(1, math.ceil(round(fact * 10, 9))) / 10}"
    return lambda fact: f"≤ {2 ** math.ceil(math.log2(max(1, fact)))}"


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
                "status": run.status,
                "reason": run.reason,
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
