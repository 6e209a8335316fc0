"""Accuracy by what the evaluation tells of a sequence or of a scored token: a slice for each evaluation set, a grid of depth and length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from experiments.compare.groups import Group, trained_length
from experiments.compare.keys import spell
from experiments.runs import read

#: Up to so many different values of a fact have a place each on a chart; more are binned.
DISTINCT = 12
#: The fact that makes a grid with the length: where in the sequence the answer stands, from 0 to 1.
DEPTH = "depth"


class Row(NamedTuple):
    """How many scored tokens one run has on one evaluation set for one value of a fact, and how many of them right."""

    run_id: str
    axis: str
    length: int
    fact: Any
    hits: float
    scored: float


def facts(study_dir: Path | str) -> dict[str, list[Row]]:
    """The rows of every fact that the evaluation holds of a sequence or, as a list, of each scored token."""
    columns = read.evaluations(study_dir, "SELECT column_name, column_type FROM (DESCRIBE evaluation)").to_pylist()
    found = {}
    for column in columns:
        name, kind = column["column_name"], column["column_type"]
        if name in read.EVALUATION_COLUMNS or kind.endswith("[][]") or kind.startswith(("STRUCT", "MAP")):
            continue
        quoted = '"' + name.replace('"', '""') + '"'
        shown = f"{quoted} AS fact, tokens_correct AS hits, tokens_scored AS scored"
        if kind.endswith("[]"):
            shown = f"unnest({quoted}) AS fact, unnest(token_correct)::INTEGER AS hits, 1 AS scored"
        rows = read.evaluations(
            study_dir,
            f"""SELECT run_id, axis, length, fact, sum(hits)::DOUBLE AS hits, sum(scored)::DOUBLE AS scored
                FROM (SELECT run_id, axis, length, {shown} FROM evaluation WHERE split = 'test')
                WHERE fact IS NOT NULL AND hits IS NOT NULL GROUP BY ALL""",
        ).to_pylist()
        found[name] = [Row(**row) for row in rows]
    return found


def slices(found: Mapping[str, Sequence[Row]], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For each fact and evaluation set: bins, and for each group its accuracy in each."""
    cut = []
    for name, rows in found.items():
        for axis, length in sorted({(row.axis, row.length) for row in rows}, key=lambda place: (place[0] != "length", *place)):
            here = [row for row in rows if (row.axis, row.length) == (axis, length)]
            place, names = _places(here)
            cut.append({"name": name, "axis": axis, "length": length, "bins": names, "groups": _accuracies(here, groups, place, names)})
    return cut


def depth_grid(found: Mapping[str, Sequence[Row]], groups: Sequence[Group]) -> dict[str, Any] | None:
    """Depths by lengths: for each group a row a bin of the depth, shared by all lengths, and in it a cell a length.

    A cell is as in a slice. None where no depth is told, or what is told under that name are no shares.
    """
    rows = [row for row in found.get(DEPTH, ()) if row.axis == "length"]
    if not rows or not all(isinstance(row.fact, int | float) and 0 <= row.fact <= 1 for row in rows):
        return None
    place, names = _places(rows)
    lengths = sorted({row.length for row in rows})
    columns = [_accuracies([row for row in rows if row.length == length], groups, place, names) for length in lengths]
    panels = []
    for i, group in enumerate(groups):
        trained = {length for run in group.runs if (length := trained_length(run)) is not None}
        panels.append(
            {"trained": sorted(trained), "cells": [list(cells) for cells in zip(*(column[i] for column in columns), strict=True)]}
        )
    return {"bins": names, "lengths": lengths, "groups": panels}


def bins(values: Sequence[Any]) -> Callable[[Any], str]:
    """What to call the bin of a fact, given all there are in order: itself; of many, tenths of [0, 1] or powers of two."""
    numbers = all(isinstance(fact, int | float) for fact in values)
    if not numbers or len(values) <= DISTINCT:
        return _spell
    if values[0] >= 0 and values[-1] <= 1:
        return lambda fact: f"≤ {max(1, math.ceil(round(fact * 10, 9))) / 10}"
    return lambda fact: f"≤ {2 ** math.ceil(math.log2(max(1, fact)))}"


def _spell(fact: Any) -> str:
    """A share such as 3/7 has more digits than a label has room for."""
    return f"{fact:.4g}" if isinstance(fact, float) and not fact.is_integer() else spell(fact)


def _places(rows: Sequence[Row]) -> tuple[Callable[[Any], str], list[str]]:
    """The bin of each fact of these rows, and the bins in order."""
    values = sorted({row.fact for row in rows})
    place = bins(values)
    return place, list(dict.fromkeys(map(place, values)))


def _accuracies(
    rows: Sequence[Row], groups: Sequence[Group], place: Callable[[Any], str], names: Sequence[str]
) -> list[list[dict[str, float] | None]]:
    """For each group its accuracy in each bin: mean, least and greatest over its finished runs; None where they scored nothing there."""
    counts: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        count = counts.setdefault((row.run_id, place(row.fact)), [0.0, 0.0])
        count[0] += row.hits
        count[1] += row.scored
    accuracies = []
    for group in groups:
        by_bin: list[dict[str, float] | None] = []
        for name in names:
            found = [counts[run.run_id, name] for run in group.finished if (run.run_id, name) in counts]
            values = [hits / scored for hits, scored in found if scored]
            by_bin.append({"mean": fmean(values), "low": min(values), "high": max(values)} if values else None)
        accuracies.append(by_bin)
    return accuracies
