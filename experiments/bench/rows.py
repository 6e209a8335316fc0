"""What was measured as rows of one stable form, as exponents, and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.bench.candidate import Point, Timing
from variants.conformance.costs import growth, power


def rows(timings: Sequence[Timing], limits: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a timing. ratio: how many times as fast as the baseline of its group; None where that was not timed."""
    medians = {(t.group, t.candidate, t.mode, t.length): statistics.median(t.seconds) for t in timings}
    found = []
    for timing in timings:
        baseline = medians.get((timing.group, timing.baseline, timing.mode, timing.length))
        made = row(timing, limits)
        found.append({**made, "group": timing.group, "baseline": timing.baseline, "ratio": baseline and baseline / made["seconds"]})
    return found


def row(timing: Timing, limits: dict[str, Any]) -> dict[str, Any]:
    """seconds: median of a call; spread: interquartile range; share_of_limit: least time for its products over time taken."""
    seconds = statistics.median(timing.seconds)
    quartiles = statistics.quantiles(timing.seconds, n=4, method="inclusive") if len(timing.seconds) > 1 else [seconds] * 3
    return {
        "candidate": timing.candidate,
        "peer": timing.peer,
        "mode": timing.mode,
        "level": timing.level,
        "length": timing.length,
        "seconds": seconds,
        "spread": quartiles[2] - quartiles[0],
        "tokens_per_second": timing.tokens / seconds,
        "share_of_limit": timing.flops / limits["matmul_flops"] / seconds,
        "peak_bytes": timing.peak_bytes,
        "state_bytes": timing.state_bytes,
        "read_bytes": timing.read_bytes,
    }


def growths(timings: Iterable[Timing]) -> Iterator[Point]:
    """Time and memory of each timing, to be fitted over the lengths."""
    for timing in timings:
        where = timing.level, timing.group, timing.candidate, timing.mode
        yield Point(*where, "seconds", timing.length, statistics.median(timing.seconds))
        yield Point(*where, "peak_bytes", timing.length, timing.peak_bytes)


def exponents(points: Iterable[Any]) -> list[dict[str, Any]]:
    """quantity ~ length^exponent, for whatever was measured at two lengths or more. r2: share of the variance explained."""
    series: dict[tuple[str, ...], dict[int, float]] = {}
    for point in points:
        if isinstance(point, Point) and point.value > 0:
            series.setdefault(point[:5], {})[point.length] = point.value
    found = []
    for (level, group, candidate, mode, quantity), values in series.items():
        if len(values) > 1:
            fit = growth(list(values), list(values.values()))
            found.append(
                {
                    "candidate": candidate,
                    "mode": mode,
                    "quantity": quantity,
                    "exponent": fit.exponent,
                    "r2": fit.fit,
                    "lengths": list(values),
                    "values": list(values.values()),
                    "level": level,
                    "group": group,
                }
            )
    return found


def show(document: dict[str, Any]) -> None:
    """A table for each group and mode, the exponents, and the limits of the machine."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe is as wide as the tables are
        console = Console(highlight=False, width=140)
    order = list(dict.fromkeys((entry["group"], entry["mode"]) for entry in document["rows"]))
    for group, mode in order:
        console.print(_timings(group, mode, [e for e in document["rows"] if (e["group"], e["mode"]) == (group, mode)]), "")
    if document["exponents"]:
        console.print(_growths(document["exponents"]), "")
    limits = document["machine"]
    console.print(f"{limits['threads']} threads, {limits['matmul_flops'] / 1e9:.0f} GFLOP/s, copy {limits['copy_bytes'] / 1e9:.1f} GB/s")


def _timings(group: str, mode: str, entries: Sequence[dict[str, Any]]) -> Table:
    """Rows of one group and mode, each with its ratio to the baseline."""
    held = [name for name in ("state", "read") if any(entry[f"{name}_bytes"] for entry in entries)]
    columns = ["candidate", "length", "ms", "spread", "tokens/s", "of limit", "MB", f"x {entries[0]['baseline']}"]
    table = _table(f"{group}, {mode}", [*columns[:-1], *(f"{name} kB" for name in held), columns[-1]])
    for entry in entries:
        table.add_row(
            Text(entry["candidate"], "dim" if entry["peer"] else ""),
            f"{entry['length']:,}",
            _figures(1e3 * entry["seconds"]),
            _figures(1e3 * entry["spread"]),
            f"{entry['tokens_per_second']:,.0f}",
            f"{entry['share_of_limit']:.0%}",
            _figures(entry["peak_bytes"] / 1e6),
            *(f"{entry[f'{name}_bytes'] / 1e3:,.0f}" for name in held),
            f"{entry['ratio']:.2f}" if entry["ratio"] else "",
        )
    return table


def _growths(entries: Sequence[dict[str, Any]]) -> Table:
    """Exponents, with what was measured at the longest length."""
    table = _table("growth over the length", ("group", "mode", "candidate", "quantity", "exponent", "R^2", "lengths", "at the longest"))
    for entry in entries:
        factor, unit = (1e-6, "MB") if entry["quantity"] == "peak_bytes" else (1e3, "ms")
        table.add_row(
            *(Text(entry[name]) for name in ("group", "mode", "candidate", "quantity")),
            power(entry["exponent"]),
            f"{entry['r2']:.3f}",
            f"{entry['lengths'][0]:,} to {entry['lengths'][-1]:,}",
            f"{_figures(factor * entry['values'][-1])} {unit}",
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("candidate", "group", "mode", "quantity") else "right", overflow="fold")
    return table


def _figures(value: float) -> str:
    """Three figures, whatever the size."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
