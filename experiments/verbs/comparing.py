"""`attnlab compare` and `attnlab report`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.compare import tables
from experiments.compare.compare import compare as compare_study
from experiments.compare.report import write_report
from experiments.sweep.study import comparison
from registry import UserError, nearest

FORMATS = ("text", "csv", "latex")


def compare(
    directory: Path,
    by: str | None = None,
    metric: str | None = None,
    baseline: str | None = None,
    table: str = "text",
    report: Callable[[Any], None] | None = None,
) -> None:
    """Show the groups of a study, as a table or as JSON."""
    if table not in FORMATS:
        raise UserError(f"--format cannot be {table!r}.{nearest(table, FORMATS)}")
    found = compare_study(directory, **comparison(directory, by=by, metric=metric, baseline=baseline))
    if report is not None:
        report(found.to_dict())
    elif table == "text":
        tables.show(found)
    else:
        print(tables.to_csv(found) if table == "csv" else tables.to_latex(found), end="")


def report(
    directory: Path, output: Path | None = None, by: str | None = None, metric: str | None = None, baseline: str | None = None
) -> None:
    """Write the page and say where it is."""
    asked = comparison(directory, by=by, metric=metric, baseline=baseline)
    print(f"report: {write_report(directory, output or directory / 'report.html', **asked)}")
